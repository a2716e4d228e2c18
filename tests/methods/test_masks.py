"""Masks stand where gates do, are trained beside the model, and leave no trace."""

from __future__ import annotations

import pytest
import torch
from clicks import CASES, MIXED, Case, batch_of, some_gates, whole_numbers
from known_truth import SMALL
from torch import nn

import lpfs
from lpfs.embeddings.row_grad import row_parameters
from lpfs.errors import InputError
from lpfs.gates.hooks import hooks_of
from lpfs.methods.effort import Effort
from lpfs.methods.held import Held
from lpfs.methods.learn import Learn, alone, below
from lpfs.methods.masks import NAME, FieldMask, TokenMask, looking, worn
from lpfs.methods.search import search
from lpfs.methods.shufflegate import Options, ShuffleGate
from lpfs.methods.stg import STG
from lpfs.methods.stg import Options as OfSTG
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.models import make_model
from lpfs.train.callbacks import State
from lpfs.train.config import Training
from lpfs.train.fit import fit
from lpfs.train.step import make_optimizer


class Fixed(FieldMask):
    def __init__(self, names, values):
        super().__init__(names, 1, 0)
        self.values = nn.Parameter(torch.tensor(values))
        self.calls = 0

    def forward(self):
        self.calls += 1
        return self.values


class FixedTokens(TokenMask):
    def __init__(self, names, values):
        super().__init__(names, 1, 0)
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, tokens, numbers, ids):
        return tokens * self.values[numbers][:, None].to(tokens.dtype)


# the raw values of a field reach its crosses too, so that there is no such test for crosses
@pytest.mark.parametrize("case", [each for each in CASES if each.name != "dlrm_cross"], ids=str)
def test_a_field_that_is_masked_to_zero_does_not_reach_the_logits(case):
    """Wide weights, first-order terms and dot products too; the rest is as it is under the same gates."""
    model, batch = case.make(MIXED), batch_of(MIXED)
    names = tuple(model.sites())
    plain = model(batch)
    with worn(model, Fixed(names, [1.0] * len(names)), "x"):
        assert torch.equal(model(batch), plain)
    values = some_gates(len(names))
    for kind in (Fixed, FixedTokens):
        with worn(model, kind(names, values), "x"):
            masked = model(batch)
            for name, value in zip(names, values, strict=True):
                moved = model(model.inputs_of_fields()[name](batch))
                assert value != 0 or torch.equal(moved, masked)
        assert not torch.equal(masked, plain)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_kinds_of_mask_stand_in_the_same_place(case):
    model, batch = whole_numbers(case.make(MIXED)), batch_of(MIXED, whole=True)
    names = tuple(model.sites())
    found, grads = [], []
    for kind in (Fixed, FixedTokens):
        mask = kind(names, some_gates(len(names)))
        with worn(model, mask, "x"):
            found.append(model(batch))
            found[-1].sum().backward()
        grads.append(mask.values.grad)
    assert torch.equal(*found)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=0.0)  # numbers beyond 2^24 are not exact in any order
    assert bool((grads[0] != 0).any())


@pytest.mark.parametrize("name", ["mlp", "wide_deep", "dlrm_cross", "user_item"])
def test_parts_that_are_silent_stay_out_of_the_way(name):
    every = list(Case(name).make(MIXED).sites())
    model = Case(name).make(MIXED, silent=every[:1])
    names = tuple(model.sites())
    assert names == tuple(every[1:])
    found = []
    for kind in (Fixed, FixedTokens):
        with worn(model, kind(names, some_gates(len(names))), "x"):
            found.append(model(batch_of(model.reads)))
    assert torch.allclose(*found)


def test_who_looks_sees_the_mask_on_right_before_it_comes_off():
    model, batch = Case("mlp").make(MIXED), batch_of(MIXED)
    names, seen = tuple(model.sites()), []
    with looking(lambda found: seen.append(found(batch))):
        with worn(model, Fixed(names, some_gates(len(names))), "x"):
            masked = model(batch)
            assert seen == []
        with pytest.raises(ZeroDivisionError), worn(model, Fixed(names, [1.0] * len(names)), "x"):
            _ = 1 / 0  # a search that failed is not looked at
    with worn(model, Fixed(names, [1.0] * len(names)), "x"):
        pass  # nobody looks any more
    assert len(seen) == 1
    assert torch.equal(seen[0], masked)
    assert not torch.equal(seen[0], model(batch))


