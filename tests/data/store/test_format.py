import zlib

import numpy as np
import pytest
from hypothesis import given, strategies as st

from lpfs._fileio import NPY_HEADER_BYTES, file_checksum
from lpfs.data.store.format import ColumnWriter, id_dtype, load_vocabulary, save_vocabulary
from lpfs.errors import DataError


@given(chunks=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), min_size=1, max_size=6))
def test_a_column_changes_to_a_wider_type_and_reads_back(tmp_path_factory, chunks):
    path = tmp_path_factory.mktemp("column") / "c.npy"
    column = ColumnWriter(path, np.dtype(np.uint8))
    for chunk in chunks:
        column.append(np.array(chunk, id_dtype(max(chunk, default=0))))
    entry = column.close()
    everything = [value for chunk in chunks for value in chunk]
    read = np.load(path)
    assert read.tolist() == everything
    assert read.dtype == id_dtype(max(everything, default=0))
    assert entry == {"bytes": path.stat().st_size, "checksum": file_checksum(path), "dtype": read.dtype.str}
    assert len(np.load(path, mmap_mode="r")) == len(everything)


def test_the_checksum_covers_header_and_data(tmp_path):
    column = ColumnWriter(tmp_path / "c.npy", np.dtype(np.float32), width=2)
    column.append(np.ones((3, 2), np.float32))
    entry = column.close()
    data = (tmp_path / "c.npy").read_bytes()
    assert entry["checksum"] == f"{zlib.crc32(data[:NPY_HEADER_BYTES], zlib.crc32(data[NPY_HEADER_BYTES:])):08x}"
    assert np.load(tmp_path / "c.npy").shape == (3, 2)


def test_zeros_are_appended(tmp_path):
    column = ColumnWriter(tmp_path / "c.npy", np.dtype(np.uint8))
    column.append_zeros(3_000_000)
    column.append(np.ones(1, np.uint8))
    column.close()
    read = np.load(tmp_path / "c.npy")
    assert (len(read), read.sum()) == (3_000_001, 1)


def test_ids_beyond_31_bits_raise():
    assert id_dtype(2**31 - 1) == np.uint32
    with pytest.raises(DataError, match="below 2\\*\\*31"):
        id_dtype(2**31)


@given(values=st.lists(st.text(alphabet=st.characters(codec=None), max_size=4), max_size=6))
def test_text_vocabularies_read_back(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("vocabulary") / "v.npz"
    with path.open("wb") as file:
        save_vocabulary(file, values)
    assert load_vocabulary(path) == values


def test_numeric_vocabularies_read_back(tmp_path):
    with (tmp_path / "v.npz").open("wb") as file:
        save_vocabulary(file, np.array([3, 1, 2**32 - 1], np.uint32))
    read = load_vocabulary(tmp_path / "v.npz")
    assert read.tolist() == [3, 1, 2**32 - 1]
