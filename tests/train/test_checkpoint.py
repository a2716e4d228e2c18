from __future__ import annotations

import ast
import errno
import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

import lpfs
from lpfs._fileio import json_checksum
from lpfs.errors import CheckpointError, InputError
from lpfs.train import checkpoint, tensor_io
from lpfs.train.checkpoint import Checkpoints, CheckpointWarning
from lpfs.train.tensor_io import states_equal

FILES = ("tensors.safetensors", "state.json", "checkpoint.json")


def state(step):
    return {"step": step, "model": {"w": torch.full((3,), float(step))}, "betas": (0.9, 0.999)}


def save_steps(folder, *steps, keep=10):
    checkpoints = Checkpoints(folder / "checkpoints", keep)
    for step in steps:
        checkpoints.save(step, state(step))
    return checkpoints


def test_saved_and_loaded(tmp_path):
    checkpoints = save_steps(tmp_path, 5, 10)
    assert checkpoints.steps() == [5, 10]
    step, found = checkpoints.latest()
    assert step == 10
    assert states_equal(found, state(10))
    assert states_equal(checkpoints.load(5), state(5))
    assert sorted(path.name for path in checkpoints.path(5).iterdir()) == sorted(FILES)


def test_without_checkpoints_latest_is_none(tmp_path):
    assert Checkpoints(tmp_path / "nowhere").latest() is None


def test_the_last_checkpoints_are_kept(tmp_path):
    assert save_steps(tmp_path, 1, 2, 3, 4, keep=2).steps() == [3, 4]


def touched_rows(dtype, row):
    table = torch.zeros(40_000, *row, dtype=dtype)
    table[::7] = 1
    if dtype.is_floating_point:
        table[3] = -0.0
    return {"sum": table, "step": torch.zeros(()), "whole": torch.ones(40_000), "empty": torch.zeros(0, 3)}


@pytest.mark.parametrize(
    ("dtype", "row"),
    [(torch.float32, (16,)), (torch.float32, (3,)), (torch.float32, ()), (torch.bfloat16, (2, 2)), (torch.int64, (1,))],
    ids=str,
)
def test_rows_of_zeros_are_left_out_and_restored_bit_for_bit(tmp_path, dtype, row):
    saved, checkpoints = touched_rows(dtype, row), Checkpoints(tmp_path)
    size = (checkpoints.save(1, saved) / "tensors.safetensors").stat().st_size
    stored = saved["sum"].nbytes // 7 + len(saved["sum"]) + saved["whole"].nbytes
    assert stored <= size < stored + 2000
    assert states_equal(checkpoints.load(1), saved)


@pytest.mark.parametrize("row", [(2048,), (3,)])
def test_rows_that_are_long_or_odd_are_stored_whole(tmp_path, row):
    saved = {"sum": torch.zeros(1000, *row, dtype=torch.float32 if len(row) and row[0] > 3 else torch.int8)}
    saved["sum"] = saved["sum"].repeat(60, 1) if row == (3,) else saved["sum"]
    path = Checkpoints(tmp_path).save(1, saved)
    assert (path / "tensors.safetensors").stat().st_size >= saved["sum"].nbytes
    assert states_equal(Checkpoints(tmp_path).load(1), saved)


def test_mapped_weights_are_those_of_the_checkpoint_and_do_not_change_it(tmp_path):
    model = torch.nn.Linear(30, 50)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Checkpoints(tmp_path).save(7, {"model": dict(model.state_dict())})
    model.load_state_dict({name: torch.zeros_like(value) for name, value in before.items()})
    checkpoint.map_weights(model, tmp_path)
    assert states_equal(dict(model.state_dict()), before)
    with torch.no_grad():
        model.weight.zero_()
    assert states_equal(Checkpoints(tmp_path).load(7)["model"], before)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove", "rubbish"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, file, damage):
    checkpoints = save_steps(tmp_path, 5, 10)
    path = checkpoints.path(10) / file
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 4
    changed = {"flip": data, "truncate": data[:-2], "empty": b"", "rubbish": b"\xff{]" * 50}
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(changed[damage])
    with pytest.warns(CheckpointWarning, match="step-000000000010 is damaged.*previous"):
        step, found = checkpoints.latest()
    assert step == 5
    assert states_equal(found, state(5))
    checkpoints.save(10, state(10))  # the damaged one is replaced
    assert checkpoints.latest()[0] == 10


