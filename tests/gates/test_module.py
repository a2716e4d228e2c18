from __future__ import annotations

import copy
import json
import math
import pickle
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import lpfs
from lpfs import FUNCTIONS, Decay, Gates, Schedule, gate_function
from lpfs.errors import AllGatesZeroError, FieldError, InputError, NonFiniteError, SearchError, StateError
from lpfs.gates import stepping
from lpfs.gates.stepping import triton_kernels
from tests.helpers.surrogate import Surrogate
from tests.helpers.zoo import Plain, batch

NAMES = ["a", "b", "c"]


def make(gate: str = "lpfs++", **settings) -> Gates:
    return Gates(NAMES, gate_function(gate), **settings)


@pytest.mark.parametrize("gate", sorted(FUNCTIONS))
@pytest.mark.parametrize("size", [1, 3, 7, 16, 33, 500])
def test_every_gate_is_exactly_one_at_the_start(gate, size):
    gates = Gates([str(n) for n in range(size)], gate_function(gate))
    assert torch.equal(gates(), torch.ones(size))
    assert gates.kept == list(gates.names)


def test_forward_and_evaluation_move_nothing():
    gates = make("lpfs-noise", steps=100)
    gates.optimizer(penalty=0.1)
    before = copy.deepcopy(gates.state_dict())
    for mode in (True, False):
        gates.train(mode)
        gates().sum().backward()
        _ = gates.values, gates.kept, gates.status(), gates.selection(partial=True)
    for key, value in gates.state_dict().items():
        assert torch.equal(value, before[key])


def test_a_search_that_keeps_all_fields_has_no_penalty():
    gates = make(steps=100)
    prox = gates.optimizer(keep=3)
    assert gates.status().penalty == 0.0
    gates.x.grad = torch.zeros(3)
    prox.step()
    assert gates.x.tolist() == [1.0, 1.0, 1.0]
    assert gates.optimizer(keep=2) is not None
    assert gates.status().penalty > 0


@pytest.mark.parametrize(("steps", "done"), [(30, 30), (1000, 100)])
def test_gates_that_never_ran_are_reported_after_a_hundred_steps_or_at_the_end(steps, done):
    gates = make(steps=steps)
    gates.hooks, gates.entered = [SimpleNamespace(ran=False, at=[(0, None)])], True
    gates.steps_done.fill_(done - 1)
    gates.check()
    gates.steps_done.fill_(done)
    with pytest.raises(FieldError, match="never ran"):
        gates.check()


def test_a_step_moves_epsilon_and_the_learning_rate_by_the_schedule():
    gates = make(steps=1000, schedule="terabyte")
    prox = gates.optimizer(penalty=0.0)
    gates.x.grad = torch.zeros(3)
    for _ in range(200):
        prox.step()
        gates.step()
    assert float(gates.epsilon) == pytest.approx(0.1 * 0.9978**2)
    assert prox.param_groups[0]["lr"] == pytest.approx(0.01 * 0.9991**2)
    assert gates.status().step == 200


def test_errors_are_looked_for_at_regular_steps(monkeypatch):
    """On a GPU a check waits for the device, so that not every step has one."""
    monkeypatch.setattr(stepping, "CHECK_EVERY", 5)
    checked, check = [], Gates.check
    monkeypatch.setattr(Gates, "check", lambda gates: checked.append(int(gates.steps_done)) or check(gates))
    gates = make(steps=1000)
    for _ in range(16):
        gates.step()
    assert checked == [5, 10, 15]


def test_the_epsilon_rescale_keeps_a_gate_at_one_where_x_is_one():
    gates = make(steps=50)
    gates.optimizer(penalty=0.0)
    for _ in range(50):
        gates.step()
        assert torch.allclose(gates.values, torch.ones(3), atol=1e-6)
    off = make(steps=50, rescale="off")
    off.optimizer(penalty=0.0)
    for _ in range(50):
        off.step()
    assert float(off.values[0]) == pytest.approx((1 + 10 * math.sqrt(1e-4) * math.pi / 4) / 3.39274, rel=1e-3)


def test_the_rms_rescale_is_over_the_gates_alive_refreshed_and_then_frozen():
    gates = make(steps=60_000, rescale="rms")
    gates.optimizer(penalty=0.0)
    with torch.no_grad():
        gates.x.copy_(torch.tensor([1.0, 0.5, 0.0]))
    for _ in range(99):
        gates.step()
    assert float(gates.scale) == 1.0
    gates.step()
    alive = gates.values[:2]
    assert float(alive.square().mean().sqrt()) == pytest.approx(1.0, rel=1e-5)
    assert gates.values[2].item() == 0.0
    frozen = float(gates.scale)
    gates.steps_done.fill_(59_999)
    gates.step()
    assert float(gates.scale) == frozen


def test_the_rescale_has_no_gradient():
    gates = make(steps=10, rescale="rms")
    gates.optimizer(penalty=0.0)
    gates.step()
    gates().sum().backward()
    slope = gates.function.slope(gates.x, gates.epsilon) / (gates.norm * gates.scale)
    assert torch.equal(gates.x.grad, slope)


