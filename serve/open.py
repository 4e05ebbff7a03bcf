"""From a path to a serving engine: source or converted checkpoint, tokenizer, model on its mesh, programs compiled."""

import functools
import math
import os
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh
from tqdm import tqdm

from pallasite.convert.formats import open_source
from pallasite.convert.load import load_model
from pallasite.convert.source import Source
from pallasite.serve.config import EngineConfig
from pallasite.serve.engine import Engine
from pallasite.serve.frontend import Frontend
from pallasite.serve.memory import check_session_len, free_bytes
from pallasite.serve.tokenizer import Tokenizer
from pallasite.sharding.mesh import make_mesh


def open_frontend(
    model_path: str | Path, config: EngineConfig, *, progress: bool = True, name: str | None = None
) -> Frontend:
    """Load the model at `model_path` (a converted checkpoint, a Hugging Face folder, a GGUF file) and compile its
    programs; returns when it can serve. progress: bars on stderr.

    Raises ValueError or OSError, naming what is wrong, before the long work where that can be known.
    """
    enable_compilation_cache()
    mesh = _mesh(config)
    source = open_source(Path(model_path))
    try:
        if config.model_format not in ("auto", source.info.format):
            raise ValueError(f"model_format is {config.model_format!r}, but {model_path} is {source.info.format!r}")
        check_session_len(config, source.info.config.max_session_len)
        tokenizer = _load_tokenizer(source)
        dtype = config.dtype
        if dtype == "auto":
            dtype = "float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16"
        parameters = sum(math.prod(spec.shape) for spec in source.info.specs.values())
        total = parameters * jnp.dtype(dtype).itemsize
        # No backend has an INT4 kernel yet, and the reference dequantizes again in every step: only where the weights
        # would not fit otherwise are they kept in INT4.
        keep_int4 = total > free_bytes(mesh) * mesh.devices.size // 2
        bar = tqdm(total=total, desc="loading", unit="B", unit_scale=True, disable=not progress, leave=False)
        with bar:
            model = load_model(source, mesh, dtype, keep_int4=keep_int4, progress=bar.update)
    finally:
        source.close()
    with tqdm(desc="compiling", unit="program", disable=not progress, leave=False) as bar:
        engine = Engine(model, config, functools.partial(_report, bar))
    eos_ids = (*source.info.config.eos_token_ids, *(tokenizer.eos_ids if tokenizer else ()))
    default_name = Path(model_path).resolve().name.removesuffix(".gguf")
    return Frontend(engine, tokenizer, name or default_name, source.info.config.architecture, eos_ids)


def enable_compilation_cache() -> None:
    """Keep compiled programs on disk, so that the next start is quick. A directory set by the user (JAX's own option or
    environment variable) stays; else it is pallasite's in the user's cache folder."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(base / "pallasite" / "programs"))
        # In older JAX releases a program compiled before this line has switched the cache off for good.
        compilation_cache.reset_cache()
    # By default programs that compile within a second are not stored, and on CPU most of ours do.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _report(bar: tqdm, done: int, total: int) -> None:
    bar.total = total
    bar.update(done - bar.n)


def _mesh(config: EngineConfig) -> Mesh:
    """The mesh of the devices that the config asks for."""
    platform = None if config.device == "auto" else config.device
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        raise ValueError(f"device is {config.device!r}, but JAX finds none: {error}") from error
    return make_mesh(config.tp, devices)


def _load_tokenizer(source: Source) -> Tokenizer | None:
    """The source's tokenizer, by way of a temporary folder: a GGUF file has it in its metadata."""
    with tempfile.TemporaryDirectory(prefix="pallasite-") as folder:
        if not source.save_tokenizer(Path(folder)):
            return None
        return Tokenizer.load(Path(folder), source.info.config_json, source.info.generation_json)
