"""AWQ's "gemm" layout, as AutoAWQ writes it.

A linear layer [K, N] in groups of g rows is three tensors: qweight int32 [K, N/8], qzeros int32 [ceil(K/g), N/8] and
scales [ceil(K/g), N], with w = scales * (q - zeros). Both integer tensors hold eight columns in a word, in an order of
their own.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from pallasite.convert.formats.scheme import (
    SCALES,
    Part,
    check_bits,
    eighth,
    int4_tensor,
    read_group_size,
    rows_of_group,
)
from pallasite.convert.int4 import Int4Tensor, pack_rows

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


class AWQ:
    """AWQ's scheme, from its fields in config.json or in AutoAWQ's older quant_config.json."""

    method: ClassVar = "awq"
    marker: ClassVar = "qweight"
    group_index: ClassVar[str | None] = None

    def __init__(self, fields: Mapping[str, Any]) -> None:
        check_bits(fields.get("bits", fields.get("w_bit")))
        self._group = read_group_size(fields.get("group_size", fields.get("q_group_size")))
        version = str(fields.get("version", "gemm")).lower()
        if version != "gemm":
            raise ValueError(f"AWQ version is {version!r}; only 'gemm' is supported")
        self.skipped = tuple(fields.get("modules_to_not_convert") or ())

    def group_size(self, k: int) -> int:
        """Rows of a group."""
        return rows_of_group(self._group, k)

    def parts(self, k: int, n: int) -> dict[str, Part]:
        """The three tensors."""
        g = self.group_size(k)
        groups, words = -(-k // g), eighth(n, "N")
        return {
            "qweight": Part((k, words), ("I32",), f"K={k}, N/8={n}/8"),
            "qzeros": Part((groups, words), ("I32",), f"K/g={k}/{g}, N/8={n}/8"),
            "scales": Part((groups, n), SCALES, f"K/g={k}/{g}, N={n}"),
        }

    def read(self, parts: Mapping[str, np.ndarray], k: int, n: int, permutation: np.ndarray | None) -> Int4Tensor:
        """The linear [K, N]; AWQ has no permutation."""
        packed = pack_rows(unpack_columns(parts["qweight"]))
        zeros = unpack_columns(parts["qzeros"])
        return int4_tensor(packed, parts["scales"], zeros, self.group_size(k), (k, n), permutation)
