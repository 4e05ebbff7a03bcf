"""A GGUF file as a source, memory-mapped by the `gguf` library.

GGUF stores linears as [N, K] like Hugging Face, but for some architectures the rows of q and k permuted: inside each
head, rows i and i + head_dim / 2, which rotary embedding pairs, stand side by side. They are put back on reading, in
INT4 too.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from pallasite.convert.formats.gguf_metadata import Metadata, read_config_json
from pallasite.convert.formats.gguf_tokenizer import build_tokenizer
from pallasite.convert.formats.names import is_transposed, places, refuse_problems, shape_problem, stored_specs
from pallasite.convert.int4 import Int4Tensor, pack_rows
from pallasite.convert.source import SourceInfo, Tensor
from pallasite.models.config import ModelConfig, TensorSpec
from pallasite.models.registry import family_of
from pallasite.models.tensors import tensor_specs

log = logging.getLogger(__name__)

KEYS = {
    "token_embd.weight": "embed.weight",
    "blk.{i}.attn_norm.weight": "layers.{i}.attn_norm.weight",
    "blk.{i}.attn_q.{leaf}": "layers.{i}.attn.q.{leaf}",
    "blk.{i}.attn_k.{leaf}": "layers.{i}.attn.k.{leaf}",
    "blk.{i}.attn_v.{leaf}": "layers.{i}.attn.v.{leaf}",
    "blk.{i}.attn_q_norm.weight": "layers.{i}.attn.q_norm.weight",
    "blk.{i}.attn_k_norm.weight": "layers.{i}.attn.k_norm.weight",
    "blk.{i}.attn_output.{leaf}": "layers.{i}.attn.o.{leaf}",
    "blk.{i}.ffn_norm.weight": "layers.{i}.mlp_norm.weight",
    "blk.{i}.ffn_gate.{leaf}": "layers.{i}.mlp.gate.{leaf}",
    "blk.{i}.ffn_up.{leaf}": "layers.{i}.mlp.up.{leaf}",
    "blk.{i}.ffn_down.{leaf}": "layers.{i}.mlp.down.{leaf}",
    "output_norm.weight": "norm.weight",
    "output.weight": "head.weight",
}
"""GGUF tensor name -> ours, for all architectures."""

PERMUTED = ("llama", "internlm2")
"""Architectures whose rotary pairs stand side by side (llama.cpp's LLAMA_ROPE_TYPE_NORM)."""

ROPE_FACTORS = "rope_freqs.weight"
"""Llama 3's frequency factors, which gguf_metadata reads into the configuration."""

BLOCK = 32
"""Values in a block of Q8_0, Q4_0 and Q4_1, along K."""

BLOCK_TYPES = {
    "Q8_0": np.dtype([("d", "<f2"), ("q", "i1", BLOCK)]),
    "Q4_0": np.dtype([("d", "<f2"), ("q", "u1", BLOCK // 2)]),
    "Q4_1": np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", BLOCK // 2)]),
}
"""A block as it lies in the file: w = d * q (Q8_0), d * (q - 8) (Q4_0), d * q + m (Q4_1). In a 4-bit block byte j
holds value j in its low half and value j + 16 in its high half."""

FLOAT_TYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}

CHUNK_VALUES = 4 << 20
"""Values that are expanded at once, so that temporaries stay small beside the tensor."""


class _Reader(gguf.GGUFReader):
    """The library's reader over a plain array of the mapped file.

    It makes some views for each string of the vocabulary, and views of a numpy.memmap cost far more than those of an
    array: measured 4.3 s against 1.6 s for 100,000 strings.
    """

    @property
    def data(self) -> np.ndarray:
        return self._mapped

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._mapped = np.asarray(mapped)


def read_file(path: Path) -> tuple[Metadata, dict[str, Any]]:
    """The metadata and the tensors (gguf's ReaderTensor, by name) of a file; the tensors' data stay mapped.

    Raises ValueError naming the file if it is truncated or no GGUF file.
    """
    try:
        reader = _Reader(path)
        metadata = Metadata({key: field.contents() for key, field in reader.fields.items()})
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{path}: truncated, damaged or not a GGUF file ({error})") from None
    if reader.byte_order != "I":
        raise ValueError(f"{path}: is a big-endian GGUF file; only little-endian ones are supported")
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def unpermute(heads: int, head_dim: int) -> np.ndarray:
    """int [heads * head_dim]: entry r is the GGUF row that holds row r in the rotate-half order."""
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8 [..., 16] of a 4-bit block -> uint8 [..., 32], values 0..15 in their order."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def expand(blocks: np.ndarray, type_name: str) -> np.ndarray:
    """Blocks [N, K / 32] -> float32 [N, K]."""
    d = blocks["d"].astype(np.float32)[..., None]
    q = blocks["q"] if type_name == "Q8_0" else nibbles(blocks["q"])  # [N, K / 32, 32]
    w = q.astype(np.float32)
    if type_name == "Q4_0":
        w -= 8
    w *= d
    if type_name == "Q4_1":
        w += blocks["m"].astype(np.float32)[..., None]
    return w.reshape(len(blocks), -1)


class GGUFSource:
    """A GGUF file, opened: metadata, names, shapes and types are checked, no weights are read yet.

    Q4_0 and Q4_1 linears are read as Int4Tensor, exactly; other quantized tensors are expanded to float32.
    Raises ValueError naming what is wrong, all missing, extra or wrongly shaped tensors at once.
    """

    def __init__(self, path: Path) -> None:
        self._metadata, self._tensors = read_file(path)
        try:
            config_json = read_config_json(self._metadata, self._tensors)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        family = family_of(config_json)
        config: ModelConfig = family.read_config(config_json)
        specs: dict[str, TensorSpec] = tensor_specs(config)
        placed = places(KEYS, specs, config)
        self._check(path, stored_specs(placed, specs))
        self._keys = {name: place.key for name, place in placed.items()}
        types = {name: self._tensors[key].tensor_type.name for name, key in self._keys.items()}
        self.info = SourceInfo(
            format="gguf",
            path=path,
            config=config,
            config_json=config_json,
            generation_json={},
            specs=specs,
            group_sizes={
                name: BLOCK for name, t in types.items() if t in ("Q4_0", "Q4_1") and specs[name].kind == "linear"
            },
            dtypes={name: FLOAT_TYPES[t].name if t in FLOAT_TYPES else t for name, t in types.items()},
        )
        heads = {"q": config.num_heads, "k": config.num_kv_heads} if config_json["model_type"] in PERMUTED else {}
        self._orders = {part: unpermute(count, config.head_dim) for part, count in heads.items()}

    def _check(self, path: Path, expected: Mapping[str, TensorSpec]) -> None:
        """Raise one ValueError that lists all that is missing, extra, wrongly shaped or of an unsupported type."""
        supported = FLOAT_TYPES.keys() | BLOCK_TYPES.keys()
        shapes, types = [], []
        for key in sorted(expected.keys() & self._tensors.keys()):
            tensor = self._tensors[key]
            # The library's shape is GGUF's, fastest dimension first.
            found = tuple(int(size) for size in tensor.shape[::-1])
            problem = shape_problem(key, found, expected[key])
            if problem:
                shapes.append(problem)
            if tensor.tensor_type.name not in supported:
                types.append(f"{key}: {tensor.tensor_type.name}, supported are {', '.join(sorted(supported))}")
        problems = {
            "missing tensors": expected.keys() - self._tensors.keys(),
            "extra tensors": self._tensors.keys() - expected.keys() - {ROPE_FACTORS},
            "wrong shapes": shapes,
            "unsupported types": types,
        }
        refuse_problems(str(path), problems)

    def _stored(self, name: str) -> tuple[np.ndarray, str, np.ndarray | None]:
        """Blocks [N, K / 32] or floats [N, K] or [N] as mapped, the type's name, and the order of rows if permuted."""
        tensor = self._tensors[self._keys[name]]
        kind = tensor.tensor_type.name
        data = tensor.data.view(BLOCK_TYPES.get(kind) or FLOAT_TYPES[kind])
        parts = name.split(".")
        return data, kind, self._orders.get(parts[3]) if parts[2:3] == ["attn"] else None

    def _rows(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first row, consecutive rows as stored) of a tensor, in the rotate-half order."""
        data, _, order = self._stored(name)
        spec = self.info.specs[name]
        step = max(1, CHUNK_VALUES // max(1, int(np.prod(spec.shape)) // len(data)))
        for start in range(0, len(data), step):
            end = min(start + step, len(data))
            yield start, data[start:end] if order is None else data[order[start:end]]

    def read(self, name: str) -> Tensor:
        """One tensor under our name: Int4Tensor for Q4_0 and Q4_1 linears, floats as stored, the rest as float32."""
        _, kind, _ = self._stored(name)
        spec = self.info.specs[name]
        if name in self.info.group_sizes:
            return self._read_int4(name, kind, spec.shape)
        convert: Callable[[np.ndarray], np.ndarray] = lambda rows: rows  # noqa: E731
        if kind in BLOCK_TYPES:
            convert = lambda rows: expand(rows, kind)  # noqa: E731
        out = np.empty(spec.shape, FLOAT_TYPES.get(kind, np.dtype(np.float32)))
        bits = np.dtype(f"u{out.dtype.itemsize}")  # numpy copies bfloat16 one element at a time
        target = out.view(bits).T if is_transposed(spec) else out.view(bits)
        for start, rows in self._rows(name):
            target[start : start + len(rows)] = convert(rows).view(bits)
        return out

    def _read_int4(self, name: str, kind: str, shape: tuple[int, ...]) -> Int4Tensor:
        """The blocks of a linear as INT4 [K, N]: a block is a group of 32 rows of a column, its scale stays float16."""
        k, n = shape
        packed = np.empty((-(-k // 8), n), np.int32)
        scales = np.empty((k // BLOCK, n), np.float16)
        minimums = np.empty_like(scales) if kind == "Q4_1" else None
        for start, blocks in self._rows(name):
            columns = slice(start, start + len(blocks))
            packed[:, columns] = pack_rows(nibbles(blocks["q"]).reshape(len(blocks), k).T)
            scales[:, columns] = blocks["d"].T
            if minimums is not None:
                minimums[:, columns] = blocks["m"].T
        zeros = np.full(scales.shape, 8, np.uint8) if minimums is None else None
        return Int4Tensor(packed, scales, zeros, minimums, group_size=BLOCK, shape=(k, n))

    def save_tokenizer(self, folder: Path) -> bool:
        """Write the tokenizer that the metadata describes into `folder`; False if there is none.

        Raises ValueError naming a kind of tokenizer that we can't rebuild exactly.
        """
        try:
            tokenizer = build_tokenizer(self._metadata)
        except ValueError as error:
            raise ValueError(f"{self.info.path}: {error}") from None
        if tokenizer is None:
            return False
        tokenizer.save_pretrained(folder)
        return True

    def close(self) -> None:
        """Unmap the file."""
        self._tensors = {}
