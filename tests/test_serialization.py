"""A saved model is loaded bit for bit, or loading raises CheckpointError."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lpfs._fileio import json_checksum
from lpfs.errors import CheckpointError, InputError, StateError
from lpfs.gates.absorb import absorb
from lpfs.gates.attach import attach
from lpfs.gates.prune import prune
from lpfs.models.base import Model
from lpfs.models.mlp import MLP
from lpfs.serialization import MANIFEST, WEIGHTS, load, load_metadata, save
from tests.helpers.clicks import CASES, MIXED, SCHEMAS, batch_of


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_a_model_is_restored_bit_for_bit(case, schema, tmp_path):
    model, batch = case.make(schema), batch_of(schema)
    state = torch.random.get_rng_state()
    save(model, tmp_path / "model")
    other = load(tmp_path / "model")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert type(other) is type(model)
    assert (other.schema, other.config, other.silent) == (model.schema, model.config, model.silent)
    assert torch.equal(other(batch), model(batch))
    assert [type(weight) for weight in other.parameters()] == [type(weight) for weight in model.parameters()]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["model", MANIFEST, WEIGHTS]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("cut", [False, True])
def test_a_pruned_model_is_restored(case, cut, tmp_path):
    model, batch = case.make(MIXED), batch_of(MIXED)
    gates = attach(model, steps=10)
    with torch.no_grad():
        gates.x[1] = gates.x[2] = 0.0
    model(batch)
    selection = absorb(model)
    pruned = prune(model, selection, batch=batch, cut=cut).model
    assert isinstance(pruned, Model)
    save(pruned, tmp_path, selection=selection.to_json())
    narrow = model.narrow(batch, pruned)
    assert torch.equal(load(tmp_path)(narrow), pruned(narrow))
    assert load_metadata(tmp_path)["selection"]["dropped"] == list(selection.dropped)


def test_dtypes_are_restored(tmp_path):
    model = MLP(MIXED, dim=4).double()
    assert load(save(model, tmp_path)).top[0].weight.dtype == torch.float64


def test_saving_again_replaces(tmp_path):
    one, two = MLP(MIXED, dim=4), MLP(MIXED, dim=2)
    save(one, tmp_path / "m")
    save(two, tmp_path / "m")
    assert load(tmp_path / "m").config["dim"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_invalid_input_is_refused_before_anything_is_written(tmp_path):
    model = MLP(MIXED, dim=4)
    with pytest.raises(InputError, match="plain JSON"):
        save(model, tmp_path / "m", extra=object())
    with pytest.raises(InputError, match="plain JSON"):
        save(model, tmp_path / "m", auc=float("nan"))
    with pytest.raises(InputError, match="found Linear"):
        save(torch.nn.Linear(1, 1), tmp_path / "m")
    attach(model, steps=10)
    with pytest.raises(StateError, match="absorb or detach"):
        save(model, tmp_path / "m")

    class Mine(MLP):
        pass

    with pytest.raises(InputError, match="is not registered"):
        save(Mine(MIXED), tmp_path / "m")
    assert not list(tmp_path.iterdir())
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="not a saved model"):
        save(MLP(MIXED), tmp_path)
    with pytest.raises(InputError, match="not a saved model"):
        save(MLP(MIXED), tmp_path / "notes.txt")


def test_a_full_disk_leaves_the_older_model(tmp_path, monkeypatch):
    model = MLP(MIXED, dim=4)
    save(model, tmp_path / "m")

    def full(path, tensors):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lpfs.serialization.write_tensors", full)
    with pytest.raises(CheckpointError, match="No space left on device.*intact"):
        save(MLP(MIXED, dim=2), tmp_path / "m")
    assert load(tmp_path / "m").config["dim"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_rename_that_fails_puts_the_older_model_back(tmp_path, monkeypatch):
    save(MLP(MIXED, dim=4), tmp_path / "m")
    rename = Path.rename

    def failing(self, target):
        if self.suffix == ".tmp" and Path(target).name == "m":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    monkeypatch.setattr("lpfs._fileio.exchange_paths", lambda first, second: False)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(MLP(MIXED, dim=2), tmp_path / "m")
    assert load(tmp_path / "m").config["dim"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def edit_manifest(folder, **changes):
    """Change keys of model.json and update its checksum; None removes a key."""
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["checksum"]
    manifest = {key: value for key, value in {**manifest, **changes}.items() if value is not None}
    (folder / MANIFEST).write_text(json.dumps({**manifest, "checksum": json_checksum(manifest)}))


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "no object": (lambda m: (m / MANIFEST).write_text("3"), "model.json.*an object, found 3"),
    "deep": (lambda m: (m / MANIFEST).write_text("[" * 100_000), "model.json.*nested"),
    "extra is text": (lambda m: edit_manifest(m, extra="x"), "'extra' must be an object, found 'x'"),
    "config is a list": (lambda m: edit_manifest(m, config=[]), "'config' must be an object"),
    "silent is a number": (lambda m: edit_manifest(m, silent=3), "'silent' must be a list"),
    "weights without a checksum": (lambda m: edit_manifest(m, weights={"bytes": 3}), "'weights.sha256' is missing"),
    "huge cardinality": (
        lambda m: edit_manifest(m, schema={"fields": [{"name": "a", "cardinality": 1e30}]}),
        r"'fields\[0\].cardinality' must be an integer, found 1e\+30",
    ),
    "no folder": (lambda m: (m / MANIFEST).unlink(), "model.json is missing"),
    "no weights": (lambda m: (m / WEIGHTS).unlink(), "model.safetensors"),
    "truncated weights": (lambda m: (m / WEIGHTS).write_bytes((m / WEIGHTS).read_bytes()[:-5]), "damaged"),
    "longer weights": (lambda m: (m / WEIGHTS).write_bytes((m / WEIGHTS).read_bytes() + b"x"), "damaged"),
    "a bit of the weights": (lambda m: flip(m / WEIGHTS, -9), "checksum does not match"),
    "a bit of their header": (lambda m: flip(m / WEIGHTS, 20), "damaged"),
    "truncated json": (lambda m: (m / MANIFEST).write_text((m / MANIFEST).read_text()[:-20]), "damaged"),
    "no json": (lambda m: (m / MANIFEST).write_bytes(b"\xff\xfe\x00"), "damaged"),
    "a list": (lambda m: (m / MANIFEST).write_text("[]"), "damaged"),
    "a changed value": (
        lambda m: (m / MANIFEST).write_text((m / MANIFEST).read_text().replace('"dim": 4', '"dim": 5')),
        "the checksum of model.json does not match",
    ),
    "an unknown key": (lambda m: edit_manifest(m, colour="red"), "unknown key 'colour'"),
    "a missing key": (lambda m: edit_manifest(m, silent=None), "no 'silent'"),
    "another version": (lambda m: edit_manifest(m, version=99), "lpfs-model 1"),
    "an unknown model": (lambda m: edit_manifest(m, model="tree"), "cannot be built"),
    "an unknown argument": (lambda m: edit_manifest(m, config={"colour": 1}), "unknown key 'colour'"),
    "other shapes": (lambda m: edit_manifest(m, config={"dim": 8}), "cannot be built"),
    "a schema that is none": (lambda m: edit_manifest(m, schema={"rows": 1}), "cannot be built"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_reported(name, tmp_path):
    save(MLP(MIXED, dim=4, hidden=(3,)), tmp_path / "m")
    damage, message = DAMAGE[name]
    damage(tmp_path / "m")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "m")


def test_the_weights_are_a_safetensors_file(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = MLP(MIXED, dim=4)
    save(model, tmp_path)
    read = safetensors.load_file(tmp_path / WEIGHTS)
    assert set(read) == set(model.state_dict())
    assert all(torch.equal(read[name], weight) for name, weight in model.state_dict().items())