def test_a_mask_is_drawn_once_a_forward():
    model = Case("user_item").make(MIXED)  # reads its fields in three places
    mask = Fixed(tuple(model.sites()), [1.0] * len(model.sites()))
    with worn(model, mask, "x"):
        model(batch_of(MIXED))
    assert mask.calls == 1


@pytest.mark.parametrize("kind", [Fixed, FixedTokens])
def test_a_mask_comes_off_after_an_error_too(kind):
    model = Case("wide_deep").make(MIXED)
    before = model(batch_of(MIXED))
    names = tuple(model.sites())
    with pytest.raises(ZeroDivisionError), worn(model, kind(names, [0.5] * len(names)), "x"):
        raise ZeroDivisionError
    assert not hasattr(model, NAME)
    assert not any(hooks_of(each) or each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    assert torch.equal(model(batch_of(MIXED)), before)


# ------------------------------------------------------------------------------------ what is refused


def try_search(log, name, method, **how):
    torch.manual_seed(0)
    model = make_model(name, log.schema, **SMALL)
    given = {
        "keep": 2,
        "steps": 5,
        "valid": log.part(1000, 1200).stream(100),
        "config": Training(quiet=True),
    } | how
    return model, search(model, log.part(0, 1000).stream(64), method, **given)


@pytest.mark.parametrize(
    ("method", "name", "message"),
    [
        (
            "adafs",
            "user_item",
            "adafs weighs all fields of a row together, and UserItem does not have them in one place",
        ),
        ("cold_se", "user_item", "cold_se weighs all fields of a row together, and UserItem"),
        ("adafs", "dlrm_cross", "adafs is defined on fields, and DLRMCross selects crosses"),
        ("cold_se", "dlrm_cross", "cold_se is defined on fields, and DLRMCross selects crosses"),
        ("optfs", "dlrm_cross", "optfs is defined on fields, and DLRMCross selects crosses"),
    ],
)
def test_models_on_which_a_method_is_not_defined(log, method, name, message):
    with pytest.raises(InputError, match=message):
        try_search(log, name, method)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        *(
            (method, name)
            for method in ("shufflegate", "autofield", "stg")
            for name in ("user_item", "dlrm_cross")
        ),
        ("optfs", "user_item"),
        ("optfs", "dlrm"),
        ("adafs", "deepfm"),
        ("cold_se", "wide_deep"),
    ],
)
def test_models_on_which_it_is(log, method, name):
    model, found = try_search(log, name, method)
    assert set(found.made["scores"]) == set(model.sites())
    assert len(found.kept) == 2


def test_what_no_mask_can_do(log):
    with pytest.raises(InputError, match="stg masks the fields of a model of lpfs.models; Linear is not one"):
        search(nn.Linear(2, 1), log.stream(64), "stg", keep=1, steps=5)
    with pytest.raises(InputError, match="fscd draws and counts in every step"):
        try_search(log, "mlp", "fscd", config=Training(quiet=True, graph=True))
    for method in ("autofield", "shufflegate"):
        with pytest.raises(
            InputError, match=f"{method} moves its mask on rows held out of the training: give valid="
        ):
            try_search(log, "mlp", method, valid=None)
    model = make_model("mlp", log.schema, **SMALL)
    lpfs.attach(model, steps=100)
    with pytest.raises(InputError, match="optfs puts its mask where gates stand, and this model has gates"):
        search(model, log.stream(64), "optfs", keep=1, steps=5)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("stg", {"sigma": 0}, "sigma must be a number > 0, found 0"),
        ("stg", {"strength": -1}, "strength must be a number >= 0"),
        ("fscd", {"start": 1.0}, "start must be a number between 0 and 1, found 1.0"),
        ("autofield", {"every": 0}, "every must be a whole number >= 1"),
        ("autofield", {"lr": True}, "lr must be a number > 0"),
        ("hard_concrete", {"low": 0.1}, "the stretch must go from below 0 to above 1"),
        ("hard_concrete", {"high": 0.9}, "the stretch must go from below 0 to above 1"),
        ("adafs", {"hard": 1}, "hard must be true or false"),
        ("optfs", {"strength": -1.0}, "strength must be a number >= 0"),
        ("cold_se", {"lr": float("nan")}, "lr must be a number > 0"),
        ("shufflegate", {"sharpnes": 1}, "unknown key 'sharpnes'"),
    ],
)
def test_settings_that_are_refused(log, method, options, message):
    with pytest.raises(InputError, match=message):
        try_search(log, "mlp", method, **options)


