"""A Hugging Face folder as a source: config.json and safetensors, whole or in shards, plain or quantized.

The index, where there is one, is authoritative: files and tensors that it does not name are ignored with a note in
the log, and a tensor that stands in two shards is read from the one the index names. Which linears are quantized is
told by their tensors; the configuration's list of modules that are not is only compared. No code of the folder is run.
"""

import dataclasses
import functools
import json
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pallasite.convert.formats.awq import AWQ
from pallasite.convert.formats.compressed_tensors import CompressedTensors
from pallasite.convert.formats.files import FLOATS, Shards, read_json
from pallasite.convert.formats.fp8 import BlockFP8
from pallasite.convert.formats.gptq import GPTQ
from pallasite.convert.formats.names import is_transposed, places, refuse_problems, stored_specs
from pallasite.convert.formats.scheme import Part, Scheme, is_skipped, sorted_rows
from pallasite.convert.int4 import Int4Tensor, permutation_id
from pallasite.convert.source import SourceInfo, Tensor
from pallasite.models.config import ModelConfig, TensorSpec, read_token_ids
from pallasite.models.registry import family_of
from pallasite.models.tensors import tensor_specs

log = logging.getLogger(__name__)

SCHEMES: dict[str, type[Scheme]] = {scheme.method: scheme for scheme in (AWQ, GPTQ, CompressedTensors, BlockFP8)}
"""By quantization_config's quant_method."""

