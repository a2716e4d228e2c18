"""FuxiCTR under the contract of all adapters; its feature maps, shared tables and trainer."""

from __future__ import annotations

import json
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

require_package("fuxictr")

from fuxictr.features import FeatureMap  # noqa: E402
from fuxictr.preprocess import FeatureProcessor  # noqa: E402
from fuxictr.pytorch.layers import LogisticRegression, MLP_Block  # noqa: E402

import lpfs  # noqa: E402
from lpfs.adapters.fuxictr import FuxiCTR  # noqa: E402
from lpfs.errors import AbsenceError, FieldError, InputError, LeakError, MissingPackageError, SharedTableError  # noqa: E402
from lpfs.gates.verification import compute_logits, max_abs_difference  # noqa: E402
from tests.helpers import fuxi_zoo  # noqa: E402

IDS = {name: {"type": "categorical", "vocab_size": VALUES} for name in FIELDS}
COLUMNS = {f"n{n}": {"type": "numeric"} for n in range(NUMBERS)}


def feed(ids: Tensor, numbers: Tensor) -> dict[str, Tensor]:
    columns = {f"n{n}": numbers[:, n] for n in range(NUMBERS)}
    return {name: ids[:, n] for n, name in enumerate(FIELDS)} | columns


def case(name: str) -> Case:
    make: Any = getattr(fuxi_zoo, name)
    return Case(name, lambda: randomize(make(fuxi_zoo.feature_map(IDS | COLUMNS))), lambda: FuxiCTR(make), feed)


CASES = {name: case(name) for name in ("DNN", "DeepFM", "DCNv2", "AutoInt", "FinalMLP")}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", CASES)
def test_contract(name: str, check: Any) -> None:
    run_check("fuxictr", CASES[name], check)


def test_results_have_exactly_these_models():
    check_complete("fuxictr", list(CASES.values()))


def test_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "fuxictr_model.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "predictions bit-identical: True" in out
    assert "pruned: certified" in out
    assert "feature_map now has ['field_00', 'field_01', 'field_02', 'field_03']" in out


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CASES["DeepFM"].new_model()
    package = "fuxictr"
    for name in [package, *(module for module in sys.modules if module.startswith(package + "."))]:
        monkeypatch.setitem(sys.modules, name, None)  # as if not installed
    with pytest.raises(MissingPackageError, match=r"fuxictr .* pip install 'lpfs\[fuxictr\]'"):
        FuxiCTR().sites(model)


def gated(adapter: FuxiCTR, model: Any, dropped: tuple[str, ...], batch: Any) -> lpfs.Selection:
    """Attach gates, set those of dropped fields to 0 and the others to 0.5, and absorb."""
    gates = adapter.attach(model)
    set_gates(gates, [0.0 if name in dropped else 0.5 for name in gates.names])
    return adapter.absorb(model, batch=batch)


# ------------------------------------------------------------------------------------------ layers


class LinearFirst(fuxi_zoo.Zoo):
    """A linear part registered before the embedding."""

    def __init__(self, feature_map: FeatureMap) -> None:
        super().__init__(feature_map)
        self._modules = {"lr": self._modules.pop("lr"), **self._modules}

    def build(self) -> None:
        self.lr = LogisticRegression(self.feature_map)
        self.mlp = MLP_Block(self.width, hidden_units=[8], output_dim=1)

    def logits(self, inputs: Any, embedded: Tensor) -> Tensor:
        return self.lr(inputs) + self.mlp(embedded.flatten(start_dim=1))


def test_widths_and_shared_tables_are_those_of_the_embedding():
    features = {**IDS, "f7": {**IDS["f7"], "share_embedding": "f6"}}
    adapter, model = FuxiCTR(LinearFirst, untie=True), LinearFirst(fuxi_zoo.feature_map(features))
    assert next(path for path, _ in model.named_children()) == "lr"
    assert set(adapter.layout(model).widths.values()) == {fuxi_zoo.DIM}
    selection = lpfs.Selection(FIELDS, (), {})
    assert adapter.feature_map(model, selection).features["f7"]["share_embedding"] == "f6"


