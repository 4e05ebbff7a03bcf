"""Who may import whom: the rule of docs/architecture.md, read from the source itself."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MAY_IMPORT = {
    "kernels": set(),
    "sharding": set(),
    "models": {"kernels", "sharding"},
    "convert": {"models", "sharding"},
    "serve": {"models", "sharding", "kernels", "convert"},
    "api": {"serve", "convert"},
}
"""Room -> the other rooms that it may import; the room api is the package `pallasite` itself."""

GRPC_FILES = ("serve/grpc/", "serve/proto/")
FORBIDDEN = {"torch"}
GENERATED = ("_pb2.py", "_pb2_grpc.py")


def imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of every import in a file, those inside functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def room_of(name: str) -> str | None:
    """The room that an imported name lies in; None if it is not ours."""
    parts = name.split(".")
    if parts[0] != "pallasite":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "api"


def problems(path: str, source: str) -> list[str]:
    """What is wrong with the imports of the file at `path` (relative to the root, its room first)."""
    room, found = path.split("/")[0], []
    for line, name in imports(source):
        top, target = name.split(".")[0], room_of(name)
        if name.startswith("."):
            found.append(f"{path}:{line}: relative import of {name}")
        elif top in MAY_IMPORT:
            found.append(f"{path}:{line}: imports {name} without pallasite in front")
        elif target not in (None, room, *MAY_IMPORT[room]):
            found.append(f"{path}:{line}: {room} imports {target} ({name})")
        elif top.startswith("grpc") and not path.startswith(GRPC_FILES):
            found.append(f"{path}:{line}: only {' and '.join(GRPC_FILES)} may import {name}")
        elif top in FORBIDDEN:
            found.append(f"{path}:{line}: imports {name}")
    return found


def files() -> list[Path]:
    found = [path for room in MAY_IMPORT for path in sorted((ROOT / room).rglob("*.py"))]
    return [path for path in found if not path.name.endswith(GENERATED)]


def test_all_rooms_have_files():
    rooms = {path.relative_to(ROOT).parts[0] for path in files()}
    assert rooms == set(MAY_IMPORT)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports(room):
    paths = [path.relative_to(ROOT).as_posix() for path in files() if path.relative_to(ROOT).parts[0] == room]
    assert [p for path in paths for p in problems(path, (ROOT / path).read_text())] == []


def test_generated_files_import_no_other_room():
    """They are as protoc made them, but for the package's name in front."""
    for path in (ROOT / "serve" / "proto").glob("*_pb2*.py"):
        assert {room_of(name) for _, name in imports(path.read_text())} <= {None, "serve"}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/a.py", "import pallasite.sharding.mesh"),
        ("kernels/a.py", "from pallasite.models import rope"),
        ("sharding/a.py", "from pallasite import kernels"),
        ("models/a.py", "from pallasite.serve.types import Request"),
        ("models/a.py", "from pallasite.convert import load"),
        ("convert/formats/a.py", "from pallasite.kernels.int4_matmul import dequantize"),
        ("convert/a.py", "def f():\n    from pallasite import pipeline"),
        ("serve/a.py", "from pallasite import pipeline"),
        ("api/a.py", "from pallasite.models.config import ModelConfig"),
        ("serve/a.py", "from .types import Request"),
        ("serve/grpc/a.py", "from .. import engine"),
        ("models/a.py", "from . import rope"),
        ("serve/engine.py", "import grpc"),
        ("serve/engine.py", "from grpc_health.v1 import health"),
        ("api/a.py", "import grpc.aio"),
        ("models/a.py", "if True:\n    import torch.nn as nn"),
        ("serve/a.py", "from models.rope import apply_rope"),
    ],
)
def test_the_rule_finds(path, source):
    assert len(problems(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("models/a.py", "from pallasite.kernels.int4_matmul import int4_matmul\nfrom pallasite.models import rope"),
        ("serve/a.py", "from pallasite.convert import load\nimport jax"),
        ("serve/grpc/a.py", "import grpc\nfrom grpc_health.v1 import health"),
        ("api/a.py", "from pallasite import EngineConfig\nfrom pallasite.serve import types"),
    ],
)
def test_the_rule_allows(path, source):
    assert problems(path, source) == []
