"""A search that is not finished is an error, unless the caller says that it is wanted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lpfs
from lpfs.errors import InputError, SearchError, StateError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.ModuleDict({f"f{n}": nn.Embedding(10, 2) for n in range(6)})
        self.top = nn.Linear(12, 1)

    def forward(self, ids):
        return self.top(torch.cat([table(ids[:, n]) for n, table in enumerate(self.emb.values())], 1)).squeeze(1)


def batch(number):
    ids = torch.randint(10, (32, 6), generator=torch.Generator().manual_seed(number))
    return ids, (ids[:, 0] > 4).float()


def loss_of(model, ids, labels):
    return nn.functional.binary_cross_entropy_with_logits(model(ids), labels)


def train(model, gates, steps, advance=True, keep=2):
    optimizer, prox = torch.optim.Adagrad(gates.model_parameters(), lr=0.05), gates.optimizer(keep=keep)
    for number in range(steps):
        optimizer.zero_grad()
        prox.zero_grad()
        loss_of(model, *batch(number)).backward()
        optimizer.step()
        prox.step()
        if advance:
            gates.step()


def attached(**settings):
    torch.manual_seed(0)
    model = Net()
    return model, lpfs.attach(model, model.emb, **settings)


def test_absorb_and_selection_raise_on_an_unfinished_search():
    model, gates = attached(steps=20_000)
    train(model, gates, 30)
    before = [parameter.clone() for parameter in model.parameters()]
    for call in (lambda: lpfs.absorb(model), gates.selection):
        with pytest.raises(
            SearchError, match=r"30 of 20,000 steps, 6 of 6 gates are non-zero instead of 2.*partial=True"
        ):
            call()
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert gates.selection(partial=True).kept == tuple(gates.names)
    assert lpfs.absorb(model, partial=True).kept == tuple(gates.names)


def test_absorb_raises_before_the_first_step_of_a_search():
    model, gates = attached(steps=20)
    gates.optimizer(penalty=0.1)
    model(batch(0)[0])
    with pytest.raises(SearchError, match="0 of 20 steps"):
        lpfs.absorb(model)
    assert lpfs.absorb(model, partial=True).kept == tuple(gates.names)


def test_a_state_dict_of_an_unfinished_search_is_unfinished_too():
    model, gates = attached(steps=200)
    train(model, gates, 30)
    other, restored = attached(steps=200)
    other.load_state_dict(model.state_dict())
    with pytest.raises(SearchError, match="30 of 200 steps"):
        lpfs.absorb(other)
    assert restored.selection(partial=True).kept == tuple(gates.kept)


def test_a_finished_search_and_gates_without_a_search_are_absorbed():
    model, gates = attached(steps=200)
    train(model, gates, 200)
    assert len(lpfs.absorb(model).kept) == 2
    model, gates = attached()
    assert lpfs.absorb(model).kept == tuple(gates.names)


@pytest.mark.parametrize("keep", [2, None])
def test_a_forgotten_step_of_the_gates_is_noticed_within_twenty_steps(keep):
    model, gates = attached(steps=200)
    settings = {"keep": keep} if keep else {"penalty": 0.1}
    optimizer, prox = torch.optim.Adagrad(gates.model_parameters(), lr=0.05), gates.optimizer(**settings)

    def forgetful_loop():
        for number in range(20):
            loss_of(model, *batch(number)).backward()
            optimizer.step()
            prox.step()

    with pytest.raises(StateError, match=r"without gates.step\(\).*after prox.step\(\)"):
        forgetful_loop()


def test_gradient_accumulation_and_evaluation_are_not_taken_for_a_forgotten_step():
    model, gates = attached(steps=60)
    prox = gates.optimizer(keep=2)
    for number in range(60):
        for part in range(30 if number == 5 else 1):
            loss_of(model, *batch(part)).backward()
        prox.step()
        gates.step()
        prox.zero_grad()
    model.eval()
    for _ in range(30):
        model(batch(0)[0])
    assert len(gates.kept) == 2


def test_optimizer_needs_the_number_of_steps():
    _, gates = attached()
    with pytest.raises(InputError, match="steps"):
        gates.optimizer(keep=2)


def test_search_is_the_same_as_the_loop_and_checks_its_end():
    model, gates = attached(steps=100)
    train(model, gates, 100)
    other, same = attached(steps=100)
    with same.search(torch.optim.Adagrad(same.model_parameters(), lr=0.05), keep=2) as step:
        for number in range(100):
            step(loss_of(other, *batch(number)))
    assert torch.equal(gates.x, same.x)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
    _, short = attached(steps=100)
    with pytest.raises(SearchError, match="0 of 100 steps"), short.search([], keep=2):
        pass


@pytest.mark.parametrize("how", ["step", "unscale", "plain"])
@pytest.mark.parametrize("zero_first", [True, False])
def test_a_plain_step_under_a_grad_scaler_is_noticed(how, zero_first):
    torch.manual_seed(0)
    model = Net()
    gates = lpfs.attach(model, steps=100)
    optimizer, prox = torch.optim.Adagrad(gates.model_parameters(), lr=0.05), gates.optimizer(keep=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)

    def run(steps):
        for number in range(steps):
            if zero_first:
                optimizer.zero_grad()
                prox.zero_grad()
            with torch.amp.autocast("cpu", dtype=torch.float16):
                loss = loss_of(model, *batch(number))
            if not zero_first:
                optimizer.zero_grad()
                prox.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            if how == "unscale":
                scaler.unscale_(prox)
            if how == "step":
                scaler.step(prox)
            else:
                prox.step()
            scaler.update()
            gates.step()

    if how == "plain":
        with pytest.raises(StateError, match=r"GradScaler.*scaler\.step\(prox\)"):
            run(20)
    else:
        run(30)
        assert gates.x.abs().max() < 2


def test_only_the_first_steps_of_a_loss_in_float16_are_checked_for_its_scale():
    def step(gates, model, gradient):
        with torch.amp.autocast("cpu", dtype=torch.float16):
            model(batch(0)[0])
        gates.x.grad = torch.full((6,), gradient)
        gates.step()

    model, gates = attached(steps=100)
    for number in range(22):
        step(gates, model, 0.1 if number < 20 else 1e4)
    assert gates.status().step == 22
    model, gates = attached(steps=100)
    with pytest.raises(StateError, match=r"1e\+04.*GradScaler"):
        step(gates, model, 1e4)


def test_prune_says_why_nothing_got_smaller():
    model = Net()
    gates = lpfs.attach(model, steps=1)
    whole = lpfs.prune(model, lpfs.absorb(model), batch=batch(0)[:1])
    assert "no field was dropped" in whole.reason
    assert str(whole).startswith("nothing got smaller: no field was dropped")
    gates = lpfs.attach(model, steps=1)
    with torch.no_grad():
        gates.x[1:] = 0
    smaller = lpfs.prune(model, lpfs.absorb(model), batch=batch(0)[:1])
    assert smaller.reason == ""
    assert smaller.parameters == (6 * 20 + 13, 20 + 13)
    assert str(smaller).startswith("parameters 133 -> 33; certified" if smaller.certificate.certified else "parameters")


def test_prune_warns_if_dropped_fields_share_the_weights_of_kept_ones():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.top = nn.Embedding(30, 4), nn.Linear(12, 1)

        def forward(self, ids):
            return self.top(self.emb(ids).flatten(1)).squeeze(1)

    model = Shared()
    gates = lpfs.attach(model, {f"f{n}": lpfs.Site("emb", index=n) for n in range(3)}, steps=1)
    with torch.no_grad():
        gates.x[0] = 0
    selection = lpfs.absorb(model)
    with pytest.warns(UserWarning, match="nothing got smaller: 'f0' is a part of the output of 'emb'.*Fused"):
        lpfs.prune(model, selection)