def test_sequences_and_pretrained_vectors_are_fields():
    features = {
        **IDS,
        "seen": {
            "type": "sequence",
            "vocab_size": VALUES,
            "padding_idx": 0,
            "max_len": 3,
            "feature_encoder": "layers.MaskedAveragePooling()",
        },
        "picture": {"type": "embedding", "pretrain_dim": 5},
    }
    ids, numbers, _ = Log(1).rows(64)
    batch = feed(ids, numbers)
    batch = {name: batch[name] for name in FIELDS} | {"seen": ids[:, 5:], "picture": torch.randn(64, 5)}
    for dropped in ("seen", "picture"):
        adapter, model = FuxiCTR(fuxi_zoo.DNN), randomize(fuxi_zoo.DNN(fuxi_zoo.feature_map(features)))
        with torch.no_grad():
            model.embedding_layer.embedding_layer.embedding_layers["seen"].weight[0] = 0.0  # the padding
        plain = compute_logits(model, batch, adapter.call)
        adapter.attach(model)
        assert max_abs_difference(plain, compute_logits(model, batch, adapter.call)) == 0.0
        lpfs.detach(model)
        selection = gated(adapter, model, (dropped,), batch)
        assert "constant" not in selection.made["absorbed"].values()
        assert adapter.prune(model, selection, batch=batch).certificate.certified
        cut = adapter.prune(model, selection, batch=batch, cut=True)
        assert cut.certificate.certified
        assert not [path for path, _ in cut.model.named_parameters() if dropped in path]


def test_batch_norm_is_pruned_with_zeros_but_not_cut():
    case_ = case("NormedDNN")
    adapter, model, batch = case_.adapter(), case_.new_model(), case_.batch()
    for _ in range(3):
        model.train()(batch)  # statistics that differ from the initial ones
    selection = gated(adapter, model, FIELDS[3:], batch)
    assert adapter.prune(model, selection, batch=batch).certificate.max_logit_change == 0.0
    with pytest.raises(AbsenceError, match="BatchNorm1d"):
        adapter.prune(model, selection, batch=batch, cut=True)


def test_ungated_table_is_a_leak():
    class Hidden(fuxi_zoo.DNN):
        def build(self) -> None:
            super().build()
            self.hidden = torch.nn.Embedding(VALUES, 1)

        def logits(self, inputs: Any, embedded: Tensor) -> Tensor:
            return super().logits(inputs, embedded) + self.hidden(inputs["f6"])

    model, adapter, batch = (randomize(Hidden(fuxi_zoo.feature_map(IDS))), FuxiCTR(Hidden), CASES["DNN"].batch())
    batch = {name: batch[name] for name in FIELDS}
    selection = gated(adapter, model, ("f5", "f6"), batch)
    with pytest.raises(LeakError, match="'f6'"):
        adapter.prune(model, selection, batch=batch)


@pytest.mark.parametrize("name", ["DCNv2", "FinalMLP"])
def test_models_of_long_histories_in_the_wheel(name: str, tmp_path: Any) -> None:
    """A batch is (columns, columns of items (history, then target), mask)."""
    module = pytest.importorskip(f"model_zoo.LongCTR.{name}.{name}")
    features = {
        "user": {"type": "categorical", "vocab_size": VALUES, "source": "user"},
        "city": {"type": "categorical", "vocab_size": VALUES, "source": "user"},
        "item": {"type": "categorical", "vocab_size": VALUES, "source": "item"},
        "brand": {"type": "categorical", "vocab_size": VALUES, "source": "item"},
    }
    hidden = {"parallel_dnn_hidden_units": [16]} if name == "DCNv2" else {"use_fs": False}
    settings = {**fuxi_zoo.SETTINGS, "model_root": str(tmp_path), "embedding_dim": 4, **hidden}

    def make(feature_map: FeatureMap) -> Any:
        return getattr(module, name)(feature_map, **settings)

    model, adapter = randomize(make(fuxi_zoo.feature_map(features, 4))), FuxiCTR(make)
    generator = torch.Generator().manual_seed(0)
    users = {name: torch.randint(VALUES, (32,), generator=generator) for name in ("user", "city")}
    items = {name: torch.randint(VALUES, (32 * 4,), generator=generator) for name in ("item", "brand")}
    batch = (users, items, torch.ones(32, 3))
    before = compute_logits(model, batch, adapter.call)
    gates = adapter.attach(model)
    assert max_abs_difference(before, compute_logits(model, batch, adapter.call)) == 0.0
    set_gates(gates, [1.0, 0.0, 1.0, 0.0])
    selection = adapter.absorb(model, batch=batch)
    pruned = adapter.prune(model, selection, batch=batch)
    assert pruned.certificate.checked == ("city", "brand")
    assert pruned.certificate.max_logit_change == 0.0
    with pytest.raises(AbsenceError, match="columns cannot be removed"):  # the concatenation has the items twice
        adapter.prune(model, selection, batch=batch, cut=True)


# ----------------------------------------------------------------------------------- shared tables

SHARED = {**IDS, "f5": {**IDS["f5"], "share_embedding": "f4"}, "f6": {**IDS["f6"], "share_embedding": "f4"}}


def test_shared_table_raises_without_untie():
    model = fuxi_zoo.DeepFM(fuxi_zoo.feature_map(SHARED))
    with pytest.raises(SharedTableError, match=r"\['f4', 'f5', 'f6'\]"):
        FuxiCTR().attach(model)
    assert not hasattr(model, "lpfs_gates")


