"""A gRPC server on a real port for tests, a tiny tokenizer for the hand model, and shorthands for calls."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import pytest
import tokenizers
import transformers

from pallasite.serve.engine import Engine
from pallasite.serve.frontend import Frontend
from pallasite.serve.grpc.limits import join_address
from pallasite.serve.grpc.server import Server
from pallasite.serve.proto import pallasite_pb2 as pb
from pallasite.serve.proto import pallasite_pb2_grpc
from pallasite.serve.templates import ChatTemplate
from pallasite.serve.tokenizer import Tokenizer
from pallasite.serve.tokenizer_fast import FastCodec
from support.hand_model import continuation
from support.small_tokenizers import byte_letters

SESSION_LEN = 512
SLOTS = 4


class LiveServer:
    """A Server on an event loop in a thread of its own, and a channel to it."""

    def __init__(self, frontend: Frontend | None, **options: Any):
        self.frontend = frontend
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-server")
        self._thread.start()
        self.server: Server = self.run(self._make(options))
        self.port = self.run(self.server.start())
        if frontend is not None:
            self.run(self.server.serve_with(frontend))
        self.address = join_address("127.0.0.1", self.port)
        self.channel = grpc.insecure_channel(self.address)
        self.stub = pallasite_pb2_grpc.PallasiteStub(self.channel)

    async def _make(self, options: dict[str, Any]) -> Server:
        return Server("127.0.0.1", 0, **options)

    def run(self, work: Coroutine[Any, Any, Any], timeout: float = 60) -> Any:
        """Run a coroutine on the server's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def close(self) -> None:
        self.channel.close()
        self.run(self.server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    # Shorthands.

    def canary(self) -> None:
        """A right request is answered rightly."""
        _, ids, last = collect(self.stub.Generate(ids_request([1, 2, 3], max_new_tokens=5), timeout=60))
        assert ids == continuation([1, 2, 3], 5, vocab(self.frontend))
        assert last.finish_reason == pb.FINISH_REASON_LENGTH


def vocab(frontend: Frontend) -> int:
    return frontend.engine.model.vocab_size


def ids_request(ids, request_id: str = "", **config) -> pb.GenerateRequest:
    """A request with token ids."""
    return pb.GenerateRequest(
        request_id=request_id, token_ids=pb.TokenIds(ids=ids), generation_config=pb.GenerationConfig(**config)
    )


def collect(call) -> tuple[str, list[int], pb.GenerateResponse]:
    """Text and token ids of an answer with one choice, and its last message."""
    responses = list(call)
    assert all(not r.finish_reason and not r.HasField("usage") for r in responses[:-1])
    ids = [i for r in responses for i in r.token_ids]
    assert responses[-1].usage.completion_tokens == len(ids)
    return "".join(r.text for r in responses), ids, responses[-1]


def failure(call) -> grpc.RpcError:
    """The error that a stream, or a function that makes a call, ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        call() if callable(call) and not hasattr(call, "cancel") else list(call)
    return caught.value


def outcome(call: Any, responses: list[Any] | None = None) -> grpc.StatusCode:
    """How a stream ends; what comes before is added to `responses`."""
    try:
        for response in call:
            if responses is not None:
                responses.append(response)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def wait_for(condition: Callable[[], Any], seconds: float = 20) -> None:
    """Wait until it is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.005)


def idle(engine: Engine) -> bool:
    """Nothing runs, nothing waits, all pages are free."""
    stats = engine.stats()
    return not stats.running and not stats.waiting and stats.pages_free == stats.pages_total


SPECIAL = ["<end>", "<user>", "<assistant>", "<system>"]
# Letters, and bytes of which two, three and four make a character: an answer holds whole ones, broken ones, halves.
BYTES = [*b"abcdefghijklmnopqrstuvwxyz ABC.", *"é模🪨".encode(), *range(0x80, 0x98), 0xC2, 0xD0, 0xE5]

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_tokenizer() -> Tokenizer:
    """Byte-level, without merges: ids 0 to 3 are special, each other is one byte."""
    letters = byte_letters()
    symbols = [letters[b] for b in dict.fromkeys(BYTES)]
    ids = {token: i for i, token in enumerate([*SPECIAL, *symbols])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    hf = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    return Tokenizer(FastCodec(hf), ChatTemplate(TEMPLATE))


TEXT_VOCAB = len(SPECIAL) + len(dict.fromkeys(BYTES))
