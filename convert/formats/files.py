"""The files of a Hugging Face folder: JSON, and safetensors, whole or in shards under an index, which decides."""

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes  # safetensors finds numpy's bfloat16 only once this has registered it
import numpy as np
from safetensors import SafetensorError, safe_open

log = logging.getLogger(__name__)

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""safetensors' names of the floating-point dtypes that a tensor may have, and numpy's names for them."""

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I32": 4, "I64": 8}
"""Bytes of a value of the dtypes that can be read."""

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


class Shards:
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

    def facts(self, key: str) -> tuple[tuple[int, ...], str]:
        """A tensor's shape and safetensors' name of its dtype."""
        view = self.handle(self.places[key]).get_slice(key)
        return tuple(view.get_shape()), view.get_dtype()

    def rows(self, key: str, first: int, end: int) -> Iterator[np.ndarray]:
        """Yield consecutive rows of a tensor, from `first` up to `end`, some at a time."""
        shape, dtype = self.facts(key)
        view = self._float8(key) if dtype == "F8_E4M3" else self.handle(self.places[key]).get_slice(key)
        step = max(1, CHUNK_BYTES // max(1, math.prod(shape[1:]) * ITEM_BYTES[dtype]))
        for start in range(first, end, step):
            yield view[start : min(start + step, end)]

    def read(self, key: str) -> np.ndarray:
        """A whole tensor."""
        _, dtype = self.facts(key)
        return self._float8(key) if dtype == "F8_E4M3" else self.handle(self.places[key]).get_tensor(key)

    def _float8(self, key: str) -> np.ndarray:
        """A tensor of F8_E4M3, mapped. The library knows the dtype and can't hand it to NumPy, so its bytes are looked
        up in the file's header, which the library has checked: eight bytes of length, JSON, the data."""
        path = self.folder / self.places[key]
        shape, _ = self.facts(key)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            first, _ = json.loads(file.read(length))[key]["data_offsets"]
        mapped = np.memmap(path, np.uint8, "r", offset=8 + length + first, shape=shape)
        return np.asarray(mapped).view(ml_dtypes.float8_e4m3fn)

    def close(self) -> None:
        self._open.clear()


def _no_weights(folder: Path) -> str:
    """Why a folder with a config.json has no weights that can be read."""
    if next(folder.glob("*.bin"), None) or next(folder.glob("*.pt*"), None):
        return "only pickled PyTorch weights, which are never loaded; convert them to safetensors first"
    return "has neither model.safetensors nor model.safetensors.index.json"
