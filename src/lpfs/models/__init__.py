"""Fields to logits, a file a model: schema in, logits out, every field under a gate."""
