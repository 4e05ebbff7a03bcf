"""FP8 with a scale for each block, as DeepSeek-V3 introduced it and Qwen3's FP8 checkpoints have it.

A linear layer with K inputs and N outputs is weight float8_e4m3fn [N, K] and weight_scale_inv [ceil(N/b), ceil(K/c)]
for blocks of b x c; w = weight * scale of its block (the name says inverse, and it is multiplied). It is expanded to
float32, which holds the product of a float32 scale and four bits of mantissa to its usual rounding.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from pallasite.convert.formats.scheme import SCALES, Part


class BlockFP8:
    """The scheme, from quantization_config."""

    method: ClassVar = "fp8"
    marker: ClassVar = "weight_scale_inv"
    group_index: ClassVar[str | None] = None

    def __init__(self, fields: Mapping[str, Any]) -> None:
        kind = fields.get("fmt", "e4m3")
        if kind != "e4m3":
            raise ValueError(f"fp8: fmt is {kind!r}; only 'e4m3' is supported")
        block = fields.get("weight_block_size")
        if (
            not isinstance(block, list | tuple)
            or len(block) != 2
            or not all(isinstance(b, int) and b > 0 for b in block)
        ):
            raise ValueError(f"fp8: weight_block_size is {block!r}; it must be two integers, for [N, K]")
        self._rows, self._columns = block
        self.skipped = tuple(fields.get("modules_to_not_convert") or fields.get("ignored_layers") or ())

    def group_size(self, k: int) -> None:
        """None: FP8 is read as floating point."""

    def parts(self, k: int, n: int) -> dict[str, Part]:
        """The two tensors."""
        blocks = (-(-n // self._rows), -(-k // self._columns))
        return {
            "weight": Part((n, k), ("F8_E4M3",), f"N={n}, K={k}"),
            "weight_scale_inv": Part(blocks, SCALES, f"N/b={n}/{self._rows}, K/c={k}/{self._columns}"),
        }

    def read(self, parts: Mapping[str, np.ndarray], k: int, n: int, permutation: np.ndarray | None) -> np.ndarray:
        """float32 [K, N]. Raises ValueError if a weight or a scale is not finite."""
        out = np.empty((k, n), np.float32)
        scales = np.repeat(parts["weight_scale_inv"].astype(np.float32), self._columns, axis=1)[:, :k]  # [N/b, K]
        for block, scale in enumerate(scales):
            columns = slice(block * self._rows, min((block + 1) * self._rows, n))
            out[:, columns] = (parts["weight"][columns].astype(np.float32) * scale).T
        if not np.isfinite(out).all():
            raise ValueError("has weights or scales that are not finite")
        return out
