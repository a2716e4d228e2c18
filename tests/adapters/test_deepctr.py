"""DeepCTR-Torch under the contract of all adapters; its input matrix, histories and trainer."""

from __future__ import annotations

import copy
import pickle
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.adapter_contract import (
    CHECKS,
    FIELDS,
    NUMBERS,
    TRUE,
    VALUES,
    Case,
    Log,
    check_complete,
    randomize,
    require_package,
    run_check,
)
from tests.helpers.zoo import set_gates

require_package("deepctr_torch")

from deepctr_torch import models  # noqa: E402
from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat  # noqa: E402
from deepctr_torch.models.multitask import ESMM, MMOE, PLE, SharedBottom  # noqa: E402

import lpfs  # noqa: E402
from lpfs.adapters.deepctr import DeepCTR  # noqa: E402
from lpfs.errors import AbsenceError, InputError, LeakError, MissingPackageError, SharedTableError  # noqa: E402
from lpfs.gates.verification import compute_logits, max_abs_difference  # noqa: E402

DIM = 4
IDS = [SparseFeat(name, VALUES, DIM) for name in FIELDS]
COLUMNS = [DenseFeat(f"n{n}", 1) for n in range(NUMBERS)]
# a history of four events, of which the last may be missing; the label does not depend on it
HISTORY = VarLenSparseFeat(SparseFeat("hist_f0", VALUES, DIM, embedding_name="f0"), maxlen=4, length_name="hist_length")


def feed(ids: Tensor, numbers: Tensor) -> Tensor:
    return torch.cat([ids.float(), numbers], dim=1)


def feed_ids(ids: Tensor, numbers: Tensor) -> Tensor:
    return ids.float()


def feed_history(ids: Tensor, numbers: Tensor) -> Tensor:
    length = 3 + ids[:, 7:] % 2
    history = ids[:, 4:] * (torch.arange(4) < length)
    return torch.cat([ids, history, length], dim=1).float()


class BothTasks(DeepCTR):
    """The second task is the opposite of the first."""

    def loss(self, output: Any, labels: Tensor) -> Tensor:
        return super().loss(output, torch.stack([labels, 1 - labels], dim=1))


Columns = list[Any]
HIDDEN = {"dnn_hidden_units": (32,)}


def deepfm(linear: Columns, dnn: Columns) -> Any:
    return models.DeepFM(linear, dnn, **HIDDEN)


def xdeepfm(linear: Columns, dnn: Columns) -> Any:
    return models.xDeepFM(linear, dnn, cin_layer_size=(8, 6), **HIDDEN)


def dcnmix(linear: Columns, dnn: Columns) -> Any:
    return models.DCNMix(linear, dnn, low_rank=4, num_experts=2, **HIDDEN)


def mmoe(linear: Columns, dnn: Columns) -> Any:
    return MMOE(dnn, num_experts=2, expert_dnn_hidden_units=(32,), tower_dnn_hidden_units=(16,))


def din(linear: Columns, dnn: Columns) -> Any:
    return models.DIN(dnn, ["f0"], att_hidden_size=(8,), **HIDDEN)


def case(name: str, make: Any, columns: Columns, feed: Any = feed, adapter: Any = DeepCTR) -> Case:
    instance = adapter(make, untie=True)
    return Case(name, lambda: randomize(instance.prepare(make(columns, columns))), lambda: instance, feed)


ALL = IDS + COLUMNS
CASES = {
    contract.model: contract
    for contract in (
        case("DeepFM", deepfm, ALL),
        case("xDeepFM", xdeepfm, ALL),
        case("DCNMix", dcnmix, ALL),
        case("DIN", din, [*IDS, HISTORY], feed_history),
        case("MMOE", mmoe, ALL, adapter=BothTasks),
        case("WDL", lambda linear, dnn: models.WDL(linear, dnn, **HIDDEN), ALL),
        case("DCN", lambda linear, dnn: models.DCN(linear, dnn, **HIDDEN), ALL),
        case("AutoInt", lambda linear, dnn: models.AutoInt(linear, dnn, **HIDDEN), ALL),
        case("PNN", lambda linear, dnn: models.PNN(dnn, **HIDDEN), ALL),
        case("SharedBottom", lambda linear, dnn: SharedBottom(dnn, (32,)), ALL, adapter=BothTasks),
        case("PLE", lambda linear, dnn: PLE(dnn, expert_dnn_hidden_units=(32,)), ALL, adapter=BothTasks),
    )
}


