"""Matrix product with INT4 weights. `int4_matmul` is the operation; reference.py defines it."""

from pallasite.kernels.int4_matmul.reference import dequantize, int4_matmul

__all__ = ["dequantize", "int4_matmul"]
