"""A Hugging Face folder as a source: config.json and safetensors, whole or in shards under an index.

The index, where there is one, is authoritative: files and tensors that it does not name are ignored with a note in
the log, and a tensor that stands in two shards is read from the one the index names. No code of the folder is run.
"""

import dataclasses
import json
import logging
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  safetensors finds numpy's bfloat16 only once this has registered it
import numpy as np
from safetensors import SafetensorError, safe_open

from pallasite.convert.formats.names import is_transposed, places, refuse_problems, shape_problem, stored_specs
from pallasite.convert.source import SourceInfo, Tensor
from pallasite.models.config import ModelConfig, TensorSpec, read_token_ids
from pallasite.models.registry import family_of
from pallasite.models.tensors import tensor_specs

log = logging.getLogger(__name__)

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""safetensors' dtype names that can be read, and numpy's names for them."""

HARMLESS = (re.compile(r"(^|\.)rotary_emb\.inv_freq$"),)
"""Buffers that older transformers saved among the weights; they follow from the configuration."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "*.tiktoken",
)
"""What is copied with the tokenizer. A list of what may travel, so that no Python file of a checkpoint ever does."""

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "*.tiktoken")
"""Any one of these makes a tokenizer; the others only describe it."""

CHUNK_BYTES = 16 << 20
"""Bytes of a tensor that are read at once, so that a transposed read holds one tensor and one chunk."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError naming the file if it is no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def with_all_eos(config: ModelConfig, generation: Mapping[str, Any]) -> ModelConfig:
    """`config` with the end-of-sequence ids of generation_config.json joined to its own, each once, in order."""
    ids = dict.fromkeys((*config.eos_token_ids, *read_token_ids(generation.get("eos_token_id"))))
    return dataclasses.replace(config, eos_token_ids=tuple(ids))


def copy_tokenizer(source: Path, folder: Path) -> bool:
    """Copy the tokenizer's files from `source` into `folder`; False, and nothing copied, if it has no tokenizer."""
    if not any(path for pattern in TOKENIZERS for path in source.glob(pattern)):
        return False
    for path in sorted({path for pattern in TOKENIZER_FILES for path in source.glob(pattern)}):
        if path.name == "tokenizer_config.json":  # auto_map names Python files, which stay behind
            fields = {key: value for key, value in read_json(path).items() if key != "auto_map"}
            (folder / path.name).write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        else:
            shutil.copyfile(path, folder / path.name)
    return True


class _Shards:
    """The safetensors files of a folder, opened when first read: where each tensor is, its shape, dtype and rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self._contents: dict[str, frozenset[str]] = {}
        index = folder / "model.safetensors.index.json"
        self.indexed = index.exists()
        if self.indexed:
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ValueError(f"{index}: has no 'weight_map'")
            strange = [name for name in weight_map.values() if not isinstance(name, str) or Path(name).name != name]
            if strange:
                raise ValueError(f"{index}: names a shard outside of its folder, {strange[0]!r}")
            self.places: dict[str, str] = dict(weight_map)
        else:
            if not (folder / "model.safetensors").exists():
                raise ValueError(f"{folder}: {_no_weights(folder)}")
            self.places = dict.fromkeys(self.contents("model.safetensors"), "model.safetensors")
        self._note_strays()

    def _note_strays(self) -> None:
        strays = sorted({p.name for p in self.folder.glob("*.safetensors")} - set(self.places.values()))
        if strays:
            by = "the index does not name them" if self.indexed else "the weights are in model.safetensors"
            log.warning("%s: ignoring %s: %s", self.folder, ", ".join(strays), by)

    def missing_files(self) -> set[str]:
        """Shards that the index names and the folder lacks."""
        return {name for name in set(self.places.values()) if not (self.folder / name).is_file()}

    def handle(self, file: str) -> Any:
        """The opened file. Raises ValueError naming it if it is truncated or damaged."""
        if file not in self._open:
            try:
                self._open[file] = safe_open(str(self.folder / file), framework="numpy")
            except SafetensorError as error:
                raise ValueError(f"{self.folder / file}: truncated or damaged safetensors file ({error})") from None
        return self._open[file]

    def contents(self, file: str) -> frozenset[str]:
        """Names of the tensors that a file holds, whatever the index says."""
        if file not in self._contents:
            self._contents[file] = frozenset(self.handle(file).keys())
        return self._contents[file]

    def slice(self, key: str) -> Any:
        """The tensor as safetensors' lazy slice: get_shape(), get_dtype(), and [rows] reads."""
        return self.handle(self.places[key]).get_slice(key)

    def close(self) -> None:
        self._open.clear()


def _no_weights(folder: Path) -> str:
    """Why a folder with a config.json has no weights that can be read."""
    if next(folder.glob("*.bin"), None) or next(folder.glob("*.pt*"), None):
        return "only pickled PyTorch weights, which are never loaded; convert them to safetensors first"
    return "has neither model.safetensors nor model.safetensors.index.json"


