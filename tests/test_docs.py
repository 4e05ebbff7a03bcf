"""What the documents say is true: their code runs, their links lead somewhere, the pictures are whole."""

import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from support.small_checkpoint import with_tokenizer

from pallasite import cli

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tmp_path_factory.mktemp("docs") / "model")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_readme_shows_the_notebook_api_in_ten_lines(model, capsys):
    [code] = blocks(ROOT / "README.md", "python")
    assert code.count('"path/to/model"') == 1
    assert len([line for line in code.splitlines() if line]) == 10
    exec(compile(code.replace("path/to/model", str(model)), "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert len(out) > 500  # this model never stops on its own
    assert "0 length" in out


def test_the_example_runs(model, capsys):
    spec = importlib.util.spec_from_file_location("notebook_api", ROOT / "examples" / "notebook_api.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(str(model))
    out = capsys.readouterr().out
    assert out.count("== ") == 7
    assert "nats a token" in out
    assert "finish_reason='error', tokens=0+0, error='the prompt is empty'" in out


def test_commands_in_the_readme_parse():
    """Every `pallasite ...` line is one that the command line takes."""
    lines = re.findall(r"^    (pallasite .*?)(?:\s+#.*)?$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {line.split()[1] for line in lines} == {"convert", "inspect", "serve", "chat"}
    for line in lines:
        assert callable(cli.parser().parse_args(line.split()[1:]).run), line


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://", "#")):
            assert (page.parent / target.split("#")[0]).exists(), target


def test_the_rooms_in_the_readme_are_all_there():
    named = set(re.findall(r"`(\w+)/`", (ROOT / "README.md").read_text()))
    rooms = {p.name for p in ROOT.iterdir() if not p.name.startswith(".") and any(p.glob("*.py"))}
    assert (rooms | {"docs", "examples"}) - {"build"} <= named
    assert all((ROOT / name).is_dir() for name in named if name != "parity")


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").glob("*.svg")), ids=lambda p: p.name)
def test_pictures(picture):
    """Well-formed, with words for those who can't see them, and readable on a dark page."""
    root = ElementTree.parse(picture).getroot()
    assert root.find("{*}title") is not None
    assert root.find("{*}desc") is not None
    assert "prefers-color-scheme: dark" in picture.read_text()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_that_are_named_exist(page):
    """Paths such as serve/engine.py, written as code, name files of the repository (docs/cases.md: of tests/)."""
    folders = "api|models|sharding|kernels|convert|serve|tests|docs|examples|benchmarks"
    for path in re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text()):
        if page.name != "cases.md" or path.startswith("tests/"):
            assert (ROOT / path).exists(), path
