from __future__ import annotations

import ast
import errno
import json
import shutil
from pathlib import Path

import pytest
import torch

import lpfs
from lpfs.errors import CheckpointError, InputError
from lpfs.train import checkpoint, tensor_io
from lpfs.train.checkpoint import Checkpoints, CheckpointWarning
from lpfs.train.tensor_io import states_equal

FILES = ("tensors.safetensors", "state.json", "checkpoint.json")


def state(step):
    return {"step": step, "model": {"w": torch.full((3,), float(step))}, "betas": (0.9, 0.999)}


def made(folder, *steps, keep=10):
    checkpoints = Checkpoints(folder / "checkpoints", keep)
    for step in steps:
        checkpoints.save(step, state(step))
    return checkpoints


def test_saved_and_loaded(tmp_path):
    checkpoints = made(tmp_path, 5, 10)
    assert checkpoints.steps() == [5, 10]
    step, found = checkpoints.latest()
    assert step == 10
    assert states_equal(found, state(10))
    assert states_equal(checkpoints.load(5), state(5))
    assert sorted(path.name for path in checkpoints.path(5).iterdir()) == sorted(FILES)


def test_nothing_there_is_none(tmp_path):
    assert Checkpoints(tmp_path / "nowhere").latest() is None


def test_the_last_ones_stay_and_those_that_they_need(tmp_path):
    checkpoints = made(tmp_path, 1, 2, 3, 4, keep=2)
    assert checkpoints.steps() == [3, 4]
    checkpoints.save(5, state(5), needs=[3])
    checkpoints.save(6, state(6), needs=[3])
    assert checkpoints.steps() == [3, 5, 6]
    checkpoints.save(7, state(7), needs=[7])
    assert checkpoints.steps() == [3, 6, 7]  # 6 needs it
    checkpoints.save(8, state(8), needs=[7])
    assert checkpoints.steps() == [7, 8]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove", "rubbish"])
def test_a_damaged_one_is_passed_over_with_a_message(tmp_path, file, damage):
    checkpoints = made(tmp_path, 5, 10)
    path = checkpoints.path(10) / file
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 4
    changed = {"flip": data, "truncate": data[:-2], "empty": b"", "rubbish": b"\xff{]" * 50}
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(changed[damage])
    with pytest.warns(CheckpointWarning, match="step-000000000010 is damaged.*the one before it is used"):
        step, found = checkpoints.latest()
    assert step == 5
    assert states_equal(found, state(5))
    checkpoints.save(10, state(10))  # the damaged one is replaced
    assert checkpoints.latest()[0] == 10


def test_every_flipped_bit_is_noticed(tmp_path):
    checkpoints = made(tmp_path, 5)
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


def test_when_none_is_whole_that_is_an_error_and_not_a_new_start(tmp_path):
    checkpoints = made(tmp_path, 5)
    (checkpoints.path(5) / "state.json").write_bytes(b"")
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(CheckpointError, match="none of the 1 checkpoints .* is whole"),
    ):
        checkpoints.latest()


def test_a_half_written_one_is_no_checkpoint_and_is_swept_away(tmp_path):
    checkpoints = made(tmp_path, 5)
    left = checkpoints.folder / ".step-000000000010.tmp"
    shutil.copytree(checkpoints.path(5), left)
    assert checkpoints.steps() == [5]
    assert checkpoints.latest()[0] == 5
    checkpoints.save(15, state(15))
    assert not left.exists()


def test_a_half_removed_one_is_never_taken(tmp_path):
    checkpoints = made(tmp_path, 5, 10)
    (checkpoints.path(5) / "checkpoint.json").unlink()
    assert checkpoints.latest()[0] == 10
    with pytest.raises(CheckpointError):
        checkpoints.load(5)


@pytest.mark.parametrize("piece", [1, 2])
def test_a_full_disk_leaves_the_old_ones_intact(tmp_path, monkeypatch, piece):
    checkpoints = made(tmp_path, 5)
    whole, left = tensor_io._write_bytes, piece

    def put(file, digest, data):
        nonlocal left
        left -= 1
        if not left:
            file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(file, digest, data)

    monkeypatch.setattr(tensor_io, "_write_bytes", put)
    with pytest.raises(CheckpointError, match="No space left on device; the older checkpoints are intact"):
        checkpoints.save(10, state(10))
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-000000000005"]
    assert states_equal(checkpoints.latest()[1], state(5))


def test_a_really_full_disk(tmp_path):
    """A limit on the size of files, as the system sets it: the write itself fails."""
    resource = pytest.importorskip("resource")
    checkpoints = made(tmp_path, 5)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        with pytest.raises(CheckpointError, match="the older checkpoints are intact"):
            checkpoints.save(10, {"big": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-000000000005"]
    assert checkpoints.latest()[0] == 5


def test_what_cannot_be_saved_leaves_nothing_behind(tmp_path):
    checkpoints = made(tmp_path, 5)
    with pytest.raises(InputError, match="holds a set"):
        checkpoints.save(10, {"bad": {1}})
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-000000000005"]


def test_another_version_is_not_read(tmp_path):
    checkpoints = made(tmp_path, 5)
    path = checkpoints.path(5) / "checkpoint.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 3}))
    with pytest.raises(CheckpointError, match="not of lpfs-checkpoint 1"):
        checkpoints.load(5)


def test_everything_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(checkpoint, "fsync_path", lambda path: order.append(path.name))
    monkeypatch.setattr(tensor_io, "fsync_path", lambda path: order.append(path.name))
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, to: (order.append("rename"), rename(self, to))[1])
    made(tmp_path, 5)
    aside = ".step-000000000005.tmp"
    assert order == ["tensors.safetensors", "state.json", "checkpoint.json", aside, "rename", "checkpoints"]


def test_no_pickle_anywhere():
    """Nothing in the package loads what could bring code along, but what Spark's own workers send back."""
    wrong = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    for path in Path(lpfs.__file__).parent.rglob("*.py"):
        if path.parent.parts[-2:] == ("data", "engines"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                assert not {each.name.split(".")[0] for each in node.names} & wrong, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in wrong, path
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called = ast.unparse(node.func)
                assert called not in ("torch.load", "torch.save", "torch.serialization.load"), path
                if called in ("np.load", "numpy.load"):
                    allowed = {each.arg: ast.unparse(each.value) for each in node.keywords}
                    assert allowed.get("allow_pickle", "False") == "False", path
            elif isinstance(node, ast.Name):
                assert node.id not in ("eval", "exec"), path
