"""The store takes over good bundles and refuses others; who holds a model keeps it."""

from __future__ import annotations

import json
import shutil
import threading

import pytest
import torch

from lpfs._fileio import json_checksum, write_text_atomic
from lpfs.data.raw_rows import RawRowEncoder
from lpfs.export.session import RuntimeModel, build_session_graph
from lpfs.models import MODELS, make_model as build_model
from lpfs.online.bundle import CURRENT, current, file_digest, rollback
from lpfs.serve.engine import ModelStore, load_bundle
from tests.helpers.bundles import make_model, prepare_dataset, publish_model, sample_rows


@pytest.fixture
def bundles(tmp_path):
    return tmp_path / "bundles"


def publish_seed(bundles, dataset, seed=0, fields=None, **options):
    return publish_model(bundles, dataset, make_model(dataset, fields, seed), sample_rows(), **options)


def open_store(bundles):
    lines = []
    store = ModelStore(bundles, lines.append)
    store.check()
    return store, lines


def test_the_store_follows_current_forward_and_back(dataset, bundles):
    bundles.mkdir()
    store, lines = open_store(bundles)
    assert store.model is None
    for seed in range(3):
        publish_seed(bundles, dataset, seed)
        store.check()
        assert store.model.version == f"00000{seed + 1}"
    held = store.model
    rollback(bundles)
    store.check()
    store.check()
    assert store.model.version == "000002"
    assert held.version == "000003"
    assert store.swaps == 4
    assert store.refused is None
    assert "serving bundle 000002, instead of 000003" in lines[-1]


def test_the_vocabularies_are_read_again_only_if_they_change(dataset, bundles, tmp_path):
    publish_seed(bundles, dataset)
    store, _ = open_store(bundles)
    table = store.model.encoder._table
    for fields in (None, ["text", "age"], ["text", "age", "tags"]):
        publish_seed(bundles, dataset, 1, fields=fields)
        store.check()
        assert store.refused is None
        assert store.model.encoder._table is table
        assert store.model.encoder.schema == store.model.logits.source.schema
    assert store.model.reopened == store.model.optional() == {"tags"}
    other = prepare_dataset(tmp_path / "other", seed=1)
    publish_seed(bundles, other)
    store.check()
    assert store.refused is None
    assert store.model.encoder._table is not table


def damage_weights(bundle):
    path = bundle.path / "model" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def remove_encoder(bundle):
    shutil.rmtree(bundle.path / "encoder")


def break_manifest(bundle):
    (bundle.path / "bundle.json").write_text("{")


def rewrite(bundle, **changes):
    values = {**bundle.manifest, **changes}
    (bundle.path / "bundle.json").write_text(json.dumps({**values, "checksum": json_checksum(values)}))


def other_logits(bundle):
    rewrite(bundle, logits=[logit + 0.001 for logit in bundle.manifest["logits"]])


def nan_logits(bundle):
    rewrite(bundle, logits=bundle.manifest["logits"][:-1])


def other_model(bundle):
    """Put the model of another version into the bundle, with right digests."""
    other = bundle.path.parent / "000001" / "model"
    for path in other.iterdir():
        shutil.copy(path, bundle.path / "model" / path.name)
    files = {
        name: {"bytes": (bundle.path / name).stat().st_size, "sha256": file_digest(bundle.path / name)}
        for name in bundle.manifest["files"]
    }
    rewrite(bundle, files=files)


DAMAGES = {
    damage_weights: "model.safetensors: the checksum does not match",
    remove_encoder: "encoder/.* is missing",
    break_manifest: "cannot be used",
    other_logits: "predicts something else than its manifest says",
    nan_logits: "has 8 rows, the manifest 7 logits",
    other_model: "predicts something else than its manifest says",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_wrong_bundle_is_refused_and_the_old_one_serves_on(dataset, bundles, damage):
    publish_seed(bundles, dataset)
    store, lines = open_store(bundles)
    damage(publish_seed(bundles, dataset, 1))
    before = store.model
    for _ in range(3):
        store.check()
    assert store.model is before
    assert store.refusals == 1, "it is not read again and again"
    assert store.refused.version == "000002"
    with pytest.raises(AssertionError, match=DAMAGES[damage]):
        raise AssertionError(store.refused.reason)
    assert lines[-1].startswith("refused bundle 000002, 000001 is still served: ")
    publish_seed(bundles, dataset, 2)
    store.check()
    assert store.model.version == "000003"
    assert store.refused is None


def test_a_bundle_that_disappears_while_it_is_loaded_is_not_refused(dataset, bundles, monkeypatch):
    publish_seed(bundles, dataset)
    store, _ = open_store(bundles)
    publish_seed(bundles, dataset, 1)

    def overtaken(bundle, before):
        if bundle.version == "000002":
            publish_seed(bundles, dataset, 2)
            shutil.rmtree(bundle.path)
        return load_bundle(bundle, before)

    monkeypatch.setattr("lpfs.serve.engine.load_bundle", overtaken)
    store.check()
    assert store.model.version == "000003"
    assert store.refusals == 0


def test_current_that_names_nothing_is_refused(dataset, bundles):
    publish_seed(bundles, dataset)
    store, _ = open_store(bundles)
    write_text_atomic(bundles / CURRENT, "../../etc\n")
    store.check()
    assert store.model.version == "000001"
    assert "must hold the name of a bundle" in store.refused.reason


@pytest.mark.parametrize("name", sorted(MODELS))
def test_onnx_runtime_predicts_what_torch_predicts(dataset, name):
    torch.manual_seed(0)
    model = build_model(name, dataset.schema).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    graph = build_session_graph(model)
    if graph is None:
        assert name == "user_item"
        return
    logits = RuntimeModel(graph)
    encoder = RawRowEncoder(dataset)
    encoder.build_lookup()
    for rows in (sample_rows(count=1), sample_rows(count=60)):
        batch = encoder.encode(rows).batch
        with torch.inference_mode():
            assert (logits(batch) - model(batch)).abs().max() < 1e-4


def test_torch_answers_without_onnx_runtime(dataset, bundles, monkeypatch):
    monkeypatch.setattr("lpfs.export.session.import_module", raise_import_error)
    publish_seed(bundles, dataset)
    store, _ = open_store(bundles)
    assert store.refused is None
    assert not isinstance(store.model.logits, RuntimeModel)


def raise_import_error(name):
    raise ImportError(name)


def test_the_thread_takes_over_by_itself(dataset, bundles):
    publish_seed(bundles, dataset)
    swapped = threading.Event()
    store = ModelStore(bundles, lambda line: swapped.set() if "000002" in line else None)
    store.start(0.01)
    publish_seed(bundles, dataset, 1)
    assert swapped.wait(30)
    store.stop()
    batch = store.model.encoder.encode(sample_rows()).batch
    expected = torch.tensor(current(bundles).manifest["logits"], dtype=torch.float64)
    assert (store.model.logits(batch).double() - expected).abs().max() < 1e-6