def test_every_flipped_bit_is_detected(tmp_path):
    checkpoints = save_steps(tmp_path, 5)
    for file in FILES:
        path = checkpoints.path(5) / file
        whole = path.read_bytes()
        for byte in range(len(whole)):
            damaged = bytearray(whole)
            damaged[byte] ^= 1 << byte % 8
            path.write_bytes(damaged)
            try:
                found = checkpoints.load(5)
            except CheckpointError:
                continue
            assert file == "checkpoint.json"  # white space between its values has no meaning
            assert chr(whole[byte]).isspace()
            assert states_equal(found, state(5))
        path.write_bytes(whole)


def test_if_all_are_damaged_loading_raises(tmp_path):
    checkpoints = save_steps(tmp_path, 5)
    (checkpoints.path(5) / "state.json").write_bytes(b"")
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(CheckpointError, match="all 1 checkpoints.*remove the directory"),
    ):
        checkpoints.latest()


def test_a_partially_written_checkpoint_is_ignored_and_removed(tmp_path):
    checkpoints = save_steps(tmp_path, 5)
    left = checkpoints.folder / ".step-000000000010.tmp"
    shutil.copytree(checkpoints.path(5), left)
    assert checkpoints.steps() == [5]
    assert checkpoints.latest()[0] == 5
    checkpoints.save(15, state(15))
    assert not left.exists()


def test_a_partially_removed_checkpoint_is_not_loaded(tmp_path):
    checkpoints = save_steps(tmp_path, 5, 10)
    (checkpoints.path(5) / "checkpoint.json").unlink()
    assert checkpoints.latest()[0] == 10
    with pytest.raises(CheckpointError):
        checkpoints.load(5)


@pytest.mark.parametrize("piece", [1, 2])
def test_a_full_disk_leaves_the_old_ones_intact(tmp_path, monkeypatch, piece):
    checkpoints = save_steps(tmp_path, 5)
    whole, left = tensor_io._write_bytes, piece

    def put(file, digest, data):
        nonlocal left
        left -= 1
        if not left:
            file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(file, digest, data)

    monkeypatch.setattr(tensor_io, "_write_bytes", put)
    with pytest.raises(CheckpointError, match="No space left on device.*intact"):
        checkpoints.save(10, state(10))
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-000000000005"]
    assert states_equal(checkpoints.latest()[1], state(5))


