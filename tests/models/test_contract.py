"""The contract of every registered model."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch

from lpfs.embeddings.optim import Adagrad
from lpfs.embeddings.row_grad import RowGrad, RowParameter, clear_grads, merged_row_grads
from lpfs.errors import FieldError, InputError
from lpfs.gates.absorb import absorb
from lpfs.gates.attach import attach, detach
from lpfs.gates.prune import prune
from lpfs.models import MODELS, make_model, model_class, registered_name
from lpfs.models.layers import indices_to_copy
from lpfs.schema import Field, Schema
from tests.helpers.clicks import CASES, IDS, MIXED, NUMBERS, SCHEMAS, TASKS, batch_of, some_gates, whole_numbers
from tests.helpers.zoo import set_gates

cases = pytest.mark.parametrize("case", CASES, ids=str)
schemas = pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
BCE = torch.nn.functional.binary_cross_entropy_with_logits


def step(model, optimizer, batch) -> None:
    optimizer.zero_grad()
    logits = model(batch)
    BCE(logits, batch.labels if logits.ndim == 2 else batch.labels[:, 0]).backward()
    optimizer.step()


def varies(logits) -> bool:
    """Return whether rows have different logits; if all ReLUs are zero, any result is exact."""
    return bool((logits != logits[:1]).any())


@cases
@schemas
def test_logits_and_gradients(case, schema):
    model, batch = case.make(schema), batch_of(schema)
    logits = model(batch)
    assert logits.shape == ((len(batch), 3) if schema.tasks else (len(batch),))
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()
    logits.sum().backward()
    for name, weight in model.named_parameters():
        if isinstance(weight, RowParameter):
            assert merged_row_grads(weight) is not None, name
        else:
            assert weight.grad is not None, name


@cases
@schemas
def test_every_part_changes_the_logits(case, schema):
    """The raw values are replaced one part at a time: each declared part must reach the logits."""
    model, batch = case.make(schema).eval(), batch_of(schema)
    before = model(batch)
    others = model.inputs_of_fields()
    assert set(others) == set(model.names) == set(model.sites())
    for name, change in others.items():
        assert not torch.equal(model(change(batch)), before), name


@cases
@schemas
def test_attaching_changes_no_bit(case, schema):
    model, batch = case.make(schema), batch_of(schema)
    before = model(batch)
    gates = attach(model, steps=10)
    assert gates.names == model.names
    assert torch.equal(model(batch), before)
    with gates.disabled():
        assert torch.equal(model(batch), before)
    detach(model)
    assert torch.equal(model(batch), before)


@cases
@schemas
def test_every_gate_changes_the_logits_and_has_a_gradient(case, schema):
    model, batch = case.make(schema), batch_of(schema)
    before = model(batch)
    gates = attach(model, steps=10)
    for number, name in enumerate(gates.names):
        with torch.no_grad():
            gates.x[number] = 0.5
        assert not torch.equal(model(batch), before), name
        with torch.no_grad():
            gates.x[number] = 1.0
    model(batch).sum().backward()
    assert (gates.x.grad != 0).all()


@cases
def test_a_zero_gate_removes_the_field(case):
    """Other values in a field with gate zero change no bit; integer weights make the check exact."""
    model, batch = whole_numbers(case.make(MIXED)), batch_of(MIXED, whole=True)
    gates = attach(model, steps=10)
    others = model.inputs_of_fields()
    for number, name in enumerate(gates.names):
        values = [1.0] * len(gates.names)
        values[number] = 0.0
        set_gates(gates, values)
        before = model(batch)
        if case.name != "dlrm_cross":  # there the columns are removed after absorbing
            assert torch.equal(model(others[name](batch)), before), name
        with torch.no_grad():
            gates.x[number] = 1.0


@cases
def test_gradients_of_gates_match_finite_differences(case):
    model, batch = case.make(TASKS).double(), batch_of(TASKS)
    modules: dict[str, list[int]] = {}
    for number, site in enumerate(model.sites().values()):
        modules.setdefault(site.module, []).append(number)

    def logits(gate):
        for path, numbers in modules.items():
            values = gate[numbers]
            model.get_submodule(path).gate = lambda values=values: values
        return model(batch)

    generator = torch.Generator().manual_seed(3)
    start = (torch.rand(len(model.names), generator=generator, dtype=torch.float64) - 0.3).requires_grad_()
    with torch.no_grad():
        start[1] = 0.0  # a zero gate has a gradient too
    assert torch.autograd.gradcheck(logits, (start,))
    clear_grads(model.parameters())


@cases
@schemas
@pytest.mark.parametrize("missing", [True, False], ids=["missing", "complete"])
def test_absorbing_is_exact(case, schema, missing):
    batch = batch_of(schema, whole=True, missing=missing)
    model = whole_numbers(case.make(schema))
    gates = attach(model, steps=10)
    set_gates(gates, some_gates(len(gates.names)))
    before = model(batch)
    assert varies(before)
    selection = absorb(model, batch=batch)
    assert torch.equal(model(batch), before)
    assert "constant" not in selection.made["absorbed"].values()


@cases
@pytest.mark.parametrize("schema", [IDS, NUMBERS], ids=["ids", "numbers"])
def test_absorbing_is_exact_where_it_is_reported_as_exact(case, schema):
    """Ids and numeric fields with own weights are absorbed exactly; columns of the next layer up to rounding."""
    model, batch = case.make(schema), batch_of(schema)
    gates = attach(model, steps=10)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        gates.x.copy_(torch.rand(len(gates.x), generator=generator) * 2 - 1)
    before = model(batch)
    assert varies(before)
    selection = absorb(model, batch=batch)
    assert selection.made["exact"] == (case.name != "dlrm_cross")
    if selection.made["exact"]:
        assert torch.equal(model(batch), before)


def gated(case, schema, *, whole):
    """Return a trained model, its optimizer, a batch, and the selection after absorbing."""
    batch = batch_of(schema, whole=whole)
    model = case.make(schema)
    optimizer = Adagrad(model.parameters(), lr=0.1)
    step(model, optimizer, batch_of(schema, seed=5))
    if whole:
        whole_numbers(model)
    gates = attach(model, steps=10)
    set_gates(gates, some_gates(len(gates.names)))
    model(batch)
    return model, optimizer, batch, absorb(model, optimizer)


@cases
@schemas
@pytest.mark.parametrize("cut", [False, True], ids=["zeros", "cut"])
@pytest.mark.parametrize("whole", [False, True], ids=["any", "whole"])
def test_pruning_is_exact_and_certified(case, schema, cut, whole):
    model, _, batch, selection = gated(case, schema, whole=whole)
    before = model(batch)
    assert varies(before)
    size = sum(weight.numel() for weight in model.parameters())
    pruned = prune(model, selection, batch=batch, cut=cut)
    assert pruned.certificate.certified, str(pruned.certificate)
    after = pruned.model(model.narrow(batch, pruned.model))
    if whole or not cut:
        assert torch.equal(after, before)
    else:
        torch.testing.assert_close(after, before)
    assert torch.equal(model(batch), before), "the original model does not change"
    smaller = sum(weight.numel() for weight in pruned.model.parameters())
    if selection.dropped and (case.name != "dlrm_cross" or cut):
        assert smaller < size
    assert set(pruned.model.names) <= set(selection.kept)
    if cut:
        assert not pruned.model.silent


@cases
@schemas
@pytest.mark.parametrize("cut", [False, True], ids=["zeros", "cut"])
def test_the_next_step_of_the_pruned_model_equals_that_of_the_absorbed_model(case, schema, cut):
    model, optimizer, batch, selection = gated(case, schema, whole=False)
    pruned = prune(model, selection, batch=batch, cut=cut, optimizer=optimizer)
    other = batch_of(schema, seed=6)
    narrow = model.narrow(other, pruned.model)
    old, new = model.layout(), pruned.model.layout()
    step(model, optimizer, other)
    step(pruned.model, pruned.optimizer, narrow)
    before = dict(model.named_parameters())
    kept = indices_to_copy(old, new)
    for name, weight in pruned.model.named_parameters():
        expected = before[name].detach()
        for dim, index in kept.get(name, {}).items():
            expected = expected.index_select(dim, index)
        result = weight.detach()
        if name == "top.0.weight":  # columns of dropped crosses still train in the absorbed model
            owners = [owner for owner, width in new[name][1] for _ in range(width)]
            stay = [number for number, owner in enumerate(owners) if owner not in selection.dropped]
            expected, result = expected[:, stay], result[:, stay]
        # the same sums, in another order where columns were cut
        torch.testing.assert_close(result, expected, rtol=1e-4 if cut else 1e-6, atol=1e-6)


@cases
@schemas
def test_a_smaller_model_has_the_shapes_of_its_schema(case, schema):
    model = case.make(schema)
    kept = list(model.names[1:] or model.names)
    smaller, _ = model.smaller(kept, cut=True)
    fresh = type(smaller)(smaller.schema, **smaller.config)
    assert {name: weight.shape for name, weight in smaller.named_parameters()} == {
        name: weight.shape for name, weight in fresh.named_parameters()
    }
    assert set(smaller.schema.names) <= set(schema.names)
    assert set(smaller.names) <= set(kept)
    zeros, _ = model.smaller(kept, cut=False)
    assert zeros.schema == schema
    assert zeros.silent == tuple(name for name in model.names if name not in kept)
    untrained = zeros.untrained()
    assert untrained.silent == zeros.silent
    assert untrained.reads == zeros.reads


@cases
def test_pruning_twice_is_pruning_once(case):
    model, batch = whole_numbers(case.make(MIXED)), batch_of(MIXED, whole=True)
    names = model.names
    for drop in (names[0], names[-1]):
        gates = attach(model, steps=10)
        set_gates(gates, [0.0 if name == drop else 1.0 for name in gates.names])
        before = model(batch)
        pruned = prune(model, absorb(model), batch=batch, cut=drop == names[-1])
        batch, model = model.narrow(batch, pruned.model), pruned.model
        assert torch.equal(model(batch), before)
    assert not {names[0], names[-1]} & set(model.names)
    assert not model.silent


@cases
def test_making_a_smaller_model_draws_no_random_number(case):
    model = case.make(MIXED)
    state = torch.random.get_rng_state()
    model.smaller(model.names[:2], cut=False)
    assert torch.equal(torch.random.get_rng_state(), state)


@cases
def test_copies_and_pickles_are_independent(case):
    model, batch = case.make(MIXED), batch_of(MIXED)
    gates = attach(model, steps=10)
    with torch.no_grad():
        gates.x.mul_(0.5)
    before = model(batch)
    other = copy.deepcopy(model)
    assert torch.equal(other(batch), before)
    assert torch.equal(pickle.loads(pickle.dumps(model))(batch), before)
    with torch.no_grad():
        gates.x.mul_(0.5)
    assert torch.equal(other(batch), before)
    assert not torch.equal(model(batch), before)


@cases
@schemas
def test_bfloat16_autocast_is_close(case, schema):
    """8 bits of mantissa: each of a few layers rounds its inputs by 2⁻⁹, so 5 % of the scale is ample."""
    model, batch = case.make(schema), batch_of(schema)
    attach(model, steps=10)
    exact = model(batch)
    with torch.autocast("cpu", torch.bfloat16):
        near = model(batch)
    assert (near.float() - exact).abs().max() <= 0.05 * max(1.0, float(exact.detach().abs().max()))
    near.float().sum().backward()


@cases
def test_a_model_in_half_precision_runs(case):
    model, batch = case.make(MIXED).bfloat16(), batch_of(MIXED)
    attach(model, steps=10)
    logits = model(batch)
    assert logits.dtype == torch.bfloat16
    logits.float().sum().backward()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@cases
@schemas
def test_cuda_is_close_to_the_cpu_and_prunes_exactly(case, schema):
    model, batch = case.make(schema), batch_of(schema)
    near = copy.deepcopy(model).cuda()
    on_gpu = batch.to("cuda")
    expected, result = model(batch), near(on_gpu)
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-4, atol=1e-5)
    expected.sum().backward()
    result.sum().backward()
    for (name, one), other in zip(model.named_parameters(), near.parameters(), strict=True):
        if isinstance(one, RowParameter):
            dense = [torch.zeros_like(one).detach() for _ in range(2)]
            for total, weight in zip(dense, (one, other), strict=True):
                for piece in map(RowGrad.compact, merged_row_grads(weight)):
                    total.index_put_((piece.rows.long().cpu(),), piece.values.cpu())
            torch.testing.assert_close(dense[1], dense[0], rtol=1e-3, atol=1e-4)
        else:
            torch.testing.assert_close(other.grad.cpu(), one.grad, rtol=1e-3, atol=1e-4, msg=name)
    clear_grads(near.parameters())
    gates = attach(near, steps=10)
    set_gates(gates, some_gates(len(gates.names)))
    near(on_gpu).sum().backward()
    for cut in (False, True):
        one = copy.deepcopy(near)
        selection = absorb(one, batch=on_gpu)
        pruned = prune(one, selection, batch=on_gpu, cut=cut)
        assert pruned.certificate.certified
        assert all(tensor.device.type == "cuda" for tensor in (*pruned.model.parameters(), *pruned.model.buffers()))


@cases
def test_a_batch_that_does_not_fit_raises(case):
    model, batch = case.make(MIXED), batch_of(MIXED)
    with pytest.raises(InputError, match=r"4 columns of ids.*\(12, 3\)"):
        model(replace(batch, ids=batch.ids[:, :3]))
    with pytest.raises(InputError, match=r"5 columns of numbers.*\(12, 4\)"):
        model(replace(batch, dense=batch.dense[:, :4]))
    with pytest.raises(InputError, match="columns in missing"):
        model(replace(batch, missing=batch.missing[:, :4]))
    with pytest.raises(InputError, match="'a bag'.*'dense'"):
        model(replace(batch, bags={"dense": batch.bags["dense"]}))
    values, offsets = batch.bags["a bag"]
    with pytest.raises(InputError, match="11 rows.*12"):
        model(replace(batch, bags={**batch.bags, "a bag": (values, offsets[:-1])}))
    with pytest.raises(InputError, match="outside its field"):
        model(replace(batch, ids=batch.ids + 100))


@cases
def test_unknown_or_invalid_fields_raise(case):
    model = case.make(MIXED)
    with pytest.raises(FieldError, match="'unknown'"):
        model.smaller(["unknown"], cut=False)
    with pytest.raises(FieldError, match="silent.*'unknown'"):
        case.make(MIXED, silent=["unknown"])
    with pytest.raises(InputError, match="at least one"):
        case.make(Schema(()))
    with pytest.raises(InputError, match="'x' is a cross"):
        case.make(Schema((Field("x", "cross", 4), Field("y", cardinality=3))))
    with pytest.raises(InputError, match="'x'.*cardinality 0"):
        case.make(Schema((Field("x"), Field("y", cardinality=3))))
    with pytest.raises(InputError, match=f"unknown key 'colour' for model '{case.name}'"):
        make_model(case.name, MIXED, colour=3)


@cases
def test_an_empty_batch_gives_no_logits(case):
    model = case.make(TASKS)
    assert model(batch_of(TASKS, rows=0)).shape == (0, 3)


@pytest.mark.parametrize("name", MODELS)
def test_registered_names(name):
    assert registered_name(make_model(name, IDS)) == name
    assert model_class(name).__module__.startswith("lpfs.models.")


def test_an_unknown_model_raises():
    with pytest.raises(InputError, match="'tree'.*mlp"):
        make_model("tree", IDS)