# exact too, but a short search finds the true fields only on some logs: not in the table
EXACT_ONLY = [
    case("NFM", lambda linear, dnn: models.NFM(linear, dnn, **HIDDEN), ALL),
    case("FiBiNET", lambda linear, dnn: models.FiBiNET(linear, dnn, **HIDDEN), ALL),
    case("AFM", lambda linear, dnn: models.AFM(linear, dnn), IDS, feed_ids),
]
CUT = {"NFM": "rounding", "FiBiNET": "refused: columns cannot be removed", "AFM": "refused: columns cannot be removed"}


@pytest.mark.parametrize("case", EXACT_ONLY, ids=lambda case: case.model)
def test_models_that_are_exact_but_need_a_longer_search(case: Case) -> None:
    attach, leak, _, absorb, prune, cut = CHECKS
    assert attach(case) == "bit-equal"
    assert leak(case).startswith("found and gated: 8 further parts")
    assert absorb(case).startswith("bit-equal")
    assert prune(case) == "bit-equal"
    assert cut(case).startswith(CUT[case.model])


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", CASES)
def test_contract(name: str, check: Any) -> None:
    run_check("deepctr", CASES[name], check)


def test_results_have_exactly_these_models():
    check_complete("deepctr", list(CASES.values()))


def test_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "deepctr_model.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "predictions bit-identical: True" in out
    assert "pruned: certified" in out
    assert "columns that stay: ['field_00', 'field_01', 'field_02', 'field_03', 'number_0']" in out


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CASES["DeepFM"].new_model()
    package = "deepctr_torch"
    for name in [package, *(module for module in sys.modules if module.startswith(package + "."))]:
        monkeypatch.setitem(sys.modules, name, None)  # as if not installed
    with pytest.raises(MissingPackageError, match=r"deepctr_torch .* pip install 'lpfs\[deepctr\]'"):
        DeepCTR().sites(model)


def gated(adapter: DeepCTR, model: Any, dropped: tuple[str, ...], batch: Any) -> lpfs.Selection:
    """Attach gates, set those of dropped fields to 0 and the others to 0.5, and absorb."""
    gates = adapter.attach(model)
    set_gates(gates, [0.0 if name in dropped else 0.5 for name in gates.names])
    return adapter.absorb(model, batch=batch)


# ----------------------------------------------------------------------------------- dense columns


def test_dense_columns_are_gated_and_prepare_changes_nothing():
    model, adapter, batch = randomize(deepfm(ALL, ALL)), DeepCTR(deepfm), CASES["DeepFM"].batch()
    before, keys = compute_logits(model, batch, adapter.call), list(model.state_dict())
    adapter.prepare(adapter.prepare(model))
    assert list(model.state_dict()) == keys
    assert max_abs_difference(before, compute_logits(model, batch, adapter.call)) == 0.0
    assert len(model._forward_pre_hooks) == 1
    selection = gated(adapter, model, ("n1", "f5"), batch)
    assert {name for name, location in selection.made["absorbed"].items() if location == "constant"} == {
        "n0",
        "n1",
        "n2",
        "n3",
    }
    for cut in (False, True):
        assert adapter.prune(model, selection, batch=batch, cut=cut).certificate.certified
    linear, dnn = adapter.columns(model, selection)
    assert [column.name for column in dnn] == [column.name for column in ALL if column.name not in ("n1", "f5")]
    assert {column.name for column in linear} == {column.name for column in dnn}


def test_dense_column_of_several_numbers_is_one_field():
    columns = [*IDS, DenseFeat("vector", 3), DenseFeat("price", 1)]
    model, adapter, batch = randomize(deepfm(columns, columns)), DeepCTR(deepfm), CASES["DeepFM"].batch()
    selection = gated(adapter, model, ("vector",), batch)
    for cut in (False, True):
        pruned = adapter.prune(model, selection, batch=batch, cut=cut)
        assert pruned.certificate.checked == ("vector",)
    assert adapter.narrow(model, batch, pruned.model).shape[1] == len(FIELDS) + 1


def test_absorbed_model_can_be_saved_and_restored():
    adapter, model, batch = DeepCTR(untie=True), randomize(din([], [*IDS, HISTORY])), CASES["DIN"].batch()
    selection = gated(adapter, model, ("f7",), batch)
    restored = adapter.prepare(din([], [*IDS, HISTORY]))
    lpfs.restore(restored, selection)
    restored.load_state_dict(model.state_dict())
    assert (
        max_abs_difference(compute_logits(model, batch, adapter.call), compute_logits(restored, batch, adapter.call))
        == 0.0
    )
    numbers = randomize(deepfm(ALL, ALL))
    selection = gated(adapter, numbers, ("n0",), CASES["DeepFM"].batch())
    restored = adapter.prepare(deepfm(ALL, ALL))
    lpfs.restore(restored, selection)
    restored.load_state_dict(numbers.state_dict())
    unpickled = pickle.loads(pickle.dumps(restored))
    expected = compute_logits(numbers, CASES["DeepFM"].batch(), adapter.call)
    for other in (restored, unpickled, copy.deepcopy(restored)):
        assert max_abs_difference(expected, compute_logits(other, CASES["DeepFM"].batch(), adapter.call)) == 0.0


