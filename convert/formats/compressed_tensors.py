"""compressed-tensors' "pack-quantized" INT4, as llm-compressor writes it.

A linear layer with K inputs and N outputs is weight_packed int32 [N, ceil(K/8)], nibbles in sequence along K, each the
signed value + 8; weight_scale [N, ceil(K/g)]; weight_shape int64 [2], N and K; and where it is asymmetric
weight_zero_point, int32 [ceil(N/8), ceil(K/g)] packed along N in the same way: w = weight_scale * (value - zero).
weight_g_idx int32 [K] gives each row's group if groups follow the activations' order.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from pallasite.convert.formats.scheme import SCALES, Part, check_bits, int4_tensor, read_group_size, rows_of_group
from pallasite.convert.int4 import Int4Tensor, pack_rows, unpack_rows

MIDDLE = 8
"""What is added to a signed value or zero to make its nibble."""


class CompressedTensors:
    """The scheme, from quantization_config."""

    method: ClassVar = "compressed-tensors"
    marker: ClassVar = "weight_packed"
    group_index: ClassVar[str | None] = "weight_g_idx"

    def __init__(self, fields: Mapping[str, Any]) -> None:
        groups = list((fields.get("config_groups") or {}).values())
        if not groups:
            raise ValueError("compressed-tensors: config_groups is empty")
        weights = groups[0].get("weights") or {}
        if any(group.get("weights") != groups[0].get("weights") for group in groups[1:]):
            raise ValueError(f"compressed-tensors: {len(groups)} config_groups quantize weights differently; one may")
        kind = fields.get("format")
        if kind != "pack-quantized":
            raise ValueError(f"compressed-tensors: format is {kind!r}; only 'pack-quantized' is supported")
        if any(group.get("input_activations") for group in groups):
            raise ValueError("compressed-tensors: input_activations are quantized; only weights may be")
        check_bits(weights.get("num_bits"))
        if weights.get("type", "int") != "int":
            raise ValueError(f"compressed-tensors: type of the weights is {weights['type']!r}; only 'int' is supported")
        strategy = weights.get("strategy")
        if strategy not in ("group", "channel"):
            raise ValueError(f"compressed-tensors: strategy is {strategy!r}; supported are 'group' and 'channel'")
        self._group = -1 if strategy == "channel" else read_group_size(weights.get("group_size"))
        self._symmetric = bool(weights.get("symmetric", True))
        self.skipped = tuple(fields.get("ignore") or ())

    def group_size(self, k: int) -> int:
        """Rows of a group."""
        return rows_of_group(self._group, k)

    def parts(self, k: int, n: int) -> dict[str, Part]:
        """The tensors; a zero point where weights are not symmetric."""
        g = self.group_size(k)
        groups = -(-k // g)
        parts = {
            "weight_packed": Part((n, -(-k // 8)), ("I32",), f"N={n}, K/8={k}/8"),
            "weight_scale": Part((n, groups), SCALES, f"N={n}, K/g={k}/{g}"),
            "weight_shape": Part((2,), ("I64", "I32"), "N and K"),
            "weight_g_idx": Part((k,), ("I32",), f"K={k}", optional=True),
        }
        if not self._symmetric:
            parts["weight_zero_point"] = Part((-(-n // 8), groups), ("I32",), f"N/8={n}/8, K/g={k}/{g}")
        return parts

    def read(self, parts: Mapping[str, np.ndarray], k: int, n: int, permutation: np.ndarray | None) -> Int4Tensor:
        """The linear [K, N]. Raises ValueError if weight_shape says something else."""
        if parts["weight_shape"].tolist() != [n, k]:
            raise ValueError(f"weight_shape is {parts['weight_shape'].tolist()}, expected [{n}, {k}]")
        packed = np.ascontiguousarray(parts["weight_packed"].T)  # [ceil(K/8), N]
        if k % 8:  # nothing is said of the last nibbles; ours are 0
            packed = pack_rows(unpack_rows(packed, k))
        scales = np.ascontiguousarray(parts["weight_scale"].T)  # [groups, N]
        if self._symmetric:
            zeros = np.full(scales.shape, MIDDLE, np.uint8)
        else:
            zeros = np.ascontiguousarray(unpack_rows(parts["weight_zero_point"], n).T)
        return int4_tensor(packed, scales, zeros, self.group_size(k), (k, n), permutation)
