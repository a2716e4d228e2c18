"""From a raw log to batches: prepare, simulate, Dataset, Stream."""

from lpfs.data.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.data.stream import Stream
from lpfs.data.writer import DatasetWriter

__all__ = ["Batch", "Dataset", "DatasetWriter", "Stream"]
