"""The control law, step by step from the first to the last, against a slow reference in plain Python."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

from lpfs import Gates, Keep, ProxSGD, gate_function
from lpfs.embeddings.table import Table
from lpfs.errors import AllGatesZeroError, FieldError, NonFiniteError, SearchError, StateError
from lpfs.gates.controller import PenaltyController, TableRow, update_penalty
from tests.helpers.surrogate import Surrogate

SEARCHES = [
    (27, 13, {}),
    (12, 3, {"must_keep": ["f0", "f5"]}),
    (12, 4, {"costs": [1.0 + n for n in range(12)], "threshold": "momentum"}),
    (9, 8, {"momentum": 0.0}),
    (27, 20, {"prox": "positive"}),
    (12, 4, {"control": Keep(4, travel=0.5, begin=0.2, end=0.6, freeze=0.6, least=2.0, ahead=0.2)}),
    (12, 4, {"control": Keep(4, travel=0.4, begin=0.2, least=4.0, ahead=0.0)}),
]


class Reference:
    """One step of the law in float64 and plain loops, from a copy of the state before it."""

    def __init__(self, search: Surrogate) -> None:
        gates, prox = search.gates, search.prox
        self.gates, self.keep = gates, gates.keep
        momentum = prox.state[gates.x].get("momentum_buffer")
        self.x, self.previous = gates.x.tolist(), gates.previous_x.tolist()
        self.momentum = None if momentum is None else momentum.tolist()
        self.dead = gates.dead.tolist()
        self.penalty, self.frozen, self.average = gates.control.tolist()
        self.epsilon, self.scale = float(gates.epsilon), float(gates.scale)
        self.done = int(gates.steps_done) + 1
        self.events: set[str] = set()

    def size(self, n: int) -> float:
        """|g| at x[n]."""
        x, function = self.x[n], self.gates.function
        value = x * x / (x * x + self.epsilon)
        if function.odd:
            value = math.copysign(value, x) + function.alpha * self.epsilon ** (1 / function.tau) * math.atan(x)
        return abs(value) / (float(self.gates.norm[n]) * self.scale)

    def step(self) -> None:
        keep, total, steps = self.keep, len(self.x), self.gates.steps
        u = min(self.done, steps) / steps
        alive = sum(x != 0 for x in self.x)
        too_few = alive < keep.keep
        if too_few:
            zeroed = [n for n in range(total) if self.x[n] == 0 and self.previous[n] != 0]
            zeroed.sort(key=lambda n: -abs(self.previous[n]))
            for n in zeroed[: keep.keep - alive] if u >= keep.hurry else zeroed:
                self.x[n] = self.previous[n]
                if self.momentum is not None:
                    self.momentum[n] = 0.0
            alive = sum(x != 0 for x in self.x)
            self.events.add("revived in the hurry" if u >= keep.hurry else "revived")
        frozen = bool(self.frozen)
        rate = 0.0 if frozen else self.growth_rate(u, alive, total)
        if frozen:
            self.penalty = 0.0
            self.events.add("faded")
            rise = math.sqrt(self.epsilon)
            for n in range(total):
                if 0 < abs(self.x[n]) < rise:
                    self.x[n] = math.copysign(rise, self.x[n])
                    self.events.add("pushed")
        elif too_few:
            self.penalty = max(self.penalty * keep.cut, min(self.penalty, self.gates.controller.base_penalty))
        else:
            self.penalty *= math.exp(rate / steps)
        if frozen:
            return
        if u >= keep.freeze and alive == keep.keep:
            smallest = min(self.size(n) for n in range(total) if self.x[n] != 0)
            if smallest >= keep.clear or u >= keep.hurry:
                self.frozen, self.dead = 1.0, [x == 0 for x in self.x]
                self.events.add("frozen")

    def growth_rate(self, u: float, alive: int, total: int) -> float:
        keep = self.keep
        remaining = min(1.0, max(0.0, (keep.end - u) / (keep.end - keep.begin)))
        target = keep.keep + (total - keep.keep) * remaining**2
        count: float = alive
        weight = (1 - remaining) ** keep.ahead_power
        if keep.ahead and u < keep.hurry and weight < 1:
            sizes = [self.size(n) for n in range(total)]
            wide = sum(size / max(sizes) for size in sizes)
            lag = max(1.0, keep.lag * self.gates.steps)
            self.average = self.average + (wide - self.average) / lag if self.average else wide
            count = weight * alive + (1 - weight) * (wide + keep.ahead / keep.lag * (wide - self.average))
        if u < keep.begin or count <= target:
            return 0.0
        if u >= keep.hurry:
            self.events.add("hurried")
            return keep.gain * (1 + keep.hurry_growth * (u - keep.hurry) / (1 - keep.hurry))
        self.events.add("grown")
        largest = keep.least + (keep.most - keep.least) * (1 - remaining) ** 2
        return keep.gain * min(largest, (count - target) / max(1.0, keep.width * min(target, total - keep.keep)))

    def compare(self, search: Surrogate) -> None:
        gates = search.gates
        torch.testing.assert_close(gates.x.detach(), torch.tensor(self.x), rtol=1e-6, atol=1e-7)
        assert (gates.x == 0).tolist() == [x == 0 for x in self.x]
        assert gates.dead.tolist() == self.dead
        momentum = search.prox.state[gates.x].get("momentum_buffer")
        if self.momentum is not None:
            assert momentum.tolist() == self.momentum
        expected = torch.tensor([self.penalty, self.frozen, self.average], dtype=torch.float64)
        torch.testing.assert_close(gates.control, expected, rtol=2e-6, atol=2e-5)
        assert torch.equal(gates.previous_x, gates.x)
        group = search.prox.param_groups[0]
        assert float(group["lr"]) == gates.schedule.lr(min(self.done, gates.steps))
        assert group["penalty"].tolist() == [
            math.inf if dead else float(gates.control[0]) for dead in gates.dead.tolist()
        ]


@pytest.mark.parametrize(
    ("values", "hurry", "freezes"),
    [([1.0, 0.1, 0.0], 0.0, False), ([1.0, 0.3, 0.0], 0.0, True), ([1.0, 0.1, 0.0], 1.0, True)],
)
def test_gates_freeze_when_k_of_them_are_clear_of_zero(values, hurry, freezes):
    """|g| of all of them must be at least 0.2, unless time is short."""
    value, controller = torch.tensor(values), PenaltyController(Keep(2), 100, 0.5)
    row = TableRow(**{**dict.fromkeys(TableRow._fields, 1.0), "target": 2.0, "hurry": hurry})
    x, dead, control = value.clone(), torch.zeros(3, dtype=torch.bool), torch.tensor([0.5, 0.0, 2.0]).double()
    penalty, alive, few = torch.zeros(3).double(), torch.tensor(2.0).double(), torch.tensor(False)
    row, epsilon = torch.tensor(row, dtype=torch.float64), torch.tensor(0.01)
    update_penalty(x, x.clone(), dead, control, penalty, value, alive, few, epsilon, True, row, controller.constants)
    assert dead.tolist() == [False, False, freezes]
    assert control.tolist() == [0.5, float(freezes), 2.0]
    assert penalty.tolist() == [0.5, 0.5, math.inf if freezes else 0.5]


@pytest.mark.parametrize("gate", ["lpfs", "lpfs++"])
@pytest.mark.parametrize("kind", ["graded", "useless"])
@pytest.mark.parametrize(("size", "keep", "settings"), SEARCHES)
def test_every_step_is_that_of_the_reference(gate, kind, size, keep, settings):
    search = Surrogate(kind, size, keep, 150, gate, **settings)
    events: set[str] = set()
    for _ in range(150):
        search.backward()
        search.prox.step()
        reference = Reference(search)
        reference.step()
        search.gates.step()
        reference.compare(search)
        events |= reference.events
    assert "frozen" in events
    if kind == "useless":
        assert events & {"revived", "revived in the hurry"}


def test_the_reference_meets_every_part_of_the_law():
    """A search without time to spare: gates are restored, λ hurries, and alive gates are pushed away from zero."""
    events: set[str] = set()
    for kind, keep, gain in (("useless", 30, 10.0), ("tied", 13, 10.0), ("strong", 3, 1.0)):
        search = Surrogate(kind, 60, keep, 60, "lpfs", control=Keep(keep, travel=2.0, freeze=0.85, gain=gain))
        for _ in range(60):
            search.backward()
            search.prox.step()
            reference = Reference(search)
            reference.step()
            search.gates.step()
            reference.compare(search)
            events |= reference.events
    assert {"grown", "frozen", "faded", "revived", "revived in the hurry", "hurried", "pushed"} <= events


@pytest.mark.long
@pytest.mark.parametrize("gate", ["lpfs", "lpfs++"])
@pytest.mark.parametrize("kind", ["graded", "tied", "harmful"])
@pytest.mark.parametrize(("size", "keep", "settings"), SEARCHES)
def test_scalars_on_the_host_and_on_the_device_give_the_same_steps(gate, kind, size, keep, settings):
    host, device = (Surrogate(kind, size, keep, 150, gate, **settings) for _ in range(2))
    device.gates._device_ops = True
    for _ in range(150):
        host.step()
        device.step()
        for name in ("x", "dead", "epsilon", "scale", "steps_done", "values"):
            assert torch.equal(getattr(host.gates, name), getattr(device.gates, name)), name
        # exp() of the host and of torch may differ in the last bit of float64
        torch.testing.assert_close(device.gates.control, host.gates.control, rtol=1e-12, atol=0)
    assert len(device.gates.kept) == keep


@pytest.mark.parametrize("prox", ["l1", "positive", "l0"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_capturable_step_is_the_plain_step(prox, momentum):
    plain, capturable = (Surrogate("graded", 12, None, 200, "lpfs++", penalty=0.05, prox=prox, momentum=momentum)
                         for _ in range(2))  # fmt: skip
    capturable.prox.param_groups[0]["capturable"] = True
    for _ in range(230):  # also after the last step of the schedule
        plain.step()
        capturable.step()
        assert torch.equal(plain.gates.x, capturable.gates.x)


def test_a_capturable_step_counts_gradients_that_are_not_finite():
    search = Surrogate("graded", 5, 2, 100, "lpfs++")
    gates, prox = search.gates, search.prox
    prox.param_groups[0]["capturable"] = True
    for _ in range(2):
        x, momentum = gates.x.detach().clone(), prox.state[gates.x].get("momentum_buffer", torch.zeros(5)).clone()
        gates.x.grad = torch.tensor([1.0, float("nan"), 0.0, 0.0, 0.0])
        prox.step()
        assert torch.equal(gates.x, x)
        assert torch.equal(prox.state[gates.x]["momentum_buffer"], momentum)
        assert prox.state[gates.x]["nonfinite_steps"] == 1
        gates.step()
        with pytest.raises(NonFiniteError, match="1 steps"):
            gates.check()
        gates.check()  # reported once
        search.step()
        assert not torch.equal(gates.x, x)


@pytest.mark.parametrize("on_device", [False, True])
def test_all_gates_at_zero_is_an_error(on_device):
    search = Surrogate("useless", 4, None, 1000, "lpfs", penalty=5.0)
    search.gates._device_ops = on_device
    with pytest.raises(AllGatesZeroError, match="after 5 steps"):
        search.run(100)
    assert int(search.gates.steps_done) == (100 if on_device else 5)
    with pytest.raises(AllGatesZeroError):
        search.run(100)


def test_a_wrong_end_is_an_error():
    gates = Gates(["a", "b", "c"], gate_function("lpfs++"), 60)
    gates._device_ops = True
    gates.optimizer(keep=1)
    for _ in range(60):
        gates.step()  # without prox.step()
    with pytest.raises(SearchError, match="after 60 steps 3 fields are alive instead of 1"):
        gates.selection()


def test_unused_fields_are_an_error_before_anything_changes():
    class Hook:
        ran, at = False, ((3, None),)

    search = Surrogate("graded", 12, 4, 200, "lpfs++")
    search.gates.hooks, search.gates.entered = [Hook()], True
    search.run(99)
    before = copy.deepcopy(search.gates.state_dict())
    with pytest.raises(FieldError, match=r"\['f3'\]"):
        search.gates.step()
    assert all(torch.equal(value, before[key]) for key, value in search.gates.state_dict().items())
    search.gates.hooks = []
    search.gates.step()
    assert search.gates.status().step == 100


def test_a_search_resumes_from_state_dicts_on_either_kind_of_scalars():
    whole = Surrogate("graded", 12, 4, 200, "lpfs++").run()
    for first, second in ((False, False), (True, True), (True, False), (False, True)):
        for stop in (50, 130, 190):
            half, other = (Surrogate("graded", 12, 4, 200, "lpfs++") for _ in range(2))
            half.gates._device_ops, other.gates._device_ops = first, second
            half.run(stop)
            saved = pickle.loads(pickle.dumps((half.gates.state_dict(), half.prox.state_dict())))
            other.run(20)
            other.gates.load_state_dict(saved[0])
            other.prox.load_state_dict(saved[1])
            assert torch.equal(other.run(200 - stop).x, whole.x), (first, second, stop)


def test_a_copy_takes_its_own_steps():
    search = Surrogate("graded", 12, 4, 200, "lpfs++")
    search.run(50)
    other = copy.deepcopy(search)
    other.run(150)
    assert int(search.gates.steps_done) == 50
    assert torch.equal(search.run(150).x, other.gates.x)


def test_the_optimizer_reads_the_buffers_of_the_gates_and_does_not_know_them():
    search = Surrogate("graded", 12, 4, 200, "lpfs++")
    gates, prox = search.gates, search.prox
    assert not any(isinstance(value, Gates) for value in vars(prox).values())
    for move in (lambda: None, lambda: gates.to("cpu", torch.float64), lambda: gates.share_memory()):
        move()
        assert prox.param_groups[0]["lr"] is gates.lr_now
        assert prox.param_groups[0]["penalty"] is gates.penalty_now
        search.run(5)
        assert float(prox.param_groups[0]["lr"]) == gates.schedule.lr(int(gates.steps_done))
    prox.load_state_dict(copy.deepcopy(prox.state_dict()))
    assert prox.param_groups[0]["lr"] is gates.lr_now


def test_steps_follow_x_to_other_memory():
    one, two = Surrogate("graded", 12, 4, 200, "lpfs++"), Surrogate("graded", 12, 4, 200, "lpfs++")
    one.run(50)
    two.run(50)
    two.gates.x.data = two.gates.x.data.clone()
    two.gates.epsilon = two.gates.epsilon.clone()
    two.gates.control.data = two.gates.control.data.clone()
    assert torch.equal(one.run(150).x, two.run(150).x)


@pytest.mark.parametrize("gate", ["lpfs", "lpfs++"])
def test_freeze_ends_the_descent(gate):
    search = Surrogate("graded", 12, 1, 200, gate)
    search.run(90)
    earlier, alive = search.gates.x.detach().clone(), search.gates.kept
    search.run(20)
    search.gates.freeze(earlier)
    assert not search.prox.state[search.gates.x]["momentum_buffer"].any()
    assert search.gates.keep.keep == len(alive)
    search.run(90)
    assert search.gates.kept == alive
    assert search.gates.status().frozen
    with pytest.raises(StateError, match="keep="):
        Surrogate("graded", 12, None, 200, gate, penalty=0.1).gates.freeze()


def test_the_rms_rescale():
    scales = []
    for on_device in (False, True):
        gates = Gates([f"f{n}" for n in range(5)], gate_function("lpfs++"), 700, rescale="rms")
        gates._device_ops = on_device
        gates.optimizer(penalty=0.0)
        with torch.no_grad():
            gates.x.copy_(torch.tensor([1.0, 0.5, 0.0, -0.3, 2.0]))
        for _ in range(700):
            gates.step()
        scales.append(float(gates.scale))
    assert scales[0] == scales[1] != 1.0


def test_the_guard_of_tables_is_called():
    table = Table((5, 4), 2)  # from now on tables are guarded
    with pytest.raises(StateError, match="Table"):
        ProxSGD([table.weight], lr=0.1).step()
