"""The conversion: any source that can be opened, tensor by tensor, into our checkpoint.

Memory holds a few tensors at a time, whatever the model's size: the source maps its files, a producer casts or
quantizes each tensor as it passes, and the writer hands it on.
"""

import dataclasses
import importlib.metadata
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pallasite.convert import checkpoint
from pallasite.convert.formats import open_source
from pallasite.convert.inspect import stored_bytes
from pallasite.convert.produce import Options, Plain, Producer
from pallasite.convert.quantize import METHODS, rtn
from pallasite.convert.source import Source, SourceInfo
from pallasite.convert.writer import CheckpointWriter, is_placed

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
    resume: bool = False,
    progress: bool = True,
    speed: "Speed | None" = None,
) -> dict[str, Any]:
    """Convert the checkpoint `src` (Hugging Face folder, GGUF file, or one of ours) into our checkpoint `dst`.

    quantize: "int4" quantizes every linear layer by round-to-nearest in groups of `group_size` (32, 64 or 128;
    default 128) from its float32 values; None keeps floats, and keeps INT4 tensors of the source exactly. dequantize
    expands those instead. dtype: of the floating-point tensors; "auto" keeps each as it is stored, and expands
    quantized ones to float32. calibration, samples and length are for the methods that look at text: a file or folder
    of it, or "builtin"; how many samples (default 128) of how many tokens (default 512). force replaces a checkpoint
    of ours at `dst`. resume goes on with what an interrupted conversion with the same source and options has left in
    DST.partial, if there is anything; the result is the same as without the interruption. Without it that is removed.
    progress shows a bar on stderr. speed is filled in.

    Returns the manifest. Raises ValueError naming the argument or the tensor that is wrong and OSError for the disk;
    `dst` is then as it was before.
    """
    started = time.monotonic()
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
    _check_places(src, dst, force or (resume and is_placed(dst)))
    source = open_source(src)
    try:
        producer = METHODS[quantize](source, options) if quantize else Plain(source, options)
        with CheckpointWriter(dst, _job(src, options), resume=resume) as writer:
            done = frozenset(writer.tensors)
            if writer.manifest is None:
                _fill(writer, source, producer, options, progress)
            manifest = writer.place()
    finally:
        source.close()
    if speed is not None:
        speed.nbytes = sum(stored_bytes(source.info, name) for name in manifest["tensors"] if name not in done)
        speed.seconds = time.monotonic() - started
    return manifest


@dataclasses.dataclass
class Speed:
    """How fast a conversion was: bytes of the source's tensors that it read, and seconds that it took in all."""

    nbytes: int = 0
    seconds: float = 0.0


def _fill(writer: CheckpointWriter, source: Source, producer: Producer, options: Options, progress: bool) -> None:
    """Make the whole checkpoint, or what is missing of it."""
    info, done = source.info, frozenset(writer.tensors)
    _check_space(writer.dst, sum(size for name, size in producer.sizes.items() if name not in done))
    # First, so that a tokenizer that can't be rebuilt is refused before the long work.
    tokenizer = source.save_tokenizer(writer.folder)
    writer.write_json("config.json", _config_json(info, options))
    if info.generation_json:
        writer.write_json("generation_config.json", without_code(info.generation_json))
    _stream(source, writer, producer, done, progress)
    writer.finish(
        {
            "pallasite_version": _version(),
            "source": {"name": info.path.absolute().name, "format": info.format},
            "architecture": info.config.architecture,
            "dtype": info.config.dtype if options.dtype == "auto" else options.dtype,
            "quantization": summarize_quantization(writer.tensors, producer.method),
            "tie_word_embeddings": info.config.tie_word_embeddings,
            "tokenizer": tokenizer,
        }
    )


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
        try:
            checkpoint.read_manifest(dst)
        except (ValueError, OSError):
            raise ValueError(f"{dst}: is no checkpoint of ours, so --force does not replace it") from None


def _job(src: Path, options: Options) -> dict[str, str]:
    """What a resumed conversion must have in common with the one that was interrupted, by the names of the options."""
    job = {"pallasite": _version(), "source": src.absolute().name}
    job |= {name: str(value) for name, value in dataclasses.asdict(options).items()}
    files = [src] if src.is_file() else [*src.iterdir()]
    if options.calibration is not None:
        text = Path(options.calibration)
        files += [text, *text.rglob("*")]
    for file in sorted(path.absolute() for path in files if path.is_file()):
        facts = file.stat()
        changed = datetime.fromtimestamp(facts.st_mtime, UTC)
        job[f"{file.parent.name}/{file.name}"] = f"{facts.st_size} bytes of {changed}"
    return job


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


def _stream(source: Source, writer: CheckpointWriter, producer: Producer, done: frozenset[str], progress: bool) -> None:
    """Move every tensor that is not done from the producer to the writer."""
    bar = tqdm(
        total=sum(producer.sizes.values()),
        initial=sum(producer.sizes[name] for name in done),
        unit="B",
        unit_scale=True,
        desc="converting",
        file=sys.stderr,
        disable=not progress,
    )
    with bar:
        for tensors in producer.tensors(done, writer.scratch):
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
