"""The architectures we know, by the name in config.json's "architectures"."""

import types
from collections.abc import Mapping
from typing import Any

from pallasite.models import internlm2, llama, mistral, qwen, qwen2, qwen3
from pallasite.models.config import ModelConfig

_FAMILIES = {
    name: family for family in (internlm2, llama, mistral, qwen, qwen2, qwen3) for name in family.ARCHITECTURES
}


def family_of(raw: Mapping[str, Any]) -> types.ModuleType:
    """The family module (read_config, HF_KEYS) for a config.json.

    Raises ValueError naming the architecture found and those that are known.
    """
    names = raw.get("architectures") or []
    for name in names:
        if name in _FAMILIES:
            return _FAMILIES[name]
    found = ", ".join(map(str, names)) or f"none named (model_type {raw.get('model_type')!r})"
    raise ValueError(f"unknown architecture: {found}; supported: {', '.join(sorted(_FAMILIES))}")


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a parsed config.json of any known architecture."""
    return family_of(raw).read_config(raw)
