"""absorb: every row of the exactness table."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import lpfs
from lpfs import Site
from lpfs.errors import ExactnessError, InputError, SharedTableError, StateError
from tests.helpers.zoo import GATES, OPTIMIZERS, B, D, Plain, Stacked, batch, gated, set_gates, trained, whole_weights


def no_gates_left(model: nn.Module) -> bool:
    return not any("lpfs_gates" in key for key in model.state_dict()) and all(
        "lpfs" not in name for name, _ in model.named_parameters()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tables_take_any_gate_bit_for_bit(dtype):
    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.ModuleList([nn.Embedding(7, D) for _ in range(4)])
            self.top = nn.Linear(4 * D, 1)

        def forward(self, ids):
            return self.top(torch.cat([table(ids[:, n]) for n, table in enumerate(self.emb)], 1)).squeeze(1)

    model, ids = Tables().to(dtype), torch.randint(7, (B, 4))
    gates = lpfs.attach(model)
    with torch.no_grad():
        gates.x.copy_(torch.tensor([0.1234567, -0.7654321, 0.0, 1.3]))
    before = model(ids)
    selection = lpfs.absorb(model, batch=(ids,))
    assert torch.equal(model(ids), before)
    assert no_gates_left(model)
    assert selection.dropped == ("emb.2",)
    assert selection.made["exact"] is True
    assert set(selection.made["absorbed"].values()) == {"table"}
    assert not model.emb[2].weight.any()


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_everything_else_is_exact_where_arithmetic_is(mode):
    """Whole weights and gates that are powers of two: any difference would be an error of ours."""
    model = gated(whole_weights(Plain(mode=mode)).double())
    data = batch(torch.float64, whole=True)
    before = model(*data)
    selection = lpfs.absorb(model)
    assert torch.equal(model(*data), before)
    assert no_gates_left(model)
    where = selection.made["absorbed"]
    assert where == {"user": "table", "item": "table", "city": "table", "tags": "table", "price": "branch",
                     "dense": "branch"}  # fmt: skip
    assert selection.made["exact"] is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elsewhere_the_output_moves_by_rounding_only(dtype):
    model = Plain().to(dtype)
    gates = lpfs.attach(model, model.fields)
    with torch.no_grad():
        gates.x.uniform_(0.05, 0.9)
    before = model(*batch(dtype))
    selection = lpfs.absorb(model, batch=batch(dtype))
    change = (model(*batch(dtype)).double() - before.double()).abs().max().item()
    assert change == selection.made["max_logit_change"]
    # six fields of width 4 and two layers: some dozens of roundings of values below one, summed in float32
    assert change <= min(100 * torch.finfo(dtype).eps, 0.05)


@pytest.mark.parametrize("value", [2.0, 0.0, -2.0])
def test_a_bag_of_maxima_takes_a_gate_that_is_not_negative(value):
    model = Plain(mode="max")
    gated(model, [1.0, 1.0, 1.0, value, 1.0, 1.0])
    before = model.bag(batch()[1])
    selection = lpfs.absorb(model)
    assert torch.equal(model.bag(batch()[1]), before)
    assert selection.made["absorbed"]["tags"] == ("constant" if value < 0 else "table")
    assert no_gates_left(model)


def test_a_table_with_max_norm_keeps_a_constant():
    model = Plain(max_norm=1.0)
    with torch.no_grad():
        model(*batch())  # max_norm renormalises in place at the first look-up
        gated(model)
        before = model(*batch())
        looked_up = model.emb["user"](torch.arange(10))
    selection = lpfs.absorb(model, batch=batch())
    assert selection.made["absorbed"]["user"] == "constant"
    with torch.no_grad():
        after = model(*batch())
    assert selection.made["max_logit_change"] <= 100 * torch.finfo(torch.float32).eps  # bags and branches round
    assert torch.equal(model.emb["user"](torch.arange(10)), looked_up)
    torch.testing.assert_close(after, before)
    assert no_gates_left(model)
    assert model.lpfs_factors.values.tolist() == GATES[:3]
    fresh = gated(Plain(max_norm=1.0))
    with pytest.raises(ExactnessError, match="'user', 'item', 'city'.*constants=True"):
        lpfs.absorb(fresh, constants=False)
    assert hasattr(fresh, "lpfs_gates")


def relu_branch() -> nn.Module:
    return nn.Sequential(nn.Linear(3, D), nn.Dropout(0.5), nn.ReLU())


def test_past_a_relu_only_a_positive_gate_goes_into_the_branch():
    for value, reader, where in ((2.0, False, "branch"), (-2.0, False, "constant"), (-2.0, True, "reader")):
        model = whole_weights(Plain(branch=relu_branch())).double().eval()
        data = batch(torch.float64, whole=True)
        extra = {"reader": model.top[0]} if reader else {}
        gated(model, [1.0, 1.0, 1.0, 1.0, 1.0, value], **extra)
        before = model(*data)
        selection = lpfs.absorb(model, batch=data)
        assert selection.made["absorbed"]["dense"] == where
        assert torch.equal(model(*data), before)
        assert no_gates_left(model)


def test_slices_stay_as_constants_or_go_into_the_linear_that_reads_them():
    ids = torch.randint(6, (B, 4))
    model = Stacked()
    gates = lpfs.attach(model, {f"f{n}": Site("table", index=n) for n in range(4)})
    set_gates(gates, [0.0, -2.0, 0.5, 1.0])
    before = model(ids)
    selection = lpfs.absorb(model, batch=(ids,))
    assert torch.equal(model(ids), before)
    assert set(selection.made["absorbed"].values()) == {"constant"}
    assert selection.made["max_logit_change"] == 0.0
    assert not list(model.lpfs_factors.parameters())

    model = whole_weights(Stacked()).double()
    sites = {f"f{n}": Site("table", index=n, reader=model.top[0], columns=slice(n * D, (n + 1) * D)) for n in range(4)}
    set_gates(lpfs.attach(model, sites), [0.0, -2.0, 0.5, 1.0])
    before = model(ids)
    selection = lpfs.absorb(model, batch=(ids,))
    assert torch.equal(model(ids), before)
    assert set(selection.made["absorbed"].values()) == {"reader"}
    assert no_gates_left(model)
    assert not hasattr(model, "lpfs_factors")


def test_a_batch_that_the_model_does_not_take_is_refused():
    model = gated(Plain())
    with pytest.raises(InputError, match=r"absorb: model\(batch\) failed with TypeError.*lambda model, batch"):
        lpfs.absorb(model, batch={"ids": batch()[0]})
    assert hasattr(model, "lpfs_gates")


def test_a_model_that_stores_an_activation_is_copied_after_a_call_without_gradient():
    class Stores(Plain):
        def forward(self, ids, tags, price, dense):
            self.top.stored = self.dense(dense)
            return super().forward(ids, tags, price, dense)

    model = gated(Stores())
    model(*batch())
    selection = lpfs.absorb(model, batch=batch())
    model(*batch())
    with pytest.raises(InputError, match=r"cannot be copied, RuntimeError.*'top.stored'; remove it"):
        lpfs.prune(model, selection)
    assert lpfs.prune(model, selection, batch=batch()).certificate.max_logit_change == 0.0


class Normed(nn.Module):
    """Two branches that end in tanh, and a LayerNorm between them and the Linear."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(3, D), nn.Tanh()) for _ in range(2))
        self.norm, self.top = nn.LayerNorm(2 * D), nn.Linear(2 * D, 1)

    def forward(self, x):
        return self.top(self.norm(torch.cat([self.a(x), self.b(x)], 1))).squeeze(1)


