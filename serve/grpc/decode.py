"""Requests whose bytes are no message of their type: INVALID_ARGUMENT, where grpcio would say UNKNOWN, which clients
take for a defect of the server and retry, and write a traceback to the log."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from pallasite.serve.grpc.errors import one_line

Behaviour = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]


class RefuseUnreadable(grpc.aio.ServerInterceptor):
    """For every method that takes a single request."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(
            _refuse(handler.unary_stream if handler.response_streaming else handler.unary_unary),
            request_deserializer=_readable(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


def _readable(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Gives the error instead of raising it: from there grpcio would make UNKNOWN of it."""

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return error

    return read


def _refuse(behaviour: Behaviour) -> Behaviour:
    async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
        if isinstance(request, DecodeError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, one_line(f"the request can't be read: {request}"))
        return await behaviour(request, context)

    return answer
