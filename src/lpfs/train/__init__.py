"""The one training loop: fit, evaluate, checkpoints that survive a kill."""