OLDER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where AutoGPTQ and AutoAWQ wrote the fields before config.json had them, and the method where the file names none."""

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


class HuggingFaceSource:
    """A Hugging Face folder, opened: names, shapes and dtypes are checked, no weights are read yet.

    Raises ValueError naming what is wrong: an unknown architecture, damaged files, a quantization that we don't read,
    all missing, extra or wrongly shaped tensors at once, weights tied in the configuration and different in the file.
    """

    def __init__(self, folder: Path) -> None:
        raw = read_json(folder / "config.json")
        family = family_of(raw)
        generation_file = folder / "generation_config.json"
        generation = read_json(generation_file) if generation_file.exists() else {}
        config = with_all_eos(family.read_config(raw), generation)
        specs = tensor_specs(config)
        self._folder, self._shards, self._scheme = folder, Shards(folder), read_scheme(folder, raw)
        self._places = places(family.HF_KEYS, specs, config)
        # A file may hold a head though the configuration ties it; it is then compared, not taken for an extra.
        head = next(their for their, our in family.HF_KEYS.items() if our == "head.weight")
        copies = {head} & self._shards.places.keys() if config.tie_word_embeddings else set()
        self._stored = stored_specs(self._places, specs)
        self._modules = self._quantized_modules()
        self._check(dict.fromkeys(copies, specs["embed.weight"]))
        self._orders = {module: order for module in self._modules if (order := self._order(module)) is not None}
        self._read_whole = functools.lru_cache(maxsize=1)(self._read_quantized)
        int4 = {name: size for name in specs if (size := self._group_size(name)) is not None}
        self.info = SourceInfo(
            format="hf",
            path=folder,
            config=config,
            config_json={k: v for k, v in raw.items() if k not in ("auto_map", "quantization_config")},
            generation_json=generation,
            specs=specs,
            group_sizes=int4,
            dtypes={name: "int4" if name in int4 else self._float_dtype(name) for name in specs},
            permutations={
                name: permutation_id(self._orders[module])
                for name in int4
                if (module := _module(self._places[name].key)) in self._orders
            },
            quantization=self._scheme.method if self._scheme else None,
        )
        embed = self._places["embed.weight"].key
        if copies and not self._equal(head, embed):
            raise ValueError(
                f"{folder}: tie_word_embeddings is true, and {head} differs from {embed}; "
                "set it to false to use both, or remove the one that is wrong"
            )

    def _quantized_modules(self) -> dict[str, TensorSpec]:
        """The linears whose tensors are quantized: module name -> spec, a fused one whole.

        Raises ValueError if tensors are quantized and nothing says how."""
        if self._scheme is None:
            for key in self._shards.places:
                if key.endswith(tuple(f".{scheme.marker}" for scheme in SCHEMES.values())):
                    files = ", ".join(OLDER_FILES)
                    raise ValueError(
                        f"{self._folder}: {key} is quantized, and neither config.json's quantization_config "
                        f"nor a file ({files}) says how"
                    )
            return {}
        linears = {_module(key): spec for key, spec in self._stored.items() if is_transposed(spec)}
        found = {m: spec for m, spec in linears.items() if f"{m}.{self._scheme.marker}" in self._shards.places}
        for what, odd in {
            "are quantized though the configuration says that they are not": [
                m for m in found if is_skipped(m, self._scheme.skipped)
            ],
            "are not quantized though the configuration does not say so": [
                m
                for m, spec in linears.items()
                if m not in found and spec.kind == "linear" and not is_skipped(m, self._scheme.skipped)
            ],
        }.items():
            if odd:
                log.warning("%s: %d linears %s, the first is %s; as stored", self._folder, len(odd), what, odd[0])
        return found

    def _parts(self, problems: list[str]) -> dict[str, Part]:
        """Every tensor that the files must hold, by key; what can't be stored in the scheme goes to `problems`."""
        parts: dict[str, Part] = {}
        for key, spec in self._stored.items():
            module = _module(key)
            if module not in self._modules or spec.kind == "bias":
                shape = spec.shape[::-1] if is_transposed(spec) else spec.shape
                parts[key] = Part(shape, tuple(FLOATS))
                continue
            assert self._scheme is not None
            k, n = spec.shape
            try:
                parts |= {f"{module}.{suffix}": part for suffix, part in self._scheme.parts(k, n).items()}
            except ValueError as error:
                problems.append(f"{module}: {error}")
        return parts

    def _check(self, copies: Mapping[str, TensorSpec]) -> None:
        """Raise one ValueError that lists all that is missing, extra, wrongly shaped or of a dtype we can't read."""
        shards = self._shards
        shapes: list[str] = []
        dtypes: list[str] = []
        parts = self._parts(shapes) | {key: Part(spec.shape, tuple(FLOATS)) for key, spec in copies.items()}
        lost = shards.missing_files()
        held = {key for key, file in shards.places.items() if file not in lost and key in shards.contents(file)}
        missing = set()
        for key in {key for key, part in parts.items() if not part.optional} - held:
            file = shards.places.get(key)
            missing.add(f"{key} (the index places it in {file})" if file and file not in lost else key)
        broken = {line.split(":")[0] for line in shapes}
        extra = {
            key
            for key in shards.places.keys() - parts.keys()
            if not any(h.search(key) for h in HARMLESS) and _module(key) not in broken and not self._is_zero_bias(key)
        }
        for key in sorted(held & parts.keys()):
            (shape, dtype), part = shards.facts(key), parts[key]
            if shape != part.shape:
                why = f" ({part.arithmetic})" if part.arithmetic else ""
                shapes.append(f"{key}: {list(shape)}, expected {list(part.shape)}{why}")
            if dtype not in part.dtypes:
                dtypes.append(f"{key}: {dtype}, supported are {', '.join(part.dtypes)}")
        problems = {
            "missing files": lost,
            "missing tensors": missing,
            "extra tensors": extra,
            "wrong shapes": shapes,
            "unsupported dtypes": dtypes,
        }
        refuse_problems(str(self._folder), problems)
        unlisted = set().union(*(shards.contents(f) for f in set(shards.places.values()))) - shards.places.keys()
        if unlisted:
            log.warning(
                "%s: ignoring tensors that the index does not name: %s", self._folder, ", ".join(sorted(unlisted))
            )

    def _is_zero_bias(self, key: str) -> bool:
        """Whether a tensor is a bias of zeros, which GPTQ's writers give to linears that have none."""
        module = _module(key)
        return key == f"{module}.bias" and module in self._modules and not self._shards.read(key).any()

    def _order(self, module: str) -> np.ndarray | None:
        """The permutation that sorts a quantized linear's rows by group; None if they are in order."""
        assert self._scheme is not None
        key, group = f"{module}.{self._scheme.group_index}", self._scheme.group_size(self._modules[module].shape[0])
        if group is None or key not in self._shards.places:
            return None
        try:
            return sorted_rows(self._shards.read(key), group)
        except ValueError as error:
            raise ValueError(f"{self._folder}: {key}: {error}") from None

    def _group_size(self, name: str) -> int | None:
        """INT4 group size of one of our tensors; None if `read` gives floating point."""
        module = _module(self._places[name].key)
        spec = self._modules.get(module)
        if self._scheme is None or spec is None or not name.endswith(".weight") or spec.kind != "linear":
            return None
        return self._scheme.group_size(spec.shape[0])

    def _float_dtype(self, name: str) -> str:
        key = self._places[name].key
        if _module(key) in self._modules and name.endswith(".weight"):
            return "float8_e4m3fn" if isinstance(self._scheme, BlockFP8) else "float32"
        return FLOATS[self._shards.facts(key)[1]]

    def _equal(self, first: str, second: str) -> bool:
        """Whether two tensors of the files are equal, bit for bit where their dtypes are the same."""
        rows = self._shards.facts(first)[0][0]
        for a, b in zip(self._shards.rows(first, 0, rows), self._shards.rows(second, 0, rows), strict=True):
            if not np.array_equal(a.astype(np.float32), b.astype(np.float32), equal_nan=True):
                return False
        return True

    def read(self, name: str) -> Tensor:
        """One tensor under our name, linears and the head as [K, N]: floats as stored, INT4 linears as Int4Tensor,
        FP8 ones and an INT4 head as float32. Raises ValueError naming a quantized tensor that is damaged."""
        place, spec = self._places[name], self.info.specs[name]
        if _module(place.key) in self._modules and name.endswith(".weight"):
            tensor = self._read_quantized(place.key) if place.columns is None else self._part(place.key, place.columns)
            return tensor.dequantize() if isinstance(tensor, Int4Tensor) and spec.kind != "linear" else tensor
        out = np.empty(spec.shape, self.info.dtypes[name])
        # Copied as plain integers: numpy moves bfloat16 one element at a time.
        bits = np.dtype(f"u{out.dtype.itemsize}")
        target = out.view(bits).T if is_transposed(spec) else out.view(bits)
        at = 0
        for first, end in place.runs(len(target)):
            for rows in self._shards.rows(place.key, first, end):
                target[at : at + len(rows)] = rows.view(bits)
                at += len(rows)
        return out

    def _part(self, key: str, columns: np.ndarray) -> Tensor:
        """These columns of a fused quantized linear."""
        whole = self._read_whole(key)
        return whole.columns(columns) if isinstance(whole, Int4Tensor) else whole[:, columns]

    def _read_quantized(self, key: str) -> Tensor:
        """A quantized linear of the files, whole."""
        assert self._scheme is not None
        module = _module(key)
        k, n = self._modules[module].shape
        stored = {suffix: f"{module}.{suffix}" for suffix in self._scheme.parts(k, n)}
        arrays = {suffix: self._shards.read(key) for suffix, key in stored.items() if key in self._shards.places}
        try:
            return self._scheme.read(arrays, k, n, self._orders.get(module))
        except ValueError as error:
            raise ValueError(f"{self._folder}: {module}: {error}") from None

    def save_tokenizer(self, folder: Path) -> bool:
        """Copy the tokenizer's files into `folder`; False if there is no tokenizer."""
        return copy_tokenizer(self.info.path, folder)

    def close(self) -> None:
        """Unmap the files."""
        self._shards.close()


def read_scheme(folder: Path, raw: Mapping[str, Any]) -> Scheme | None:
    """How the folder's linears are quantized, by its config.json or an older file beside it; None if they are not.

    Raises ValueError naming a method, or a field of it, that we don't read.
    """
    fields, where, method = raw.get("quantization_config"), "config.json", None
    for file, usual in OLDER_FILES.items():
        if not fields and (folder / file).exists():
            fields, where, method = read_json(folder / file), file, usual
    if not fields:
        return None
    method = fields.get("quant_method", method)
    if method not in SCHEMES:
        known = ", ".join(SCHEMES)
        raise ValueError(f"{folder / where}: quantization {method!r} is not supported; supported are {known}")
    try:
        return SCHEMES[method](fields)
    except ValueError as error:
        raise ValueError(f"{folder / where}: {error}") from None


def _module(key: str) -> str:
    """The module of a tensor's key, which is all but its last part."""
    return key.rpartition(".")[0]
