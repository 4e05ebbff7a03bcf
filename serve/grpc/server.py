"""The gRPC server: its port, health, reflection, and an orderly end.

It listens before the model is loaded: health answers NOT_SERVING from the first second, and a port that is taken is
found before the long work. SIGTERM and SIGINT drain it: health NOT_SERVING, new calls to Generate UNAVAILABLE, running
ones finish or are cut off at the grace limit.
"""

import asyncio
import contextlib
import importlib.metadata
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pallasite.serve.frontend import Frontend
from pallasite.serve.grpc.decode import RefuseUnreadable
from pallasite.serve.grpc.limits import (
    DEFAULT_GRACE_SECONDS,
    DEFAULT_HOST,
    DEFAULT_PORT,
    MAX_MESSAGE_BYTES,
    SERVICE,
    join_address,
)
from pallasite.serve.grpc.service import PallasiteService
from pallasite.serve.proto import pallasite_pb2_grpc

log = logging.getLogger(__name__)

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # By default two servers may listen on one port, and clients meet one or the other.
    ("grpc.so_reuseport", 0),
    # A client whose machine or network died, and so never said goodbye, is found within 40 s.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients may ping as often as every 10 s; by default the server would hang up on them.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)

_HEALTH_NAMES = ("", SERVICE)
_ENGINE_CHECK_SECONDS = 1.0


class Server:
    """A server on one port. start, then serve_with once the model is there, at last drain and stop."""

    def __init__(
        self, host: str, port: int, *, insecure: bool = False, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
    ):
        """On the event loop that it will use. Raises ValueError for an address that it must not or can't listen on."""
        check_address(host, port, insecure=insecure)
        self._host, self._port = host, port
        self._server = grpc.aio.server(options=_OPTIONS, interceptors=(*interceptors, RefuseUnreadable()))
        self._service = PallasiteService(_version())
        self._health = health.aio.HealthServicer()
        pallasite_pb2_grpc.add_PallasiteServicer_to_server(self._service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def start(self) -> int:
        """Listen, not serving yet. Returns the port, which was chosen by the system if it was 0."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        address = join_address(self._host, self._port)
        try:
            # The one place where credentials would come in.
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ValueError(f"can't listen on {address}") from error
        await self._server.start()
        return port

    async def serve_with(self, frontend: Frontend) -> None:
        """Answer calls from now on."""
        self._service.set_frontend(frontend)
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def drain(self, grace: float) -> bool:
        """Refuse new calls and wait until running ones are finished, at most `grace` seconds. True: all did."""
        await self._health.enter_graceful_shutdown()
        self._service.drain()
        try:
            await asyncio.wait_for(self._service.wait_idle(), grace)
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Cut off what still runs, and close the port."""
        await self._health.enter_graceful_shutdown()
        self._service.cut()
        # Time for the calls to say why they end; those whose client doesn't read are cancelled after it.
        await self._server.stop(grace=1.0)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in _HEALTH_NAMES:
            await self._health.set(name, status)


async def serve(
    load: Callable[[], Frontend],
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    *,
    grace: float = DEFAULT_GRACE_SECONDS,
    insecure: bool = False,
) -> int:
    """Listen, load the model in a thread, serve until SIGTERM or SIGINT, drain, close the engine. A second signal ends
    the draining at once.

    Returns the process's exit status: 0, or 1 where the engine died. Raises ValueError where it can't listen, before
    `load` is called; whatever `load` raises; and LoadingInterrupted. Prints one line on stdout when it is ready.
    """
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    server = Server(host, port, insecure=insecure)
    port = await server.start()
    frontend: Frontend | None = None
    try:
        frontend = await _load(load, signals)
        await server.serve_with(frontend)
        print(f"pallasite: serving {frontend.name} on {join_address(host, port)}", flush=True)
        if not await _signalled(signals, frontend):
            log.error("the engine died; the server ends")
            return 1
        await _first(server.drain(grace), signals.get())
        return 0
    finally:
        await server.stop()
        if frontend is not None:
            await asyncio.to_thread(frontend.close)


class LoadingInterrupted(BaseException):
    """A signal (its number: args[0]) came while the model was loading, in a thread that can't be stopped: end the
    process without waiting for it."""


async def _load(load: Callable[[], Frontend], signals: asyncio.Queue[int]) -> Frontend:
    """What `load` returns or raises, in a thread of its own. Raises LoadingInterrupted on a signal."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Frontend] = loop.create_future()

    def deliver(frontend: Frontend | None, error: BaseException | None) -> None:
        if loaded.done():  # given up
            return
        if frontend is not None:
            loaded.set_result(frontend)
        elif error is not None:
            loaded.set_exception(error)

    def run() -> None:
        frontend, error = None, None
        try:
            frontend = load()
        except BaseException as problem:
            error = problem
        # A loop that a signal closed meanwhile has nobody to tell.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(deliver, frontend, error)

    threading.Thread(target=run, name="pallasite-load", daemon=True).start()
    interrupt = asyncio.ensure_future(signals.get())
    await _first(loaded, interrupt)
    if interrupt.done() and not interrupt.cancelled():
        raise LoadingInterrupted(interrupt.result())
    return loaded.result()


async def _signalled(signals: asyncio.Queue[int], frontend: Frontend) -> bool:
    """True on a signal, False where the engine died before."""
    while not frontend.engine.closed:
        try:
            await asyncio.wait_for(signals.get(), _ENGINE_CHECK_SECONDS)
        except TimeoutError:
            continue
        return True
    return False


async def _first(*awaitables: Awaitable[object]) -> None:
    """Wait for the first of them and cancel the others. Raises what it raised."""
    tasks = [asyncio.ensure_future(a) for a in awaitables]
    done, late = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in late:
        task.cancel()
    for task in done:
        task.result()


def check_address(host: str, port: int, *, insecure: bool) -> None:
    """Raises ValueError where `host` is none, or is one beyond this machine (unless insecure), or the port is taken."""
    if not 0 <= port <= 65535:
        raise ValueError(f"port is {port}; it must be in 0..65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ValueError(f"host {host!r} is no address: {error.strerror}") from error
    if not insecure and not all(ipaddress.ip_address(sockaddr[0]).is_loopback for *_, sockaddr in found):
        raise ValueError(
            f"host {host!r} can be reached from other machines, and the service neither encrypts nor asks who calls; "
            "add --insecure if the network is private, or listen on 127.0.0.1"
        )
    # gRPC says no more than that it failed; a plain socket knows why.
    family, kind, protocol, _, sockaddr = found[0]
    with socket.socket(family, kind, protocol) as probe:
        # As gRPC does: connections of the last run that linger are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(sockaddr)
        except OSError as error:
            raise ValueError(f"can't listen on {join_address(host, port)}: {error.strerror}") from error


def _version() -> str:
    try:
        return importlib.metadata.version("pallasite")
    except importlib.metadata.PackageNotFoundError:  # run from a tree that is not installed
        return "unknown"
