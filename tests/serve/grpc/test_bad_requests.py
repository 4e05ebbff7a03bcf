"""Bad requests: each gets a status that says what is wrong, and the next right one its answer."""

import random
import re
from collections.abc import Callable

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from support.hand_model import continuation
from support.live_server import (
    SESSION_LEN,
    TEXT_VOCAB,
    LiveServer,
    collect,
    failure,
    idle,
    ids_request,
    outcome,
    wait_for,
)

from pallasite.serve.frontend import Frontend
from pallasite.serve.grpc.errors import MAX_BYTES, one_line
from pallasite.serve.proto import pallasite_pb2 as pb

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def violations(error: grpc.RpcError) -> list[tuple[str, str]]:
    """Field and description of every BadRequest violation."""
    found = []
    for detail in rpc_status.from_call(error).details:
        bad = error_details_pb2.BadRequest()
        assert detail.Unpack(bad)
        found += [(v.field, v.description) for v in bad.field_violations]
    return found


@pytest.mark.parametrize(
    ("config", "field", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens", "max_new_tokens is 0; it must be an integer in 1..2147483647"),
        ({"temperature": float("nan")}, "temperature", "temperature is nan; it must be a number in [0, 100]"),
        ({"top_p": 0.0}, "top_p", "top_p is 0.0; it must be a number in (0, 1]"),
        ({"top_k": -2}, "top_k", "top_k is -2; it must be an integer in -1..2147483647"),
        (
            {"min_new_tokens": 9, "max_new_tokens": 8},
            "min_new_tokens",
            "min_new_tokens is 9; it must be an integer in 0..8",
        ),
        ({"logprobs": 21}, "logprobs", "logprobs is 21; it must be an integer in 0..20"),
        ({"n": 1000}, "n", "n is 1000; it must be an integer in 1..128"),
        (
            {"repetition_penalty": -1.0},
            "repetition_penalty",
            "repetition_penalty is -1.0; it must be a number in [1e-06, 1e+06]",
        ),
        ({"stop_words": [""]}, "stop_words", "stop_words holds ''; each must be a text that is not empty"),
        (
            {"stop_token_ids": [2**31]},
            "stop_token_ids",
            f"stop_token_ids holds 2147483648; token ids go from 0 to {TEXT_VOCAB - 1}",
        ),
        (
            {"bad_words": ["模🪨"]},
            "bad_words",
            "bad_words holds '模🪨', which is 7 tokens; only single tokens can be banned",
        ),
    ],
)
def test_config_fields(live: LiveServer, config: dict, field: str, message: str):
    error = failure(live.stub.Generate(ids_request([1], **config)))
    assert (error.code(), error.details()) == (INVALID, message)
    assert violations(error) == [(f"generation_config.{field}", message)]


def messages(*turns: tuple[str, str]) -> pb.GenerateRequest:
    return pb.GenerateRequest(messages=pb.Messages(messages=[pb.Message(role=r, content=c) for r, c in turns]))


@pytest.mark.parametrize(
    ("request_", "field", "message"),
    [
        (pb.GenerateRequest(), "input", "the request has no input: set text, messages or token_ids"),
        (pb.GenerateRequest(text=""), "text", "the prompt is empty"),
        (messages(), "messages", "messages is empty; a conversation has at least one message"),
        (messages(("", "a")), "messages", "message 0 has role ''; it must be a text such as 'user'"),
        (ids_request([]), "token_ids", "a prompt must be a list of at least one token id, got shape (0,)"),
        (
            ids_request([1, TEXT_VOCAB]),
            "token_ids",
            f"token id {TEXT_VOCAB} lies outside the vocabulary; ids go from 0 to {TEXT_VOCAB - 1}",
        ),
        (
            ids_request([1] * 2_000_000),
            "token_ids",
            f"the prompt has 2000000 tokens; with session_len {SESSION_LEN} at most {SESSION_LEN - 1} fit",
        ),
        (
            pb.GenerateRequest(text="a" * SESSION_LEN, do_preprocess=False),
            "text",
            f"the prompt has {SESSION_LEN} tokens; with session_len {SESSION_LEN} at most {SESSION_LEN - 1} fit",
        ),
        (ids_request([1], "é"), "request_id", "request_id must be at most 256 printable ASCII characters"),
        (ids_request([1], "x" * 257), "request_id", "request_id must be at most 256 printable ASCII characters"),
    ],
)
def test_input(live: LiveServer, request_: pb.GenerateRequest, field: str, message: str):
    error = failure(live.stub.Generate(request_))
    assert (error.code(), error.details()) == (INVALID, message)
    assert violations(error) == [(field, message)]
    live.canary()


def test_long_text_in_an_error_is_cut(live: LiveServer):
    error = failure(live.stub.Generate(ids_request([1], bad_words=["模" * 100_000])))
    assert error.code() is INVALID
    assert error.details().startswith("bad_words holds '模模")
    assert error.details().endswith("模...")
    assert len(error.details().encode()) <= MAX_BYTES
    assert violations(error)[0][1] == error.details()


