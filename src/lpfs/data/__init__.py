"""From a raw log to batches.

::

    prepare.py    raw/ -> plan/ -> encode/ -> store/   a raw log becomes a Dataset, whoever reads it (engines/)
    simulate.py             simulation/ -> store/      a log with a known truth becomes one
    dataset.py                             store/      a Dataset on disk, or some of its days
    stream.py                    store/ -> batches/    its rows as batches, in time order or shuffled
    like.py       raw/ -> encode/ -> store/            other rows, encoded as those of a Dataset were
    row_encoder.py          encode/ -> batches/        the same, for a table in memory

"""

from lpfs.data.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.data.reencode import RowEncoder, encode_rows
from lpfs.data.store.writer import DatasetWriter
from lpfs.data.stream import Stream

__all__ = ["Batch", "Dataset", "DatasetWriter", "RowEncoder", "Stream", "encode_rows"]
