"""The first layer: whose columns are whose, and which models have none that all fields go through."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lpfs.errors import InputError
from lpfs.methods.group_sparsity import first_layer
from tests.helpers.clicks import CASES, MIXED, NUMBERS, Case, batch_of

FINE = ("mlp", "dlrm", "dlrm_cross")


def case_named(name):
    return next(case for case in CASES if str(case) == name)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in FINE and "dot" not in str(case)], ids=str)
def test_a_part_reaches_the_logits_only_through_its_block(case):
    model = case.make(MIXED)
    layer = first_layer(model, "this")
    batch = batch_of(MIXED)
    others = model.inputs_of_fields()
    for number, name in enumerate(layer.names):
        weight = layer.weight.detach().clone()
        layer.multiply(torch.tensor([float(value != number) for value in range(len(layer.names))]))
        with torch.no_grad():
            assert torch.equal(model(batch), model(others[name](batch)))
            layer.weight.copy_(weight)
            assert not torch.equal(model(batch), model(others[name](batch)))


def test_energies_are_sums_of_squares_of_columns():
    model = Case("mlp").make(MIXED)
    layer = first_layer(model, "this")
    blocks = layer.weight.detach().split(4, 1)
    assert layer.energies().tolist() == pytest.approx([float(block.square().sum()) for block in blocks])
    assert layer.widths.tolist() == [4.0] * 9
    assert layer.columns().tolist() == [list(range(4 * n, 4 * n + 4)) for n in range(9)]
    assert layer.path == "top.0"


def test_columns_of_silent_parts_are_unchanged():
    model = Case("mlp").make(MIXED, silent=("..", "n2"))
    layer = first_layer(model, "this")
    before = layer.weight.detach().clone()
    layer.multiply(torch.zeros(7))
    silent = [number for number, name in enumerate(model.slots()) if name in model.silent]
    assert "n2" not in layer.names
    for number, block in enumerate(layer.weight.detach().split(4, 1)):
        assert torch.equal(block, before[:, 4 * number : 4 * number + 4] if number in silent else block * 0)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("wide_deep", "in WideDeep fields have linear weights beside it"),
        ("deepfm", "in DeepFM fields have linear weights beside it"),
        ("fm", "in FM fields have linear weights beside it"),
        ("dlrm-dot", r"products of fields such as \("),
        ("user_item", r"products of fields such as \("),
        ("dcnv2", "in DCNv2 fields enter through top.0.weight, crosses.0.weight"),
        ("dcnv2-parallel", "beside.weight"),
    ],
)
def test_models_that_are_refused(case, reason):
    model = case_named(case).make(MIXED)
    with pytest.raises(InputError, match=f"^this .*{reason}.*Choose mlp"):
        first_layer(model, "this")


def test_other_models_are_refused():
    with pytest.raises(InputError, match="this needs a model of lpfs.models, found Linear"):
        first_layer(nn.Linear(2, 1), "this")


def test_a_model_of_numbers_has_one_part():
    assert first_layer(Case("dlrm").make(NUMBERS), "this").names == ("dense",)


def test_scales_are_the_spread_of_the_embeddings_around_their_mean():
    model = Case("mlp").make(MIXED)
    layer = first_layer(model, "this")
    batches = [batch_of(MIXED), batch_of(MIXED)]
    with torch.no_grad():
        embeddings = torch.cat([model.inputs(batch) for batch in batches])  # (B, N, D)
        expected = (embeddings - embeddings.mean(0)).square().mean((0, 2)).sqrt()
        torch.testing.assert_close(layer.scales(model, batches), expected, rtol=1e-4, atol=1e-6)
        ids = model.inputs.ids
        model.inputs.table.weight[: sum(model.inputs.table.sizes[:ids])] += 5.0  # a constant carries no information
        torch.testing.assert_close(layer.scales(model, batches)[:ids], expected[:ids], rtol=1e-3, atol=1e-4)
    assert not model.top[0]._forward_pre_hooks


def test_the_score_does_not_depend_on_where_the_scale_is(pretrained):
    """A table divided by 8 and columns multiplied by 8 are the same model; the norm of the columns is not."""
    plain = pretrained("mlp")[0]
    scaled = pretrained("mlp")[0]
    layer = first_layer(scaled, "group_lasso")
    part = scaled.inputs.names.index("slot")
    first = sum(scaled.inputs.table.sizes[:part])
    with torch.no_grad():
        scaled.inputs.table.weight[first : first + scaled.inputs.table.sizes[part]] /= 8
    name = scaled.inputs.names[part]
    layer.multiply(torch.tensor([8.0 if other == name else 1.0 for other in layer.names]))
    norms = []
    for model in (plain, scaled):
        own = first_layer(model, "group_lasso")
        rows = [batch_of(model.schema)]
        norms.append(own.energies().sqrt() * own.scales(model, rows))
    torch.testing.assert_close(*norms, rtol=1e-4, atol=1e-6)
