"""Continual training on a stream, with gates that close and reopen, and bundles of the selected model."""