def test_one_line():
    assert one_line("a\n  b\tc") == "a b c"
    assert len(one_line("x" * 501)) == 500
    assert len(one_line("🪨" * 400).encode()) <= MAX_BYTES
    assert one_line("bad \udc80 surrogate") == "bad ? surrogate"


def test_unreadable_bytes(live: LiveServer, caplog: pytest.LogCaptureFixture):
    """F07: bytes that are no UTF-8 in a string field, and bytes that are no message."""
    stream = live.channel.unary_stream("/pallasite.v1.Pallasite/Generate")
    single = live.channel.unary_unary("/pallasite.v1.Pallasite/Tokenize")
    for wire in (b"\x12\x02\xff\xfe", b"\x12\x7f", b"\xff\xff\xff", b"\x22\x05\x0a\x03\xff\xff\xff"):
        error = failure(stream(wire))
        assert error.code() is INVALID
        assert error.details().startswith("the request can't be read: ")
    assert failure(lambda: single(b"\x0a\x02\xff\xfe")).code() is INVALID
    live.canary()
    assert not caplog.records


def test_raw_ids_and_unknown_fields(live: LiveServer):
    """Ids as the wire can say them: -1 and 2 ** 63 - 1 arrive as their lowest 32 bits; unknown fields are ignored."""
    stream = live.channel.unary_stream(
        "/pallasite.v1.Pallasite/Generate", response_deserializer=pb.GenerateResponse.FromString
    )
    for varint in (b"\xff" * 9 + b"\x01", b"\xff" * 8 + b"\x7f"):
        ids = b"\x0a" + bytes([len(varint)]) + varint
        error = failure(stream(b"\x22" + bytes([len(ids)]) + ids))
        assert error.code() is INVALID
        assert "token id 4294967295 lies outside the vocabulary" in error.details()
    request = ids_request([1, 2], max_new_tokens=3)
    unknown = request.SerializeToString() + b"\xfa\x3f\x03abc"
    assert collect(stream(unknown))[1] == collect(live.stub.Generate(request))[1]


def test_hostile_metadata(live: LiveServer):
    """F03: metadata that is refused ends its own call only."""
    for metadata in (
        [("x-request-id", "x" * 300)],
        [("blob-bin", bytes(range(256)))],
        [("big", "x" * 16_384)],
        [(f"key-{i}", "v") for i in range(2000)],
    ):
        code = outcome(live.stub.Generate(ids_request([1], max_new_tokens=1), metadata=metadata))
        assert code in (grpc.StatusCode.OK, INVALID, grpc.StatusCode.RESOURCE_EXHAUSTED)
        live.canary()


def test_large_message(start_server: Callable[..., LiveServer], frontend: Frontend):
    """F01: over the limit is an error that names it. (That gRPC's default of 4 MiB is none: test_load.py.)"""
    live = start_server(frontend)
    error = failure(live.stub.Generate(pb.GenerateRequest(text="a" * (64 * 2**20))))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(64 * 2**20) in error.details()
    live.canary()


def test_same_id_twice(live: LiveServer, slow: None):
    first = live.stub.Generate(ids_request([1, 2], "same", max_new_tokens=200))
    next(first)
    error = failure(live.stub.Generate(ids_request([3], "same", max_new_tokens=1)))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert error.details() == "a request with id 'same' is running"
    assert len([i for r in first for i in r.token_ids]) > 150  # it did not notice
    assert collect(live.stub.Generate(ids_request([3], "same", max_new_tokens=1)))[1]


def test_same_id_right_after_a_cancel(live: LiveServer, slow: None):
    """The engine may still hold the cancelled request; its late end doesn't touch the new one."""
    for _ in range(20):
        first = live.stub.Generate(ids_request([1, 2], "again", max_new_tokens=200))
        next(first)
        first.cancel()
        code = None
        while code is not grpc.StatusCode.OK:
            responses: list[pb.GenerateResponse] = []
            code = outcome(live.stub.Generate(ids_request([4, 5], "again", max_new_tokens=3)), responses)
            # At first the cancel may still be on its way.
            assert code in (grpc.StatusCode.OK, grpc.StatusCode.ALREADY_EXISTS)
        assert [i for r in responses for i in r.token_ids] == continuation([4, 5], 3, TEXT_VOCAB)


def test_model_without_tokenizer(start_server: Callable[..., LiveServer], frontend: Frontend):
    live = start_server(Frontend(frontend.engine, None, "hand", "HandModel", ()))
    stub = live.stub
    for call in (
        stub.Generate(pb.GenerateRequest(text="a")),
        stub.Generate(messages(("user", "a"))),
        lambda: stub.Tokenize(pb.TokenizeRequest(text="a")),
        lambda: stub.Detokenize(pb.DetokenizeRequest(token_ids=[1])),
    ):
        error = failure(call)
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert error.details() == "the model has no tokenizer and takes token_ids only"
    assert failure(stub.Generate(pb.GenerateRequest())).code() is INVALID
    error = failure(stub.Generate(ids_request([1], stop_words=["a"])))
    assert (error.code(), violations(error)[0][0]) == (INVALID, "generation_config.stop_words")
    assert not stub.GetModelInfo(pb.GetModelInfoRequest()).has_tokenizer
    text, ids, _ = collect(stub.Generate(ids_request([1], max_new_tokens=3)))
    assert (text, len(ids)) == ("", 3)


