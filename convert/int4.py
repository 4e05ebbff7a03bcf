"""INT4 group quantization as it stands in a checkpoint: exact integers, and scales in the source's precision.

A matrix w [K, N] is cut into groups of `group_size` rows along K (the last group may be shorter). In group g and
column n, w = scales[g, n] * (q - zeros[g, n]) where the source has integer zeros (AWQ, GPTQ, Q4_0, our own
quantizer), or w = scales[g, n] * q + minimums[g, n] where it has a float minimum (GGUF Q4_1).

Where a group is any g rows (GPTQ's desc_act) the rows stand sorted by group, and a permutation says which is which.
"""

import dataclasses
import hashlib

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


def permutation_id(permutation: np.ndarray) -> str:
    """A name for a permutation, int32 [K]: equal for equal ones, and in practice different for different ones."""
    return hashlib.blake2b(permutation.astype("<i4").tobytes(), digest_size=16).hexdigest()


@dataclasses.dataclass(frozen=True)
class Int4Tensor:
    """An INT4 matrix with logical shape (K, N); exactly one of `zeros` and `minimums` is given.

    packed: int32 [ceil(K/8), N], see pack_rows. scales: float [ceil(K/group_size), N]. zeros: uint8, 0 to 15, and 16
    where GPTQ's v1 has it; minimums: float; both shaped like scales. permutation: int32 [K], row r of `packed` is the
    matrix's row permutation[r]; None where rows are in order.
    """

    packed: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    minimums: np.ndarray | None
    group_size: int
    shape: tuple[int, int]
    permutation: np.ndarray | None = None

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
        if self.permutation is not None and not np.array_equal(np.sort(self.permutation), np.arange(k)):
            raise ValueError(f"INT4 permutation does not hold each of the {k} rows once")

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        parts = (self.packed, self.scales, self.zeros, self.minimums, self.permutation)
        return sum(a.nbytes for a in parts if a is not None)

    def columns(self, columns: np.ndarray) -> "Int4Tensor":
        """The tensor of these columns, in this order."""
        packed, scales, zeros, minimums = (
            None if a is None else a[:, columns] for a in (self.packed, self.scales, self.zeros, self.minimums)
        )
        assert packed is not None
        assert scales is not None
        shape = (self.shape[0], len(columns))
        return Int4Tensor(packed, scales, zeros, minimums, self.group_size, shape, self.permutation)

    def offsets(self) -> np.ndarray:
        """float32 [groups, N]: the offset of w = scale * q + offset, formed in float32 (bf16 would err by up to a
        quarter of a step)."""
        if self.minimums is not None:
            return self.minimums.astype(np.float32)
        assert self.zeros is not None
        return -self.zeros.astype(np.float32) * self.scales.astype(np.float32)

    def dequantize(self) -> np.ndarray:
        """float32 [K, N], its rows in order."""
        k, n = self.shape
        w = unpack_rows(self.packed, k).astype(np.float32)
        scales = self.scales.astype(np.float32)
        whole = k // self.group_size
        # The whole groups at once, then the shorter last one, as [groups, rows, N]; no scale is repeated in memory.
        body = w[: whole * self.group_size].reshape(whole, self.group_size, n)
        for rows, groups in ((body, slice(None, whole)), (w[None, whole * self.group_size :], slice(whole, None))):
            if not rows.size:
                continue
            if self.zeros is not None:
                rows -= self.zeros[groups, None].astype(np.float32)
            rows *= scales[groups, None]
            if self.minimums is not None:
                rows += self.minimums[groups, None].astype(np.float32)
        if self.permutation is None:
            return w
        out = np.empty_like(w)
        out[self.permutation] = w
        return out