class HuggingFaceSource:
    """A Hugging Face folder, opened: names, shapes and dtypes are checked, no weights are read yet.

    Raises ValueError naming what is wrong: an unknown architecture, damaged files, all missing, extra or wrongly
    shaped tensors at once, weights tied in the configuration and different in the file.
    """

    def __init__(self, folder: Path) -> None:
        raw = read_json(folder / "config.json")
        if raw.get("quantization_config"):
            method = raw["quantization_config"].get("quant_method", "unnamed")
            raise ValueError(f"{folder}: quantization_config {method!r} is not supported; only unquantized weights are")
        family = family_of(raw)
        generation_file = folder / "generation_config.json"
        generation = read_json(generation_file) if generation_file.exists() else {}
        config = with_all_eos(family.read_config(raw), generation)
        specs = tensor_specs(config)
        self._shards = _Shards(folder)
        self._places = places(family.HF_KEYS, specs, config)
        # A file may hold a head though the configuration ties it; it is then compared, not taken for an extra.
        head = next(their for their, our in family.HF_KEYS.items() if our == "head.weight")
        copies = {head} & self._shards.places.keys() if config.tie_word_embeddings else set()
        expected = stored_specs(self._places, specs)
        self._check(folder, expected | dict.fromkeys(copies, specs["embed.weight"]))
        self.info = SourceInfo(
            format="hf",
            path=folder,
            config=config,
            config_json={key: value for key, value in raw.items() if key != "auto_map"},
            generation_json=generation,
            specs=specs,
            group_sizes={},
            dtypes={name: DTYPES[self._shards.slice(place.key).get_dtype()] for name, place in self._places.items()},
        )
        embed = self._places["embed.weight"].key
        if copies and not self._equal(head, embed):
            raise ValueError(
                f"{folder}: tie_word_embeddings is true, and {head} differs from {embed}; "
                "set it to false to use both, or remove the one that is wrong"
            )

    def _check(self, folder: Path, expected: Mapping[str, TensorSpec]) -> None:
        """Raise one ValueError that lists all that is missing, extra, wrongly shaped or of a dtype we can't read."""
        shards = self._shards
        lost = shards.missing_files()
        held = {key for key, file in shards.places.items() if file not in lost and key in shards.contents(file)}
        missing = set()
        for key in expected.keys() - held:
            file = shards.places.get(key)
            missing.add(f"{key} (the index places it in {file})" if file and file not in lost else key)
        extra = {k for k in shards.places.keys() - expected.keys() if not any(h.search(k) for h in HARMLESS)}
        shapes, dtypes = [], []
        for key in sorted(held & expected.keys()):
            view = shards.slice(key)
            problem = shape_problem(key, tuple(view.get_shape()), expected[key])
            if problem:
                shapes.append(problem)
            if view.get_dtype() not in DTYPES:
                dtypes.append(f"{key}: {view.get_dtype()}, supported are {', '.join(DTYPES)}")
        problems = {
            "missing files": lost,
            "missing tensors": missing,
            "extra tensors": extra,
            "wrong shapes": shapes,
            "unsupported dtypes": dtypes,
        }
        refuse_problems(str(folder), problems)
        unlisted = set().union(*(shards.contents(f) for f in set(shards.places.values()))) - shards.places.keys()
        if unlisted:
            log.warning("%s: ignoring tensors that the index does not name: %s", folder, ", ".join(sorted(unlisted)))

    def _rows(self, key: str, first: int, end: int) -> Iterator[np.ndarray]:
        """Yield consecutive rows of a tensor of the files, from `first` up to `end`, some at a time."""
        view = self._shards.slice(key)
        row_bytes = math.prod(view.get_shape()[1:]) * np.dtype(DTYPES[view.get_dtype()]).itemsize
        step = max(1, CHUNK_BYTES // max(1, row_bytes))
        for start in range(first, end, step):
            yield view[start : min(start + step, end)]

    def _equal(self, first: str, second: str) -> bool:
        """Whether two tensors of the files are equal, bit for bit where their dtypes are the same."""
        rows = self._shards.slice(first).get_shape()[0]
        for a, b in zip(self._rows(first, 0, rows), self._rows(second, 0, rows), strict=True):
            if not np.array_equal(a.astype(np.float32), b.astype(np.float32), equal_nan=True):
                return False
        return True

    def read(self, name: str) -> Tensor:
        """One tensor under our name, as stored (float32, float16 or bfloat16); linears and the head as [K, N]."""
        place, spec = self._places[name], self.info.specs[name]
        out = np.empty(spec.shape, self.info.dtypes[name])
        # Copied as plain integers: numpy moves bfloat16 one element at a time.
        bits = np.dtype(f"u{out.dtype.itemsize}")
        target = out.view(bits).T if is_transposed(spec) else out.view(bits)
        at = 0
        for first, end in place.runs(len(target)):
            for rows in self._rows(place.key, first, end):
                target[at : at + len(rows)] = rows.view(bits)
                at += len(rows)
        return out

    def save_tokenizer(self, folder: Path) -> bool:
        """Copy the tokenizer's files into `folder`; False if there is no tokenizer."""
        return copy_tokenizer(self.info.path, folder)

    def close(self) -> None:
        """Unmap the files."""
        self._shards.close()