def test_a_file_size_limit(tmp_path):
    """With a limit of the operating system on file sizes, the write itself fails."""
    resource = pytest.importorskip("resource")
    checkpoints = save_steps(tmp_path, 5)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        with pytest.raises(CheckpointError, match="intact"):
            checkpoints.save(10, {"big": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-000000000005"]
    assert checkpoints.latest()[0] == 5


def test_an_unsupported_state_leaves_no_files(tmp_path):
    checkpoints = save_steps(tmp_path, 5)
    with pytest.raises(InputError, match="a set"):
        checkpoints.save(10, {"bad": {1}})
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-000000000005"]


def test_another_version_is_not_read(tmp_path):
    checkpoints = save_steps(tmp_path, 5)
    path = checkpoints.path(5) / "checkpoint.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    with pytest.raises(CheckpointError, match="lpfs-checkpoint 3"):
        checkpoints.load(5)


def rewrite(folder, files=None, state=None, tensors=None, **changes):
    """Change a checkpoint and update all its checksums; ``files`` are additional entries of checkpoint.json."""
    manifest = json.loads((folder / "checkpoint.json").read_text())
    del manifest["checksum"]
    for name, data in (("state.json", state), ("tensors.safetensors", tensors)):
        if data is not None:
            (folder / name).write_bytes(data)
            manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest = {**manifest, "files": {**manifest["files"], **(files or {})}, **changes}
    (folder / "checkpoint.json").write_text(json.dumps({**manifest, "checksum": json_checksum(manifest)}))


def header_of(entry):
    text = json.dumps({"model.w": entry}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(12)


ENTRY = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
EMPTY = {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
HOSTILE = {
    "a file above": ({"files": {"../outside": EMPTY}}, r"\.\./outside"),
    "an absolute file": ({"files": {"/etc/hostname": EMPTY}}, "/etc/hostname"),
    "another file": ({"files": {"notes.txt": EMPTY}}, "notes.txt"),
    "a state that is a list": ({"state": b"[]"}, "state.json"),
    "nested state": ({"state": b"[" * 100_000}, "damaged"),
    "a tensor that is not stored": ({"state": b'{"w": {"!tensor": "x"}}'}, "'x'"),
    "an unhashable tensor name": ({"state": b'{"w": {"!tensor": []}}'}, "damaged"),
    "an unhashable key": ({"state": b'{"!items": [[[], 1]]}'}, "damaged"),
    "a float of text": ({"state": b'{"w": {"!float": "x"}}'}, "damaged"),
    "items of a number": ({"state": b'{"!items": 3}'}, "damaged"),
    "rows without a mask": ({"state": b'{"w": {"!rows": ["model.w"]}}'}, "damaged"),
    "a mask of numbers": ({"state": b'{"w": {"!rows": ["model.w", "model.w"]}}'}, "mask"),
    "a mask of text": ({"state": b'{"w": {"!rows": "xy"}}'}, "damaged"),
    "a huge shape": ({"tensors": header_of({**ENTRY, "shape": [1 << 40]})}, "tensors.safetensors"),
    "an unknown dtype": ({"tensors": header_of({**ENTRY, "dtype": "PICKLE"})}, "tensors.safetensors"),
    "offsets outside": ({"tensors": header_of({**ENTRY, "data_offsets": [0, 1 << 50]})}, "tensors.safetensors"),
    "a header that is longer than the file": ({"tensors": b"\xff" * 8}, "tensors.safetensors"),
    "bytes is text": ({"files": {"state.json": {"bytes": "x"}}}, "state.json"),
    "an entry is null": ({"files": {"state.json": None}}, "damaged"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_checkpoint_is_refused_in_one_line(tmp_path, name):
    checkpoints = save_steps(tmp_path, 5)
    changes, message = HOSTILE[name]
    rewrite(checkpoints.path(5), **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoints.load(5)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", FILES)
def test_a_file_outside_of_the_checkpoint_is_not_read(tmp_path, file):
    checkpoints = save_steps(tmp_path, 5)
    path = checkpoints.path(5) / file
    path.symlink_to(path.rename(tmp_path / file))
    with pytest.raises(CheckpointError, match="leaves"):
        checkpoints.load(5)


def test_a_checkpoint_that_is_a_link_is_neither_read_nor_removed(tmp_path):
    elsewhere = save_steps(tmp_path / "other", 1)
    checkpoints = save_steps(tmp_path, 2, keep=1)
    checkpoints.path(1).symlink_to(elsewhere.path(1))
    assert checkpoints.steps() == [2]
    checkpoints.save(3, state(3))
    assert states_equal(elsewhere.load(1), state(1))


def test_files_are_flushed_before_the_rename(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(checkpoint, "fsync_path", lambda path: order.append(path.name))
    monkeypatch.setattr(tensor_io, "fsync_path", lambda path: order.append(path.name))
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, to: (order.append("rename"), rename(self, to))[1])
    save_steps(tmp_path, 5)
    staging = ".step-000000000005.tmp"
    assert order == ["tensors.safetensors", "state.json", "checkpoint.json", staging, "rename", "checkpoints"]


def test_no_pickle_anywhere():
    """No module uses formats that can execute code, except for the results of Spark workers."""
    wrong = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    for path in Path(lpfs.__file__).parent.rglob("*.py"):
        if path.parent.parts[-2:] == ("data", "engines"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                assert not {alias.name.split(".")[0] for alias in node.names} & wrong, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in wrong, path
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called = ast.unparse(node.func)
                assert called not in ("torch.load", "torch.save", "torch.serialization.load"), path
                if called in ("np.load", "numpy.load"):
                    allowed = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                    assert allowed.get("allow_pickle", "False") == "False", path
            elif isinstance(node, ast.Name):
                assert node.id not in ("eval", "exec"), path
