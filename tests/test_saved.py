"""A saved model comes back to the last bit, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import lpfs.saved
import pytest
import torch
from clicks import CASES, MIXED, SCHEMAS, batch_of

from lpfs._fileio import json_checksum
from lpfs.errors import CheckpointError, InputError, StateError
from lpfs.gates.absorb import absorb
from lpfs.gates.attach import attach
from lpfs.gates.prune import prune
from lpfs.models.base import Model
from lpfs.models.mlp import MLP
from lpfs.serialization import MANIFEST, WEIGHTS, load, load_metadata, save


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_a_model_comes_back_to_the_last_bit(case, schema, tmp_path):
    model, batch = case.make(schema), batch_of(schema)
    state = torch.random.get_rng_state()
    save(model, tmp_path / "model")
    other = load(tmp_path / "model")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert type(other) is type(model)
    assert (other.schema, other.config, other.silent) == (model.schema, model.config, model.silent)
    assert torch.equal(other(batch), model(batch))
    assert [type(each) for each in other.parameters()] == [type(each) for each in model.parameters()]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["model", MANIFEST, WEIGHTS]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("cut", [False, True])
def test_a_pruned_model_comes_back(case, cut, tmp_path):
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


def test_dtypes_come_back(tmp_path):
    model = MLP(MIXED, dim=4).double()
    assert load(save(model, tmp_path)).top[0].weight.dtype == torch.float64


def test_saving_again_replaces(tmp_path):
    one, two = MLP(MIXED, dim=4), MLP(MIXED, dim=2)
    save(one, tmp_path / "m")
    save(two, tmp_path / "m")
    assert load(tmp_path / "m").config["dim"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path):
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
    with pytest.raises(InputError, match="something else"):
        save(MLP(MIXED), tmp_path)
    with pytest.raises(InputError, match="something else"):
        save(MLP(MIXED), tmp_path / "notes.txt")


def test_a_full_disk_leaves_the_older_model(tmp_path, monkeypatch):
    model = MLP(MIXED, dim=4)
    save(model, tmp_path / "m")

    def full(path, tensors):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lpfs.saved, "write_tensors", full)
    with pytest.raises(CheckpointError, match="No space left on device; what was there before is intact"):
        save(MLP(MIXED, dim=2), tmp_path / "m")
    assert load(tmp_path / "m").config["dim"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_rename_that_fails_puts_the_older_model_back(tmp_path, monkeypatch):
    save(MLP(MIXED, dim=4), tmp_path / "m")
    rename = Path.rename

    def failing(self, target):
        if self.name == "new":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(MLP(MIXED, dim=2), tmp_path / "m")
    assert load(tmp_path / "m").config["dim"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def resealed(folder, **changes):
    """Change what model.json says, with a checksum that matches; None removes a key."""
    about = json.loads((folder / MANIFEST).read_text())
    del about["checksum"]
    about = {key: value for key, value in {**about, **changes}.items() if value is not None}
    (folder / MANIFEST).write_text(json.dumps({**about, "checksum": json_checksum(about)}))


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "no folder": (lambda m: (m / MANIFEST).unlink(), "there is no saved model"),
    "no weights": (lambda m: (m / WEIGHTS).unlink(), "has no model.safetensors"),
    "truncated weights": (lambda m: (m / WEIGHTS).write_bytes((m / WEIGHTS).read_bytes()[:-5]), "damaged"),
    "longer weights": (lambda m: (m / WEIGHTS).write_bytes((m / WEIGHTS).read_bytes() + b"x"), "damaged"),
    "a bit of the weights": (lambda m: flip(m / WEIGHTS, -9), "checksum does not match"),
    "a bit of their header": (lambda m: flip(m / WEIGHTS, 20), "damaged"),
    "truncated json": (lambda m: (m / MANIFEST).write_text((m / MANIFEST).read_text()[:-20]), "damaged"),
    "no json": (lambda m: (m / MANIFEST).write_bytes(b"\xff\xfe\x00"), "damaged"),
    "a list": (lambda m: (m / MANIFEST).write_text("[]"), "holds no model"),
    "a changed value": (
        lambda m: (m / MANIFEST).write_text((m / MANIFEST).read_text().replace('"dim": 4', '"dim": 5')),
        "the checksum of model.json does not match",
    ),
    "an unknown key": (lambda m: resealed(m, colour="red"), "unknown key 'colour'"),
    "a missing key": (lambda m: resealed(m, silent=None), "no 'silent'"),
    "another version": (lambda m: resealed(m, version=99), "is not of lpfs-model 1"),
    "an unknown model": (lambda m: resealed(m, model="tree"), "cannot be built"),
    "an unknown argument": (lambda m: resealed(m, config={"colour": 1}), "unknown key 'colour'"),
    "other shapes": (lambda m: resealed(m, config={"dim": 8}), "cannot be built"),
    "a schema that is none": (lambda m: resealed(m, schema={"rows": 1}), "cannot be built"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_told(how, tmp_path):
    save(MLP(MIXED, dim=4, hidden=(3,)), tmp_path / "m")
    damage, message = DAMAGE[how]
    damage(tmp_path / "m")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "m")


def test_the_weights_are_a_safetensors_file(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = MLP(MIXED, dim=4)
    save(model, tmp_path)
    read = safetensors.load_file(tmp_path / WEIGHTS)
    assert set(read) == set(model.state_dict())
    assert all(torch.equal(read[name], each) for name, each in model.state_dict().items())