# ----------------------------------------------------------------------------- histories and tables


def test_shared_table_raises_without_untie():
    model = din([], [*IDS, HISTORY])
    with pytest.raises(SharedTableError, match=r"\['f0', 'hist_f0'\] share the table 'f0'"):
        DeepCTR().attach(model)
    assert not hasattr(model, "lpfs_gates")


@pytest.mark.parametrize("dropped", [("f0",), ("hist_f0",), ("f0", "hist_f0")])
def test_history_and_query_have_separate_gates(dropped: tuple[str, ...]) -> None:
    adapter, batch = DeepCTR(din, untie=True), CASES["DIN"].batch()
    model = randomize(din([], [*IDS, HISTORY]))
    before = compute_logits(model, batch, adapter.call)
    adapter.prepare(model)
    assert max_abs_difference(before, compute_logits(model, batch, adapter.call)) == 0.0
    assert model.embedding_dict["hist_f0"].weight is model.embedding_dict["f0"].weight
    selection = gated(adapter, model, dropped, batch)
    pruned = adapter.prune(model, selection, batch=batch)
    assert pruned.certificate.certified
    assert set(pruned.certificate.checked) == set(dropped)
    with pytest.raises(AbsenceError, match="attention over the history"):
        adapter.prune(model, selection, batch=batch, cut=True)


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_pooled_sequences_are_pruned(combiner: str) -> None:
    tags = [
        VarLenSparseFeat(SparseFeat(name, VALUES, DIM, embedding_name="tags"), maxlen=2, combiner=combiner)
        for name in ("tags_here", "tags_there")
    ]
    columns = [*IDS[:4], *tags]
    model, adapter, batch = (
        randomize(deepfm(columns, columns)),
        DeepCTR(deepfm, untie=True),
        Log(2).rows(64)[0].float(),
    )
    before = compute_logits(model, batch, adapter.call)
    adapter.prepare(model)
    assert max_abs_difference(before, compute_logits(model, batch, adapter.call)) == 0.0
    selection = gated(adapter, model, ("tags_here", "f1"), batch)
    for cut in (False, True):
        assert adapter.prune(model, selection, batch=batch, cut=cut).certificate.certified


def test_maximum_over_an_empty_sequence_is_a_leak():
    """The maximum is -1e9, which a gate on the table cannot remove."""
    tags = VarLenSparseFeat(SparseFeat("tags", VALUES, DIM), maxlen=2, combiner="max")
    columns = [*IDS[:6], tags]
    model, adapter, batch = (randomize(deepfm(columns, columns)), DeepCTR(deepfm), Log(2).rows(64)[0].float())
    batch[:5, 6:] = 0
    selection = gated(adapter, model, ("tags",), batch)
    with pytest.raises(LeakError, match="'tags'"):
        adapter.prune(model, selection, batch=batch)


def test_ungated_tables_are_a_leak():
    """ONN has further tables, one per pair of fields."""
    model, adapter, batch = (randomize(models.ONN(IDS, IDS, **HIDDEN)), DeepCTR(), Log(2).rows(64)[0].float())
    selection = gated(adapter, model, ("f6",), batch)
    with pytest.raises(LeakError, match="'f6'"):
        adapter.prune(model, selection, batch=batch)


def test_combined_predictions_need_their_own_loss():
    """ESMM runs one activation for both tasks and multiplies its outputs."""

    class Chain(DeepCTR):
        def loss(self, output: Any, labels: Tensor) -> Tensor:
            click, bought = torch.sigmoid(output).unbind(1)
            probabilities = torch.stack([click, click * bought], dim=1)
            return torch.nn.functional.binary_cross_entropy(probabilities, labels)

    adapter, model, batch = (Chain(), randomize(ESMM(IDS, tower_dnn_hidden_units=(8,))), Log(2).rows(64)[0].float())
    logits = adapter.call(model, batch)
    expected = torch.sigmoid(logits)
    assert torch.allclose(model(batch), torch.stack([expected[:, 0], expected.prod(1)], 1))
    labels = torch.randint(2, (64, 2)).float()
    optimizer = torch.optim.Adagrad(model.parameters())
    with pytest.raises(InputError, match="ESMM: its predictions are combined"):
        DeepCTR().search(model, [(batch, labels)], optimizer, steps=1, penalty=0.0)
    assert adapter.search(model, [(batch, labels)], optimizer, steps=1, penalty=0.0).kept == FIELDS


# ----------------------------------------------------------------------------------------- trainer


