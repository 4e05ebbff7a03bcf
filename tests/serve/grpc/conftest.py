"""A real server on a real port, over the real engine with the model whose arithmetic can be done by hand."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.hand_model import hand_engine, hand_model
from support.live_server import SESSION_LEN, SLOTS, TEXT_VOCAB, LiveServer, tiny_tokenizer

from pallasite.serve.engine import Engine
from pallasite.serve.frontend import Frontend


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    model = hand_model(TEXT_VOCAB, max_session_len=SESSION_LEN)
    engine = hand_engine(model, session_len=SESSION_LEN, max_batch_size=SLOTS, cache_max_entry_count=160)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def frontend(engine: Engine) -> Frontend:
    """With the tiny tokenizer; no token ends an answer."""
    return Frontend(engine, tiny_tokenizer(), "hand", "HandModel", ())


@pytest.fixture(scope="module")
def live(frontend: Frontend) -> Iterator[LiveServer]:
    """A server that the module's tests share."""
    server = LiveServer(frontend)
    yield server
    server.close()


@pytest.fixture
def start_server() -> Iterator[Callable[..., LiveServer]]:
    """start_server(frontend, **options): servers of the test's own."""
    with contextlib.ExitStack() as stack:

        def start(frontend: Frontend | None, **options: Any) -> LiveServer:
            server = LiveServer(frontend, **options)
            stack.callback(server.close)
            return server

        yield start


@pytest.fixture
def slow(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes 10 ms more a decode launch, so that an answer lasts for seconds."""
    decode = engine.programs.decode

    def slowly(*args: Any) -> Any:
        time.sleep(0.01)
        return decode(*args)

    monkeypatch.setattr(engine.programs, "decode", slowly)
    monkeypatch.setattr("pallasite.serve.engine.LAUNCH_SECONDS", 1e-9)