def test_without_a_batch_a_reader_takes_no_gate_because_nothing_shows_that_it_reads_the_field():
    model, x = Normed(), torch.randn(B, 3)
    set_gates(lpfs.attach(model, {"a": model.a, "b": model.b}, reader=model.top), [1.0, 0.25])
    before = model(x)
    with pytest.raises(ExactnessError, match="input of a reader is not the output"):
        lpfs.absorb(model, batch=(x,))
    with pytest.raises(ExactnessError, match="'a', 'b'; pass constants=True or, .*batch="):
        lpfs.absorb(model, constants=False)
    selection = lpfs.absorb(model)
    assert torch.equal(model(x), before)
    assert selection.made["absorbed"] == {"a": "constant", "b": "constant"}
    assert selection.made["exact"] is True  # no weight changed


def test_a_reader_that_the_model_declares_takes_the_gate_without_a_batch():
    class Declares(Stacked):
        def sites(self):
            reader = self.top[0]
            return {f"f{n}": Site("table", index=n, reader=reader, columns=slice(n * D, (n + 1) * D)) for n in range(4)}

    model, ids = whole_weights(Declares()).double(), torch.randint(6, (B, 4))
    set_gates(lpfs.attach(model), [0.0, -2.0, 0.5, 1.0])
    before = model(ids)
    assert set(lpfs.absorb(model).made["absorbed"].values()) == {"reader"}
    assert torch.equal(model(ids), before)


