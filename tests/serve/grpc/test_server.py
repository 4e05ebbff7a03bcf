"""The server around the service: address, loading, health, reflection, and an orderly end."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from support.hand_model import continuation
from support.live_server import LiveServer, collect, failure, ids_request, outcome, wait_for

from pallasite.serve.frontend import Frontend
from pallasite.serve.grpc.limits import SERVICE, join_address
from pallasite.serve.grpc.server import Server, check_address, serve
from pallasite.serve.proto import pallasite_pb2 as pb
from pallasite.serve.proto import pallasite_pb2_grpc

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def health(channel: grpc.Channel, service: str = "") -> int:
    return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status


def test_reflection(live: LiveServer):
    database = ProtoReflectionDescriptorDatabase(live.channel)
    assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
    service = descriptor_pool.DescriptorPool(database).FindServiceByName(SERVICE)
    assert [m.name for m in service.methods] == ["Generate", "GetModelInfo", "Tokenize", "Detokenize"]


def test_health(live: LiveServer):
    assert health(live.channel) == health(live.channel, SERVICE) == SERVING
    error = failure(lambda: health(live.channel, "unknown.Service"))
    assert error.code() is grpc.StatusCode.NOT_FOUND


def test_while_loading(start_server: Callable[..., LiveServer], frontend: Frontend):
    live = start_server(None)
    assert health(live.channel) == health(live.channel, SERVICE) == NOT_SERVING
    for call in (
        live.stub.Generate(ids_request([1])),
        lambda: live.stub.GetModelInfo(pb.GetModelInfoRequest()),
        lambda: live.stub.Tokenize(pb.TokenizeRequest(text="a")),
    ):
        error = failure(call)
        assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "the model is still loading")
    live.run(live.server.serve_with(frontend))
    assert health(live.channel) == SERVING
    assert collect(live.stub.Generate(ids_request([1], max_new_tokens=2)))[1]


def test_draining(start_server: Callable[..., LiveServer], frontend: Frontend, slow: None):
    live = start_server(frontend)
    running = live.stub.Generate(ids_request([1, 2], max_new_tokens=150))
    next(running)
    drained = asyncio.run_coroutine_threadsafe(live.server.drain(30), live.loop)
    wait_for(lambda: health(live.channel) == NOT_SERVING)
    error = failure(live.stub.Generate(ids_request([1])))
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
    assert len([i for r in running for i in r.token_ids]) > 140
    assert drained.result(5) is True


def test_cut_off_at_the_limit(start_server: Callable[..., LiveServer], frontend: Frontend, slow: None):
    """What was generated arrives, then a message that says abort with the usage, then the reason."""
    live = start_server(frontend)
    call = live.stub.Generate(ids_request([1, 2], max_new_tokens=500))
    responses = [next(call)]
    start = time.monotonic()
    assert live.run(live.server.drain(0.3)) is False
    live.run(live.server.stop())
    assert time.monotonic() - start < 3
    assert outcome(call, responses) is grpc.StatusCode.UNAVAILABLE
    assert call.details() == "the server is shutting down"
    ids = [i for r in responses for i in r.token_ids]
    assert ids == continuation([1, 2], len(ids), frontend.engine.model.vocab_size)
    assert responses[-1].finish_reason == pb.FINISH_REASON_ABORT
    assert responses[-1].usage.completion_tokens == len(ids)


def test_cut_off_while_the_prompt_is_prepared(
    start_server: Callable[..., LiveServer], frontend: Frontend, monkeypatch: pytest.MonkeyPatch
):
    live = start_server(frontend)
    started, go_on = threading.Event(), threading.Event()
    prepare = frontend.requests

    def slowly(*args, **kwargs):
        started.set()
        go_on.wait(20)
        return prepare(*args, **kwargs)

    monkeypatch.setattr(frontend, "requests", slowly)
    call = live.stub.Generate(ids_request([1]))
    assert started.wait(20)
    live.loop.call_soon_threadsafe(live.server._service.cut)
    go_on.set()
    error = failure(call)
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "the server is shutting down")


def test_closed_engine(start_server: Callable[..., LiveServer], frontend: Frontend, monkeypatch: pytest.MonkeyPatch):
    live = start_server(frontend)
    monkeypatch.setattr(frontend.engine, "_closing", True)
    error = failure(live.stub.Generate(ids_request([1])))
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "the engine is closed")


# Addresses.


def test_port_in_use(live: LiveServer):
    async def start() -> None:
        await Server("127.0.0.1", live.port).start()

    with pytest.raises(ValueError, match=rf"^can't listen on 127\.0\.0\.1:{live.port}: Address already in use$"):
        asyncio.run(start())


def test_nothing_is_loaded_where_the_port_is_in_use(live: LiveServer):
    loaded = []
    with pytest.raises(ValueError, match="Address already in use"):
        asyncio.run(serve(lambda: loaded.append(1), port=live.port))  # type: ignore[arg-type,return-value]
    assert not loaded


def test_loopback_only():
    for host in ("127.0.0.1", "localhost", "127.0.0.2"):
        check_address(host, 0, insecure=False)
    with pytest.raises(ValueError, match=r"host '0\.0\.0\.0' can be reached from other machines.*--insecure"):
        check_address("0.0.0.0", 0, insecure=False)
    check_address("0.0.0.0", 0, insecure=True)
    with pytest.raises(ValueError, match=r"host 'no\.such\.host\.invalid' is no address"):
        check_address("no.such.host.invalid", 0, insecure=False)
    with pytest.raises(ValueError, match=r"port is 65536; it must be in 0\.\.65535"):
        check_address("127.0.0.1", 65536, insecure=False)


def test_join_address():
    assert join_address("127.0.0.1", 1) == "127.0.0.1:1"
    assert join_address("::1", 1) == "[::1]:1"


# A process of its own.

PROGRAM = """
import asyncio, sys, time
from pallasite.serve.frontend import Frontend
from pallasite.serve.grpc.server import LoadingInterrupted, serve
from support.hand_model import hand_engine, hand_model

