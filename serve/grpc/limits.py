"""Numbers and names that the server and the client share."""

from pallasite.serve.proto import pallasite_pb2

MAX_MESSAGE_BYTES = 64 * 2**20
"""Of a request and of a response, in the server and in our client."""

SERVICE = pallasite_pb2.DESCRIPTOR.services_by_name["Pallasite"].full_name
"""The service's full name, as health and reflection know it."""

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 50051

DEFAULT_GRACE_SECONDS = 30.0
"""How long a server that is told to end lets running requests finish."""


def join_address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
