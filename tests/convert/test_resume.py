"""`--resume`: whatever stops a conversion, the next one ends with the same arrays and manifest, bit for bit."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from pallasite.convert import quantize, writer
from pallasite.convert.convert import convert
from pallasite.convert.formats import open_source
from pallasite.convert.produce import Plain

WORKER = """
import json, os, signal, sys
from pallasite.convert import convert, writer
os.fsync = lambda handle: None  # a kill takes nothing from the system's memory; only a power cut does

def kill_at(moment):
    event, path = moment
    def watch(name, arguments):
        if name == event and str(arguments[0]).endswith(path):
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(watch)

for line in sys.stdin:
    arguments = json.loads(line)
    moment = arguments.pop("kill_at", None)
    writer.PENDING_BYTES = arguments.pop("pending", 60_000)  # a part is some tensors of the small model
    pid = os.fork()
    if pid == 0:
        if moment:
            kill_at(moment)
        convert.convert(**arguments, progress=False)
        os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Worker:
    """Runs each conversion in a process of its own, forked from one that has imported what it takes."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, src: Path, dst: Path, **options: Any) -> int:
        """Returns the process's number."""
        assert self.process.stdin is not None
        print(json.dumps({"src": str(src), "dst": str(dst), **options}), file=self.process.stdin, flush=True)
        return self._number()

    def wait(self) -> int:
        """The exit code of the conversion that was started last; -9 for one that was killed."""
        return self._number()

    def _number(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def worker():
    worker = Worker()
    yield worker
    with worker.process as process:
        process.stdin.close()


@pytest.fixture
def hf(tmp_path, config, tensors, write_hf):
    return write_hf(tmp_path / "hf", config, tensors)


def contents(folder):
    """All that a checkpoint says: the bytes of its files, and of its arrays."""
    opened = open_source(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    arrays = {}
    for name in opened.info.specs:
        for part, array in writer.array_parts(name, opened.read(name)).items():
            arrays[part] = (array.dtype, array.shape, array.tobytes())
    return files, arrays


def parts(dst):
    """Parts that are written, by the inodes of their lists of tensors."""
    return {path.stat().st_ino for path in writer.workshop(dst).glob("parts/*/tensors.json")}


def looks_finished(folder):
    try:
        open_source(folder)
    except (ValueError, OSError):
        return False
    return True


def test_killed_at_ten_random_moments(tmp_path, hf, worker):
    options = {"quantize": "int4", "group_size": 32, "pending": 12_000}
    worker.start(hf, tmp_path / "whole", **options)
    began = time.monotonic()
    assert worker.wait() == 0
    duration = time.monotonic() - began
    expected = contents(tmp_path / "whole")
    rng, written, kills = random.Random(7), [], 0
    for trial in range(10):
        dst = tmp_path / f"out{trial}"
        pid = worker.start(hf, dst, **options)
        time.sleep(rng.uniform(0, duration))
        os.kill(pid, signal.SIGKILL)
        kills += worker.wait() == -signal.SIGKILL
        assert not looks_finished(writer.workshop(dst))
        assert dst.exists() == looks_finished(dst)
        written.append(len(parts(dst)))
        if not looks_finished(dst):
            worker.start(hf, dst, resume=True, **options)
            assert worker.wait() == 0
        assert contents(dst) == expected
        assert sorted(tmp_path.glob(f"out{trial}*")) in ([dst], [dst, writer.workshop(dst)])
    assert kills >= 3
    assert any(written), written


def test_killed_again_and_again(tmp_path, hf, worker):
    """Each attempt is killed as soon as it has written one more part: none of them is written twice."""
    worker.start(hf, tmp_path / "whole")
    assert worker.wait() == 0
    dst, known = tmp_path / "out", set()
    for attempt in range(4):
        pid = worker.start(hf, dst, resume=attempt > 0)
        while not parts(dst) - known:
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        assert worker.wait() == -signal.SIGKILL
        assert parts(dst) >= known
        known = parts(dst)
    worker.start(hf, dst, resume=True)
    assert worker.wait() == 0
    assert contents(dst) == contents(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out", "whole"]


@pytest.fixture
def dst(tmp_path, hf):
    """An older checkpoint, to be told by its dtype, where the new one shall be."""
    convert(hf, tmp_path / "out", dtype="float16", progress=False)
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("moment", "state"),
    [
        (("os.link", ""), "old"),  # gathering the parts
        (("os.rename", "state/_METADATA"), "old"),  # Orbax joins them
        (("os.rename", "arrays.partial_save"), "old"),
        (("os.rename", ".manifest.json.new"), "old"),
        (("os.remove", "tensors.json"), "old"),  # all is whole
        (("os.rename", "/out"), "old"),
        (("os.rename", "/whole"), "aside"),
        (("os.rmdir", "replaced"), "new"),
        (("os.remove", ".unfinished"), "new"),
    ],
    ids=lambda value: "-".join(value).replace("/", "") if isinstance(value, tuple) else value,
)
def test_killed_while_it_finishes(tmp_path, hf, dst, worker, moment, state):
    """Just before a change of the disk, while an older checkpoint is replaced: the old one is there, or the new one."""
    worker.start(hf, dst, force=True, kill_at=moment)
    assert worker.wait() == -signal.SIGKILL
    left = writer.workshop(dst)
    assert not looks_finished(left)
    there = left / "replaced" if state == "aside" else dst
    assert open_source(there).info.dtypes["norm.weight"] == ("float32" if state == "new" else "float16")
    worker.start(hf, dst, force=state != "new", resume=True)
    assert worker.wait() == 0
    convert(hf, tmp_path / "new", progress=False)
    assert contents(dst) == contents(tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "new", "out"]


def test_what_was_put_aside_comes_back(hf, dst, worker, monkeypatch):
    """Killed between the two renames; the next conversion is not a resume, and fails."""
    old = contents(dst)
    worker.start(hf, dst, force=True, kill_at=("os.rename", "/whole"))
    assert worker.wait() == -signal.SIGKILL
    assert not dst.exists()
    monkeypatch.setattr(Plain, "store", fails)
    with pytest.raises(ValueError, match="can't be made"):
        convert(hf, dst, progress=False)
    assert contents(dst) == old
    assert not writer.workshop(dst).exists()


def fails(*arguments):
    raise ValueError("can't be made")


class Counting(Plain):
    """A producer that makes two tensors at a time and needs to remember how many it has made."""

    calibrated = True
    stop_at = 6

    def tensors(self, done, scratch):
        file = scratch / "count"
        count = int(file.read_text()) if file.exists() else 0
        assert count >= len(done)
        names = [name for name in self.source.info.specs if name not in done]
        for pair in zip(names[::2], names[1::2], strict=False):
            if count == self.stop_at:
                raise KeyboardInterrupt
            count = len(self.source.info.specs) - len(names) + names.index(pair[1]) + 1
            file.write_text(str(count))
            yield {name: self.source.read(name) for name in pair}
        if len(names) % 2:
            yield {names[-1]: self.source.read(names[-1])}


def test_scratch_lasts_and_what_belongs_together_stays_together(tmp_path, hf, monkeypatch):
    monkeypatch.setitem(quantize.METHODS, "counting", Counting)
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("some words")
    modified = (text / "a.txt").stat().st_mtime_ns
    options = {"quantize": "counting", "calibration": text, "progress": False}
    with monkeypatch.context() as patch:
        patch.setattr(writer, "PENDING_BYTES", 1)
        with pytest.raises(KeyboardInterrupt):
            convert(hf, tmp_path / "out", **options)
    lists = sorted(tmp_path.glob("out.partial/parts/*/tensors.json"))
    assert [len(json.loads(path.read_text())["tensors"]) for path in lists] == [2, 2, 2]
    assert (tmp_path / "out.partial" / "scratch" / "count").read_text() == "6"
    monkeypatch.setattr(Counting, "stop_at", None)
    (text / "a.txt").write_text("other words")
    with pytest.raises(ValueError, match=r"text/a\.txt was 10 bytes of .*, is 11 bytes of "):
        convert(hf, tmp_path / "out", resume=True, **options)
    (text / "a.txt").write_text("some words")
    os.utime(text / "a.txt", ns=(modified, modified))
    with pytest.raises(ValueError, match="samples was 128, is 64"):
        convert(hf, tmp_path / "out", resume=True, samples=64, **options)
    convert(hf, tmp_path / "out", resume=True, **options)
    convert(hf, tmp_path / "plain", progress=False)
    assert contents(tmp_path / "out")[1] == contents(tmp_path / "plain")[1]
    assert not (tmp_path / "out.partial").exists()


def interrupted(src, dst, monkeypatch, **options):
    """Leave what a conversion has done that was interrupted after some tensors."""
    calls = []

    def stops(self, name, spec, tensor):
        calls.append(name)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return store(self, name, spec, tensor)

    store = Plain.store
    with monkeypatch.context() as patch:
        patch.setattr(writer, "PENDING_BYTES", 1)
        patch.setattr(Plain, "store", stops)
        with pytest.raises(KeyboardInterrupt):
            convert(src, dst, progress=False, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float16"}, "dtype was bfloat16, is float16"),
        ({"quantize": "int4"}, "quantize was None, is int4; group_size was None, is 128"),
        ("config.json", r"hf/config\.json was \d+ bytes of .*, is \d+ bytes of "),
        ("model.safetensors", r"hf/model\.safetensors was \d+ bytes of .*, is \d+ bytes of "),
        ("vocab.json", r"hf/vocab\.json was None, is 2 bytes of "),
    ],
)
def test_another_conversion_is_not_resumed(tmp_path, hf, monkeypatch, change, message):
    interrupted(hf, tmp_path / "out", monkeypatch, dtype="bfloat16")
    kept, options = parts(tmp_path / "out"), {"dtype": "bfloat16"}
    if isinstance(change, dict):
        options |= change
    elif (hf / change).exists():
        os.utime(hf / change, (0, 0))
    else:
        (hf / change).write_text("{}")
    with pytest.raises(ValueError, match=f"out.partial: can't resume another conversion: {message}"):
        convert(hf, tmp_path / "out", resume=True, progress=False, **options)
    assert parts(tmp_path / "out") == kept  # refused, and nothing lost
    convert(hf, tmp_path / "out", progress=False, **options)  # starts anew
    assert looks_finished(tmp_path / "out")


def test_what_is_done_is_not_done_again(tmp_path, hf, monkeypatch, capsys):
    interrupted(hf, tmp_path / "out", monkeypatch)
    read = []
    monkeypatch.setattr(Plain, "store", lambda self, name, spec, tensor: read.append(name) or tensor)
    convert(hf, tmp_path / "out", resume=True)
    assert read == list(open_source(hf).info.specs)[7:]
    assert "100%" in capsys.readouterr().err


def test_a_resume_of_nothing_starts(tmp_path, hf):
    convert(hf, tmp_path / "out", resume=True, progress=False)
    assert looks_finished(tmp_path / "out")
    with pytest.raises(ValueError, match="exists and is not empty"):
        convert(hf, tmp_path / "out", resume=True, progress=False)


def test_a_file_system_without_links(tmp_path, hf, monkeypatch):
    def refuses(src, dst):
        raise PermissionError

    convert(hf, tmp_path / "linked", progress=False)
    monkeypatch.setattr(os, "link", refuses)
    convert(hf, tmp_path / "copied", progress=False)
    assert contents(tmp_path / "copied") == contents(tmp_path / "linked")


# What the disk refuses, on the command line: one line, exit code 2.

COMMAND = """
import os, resource, sys
from pallasite import cli
from pallasite.convert import writer
{0}
sys.exit(cli.main(["convert", *sys.argv[1:]]))
"""

FILLS_UP = """
writer.PENDING_BYTES = 1
os.fsync = lambda handle: None
commit, count = writer.CheckpointWriter.commit, 0
def fills_up(self):  # after five tensors no file may grow any more
    global count
    count += 1
    if count == 6:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    commit(self)
writer.CheckpointWriter.commit = fills_up
"""

ANYBODY = """
enter = writer.CheckpointWriter.__enter__
def as_anybody(self):  # root may write anywhere
    if os.geteuid() == 0:
        os.seteuid(65534)
    return enter(self)
writer.CheckpointWriter.__enter__ = as_anybody
"""


def command(setup, *arguments):
    return subprocess.run(
        [sys.executable, "-c", COMMAND.format(setup), *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_a_disk_that_fills_up(tmp_path, hf):
    run = command(FILLS_UP, hf, tmp_path / "out", "--quiet")
    assert run.returncode == 2
    told, error = run.stderr.splitlines()
    assert told.endswith("out.partial: holds what is done; the same conversion with --resume (resume=True) goes on")
    assert re.fullmatch(r"pallasite: error: .*/out\.partial/parts/00005: can't write \d+ MB: File too large", error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out.partial"]
    run = command("", hf, tmp_path / "out", "--resume")
    assert run.returncode == 0, run.stderr
    convert(hf, tmp_path / "whole", progress=False)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert re.fullmatch(r"read \d+\.\d kB in \d+\.\d s: [\d.]+ [kM]?B/s", run.stdout.splitlines()[-1])


def test_a_target_that_may_not_be_written(config, tensors, write_hf):
    with tempfile.TemporaryDirectory() as folder:  # pytest's own may be entered by its owner alone
        src = write_hf(Path(folder) / "hf", config, tensors)
        (src / "model.safetensors").chmod(0o444)
        os.chmod(folder, 0o555)
        run = command(ANYBODY, src, Path(folder) / "out", "--quiet")
        assert run.returncode == 2
        [line] = run.stderr.splitlines()
        assert line.startswith("pallasite: error: ")
        assert "Permission denied" in line
        assert not (Path(folder) / "out").exists()
        os.chmod(folder, 0o755)
