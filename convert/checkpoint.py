"""Our checkpoint on disk: a folder with a manifest, the model's config.json, its tokenizer, and an Orbax checkpoint.

docs/checkpoint-format.md describes it. The arrays are logical: no shard of any mesh, no padding, so a checkpoint
says nothing of the devices that wrote it and opens on any number of them. They are written through Orbax's partial
saves, some hundred megabytes at a time, and read with TensorStore, which Orbax itself stands on: a tensor through
Orbax's loader costs 40 to 80 ms, through TensorStore 1 ms, and a quantized model has some hundred arrays.
"""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import tensorstore

from pallasite.convert.formats.files import read_json
from pallasite.convert.formats.huggingface import copy_tokenizer, with_all_eos
from pallasite.convert.formats.names import refuse_problems
from pallasite.convert.int4 import Int4Tensor, permutation_id
from pallasite.convert.source import SourceInfo, Tensor
from pallasite.models.config import TensorSpec
from pallasite.models.registry import read_config
from pallasite.models.tensors import tensor_specs

log = logging.getLogger(__name__)

FORMAT, VERSION = "pallasite-checkpoint", 2
READABLE = (1, 2)
"""Versions that can be read. 2 knows tensors whose rows are permuted."""
MANIFEST = "manifest.json"
ARRAYS = "arrays"
UNFINISHED = ".unfinished"
"""A file that stands in the folder while it is written, locked by the process that writes it."""
SCRATCH = ".scratch"
"""A folder in it for what a producer needs to go on after an interruption."""

FLOATS = ("float32", "float16", "bfloat16")
PENDING_BYTES = 256 << 20
"""Arrays are handed to Orbax when this many bytes have come together: a partial save costs a quarter of a second."""


def is_partial(folder: Path) -> bool:
    """Whether a folder is a conversion that was never finished."""
    return (folder / UNFINISHED).exists()


def array_parts(name: str, tensor: Tensor) -> dict[str, np.ndarray]:
    """The plain arrays that hold a tensor: itself, or for INT4 <name>.packed, .scales, .zeros or .minimums, and
    .permutation."""
    if not isinstance(tensor, Int4Tensor):
        return {name: tensor}
    parts = {field: getattr(tensor, field) for field in ("packed", "scales", "zeros", "minimums", "permutation")}
    return {f"{name}.{part}": array for part, array in parts.items() if array is not None}


def tensor_entry(spec: TensorSpec, tensor: Tensor) -> dict[str, Any]:
    """What the manifest says of a tensor."""
    entry: dict[str, Any] = {"shape": list(spec.shape), "kind": spec.kind}
    if not isinstance(tensor, Int4Tensor):
        return entry | {"dtype": tensor.dtype.name}
    entry |= {
        "dtype": "int4",
        "group_size": tensor.group_size,
        "scales": tensor.scales.dtype.name,
        "offset": "zeros" if tensor.minimums is None else "minimums",
    }
    return entry if tensor.permutation is None else entry | {"permutation": permutation_id(tensor.permutation)}


