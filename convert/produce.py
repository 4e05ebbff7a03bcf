"""What a conversion stores of each tensor: producers, which yield a source's tensors as they will be stored.

A conversion is a stream: a producer yields tensors in an order that follows from the source and the options alone, and
the writer takes them. A producer that is told which tensors are written already goes on with the others, and makes
them as it would have made them then: so an interrupted conversion is resumed. `Plain` only casts; the quantizers
(quantize/) are producers too.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import ClassVar, Protocol

import ml_dtypes
import numpy as np

from pallasite.convert.checkpoint import FLOATS
from pallasite.convert.int4 import Int4Tensor
from pallasite.convert.source import Source, Tensor
from pallasite.models.config import TensorSpec

CHUNK_BYTES = 16 << 20
"""Bytes of a tensor that are cast at once."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How a source becomes a checkpoint, checked and with its defaults filled in: the same source and options give the
    same checkpoint. `convert` explains each; None where a method does not use it."""

    quantize: str | None = None
    group_size: int | None = None
    dtype: str = "auto"
    dequantize: bool = False
    calibration: str | None = None
    samples: int | None = None
    length: int | None = None


class Producer(Protocol):
    """One way to make what is stored out of a source. Made with (source, options), before any work.

    calibrated: whether it wants text (Options.calibration, .samples and .length). method: how the manifest names what
    made the INT4 tensors. sizes: each tensor's bytes in the result, to a few percent.
    """

    calibrated: ClassVar[bool]
    method: str
    sizes: Mapping[str, int]

    def __init__(self, source: Source, options: Options) -> None: ...

    def tensors(self, done: Set[str], scratch: Path) -> Iterator[dict[str, Tensor]]:
        """Yield every tensor of the source that is not in `done`, as it will be stored: float arrays or Int4Tensor.

        Those that depend on each other (a block that is quantized as a whole) come in one dictionary: it is written
        whole or not at all, so that `done` holds all of it or nothing. scratch: an existing folder for what is needed
        to go on after an interruption; it lasts until the checkpoint is whole and is then removed. What lies there
        when tensors are yielded lies there again when `done` holds them.
        Raises ValueError naming a tensor that can't be made.
        """
        ...


class Plain:
    """Floating-point tensors in a dtype; INT4 tensors of the source exactly as they are, or expanded."""

    calibrated: ClassVar[bool] = False

    def __init__(self, source: Source, options: Options) -> None:
        self.source, self.options = source, options
        self.method = f"kept from {source.info.quantization or source.info.format}"
        self.sizes: Mapping[str, int] = {name: self._bytes_of(name) for name in source.info.specs}

    def int4_group(self, name: str) -> int | None:
        """Group size of a tensor that will be INT4; None if it will be floating point."""
        return None if self.options.dequantize else self.source.info.group_sizes.get(name)

    def float_dtype(self, name: str) -> str:
        """The dtype of a tensor that will be floating point."""
        if self.options.dtype != "auto":
            return self.options.dtype
        stored = self.source.info.dtypes.get(name, self.source.info.config.dtype)
        return stored if stored in FLOATS else "float32"

    def _bytes_of(self, name: str) -> int:
        """Bytes of a tensor in the result; of INT4 to a few percent, as its scales may be float16 or float32."""
        spec, group = self.source.info.specs[name], self.int4_group(name)
        if group is None:
            return math.prod(spec.shape) * _numpy_dtype(self.float_dtype(name)).itemsize
        k, n = spec.shape
        return 4 * -(-k // 8) * n + 4 * -(-k // group) * n

    def tensors(self, done: Set[str], scratch: Path) -> Iterator[dict[str, Tensor]]:
        """One tensor at a time, in the order of the source's specs."""
        for name, spec in self.source.info.specs.items():
            if name not in done:
                yield {name: self.store(name, spec, self.source.read(name))}

    def store(self, name: str, spec: TensorSpec, tensor: Tensor) -> Tensor:
        """The tensor as it will be stored. Raises ValueError naming a tensor that the dtype can't hold."""
        if isinstance(tensor, Int4Tensor):
            if not self.options.dequantize:
                return tensor
            tensor = tensor.dequantize()
        return cast(name, tensor, self.float_dtype(name))


def cast(name: str, tensor: np.ndarray, dtype: str) -> np.ndarray:
    """`tensor` in `dtype`. Raises ValueError naming the tensor and the value if a finite value becomes infinite."""
    target = _numpy_dtype(dtype)
    if tensor.dtype == target:
        return tensor
    out = np.empty(tensor.shape, target)
    flat_in, flat_out = tensor.reshape(-1), out.reshape(-1)
    step = CHUNK_BYTES // tensor.itemsize
    for start in range(0, flat_in.size, step):
        piece = flat_in[start : start + step]
        with np.errstate(over="ignore"):
            flat_out[start : start + step] = piece.astype(target)
        lost = np.isinf(flat_out[start : start + step]) & np.isfinite(piece)
        if lost.any():
            worst = float(np.abs(piece[lost].astype(np.float32)).max())
            limit = float(ml_dtypes.finfo(target).max)
            raise ValueError(f"{name}: has the value {worst:g}, and {dtype} ends at {limit:g}; choose another dtype")
    return out


def _numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