def load():
    if sys.argv[1] == "broken":
        raise ValueError("the model is broken")
    if sys.argv[1] == "endless":
        print("loading", flush=True)
        time.sleep(600)
    model = hand_model(max_session_len=4096)
    engine = hand_engine(model, session_len=4096, max_batch_size=1, cache_max_entry_count=300)
    decode = engine.programs.decode
    engine.programs.decode = lambda *args: (time.sleep(0.005), decode(*args))[1]
    if sys.argv[1] == "dying":
        engine._read_oldest = sys.exit
    return Frontend(engine, None, "hand", "HandModel", ())

try:
    sys.exit(asyncio.run(serve(load, port=0, grace=float(sys.argv[2]))))
except LoadingInterrupted as interrupted:
    print("interrupted by", interrupted.args[0], flush=True)
    import os
    os._exit(9)
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment by which only the first of the processes compiles."""
    folder = tmp_path_factory.mktemp("programs")
    return {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


@pytest.fixture
def start_process(compiled: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """start_process(kind, grace): the program above, with its output in pipes."""
    processes = []
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])

    def start(kind: str, grace: float) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, kind, str(grace)],
            env={**os.environ, **compiled, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def connect(process: subprocess.Popen[str]) -> tuple[grpc.Channel, int]:
    """Waits for the line that says it is ready; a channel to its port, and the port."""
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.fullmatch(r"pallasite: serving hand on (127\.0\.0\.1:(\d+))\n", line)
    assert match, (line, process.communicate())
    return grpc.insecure_channel(match[1]), int(match[2])


def test_sigterm_lets_streams_finish(start_process: Callable[..., subprocess.Popen[str]]):
    process = start_process("right", 60)
    channel, _ = connect(process)
    with channel:
        call = pallasite_pb2_grpc.PallasiteStub(channel).Generate(ids_request([1, 2], max_new_tokens=300))
        responses = [next(call)]
        process.send_signal(signal.SIGTERM)
        assert outcome(call, responses) is grpc.StatusCode.OK
        assert [i for r in responses for i in r.token_ids] == continuation([1, 2], 300)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_sigterm_cuts_streams_at_the_limit(start_process: Callable[..., subprocess.Popen[str]], signals: list[int]):
    """At the grace limit, or at the second signal; the port is free at once."""
    process = start_process("right", 0.2 if len(signals) == 1 else 60)
    channel, port = connect(process)
    with channel:
        call = pallasite_pb2_grpc.PallasiteStub(channel).Generate(ids_request([1, 2], max_new_tokens=4000))
        next(call)
        start = time.monotonic()
        for number in signals:
            process.send_signal(number)
            time.sleep(0.1)
        assert outcome(call) is grpc.StatusCode.UNAVAILABLE
        assert process.wait(20) == 0
        assert time.monotonic() - start < 10
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_failed_load(start_process: Callable[..., subprocess.Popen[str]]):
    process = start_process("broken", 1)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.endswith("ValueError: the model is broken\n")
    assert not out


def test_signal_while_loading(start_process: Callable[..., subprocess.Popen[str]]):
    process = start_process("endless", 1)
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (9, "interrupted by 15\n")
    assert time.monotonic() - start < 5


def test_dead_engine_ends_the_server(start_process: Callable[..., subprocess.Popen[str]]):
    """Nobody is served any more: the process ends, so that whoever watches it starts another."""
    process = start_process("dying", 60)
    channel, _ = connect(process)
    with channel:
        call = pallasite_pb2_grpc.PallasiteStub(channel).Generate(ids_request([1, 2], max_new_tokens=300))
        assert outcome(call) is grpc.StatusCode.UNAVAILABLE
        _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "the engine died; the server ends" in err
