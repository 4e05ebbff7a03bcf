"""Pallasite: serve large language models from JAX.

    from pallasite import pipeline
    with pipeline("path/to/model") as pipe:
        print(pipe("What is a pallasite?").text)
"""

from pallasite.serve.config import EngineConfig
from pallasite.serve.pipeline import Pipeline, Session, pipeline
from pallasite.serve.types import EngineClosed, GenerationConfig, QueueFull, Response, TokenLogprob

TurbomindEngineConfig = EngineConfig
"""LMDeploy's name for the same thing, so that its users change one import."""

__version__ = "0.1.0"

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