def test_exactness_is_not_claimed_without_a_comparison():
    ids = torch.randint(9, (B, 2))
    for data, exact in ((None, None), ((ids,), True)):
        model = Tied()
        model.b.weight = nn.Parameter(model.a.weight.detach().clone())
        lpfs.attach(model, {"a": model.a, "b": model.b})
        assert lpfs.absorb(model, batch=data).made["exact"] is exact


def test_gates_are_not_rounded_to_the_default_dtype():
    model, ids = Tied(), torch.randint(9, (B, 2))
    model.b.weight = nn.Parameter(model.a.weight.detach().clone())
    gates = lpfs.attach(model, {"a": model.a, "b": model.b})
    with torch.no_grad():
        gates.x.copy_(torch.tensor([0.3, 0.7]))
    before = model(ids)
    torch.set_default_dtype(torch.float16)
    try:
        lpfs.absorb(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(model(ids), before)


class Tied(nn.Module):
    """Two fields around one weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Embedding(9, D), nn.Embedding(9, D)
        self.b.weight = self.a.weight
        self.top = nn.Linear(2 * D, 1)

    def forward(self, ids):
        return self.top(torch.cat([self.a(ids[:, 0]), self.b(ids[:, 1])], 1)).squeeze(1)


def test_a_shared_table_is_refused_or_untied():
    model, ids = Tied(), torch.randint(9, (B, 2))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    gates = lpfs.attach(model, {"a": model.a, "b": model.b})
    model(ids).sum().backward()
    optimizer.step()
    set_gates(gates, [2.0, -0.5])
    before, state = model(ids), copy.deepcopy(model.state_dict())
    with pytest.raises(SharedTableError, match="'a.weight'.*'b.weight'.*untie=True"):
        lpfs.absorb(model)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    old = optimizer.state[model.a.weight]["sum"].clone()
    lpfs.absorb(model, optimizer, untie=True)
    assert torch.equal(model(ids), before)
    assert model.a.weight is not model.b.weight
    assert torch.equal(optimizer.state[model.a.weight]["sum"], old / 4)
    assert torch.equal(optimizer.state[model.b.weight]["sum"], old * 4)
    held = [id(each) for group in optimizer.param_groups for each in group["params"]]
    assert [id(each) for each in model.parameters()] == held


def test_modules_of_one_field_that_share_a_weight_are_refused_or_untied():
    model, ids = Tied(), torch.randint(9, (B, 2))
    set_gates(lpfs.attach(model, {"ab": [model.a, model.b]}), [-0.5])
    before = model(ids)
    with pytest.raises(SharedTableError, match="'a.weight'.*'b.weight', of the same field: .* twice.*untie=True"):
        lpfs.absorb(model)
    lpfs.absorb(model, untie=True)
    assert torch.equal(model(ids), before)


def test_a_linear_whose_weight_another_layer_uses_keeps_a_constant():
    class Twice(Plain):
        def __init__(self):
            super().__init__()
            self.again = nn.Linear(1, D, bias=False)
            self.again.weight = self.price.weight

        def forward(self, ids, tags, price, dense):
            return super().forward(ids, tags, price, dense) + self.again(price).sum(1)

    model = gated(Twice(), [1.0, 1.0, 1.0, 1.0, -0.25, 1.0])
    before, weight = model(*batch()), model.price.weight.clone()
    selection = lpfs.absorb(model)
    assert selection.made["absorbed"]["price"] == "constant"
    assert torch.equal(model.price.weight, weight)
    assert torch.equal(model(*batch()), before)


def test_a_weight_used_behind_our_back_is_noticed_on_a_batch():
    class Sneaky(Plain):
        def forward(self, ids, tags, price, dense):
            extra = functional.embedding(ids[:, 0], self.emb["user"].weight).sum(1)
            return super().forward(ids, tags, price, dense) + extra

    model = gated(Sneaky(), [2.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    before = model(*batch())
    with pytest.raises(ExactnessError, match="also used outside the modules"):
        lpfs.absorb(model, batch=batch())
    assert torch.equal(model(*batch()), before)


def test_in_half_precision_the_check_is_made_in_full():
    class Sneaky(Plain):
        def forward(self, ids, tags, price, dense):
            extra = functional.embedding(ids[:, 0], self.emb["user"].weight).sum(1)
            return super().forward(ids, tags, price, dense) + extra

    for dtype in (torch.bfloat16, torch.float16):
        bad, good = Sneaky().to(dtype), Plain().to(dtype)
        with torch.no_grad():
            lpfs.attach(bad, bad.fields).x[0] = 0.3
        with pytest.raises(ExactnessError, match="also used outside the modules"):
            lpfs.absorb(bad, batch=batch(dtype))
        gates = lpfs.attach(good, good.fields)
        with torch.no_grad():
            gates.x.uniform_(0.05, 0.9)
        lpfs.absorb(good, batch=batch(dtype))


def test_in_half_precision_tables_are_still_checked_to_the_bit():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.top = nn.Embedding(9, D), nn.Linear(D, 1)

        def forward(self, ids):
            return self.top(self.emb(ids)).squeeze(1)

    model, ids = Table().bfloat16(), torch.arange(9)
    with torch.no_grad():
        lpfs.attach(model, {"ids": model.emb}).x[0] = 0.3
    assert lpfs.absorb(model, batch=(ids,)).made["max_logit_change"] == 0.0


class SharedBranch(nn.Module):
    """Two branches that end in one Linear."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(8, D)
        self.a = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), self.last)
        self.b = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), self.last)
        self.top = nn.Linear(2 * D, 1)

    def forward(self, x):
        return self.top(torch.cat([self.a(x), self.b(x)], 1)).squeeze(1)