# ------------------------------------------------------------------------------------ held-out rows


def task_of(log, **how):
    model = make_model("mlp", log.schema, **SMALL)
    optimizer = make_optimizer(Training(), model.parameters())
    given = {"valid": log.part(1000, 1200).stream(4096)} | how
    return Task(model, optimizer, log.part(0, 1000).stream(64), wish=Wish(keep=2), steps=10, **given)


def test_held_rows_come_in_batches_like_those_of_the_training_over_and_over(log):
    held = Held.of(task_of(log, seed=3), "x")
    sizes = [len(held.next()) for _ in range(9)]
    assert sizes == [64, 64, 64, 8, 64, 64, 64, 8, 64]  # 200 rows
    held.close()
    own = Held.of(task_of(log, held=log.part(0, 100).stream(10)), "x")
    assert own.batches.dataset.rows == 100  # rows that were set apart go before those of valid
    own.close()


def test_held_rows_go_on_where_they_were(log):
    for turns in (3, 4, 6):  # within a pass, at its end, in the next
        one, two = (Held.of(task_of(log), "x") for _ in range(2))
        for _ in range(turns):
            one.next()
        two.load_state_dict(one.state_dict())
        for _ in range(5):
            assert torch.equal(one.next().ids, two.next().ids)
        one.close()
        two.close()


def test_held_rows_that_are_no_stream(log):
    batches = list(log.part(1000, 1200).stream(100))
    held = Held.of(task_of(log, valid=batches), "x")
    assert [id(held.next()) for _ in range(3)] == [id(batches[0]), id(batches[1]), id(batches[0])]
    assert held.state_dict() == {}
    with pytest.raises(InputError, match="resume needs held-out rows"):
        held.load_state_dict({})
    used = Held(iter(batches))
    for _ in batches:
        used.next()
    with pytest.raises(InputError, match="gave no batch"):
        used.next()


@pytest.mark.parametrize("kind", ["field", "token"])
def test_a_mask_that_moves_on_held_rows_moves_alone(log, kind):
    task = task_of(log)
    names = tuple(task.model.sites())
    mask = ShuffleGate(names, 10, 0, Options()) if kind == "token" else STG(names, 10, 0, OfSTG())
    parameter = next(mask.parameters())
    with worn(task.model, mask, "x"):
        effort = Effort()
        driver = Learn(mask, torch.optim.SGD(mask.parameters(), lr=1.0), effort, Held.of(task, "x"), 2)
        state = State(task.model, task.optimizer, Training())
        driver.on_begin(state)
        assert not parameter.requires_grad
        before = {name: each.clone() for name, each in task.model.state_dict().items()}
        driver.within_step(state)
        assert torch.equal(
            parameter, before[f"{NAME}.{next(iter(dict(mask.named_parameters())))}"]
        )  # every second
        state.step = 1
        driver.within_step(state)
        driver.held.close()
        moved = [name for name, each in task.model.state_dict().items() if not torch.equal(each, before[name])]
        assert moved == [f"{NAME}.{name}" for name, _ in mask.named_parameters()]
        assert all(each.grad is None for each in task.model.parameters())
        assert not any(each.row_grads for each in row_parameters(task.model.parameters()))
    assert all(each.requires_grad for each in task.model.parameters())
    assert (effort.forwards, effort.backwards) == (64, 64)


def test_the_training_tells_a_mask_when_it_is(log):
    task = task_of(log)
    mask = STG(tuple(task.model.sites()), 10, 0, OfSTG())
    driver = Learn(mask, torch.optim.SGD(mask.parameters(), lr=1.0), Effort(), None, 1)
    state = State(task.model, task.optimizer, Training(), step=4)
    driver.on_begin(state)  # it goes on from a checkpoint
    assert mask.step == 4
    state.step = 5
    driver.after_step(state)
    assert mask.step == 5


