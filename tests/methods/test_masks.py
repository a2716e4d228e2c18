"""Masks stand where gates do, are trained beside the model, and leave no trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lpfs
from lpfs.errors import InputError
from lpfs.gates.hooks import hooks_on
from lpfs.methods.masks import NAME, TokenMask, apply_mask, observe_masked_model
from lpfs.methods.search import search
from lpfs.models import make_model
from lpfs.train.config import Training
from tests.helpers.clicks import CASES, MIXED, Case, batch_of, some_gates, whole_numbers
from tests.helpers.known_truth import SMALL
from tests.helpers.searches import FixedMask, short_search


class FixedTokens(TokenMask):
    def __init__(self, names, values):
        super().__init__(names, 1, 0)
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, tokens, numbers, ids):
        return tokens * self.values[numbers][:, None].to(tokens.dtype)


# the raw values of a field reach its crosses too, so that there is no such test for crosses
@pytest.mark.parametrize("case", [case for case in CASES if case.name != "dlrm_cross"], ids=str)
def test_a_field_that_is_masked_to_zero_does_not_reach_the_logits(case):
    """Wide weights, first-order terms and dot products too; the rest is as it is under the same gates."""
    model, batch = case.make(MIXED), batch_of(MIXED)
    names = tuple(model.sites())
    plain = model(batch)
    with apply_mask(model, FixedMask(names, [1.0] * len(names)), "x"):
        assert torch.equal(model(batch), plain)
    values = some_gates(len(names))
    for kind in (FixedMask, FixedTokens):
        with apply_mask(model, kind(names, values), "x"):
            masked = model(batch)
            for name, value in zip(names, values, strict=True):
                moved = model(model.inputs_of_fields()[name](batch))
                assert value != 0 or torch.equal(moved, masked)
        assert not torch.equal(masked, plain)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_kinds_of_mask_apply_at_the_same_sites(case):
    model, batch = whole_numbers(case.make(MIXED)), batch_of(MIXED, whole=True)
    names = tuple(model.sites())
    found, grads = [], []
    for kind in (FixedMask, FixedTokens):
        mask = kind(names, some_gates(len(names)))
        with apply_mask(model, mask, "x"):
            found.append(model(batch))
            found[-1].sum().backward()
        grads.append(mask.values.grad)
    assert torch.equal(*found)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=0.0)  # numbers beyond 2^24 are not exact in any order
    assert bool((grads[0] != 0).any())


@pytest.mark.parametrize("name", ["mlp", "wide_deep", "dlrm_cross", "user_item"])
def test_silent_parts_have_no_mask(name):
    every = list(Case(name).make(MIXED).sites())
    model = Case(name).make(MIXED, silent=every[:1])
    names = tuple(model.sites())
    assert names == tuple(every[1:])
    found = []
    for kind in (FixedMask, FixedTokens):
        with apply_mask(model, kind(names, some_gates(len(names))), "x"):
            found.append(model(batch_of(model.reads)))
    assert torch.allclose(*found)


def test_observers_get_the_masked_model_before_the_mask_is_removed():
    model, batch = Case("mlp").make(MIXED), batch_of(MIXED)
    names, seen = tuple(model.sites()), []
    with observe_masked_model(lambda found: seen.append(found(batch))):
        with apply_mask(model, FixedMask(names, some_gates(len(names))), "x"):
            masked = model(batch)
            assert seen == []
        with pytest.raises(ZeroDivisionError), apply_mask(model, FixedMask(names, [1.0] * len(names)), "x"):
            _ = 1 / 0  # a search that failed is not run_search at
    with apply_mask(model, FixedMask(names, [1.0] * len(names)), "x"):
        pass  # nobody looks any more
    assert len(seen) == 1
    assert torch.equal(seen[0], masked)
    assert not torch.equal(seen[0], model(batch))


def test_a_mask_is_computed_once_per_forward():
    model = Case("user_item").make(MIXED)  # reads its fields in three places
    mask = FixedMask(tuple(model.sites()), [1.0] * len(model.sites()))
    with apply_mask(model, mask, "x"):
        model(batch_of(MIXED))
    assert mask.calls == 1


@pytest.mark.parametrize("kind", [FixedMask, FixedTokens])
def test_a_mask_is_removed_after_an_error(kind):
    model = Case("wide_deep").make(MIXED)
    before = model(batch_of(MIXED))
    names = tuple(model.sites())
    with pytest.raises(ZeroDivisionError), apply_mask(model, kind(names, [0.5] * len(names)), "x"):
        raise ZeroDivisionError
    assert not hasattr(model, NAME)
    assert not any(hooks_on(module) or module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model(batch_of(MIXED)), before)


@pytest.mark.parametrize(
    ("method", "name", "message"),
    [
        ("adafs", "user_item", "adafs .*UserItem .*inputs"),
        ("cold_se", "user_item", "cold_se .*UserItem"),
        ("adafs", "dlrm_cross", "adafs .*DLRMCross"),
        ("cold_se", "dlrm_cross", "cold_se .*DLRMCross"),
        ("optfs", "dlrm_cross", "optfs .*DLRMCross"),
    ],
)
def test_models_on_which_a_method_is_not_defined(log, method, name, message):
    with pytest.raises(InputError, match=message):
        short_search(log, name, method)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        *((method, name) for method in ("shufflegate", "autofield", "stg") for name in ("user_item", "dlrm_cross")),
        ("optfs", "user_item"),
        ("optfs", "dlrm"),
        ("adafs", "deepfm"),
        ("cold_se", "wide_deep"),
    ],
)
def test_models_on_which_a_method_is_defined(log, method, name):
    model, found = short_search(log, name, method)
    assert set(found.made["scores"]) == set(model.sites())
    assert len(found.kept) == 2


def test_searches_that_no_mask_supports(log):
    with pytest.raises(InputError, match="stg needs a model of lpfs.models, found Linear"):
        search(nn.Linear(2, 1), log.stream(64), "stg", keep=1, steps=5)
    with pytest.raises(InputError, match="graph=True needs a GPU"):
        short_search(log, "mlp", "fscd", config=Training(quiet=True, graph=True))
    for method in ("autofield", "shufflegate"):
        with pytest.raises(InputError, match=f"{method} .*give valid="):
            short_search(log, "mlp", method, valid=None)
    model = make_model("mlp", log.schema, **SMALL)
    lpfs.attach(model, steps=100)
    with pytest.raises(InputError, match="optfs .*has gates; detach"):
        search(model, log.stream(64), "optfs", keep=1, steps=5)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("stg", {"sigma": 0}, "sigma must be a number > 0, found 0"),
        ("stg", {"strength": -1}, "strength must be a number >= 0"),
        ("fscd", {"start": 1.0}, "start must be a number between 0 and 1, found 1.0"),
        ("autofield", {"every": 0}, "every must be an integer >= 1, found 0"),
        ("autofield", {"lr": True}, "lr must be a number > 0"),
        ("hard_concrete", {"low": 0.1}, "low must be below 0 and high above 1"),
        ("hard_concrete", {"high": 0.9}, "low must be below 0 and high above 1"),
        ("adafs", {"hard": 1}, "hard must be true or false"),
        ("optfs", {"strength": -1.0}, "strength must be a number >= 0"),
        ("cold_se", {"lr": float("nan")}, "lr must be a number > 0"),
        ("shufflegate", {"sharpnes": 1}, "unknown key 'sharpnes'"),
    ],
)
def test_invalid_options(log, method, options, message):
    with pytest.raises(InputError, match=message):
        short_search(log, "mlp", method, **options)
