"""Calls that end before their answer does: the engine stops working for them and has its pages back (F04, D09)."""

import concurrent.futures
import random
import subprocess
import sys
import threading
import time

import grpc
import pytest
from support.live_server import LiveServer, failure, idle, ids_request, outcome, wait_for

from pallasite.serve.engine import Engine
from pallasite.serve.proto import pallasite_pb2 as pb

LONG = {"max_new_tokens": 500}


def test_mid_stream(live: LiveServer, engine: Engine, slow: None):
    calls = [live.stub.Generate(ids_request([i, i + 1], **LONG)) for i in range(3)]
    for call in calls:
        next(call)
        next(call)
    assert engine.stats().pages_free < engine.stats().pages_total
    start = time.monotonic()
    for call in calls:
        call.cancel()
        assert failure(call).code() is grpc.StatusCode.CANCELLED
    wait_for(lambda: idle(engine), 5)
    assert time.monotonic() - start < 5
    live.canary()


def test_before_the_first_token(live: LiveServer, engine: Engine, slow: None):
    """Of more calls than slots, those that wait are cancelled too."""
    calls = [live.stub.Generate(ids_request([i, 1], **LONG)) for i in range(9)]
    wait_for(lambda: engine.stats().waiting == 5)
    for call in calls:
        call.cancel()
    wait_for(lambda: idle(engine), 5)
    live.canary()


def test_while_the_prompt_is_prepared(live: LiveServer, engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """Nothing reaches the engine, though the thread that tokenizes can't be stopped."""
    started, go_on = threading.Event(), threading.Event()
    prepare = live.frontend.requests

    def slowly(*args, **kwargs):
        started.set()
        go_on.wait(20)
        return prepare(*args, **kwargs)

    submitted = []
    monkeypatch.setattr(live.frontend, "requests", slowly)
    monkeypatch.setattr(engine, "submit", submitted.append)
    call = live.stub.Generate(ids_request([1], "in preparation", **LONG))
    assert started.wait(20)
    call.cancel()
    wait_for(lambda: not live.server._service._live)
    go_on.set()
    time.sleep(0.1)
    assert not submitted
    monkeypatch.undo()
    live.canary()


def test_deadline(live: LiveServer, engine: Engine, slow: None):
    start = time.monotonic()
    call = live.stub.Generate(ids_request([1, 2], **LONG), timeout=0.3)
    responses: list[pb.GenerateResponse] = []
    assert outcome(call, responses) is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < len([i for r in responses for i in r.token_ids]) < 500
    wait_for(lambda: idle(engine), 5)
    assert time.monotonic() - start < 5


def test_choices_of_one_call(live: LiveServer, engine: Engine, slow: None):
    call = live.stub.Generate(ids_request([1, 2], n=6, **LONG))
    next(call)
    call.cancel()
    wait_for(lambda: idle(engine), 5)


CLIENT = """
import sys, grpc
from pallasite.serve.proto import pallasite_pb2 as pb, pallasite_pb2_grpc
stub = pallasite_pb2_grpc.PallasiteStub(grpc.insecure_channel(sys.argv[1]))
config = pb.GenerationConfig(max_new_tokens=500)
calls = [stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[i]), generation_config=config)) for i in range(6)]
next(calls[0])
print("streaming", flush=True)
sys.stdin.read()
"""


def test_killed_client(live: LiveServer, engine: Engine, slow: None):
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, live.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "streaming\n"
        assert not idle(engine)
        client.kill()
    wait_for(lambda: idle(engine), 5)
    live.canary()


def test_hundreds_of_clients_that_vanish(live: LiveServer, engine: Engine, caplog: pytest.LogCaptureFixture):
    """400 calls cancelled anywhere in their life leave nothing: no page, no id, no thread, no line in the log."""
    threads = threading.active_count()
    rng = random.Random(0)
    plans = [(rng.randrange(60), rng.choice([0, 0, 1, 2, 50]), rng.choice([1, 1, 3])) for _ in range(400)]

    def vanish(plan: tuple[int, int, int]) -> None:
        token, reads, n = plan
        call = live.stub.Generate(ids_request([token, 3], n=n, max_new_tokens=400))
        for _ in range(reads):
            if next(call, None) is None:
                break
        call.cancel()

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(vanish, plans))
    wait_for(lambda: idle(engine))
    wait_for(lambda: not live.server._service._live)
    assert not engine._sequences
    live.canary()
    assert threading.active_count() <= threads + 8  # gRPC's and asyncio's own, which stay
    assert not caplog.records


def test_cancel_after_the_end(live: LiveServer):
    call = live.stub.Generate(ids_request([1], "done", max_new_tokens=1))
    assert list(call)[-1].finish_reason == pb.FINISH_REASON_LENGTH
    call.cancel()
    live.canary()