def test_only_what_had_a_gradient_gets_it_back():
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1), STG(("a",), 1, 0, OfSTG())])
    model[1].requires_grad_(False)
    with alone(model, model[2]):
        assert [each.requires_grad for each in model.parameters()] == [False] * 4 + [True]
    model[2].requires_grad_(True)
    with pytest.raises(ZeroDivisionError), alone(model, model[2]):
        raise ZeroDivisionError
    assert [each.requires_grad for each in model.parameters()] == [True, True, False, False, False]


def test_without_a_penalty_or_noise_the_mask_only_adds_its_factors(log):
    """Weights trained under a mask of ones that cannot move are those of plain training."""
    plain, masked = (task_of(log) for _ in range(2))
    masked.model.load_state_dict(plain.model.state_dict())
    fit(plain.model, plain.stream, plain.optimizer, steps=8, quiet=True)
    names = tuple(masked.model.sites())
    with worn(masked.model, Fixed(names, [1.0] * len(names)), "x"):
        fit(masked.model, masked.stream, masked.optimizer, steps=8, quiet=True)
    mine, theirs = plain.model.state_dict(), masked.model.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


# ------------------------------------------------------------------------------------ what it cost


def test_rows_are_counted_forward_and_backward(log):
    _, found = try_search(log, "mlp", "stg")
    assert (found.made["forwards"], found.made["backwards"]) == (5 * 64, 5 * 64)
    _, found = try_search(log, "mlp", "shufflegate")
    assert (found.made["forwards"], found.made["backwards"]) == (
        10 * 64 - 56,
        10 * 64 - 56,
    )  # a held batch has 8 rows
    _, found = try_search(log, "mlp", "permutation", repeats=2)
    assert (found.made["forwards"], found.made["backwards"]) == ((1 + 2 * 7) * 200, 0)
    _, found = try_search(log, "mlp", "lpfs++", steps=60, keep=None, max_auc_loss=0.5)
    looks = len(found.made["curve"]) + 1 + len(found.made["reference"])
    steps = 2 * (60 * 64 - 3 * 24)  # a batch in sixteen has 40 rows
    assert (found.made["forwards"], found.made["backwards"]) == (steps + looks * 200, steps)


def test_seconds_before_a_kill_count():
    effort = Effort()
    effort.load_state_dict({"seconds": 100.0, "forwards": 7, "backwards": 3})
    with effort:
        effort.add(forwards=1)
    assert 100.0 <= effort.told()["seconds"] == round(effort.state_dict()["seconds"], 3) < 110.0
    assert (effort.forwards, effort.backwards) == (8, 3)


def test_the_history_tells_the_search(log):
    _, found = try_search(log, "mlp", "stg", steps=6)
    assert [each["step"] for each in found.history] == [1, 2, 3, 4, 5, 6]
    assert set(found.history[0]) == {"step", "loss", "alive", "gates"}
    assert found.history[-1]["gates"] == pytest.approx(list(found.made["scores"].values()), abs=1e-6)
    assert all(each["alive"] == 7 and 0 < each["loss"] < 5 for each in found.history)
    assert found.made["own_count"] == 7


def test_a_mask_learns_from_rows_of_its_own_where_there_are_such(log):
    """The weights see the search's rows, the mask the held-out ones, as the gates of LPFS do."""
    _, found = try_search(log, "mlp", "stg", held=log.part(0, 200).stream(40))
    assert (found.made["forwards"], found.made["backwards"]) == (5 * (64 + 40), 5 * (64 + 40))


def test_who_dies_last_is_the_first_of_the_dead():
    scores, own = torch.tensor([0.9, -2.0, -2.3, 0.2, -2.1]), torch.tensor([True, False, False, True, False])
    found = below(scores, own, torch.tensor([1.0, -0.7, -0.1, 0.5, -0.4], dtype=torch.float64))
    assert found.argsort(descending=True).tolist() == [0, 3, 2, 4, 1]
    assert torch.equal(found[own], scores[own])
    nobody = below(scores, torch.zeros(5, dtype=torch.bool), torch.arange(5.0))
    assert nobody.argsort().tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(below(scores, torch.ones(5, dtype=torch.bool), scores), scores)
