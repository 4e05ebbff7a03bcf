"""The vocabularies that InternLM2 and first-generation Qwen were published with, for tests that find them; the others
are skipped. Neither is stored in the project (tests/data/golden/*-tokenizer/README.md)."""

import hashlib
import importlib.util
import json
import shutil
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
INTERNLM2 = json.loads((GOLDEN / "internlm2-tokenizer" / "expected.json").read_text())
QWEN = json.loads((GOLDEN / "qwen1-tokenizer" / "expected.json").read_text())

_INTERNLM2_MODEL = Path(__file__).parents[3] / "shared" / "golden" / "internlm2-tokenizer" / "tokenizer.model"


def save_published_internlm2(folder: Path) -> Path:
    """tokenizer.model with InternVL2's special tokens, and no chat template."""
    if not _INTERNLM2_MODEL.exists():
        pytest.skip("InternLM2's tokenizer.model is not here")
    shutil.copyfile(_INTERNLM2_MODEL, folder / "tokenizer.model")
    assert hashlib.sha256((folder / "tokenizer.model").read_bytes()).hexdigest() == INTERNLM2["model_sha256"]
    added = {str(i): {"content": name, "special": True} for name, i in INTERNLM2["special_tokens"].items()}
    settings = {"tokenizer_class": "InternLM2Tokenizer", "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def save_published_qwen(folder: Path) -> Path:
    """qwen.tiktoken out of the package dashscope, none of whose code is run."""
    package = importlib.util.find_spec("dashscope")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package dashscope, which holds qwen.tiktoken, is not installed")
    shutil.copyfile(
        Path(package.submodule_search_locations[0]) / "resources" / "qwen.tiktoken", folder / "qwen.tiktoken"
    )
    return folder
