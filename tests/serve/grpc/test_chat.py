"""The commands `serve` and `chat`, and the client under them."""

import argparse
import builtins
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from support.live_server import LiveServer, idle, wait_for

from pallasite.serve.engine import Engine
from pallasite.serve.frontend import Frontend
from pallasite.serve.grpc.cli import add_commands
from pallasite.serve.grpc.client import CallFailed, Client
from pallasite.serve.proto import pallasite_pb2 as pb


def run(*arguments: str) -> int:
    """A command as the top-level command line runs it."""
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


def answer(live: LiveServer, *turns: tuple[str, str], max_new_tokens: int = 8) -> str:
    """What the server says to a conversation, by a call of our own."""
    messages = pb.Messages(messages=[pb.Message(role=r, content=c) for r, c in turns])
    config = pb.GenerationConfig(max_new_tokens=max_new_tokens)
    call = live.stub.Generate(pb.GenerateRequest(messages=messages, generation_config=config))
    return "".join(r.text for r in call)


@pytest.fixture
def closed_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_once(live: LiveServer, capsys: pytest.CaptureFixture[str]):
    assert run("chat", "--once", "ab c", "--port", str(live.port), "--max-new-tokens", "8") == 0
    assert capsys.readouterr().out == answer(live, ("user", "ab c")) + "\n"


def test_once_with_options(live: LiveServer, capsys: pytest.CaptureFixture[str]):
    options = ["--address", live.address, "--system", "b b", "--max-new-tokens", "8"]
    assert run("chat", "--once", "ab c", *options) == 0
    assert capsys.readouterr().out == answer(live, ("system", "b b"), ("user", "ab c")) + "\n"
    sampled = []
    for seed in ("1", "1", "2"):
        assert run("chat", "--once", "ab c", *options, "--temperature", "2", "--seed", seed) == 0
        sampled.append(capsys.readouterr().out)
    assert sampled[0] == sampled[1] != sampled[2]


def test_once_streams(live: LiveServer, slow: None, monkeypatch: pytest.MonkeyPatch):
    """The answer is printed as it is made, not at its end."""
    times: list[float] = []
    monkeypatch.setattr(builtins, "print", lambda *args, **kwargs: times.append(time.monotonic()))
    assert run("chat", "--once", "ab c", "--address", live.address, "--max-new-tokens", "60") == 0
    assert len(times) >= 3
    assert times[-1] - times[0] > 0.3


def test_once_fails(live: LiveServer, closed_port: int):
    with pytest.raises(CallFailed, match=rf"^no server answers at 127\.0\.0\.1:{closed_port}$"):
        run("chat", "--once", "a", "--port", str(closed_port))
    with pytest.raises(CallFailed, match=r"INVALID_ARGUMENT: the prompt has \d+ tokens; with session_len"):
        run("chat", "--once", "a " * 2000, "--address", live.address)
    with pytest.raises(ValueError, match=r"^max_new_tokens is 0; it must be an integer in 1\.\."):
        run("chat", "--once", "a", "--address", live.address, "--max-new-tokens", "0")


