"""Attention and cache operations: one contract per op, the XLA reference that defines truth, TPU kernels beside it."""
