"""Our checkpoint on disk: a folder with a manifest, the model's config.json, its tokenizer, and an Orbax checkpoint.

docs/checkpoint-format.md describes it. The arrays are logical: no shard of any mesh, no padding, so a checkpoint
says nothing of the devices that wrote it and opens on any number of them. They are written through Orbax's partial
saves, some hundred megabytes at a time, and read with TensorStore, which Orbax itself stands on: a tensor through
Orbax's loader costs 40 to 80 ms, through TensorStore 1 ms, and a quantized model has some hundred arrays.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from pallasite.convert.formats.files import read_json
from pallasite.convert.formats.huggingface import copy_tokenizer, with_all_eos
from pallasite.convert.formats.names import refuse_problems
from pallasite.convert.int4 import Int4Tensor, permutation_id
from pallasite.convert.source import SourceInfo, Tensor
from pallasite.models.config import TensorSpec
from pallasite.models.registry import read_config
from pallasite.models.tensors import tensor_specs

FORMAT, VERSION = "pallasite-checkpoint", 2
READABLE = (1, 2)
"""Versions that can be read. 2 knows tensors whose rows are permuted."""
MANIFEST = "manifest.json"
ARRAYS = "arrays"
UNFINISHED = ".unfinished"
"""A file in the folder where a checkpoint is being made, locked by the process at work there (writer.py)."""

FLOATS = ("float32", "float16", "bfloat16")


def is_partial(folder: Path) -> bool:
    """Whether a folder is a conversion that was never finished."""
    return (folder / UNFINISHED).exists()


class Checkpoint:
    """A checkpoint of ours, opened as a source: the manifest is checked, no weights are read yet.

    Raises ValueError naming what is wrong: a format or version that we don't know, tensors that the configuration
    asks for and the manifest or the arrays lack, an unfinished conversion.
    """

    def __init__(self, folder: Path) -> None:
        if is_partial(folder):
            raise ValueError(f"{folder}: is an unfinished conversion; convert again, with --resume to go on with it")
        self.manifest = read_manifest(folder)
        raw = read_json(folder / "config.json") if (folder / "config.json").exists() else None
        if raw is None:
            raise ValueError(f"{folder}: has no config.json")
        generation_file = folder / "generation_config.json"
        generation = read_json(generation_file) if generation_file.exists() else {}
        config = with_all_eos(read_config(raw), generation)
        specs = tensor_specs(config)
        self._entries: Mapping[str, dict[str, Any]] = self.manifest["tensors"]
        self._base = _array_folder(folder)
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
        self._check(folder, specs)
        self.info = SourceInfo(
            format="pallasite",
            path=folder,
            config=config,
            config_json=raw,
            generation_json=generation,
            specs=specs,
            group_sizes={name: e["group_size"] for name, e in self._entries.items() if e["dtype"] == "int4"},
            dtypes={name: e["dtype"] for name, e in self._entries.items()},
            permutations={name: e["permutation"] for name, e in self._entries.items() if "permutation" in e},
        )

    def _check(self, folder: Path, specs: Mapping[str, TensorSpec]) -> None:
        """Raise one ValueError that lists all that is missing, extra or wrongly shaped."""
        store = {"driver": "ocdbt", "base": f"file://{self._base}/"}
        try:
            keys = tensorstore.KvStore.open(store, context=self._context).result().list().result()
        except Exception as error:  # TensorStore raises by the kind of damage; all mean the same to the user
            raise ValueError(f"{self._base}: damaged arrays ({error})") from None
        held = {key.decode().removesuffix("/.zarray") for key in keys if key.endswith(b"/.zarray")}
        entries = self._entries
        expected = {array for name, entry in entries.items() for array in _expected_arrays(name, entry)}
        shapes = [
            f"{name}: {entries[name]['shape']}, expected {list(spec.shape)}"
            for name, spec in specs.items()
            if name in entries and entries[name]["shape"] != list(spec.shape)
        ]
        problems = {
            "missing tensors": specs.keys() - entries.keys(),
            "extra tensors": entries.keys() - specs.keys(),
            "missing arrays": expected - held,
            "wrong shapes": shapes,
        }
        refuse_problems(str(folder), problems)

    def _array(self, name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """One array. Raises ValueError naming it if the files are damaged or hold something else."""
        store = {"driver": "ocdbt", "base": f"file://{self._base}/", "path": f"{name}/"}
        try:
            # By zarr's rules a chunk that isn't there reads as zeros: missing data must not pass for weights.
            spec = {"driver": "zarr", "kvstore": store, "fill_missing_data_reads": False}
            opened = tensorstore.open(spec, open=True, context=self._context).result()
            array = np.asarray(opened.read().result())
        except Exception as error:  # as above
            raise ValueError(f"{self._base}: array {name!r} is damaged ({error})") from None
        if array.shape != shape or array.dtype.name != dtype:
            raise ValueError(
                f"{self._base}: array {name!r} is {array.dtype.name} {list(array.shape)}; "
                f"the manifest says {dtype} {list(shape)}"
            )
        return array

    def read(self, name: str) -> Tensor:
        """One tensor: a float array as stored, or an Int4Tensor. Raises ValueError if the files are damaged."""
        entry = self._entries[name]
        arrays = {array: self._array(array, *facts) for array, facts in _expected_arrays(name, entry).items()}
        if entry["dtype"] != "int4":
            return arrays[name]
        k, n = entry["shape"]
        permutation = arrays.get(f"{name}.permutation")
        if permutation is not None and permutation_id(permutation) != entry["permutation"]:
            raise ValueError(f"{self._base}: array '{name}.permutation' is not the one that the manifest names")
        return Int4Tensor(
            packed=arrays[f"{name}.packed"],
            scales=arrays[f"{name}.scales"],
            zeros=arrays.get(f"{name}.zeros"),
            minimums=arrays.get(f"{name}.minimums"),
            group_size=entry["group_size"],
            shape=(k, n),
            permutation=permutation,
        )

    def save_tokenizer(self, folder: Path) -> bool:
        """Copy the tokenizer's files into `folder`; False if there is no tokenizer."""
        return copy_tokenizer(self.info.path, folder)

    def close(self) -> None:
        """Nothing stays open between reads."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises ValueError for another format or version, and for missing fields."""
    path = folder / MANIFEST
    manifest = read_json(path)
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{path}: format is {manifest.get('format')!r}; a checkpoint of ours says {FORMAT!r}")
    if manifest.get("format_version") not in READABLE:
        raise ValueError(
            f"{path}: format version {manifest.get('format_version')!r} is unknown; "
            f"this pallasite reads {' and '.join(map(str, READABLE))}"
        )
    if not isinstance(manifest.get("tensors"), dict):
        raise ValueError(f"{path}: has no list of tensors")
    for name, entry in manifest["tensors"].items():
        if not {"shape", "kind", "dtype"} <= entry.keys() or entry["dtype"] not in ("int4", *FLOATS):
            raise ValueError(f"{path}: can't read the entry of tensor {name!r}: {entry}")
    return manifest


def _array_folder(folder: Path) -> Path:
    """Where Orbax put the arrays' key-value store: its versions name that folder differently."""
    found = sorted((folder / ARRAYS).glob("*/manifest.ocdbt"))
    if len(found) != 1:
        raise ValueError(f"{folder}: {ARRAYS}/ holds no whole Orbax checkpoint")
    return found[0].parent.absolute()


def _expected_arrays(name: str, entry: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Array name -> (shape, dtype) of a tensor's arrays, by its entry in the manifest."""
    if entry["dtype"] != "int4":
        return {name: (tuple(entry["shape"]), entry["dtype"])}
    k, n = entry["shape"]
    groups = (-(-k // entry["group_size"]), n)
    offset_dtype = "uint8" if entry["offset"] == "zeros" else entry["scales"]
    arrays: dict[str, tuple[tuple[int, ...], str]] = {
        f"{name}.packed": ((-(-k // 8), n), "int32"),
        f"{name}.scales": (groups, entry["scales"]),
        f"{name}.{entry['offset']}": (groups, offset_dtype),
    }
    return arrays | {f"{name}.permutation": ((k,), "int32")} if "permutation" in entry else arrays
