"""Steps without the host give what the plain steps give, and say later what the plain ones say at once."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from surrogate import Surrogate
from torch import Tensor

from lpfs.errors import AllGatesZeroError, NonFiniteError, SearchError
from lpfs.gates import module
from lpfs.gates.control import Keep
from lpfs.gates.functions import gate_function
from lpfs.gates.module import Gates


@pytest.fixture(autouse=True)
def _by_numpy(monkeypatch):
    """Compare with the steps of numpy, whose arctan is torch's to the last bit; that of the loops is not."""
    monkeypatch.setattr(module, "compiled_loops", lambda: None)


def without_host(search: Surrogate) -> Surrogate:
    """Let a search on the CPU take its steps as on a GPU."""
    search.gates.branch_free = True
    search.gates.to("cpu")
    return search


def pair(*args, **settings) -> tuple[Surrogate, Surrogate]:
    return Surrogate(*args, **settings), without_host(Surrogate(*args, **settings))


def same(plain: Gates, other: Gates) -> None:
    for name in ("x", "dead", "epsilon", "scale", "steps_done", "values"):
        assert torch.equal(getattr(plain, name), getattr(other, name)), name
    # exp() of the host and of torch may differ in the last bit of float64
    torch.testing.assert_close(other.control, plain.control, rtol=1e-12, atol=0)


@pytest.mark.parametrize("gate", ["lpfs", "lpfs++"])
@pytest.mark.parametrize("kind", ["graded", "tied", "duplicates", "strong", "harmful"])
@pytest.mark.parametrize(
    ("size", "keep", "settings"),
    [
        (27, 13, {}),
        (12, 3, {"must_keep": ["f0", "f5"]}),
        (12, 4, {"costs": [1.0 + n for n in range(12)], "threshold": "momentum"}),
        (9, 8, {"momentum": 0.0}),
        (27, 20, {"prox": "positive"}),
        (12, 4, {"control": Keep(4, travel=0.5, begin=0.2, end=0.6, freeze=0.6, least=2.0, ahead=0.2)}),
    ],
)
def test_a_search_is_the_same_step_by_step(gate, kind, size, keep, settings):
    plain, other = pair(kind, size, keep, 150, gate, **settings)
    backs = 0
    for _ in range(150):
        before, penalty = plain.gates.before.clone(), float(plain.gates.control[0])
        plain.step()
        other.step()
        same(plain.gates, other.gates)
        held = (plain.gates.x == before) & (before != 0)
        backs += bool(held.any()) and float(plain.gates.control[0]) < penalty
    assert len(other.gates.kept) == keep
    assert bool(other.gates.control[2])
    if kind == "tied" and gate == "lpfs" and keep == 13:
        assert backs  # some were held


@pytest.mark.parametrize(
    "settings",
    [{"penalty": 0.05}, {"penalty": 0.3, "prox": "l0"}, {"penalty": 0.05, "prox": "positive"}, {"penalty": 0.0}],
)
def test_a_fixed_penalty_is_the_same_step_by_step(settings):
    plain, other = pair("graded", 12, None, 200, "lpfs++", **settings)
    for _ in range(230):  # beyond the end, too
        plain.step()
        other.step()
        same(plain.gates, other.gates)


def test_the_rms_rescale_agrees_to_rounding():
    made = []
    for free in (False, True):
        gates = Gates([f"f{n}" for n in range(5)], gate_function("lpfs++"), 700, rescale="rms")
        gates.branch_free = free
        gates.optimizer(penalty=0.0)
        with torch.no_grad():
            gates.x.copy_(torch.tensor([1.0, 0.5, 0.0, -0.3, 2.0]))
        for _ in range(700):
            gates.step()
        made.append(gates)
    torch.testing.assert_close(made[0].scale, made[1].scale)  # the same sum in another order
    assert float(made[0].scale) != 1.0


def test_a_gradient_that_is_not_finite_moves_nothing_and_is_told_later():
    search = without_host(Surrogate("graded", 5, 2, 100, "lpfs++"))
    gates, prox = search.gates, search.prox
    for when in ("first", "later"):
        x, velocity = gates.x.detach().clone(), prox.state[gates.x].get("momentum_buffer")
        velocity = torch.zeros_like(x) if velocity is None else velocity.clone()
        gates.x.grad = torch.tensor([1.0, float("nan"), 0.0, 0.0, 0.0])
        prox.step()
        assert torch.equal(gates.x, x), when
        assert torch.equal(prox.state[gates.x]["momentum_buffer"], velocity)
        gates.step()
        with pytest.raises(NonFiniteError, match="not finite in 1 steps up to step"):
            gates.check()
        gates.check()  # told once
        search.step()
        assert not torch.equal(gates.x, x)


def test_all_gates_at_zero_is_told_within_a_hundred_steps():
    search = without_host(Surrogate("useless", 4, None, 1000, "lpfs", penalty=5.0))
    with pytest.raises(AllGatesZeroError, match="every gate is at zero after 5 steps"):
        search.run(100)
    assert int(search.gates.steps_done) == 100
    search.run(3)
    with pytest.raises(AllGatesZeroError):
        search.gates.status()


def test_a_wrong_end_is_told():
    gates = Gates(["a", "b", "c"], gate_function("lpfs++"), 60)
    gates.branch_free = True
    gates.optimizer(keep=1)
    for _ in range(60):
        gates.step()  # prox.step() was forgotten
    with pytest.raises(SearchError, match="after 60 steps 3 fields are alive instead of 1"):
        gates.selection()


def test_a_search_goes_on_from_a_checkpoint_on_either_path():
    whole = Surrogate("graded", 12, 4, 200, "lpfs++").run()
    for first, second in ((True, True), (True, False), (False, True)):
        half = Surrogate("graded", 12, 4, 200, "lpfs++")
        if first:
            without_host(half)
        half.run(130)
        saved = pickle.dumps((half.gates.state_dict(), half.prox.state_dict()))
        other = Surrogate("graded", 12, 4, 200, "lpfs++")
        if second:
            without_host(other)
        state, momentum = pickle.loads(saved)
        other.gates.load_state_dict(state)
        other.prox.load_state_dict(momentum)
        assert torch.equal(other.run(70).x, whole.x), (first, second)


def test_a_copy_steps_by_itself():
    search = without_host(Surrogate("graded", 12, 4, 200, "lpfs++"))
    search.run(50)
    other = copy.deepcopy(search)
    assert other.prox.stepper is other.gates
    other.run(150)
    assert int(search.gates.steps_done) == 50
    search.run(150)
    assert torch.equal(other.gates.x, search.gates.x)


def test_noise_is_drawn_on_the_host():
    plain, other = pair("graded", 12, 4, 200, "lpfs-noise")
    assert other.prox.stepper is None
    plain.run()
    other.run()
    assert torch.equal(plain.gates.x, other.gates.x)


def test_back_on_the_host_the_optimizer_knows_its_settings():
    search = without_host(Surrogate("graded", 12, 4, 200, "lpfs++"))
    search.run(180)
    search.gates.branch_free = None
    search.gates.to("cpu")
    assert search.prox.stepper is None
    group = search.prox.param_groups[0]
    assert group["lr"] == search.gates.schedule.lr(180)
    assert isinstance(group["penalty"], Tensor)  # frozen: infinite where dead
    assert torch.equal(search.run(20).x, Surrogate("graded", 12, 4, 200, "lpfs++").run().x)
