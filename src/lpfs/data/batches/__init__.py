"""From a Dataset on disk to batches: which rows come when, and how they are read."""
