import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from lpfs.data.store import columns as columns_module
from lpfs.data.store.columns import FolderWriter, WriteBuffer
from lpfs.data.store.format import id_dtype

CHUNKS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), min_size=1, max_size=6)


@pytest.mark.parametrize("packed_bytes", [0, 9, 1 << 16])
@pytest.mark.parametrize("buffer_bytes", [0, 300, 1 << 20])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(chunks=CHUNKS)
def test_columns_change_to_a_wider_type_and_read_back(
    tmp_path_factory, monkeypatch, packed_bytes, buffer_bytes, chunks
):
    monkeypatch.setattr(columns_module, "PACKED_BYTES", packed_bytes)
    monkeypatch.setattr(columns_module, "BUFFER_BYTES", buffer_bytes)
    folder, buffer = tmp_path_factory.mktemp("columns"), WriteBuffer()
    writers = [FolderWriter(folder, buffer)]
    for chunk in chunks:
        writers[0].append("ids", np.array(chunk, id_dtype(max(chunk, default=0))))
        writers[0].append("pairs", np.array([chunk, chunk], np.float32).T, 2)
        writers[0].append("left out", np.array(chunk))
        assert buffer.bytes <= max(buffer_bytes, 0)
    entries = writers[0].close({"ids": "f0001", "pairs": "f0000"})
    values = [value for chunk in chunks for value in chunk]
    assert list(entries) == ["f0000", "f0001"]
    for name, expected in (("f0001", values), ("f0000", np.repeat(np.array(values, np.float32), 2).tolist())):
        entry = entries[name]
        file = folder / ("columns.npy" if "start" in entry else f"{name}.npy")
        read = np.fromfile(file, entry["dtype"], entry["items"], offset=entry.get("start", 128))
        assert read.tolist() == expected
        if "start" in entry:
            assert len(np.load(file)) + 128 == file.stat().st_size
        else:
            assert np.load(file, mmap_mode="r").shape == ((len(values), 2) if name == "f0000" else (len(values),))
    assert entries["f0001"]["dtype"] == id_dtype(max(values, default=0)).str
    assert {path.suffix for path in folder.iterdir()} == {".npy"}
    assert buffer.bytes == 0


def test_zeros_are_appended(tmp_path):
    writer = FolderWriter(tmp_path, WriteBuffer())
    writer.append_zeros("zeros", 3_000_000)
    writer.append("zeros", np.ones(1, np.uint8))
    writer.close({"zeros": "f0000.missing"})
    read = np.load(tmp_path / "f0000.missing.npy")
    assert (len(read), read.sum()) == (3_000_001, 1)
