"""Writing our checkpoint: in parts that survive an interruption, and into place with one rename.

All work is done in a folder DST.partial beside the destination:

    .unfinished     locked by the process that works here
    job.json        what is converted and how; written once the folders are there
    parts/00042/    some hundred megabytes of tensors, one of Orbax's partial saves; tensors.json once they are written
    scratch/        what a producer needs to go on after an interruption
    whole/          becomes the checkpoint; manifest.json is written when all the rest is there
    replaced/       the checkpoint that gives way, between two renames

A process can be killed between any two operations. What it finds tells the next one where to go on: with whole/'s
manifest only the rename is left; with parts/, those that have their tensors.json are kept; with neither, the checkpoint
is in its place already.
"""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

from pallasite.convert.checkpoint import ARRAYS, FORMAT, MANIFEST, UNFINISHED, VERSION, read_manifest
from pallasite.convert.formats.files import read_json
from pallasite.convert.int4 import Int4Tensor, permutation_id
from pallasite.convert.source import Tensor
from pallasite.models.config import TensorSpec

log = logging.getLogger(__name__)

JOB, PARTS, SCRATCH, WHOLE, REPLACED = "job.json", "parts", "scratch", "whole", "replaced"
ENTRIES = "tensors.json"

PENDING_BYTES = 256 << 20
"""Arrays are handed to Orbax when this many bytes have come together: a partial save costs 20 ms and some files."""

MARGIN_BYTES = 1 << 20
"""What Orbax needs beside the arrays."""


def workshop(dst: Path) -> Path:
    """The folder where a checkpoint for `dst` is made."""
    dst = dst.absolute()
    return dst.with_name(f"{dst.name}.partial")


def is_placed(dst: Path) -> bool:
    """Whether a conversion to `dst` was killed when its checkpoint was in place, before it had cleared up."""
    folder = workshop(dst)
    return (folder / JOB).exists() and not (folder / PARTS).exists() and not (folder / WHOLE).exists() and dst.exists()