def test_noise_is_drawn_in_step_fades_and_is_off_in_evaluation():
    gates = make("lpfs-noise", steps=100)
    gates.optimizer(penalty=0.0)
    assert not gates.noise.any()
    gates.step()
    early = gates.noise.clone()
    assert early.any()
    assert not torch.equal(gates(), gates.values)
    gates.eval()
    assert torch.equal(gates(), gates.values)
    for _ in range(99):
        gates.step()
    assert not gates.noise.any()


def test_negative_gates_are_alive():
    gates = make()
    with torch.no_grad():
        gates.x.copy_(torch.tensor([-0.5, 0.0, 0.5]))
    assert gates.kept == ["a", "c"]
    assert gates.dropped == ["b"]
    assert gates.values[0] == -gates.values[2]
    assert gates.selection().gates == {"a": gates.values[0].item(), "b": 0.0, "c": gates.values[2].item()}


def test_every_gate_at_zero_stops_the_search_and_says_what_to_change():
    search = Surrogate("useless", 4, None, 600, "lpfs", penalty=5.0)
    with pytest.raises(AllGatesZeroError, match="Lower the penalty"):
        search.run()


def test_gates_stay_in_full_precision_when_the_model_does_not():
    gates = make()
    with torch.no_grad():
        gates.x.copy_(torch.tensor([0.123456789, 1.0, 0.0]))
    before = gates.values
    assert gates.to(torch.bfloat16) is gates
    assert gates.half().x.dtype == torch.float32
    assert torch.equal(gates.values, before)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_gates_and_their_optimizer_can_be_copied_in_the_middle_of_a_search(clone):
    whole, half = (Surrogate("graded", 10, 2, 600, "lpfs++") for _ in range(2))
    half.run(50)
    half.gates, half.prox = clone((half.gates, half.prox))
    half.run(550)
    assert torch.equal(half.gates.x, whole.run().x)


def test_a_state_dict_of_other_gates_is_refused_by_what_differs():
    state = make(steps=100).state_dict()
    for other, key in (
        (Gates(["b", "a", "c"], gate_function("lpfs++"), 100), "fields"),
        (make("lpfs", steps=100), "gate"),
        (Gates(NAMES, gate_function("lpfs++", alpha=20.0), 100), "alpha"),
        (make(steps=1000), "steps"),
        (make(steps=100, rescale="off"), "rescale"),
        (Gates(NAMES, gate_function("lpfs++", epsilon=0.3), 100), "epsilon"),
        (Gates(NAMES, gate_function("lpfs++", noise=0.1), 100), "noise"),
        (make(steps=100, schedule="terabyte"), "schedule"),
        (make(steps=100, schedule=Schedule(Decay(0.1, 0.5, floor=1e-4), Decay(0.1, 0.5))), "schedule"),
    ):
        with pytest.raises(StateError, match=f"of gates with {key} ="):
            other.load_state_dict(state)


@pytest.mark.parametrize("schedule", ["scaled", Schedule(Decay(0.1, 0.5, floor=1e-4), Decay(0.1, 0.5))])
def test_a_state_dict_of_an_earlier_version_has_fewer_settings(schedule):
    gates, other = (make(steps=100, schedule=schedule) for _ in range(2))
    state = gates.state_dict()
    saved = json.loads(bytes(state["metadata"].tolist()).decode())
    for key in ("epsilon", "noise", "schedule"):
        del saved[key]
    state["metadata"] = torch.tensor(list(json.dumps(saved).encode()), dtype=torch.uint8)
    other.load_state_dict(state)
    assert torch.equal(other.metadata, gates.metadata)
    other.load_state_dict(gates.state_dict())


def test_the_plan_can_change_in_the_middle_of_a_search():
    search = Surrogate("graded", 10, None, 600, "lpfs++", penalty=0.0)
    search.run(100)
    search.prox = search.gates.optimizer(keep=4)
    assert len(search.run(500).kept) == 4
    fewer = Surrogate("graded", 10, 6, 600, "lpfs", penalty=None)
    fewer.run(590)
    assert len(fewer.gates.kept) == 6
    with pytest.raises(InputError, match="keep=8.* 6 gates are alive.*'lpfs'"):
        fewer.gates.optimizer(keep=8)


def test_gates_that_were_never_stepped_say_so_at_the_end_and_can_go_on():
    gates = make(steps=50)
    gates.optimizer(keep=2)
    for _ in range(49):
        gates.step()
    with pytest.raises(SearchError, match="3 fields are alive instead of 2.*Was prox.step"):
        gates.step()
    gates.step()
    assert gates.status().step == 51


