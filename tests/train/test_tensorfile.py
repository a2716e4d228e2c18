from __future__ import annotations

import hashlib

import pytest
import safetensors.torch
import torch

from lpfs.errors import InputError
from lpfs.train.tensor_io import NAMES, read_tensors, states_equal, write_tensors


def every_kind():
    made = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in NAMES}
    made |= {"scalar": torch.tensor(3.5), "none": torch.empty(0, 4), "ünïcode.ключ": torch.ones(1)}
    made["turned"] = torch.arange(12.0).reshape(3, 4).T
    made["tied"] = made["scalar"]
    return made


def test_what_is_written_is_read(tmp_path):
    path, tensors = tmp_path / "a", every_kind()
    about = write_tensors(path, tensors)
    assert about == {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    back = read_tensors(path, about["sha256"])
    assert list(back) == list(tensors)
    assert states_equal(back, tensors)


def test_the_safetensors_package_reads_ours_and_we_read_its(tmp_path):
    tensors = {name: each.contiguous().clone() for name, each in every_kind().items()}
    write_tensors(tmp_path / "ours", tensors)
    assert states_equal(
        dict(sorted(safetensors.torch.load_file(tmp_path / "ours").items())), dict(sorted(tensors.items()))
    )
    safetensors.torch.save_file(tensors, tmp_path / "its", metadata={"by": "the package"})
    assert states_equal(dict(sorted(read_tensors(tmp_path / "its").items())), dict(sorted(tensors.items())))


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path):
    path = tmp_path / "a"
    sha = write_tensors(path, {"x": torch.arange(3.0), "y": torch.tensor([True])})["sha256"]
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises((ValueError, LookupError, TypeError, AttributeError, RuntimeError)):
            read_tensors(path, sha)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError):  # noqa: PT011  whatever it says, it is not taken
            read_tensors(path, sha)
    path.write_bytes(whole + b"x")
    with pytest.raises(ValueError, match="longer than its header says"):
        read_tensors(path, sha)


def test_a_tensor_that_has_no_place_in_the_format_is_named(tmp_path):
    with pytest.raises(InputError, match=r"wave: a checkpoint cannot keep a tensor of torch\.complex64"):
        write_tensors(tmp_path / "a", {"wave": torch.zeros(1, dtype=torch.complex64)})
    with pytest.raises(InputError, match="sparse"):
        write_tensors(tmp_path / "a", {"holes": torch.eye(2).to_sparse()})
