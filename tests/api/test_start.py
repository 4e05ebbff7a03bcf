"""Processes of their own: the compilation cache between two starts, an exit without close(), a fork."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

OPEN = """
import contextlib, os, sys, threading, time
import jax, jax.numpy as jnp

jnp.ones(3) + 1  # as in a notebook: JAX has computed something before the cache is set up
counts = {"cache_hits": 0, "cache_misses": 0}

def count(event, **_):
    name = event.removeprefix("/jax/compilation_cache/")
    if name in counts:
        counts[name] += 1

jax.monitoring.register_event_listener(count)

from support.compiling import compile_quickly
from pallasite import EngineClosed, EngineConfig, GenerationConfig, pipeline

compile_quickly()
slots = int(sys.argv[2])
config = EngineConfig(
    max_batch_size=slots, max_prefill_token_num=64, cache_max_entry_count=65, cache_block_seq_len=16
)
start = time.monotonic()
pipe = pipeline(sys.argv[1], config, progress=False)
seconds = time.monotonic() - start
long = GenerationConfig(max_new_tokens=200, ignore_eos=True)
short = GenerationConfig(max_new_tokens=3, ignore_eos=True)
"""


def start(code: str, checkpoint: Path, slots: int = 4, **env: str) -> subprocess.Popen[str]:
    """A process that has opened the checkpoint and goes on with `code`. With 4 slots it takes the programs that the
    other tests have compiled."""
    kept = {k: v for k, v in os.environ.items() if k != "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"}
    tests = str(Path(__file__).parents[1])
    kept["PYTHONPATH"] = os.pathsep.join([tests, *filter(None, [kept.get("PYTHONPATH")])])
    if "XDG_CACHE_HOME" in env:
        kept.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-c", OPEN + textwrap.dedent(code), str(checkpoint), str(slots)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=kept | env)


def test_g05_the_second_start_compiles_nothing(checkpoint, tmp_path):
    """Case G05: the cache is used, where a user has set nothing up and JAX was in use before."""
    code = """
    print(counts["cache_hits"], counts["cache_misses"], seconds, len(pipe.frontend.engine.programs._programs))
    pipe.close()
    """
    found = []
    for _ in range(2):
        process = start(code, checkpoint, slots=1, XDG_CACHE_HOME=str(tmp_path))
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        found.append([float(word) for word in out.split()])
    (_, misses, first, programs), (hits, later_misses, second, _) = found
    assert any((tmp_path / "pallasite" / "programs").iterdir())
    assert misses >= programs
    assert hits >= programs
    assert later_misses == 0
    print(f"start: {first:.1f} s, then {second:.1f} s")
    assert second < first


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "answering"])
def test_exit_without_close(checkpoint, busy):
    """The interpreter ends: nothing hangs, nothing crashes, and the exit code is the program's own."""
    code = f"""
    if {busy}:
        stream = pipe.stream_infer(["hello"] * 8, long)
        next(stream)
        def ask():
            with contextlib.suppress(EngineClosed):
                pipe(["hello"] * 8, long)
        threading.Thread(target=ask, daemon=True).start()
    print("leaving", flush=True)
    sys.exit(3)
    """
    process = start(code, checkpoint)
    assert process.stdout is not None
    assert process.stdout.readline() == "leaving\n"
    leaving = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    assert time.monotonic() - leaving < 10
    assert "Traceback" not in err


FORK = """
import signal

uses = [
    lambda: pipe("hello", short),
    lambda: next(pipe.stream_infer("hello", short)),
    lambda: pipe.get_logits([5]),
    lambda: print("closed: no fork", pipe.close(), flush=True),
]
for use in uses:
    child = os.fork()
    if not child:
        signal.alarm(5)
        try:
            use()
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        os._exit(0)
    print(os.waitpid(child, 0)[1], pipe("hello", short).finish_reason, flush=True)
pipe.close()
"""


def test_g09_a_fork_is_told(checkpoint):
    """Case G09: in a forked child neither the engine's thread nor JAX lives on. The child is told at once, and the
    parent serves on."""
    process = start(FORK, checkpoint)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    lines = out.splitlines()
    assert lines[1::2] == ["0 length"] * 4, out
    assert all("fork" in line for line in lines[::2]), out
