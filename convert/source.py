"""What the loader and the converter read from: one interface over our checkpoints, HF folders and GGUF files."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pallasite.convert.int4 import Int4Tensor
from pallasite.models.config import ModelConfig, TensorSpec

Tensor = np.ndarray | Int4Tensor


@dataclasses.dataclass(frozen=True)
class SourceInfo:
    """What is known of a checkpoint before a tensor is read.

    config_json: the Hugging Face style config.json (made up from the metadata for GGUF). generation_json: that of
    generation_config.json, {} if absent. group_sizes: INT4 group size by tensor name, for those stored in INT4.
    dtypes: how each tensor is stored, by name: "float32", "float16", "bfloat16", "int4", "float8_e4m3fn", or GGUF's
    name of a block. permutations: of the INT4 tensors whose rows are permuted, permutation_id by name. quantization:
    the method that the source was quantized with, if it names one ("awq").
    """

    format: str
    path: Path
    config: ModelConfig
    config_json: Mapping[str, Any]
    generation_json: Mapping[str, Any]
    specs: Mapping[str, TensorSpec]
    group_sizes: Mapping[str, int]
    dtypes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    permutations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    quantization: str | None = None


class Source(Protocol):
    """An opened checkpoint. Opening checks names and shapes: all that is missing, extra or wrongly shaped stands in
    one ValueError. `read` loads one tensor under our own name, [K, N] for linears."""

    info: SourceInfo

    def read(self, name: str) -> Tensor:
        """The tensor `name` of info.specs: a float array (float32, float16 or bfloat16), or an Int4Tensor."""
        ...

    def save_tokenizer(self, folder: Path) -> bool:
        """Write the tokenizer's files (tokenizer.json, tokenizer_config.json, chat template) into `folder`.

        Returns False where the checkpoint has no tokenizer."""
        ...

    def close(self) -> None: ...
