"""The conversion: any source that can be opened, tensor by tensor, into our checkpoint.

Memory holds a few tensors at a time, whatever the model's size: the source maps its files, each tensor is cast or
quantized as it passes, and the writer hands it on.
"""

import importlib.metadata
import math
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tqdm import tqdm

from pallasite.convert import checkpoint
from pallasite.convert.formats import open_source
from pallasite.convert.int4 import Int4Tensor
from pallasite.convert.quantize import rtn
from pallasite.convert.source import Source, SourceInfo, Tensor
from pallasite.models.config import TensorSpec

METHODS = ("int4",)
DTYPES = ("auto", *checkpoint.FLOATS)
DEFAULT_GROUP_SIZE = 128
CHUNK_BYTES = 16 << 20
"""Bytes of a tensor that are cast at once."""
SPARE_BYTES = 16 << 20
"""Disk space beyond the arrays: tokenizer, configuration, Orbax's own files."""


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    quantize: str | None = None,
    group_size: int | None = None,
    dtype: str = "auto",
    dequantize: bool = False,
    force: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Convert the checkpoint `src` (Hugging Face folder, GGUF file, or one of ours) into our checkpoint `dst`.

    quantize: "int4" quantizes every linear layer by round-to-nearest in groups of `group_size` (32, 64 or 128;
    default 128) from its float32 values; None keeps floats, and keeps INT4 tensors of the source exactly. dequantize
    expands those instead. dtype: of the floating-point tensors; "auto" keeps each as it is stored, and expands
    quantized ones to float32. force replaces a checkpoint of ours at `dst`. progress shows a bar on stderr.

    Returns the manifest. Raises ValueError naming the argument or the tensor that is wrong and OSError for the disk;
    `dst` is then as it was before.
    """
    src, dst = Path(src), Path(dst)
    _check_options(quantize, group_size, dtype, dequantize)
    _check_places(src, dst, force)
    source = open_source(src)
    try:
        plan = _Plan(source.info, quantize == "int4", group_size or DEFAULT_GROUP_SIZE, dtype, dequantize)
        _check_space(dst, plan.total_bytes)
        with checkpoint.CheckpointWriter(dst) as writer:
            # First, so that a tokenizer that can't be rebuilt is refused before the long work.
            tokenizer = source.save_tokenizer(writer.folder)
            writer.write_json("config.json", plan.config_json())
            if source.info.generation_json:
                writer.write_json("generation_config.json", without_code(source.info.generation_json))
            _stream(source, writer, plan, progress)
            return writer.finish(
                {
                    "pallasite_version": _version(),
                    "source": {"name": source.info.path.absolute().name, "format": source.info.format},
                    "architecture": source.info.config.architecture,
                    "dtype": plan.main_dtype,
                    "quantization": summarize_quantization(writer.tensors, plan.method),
                    "tie_word_embeddings": source.info.config.tie_word_embeddings,
                    "tokenizer": tokenizer,
                }
            )
    finally:
        source.close()


def _check_options(quantize: str | None, group_size: int | None, dtype: str, dequantize: bool) -> None:
    if quantize is not None and quantize not in METHODS:
        raise ValueError(f"quantize is {quantize!r}; it must be one of {', '.join(METHODS)}")
    if group_size is not None and quantize is None:
        raise ValueError(f"group_size is {group_size}, which needs quantize; without it nothing is quantized")
    if group_size is not None and group_size not in rtn.GROUP_SIZES:
        raise ValueError(f"group_size is {group_size}; it must be one of {', '.join(map(str, rtn.GROUP_SIZES))}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    if quantize and dequantize:
        raise ValueError("quantize and dequantize exclude each other; quantize already starts from the float32 values")


def _check_places(src: Path, dst: Path, force: bool) -> None:
    if not src.exists():
        raise FileNotFoundError(f"{src}: no such file or folder")
    inside = dst.resolve()
    if inside == src.resolve() or inside in src.resolve().parents:
        raise ValueError(f"{dst}: is the source or holds it; choose another destination")
    if dst.is_symlink() or (dst.exists() and not dst.is_dir()):
        raise ValueError(f"{dst}: exists and is not a folder")
    if dst.exists() and any(dst.iterdir()):
        if not force:
            raise ValueError(f"{dst}: exists and is not empty; --force (force=True) replaces a checkpoint")
        if not checkpoint.is_partial(dst):
            try:
                checkpoint.read_manifest(dst)
            except (ValueError, OSError):
                raise ValueError(f"{dst}: is no checkpoint of ours, so --force does not replace it") from None


def _check_space(dst: Path, needed: int) -> None:
    existing = next(p for p in (dst.absolute(), *dst.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < needed + SPARE_BYTES:
        raise OSError(f"{dst}: needs {(needed + SPARE_BYTES) / 1e6:.0f} MB of disk, {free / 1e6:.0f} MB are free")


class _Plan:
    """What becomes of each tensor: quantized, kept as INT4, or floating point in a dtype."""

    def __init__(self, info: SourceInfo, quantize: bool, group_size: int, dtype: str, dequantize: bool) -> None:
        self.info, self.quantize, self.group_size, self.dequantize = info, quantize, group_size, dequantize
        self.dtype = None if dtype == "auto" else dtype
        self.total_bytes = sum(self.bytes_of(name) for name in info.specs)

    @property
    def main_dtype(self) -> str:
        """The dtype of the floating-point tensors: as asked, or the source's own."""
        return self.dtype or self.info.config.dtype

    @property
    def method(self) -> str:
        """How INT4 tensors of the result came to be."""
        return "rtn" if self.quantize else f"kept from {self.info.format}"

    def int4_group(self, name: str) -> int | None:
        """Group size of a tensor that will be INT4; None if it will be floating point."""
        if self.quantize:
            return self.group_size if self.info.specs[name].kind == "linear" else None
        return None if self.dequantize else self.info.group_sizes.get(name)

    def float_dtype(self, name: str) -> str:
        """The dtype of a tensor that will be floating point."""
        stored = self.info.dtypes.get(name, self.info.config.dtype)
        return self.dtype or (stored if stored in checkpoint.FLOATS else "float32")

    def bytes_of(self, name: str) -> int:
        """Bytes of a tensor in the result, to a few percent: INT4 scales may come out as float16 or float32."""
        spec, group = self.info.specs[name], self.int4_group(name)
        if group is None:
            return math.prod(spec.shape) * _numpy_dtype(self.float_dtype(name)).itemsize
        k, n = spec.shape
        return 4 * -(-k // 8) * n + 4 * -(-k // group) * n

    def apply(self, name: str, spec: TensorSpec, tensor: Tensor) -> Tensor:
        """The tensor as it will be stored. Raises ValueError naming a tensor that the format can't hold."""
        if self.quantize and spec.kind == "linear":
            w = tensor.dequantize() if isinstance(tensor, Int4Tensor) else tensor
            return rtn.quantize(name, w, self.group_size)
        if isinstance(tensor, Int4Tensor):
            if not self.dequantize:
                return tensor
            tensor = tensor.dequantize()
        return cast(name, tensor, self.float_dtype(name))

    def config_json(self) -> dict[str, Any]:
        """The source's config.json, naming the dtype that the result has and no code."""
        fields = without_code(self.info.config_json)
        if self.dtype:
            fields.pop("torch_dtype", None)
            fields["dtype"] = self.dtype
        return fields


def _stream(source: Source, writer: checkpoint.CheckpointWriter, plan: _Plan, progress: bool) -> None:
    """Move every tensor from the source to the writer."""
    bar = tqdm(
        total=plan.total_bytes, unit="B", unit_scale=True, desc="converting", file=sys.stderr, disable=not progress
    )
    with bar:
        for name, spec in source.info.specs.items():
            planned = plan.bytes_of(name)
            writer.reserve(planned)
            writer.add(name, spec, plan.apply(name, spec, source.read(name)))
            bar.update(planned)


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


def without_code(value: Any) -> Any:
    """A JSON value without auto_map at any depth: it names Python files, which neither travel nor run."""
    if isinstance(value, Mapping):
        return {key: without_code(inner) for key, inner in value.items() if key != "auto_map"}
    return [without_code(inner) for inner in value] if isinstance(value, list) else value


def summarize_quantization(tensors: Mapping[str, Mapping[str, Any]], method: str) -> dict[str, Any] | None:
    """The manifest's summary of INT4 tensors, None if there are none: the method, the group size, whether zeros are
    all at the middle (symmetric) is left to the tensors, the matrices that stayed floating point, and ragged groups."""
    int4 = {name: entry for name, entry in tensors.items() if entry["dtype"] == "int4"}
    if not int4:
        return None
    sizes = Counter(entry["group_size"] for entry in int4.values())
    main = sizes.most_common(1)[0][0]
    ragged = Counter((e["shape"][0], e["group_size"]) for e in int4.values() if e["shape"][0] % e["group_size"])
    return {
        "method": method,
        "bits": 4,
        "group_size": main,
        "offsets": sorted({entry["offset"] for entry in int4.values()}),
        "tensors": len(int4),
        "exceptions": {
            "floating point": [n for n, e in tensors.items() if e["kind"] == "linear" and e["dtype"] != "int4"],
            "other group sizes": {n: e["group_size"] for n, e in int4.items() if e["group_size"] != main},
        },
        "notes": [
            f"K={k} is {k / size:g} groups of {size}: the last group has {k % size} rows ({count} tensors)"
            for (k, size), count in sorted(ragged.items())
        ],
    }


def _version() -> str:
    try:
        return importlib.metadata.version("pallasite")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
