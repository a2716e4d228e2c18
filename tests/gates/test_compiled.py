"""One compiled call each gives what numpy and torch give, says what they say, and follows its gates anywhere."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from planted import search as planted_search
from surrogate import Surrogate
from torch import Tensor

from lpfs.embeddings.table import Table
from lpfs.errors import AllGatesZeroError, FieldError, NonFiniteError, SearchError, StateError
from lpfs.gates import module
from lpfs.gates.control import Keep
from lpfs.gates.functions import gate_function
from lpfs.gates.module import Gates
from lpfs.gates.optimizer import ProxSGD
from lpfs.gates.settle import settle

pytest.importorskip("numba")


def by_numpy(make):
    """Return what ``make()`` returns where there is no numba."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "compiled_loops", lambda: None)
        return make()


def pair(*args, **settings) -> tuple[Surrogate, Surrogate]:
    """Return a search by loops and one by numpy."""
    other = by_numpy(lambda: Surrogate(*args, **settings))
    other.gates._fast = False  # not for these gates
    return Surrogate(*args, **settings), other


def close(one: Gates, two: Gates, rtol: float) -> None:
    for name in ("x", "epsilon", "scale", "control"):
        torch.testing.assert_close(getattr(one, name), getattr(two, name), rtol=rtol, atol=rtol)
    for name in ("dead", "steps_done"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    assert one.kept == two.kept


@pytest.mark.parametrize("gate", ["lpfs", "lpfs++"])
@pytest.mark.parametrize("kind", ["graded", "duplicates", "strong", "tied"])
@pytest.mark.parametrize(
    ("size", "keep", "settings"),
    [
        (27, 13, {}),
        (12, 3, {"must_keep": ["f0", "f5"]}),
        (12, 4, {"costs": [1.0 + n for n in range(12)], "threshold": "momentum"}),
        (12, None, {"penalty": 0.05}),
        (9, 8, {"momentum": 0.0}),
        (12, 4, {"control": Keep(4, travel=0.5, begin=0.2, end=0.6, freeze=0.6, least=2.0, ahead=0.2)}),
    ],
)
def test_every_step_is_that_of_numpy(gate, kind, size, keep, settings):
    loops, plain = pair(kind, size, keep, 150, gate, **settings)
    frozen = 0
    for _ in range(150):
        loops.step()
        plain.step()
        # one step from the same state: some roundings of a gradient and of an arctan
        close(loops.gates, plain.gates, 2e-6)
        mine, its = loops.prox.param_groups[0], plain.prox.param_groups[0]
        assert type(mine["penalty"]) is type(its["penalty"])
        assert mine["lr"] == its["lr"]
        torch.testing.assert_close(*(torch.as_tensor(each["penalty"]) for each in (mine, its)))
        frozen += isinstance(mine["penalty"], Tensor)
        plain.gates.load_state_dict(loops.gates.state_dict())
        plain.prox.load_state_dict(copy.deepcopy(loops.prox.state_dict()))
    assert (loops.prox.mover is not None) == (settings.get("momentum") != 0.0)
    assert plain.prox.mover is None
    assert bool(frozen) == (keep is not None)


@pytest.mark.parametrize("rescale", ["epsilon", "rms", "off"])
def test_the_rescale_is_that_of_numpy(rescale):
    made = []
    for loops in (True, False):
        gates = Gates([f"f{n}" for n in range(5)], gate_function("lpfs++"), 700, rescale=rescale)
        gates._fast = None if loops else False
        prox = gates.optimizer(penalty=0.0)
        with torch.no_grad():
            gates.x.copy_(torch.tensor([1.0, 0.5, 0.0, -0.3, 2.0]))
        for _ in range(700):
            gates.x.grad = torch.zeros(5)
            prox.step()
            gates.step()
        assert (prox.mover is not None) == loops
        made.append(gates.scale)
    torch.testing.assert_close(*made)  # the same sum in another order


@pytest.mark.parametrize("gate", ["lpfs", "lpfs++"])
def test_a_planted_log_gives_the_selection_of_numpy(gate):
    _, loops = planted_search(1, gate, 15, 400)
    _, plain = by_numpy(lambda: planted_search(1, gate, 15, 400))
    assert loops._fast
    assert loops.kept == plain.kept


@pytest.mark.parametrize("gate", ["lpfs", "lpfs++"])
@pytest.mark.parametrize("size", [1, 7, 27, 400])
def test_gates_start_at_exactly_one_and_their_slope_is_torchs(gate, size):
    gates = Gates([str(n) for n in range(size)], gate_function(gate, epsilon=0.0137), 500)
    assert torch.equal(gates(), torch.ones(size))
    with torch.no_grad():
        gates.x.normal_()
        gates.x[0] = 0.0
    values = gates()
    assert torch.equal(values, gates.values)
    values.backward(torch.linspace(-1, 1, size))
    value, slope = gates.function.value_and_slope(gates.x.detach(), gates.epsilon)
    below = gates.norm * gates.scale
    torch.testing.assert_close(values.detach(), value / below)
    torch.testing.assert_close(gates.x.grad, torch.linspace(-1, 1, size) * slope / below)


def running() -> Surrogate:
    search = Surrogate("graded", 12, 4, 200, "lpfs++")
    search.run(50)
    assert search.prox.mover is not None
    return search


def state(search: Surrogate) -> list[Tensor]:
    velocity = search.prox.state[search.gates.x]["momentum_buffer"]
    return [each.clone() for each in (*search.gates.state_dict().values(), velocity)]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_moves_nothing(wrong):
    search = running()
    before = state(search)
    search.gates.x.grad = torch.ones(12)
    search.gates.x.grad[7] = wrong
    with pytest.raises(NonFiniteError, match=r"not finite at \[7\]; the step was refused"):
        search.prox.step()
    assert all(torch.equal(one, two) for one, two in zip(before, state(search), strict=True))
    search.gates.x.grad = torch.full((12,), 1e38)  # finite, though their sum is not
    search.prox.step()
    assert not torch.equal(search.gates.x, before[0])


def test_all_gates_at_zero_is_said_at_once():
    search = Surrogate("useless", 4, None, 1000, "lpfs", penalty=5.0)
    with pytest.raises(AllGatesZeroError, match="every gate is at zero after 5 steps"):
        search.run(100)
    assert search.prox.mover is not None
    assert int(search.gates.steps_done) == 4


def test_a_wrong_end_is_said_at_once():
    search = running()
    for _ in range(149):
        search.gates.step()  # prox.step() was forgotten
    with pytest.raises(SearchError, match=r"after 200 steps 1\d fields are alive instead of 4"):
        search.gates.step()
    assert int(search.gates.steps_done) == 200


def test_idle_fields_are_refused_before_anything_moves():
    class Hook:
        ran, at = False, ((3, None),)

    search = running()
    search.gates.hooks, search.gates.entered = [Hook()], True
    search.run(49)
    before = state(search)
    with pytest.raises(FieldError, match=r"\['f3'\] never ran"):
        search.gates.step()
    assert all(torch.equal(one, two) for one, two in zip(before, state(search), strict=True))
    search.gates.hooks = []
    search.gates.step()
    assert search.gates.status().step == 100


def test_a_copy_steps_by_itself():
    search = running()
    other = copy.deepcopy(search)
    other.run(150)
    assert other.prox.mover is not None
    assert search.gates.status().step == 50
    assert torch.equal(search.run(150).x, other.gates.x)
    assert copy.deepcopy(search.prox).mover is None  # a copy of the optimizer alone holds another x


def test_a_search_goes_on_from_a_state_dict():
    whole = Surrogate("graded", 12, 4, 200, "lpfs++").run()
    for assign in (False, True):
        for at in (50, 130, 190):
            half = Surrogate("graded", 12, 4, 200, "lpfs++")
            half.run(at)
            saved = pickle.dumps((half.gates.state_dict(), half.prox.state_dict()))
            states = pickle.loads(saved)
            other = Surrogate("graded", 12, 4, 200, "lpfs++")
            if not assign:
                other.run(20)  # what was ready is ready no more
            other.gates.load_state_dict(states[0], assign=assign)
            if assign:
                other.prox = other.gates.optimizer(keep=4)
                other.gates.load_state_dict(pickle.loads(saved)[0])
            other.prox.load_state_dict(states[1])
            assert torch.equal(other.run(200 - at).x, whole.x), (assign, at)


def test_it_follows_x_to_other_memory():
    one, two = running(), running()
    two.gates.x.data = two.gates.x.data.clone()
    two.gates.epsilon = two.gates.epsilon.clone()
    two.gates.control.data = two.gates.control.data.clone()
    two.gates.to("cpu", torch.float64)
    assert torch.equal(one.run(150).x, two.run(150).x)


def test_settings_of_the_optimizer_count():
    one, two = running(), running()
    for search, lr in ((one, 0.0), (two, 1.0)):
        group = search.prox.param_groups[0]
        group["lr"], group["penalty"], group["weights"] = lr, 0.25, None
        search.gates.x.grad = torch.zeros(12)
        search.prox.state[search.gates.x]["momentum_buffer"].zero_()
        before = search.gates.x.detach().clone()
        search.prox.step()
        torch.testing.assert_close(search.gates.x.detach(), (before - lr * 0.25).clamp(min=0.0))


def test_settling_is_that_of_numpy():
    made = []
    for search in pair("graded", 12, 4, 200, "lpfs"):
        search.run(90)
        settle(search.gates)
        made.append(search.run(110))
    assert made[0].kept == made[1].kept
    assert made[0].status().frozen


def test_hooks_of_others_are_called():
    calls = []
    search = running()
    search.prox.register_step_post_hook(lambda *_: calls.append("after"))
    search.run(3)
    assert len(calls) == 3


def test_the_guard_of_tables_is_asked_and_does_not_stand_in_the_way(monkeypatch):
    table = Table((5, 4), 2)  # from now on tables are guarded
    with pytest.raises(StateError, match="ProxSGD holds the weight of a Table"):
        ProxSGD([table.weight], lr=0.1).step()
    search = running()
    monkeypatch.setattr(ProxSGD, "_step", None)  # nor is the way of torch taken
    monkeypatch.setattr(ProxSGD, "_step_with_hooks", None)
    search.run(3)
    assert search.gates.status().step == 53


def test_without_numba_all_works():
    def whole() -> Surrogate:
        search = Surrogate("graded", 12, 4, 200, "lpfs++")
        search.run()
        return search

    search = by_numpy(whole)
    assert search.prox.mover is None
    assert len(search.gates.selection().kept) == 4