def test_fit_of_the_library_trains_the_pruned_model():
    model, adapter, log = deepfm(IDS, IDS), DeepCTR(deepfm), Log()
    ids, _, labels = log.rows(20_000)
    model.compile(torch.optim.Adam(model.parameters(), lr=0.01), "binary_crossentropy", metrics=["auc"])
    model.fit({name: ids[:, n].numpy() for n, name in enumerate(FIELDS)}, labels.numpy(), 256, verbose=0)

    def batches() -> Any:
        while True:
            ids, _, labels = log.rows()
            yield ids.float(), labels

    selection = adapter.search(model, batches(), model.optim, steps=400, keep=3)
    assert set(selection.kept) == set(TRUE)
    batch = log.rows(64)[0].float()
    selection = adapter.absorb(model, batch=batch)
    smaller: Any = adapter.prune(model, selection, batch=batch, cut=True).model
    kept_columns = {name: ids[:, n].numpy() for n, name in enumerate(TRUE)}
    smaller.compile(torch.optim.Adam(smaller.parameters(), lr=0.001), "binary_crossentropy", metrics=["auc"])
    smaller.fit(kept_columns, labels.numpy(), 256, verbose=0)
    assert smaller.evaluate([column.copy() for column in kept_columns.values()], labels.numpy())["auc"] > 0.8


def test_pruned_model_keeps_no_reference_to_dropped_tables():
    adapter, model, batch = DeepCTR(), CASES["DeepFM"].new_model(), CASES["DeepFM"].batch()
    model.compile("adam", "binary_crossentropy")
    selection = gated(adapter, model, FIELDS[3:], batch)
    before = model.get_regularization_loss()
    pruned: Any = adapter.prune(model, selection, batch=batch)
    parameters = {id(weight) for weight in pruned.model.parameters()}
    assert {id(weight) for group in pruned.model.optim.param_groups for weight in group["params"]} == parameters
    entries = [entry for weights, *_ in pruned.model.regularization_weight for entry in weights]
    assert {id(entry[1] if isinstance(entry, tuple) else entry) for entry in entries} <= parameters
    assert torch.allclose(pruned.model.get_regularization_loss(), before)  # the dropped weights are zero


@pytest.mark.parametrize("own", [True, False])
def test_search_step_equals_fit_step_with_the_models_optimizer(own: bool) -> None:
    """``fit`` sums the loss over rows; with its Adagrad state, gradients of a mean would be too small."""
    adapter, model = DeepCTR(), randomize(deepfm(IDS, IDS))
    other = copy.deepcopy(model)
    ids, _, labels = Log().rows(50)
    for net in (model, other):
        net.compile(torch.optim.SGD(net.parameters(), lr=0.001), "binary_crossentropy")
    optimizer = model.optim if own else torch.optim.SGD(model.parameters(), lr=0.001)
    adapter.search(model, [(ids.float(), labels)], optimizer, steps=1, penalty=0.0)
    columns = {name: ids[:, n].numpy() for n, name in enumerate(FIELDS)}
    other.fit(columns, labels.numpy(), batch_size=50, verbose=0)
    trained = dict(model.named_parameters())
    assert all(torch.allclose(weight, trained[path]) for path, weight in other.named_parameters()) == own


def test_penalty_is_the_regularization_per_row():
    adapter, model = DeepCTR(), randomize(deepfm(IDS, IDS))
    gates = adapter.attach(model)
    penalty = adapter.penalty(model, 10)
    assert torch.equal(penalty, model.get_regularization_loss().sum() / 10)
    penalty.backward()
    assert gates.x.grad is None


# ------------------------------------------------------------------------------------------ errors


def test_errors():
    model, batch = CASES["DeepFM"].new_model(), CASES["DeepFM"].batch()
    with pytest.raises(InputError, match="no feature_index"):
        DeepCTR().sites(torch.nn.Linear(1, 1))
    with pytest.raises(InputError, match=r"DeepCTR\(make=lambda"):
        DeepCTR().prune(model, gated(DeepCTR(), model, ("f7",), batch), batch=batch, cut=True)
    regression = models.DeepFM(IDS, IDS, task="regression", **HIDDEN)
    with pytest.raises(InputError, match="DeepFM: not all of its tasks are binary"):
        DeepCTR().search(regression, [], torch.optim.SGD(regression.parameters()), steps=1, penalty=0.0)
    large = [SparseFeat("user", 2**24 + 1, 1)]
    with pytest.raises(InputError, match="16,777,217 values, but DeepCTR-Torch passes ids as float32"):
        DeepCTR().attach(models.DeepFM(large, large, dnn_hidden_units=(2,)))
    with pytest.raises(InputError, match="does not run a final activation"):
        DeepCTR().call(models.MLR(IDS), Log().rows(8)[0].float())
