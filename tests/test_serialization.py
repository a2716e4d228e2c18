"""A saved model is loaded bit for bit, or loading raises CheckpointError."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lpfs._fileio import json_checksum
from lpfs.errors import CheckpointError, InputError, StateError
from lpfs.gates.absorb import absorb
from lpfs.gates.attach import attach
from lpfs.gates.prune import prune
from lpfs.models.base import Model
from lpfs.models.dlrm import DLRM
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
        "model.json: its checksum does not match",
    ),
    "an unknown key": (lambda m: edit_manifest(m, colour="red"), "unknown key 'colour'"),
    "a missing key": (lambda m: edit_manifest(m, silent=None), "no 'silent'"),
    "another version": (lambda m: edit_manifest(m, version=99), "lpfs-model 1"),
    "an unknown model": (lambda m: edit_manifest(m, model="tree"), "cannot be built"),
    "an unknown argument": (lambda m: edit_manifest(m, config={"colour": 1}), "unknown key 'colour'"),
    "other shapes": (lambda m: edit_manifest(m, config={"dim": 8}), "cannot be built"),
    "a schema that is none": (lambda m: edit_manifest(m, schema={"rows": 1}), "cannot be built"),
    "nested too deeply": (lambda m: (m / MANIFEST).write_text("[" * 100_000), "nested"),
    "extra is a list": (lambda m: edit_manifest(m, extra=[]), "'extra'"),
    "silent is text": (lambda m: edit_manifest(m, silent="x"), "'silent'"),
    "silent has a dict": (lambda m: edit_manifest(m, silent=[{}]), "model.json"),
    "model is a number": (lambda m: edit_manifest(m, model=3), "'model'"),
    "weights is text": (lambda m: edit_manifest(m, weights="x"), "'weights'"),
    "no checksum of the weights": (lambda m: edit_manifest(m, weights={}), "model.json: .*weights"),
    "fields is a number": (lambda m: edit_manifest(m, schema={"fields": 3}), "model.json"),
    "a field is text": (lambda m: edit_manifest(m, schema={"fields": ["x"]}), "model.json"),
    "a link to the outside": (lambda m: move_outside(m / WEIGHTS), "leaves"),
    "a manifest outside": (lambda m: move_outside(m / MANIFEST), "leaves"),
    "a link to itself": (lambda m: ((m / WEIGHTS).unlink(), (m / WEIGHTS).symlink_to(m / WEIGHTS)), "leaves"),
    "a pipe": (lambda m: ((m / MANIFEST).unlink(), os.mkfifo(m / MANIFEST)), "regular file"),
    "a directory": (lambda m: ((m / WEIGHTS).unlink(), (m / WEIGHTS).mkdir()), "regular file"),
}
SIZES = (40_000_000, 2**31, 10**30, 1e30, -1, True, None, "8", [8], {})


def move_outside(path):
    path.symlink_to(path.rename(path.parent.parent / path.name))


def edit_field(folder, number=0, **changes):
    schema = json.loads((folder / MANIFEST).read_text())["schema"]
    schema["fields"][number].update(changes)
    edit_manifest(folder, schema=schema)


def edit_header(folder, name="top.0.weight", **changes):
    """Change the entry of a tensor, or with ``name=None`` replace the header; the checksums are updated."""
    data = (folder / WEIGHTS).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    if name is None:
        header = changes["header"]
    else:
        header[name] = {**header[name], **changes}
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + data[8 + size :]
    (folder / WEIGHTS).write_bytes(data)
    edit_manifest(folder, weights={"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})


HEADERS = {
    "a huge shape": {"shape": [1 << 40, 1 << 20]},
    "a shape that overflows": {"shape": [1 << 62, 4]},
    "a negative shape": {"shape": [-3, -20]},
    "a shape of a bool": {"shape": [True, 60]},
    "a shape of text": {"shape": "x"},
    "a shape of many dims": {"shape": [1] * 1000},
    "no shape": {"shape": None},
    "an unknown dtype": {"dtype": "F8"},
    "an unhashable dtype": {"dtype": []},
    "a dtype of integers": {"dtype": "I32"},
    "offsets of text": {"data_offsets": ["a", "b"]},
    "offsets of the whole file": {"data_offsets": [0, 1 << 40]},
    "three offsets": {"data_offsets": [0, 1, 2]},
    "a list": {"name": None, "header": []},
    "a number": {"name": None, "header": 3},
    "an entry that is none": {"name": None, "header": {"x": None}},
    "an empty header": {"name": None, "header": {}},
}


@pytest.mark.parametrize("changes", HEADERS.values(), ids=HEADERS)
def test_a_header_that_does_not_match_the_file_is_refused(changes, tmp_path):
    save(MLP(MIXED, dim=4, hidden=(3,)), tmp_path)
    edit_header(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=WEIGHTS) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("key", ["cardinality", "dim"])
def test_a_size_of_a_field_that_the_weights_do_not_have_is_refused(size, key, tmp_path):
    save(MLP(MIXED, dim=4, hidden=(3,)), tmp_path)
    number = next(n for n, field in enumerate(MIXED) if (field.kind == "numeric") == (key == "dim"))
    edit_field(tmp_path, number, **{key: size})
    with pytest.raises(CheckpointError, match=MANIFEST) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_size_in_the_config_that_the_weights_do_not_have_is_refused(case, size, tmp_path):
    save(case.make(MIXED), tmp_path)
    config = json.loads((tmp_path / MANIFEST).read_text())["config"]
    for key in [key for key, value in config.items() if isinstance(value, int | list)]:
        edit_manifest(tmp_path, config={**config, key: [size] if isinstance(config[key], list) else size})
        with pytest.raises(CheckpointError, match="damaged"):
            load(tmp_path)


LOAD = """
import resource, sys
from lpfs.errors import CheckpointError
from lpfs.serialization import load
from lpfs.models.mlp import MLP
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    load(sys.argv[1])
except CheckpointError as error:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, error)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "field",
    [
        {"kind": "numeric", "dim": 2**30},
        {"kind": "multi", "cardinality": 2**30},
        {"kind": "categorical", "cardinality": 40_000_000},
    ],
)
def test_a_small_file_does_not_take_much_memory(field, tmp_path):
    save(MLP(MIXED, dim=4, hidden=(3,)), tmp_path)
    edit_field(tmp_path, 0, **field)
    result = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True)
    megabytes, _, message = result.stdout.partition(" ")
    assert "model.json" in message, result.stderr
    assert int(megabytes) < 300


def test_many_fields_of_a_model_with_pairs_are_refused_early(tmp_path):
    save(DLRM(MIXED, dim=4, hidden=(3,)), tmp_path)
    fields = [{"name": f"f{number}", "cardinality": 3} for number in range(20_000)]
    edit_manifest(tmp_path, schema={"fields": fields})
    with pytest.raises(CheckpointError, match="199990000 pairs of fields"):
        load(tmp_path)


@pytest.mark.parametrize("file", [MANIFEST, WEIGHTS])
def test_every_flipped_bit_is_detected(file, tmp_path):
    model = MLP(MIXED, dim=2, hidden=(3,))
    path = save(model, tmp_path, auc=0.75) / file
    whole = path.read_bytes()
    for byte in range(len(whole)):
        path.write_bytes(whole[:byte] + bytes([whole[byte] ^ 1 << byte % 8]) + whole[byte + 1 :])
        try:
            load(tmp_path)
        except CheckpointError:
            continue
        assert file == MANIFEST  # white space between its values has no meaning
        assert chr(whole[byte]).isspace()


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