class CheckpointWriter:
    """Makes a checkpoint beside `dst` (`finish`) and puts it in place with one rename (`place`).

    A context manager. Entering it locks the work folder, and with `resume` goes on where an interrupted writer with
    the same `job` has stopped: `tensors`, which lists what was added, then starts with what is written already, and
    `manifest` is set if only `place` is left. Without `resume` what an interrupted one has left is removed.

    Leaving it by an error keeps what is written for a later `resume`, if there is anything; by a ValueError, which
    says that the source or the options are wrong, nothing is kept. Until `place` a checkpoint at `dst` is as it was.
    The caller checks beforehand that `dst` may be replaced.

    job: what the checkpoint is made of and how, by names that a user knows: whoever resumes must bring the same.
    Raises OSError if another writer is at work for `dst`, ValueError naming the differences if the job is another.
    """

    def __init__(self, dst: Path, job: Mapping[str, Any], *, resume: bool = False) -> None:
        self.dst, self.job, self.resume = dst.absolute(), job, resume
        self.work = workshop(dst)
        self.folder = self.work / WHOLE
        self.scratch = self.work / SCRATCH
        self.manifest: dict[str, Any] | None = None
        self.tensors: dict[str, dict[str, Any]] = {}
        self.bytes = 0
        self._parts = 0
        self._pending: dict[str, np.ndarray] = {}
        self._pending_entries: dict[str, dict[str, Any]] = {}
        self._pending_bytes = 0
        self._lock: IO[str] | None = None

    def __enter__(self) -> "CheckpointWriter":
        self.dst.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.work)
        try:
            if (self.work / JOB).exists():
                if self.resume:
                    self._check_job()
                    self._find_what_is_done()
                    return self
                log.warning("%s: removing what an interrupted conversion left", self.work)
            self._clear()
            for name in (PARTS, SCRATCH, WHOLE):
                (self.work / name).mkdir()
            _write_json(self.work / JOB, self.job)
        except BaseException:
            if not (self.work / JOB).exists():
                shutil.rmtree(self.work, ignore_errors=True)
            self._lock.close()
            raise
        return self

    def _check_job(self) -> None:
        """Raise one ValueError that lists how the job differs from the one that was interrupted."""
        before = read_json(self.work / JOB)
        differences = [
            f"{name} was {before.get(name)}, is {self.job.get(name)}"
            for name in {**before, **self.job}
            if before.get(name) != self.job.get(name)
        ]
        if differences:
            raise ValueError(
                f"{self.work}: can't resume another conversion: {'; '.join(differences)}. "
                "Resume it with the source and the options that it had, or convert without resume to start anew"
            )

    def _find_what_is_done(self) -> None:
        if is_placed(self.dst):
            self.manifest = read_manifest(self.dst)
        elif (self.folder / MANIFEST).exists():
            self.manifest = read_manifest(self.folder)
        else:
            self._find_parts()

    def _find_parts(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        for part in sorted((self.work / PARTS).iterdir()):
            if not (part / ENTRIES).exists():  # it was being written
                shutil.rmtree(part)
                continue
            done = read_json(part / ENTRIES)
            self.tensors |= done["tensors"]
            self.bytes += done["bytes"]
            self._parts = int(part.name) + 1

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        assert self._lock is not None
        if kind is None:
            shutil.rmtree(self.work)
        elif issubclass(kind, ValueError) or not self._has_something():
            self._clear()
            shutil.rmtree(self.work, ignore_errors=True)
        else:
            log.warning("%s: holds what is done; the same conversion with --resume (resume=True) goes on", self.work)
        self._lock.close()

    def _has_something(self) -> bool:
        parts, scratch = (self.work / PARTS).glob(f"*/{ENTRIES}"), self.scratch.glob("*")
        return any(parts) or any(scratch) or (self.folder / MANIFEST).exists()

    def _clear(self) -> None:
        """Empty the work folder. What was to be replaced returns to its place, if nothing has come there."""
        if (self.work / REPLACED).exists() and not self.dst.exists():
            (self.work / REPLACED).rename(self.dst)
        (self.work / JOB).unlink(missing_ok=True)  # first, for without it the rest counts for nothing
        for name in (PARTS, SCRATCH, WHOLE, REPLACED):
            shutil.rmtree(self.work / name, ignore_errors=True)

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """A JSON file in the checkpoint's folder: on the disk when this returns, and never there in part."""
        _write_json(self.folder / name, value)

    def add(self, name: str, spec: TensorSpec, tensor: Tensor) -> None:
        """One tensor. It must not be changed afterwards: it is written by a later `commit` or by `finish`."""
        self.tensors[name] = self._pending_entries[name] = tensor_entry(spec, tensor)
        self.bytes += tensor.nbytes
        self._pending |= array_parts(name, tensor)
        self._pending_bytes += tensor.nbytes

    def commit(self) -> None:
        """Write what was added if enough has come together. Tensors added between two calls are never separated."""
        if self._pending_bytes > PENDING_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Write what is pending as one part. Raises OSError if the disk refuses."""
        part = self.work / PARTS / f"{self._parts:05}"
        part.mkdir()
        _reserve(part / "reserved", self._pending_bytes + MARGIN_BYTES)
        with _orbax(part):
            ocp.partial.save(part / ARRAYS, self._pending)
        _sync_tree(part)
        _write_json(part / ENTRIES, {"tensors": self._pending_entries, "bytes": self._pending_bytes})
        self._parts += 1
        self._pending, self._pending_entries, self._pending_bytes = {}, {}, 0

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Write the rest, and gather all in one whole checkpoint with `manifest`'s fields in its manifest."""
        if self._pending:
            self._flush()
        _reserve(self.folder / "reserved", MARGIN_BYTES)
        gathered = self.folder / f"{ARRAYS}.partial_save"  # where Orbax collects the partial saves of `arrays`
        for part in sorted((self.work / PARTS).iterdir()):
            shutil.copytree(part / gathered.name, gathered, copy_function=_link_data, dirs_exist_ok=True)
        with _orbax(self.folder):
            ocp.partial.finalize(self.folder / ARRAYS)
        _sync_tree(self.folder)
        head = {"format": FORMAT, "format_version": VERSION}
        self.manifest = {**head, **manifest, "bytes": self.bytes, "tensors": self.tensors}
        self.write_json(MANIFEST, self.manifest)

    def place(self) -> dict[str, Any]:
        """Put the whole checkpoint at `dst`. Returns its manifest."""
        assert self.manifest is not None
        if not self.folder.exists():  # it was placed before an interruption
            return self.manifest
        for name in (PARTS, SCRATCH):
            shutil.rmtree(self.work / name, ignore_errors=True)
        replaced = self.work / REPLACED
        if self.dst.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            self.dst.rename(replaced)
        try:
            self.folder.rename(self.dst)
        except BaseException:
            if replaced.exists():
                replaced.rename(self.dst)
            raise
        _sync(self.dst.parent)
        return self.manifest


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


def _lock(work: Path) -> IO[str]:
    """Make the work folder, if it isn't there, and lock it. The system drops the lock of a process that dies."""
    work.mkdir(exist_ok=True)
    path = work / UNFINISHED
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise BlockingIOError  # it was cleared up between our opening and locking
    except BlockingIOError:
        file.close()
        raise OSError(f"{work}: another conversion to the same place is at work there") from None
    return file


@contextmanager
def _orbax(folder: Path) -> Iterator[None]:
    """Orbax with settings under which a save holds no copy of the arrays. Raises OSError for whatever it raises.

    Compression would hold a copy, and buys little: weights barely compress. So would the defensive copy of host
    arrays, which nobody changes while a save runs, and chunks smaller than an array.
    """
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.array.saving.use_zarr3 = False
    context.memory.deepcopy_host_arrays = False
    try:
        with context:
            yield
    except Exception as error:
        raise OSError(f"{folder}: writing failed: {error}") from error


def _reserve(path: Path, nbytes: int) -> None:
    """Ask the system for room, and give it back. Raises OSError, in one line, if there is none.

    Orbax raises too, but not before its threads have written tracebacks to stderr.
    """
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as error:
        raise OSError(f"{path.parent}: can't write {nbytes / 1e6:.0f} MB: {error.strerror}") from None
    finally:
        path.unlink(missing_ok=True)


def _link_data(src: str, dst: str) -> None:
    """Copy a file, but link the large ones: TensorStore's data files, in folders `d`, are never changed."""
    if Path(src).parent.name == "d":
        try:
            os.link(src, dst)
            return
        except OSError:  # a file system without links
            pass
    shutil.copyfile(src, dst)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON file that is there whole or not at all, and on the disk when this returns."""
    new = path.with_name(f".{path.name}.new")
    with new.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Bring a file's content or a folder's list of names to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_tree(folder: Path) -> None:
    """The same for a folder and all that is in it."""
    for path in (*folder.rglob("*"), folder):
        _sync(path)
