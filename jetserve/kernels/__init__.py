"""Attention and cache operations: one contract per op, the XLA reference that defines truth, TPU kernels beside it."""

TRASH_PAGE = 0  # inactive rows and padding write here; never allocated
