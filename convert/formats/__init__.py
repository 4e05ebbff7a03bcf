"""Readers of other people's checkpoints; `open_source` tells by what lies at a path which one to use, or ours."""

from pathlib import Path

from pallasite.convert.source import Source


def open_source(path: str | Path) -> Source:
    """Open a checkpoint: one of ours, a Hugging Face folder, a GGUF file, or a folder that holds just one of these.

    Raises FileNotFoundError if nothing is there, ValueError if it is none of these, or is damaged or unfinished.
    """
    # Each reader brings its libraries along; only the one that is needed is imported.
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if path.is_file():
        return _open_file(path)
    from pallasite.convert import checkpoint

    if (path / checkpoint.MANIFEST).exists():
        return checkpoint.Checkpoint(path)
    if checkpoint.is_partial(path):
        raise ValueError(f"{path}: is an unfinished conversion; convert again, with --resume to go on with it")
    if (path / "config.json").exists():
        from pallasite.convert.formats.huggingface import HuggingFaceSource

        return HuggingFaceSource(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _open_file(files[0])
    if files:
        raise ValueError(f"{path}: holds {len(files)} GGUF files; name one: {', '.join(f.name for f in files)}")
    if not any(path.iterdir()):
        raise ValueError(f"{path}: is an empty folder")
    raise ValueError(
        f"{path}: holds no checkpoint: neither {checkpoint.MANIFEST} (ours), "
        "nor config.json (Hugging Face), nor a .gguf file"
    )


def _open_file(path: Path) -> Source:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"GGUF":
        from pallasite.convert.formats.gguf import GGUFSource

        return GGUFSource(path)
    if path.suffix == ".safetensors":
        raise ValueError(f"{path}: is a single safetensors file; give the folder that holds it and its config.json")
    raise ValueError(f"{path}: is not a GGUF file; a Hugging Face checkpoint is given as its folder")
