"""Training in several processes: the process group, its heartbeat and its reductions."""