def test_interrupted_once(live: LiveServer, engine: Engine, slow: None, monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C stops the server's work too."""

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "print", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run("chat", "--once", "a", "--address", live.address)
    wait_for(lambda: idle(engine), 5)


def test_wait(
    start_server: Callable[..., LiveServer], frontend: Frontend, capsys: pytest.CaptureFixture[str], closed_port: int
):
    with pytest.raises(CallFailed, match=rf"no server at 127\.0\.0\.1:{closed_port} was ready within 0\.3 s"):
        run("chat", "--once", "a", "--port", str(closed_port), "--wait", "0.3")
    assert not capsys.readouterr().err
    live = start_server(None)  # it is still loading
    with pytest.raises(CallFailed, match="UNAVAILABLE: the model is still loading"):
        run("chat", "--once", "a", "--address", live.address)
    timer = threading.Timer(2.5, lambda: live.run(live.server.serve_with(frontend)))
    timer.start()
    assert run("chat", "--once", "a", "--address", live.address, "--wait", "30", "--max-new-tokens", "3") == 0
    timer.join()
    captured = capsys.readouterr()
    assert captured.err == f"pallasite: waiting for the server at {live.address} ...\n"
    assert captured.out


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """typed(*lines): what the user types; an exception is raised in place of a line. Then Ctrl-D."""

    def prepare(*lines: str | BaseException) -> None:
        left: Iterator[str | BaseException] = iter(lines)

        def read(prompt: str = "") -> str:
            line = next(left, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", read)

    return prepare


def test_conversation(live: LiveServer, typed: Callable[..., None], capsys: pytest.CaptureFixture[str]):
    typed("ab", "", KeyboardInterrupt(), "c", "/clear", "c", "/exit", "not read")
    assert run("chat", "--address", live.address, "--max-new-tokens", "8") == 0
    first = answer(live, ("user", "ab"))
    second = answer(live, ("user", "ab"), ("assistant", first), ("user", "c"))
    afresh = answer(live, ("user", "c"))
    assert second != afresh
    lines = capsys.readouterr().out.split("Ctrl-D or /exit leaves.\n")
    assert lines[0].startswith(f"hand at {live.address}.")
    assert lines[1] == first + "\n\nCtrl-C stops an answer, /clear starts a new conversation, "
    assert lines[2] == second + "\n" + afresh + "\n"


def test_conversation_goes_on_after_a_refusal(
    live: LiveServer, typed: Callable[..., None], capsys: pytest.CaptureFixture[str]
):
    """The turn that failed is no part of it."""
    typed("a" * 600, "ab")
    assert run("chat", "--address", live.address, "--max-new-tokens", "8") == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(f"pallasite: error: {live.address}: INVALID_ARGUMENT: the prompt has ")
    assert captured.out.endswith(answer(live, ("user", "ab")) + "\n\n")


def test_stopped_answer(
    live: LiveServer,
    engine: Engine,
    slow: None,
    typed: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """Ctrl-C during an answer: the server stops, and what was printed is part of the conversation."""
    original = print
    pieces: list[str] = []

    def interrupted(*args: str, **kwargs: object) -> None:
        original(*args, **kwargs)  # type: ignore[call-overload]
        if kwargs.get("end") == "" and len(pieces) < 4:
            pieces.append(args[0])
            if len(pieces) == 4:
                raise KeyboardInterrupt

    asked: list[pb.GenerateRequest] = []
    generate = Client.generate
    monkeypatch.setattr(builtins, "print", interrupted)
    monkeypatch.setattr(Client, "generate", lambda self, request: asked.append(request) or generate(self, request))
    typed("ab", "c")
    assert run("chat", "--address", live.address, "--max-new-tokens", "60") == 0
    wait_for(lambda: idle(engine), 5)
    assert " [stopped]\n" in capsys.readouterr().out
    assert [m.role for m in asked[1].messages.messages] == ["user", "assistant", "user"]
    assert asked[1].messages.messages[1].content == "".join(pieces)


def test_no_server_to_converse_with(closed_port: int, typed: Callable[..., None]):
    typed("a")
    with pytest.raises(CallFailed, match="no server answers"):
        run("chat", "--port", str(closed_port))


def test_serve_options(monkeypatch: pytest.MonkeyPatch):
    """They reach EngineConfig and the server; those that are not given keep its defaults."""
    pytest.importorskip("pallasite.serve.open")
    from pallasite.serve.config import EngineConfig

    opened: list[tuple] = []

    def open_frontend(path: str, config: EngineConfig, *, name: str | None) -> None:
        opened.append((path, config, name))
        raise ValueError("far enough")

    monkeypatch.setattr("pallasite.serve.open.open_frontend", open_frontend)
    options = "--session-len 100 --max-batch-size 3 --tp 2 --dtype float32 --device cpu --cache-max-entry-count 50 "
    options += (
        "--cache-block-seq-len 32 --no-prefix-caching --max-prefill-token-num 64 --max-queue-size 9 --model-name me"
    )
    for arguments in ([], options.split(), ["--cache-max-entry-count", "0.5"]):
        with pytest.raises(ValueError, match="far enough"):
            run("serve", "some/model", "--port", "0", *arguments)
    assert opened[0] == ("some/model", EngineConfig(), None)
    assert opened[1][1:] == (
        EngineConfig(
            session_len=100,
            max_batch_size=3,
            tp=2,
            dtype="float32",
            device="cpu",
            cache_max_entry_count=50,
            cache_block_seq_len=32,
            enable_prefix_caching=False,
            max_prefill_token_num=64,
            max_queue_size=9,
        ),
        "me",
    )
    assert opened[2][1] == EngineConfig(cache_max_entry_count=0.5)


def test_wrong_serve_options(live: LiveServer, capsys: pytest.CaptureFixture[str]):
    for arguments, message in (
        (["--session-len", "1"], "session_len is 1; it must be an integer in"),
        (["--grace", "-1"], "grace is -1"),
        (["--host", "0.0.0.0"], "--insecure"),
        (["--port", str(live.port)], "Address already in use"),
    ):
        with pytest.raises(ValueError, match=message):
            run("serve", "no/model", *arguments)
    with pytest.raises(SystemExit):
        run("serve", "no/model", "--cache-max-entry-count", "many")
    assert "many" in capsys.readouterr().err


def test_client_as_a_library(live: LiveServer):
    with Client(live.address) as client:
        assert client.serving()
        assert client.model_info().name == "hand"
        stream = client.generate(pb.GenerateRequest(text=""))
        with pytest.raises(CallFailed) as caught:
            list(stream)
    assert caught.value.code == "INVALID_ARGUMENT"
