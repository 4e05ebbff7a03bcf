"""Quantizers: from float matrices to INT4 tensors."""
