"""A small synchronous client of the service."""

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pallasite.serve.grpc.limits import MAX_MESSAGE_BYTES, SERVICE
from pallasite.serve.proto import pallasite_pb2 as pb
from pallasite.serve.proto import pallasite_pb2_grpc

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # The address is the server's own; a proxy that the environment names for the web has no place between.
    ("grpc.enable_http_proxy", 0),
    # While waiting for a server that starts, try often.
    ("grpc.max_reconnect_backoff_ms", 1000),
)

_POLL_SECONDS = 0.25


class CallFailed(ConnectionError):
    """A call did not succeed; the message is one line. code: the status code's name, such as "INVALID_ARGUMENT"."""

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


class Stream:
    """The responses of one Generate call, in order. cancel(), from any thread, ends it and the server's work."""

    def __init__(self, call: grpc.Call, address: str):
        self._call, self._address = call, address

    def __iter__(self) -> Iterator[pb.GenerateResponse]:
        try:
            yield from self._call
        except grpc.RpcError as error:
            raise _failed(error, self._address) from None

    def cancel(self) -> None:
        self._call.cancel()


class Client:
    """A connection to the server at "host:port"; a context manager. Methods raise CallFailed."""

    def __init__(self, address: str):
        self.address = address
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._stub = pallasite_pb2_grpc.PallasiteStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls under way are cancelled."""
        self._channel.close()

    def serving(self, timeout: float = 2.0) -> bool:
        """Whether a server answers within `timeout` seconds and says that it serves."""
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        try:
            response = self._health.Check(request, timeout=timeout)
        except grpc.RpcError:
            return False
        return response.status == health_pb2.HealthCheckResponse.SERVING

    def wait_until_serving(self, seconds: float, on_wait: Callable[[float], None] = lambda waited: None) -> None:
        """Wait for a server that is starting; on_wait gets the seconds waited, several times a second."""
        start = time.monotonic()
        while not self.serving():
            waited = time.monotonic() - start
            if waited >= seconds:
                raise CallFailed(f"no server at {self.address} was ready within {seconds:g} s", "UNAVAILABLE")
            on_wait(waited)
            time.sleep(min(_POLL_SECONDS, seconds - waited))

    def generate(self, request: pb.GenerateRequest, *, timeout: float | None = None) -> Stream:
        """Start a request; its responses come as they are generated. timeout: seconds for the whole answer."""
        return Stream(self._stub.Generate(request, timeout=timeout), self.address)

    def model_info(self, *, timeout: float = 10.0) -> pb.GetModelInfoResponse:
        """What the server serves."""
        try:
            return self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=timeout)
        except grpc.RpcError as error:
            raise _failed(error, self.address) from None


def chat_request(messages: Sequence[tuple[str, str]], config: pb.GenerationConfig | None = None) -> pb.GenerateRequest:
    """The request for the next turn of a conversation of (role, content)."""
    turns = [pb.Message(role=role, content=content) for role, content in messages]
    return pb.GenerateRequest(messages=pb.Messages(messages=turns), generation_config=config)


def _failed(error: grpc.RpcError, address: str) -> CallFailed:
    """What a user wants to know of it. A server that nothing is listening for is UNAVAILABLE with gRPC's own words."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in details:
        return CallFailed(f"no server answers at {address}", code.name)
    return CallFailed(f"{address}: {code.name}: {' '.join(details.split())}", code.name)
