from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lpfs import ProxSGD
from lpfs.errors import InputError, NonFiniteError
from lpfs.gates.optimizer import threshold_factor


@given(
    st.lists(st.lists(st.floats(-10, 10, width=32), min_size=4, max_size=4), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.5, 0.9]),
    st.sampled_from([0.1, 0.01, 1.0]),
    st.sampled_from(["l1", "l0"]),
)
def test_without_a_penalty_it_is_sgd_bit_for_bit(gradients, momentum, lr, prox):
    ours, theirs = (nn.Parameter(torch.tensor([1.0, -0.5, 0.25, 3.0])) for _ in range(2))
    a = ProxSGD([ours], lr=lr, momentum=momentum, penalty=0.0, prox=prox)
    b = torch.optim.SGD([theirs], lr=lr, momentum=momentum, foreach=False)
    for each in gradients:
        ours.grad, theirs.grad = torch.tensor(each), torch.tensor(each)
        a.step()
        b.step()
        assert torch.equal(ours, theirs)


def test_one_step_by_hand():
    x = nn.Parameter(torch.tensor([1.0, 0.015, -1.0]))
    prox = ProxSGD([x], lr=0.1, momentum=0.9, penalty=0.2)
    x.grad = torch.tensor([1.0, 0.0, 0.0])
    prox.step()
    assert x.tolist() == pytest.approx([1 - 0.1 - 0.02, 0.0, -0.98])
    assert x[1].item() == 0.0
    prox.step()  # velocity 1.9
    assert x[0].item() == pytest.approx(0.88 - 0.19 - 0.02)


def test_a_learning_rate_of_zero_moves_nothing():
    x = nn.Parameter(torch.ones(2))
    prox = ProxSGD([x], lr=0.0, penalty=0.2)
    x.grad = torch.ones(2)
    prox.step()
    assert x.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("name", "factor"), [("paper", 1.0), ("doubled", 2.0), ("momentum", 10.0)])
def test_the_ambiguous_thresholds_by_name(name, factor):
    x = nn.Parameter(torch.ones(2))
    prox = ProxSGD([x], lr=0.1, momentum=0.9, penalty=0.05, threshold=name)
    x.grad = torch.zeros(2)
    prox.step()
    assert x.tolist() == pytest.approx([1 - factor * 0.005] * 2)
    assert threshold_factor(prox.param_groups[0]) == pytest.approx(factor)


def test_the_l0_step_is_a_hard_threshold():
    x = nn.Parameter(torch.tensor([0.15, 0.13]))
    prox = ProxSGD([x], lr=0.1, momentum=0.0, penalty=0.1, prox="l0")  # √(2·0.1·0.1) = 0.1414
    x.grad = torch.zeros(2)
    prox.step()
    assert x.tolist() == pytest.approx([0.15, 0.0])


def test_penalty_by_entry_and_weights():
    x = nn.Parameter(torch.ones(3))
    penalty, weights = torch.tensor([0.1, 0.0, float("inf")]), torch.tensor([2.0, 1.0, 1.0])
    prox = ProxSGD([x], lr=1.0, momentum=0, penalty=penalty, weights=weights)
    x.grad = torch.zeros(3)
    prox.step()
    assert x.tolist() == pytest.approx([0.8, 1.0, 0.0])


def test_groups_have_their_own_settings():
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    prox = ProxSGD([{"params": [a], "penalty": 0.5}, {"params": [b]}], lr=0.1, penalty=0.0)
    a.grad = b.grad = torch.zeros(1)
    prox.step()
    assert (a.item(), b.item()) == pytest.approx((0.95, 1.0))


def test_entries_reach_exact_zero_and_a_large_gradient_brings_them_back():
    x = nn.Parameter(torch.tensor([0.01]))
    prox = ProxSGD([x], lr=0.1, momentum=0, penalty=0.2)
    x.grad = torch.zeros(1)
    prox.step()
    assert x.item() == 0.0
    x.grad = torch.tensor([-0.1])  # weaker than the penalty
    prox.step()
    assert x.item() == 0.0
    x.grad = torch.tensor([-0.5])
    prox.step()
    assert x.item() > 0


def test_the_state_dict_continues_bit_identically():
    gradients = torch.randn(10, 4)

    def make():
        x = nn.Parameter(torch.ones(4))
        penalty, weights = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([1.0, 0.5, 2.0, 1.0])
        return x, ProxSGD([x], lr=0.05, penalty=penalty, weights=weights)

    x, prox = make()
    for number, each in enumerate(gradients):
        if number == 5:
            middle, state = x.detach().clone(), copy.deepcopy(prox.state_dict())
        x.grad = each.clone()
        prox.step()
    y, resumed = make()
    y.data.copy_(middle)
    resumed.load_state_dict(state)
    for each in gradients[5:]:
        y.grad = each.clone()
        resumed.step()
    assert torch.equal(x, y)