@pytest.mark.parametrize("values", [[0.5, 2.0], [0.0, 1.0]])
def test_a_linear_that_two_branches_share_takes_no_gate(values):
    model, x = SharedBranch(), torch.randn(B, 3)
    set_gates(lpfs.attach(model, {"a": model.a, "b": model.b}), values)
    before = model(x)
    selection = lpfs.absorb(model)
    assert torch.equal(model(x), before)
    assert set(selection.made["absorbed"].values()) == {"constant"}


def test_a_relu_of_ones_own_is_not_taken_for_relu():
    class Odd(nn.ReLU):
        def forward(self, x):
            return super().forward(x) + 1

    model = gated(Plain(branch=nn.Sequential(nn.Linear(3, D), Odd())), [1.0, 1.0, 1.0, 1.0, 1.0, 2.0])
    before = model(*batch())
    lpfs.absorb(model)
    torch.testing.assert_close(model(*batch()), before)


def test_a_second_search_leaves_the_constants_of_the_first():
    model, ids = Stacked(), torch.randint(6, (B, 4))
    set_gates(lpfs.attach(model, {f"f{n}": Site("table", index=n) for n in range(4)}), [0.0, -2.0, 0.5, 1.0])
    lpfs.absorb(model)
    before = model(ids)
    lpfs.attach(model, {"all": model.norm})
    lpfs.detach(model)
    assert torch.equal(model(ids), before)
    set_gates(lpfs.attach(model, {"all": Site("norm", index=slice(4, 8))}), [2.0])
    twice = model(ids)
    lpfs.absorb(model)
    assert torch.equal(model(ids), twice)
    assert not torch.equal(twice, before)


def test_a_fresh_model_can_be_restored_to_what_absorb_left():
    ids = torch.randint(6, (B, 4))
    model = Stacked()
    set_gates(lpfs.attach(model, {f"f{n}": Site("table", index=n) for n in range(4)}), [0.0, -2.0, 0.5, 1.0])
    selection = lpfs.absorb(model)
    fresh = Stacked()
    lpfs.restore(fresh, lpfs.Selection.from_json(selection.to_json()))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(ids), model(ids))
    with pytest.raises(StateError, match="restore.*constants"):
        lpfs.restore(fresh, selection)
    tied, pairs = Tied(), torch.randint(9, (B, 2))
    set_gates(lpfs.attach(tied, {"a": tied.a, "b": tied.b}), [2.0, -0.5])
    selection = lpfs.absorb(tied, untie=True)
    again = Tied()
    lpfs.restore(again, selection)
    again.load_state_dict(tied.state_dict())
    assert torch.equal(again(pairs), tied(pairs))


@pytest.mark.parametrize("max_norm", [None, 1.0])  # a copy of the weight, or a constant
def test_a_fresh_model_gets_the_modules_that_untie_separated(max_norm):
    class Registered(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.ModuleDict({"b": nn.Embedding(9, D, max_norm=max_norm)})
            self.emb["a"] = self.emb["b"]
            self.top = nn.Linear(2 * D, 1)

        def forward(self, ids):
            return self.top(torch.cat([self.emb["a"](ids[:, 0]), self.emb["b"](ids[:, 1])], 1)).squeeze(1)

    model, ids = Registered(), torch.randint(9, (B, 2))
    set_gates(lpfs.attach(model, model.emb, untie=True), [2.0, -0.5])
    before = model(ids)
    selection = lpfs.absorb(model, untie=True)
    assert torch.equal(model(ids), before)
    fresh = Registered()
    lpfs.restore(fresh, lpfs.Selection.from_json(selection.to_json()))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(ids), before)


