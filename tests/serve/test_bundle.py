"""Bundles: complete or absent, immutable, checked file by file; CURRENT moves forward and back."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch

from lpfs._fileio import json_checksum
from lpfs.data.raw_rows import RawRowEncoder
from lpfs.errors import CheckpointError, FieldError, InputError
from lpfs.export import export_run
from lpfs.export.parity import onnx_runtime
from lpfs.gates.verification import compute_logits
from lpfs.online.bundle import CURRENT, current, open_bundle, publish, rollback, versions
from lpfs.serialization import load
from tests.helpers.bundles import make_model, publish_model, sample_rows


@pytest.fixture
def bundles(tmp_path):
    return tmp_path / "bundles"


def publish_one(bundles, dataset, seed=0, **options):
    return publish_model(bundles, dataset, make_model(dataset, seed=seed), sample_rows(), **options)


def rewrite_manifest(bundle, **changes):
    path = bundle.path / "bundle.json"
    values = {**bundle.manifest, **changes}
    path.write_text(json.dumps({**values, "checksum": json_checksum(values)}))


def test_a_bundle_has_all_that_serving_needs(dataset, bundles):
    fields = ["text", "age", "tags"]
    model = make_model(dataset, fields)
    bundle = publish_model(bundles, dataset, model, sample_rows())
    assert bundle == current(bundles)
    assert bundle.version == "000001"
    assert set(bundle.fields) == set(fields)
    assert bundle.manifest["certificate"]["bound"] == 0.0
    assert bundle.manifest["metadata"] == {"position": 7}
    bundle.verify_files()
    encoder = RawRowEncoder(bundle.path / "encoder").subset(fields)
    assert encoder.schema == model.reads
    assert set(bundle.samples()[0]) == set(fields)
    [logits] = compute_logits(load(bundle.path / "model"), encoder.encode(bundle.samples()).batch)
    assert torch.equal(logits.double(), torch.tensor(bundle.manifest["logits"], dtype=torch.float64))


def test_a_bundle_becomes_an_onnx_file_with_preprocessing(dataset, bundles, tmp_path):
    bundle = publish_model(bundles, dataset, make_model(dataset, ["text", "code", "age"]), sample_rows())
    file = export_run(bundle.path, tmp_path / "model.onnx", dataset=bundle.path / "encoder").path
    run, _ = onnx_runtime(str(file))
    rows = bundle.samples()
    feeds = {
        "text": np.array([row["text"] or "" for row in rows], object),
        "code": np.array([row["code"] for row in rows]),
        "age": np.array([row["age"] for row in rows], np.float64),
    }
    assert np.abs(run(feeds)["logit"] - bundle.manifest["logits"]).max() < 1e-5
    bundle.verify_files()


def test_the_encoder_is_copied_from_the_bundle_before_unless_it_is_damaged(dataset, bundles, monkeypatch):
    first = publish_one(bundles, dataset)
    written = []
    monkeypatch.setattr(
        RawRowEncoder, "save", lambda self, out, save=RawRowEncoder.save: written.append(save(self, out))
    )
    names = [name for name in first.manifest["files"] if name.startswith("encoder/")]
    second = publish_one(bundles, dataset, 1)
    assert not written
    [path, *_] = [second.path / name for name in names if name.endswith(".npy")]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    third = publish_one(bundles, dataset, 2)
    assert len(written) == 1
    third.verify_files()
    for bundle in (second, third):
        assert all(bundle.manifest["files"][name] == first.manifest["files"][name] for name in names)


def test_nothing_published_is_no_bundle(bundles):
    assert current(bundles) is None
    assert versions(bundles) == []


def test_old_bundles_are_removed_and_numbers_go_on(dataset, bundles):
    for seed in range(4):
        publish_one(bundles, dataset, seed, keep=2)
    assert versions(bundles) == ["000003", "000004"]
    assert rollback(bundles).version == current(bundles).version == "000003"
    publish_one(bundles, dataset, 9, keep=1)
    assert versions(bundles) == ["000003", "000005"], "the bundle that was current stays: servers may still load it"
    with pytest.raises(InputError, match="no bundle '000004'; it has 000003, 000005"):
        rollback(bundles, "000004")
    assert rollback(bundles, "000003").version == "000003"
    with pytest.raises(InputError, match="no bundle before 000003"):
        rollback(bundles)


def test_wrong_arguments_publish_nothing(dataset, bundles):
    model = make_model(dataset, ["text", "code"])
    encoder = RawRowEncoder(dataset)
    common = {"certificate": {}, "metadata": {}}
    with pytest.raises(FieldError, match="'code'"):
        publish(bundles, model, RawRowEncoder(dataset, ["text"]), sample_rows=sample_rows(), **common)
    with pytest.raises(InputError, match="1 to 1,024 rows, found 0"):
        publish(bundles, model, encoder, sample_rows=[], **common)
    with pytest.raises(InputError, match="plain JSON"):
        publish(bundles, model, encoder, sample_rows=[{"text": object()}], **common)
    with pytest.raises(InputError, match="sample rows cannot be encoded: row 0, field 'text'"):
        publish(bundles, model, encoder, sample_rows=[{"text": [1], "code": 1}], **common)
    assert current(bundles) is None
    assert versions(bundles) == []
    assert not bundles.exists() or not list(bundles.iterdir())


def test_a_failed_publication_leaves_the_current_bundle(dataset, bundles, monkeypatch):
    publish_one(bundles, dataset)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lpfs.online.bundle.fsync_tree", full)
    with pytest.raises(CheckpointError, match="No space left on device; the current bundle is still 000001"):
        publish_one(bundles, dataset, 1)
    assert sorted(os.listdir(bundles)) == ["000001", CURRENT]
    current(bundles).verify_files()


def test_every_damaged_file_is_named(dataset, bundles):
    bundle = publish_one(bundles, dataset)
    for name in bundle.manifest["files"]:
        path = bundle.path / name
        data = path.read_bytes()
        for damaged in (data[:-1], data[:-1] + bytes([data[-1] ^ 1])):
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
                bundle.verify_files()
        path.unlink()
        with pytest.raises(CheckpointError, match="is missing"):
            bundle.verify_files()
        path.write_bytes(data)
    bundle.verify_files()


@pytest.mark.parametrize("text", ["", "../etc", "/etc", "000001/..", "x" * 1000, "000009"])
def test_current_names_only_a_bundle_beside_it(dataset, bundles, text):
    publish_one(bundles, dataset)
    (bundles / CURRENT).write_text(text)
    with pytest.raises(CheckpointError, match="must hold the name of a bundle|cannot be used"):
        current(bundles)


def test_a_manifest_that_lies_is_refused(dataset, bundles):
    bundle = publish_one(bundles, dataset)
    files = dict(bundle.manifest["files"])
    for changes in ({"version": "000002"}, {"format": "zip"}, {"fields": "text"}, {"logits": None}):
        rewrite_manifest(bundle, **changes)
        with pytest.raises(CheckpointError, match=r"bundle .*000001 cannot be used"):
            open_bundle(bundle.path)
    for name in ("../outside", "/etc/hostname"):
        rewrite_manifest(bundle, files={**files, name: {"bytes": 1, "sha256": ""}})
        with pytest.raises(CheckpointError, match="is damaged"):
            open_bundle(bundle.path).verify_files()
    rewrite_manifest(bundle, files=files)
    (bundle.path / "extra.py").write_text("x")
    with pytest.raises(CheckpointError, match=r"extra\.py is not in the manifest"):
        open_bundle(bundle.path).verify_files()


def test_a_link_out_of_the_bundle_is_refused(dataset, bundles, tmp_path):
    bundle = publish_one(bundles, dataset)
    samples = bundle.path / "samples.json"
    samples.rename(tmp_path / "outside.json")
    samples.symlink_to(tmp_path / "outside.json")
    with pytest.raises(CheckpointError, match="is a link that leaves"):
        bundle.verify_files()