def test_a_gradient_that_is_not_finite_is_refused_and_nothing_moves():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    prox = ProxSGD([a, b], lr=0.1, penalty=0.1)
    a.grad, b.grad = torch.ones(2), torch.ones(2)
    prox.step()
    before = copy.deepcopy((a.tolist(), b.tolist(), prox.state_dict()["state"]))
    b.grad = torch.tensor([1.0, float("nan")])
    with pytest.raises(NonFiniteError, match=r"not finite at \[1\]"):
        prox.step()
    assert a.tolist() == before[0]
    assert b.tolist() == before[1]
    for old, new in zip(before[2].values(), prox.state_dict()["state"].values(), strict=True):
        assert torch.equal(old["momentum_buffer"], new["momentum_buffer"])


def test_a_closure_and_parameters_without_gradient():
    x, unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    prox = ProxSGD([x, unused], lr=0.1, penalty=0.1)

    def closure():
        prox.zero_grad()
        loss = (x**2).sum()
        loss.backward()
        return loss

    assert prox.step(closure).item() == 1.0
    assert x.item() < 1
    assert unused.item() == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -0.1}, "lr must be >= 0"),
        ({"momentum": 1.0}, "momentum must be in"),
        ({"penalty": -1.0}, "penalty must be >= 0"),
        ({"penalty": torch.tensor([0.1, -0.1, 0.1])}, "penalty must be >= 0"),
        ({"penalty": torch.ones(2)}, "one entry for each of the 3 gates"),
        ({"weights": torch.ones(4)}, "one entry for each of the 3 gates"),
        ({"weights": torch.tensor([1.0, float("nan"), 1.0])}, "weights must be >= 0"),
        ({"prox": "l2"}, "prox must be"),
        ({"threshold": "half"}, "threshold must be"),
    ],
)
def test_nonsense_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        ProxSGD([nn.Parameter(torch.ones(3))], **settings)


def test_an_unknown_setting_of_a_group_is_refused():
    with pytest.raises(InputError, match="unknown setting 'lambda'"):
        ProxSGD([{"params": [nn.Parameter(torch.ones(1))], "lambda": 0.1}])


def test_hooks_on_a_step_are_called():
    calls = []
    x = nn.Parameter(torch.ones(2))
    prox = ProxSGD([x], lr=0.1)
    x.grad = torch.ones(2)
    prox.register_step_pre_hook(lambda *_: calls.append("before"))
    prox.register_step_post_hook(lambda *_: calls.append("after"))
    prox.step()
    assert calls == ["before", "after"]
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append("global"))
    other = ProxSGD([nn.Parameter(torch.ones(2))], lr=0.1)
    other.step()
    handle.remove()
    other.step()
    assert calls == ["before", "after", "global"]


def test_a_learning_rate_and_a_penalty_in_tensors_are_read_in_every_step_and_loaded_in_place():
    lr, penalty = torch.tensor(0.1, dtype=torch.float64), torch.tensor([0.2, 0.2], dtype=torch.float64)
    x = nn.Parameter(torch.ones(2))
    prox = ProxSGD([x], lr=lr, momentum=0.0, penalty=penalty)
    state = copy.deepcopy(prox.state_dict())
    for expected in (0.98, 0.58):
        x.grad = torch.zeros(2)
        prox.step()
        assert x.tolist() == pytest.approx([expected] * 2)
        lr.fill_(1.0)
        penalty.fill_(0.4)
    prox.load_state_dict(state)
    assert prox.param_groups[0]["lr"] is lr
    assert float(lr) == 0.1
    assert penalty.tolist() == [0.2, 0.2]


def test_a_finite_gradient_with_an_infinite_sum_is_accepted():
    x = nn.Parameter(torch.ones(12))
    prox = ProxSGD([x], lr=1e-38)
    x.grad = torch.full((12,), 1e38)
    prox.step()
    assert bool((x < 1).all())


def test_a_refused_group_is_not_added():
    x = nn.Parameter(torch.ones(2))
    prox = ProxSGD([x], lr=0.1)
    with pytest.raises(InputError, match="momentum must be in"):
        prox.add_param_group({"params": [nn.Parameter(torch.ones(2))], "momentum": 2.0})
    assert [group["params"] for group in prox.param_groups] == [[x]]


@pytest.mark.parametrize("saved_on_gpu", [False, True])
def test_a_state_of_another_device_does_not_change_how_steps_are_taken(saved_on_gpu):
    """``capturable`` belongs to the machine: on a CPU a step reports its errors itself."""
    saved, loaded = (
        ProxSGD([nn.Parameter(torch.ones(2))], lr=lr, capturable=capturable)
        for lr, capturable in ((0.1, saved_on_gpu), (0.2, not saved_on_gpu))
    )
    loaded.load_state_dict(saved.state_dict())
    assert loaded.param_groups[0]["lr"] == 0.1
    assert loaded.param_groups[0]["capturable"] is not saved_on_gpu
