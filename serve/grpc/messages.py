"""Protobuf messages to our types and back."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from pallasite.serve.frontend import Prompt
from pallasite.serve.grpc.errors import bad_request
from pallasite.serve.grpc.mailbox import Delta
from pallasite.serve.proto import pallasite_pb2 as pb
from pallasite.serve.types import GenerationConfig

MAX_TOKENS = 4096
"""Of one response. Merged deltas may be long, and with log-probabilities a token takes up to 300 bytes: a client with
gRPC's default limit of 4 MiB can receive any message."""

_CONFIG_FIELDS = {field.name for field in dataclasses.fields(GenerationConfig)}

FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
    "error": pb.FINISH_REASON_ERROR,
}


def generation_config(message: pb.GenerationConfig) -> GenerationConfig:
    """The config with the fields that are set. Raises Refusal naming the wrong one."""
    # Absent fields are not in ListFields, and an empty list is an absent one.
    values: dict[str, Any] = {
        field.name: value if isinstance(value, bool | int | float) else tuple(value)
        for field, value in message.ListFields()
    }
    try:
        return GenerationConfig(**values)
    except ValueError as error:
        raise bad_request(str(error), field_of(str(error), "")) from error


def prompt_of(request: Any, session_len: int) -> Prompt:
    """The prompt of a GenerateRequest or TokenizeRequest. Raises Refusal where there is none, or where it's plain that
    it is too long."""
    match request.WhichOneof("input"):
        case "text":
            return request.text
        case "messages":
            if not request.messages.messages:
                raise bad_request("messages is empty; a conversation has at least one message", "messages")
            return [{"role": m.role, "content": m.content} for m in request.messages.messages]
        case "token_ids":
            count = len(request.token_ids.ids)
            # The engine would say the same, but not before millions of ids have become Python objects.
            if count >= session_len:
                message = f"the prompt has {count} tokens; with session_len {session_len} at most {session_len - 1} fit"
                raise bad_request(message, "token_ids")
            return np.fromiter(request.token_ids.ids, np.int64, count)
    raise bad_request("the request has no input: set text, messages or token_ids", "input")


def field_of(message: str, default: str) -> str:
    """The request's field that an error message is about: a field of GenerationConfig if the message begins with its
    name, as all of theirs do."""
    name = message.partition(" ")[0]
    return f"generation_config.{name}" if name in _CONFIG_FIELDS else default


def responses(index: int, delta: Delta, prompt_tokens: int, completion_tokens: int) -> Iterator[pb.GenerateResponse]:
    """The messages that carry a delta, mostly one. The token counts are the whole choice's, for its last message."""
    count = len(delta.token_ids)
    for start in range(0, max(count, 1), MAX_TOKENS):
        response = pb.GenerateResponse(
            index=index,
            text="" if start else delta.text,
            token_ids=delta.token_ids[start : start + MAX_TOKENS],
            logprobs=[
                pb.TokenLogprob(
                    token_id=p.token_id,
                    logprob=p.logprob,
                    top=[pb.TopLogprob(token_id=i, logprob=value) for i, value in p.top],
                )
                for p in delta.logprobs[start : start + MAX_TOKENS]
            ],
        )
        if delta.finish_reason and start + MAX_TOKENS >= count:
            response.finish_reason = FINISH_REASONS[delta.finish_reason]
            response.usage.CopyFrom(
                pb.Usage(
                    prompt_tokens=prompt_tokens,
                    completion_tokens=completion_tokens,
                    cached_tokens=delta.cached_tokens,
                )
            )
        yield response
