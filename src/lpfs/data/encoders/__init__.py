"""From columns to ids, numbers and bags: learned from the training days, applied to all."""
