"""What a caller is told when a call fails: one line, a status code, and google.rpc details that programs can read."""

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from pallasite.serve.types import EngineClosed, QueueFull

MAX_CHARACTERS = 500
MAX_BYTES = 1000
"""Of a message. It travels three times in the headers (percent-encoded, and twice in base64), and all of them together
must stay under the 8 KiB that a gRPC peer accepts."""

RETRY_SECONDS = 1
"""What RetryInfo advises where the queue is full."""


class Refusal(Exception):
    """Ends a call with a status. details: messages of google.rpc.error_details."""

    def __init__(self, code: grpc.StatusCode, message: str, *details: Message):
        self.code, self.message = code, one_line(message)
        super().__init__(self.message)
        self.details = details

    def status(self) -> status_pb2.Status:
        """The rich status (google.rpc.Status)."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for detail in self.details:
            status.details.add().Pack(detail)
        return status


def one_line(message: str) -> str:
    """A message that fits in a header: one line of valid UTF-8, cut where it is too long."""
    text = " ".join(message.split()).encode(errors="replace").decode()
    cut = text[:MAX_CHARACTERS].encode()[:MAX_BYTES].decode(errors="ignore")
    return cut if cut == text else cut[:-3] + "..."


def bad_request(message: str, field: str = "") -> Refusal:
    """INVALID_ARGUMENT; field: path of the wrong field in the request, where it is known."""
    if not field:
        return Refusal(grpc.StatusCode.INVALID_ARGUMENT, message)
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=one_line(message))
    details = error_details_pb2.BadRequest(field_violations=[violation])
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, message, details)


def from_submit(error: QueueFull | EngineClosed) -> Refusal:
    """For what Engine.submit raises where the request itself is right."""
    if isinstance(error, EngineClosed):
        return Refusal(grpc.StatusCode.UNAVAILABLE, str(error))
    retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=RETRY_SECONDS))
    return Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), retry)


def shutting_down() -> Refusal:
    """For new calls while the server drains, and for those cut off at its end."""
    return Refusal(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
