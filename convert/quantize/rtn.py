"""INT4 by round-to-nearest: asymmetric, in groups along K, no calibration.

Source of the grid: AWQ (Lin et al., MLSys 2024), whose quantizer this is without the activation-aware scaling.
"""

import numpy as np

from pallasite.convert.int4 import Int4Tensor, pack_rows
from pallasite.convert.produce import Options, Plain
from pallasite.convert.source import Source, Tensor
from pallasite.models.config import TensorSpec

GROUP_SIZES = (32, 64, 128)
LEVELS = 15
CHUNK_BYTES = 32 << 20
"""Bytes of float32 weights that are worked on at once."""


class RoundToNearest(Plain):
    """Every linear layer by round-to-nearest from its float32 values; the other tensors as `Plain` has them."""

    def __init__(self, source: Source, options: Options) -> None:
        super().__init__(source, options)
        self.method = "rtn"

    def int4_group(self, name: str) -> int | None:
        """Group size of a tensor that will be INT4; None if it will be floating point."""
        return self.options.group_size if self.source.info.specs[name].kind == "linear" else None

    def store(self, name: str, spec: TensorSpec, tensor: Tensor) -> Tensor:
        """The tensor as it will be stored. Raises ValueError naming a tensor that can't be quantized or cast."""
        group = self.int4_group(name)
        if group is None:
            return super().store(name, spec, tensor)
        return quantize(name, tensor.dequantize() if isinstance(tensor, Int4Tensor) else tensor, group)


def quantize(name: str, w: np.ndarray, group_size: int) -> Int4Tensor:
    """Quantize a float matrix w [K, N] in groups of `group_size` rows; the last group may be shorter.

    Of each group and column, with the range widened to hold zero (lo <= 0 <= hi):
        scale = (hi - lo) / 15, zero = clamp(round(-lo / scale), 0, 15), q = clamp(round(w / scale) + zero, 0, 15)
    so that w is near scale * (q - zero), by half a scale. A group of zeros gets scale 1. Work is in float32; q is
    computed with the scale as it is stored.

    Raises ValueError naming the tensor if a weight is not finite, or group_size is not 32, 64 or 128.
    """
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size is {group_size}; it must be one of {', '.join(map(str, GROUP_SIZES))}")
    k, n = w.shape
    groups = -(-k // group_size)
    packed = np.empty((-(-k // 8), n), np.int32)
    ranges = [_ranges(w[:, c], group_size) for c in _chunks(k, n)]  # two float32 a group: small beside w
    lo, hi = (np.concatenate(side, axis=1) for side in zip(*ranges, strict=True))
    with np.errstate(over="ignore", invalid="ignore"):
        span = hi - lo
    if not np.isfinite(span).all():
        raise ValueError(f"{name}: has weights that are not finite, or their range isn't; they can't be quantized")
    scales = _stored(np.where(span > 0, span / np.float32(LEVELS), np.float32(1)))
    exact = scales.astype(np.float32)
    zeros = np.clip(np.rint(-lo / exact), 0, LEVELS).astype(np.uint8)
    for c in _chunks(k, n):
        steps = _by_group(w[:, c], group_size)  # [groups, group_size, columns]
        steps /= exact[:, None, c]
        np.rint(steps, out=steps)
        steps += zeros[:, None, c]
        q = np.clip(steps, 0, LEVELS, out=steps).astype(np.uint8)
        packed[:, c] = pack_rows(q.reshape(groups * group_size, -1)[:k])
    return Int4Tensor(packed, scales, zeros, None, group_size, (k, n))


def _chunks(k: int, n: int) -> list[slice]:
    """Slices of columns, each of at most CHUNK_BYTES in float32."""
    width = max(1, CHUNK_BYTES // (4 * k))
    return [slice(start, min(start + width, n)) for start in range(0, n, width)]


def _by_group(w: np.ndarray, group_size: int) -> np.ndarray:
    """float32 [groups, group_size, N] copy of w [K, N]. The last group is filled up with zeros, which change no range
    that holds zero."""
    k, n = w.shape
    out = np.zeros((-(-k // group_size), group_size, n), np.float32)
    out.reshape(-1, n)[:k] = w
    return out


def _ranges(w: np.ndarray, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """float32 [groups, N] each: smallest and largest weight of a group, widened to hold zero. NaN stays NaN."""
    grouped = _by_group(w, group_size)
    return np.minimum(grouped.min(axis=1), 0), np.maximum(grouped.max(axis=1), 0)


def _stored(scales: np.ndarray) -> np.ndarray:
    """Scales in float16, as other INT4 formats hold them, or as they are where float16 would lose more than its usual
    rounding: above its largest value, or below its smallest normal one, where it runs out of bits."""
    limits = np.finfo(np.float16)
    fits = ((scales >= limits.smallest_normal) & (scales <= limits.max)).all()
    return scales.astype(np.float16) if fits else scales
