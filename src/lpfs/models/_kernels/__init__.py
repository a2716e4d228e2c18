"""Kernels of the crosses: the same products in torch operations, and compiled for a CPU."""
