"""Pallasite: serve large language models from JAX.

from pallasite import pipeline
with pipeline("path/to/model") as pipe:
    print(pipe("What is a pallasite?").text)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pallasite.serve.config import EngineConfig
    from pallasite.serve.pipeline import Pipeline, Session, pipeline
    from pallasite.serve.types import EngineClosed, GenerationConfig, QueueFull, Response, TokenLogprob

    TurbomindEngineConfig = EngineConfig

__version__ = "0.1.0"

_HOME = {
    "EngineClosed": "types",
    "EngineConfig": "config",
    "GenerationConfig": "types",
    "Pipeline": "pipeline",
    "QueueFull": "types",
    "Response": "types",
    "Session": "pipeline",
    "TokenLogprob": "types",
    "pipeline": "pipeline",
}
"""Public name -> its file in serve/. Imported when first asked for: JAX and transformers take seconds, and the command
line's help needs neither."""

_ALIASES = {"TurbomindEngineConfig": "EngineConfig"}
"""LMDeploy's names for the same things, so that its users change one import."""

__all__ = [
    "EngineClosed",
    "EngineConfig",
    "GenerationConfig",
    "Pipeline",
    "QueueFull",
    "Response",
    "Session",
    "TokenLogprob",
    "TurbomindEngineConfig",
    "pipeline",
]


def __getattr__(name: str) -> Any:
    real = _ALIASES.get(name, name)
    if real not in _HOME:
        raise AttributeError(f"module 'pallasite' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pallasite.serve.{_HOME[real]}"), real)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
