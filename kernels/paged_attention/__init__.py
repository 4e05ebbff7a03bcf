"""Attention over a paged KV cache. `paged_attention` and `write_pages` are the operation; reference.py defines it."""

from pallasite.kernels.paged_attention.reference import paged_attention, write_pages

__all__ = ["paged_attention", "write_pages"]