@pytest.mark.parametrize("dropped", [("f4",), ("f5",), ("f4", "f5", "f7")])
def test_untied_features_have_separate_gates_and_then_tables(dropped: tuple[str, ...]) -> None:
    adapter, model = (FuxiCTR(fuxi_zoo.DeepFM, untie=True), randomize(fuxi_zoo.DeepFM(fuxi_zoo.feature_map(SHARED))))
    batch = {name: column for name, column in CASES["DNN"].batch().items() if name in FIELDS}
    before, keys = compute_logits(model, batch, adapter.call), list(model.state_dict())
    gates = adapter.attach(model)
    assert max_abs_difference(before, compute_logits(model, batch, adapter.call)) == 0.0
    assert [key for key in model.state_dict() if not key.startswith("lpfs_gates")] == keys
    tables = model.embedding_layer.embedding_layer.embedding_layers
    assert tables["f4"].weight is tables["f6"].weight
    values = [0.0 if name in dropped else 2.0 if name == "f6" else 1.0 for name in gates.names]
    set_gates(gates, values)
    selection = adapter.absorb(model, batch=batch)
    assert selection.made["max_logit_change"] == 0.0
    assert tables["f4"].weight is not tables["f6"].weight
    for cut in (False, True):
        assert adapter.prune(model, selection, batch=batch, cut=cut).certificate.certified
    kept = adapter.feature_map(model, selection).features
    assert not [name for name in kept if "share_embedding" in kept[name]]  # as the weights are no longer shared


# ----------------------------------------------------------------------------------- configuration


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_feature_map_equals_the_one_prepared_from_the_configuration(tmp_path: Any) -> None:
    """FuxiCTR's own preprocessing, run on the emitted dataset_config, gives the emitted feature_map.

    (FuxiCTR leaves its pickle file open, and it cannot read CSV with polars 2, whose scan_csv has no ``dtypes``.)
    """
    pandas = pytest.importorskip("pandas")
    ids, numbers, labels = Log(1).rows(300)
    table = {name: ids[:, n].numpy().astype(str) for n, name in enumerate(FIELDS)}
    table |= {"price": numbers[:, 0].numpy(), "click": labels.numpy()}
    table["seen"] = ["^".join(map(str, row)) for row in ids[:, 5:].tolist()]
    pandas.DataFrame(table).to_parquet(tmp_path / "train.parquet")
    config = {
        "feature_cols": [
            {"name": list(FIELDS), "active": True, "dtype": "str", "type": "categorical"},
            {"name": "price", "active": True, "dtype": "float", "type": "numeric"},
            {
                "name": ["seen"],
                "active": True,
                "dtype": "str",
                "type": "sequence",
                "splitter": "^",
                "max_len": 3,
                "share_embedding": "f5",
                "feature_encoder": "layers.MaskedAveragePooling()",
            },
        ],
        "label_col": {"name": "click", "dtype": "float"},
    }

    def prepared(config: dict[str, Any], name: str) -> dict[str, Any]:
        processor = FeatureProcessor(dataset_id=name, data_root=str(tmp_path), **config)
        rows = processor.preprocess(processor.read_data(str(tmp_path / "train.parquet"), "parquet"))
        processor.fit(rows)
        return json.loads((tmp_path / name / "feature_map.json").read_text("utf-8"))

    prepared(config, "all")
    feature_map = FeatureMap("all", str(tmp_path / "all"))
    feature_map.load(str(tmp_path / "all" / "feature_map.json"), {"embedding_dim": fuxi_zoo.DIM})
    adapter, model = FuxiCTR(fuxi_zoo.DNN), fuxi_zoo.DNN(feature_map)
    for dropped in (("f3", "f4", "price"), ("f3", "f5")):
        selection = lpfs.Selection(tuple(name for name in adapter.sites(model) if name not in dropped), dropped, {})
        adapter.feature_map(model, selection).save(str(tmp_path / "kept" / "feature_map.json"))
        emitted = json.loads((tmp_path / "kept" / "feature_map.json").read_text("utf-8"))
        expected = prepared(adapter.dataset_config(config, selection), "again")
        assert expected.pop("dataset_id") != emitted.pop("dataset_id")
        if "f5" in dropped:  # the vocabulary is fitted again on its own values
            for values in (expected, emitted):
                values.pop("total_features")
                values["features"][-1]["seen"].pop("vocab_size")
        assert expected == emitted
        assert emitted["num_fields"] == 10 - len(dropped)
    assert config["feature_cols"][0]["name"] == list(FIELDS)  # not changed


def test_configuration_without_a_dropped_field_raises():
    with pytest.raises(FieldError, match="'brand'"):
        FuxiCTR().dataset_config({"feature_cols": []}, lpfs.Selection((), ("brand",), {}))


