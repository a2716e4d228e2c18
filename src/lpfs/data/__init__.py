"""Raw logs to Datasets to batches.

::

    prepare.py    sources/ -> planning -> days -> passes, encoders/ -> store/   raw log to Dataset, by engines/
    simulate.py   simulate_spec -> simulate_world -> store/                     simulated log, truth known
    dataset.py    store/                                                        a Dataset, or some of its days
    stream.py     store/ -> reader -> batch                                     batches, in order or shuffled
    reencode.py   sources/ -> encoders/ -> store/ or batch                      other rows, encoded alike
    raw_rows.py   reencode                                                      raw rows, some of them invalid
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lpfs._imports import lazy_exports

if TYPE_CHECKING:
    from lpfs.data.batch import Batch
    from lpfs.data.dataset import Dataset
    from lpfs.data.reencode import RowEncoder, encode_rows
    from lpfs.data.store.writer import DatasetWriter
    from lpfs.data.stream import Stream

__all__ = ["Batch", "Dataset", "DatasetWriter", "RowEncoder", "Stream", "encode_rows"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Batch": "batch",
        "Dataset": "dataset",
        "DatasetWriter": "store.writer",
        "RowEncoder": "reencode",
        "Stream": "stream",
        "encode_rows": "reencode",
    },
)
