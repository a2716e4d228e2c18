"""Tables in memory."""

import pandas as pd
import pytest

from lpfs.data.prepare import prepare
from lpfs.errors import DataError


def test_invalid_tables_are_errors(tmp_path):
    class DuplicateNames:
        columns = ("a", "a")

        def to_numpy(self):
            raise NotImplementedError

    with pytest.raises(DataError, match="two columns of the table are named 'a'"):
        prepare(DuplicateNames(), tmp_path / "out", label="a", quiet=True)
    with pytest.raises(DataError, match="the table cannot be read"):
        prepare({"a": [1], "b": [1, 2]}, tmp_path / "out", label="a", quiet=True)
    with pytest.raises(DataError, match="has no name"):
        prepare({"": [1]}, tmp_path / "out", label="a", quiet=True)


def test_pandas_without_arrow(tmp_path, monkeypatch):
    frame = pd.DataFrame({"click": [0, 1], "n": [1.5, 2.5], 3: [1, 2]})

    def fail(self, requested_schema=None):
        raise ImportError("pyarrow")

    monkeypatch.setattr(pd.DataFrame, "__arrow_c_stream__", fail)
    dataset = prepare(frame, tmp_path / "out", label="click", parts=1, quiet=True)
    assert dataset.schema.names == ("n", "3")
