"""A conversion that does not finish leaves nothing that looks finished, and keeps what was there."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pallasite.convert.convert import convert
from pallasite.convert.formats import open_source
from pallasite.convert.quantize import rtn

HANGS = """
import sys, time
from pallasite.convert import convert, writer
writer.PENDING_BYTES = 1  # every tensor is on the disk as soon as it is added
add, count = writer.CheckpointWriter.add, 0
def slow(self, name, spec, tensor):
    global count
    add(self, name, spec, tensor)
    count += 1
    if count == 5:
        print("half way", flush=True)
        time.sleep(60)
writer.CheckpointWriter.add = slow
convert.convert(sys.argv[1], sys.argv[2], force=True, progress=False)
"""


@pytest.fixture
def hf(tmp_path, config, tensors, write_hf):
    return write_hf(tmp_path / "hf", config, tensors)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def stopped_half_way(hf, dst, how):
    """Start a conversion in another process and stop it by a signal when some tensors are written."""
    process = subprocess.Popen([sys.executable, "-c", HANGS, hf, dst], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half way\n"
        process.send_signal(how)
        process.wait(timeout=30)
        return process.returncode


@pytest.mark.parametrize("existing", [False, True])
def test_kill(tmp_path, hf, tensors, existing):
    dst = tmp_path / "out"
    if existing:
        convert(hf, dst, progress=False)
    assert stopped_half_way(hf, dst, signal.SIGKILL) == -signal.SIGKILL
    assert dst.exists() == existing
    left = tmp_path / "out.partial"
    assert len(list(left.glob("parts/*/tensors.json"))) == 4
    with pytest.raises(ValueError, match="is an unfinished conversion; convert again, with --resume"):
        open_source(left)
    with pytest.raises(ValueError, match=r"has neither model\.safetensors"):
        open_source(left / "whole")
    if existing:
        np.testing.assert_array_equal(open_source(dst).read("embed.weight"), tensors["model.embed_tokens.weight"])
    convert(hf, dst, force=existing, progress=False)  # a new attempt needs no cleaning by hand
    np.testing.assert_array_equal(open_source(dst).read("embed.weight"), tensors["model.embed_tokens.weight"])
    assert names(tmp_path) == ["hf", "out"]


def test_interrupt_from_the_keyboard(tmp_path, hf):
    assert stopped_half_way(hf, tmp_path / "out", signal.SIGINT) != 0
    assert names(tmp_path) == ["hf", "out.partial"]
    assert len(list(tmp_path.glob("out.partial/parts/*/tensors.json"))) == 4


def test_a_conversion_that_still_runs_is_left_alone(tmp_path, hf):
    dst = tmp_path / "out"
    with subprocess.Popen([sys.executable, "-c", HANGS, hf, dst], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half way\n"
        for resume in (False, True):
            with pytest.raises(OSError, match=r"out\.partial: another conversion to the same place is at work"):
                convert(hf, dst, resume=resume, progress=False)
        assert len(list(tmp_path.glob("out.partial/parts/*/tensors.json"))) == 4
        process.kill()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, MemoryError])
@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_half_way(tmp_path, hf, monkeypatch, tensors, error, existing):
    dst = tmp_path / "out"
    if existing:
        convert(hf, dst, progress=False)
    calls = []

    def fails(name, w, group_size):
        calls.append(name)
        if len(calls) == 3:
            raise error
        return real(name, w, group_size)

    real = rtn.quantize
    monkeypatch.setattr(rtn, "quantize", fails)
    monkeypatch.setattr("pallasite.convert.writer.PENDING_BYTES", 1)
    with pytest.raises(error):
        convert(hf, dst, quantize="int4", force=True, progress=False)
    # What fails for another reason than its input may be resumed.
    kept = ["out.partial"] if error is not ValueError else []
    assert names(tmp_path) == (["hf", "out", *kept] if existing else ["hf", *kept])
    if existing:
        assert open_source(dst).info.group_sizes == {}
        np.testing.assert_array_equal(open_source(dst).read("embed.weight"), tensors["model.embed_tokens.weight"])


def test_a_full_disk(tmp_path, hf):
    """No file may grow past 40 kB, as on a disk that is full: an OSError, and nothing left."""
    script = (
        "import sys, resource; from pallasite.convert.convert import convert\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))\n"
        "try: convert(sys.argv[1], sys.argv[2], progress=False)\n"
        "except OSError as error: print('refused:', error)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, hf, tmp_path / "out"], capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"refused: .*/out\.partial/parts/00000: can't write 1 MB: File too large\n", run.stdout)
    assert run.stderr == ""
    assert names(tmp_path) == ["hf"]


def test_force_replaces_only_when_whole(tmp_path, hf, config, tensors, write_hf, monkeypatch):
    dst = tmp_path / "out"
    convert(hf, dst, progress=False)
    newer = {name: array + 1 for name, array in tensors.items()}
    write_hf(tmp_path / "newer", config, newer)
    convert(tmp_path / "newer", dst, force=True, progress=False)
    np.testing.assert_array_equal(open_source(dst).read("norm.weight"), newer["model.norm.weight"])
    assert names(tmp_path) == ["hf", "newer", "out"]


def test_a_rename_that_fails_brings_the_old_one_back(tmp_path, hf, monkeypatch):
    dst = tmp_path / "out"
    convert(hf, dst, progress=False)
    rename = Path.rename

    def fails(self, target):
        if self.name == "whole":
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="no"):
        convert(hf, dst, force=True, progress=False)
    assert names(tmp_path) == ["hf", "out", "out.partial"]
    assert open_source(dst).info.format == "pallasite"
    monkeypatch.setattr(Path, "rename", rename)
    convert(hf, dst, force=True, resume=True, progress=False)  # only the rename is left
    assert names(tmp_path) == ["hf", "out"]
    assert open_source(dst).info.format == "pallasite"