def test_detokenize_and_tokenize(live: LiveServer):
    error = failure(lambda: live.stub.Detokenize(pb.DetokenizeRequest(token_ids=[1, TEXT_VOCAB])))
    assert (error.code(), violations(error)[0][0]) == (INVALID, "token_ids")
    error = failure(lambda: live.stub.Tokenize(pb.TokenizeRequest(text="")))
    assert (error.code(), violations(error)[0][0]) == (INVALID, "text")
    assert failure(lambda: live.stub.Tokenize(pb.TokenizeRequest())).code() is INVALID
    assert live.stub.Detokenize(pb.DetokenizeRequest()).text == ""


def spoiled(rng: random.Random) -> pb.GenerateRequest:
    """A request with at least one thing wrong, and others at random."""
    request = ids_request([rng.randrange(TEXT_VOCAB) for _ in range(rng.randrange(1, 9))], max_new_tokens=2)
    config = request.generation_config
    for _ in range(rng.randrange(4)):  # may be right or wrong
        name = rng.choice(["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
        setattr(config, name, rng.choice([0.0, 0.5, 1.0, -1.0, 1e300, float("inf")]))
    match rng.randrange(9):
        case 0:
            config.max_new_tokens = rng.choice([0, -1, -(2**31)])
        case 1:
            config.n = rng.choice([0, -5, 129, 2**31 - 1])
        case 2:
            request.token_ids.ids.append(rng.choice([TEXT_VOCAB, TEXT_VOCAB + 1, 151_645, 2**31, 2**32 - 1]))
        case 3:
            request.token_ids.ids.extend([1] * rng.choice([SESSION_LEN, 10_000]))
        case 4:
            config.stop_token_ids.extend(rng.choice([[TEXT_VOCAB], [2**32 - 1], range(33)]))
        case 5:
            request.ClearField("input")
        case 6:
            request.messages.messages.add(role=rng.choice(["", "user"]), content="a" * rng.choice([1, SESSION_LEN]))
            config.logprobs = rng.choice([-1, 21, 2**31 - 1])
        case 7:
            request.text = rng.choice(["", "é" * SESSION_LEN])
        case 8:
            config.bad_words.append(rng.choice(["", "two words", "模"]))
    return request


def test_fuzzed(live: LiveServer, caplog: pytest.LogCaptureFixture):
    """F09: 300 wrong requests, after each of them a right one."""
    rng = random.Random(0)
    for _ in range(300):
        request = spoiled(rng)
        error = failure(live.stub.Generate(request))
        assert error.code() is INVALID, (request, error)
        assert error.details()
        live.canary()
    assert not caplog.records
    wait_for(lambda: idle(live.frontend.engine))


def test_random_bytes(live: LiveServer, caplog: pytest.LogCaptureFixture):
    """A request with bytes changed at random is refused or answered; nothing else happens."""
    rng = random.Random(1)
    stream = live.channel.unary_stream("/pallasite.v1.Pallasite/Generate")
    right = ids_request([1, 2, 3], "id", max_new_tokens=2, stop_words=["a"], temperature=0.5).SerializeToString()
    for _ in range(300):
        wire = bytearray(right)
        for _ in range(rng.randrange(1, 4)):
            wire[rng.randrange(len(wire))] = rng.randrange(256)
        assert outcome(stream(bytes(wire), timeout=60)) in (grpc.StatusCode.OK, INVALID), bytes(wire)
    live.canary()
    assert not caplog.records


def test_a_defect_is_internal(live: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def broken(*args, **kwargs):
        raise RuntimeError("secret")

    monkeypatch.setattr(live.frontend, "requests", broken)
    request = ids_request([1])
    request.request_id = "the-9th"
    error = failure(live.stub.Generate(request))
    assert (error.code(), error.details()) == (
        grpc.StatusCode.INTERNAL,
        "an error inside the server; its log has more",
    )
    assert "secret" in caplog.text
    assert "call the-9th failed" in caplog.text
    monkeypatch.undo()
    live.canary()


def test_a_failed_step_is_internal_after_what_was_there(
    live: LiveServer, slow: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The choice's last message says error, the status why; others are answered. The log names the request."""
    request = ids_request([1, 2], max_new_tokens=300)
    request.request_id = "the-10th"
    call = live.stub.Generate(request)
    responses = [next(call)]
    programs = live.frontend.engine.programs
    decode = programs.decode

    def fail(*args):
        monkeypatch.setattr(programs, "decode", decode)
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(programs, "decode", fail)
    assert outcome(call, responses) is grpc.StatusCode.INTERNAL
    assert call.details() == "a step failed: out of memory"
    assert re.search(r"a step failed; these requests end with an error: the-10th\.\d+\n", caplog.text)
    assert responses[-1].finish_reason == pb.FINISH_REASON_ERROR
    assert responses[-1].usage.completion_tokens == len([i for r in responses for i in r.token_ids])
    live.canary()
