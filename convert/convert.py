"""The conversion: any source that can be opened, tensor by tensor, into our checkpoint.

Memory holds a few tensors at a time, whatever the model's size: the source maps its files, a producer casts or
quantizes each tensor as it passes, and the writer hands it on.
"""

import importlib.metadata
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pallasite.convert import checkpoint
from pallasite.convert.formats import open_source
from pallasite.convert.produce import Options, Plain, Producer
from pallasite.convert.quantize import METHODS, rtn
from pallasite.convert.source import Source, SourceInfo

DTYPES = ("auto", *checkpoint.FLOATS)
DEFAULT_GROUP_SIZE, DEFAULT_SAMPLES, DEFAULT_LENGTH = 128, 128, 512
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
    calibration: str | Path | None = None,
    samples: int | None = None,
    length: int | None = None,
    force: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Convert the checkpoint `src` (Hugging Face folder, GGUF file, or one of ours) into our checkpoint `dst`.

    quantize: "int4" quantizes every linear layer by round-to-nearest in groups of `group_size` (32, 64 or 128;
    default 128) from its float32 values; None keeps floats, and keeps INT4 tensors of the source exactly. dequantize
    expands those instead. dtype: of the floating-point tensors; "auto" keeps each as it is stored, and expands
    quantized ones to float32. calibration, samples and length are for the methods that look at text: a file or folder
    of it, or "builtin"; how many samples (default 128) of how many tokens (default 512). force replaces a checkpoint
    of ours at `dst`. progress shows a bar on stderr.

    Returns the manifest. Raises ValueError naming the argument or the tensor that is wrong and OSError for the disk;
    `dst` is then as it was before.
    """
    src, dst = Path(src), Path(dst)
    options = _check_options(
        quantize=quantize,
        group_size=group_size,
        dtype=dtype,
        dequantize=dequantize,
        calibration=calibration,
        samples=samples,
        length=length,
    )
    _check_places(src, dst, force)
    source = open_source(src)
    try:
        producer = METHODS[quantize](source, options) if quantize else Plain(source, options)
        _check_space(dst, sum(producer.sizes.values()))
        with checkpoint.CheckpointWriter(dst) as writer:
            # First, so that a tokenizer that can't be rebuilt is refused before the long work.
            tokenizer = source.save_tokenizer(writer.folder)
            writer.write_json("config.json", _config_json(source.info, options))
            if source.info.generation_json:
                writer.write_json("generation_config.json", without_code(source.info.generation_json))
            _stream(source, writer, producer, progress)
            return writer.finish(
                {
                    "pallasite_version": _version(),
                    "source": {"name": source.info.path.absolute().name, "format": source.info.format},
                    "architecture": source.info.config.architecture,
                    "dtype": source.info.config.dtype if dtype == "auto" else dtype,
                    "quantization": summarize_quantization(writer.tensors, producer.method),
                    "tie_word_embeddings": source.info.config.tie_word_embeddings,
                    "tokenizer": tokenizer,
                }
            )
    finally:
        source.close()


def _check_options(
    *,
    quantize: str | None,
    group_size: int | None,
    dtype: str,
    dequantize: bool,
    calibration: str | Path | None,
    samples: int | None,
    length: int | None,
) -> Options:
    """The options with their defaults. Raises ValueError naming one that is wrong or without effect."""
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
    calibrated = quantize is not None and METHODS[quantize].calibrated
    if calibrated and calibration is None:
        raise ValueError(f"quantize={quantize!r} needs calibration: a file or folder of text, or 'builtin'")
    for name, value in {"calibration": calibration, "samples": samples, "length": length}.items():
        if value is not None and not calibrated:
            raise ValueError(f"{name} is {str(value)!r}, and quantize={quantize!r} uses no calibration")
    for name, value in {"samples": samples, "length": length}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    return Options(
        quantize=quantize,
        group_size=group_size or DEFAULT_GROUP_SIZE if quantize else None,
        dtype=dtype,
        dequantize=dequantize,
        calibration=None if calibration is None else str(calibration),
        samples=samples or DEFAULT_SAMPLES if calibrated else None,
        length=length or DEFAULT_LENGTH if calibrated else None,
    )


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


def _config_json(info: SourceInfo, options: Options) -> dict[str, Any]:
    """The source's config.json, naming the dtype that the result has and no code."""
    fields: dict[str, Any] = without_code(info.config_json)
    if options.dtype != "auto":
        fields.pop("torch_dtype", None)
        fields["dtype"] = options.dtype
    return fields


def _stream(source: Source, writer: checkpoint.CheckpointWriter, producer: Producer, progress: bool) -> None:
    """Move every tensor from the producer to the writer."""
    total = sum(producer.sizes.values())
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="converting", file=sys.stderr, disable=not progress)
    with bar:
        for tensors in producer.tensors(writer.tensors.keys(), writer.scratch):
            for name, tensor in tensors.items():
                writer.add(name, source.info.specs[name], tensor)
            writer.commit()
            bar.update(sum(producer.sizes[name] for name in tensors))


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
