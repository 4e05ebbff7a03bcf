"""INT4 group quantization as it stands in a checkpoint: exact integers, and scales in the source's precision.

A matrix w [K, N] is cut into groups of `group_size` rows along K (the last group may be shorter). In group g and
column n, w = scales[g, n] * (q - zeros[g, n]) where the source has integer zeros (AWQ, GPTQ, Q4_0, our own
quantizer), or w = scales[g, n] * q + minimums[g, n] where it has a float minimum (GGUF Q4_1).
"""

import dataclasses

import numpy as np


def pack_rows(q: np.ndarray) -> np.ndarray:
    """Pack uint8 [K, N] of values 0..15 into int32 [ceil(K/8), N]: nibble j of word r holds row 8*r + j."""
    k, n = q.shape
    if k % 8:
        q = np.pad(q, ((0, -k % 8), (0, 0)))
    pairs = q.reshape(-1, 4, 2, n)
    halves = pairs[:, :, 0] | pairs[:, :, 1] << 4  # [ceil(K/8), 4, N]: byte b holds rows 8*r + 2*b and the next
    words = halves[:, 3].astype(np.uint32)
    for b in (2, 1, 0):
        words <<= 8
        words |= halves[:, b]
    return words.view(np.int32)


def unpack_rows(packed: np.ndarray, k: int) -> np.ndarray:
    """The inverse of pack_rows: int32 [ceil(K/8), N] -> uint8 [K, N]."""
    rows, n = packed.shape
    halves = np.ascontiguousarray(packed).view(np.uint8).reshape(rows, n, 4).transpose(0, 2, 1)  # low byte first
    q = np.empty((rows, 4, 2, n), np.uint8)
    np.bitwise_and(halves, 15, out=q[:, :, 0])
    np.right_shift(halves, 4, out=q[:, :, 1])
    return q.reshape(rows * 8, n)[:k]


@dataclasses.dataclass(frozen=True)
class Int4Tensor:
    """An INT4 matrix with logical shape (K, N); exactly one of `zeros` and `minimums` is given.

    packed: int32 [ceil(K/8), N], see pack_rows. scales: float [ceil(K/group_size), N]. zeros: uint8, minimums: float,
    both shaped like scales.
    """

    packed: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    minimums: np.ndarray | None
    group_size: int
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        k, n = self.shape
        if (self.zeros is None) == (self.minimums is None):
            raise ValueError("an INT4 tensor has integer zeros or float minimums, exactly one of them")
        expected = {"packed": (-(-k // 8), n), "scales": (-(-k // self.group_size), n)}
        expected["zeros" if self.minimums is None else "minimums"] = expected["scales"]
        for name, shape in expected.items():
            if getattr(self, name).shape != shape:
                raise ValueError(
                    f"INT4 {name} has shape {getattr(self, name).shape}; "
                    f"K={k}, N={n}, group_size={self.group_size} need {shape}"
                )

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return sum(a.nbytes for a in (self.packed, self.scales, self.zeros, self.minimums) if a is not None)

    def offsets(self) -> np.ndarray:
        """float32 [groups, N]: the offset of w = scale * q + offset, formed in float32 (bf16 would err by up to a
        quarter of a step)."""
        if self.minimums is not None:
            return self.minimums.astype(np.float32)
        assert self.zeros is not None
        return -self.zeros.astype(np.float32) * self.scales.astype(np.float32)

    def dequantize(self) -> np.ndarray:
        """float32 [K, N]."""
        k, _ = self.shape
        q = unpack_rows(self.packed, k).astype(np.float32)
        scales = self.scales.astype(np.float32)
        if self.zeros is not None:
            q -= np.repeat(self.zeros.astype(np.float32), self.group_size, axis=0)[:k]
        q *= np.repeat(scales, self.group_size, axis=0)[:k]
        if self.minimums is not None:
            q += np.repeat(self.minimums.astype(np.float32), self.group_size, axis=0)[:k]
        return q
