"""What is in a checkpoint, for people: the text of `pallasite inspect`."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from pallasite.convert import checkpoint
from pallasite.convert.formats import open_source
from pallasite.convert.source import SourceInfo

LARGEST = 5


def describe(path: str | Path) -> str:
    """Several lines about the checkpoint at `path`: one of ours, a Hugging Face folder or a GGUF file.

    Raises what open_source raises.
    """
    source = open_source(path)
    try:
        info = source.info
        sizes = {name: stored_bytes(info, name) for name in info.specs}
        manifest = source.manifest if isinstance(source, checkpoint.Checkpoint) else None
        rows = _model_rows(info) + _storage_rows(info, sizes, manifest)
        width = max(len(label) for label, _ in rows)
        lines = [f"{label:<{width}}  {value}".rstrip() for label, value in rows]
        lines.append("largest tensors:")
        for name in sorted(sizes, key=lambda n: (-sizes[n], n))[:LARGEST]:
            spec = info.specs[name]
            lines.append(f"  {name}  {list(spec.shape)}  {info.dtypes[name]}  {human(sizes[name])}")
        return "\n".join(lines)
    finally:
        source.close()


def _model_rows(info: SourceInfo) -> list[tuple[str, str]]:
    c = info.config
    rope = f"rope theta {c.rope.theta:g}"
    if c.rope.kind == "qwen1":
        rope += f", NTK past {c.rope.original_max_position}"
    elif c.rope.kind != "default":
        rope += f", {c.rope.kind} x{c.rope.factor:g}"
    attention = f"{c.num_heads} heads, {c.num_kv_heads} kv heads of {c.head_dim}"
    if c.qk_norm:
        attention += ", q and k normed"
    if c.logn_length is not None:
        attention += f", logn past {c.logn_length}"
    for window, layers in Counter(w for w in c.windows if w is not None).items():
        attention += f", a window of {window} in {layers} layers"
    parameters = sum(math.prod(spec.shape) for spec in info.specs.values())
    return [
        ("checkpoint", f"{info.path} ({info.format})"),
        ("architecture", f"{c.architecture}, {parameters / 1e6:,.1f} M parameters"),
        ("layers", f"{c.num_layers} of hidden size {c.hidden_size}, MLP {c.intermediate_size}"),
        ("attention", attention),
        ("positions", f"{c.max_position_embeddings}, {rope}"),
        ("vocabulary", f"{c.vocab_size}, {'tied' if c.tie_word_embeddings else 'untied'} embeddings"),
    ]


def _storage_rows(info: SourceInfo, sizes: dict[str, int], manifest: dict[str, Any] | None) -> list[tuple[str, str]]:
    stored = Counter(info.dtypes[name] for name in info.specs)
    counts = ", ".join(f"{count} {dtype}" for dtype, count in stored.most_common())
    rows = [("tensors", f"{len(info.specs)} ({counts}), {human(sum(sizes.values()))}")]
    if manifest is None:
        return rows
    quantization = manifest.get("quantization")
    if quantization:
        rows.append(("quantization", f"INT4, {quantization['method']}, groups of {quantization['group_size']}"))
        rows += [("", note) for note in quantization["notes"]]
    else:
        rows.append(("quantization", "none"))
    origin = manifest.get("source") or {}
    return [
        *rows,
        ("tokenizer", "yes" if manifest.get("tokenizer") else "no"),
        (
            "converted from",
            f"{origin.get('name')} ({origin.get('format')}), by pallasite {manifest.get('pallasite_version')}",
        ),
        ("format version", str(manifest["format_version"])),
    ]


def stored_bytes(info: SourceInfo, name: str) -> int:
    """Bytes of a tensor as it is stored."""
    shape, dtype = info.specs[name].shape, info.dtypes[name]
    if dtype in checkpoint.FLOATS:
        return math.prod(shape) * (4 if dtype == "float32" else 2)
    if dtype == "int4":
        k, n = shape
        # To a few percent: scales of two bytes, zeros of one.
        return 4 * -(-k // 8) * n + 3 * -(-k // info.group_sizes[name]) * n
    if dtype == "float8_e4m3fn":
        return math.prod(shape)
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]
    return math.prod(shape) // block * block_bytes


def human(nbytes: int) -> str:
    """Bytes for people: 98.4 MB."""
    power = min(4, int(np.log10(max(nbytes, 1)) // 3))
    return f"{nbytes / 1000**power:.1f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}" if power else f"{nbytes} B"
