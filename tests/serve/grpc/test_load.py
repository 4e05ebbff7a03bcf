"""Many calls, and calls that are badly behaved: others don't notice."""

import dataclasses
import time
from collections.abc import Callable

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from support.hand_model import continuation
from support.live_server import SLOTS, TEXT_VOCAB, LiveServer, collect, failure, idle, ids_request, wait_for

from pallasite.serve.engine import Engine
from pallasite.serve.frontend import Frontend
from pallasite.serve.grpc import messages
from pallasite.serve.grpc.mailbox import Delta
from pallasite.serve.proto import pallasite_pb2 as pb
from pallasite.serve.types import StepOutput, TokenLogprob


@pytest.fixture
def short_queue(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request may wait."""
    monkeypatch.setattr(engine, "config", dataclasses.replace(engine.config, max_queue_size=1))


def test_full_queue(live: LiveServer, engine: Engine, slow: None, short_queue: None):
    calls = []
    for i in range(SLOTS):
        calls.append(live.stub.Generate(ids_request([i, 2], max_new_tokens=150)))
        next(calls[-1])
    calls.append(live.stub.Generate(ids_request([SLOTS, 2], max_new_tokens=150)))
    wait_for(lambda: engine.stats().waiting == 1)
    error = failure(live.stub.Generate(ids_request([1], "refused")))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "1 requests are waiting, the limit of max_queue_size"
    [detail] = rpc_status.from_call(error).details
    retry = error_details_pb2.RetryInfo()
    assert detail.Unpack(retry)
    assert retry.retry_delay.seconds == 1
    for call in calls:
        assert len([i for r in call for i in r.token_ids]) >= 148
    assert collect(live.stub.Generate(ids_request([1], "refused", max_new_tokens=2)))[1]


def test_queue_too_short_for_all_choices(live: LiveServer, engine: Engine, slow: None, short_queue: None):
    """Where a later choice is refused, the earlier ones are taken back."""
    error = failure(live.stub.Generate(ids_request([1], n=100, max_new_tokens=400)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    wait_for(lambda: idle(engine), 5)


def health_check(live: LiveServer, timeout: float = 1.0) -> health_pb2.HealthCheckResponse:
    return health_pb2_grpc.HealthStub(live.channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)


def test_health_beside_many_streams(live: LiveServer, engine: Engine, slow: None):
    """F05: however many streams are open, health answers at once."""
    calls = [live.stub.Generate(ids_request([i % 60, i // 60], max_new_tokens=300)) for i in range(200)]
    wait_for(lambda: engine.stats().waiting > 100)
    for _ in range(20):
        start = time.monotonic()
        assert health_check(live).status == health_pb2.HealthCheckResponse.SERVING
        assert live.stub.Tokenize(pb.TokenizeRequest(text="a"), timeout=1).token_ids
        assert time.monotonic() - start < 1
    for call in calls:
        call.cancel()
    wait_for(lambda: idle(engine))


def test_health_beside_a_long_text(live: LiveServer):
    """B12: megabytes are tokenized beside the event loop, and without holding Python up. F01: over 4 MiB of them."""
    call = live.stub.Generate(pb.GenerateRequest(text="abcd " * 850_000))
    worst = 0.0
    while not call.done():
        start = time.monotonic()
        health_check(live, timeout=5)
        worst = max(worst, time.monotonic() - start)
        time.sleep(0.01)
    error = failure(call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith("the prompt has 4250002 tokens")
    assert worst < 1


def test_readers_that_stop_reading(live: LiveServer, engine: Engine):
    """F08: a client that opens streams and reads nothing holds up nobody, and finds its answers whole afterwards."""
    prompts = [[i, i + 1] for i in range(20)]
    stalled = [live.stub.Generate(ids_request(p, max_new_tokens=500)) for p in prompts]
    wait_for(lambda: idle(engine))  # all of it was generated, unread
    live.canary()
    for call, prompt in zip(stalled, prompts, strict=True):
        _, ids, last = collect(call)
        assert ids == continuation(prompt, 500, TEXT_VOCAB)
        assert last.usage.completion_tokens == 500


def test_what_waits_is_merged(
    start_server: Callable[..., LiveServer], frontend: Frontend, slow: None, monkeypatch: pytest.MonkeyPatch
):
    """While a message can't be written, steps join into one: memory is bounded by the answer, not by the steps."""
    live = start_server(frontend)
    responses = messages.responses
    seen: list[Delta] = []

    def watch(choice, delta, *counts):
        seen.append(delta)
        if len(seen) == 2:
            time.sleep(0.5)  # the event loop stands still, and with it all writing
        return responses(choice, delta, *counts)

    monkeypatch.setattr(messages, "responses", watch)
    _, ids, _ = collect(live.stub.Generate(ids_request([1, 2], max_new_tokens=100)))
    assert ids == continuation([1, 2], 100, TEXT_VOCAB)
    assert len(seen[2].token_ids) >= 10


def test_long_deltas_are_cut_into_messages(monkeypatch: pytest.MonkeyPatch):
    """No message outgrows gRPC's default limit of 4 MiB, however much was merged."""
    delta = Delta()
    top = tuple((2**31 + i, -float(i)) for i in range(20))
    for i in range(10_000):
        delta.add(StepOutput((i,), "x", (TokenLogprob(i, -0.5, top),)))
    delta.add(StepOutput(finish_reason="stop", cached_tokens=3))
    parts = list(messages.responses(1, delta, 7, 10_000))
    assert [len(p.token_ids) for p in parts] == [4096, 4096, 1808]
    assert [i for p in parts for i in p.token_ids] == list(range(10_000))
    assert [p.token_id for part in parts for p in part.logprobs] == list(range(10_000))
    assert "".join(p.text for p in parts) == "x" * 10_000
    assert [p.finish_reason for p in parts] == [0, 0, pb.FINISH_REASON_STOP]
    assert parts[-1].usage == pb.Usage(prompt_tokens=7, completion_tokens=10_000, cached_tokens=3)
    assert max(p.ByteSize() for p in parts) < 2**21
