"""What every quantized format of a Hugging Face folder has: tensors that stand for a weight, groups, skipped modules.

A scheme is made from the checkpoint's quantization fields and knows no file: it says which tensors a quantized linear
has and of what shape, and turns them into an Int4Tensor. huggingface.py finds and checks them.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import numpy as np

from pallasite.convert.int4 import Int4Tensor, pack_rows, unpack_rows

SCALES = ("F16", "BF16", "F32")
"""safetensors' names of the dtypes that scales may have; they are kept as they are."""

GROUP_MULTIPLE = 32
"""Groups are read in multiples of this, the smallest that stands in memory as INT4."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor of a file: the shape and the dtypes (safetensors' names) that it must have, and, for the error, how
    the shape follows from the linear's K inputs and N outputs."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    arithmetic: str = ""
    optional: bool = False


class Scheme(Protocol):
    """How one method stores a linear [K, N]. Made from the checkpoint's quantization fields; raises ValueError naming
    a field that is missing or says what we don't read.

    method: its name. marker: the suffix of the tensor by which a quantized linear is told from others. skipped: the
    modules that the configuration says are not quantized. group_index: the suffix of the tensor that gives the group
    of each input row, None if rows are always in order.
    """

    method: ClassVar[str]
    marker: ClassVar[str]
    group_index: ClassVar[str | None]
    skipped: tuple[str, ...]

    def __init__(self, fields: Mapping[str, Any]) -> None: ...

    def group_size(self, k: int) -> int | None:
        """Rows of a group; None where `read` gives floating point."""
        ...

    def parts(self, k: int, n: int) -> dict[str, Part]:
        """The tensors by suffix ("qweight"). Raises ValueError where the method can't store K and N."""
        ...

    def read(
        self, parts: Mapping[str, np.ndarray], k: int, n: int, permutation: np.ndarray | None
    ) -> Int4Tensor | np.ndarray:
        """The linear out of its tensors; permutation: `sorted_rows` of its group index. Raises ValueError."""
        ...


def read_group_size(value: Any) -> int:
    """Rows of a group as a configuration gives them; -1 is the whole of K. Raises ValueError for other than integers
    from 1 and -1."""
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise ValueError(f"group_size is {value!r}; it must be an integer from 1, or -1 for one group over the whole K")
    return value


def check_bits(value: Any) -> None:
    """Raises ValueError unless `value` is 4."""
    if value != 4:
        raise ValueError(f"bits is {value!r}; only 4 is supported")


def rows_of_group(group_size: int, k: int) -> int:
    """Rows of a group in a linear of K inputs. Raises ValueError for sizes that we don't hold, with the arithmetic."""
    group = k if group_size == -1 else group_size
    if group % GROUP_MULTIPLE and group != k:
        raise ValueError(
            f"group_size is {group}, so that K={k} is {k / group:g} groups; only multiples of {GROUP_MULTIPLE} "
            "and the whole K (-1) are supported"
        )
    return group


def eighth(size: int, name: str) -> int:
    """Words that hold `size` nibbles. Raises ValueError if the last one would not be full."""
    if size % 8:
        raise ValueError(f"{name}={size} is {size / 8:g} words of 8 values; it must be a multiple of 8")
    return size // 8


def sorted_rows(group_index: np.ndarray, group: int) -> np.ndarray | None:
    """int32 [K]: the order that brings input rows with group numbers `group_index` [K] together, None if they are.

    Rows of a group keep their order. Raises ValueError if a group has another number of rows than `group` (the last
    one than the rest of K), for then the groups have no common size.
    """
    k = len(group_index)
    expected = np.arange(k) // group
    if np.array_equal(group_index, expected):
        return None
    counts, wanted = np.bincount(np.clip(group_index, 0, k - 1)), np.bincount(expected)
    if group_index.min() < 0 or len(counts) > len(wanted):
        raise ValueError(
            f"g_idx runs from {group_index.min()} to {group_index.max()}; K={k} in groups of {group} has groups "
            f"0 to {len(wanted) - 1}"
        )
    counts = np.pad(counts, (0, len(wanted) - len(counts)))
    if not np.array_equal(counts, wanted):
        worst = int(np.flatnonzero(counts != wanted)[0])
        raise ValueError(
            f"g_idx puts {counts[worst]} of K={k} rows into group {worst}; groups of {group} have {wanted[worst]} there"
        )
    return np.argsort(group_index, kind="stable").astype(np.int32)


def int4_tensor(
    packed: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray,
    group: int,
    shape: tuple[int, int],
    permutation: np.ndarray | None = None,
) -> Int4Tensor:
    """An Int4Tensor out of rows in their original order, packed as `pack_rows` does, which `permutation` sorts.

    Raises ValueError if a scale is not finite.
    """
    bad = scales[~np.isfinite(scales.astype(np.float32))]
    if bad.size:
        raise ValueError(f"{bad.size} of its scales are not finite, the first is {bad[0]}")
    if permutation is not None:
        packed = pack_rows(unpack_rows(packed, shape[0])[permutation])
    return Int4Tensor(packed, scales, zeros, None, group, shape, permutation)


def is_skipped(module: str, skipped: tuple[str, ...]) -> bool:
    """Whether a list of modules that are not quantized names `module`: by its whole name, by some of its dotted parts,
    or by a regular expression after "re:", as compressed-tensors has it."""
    for entry in skipped:
        if entry.startswith("re:"):
            if re.match(entry[3:], module):
                return True
        elif f".{entry}." in f".{module}.":
            return True
    return False