class CheckpointWriter:
    """Writes a checkpoint beside `dst` and puts it in place with one rename, in `finish`.

    A context manager: leaving it without `finish`, by an error or Ctrl-C, removes what was written and leaves an
    existing checkpoint at `dst` as it was. After a kill the folder stays behind, marked unfinished; the next writer
    for the same `dst` removes it. The caller checks beforehand that `dst` may be replaced.
    """

    def __init__(self, dst: Path) -> None:
        self.dst = dst.absolute()
        self.folder = self.dst.with_name(f"{self.dst.name}.partial-{os.getpid()}")
        self.scratch = self.folder / SCRATCH
        self.tensors: dict[str, dict[str, Any]] = {}
        self.bytes = 0
        self._pending: dict[str, np.ndarray] = {}
        self._lock: IO[str] | None = None

    def __enter__(self) -> "CheckpointWriter":
        self.dst.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.dst)
        self.folder.mkdir()
        self.scratch.mkdir()
        self._lock = (self.folder / UNFINISHED).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self

    def __exit__(self, *exception: object) -> None:
        self._pending = {}
        if self._lock:
            self._lock.close()
        shutil.rmtree(self.folder, ignore_errors=True)  # the name is free already after `finish`

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """A JSON file in the checkpoint's folder, on the disk when this returns."""
        with (self.folder / name).open("w", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def add(self, name: str, spec: TensorSpec, tensor: Tensor) -> None:
        """One tensor. It must not be changed afterwards: it is written by a later `commit` or by `finish`."""
        self.tensors[name] = tensor_entry(spec, tensor)
        self._pending |= array_parts(name, tensor)
        self.bytes += tensor.nbytes

    def commit(self) -> None:
        """Write what was added if enough has come together. Tensors added between two calls are never separated."""
        if self._pending_bytes() > PENDING_BYTES:
            self._flush()

    def _pending_bytes(self) -> int:
        return sum(array.nbytes for array in self._pending.values())

    def _flush(self) -> None:
        """Write what is pending as one of Orbax's partial saves. Raises OSError if the disk refuses."""
        try:
            with _orbax_context():
                ocp.partial.save(self.folder / ARRAYS, self._pending)
        except Exception as error:
            raise OSError(f"{self.folder}: writing failed: {error}") from error
        self._pending = {}

    def finish(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Write the rest and the manifest, with `manifest`'s fields in it, and put the checkpoint at `dst`.

        Returns the whole manifest."""
        if self._pending:
            self._flush()
        try:
            with _orbax_context():
                ocp.partial.finalize(self.folder / ARRAYS)
        except Exception as error:
            raise OSError(f"{self.folder}: writing failed: {error}") from error
        head = {"format": FORMAT, "format_version": VERSION}
        whole: dict[str, Any] = {**head, **manifest, "bytes": self.bytes, "tensors": self.tensors}
        self.write_json(MANIFEST, whole)
        shutil.rmtree(self.scratch)
        (self.folder / UNFINISHED).unlink()
        _sync(self.folder)
        replaced = self.dst.with_name(f"{self.dst.name}.replaced-{os.getpid()}")
        if self.dst.exists():
            self.dst.rename(replaced)
        try:
            self.folder.rename(self.dst)
        except BaseException:
            if replaced.exists():
                replaced.rename(self.dst)
            raise
        _sync(self.dst.parent)
        shutil.rmtree(replaced, ignore_errors=True)
        return whole


def _orbax_context() -> ocp.Context:
    """Settings under which a save holds no copy of the arrays in memory.

    Compression would hold one, and buys little: weights barely compress. So would the defensive copy of host arrays,
    which nobody changes while a save runs, and chunks smaller than an array.
    """
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.array.saving.use_zarr3 = False
    context.memory.deepcopy_host_arrays = False
    return context


def _sync(folder: Path) -> None:
    """Bring a folder's list of names to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_leftovers(dst: Path) -> None:
    """Remove the unfinished folders of earlier conversions to `dst` whose process is gone; running ones are kept."""
    for folder in dst.parent.glob(f"{dst.name}.partial-*"):
        marker = folder / UNFINISHED
        if not marker.exists():
            continue
        with marker.open("r") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system drops a dead process's lock
            except OSError:
                continue
            log.warning("%s: removing what an interrupted conversion left", folder)
            shutil.rmtree(folder, ignore_errors=True)


class Checkpoint:
    """A checkpoint of ours, opened as a source: the manifest is checked, no weights are read yet.

    Raises ValueError naming what is wrong: a format or version that we don't know, tensors that the configuration
    asks for and the manifest or the arrays lack, an unfinished conversion.
    """

    def __init__(self, folder: Path) -> None:
        if is_partial(folder):
            raise ValueError(f"{folder}: is an unfinished conversion; delete it and convert again")
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