def test_whole_numbers_of_steps_and_float32_whatever_the_default():
    for steps in (0, -3, 2e4, True):
        with pytest.raises(InputError, match="steps must be an integer"):
            make(steps=steps)
    gates = make(steps=np.int64(60))
    gates.optimizer(keep=np.int64(2))
    assert (type(gates.steps), type(gates.keep.keep)) == (int, int)
    torch.set_default_dtype(torch.float64)
    try:
        assert make().x.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_status_and_repr_can_be_read():
    gates = make(steps=1000)
    gates.optimizer(penalty=0.25)
    assert str(gates.status()).startswith("step 0 of 1,000: 3 of 3 gates alive, smallest |g| 1, ε 0.1")
    assert "λ 0.25" in str(gates.status())
    assert "3 fields, lpfs++, 3 alive" in repr(gates)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, InputError, "either keep=K.* or penalty"),
        ({"keep": 1, "penalty": 0.1}, InputError, "either keep=K"),
        ({"keep": 0}, InputError, "keep .* 3 fields, found 0"),
        ({"keep": 4}, InputError, "keep .* 3 fields, found 4"),
        ({"penalty": -0.1}, InputError, "penalty must be >= 0"),
        ({"penalty": math.nan}, InputError, "penalty must be >= 0"),
        ({"penalty": [0.1, 0.2]}, InputError, "penalty must be one number or 3"),
        ({"keep": 1, "costs": [1.0, 2.0]}, InputError, "costs must be 3 numbers"),
        ({"keep": 1, "costs": [1.0, 2.0, -1.0]}, InputError, "costs must be finite"),
        ({"keep": 1, "costs": [0.0, 0.0, 0.0]}, InputError, "costs must be"),
        ({"keep": 1, "must_keep": ["z"]}, FieldError, "must_keep names 'z'"),
        ({"keep": 1, "must_keep": ["a", "b"]}, InputError, "less than the 2 fields that must be kept"),
        ({"keep": 1, "lr": -1.0}, InputError, "start .* > 0, found -1"),
        ({"keep": 1, "prox": "l0"}, InputError, "prox='l0'"),
        ({"penalty": 0.1, "prox": "l3"}, InputError, "prox must be"),
        ({"keep": 2.5}, InputError, "found 2.5"),
        ({"keep": "2"}, InputError, "found '2'"),
        ({"penalty": "a"}, InputError, "penalty must be a number"),
        ({"keep": 2, "costs": {"a": 1}}, InputError, "costs must be a number"),
    ],
)
def test_nonsense_is_refused_and_nothing_changes(arguments, error, message):
    gates = make(steps=100)
    with pytest.raises(error, match=message):
        gates.optimizer(**arguments)
    assert gates.keep is None
    assert float(gates.control[0]) == 0.0


def test_a_search_too_short_to_steer_is_refused():
    with pytest.raises(InputError, match="keep=2 needs a search of at least 50 steps .* steps=49"):
        make(steps=49).optimizer(keep=2)
    make(steps=49).optimizer(keep=3)
    make(steps=49).optimizer(penalty=0.1)


def test_gates_need_fields_and_a_model():
    with pytest.raises(FieldError, match="at least one field"):
        Gates([], gate_function("lpfs"))
    with pytest.raises(StateError, match="not attached"):
        make().model_parameters()
    with pytest.raises(InputError, match="rescale must be"):
        make(rescale="max")


def test_gates_may_be_called_with_another_x():
    gates = make()
    other = torch.tensor([0.5, 0.0, 1.0], requires_grad=True)
    values = torch.func.functional_call(gates, {"x": other}, ())
    values.sum().backward()
    assert torch.equal(values, gates.values_of(other))
    assert other.grad.abs().min() > 0
    assert gates.x.grad is None


def test_a_scheduler_may_wrap_the_step_of_the_optimizer():
    search = Surrogate("graded", 5, None, 100, "lpfs++", penalty=0.1)
    torch.optim.lr_scheduler.LambdaLR(search.prox, lambda step: 1.0)
    search.run(3)
    assert search.gates.status().step == 3


def test_the_status_says_when_the_dropped_fields_are_final():
    search = Surrogate("graded", 12, 4, 200, "lpfs++")
    assert not search.run(100).status().frozen
    assert "frozen" not in str(search.gates.status())
    assert search.run(100).status().frozen
    assert "frozen" in str(search.gates.status())


def test_on_a_cpu_the_step_itself_raises_an_error_of_the_gradient():
    gates = make(steps=100)
    prox = gates.optimizer(keep=2)
    gates.to("cpu")
    gates.x.grad = torch.tensor([1.0, math.nan, 0.0])
    with pytest.raises(NonFiniteError, match=r"\[1\]"):
        prox.step()


def test_an_infinite_loss_changes_neither_gates_nor_weights():
    model = Plain()
    gates = lpfs.attach(model, model.fields, steps=100)
    optimizer = torch.optim.Adagrad(gates.model_parameters(), lr=0.1)
    before = {name: value.clone() for name, value in model.named_parameters()}
    with pytest.raises(NonFiniteError, match="nothing was changed"), gates.search(optimizer, keep=2) as step:
        step(model(*batch()).sum() * math.inf)
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name])


def test_triton_kernels_are_used_if_they_can_be_imported(monkeypatch):
    kernels = ModuleType("lpfs.gates._triton")
    monkeypatch.delattr("lpfs.gates._triton", raising=False)
    for module, expected in ((kernels, kernels), (None, None)):  # None: the import raises ImportError
        monkeypatch.setitem(sys.modules, "lpfs.gates._triton", module)
        assert triton_kernels.__wrapped__() is expected