def test_first_sharing_column_owns_the_vocabulary_of_a_dropped_column():
    columns = [
        {"name": "item", "active": True, "type": "categorical"},
        {"name": ["seen", "liked"], "active": True, "type": "sequence", "share_embedding": "item"},
    ]
    config = FuxiCTR().dataset_config({"feature_cols": columns}, lpfs.Selection(("seen", "liked"), ("item",), {}))
    assert [(column["name"], column["active"], column.get("share_embedding")) for column in config["feature_cols"]] == [
        ("item", False, None),
        ("seen", True, None),
        ("liked", True, "seen"),
    ]


# ----------------------------------------------------------------------------------------- trainer


def test_search_regularizes_weights_but_not_gates():
    features = fuxi_zoo.feature_map(IDS)
    model = randomize(fuxi_zoo.DeepFM(features, net_regularizer=0.1, embedding_regularizer=0.2))
    plain, adapter = model.regularization_loss(), FuxiCTR()
    gates = adapter.attach(model)
    penalty = adapter.penalty(model, 7)
    assert torch.equal(penalty, plain)
    assert model.regularization_loss() > plain  # FuxiCTR itself counts them
    penalty.backward()
    assert gates.x.grad is None


def test_fit_of_the_library_trains_the_pruned_model(tmp_path: Any) -> None:
    """The search on a data loader of its kind, with its own optimizer; then its fit goes on with the rest."""

    def make(feature_map: FeatureMap) -> Any:
        return fuxi_zoo.DeepFM(feature_map, str(tmp_path))

    model, adapter, log = make(fuxi_zoo.feature_map(IDS)), FuxiCTR(make), Log()
    (tmp_path / "made_up").mkdir()

    def rows(count: int = 256) -> dict[str, Tensor]:
        ids, _, labels = log.rows(count)
        return {name: ids[:, n] for n, name in enumerate(FIELDS)} | {"click": labels}

    loader = [rows() for _ in range(150)]
    for group in model.optimizer.param_groups:
        group["lr"] = 0.01
    model.fit(loader, validation_data=[rows(2000)])
    selection = adapter.search(model, adapter.batches(model, loader), model.optimizer, steps=400, keep=3)
    assert set(selection.kept) == set(TRUE)
    batch = rows(64)
    selection = adapter.absorb(model, batch=batch)
    pruned = adapter.prune(model, selection, batch=batch, cut=True)
    smaller: Any = pruned.model
    assert smaller.optimizer is pruned.optimizer
    assert smaller.optimizer.state  # Adam's means went along
    few = [adapter.narrow(model, batch, smaller) for batch in loader]
    assert set(few[0]) == {*TRUE, "click"}
    smaller.fit(few, validation_data=[adapter.narrow(model, rows(2000), smaller)])
    assert smaller.evaluate([adapter.narrow(model, rows(5000), smaller)])["AUC"] > 0.8


def test_pruned_model_keeps_no_reference_to_dropped_tables():
    adapter, model, batch = FuxiCTR(), CASES["DeepFM"].new_model(), CASES["DeepFM"].batch()
    pruned: Any = adapter.prune(model, gated(adapter, model, FIELDS[3:], batch), batch=batch)
    optimized = {id(parameter) for group in pruned.model.optimizer.param_groups for parameter in group["params"]}
    assert optimized == {id(parameter) for parameter in pruned.model.parameters()}


# ------------------------------------------------------------------------------------------ errors


def test_errors():
    model, batch = CASES["DNN"].new_model(), CASES["DNN"].batch()
    with pytest.raises(InputError, match="no FeatureEmbedding layer"):
        FuxiCTR().attach(torch.nn.Linear(1, 1))
    with pytest.raises(InputError, match=r"FuxiCTR\(make=lambda"):
        FuxiCTR().prune(model, gated(FuxiCTR(), model, ("f7",), batch), batch=batch, cut=True)
    with pytest.raises(InputError, match="no batch"):
        next(FuxiCTR().batches(model, []))
    with pytest.raises(InputError, match=r"\(4, 1\), the labels \(5,\)"):
        FuxiCTR().loss(torch.zeros(4, 1), torch.zeros(5))

    line = fuxi_zoo.DNN(fuxi_zoo.feature_map(IDS), task="regression")
    with pytest.raises(InputError, match="DNN: not all of its tasks are binary"):
        FuxiCTR().search(line, [], line.optimizer, steps=1, penalty=0.0)

    class NoEnd(fuxi_zoo.DNN):
        def forward(self, inputs: Any) -> Any:
            return {"y_pred": self.mlp(self.embedding_layer(self.get_inputs(inputs)).flatten(start_dim=1))}

    with pytest.raises(InputError, match="does not run a final activation"):
        FuxiCTR().call(NoEnd(fuxi_zoo.feature_map(IDS | COLUMNS)), batch)