def test_several_optimizers_go_along():
    model = Plain()
    gates = lpfs.attach(model, model.fields)
    tables, rest = torch.optim.Adagrad(model.emb.parameters(), lr=0.1), torch.optim.Adam(model.price.parameters())
    model(*batch()).sum().backward()
    tables.step()
    rest.step()
    set_gates(gates, GATES)
    old = tables.state[model.emb["item"].weight]["sum"].clone(), rest.state[model.price.bias]["exp_avg"].clone()
    lpfs.absorb(model, [tables, rest])
    assert torch.equal(tables.state[model.emb["item"].weight]["sum"], old[0] / 4)
    assert torch.equal(rest.state[model.price.bias]["exp_avg"], old[1] / -0.25)


def test_hooks_and_parametrizations_of_others_keep_a_constant():
    model = Plain()
    model.emb["user"].register_forward_hook(lambda module, args, output: output + 1)
    nn.utils.parametrizations.weight_norm(model.emb["item"])
    gated(model, [2.0, 2.0, 2.0, 1.0, 1.0, 1.0])
    before = model(*batch())
    selection = lpfs.absorb(model)
    assert torch.equal(model(*batch()), before)
    assert selection.made["absorbed"]["user"] == selection.made["absorbed"]["item"] == "constant"
    assert selection.made["absorbed"]["city"] == "table"


def test_the_constants_survive_a_copy_a_state_dict_and_another_dtype():
    ids = torch.randint(6, (B, 4))
    model = Stacked()
    gates = lpfs.attach(model, {f"f{n}": Site("table", index=n) for n in range(4)})
    with torch.no_grad():
        gates.x.copy_(torch.tensor([0.123, 0.456, 0.0, 0.789]))
    values = gates.values
    lpfs.absorb(model)
    clone = copy.deepcopy(model)
    assert torch.equal(clone(ids), model(ids))
    assert "lpfs_factors.values" in model.state_dict()
    assert torch.equal(model.bfloat16().lpfs_factors.values, values)
    factors = model.lpfs_factors
    assert factors.double() is factors  # as for any module
    assert torch.equal(factors.values, values)


# ------------------------------------------------------------------------------- optimizer state


POWER = {"sum": 2, "exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2, "square_avg": 2, "grad_avg": 1}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_the_optimizer_state_is_rescaled_with_the_weights(name):
    model, optimizer = trained(name)
    weights = {"user": model.emb["user"].weight, "item": model.emb["item"].weight, "tags": model.bag.weight,
               "price": model.price.bias, "dense": model.dense[2].weight}  # fmt: skip
    untouched = copy.deepcopy(optimizer.state[model.top[0].weight])
    before = {field: copy.deepcopy(optimizer.state[weight]) for field, weight in weights.items()}
    lpfs.absorb(model, optimizer)
    gates = dict(zip(["user", "item", "city", "tags", "price", "dense"], GATES, strict=True))
    for field, weight in weights.items():
        for key, old in before[field].items():
            new = optimizer.state[weight][key]
            power = 0 if name == "rmsprop" and key == "momentum_buffer" else {**POWER, "momentum_buffer": 1}.get(key)
            if key == "step" or power is None or power == 0:
                assert torch.equal(torch.as_tensor(new), torch.as_tensor(old))
            elif gates[field] == 0:
                assert not new.any()
            else:
                assert torch.equal(new, old / gates[field] ** power)
    for key, value in optimizer.state[model.top[0].weight].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(untouched[key]))


def test_an_optimizer_that_is_not_known_is_refused_before_anything_changes():
    class Strange(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

    model = gated(Plain())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match="state of Strange.*GRADIENT_POWERS"):
        lpfs.absorb(model, Strange(model.top.parameters()))
    odd = torch.optim.SGD(model.top.parameters(), lr=0.1)
    odd.state[model.top[0].weight]["mystery"] = torch.ones(3)
    with pytest.raises(InputError, match="state 'mystery' of SGD"):
        lpfs.absorb(model, odd)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_absorb_needs_gates_and_takes_them_once():
    with pytest.raises(StateError, match="absorb: this model has no gates"):
        lpfs.absorb(Plain())
    model = gated(Plain())
    lpfs.absorb(model)
    with pytest.raises(StateError, match="no gates"):
        lpfs.absorb(model)


def test_an_overflow_is_refused():
    model = Plain().to(torch.float16)
    with torch.no_grad():
        model.emb["item"].weight.fill_(60_000)
    gated(model, [1.0, 4.0, 1.0, 1.0, 1.0, 1.0])
    with pytest.raises(InputError, match="field 'item'.*overflow"):
        lpfs.absorb(model)
    assert hasattr(model, "lpfs_gates")
