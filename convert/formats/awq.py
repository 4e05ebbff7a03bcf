"""AWQ's "gemm" layout, as AutoAWQ writes it.

A linear layer [K, N] in groups of g rows is three tensors: qweight int32 [K, N/8], qzeros int32 [ceil(K/g), N/8] and
scales [ceil(K/g), N], with w = scales * (q - zeros). Both integer tensors hold eight columns in a word, in an order of
their own.
"""

import numpy as np

COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of a word (bits 4i to 4i+3) holds the word's column COLUMNS[i]."""


def unpack_columns(packed: np.ndarray) -> np.ndarray:
    """int32 [R, N/8] in AWQ's order -> uint8 [R, N] of values 0..15."""
    rows, words = packed.shape
    halves = np.ascontiguousarray(packed).view(np.uint8).reshape(rows, words, 4)  # byte b: nibbles 2b and 2b+1
    values = np.empty((rows, words, 8), np.uint8)
    for i, column in enumerate(COLUMNS):
        values[..., column] = halves[..., i // 2] >> 4 if i % 2 else halves[..., i // 2] & 15
    return values.reshape(rows, words * 8)


def pack_columns(values: np.ndarray) -> np.ndarray:
    """uint8 [R, N] of values 0..15 -> int32 [R, N/8] in AWQ's order, the inverse of unpack_columns.

    Raises ValueError if N is not a multiple of 8, or a value is over 15 (GPTQ's zeros may be 16).
    """
    rows, n = values.shape
    if n % 8:
        raise ValueError(f"N is {n}; AWQ packs eight columns in a word, so it must be a multiple of 8")
    if values.size and values.max() > 15:
        raise ValueError(f"the largest value is {values.max()}; four bits end at 15")
    columns = values.reshape(rows, n // 8, 8)
    halves = np.empty((rows, n // 8, 4), np.uint8)
    for b in range(4):
        halves[..., b] = columns[..., COLUMNS[2 * b]] | columns[..., COLUMNS[2 * b + 1]] << 4
    return halves.reshape(rows, n // 2).view(np.int32)
