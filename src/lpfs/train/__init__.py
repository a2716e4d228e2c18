"""Training: the training loop, evaluation, checkpoints, loggers and distributed training."""
