"""From a raw log to batches: prepare, simulate, Dataset, Stream."""
