"""The RPCs of pallasite.v1.Pallasite over a Frontend.

A call to Generate prepares its prompt in a worker thread, submits its requests, and then forwards what the engine puts
in its mailbox. However the call ends (answered, cancelled, past its deadline, cut off), the last thing it does is to
cancel what it still has in the engine.
"""

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections.abc import AsyncIterator, Iterator

import grpc
from grpc_status import rpc_status

from pallasite.serve.frontend import Frontend
from pallasite.serve.grpc import errors, messages
from pallasite.serve.grpc.errors import Refusal
from pallasite.serve.grpc.mailbox import Doorbell, Mailbox
from pallasite.serve.proto import pallasite_pb2 as pb
from pallasite.serve.proto import pallasite_pb2_grpc
from pallasite.serve.tokenizer import Tokenizer
from pallasite.serve.types import EngineClosed, GenerationConfig, QueueFull, Request

log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
MAX_REQUEST_ID = 256


class PallasiteService(pallasite_pb2_grpc.PallasiteServicer):
    """All methods run on the event loop that was running when the object was made."""

    def __init__(self, version: str) -> None:
        self._version = version
        self._frontend: Frontend | None = None
        self._doorbell = Doorbell(asyncio.get_running_loop())
        self._serial = itertools.count()
        self._live: dict[str, list[str]] = {}  # request ids of running calls: their ids in the engine
        self._draining = self._cut = False
        self._idle = asyncio.Event()
        self._idle.set()

    # For the server.

    def set_frontend(self, frontend: Frontend) -> None:
        """From now on calls are answered; before, they are told that the model is loading."""
        self._frontend = frontend

    def drain(self) -> None:
        """Refuse new calls to Generate."""
        self._draining = True

    async def wait_idle(self) -> None:
        """Until no call to Generate runs."""
        await self._idle.wait()

    def cut(self) -> None:
        """End running calls to Generate with UNAVAILABLE, after what they have so far."""
        self._draining = self._cut = True
        for engine_ids in self._live.values():
            self._cancel(engine_ids)

    # The RPCs.

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        async with _answering(context, request.request_id) as request_id:
            frontend = self._ready()
            if self._draining:
                raise errors.shutting_down()
            with self._claim(request_id):
                await self._generate(frontend, request, request_id, context)

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse | None:
        async with _answering(context):
            frontend = self._ready()
            return pb.GetModelInfoResponse(
                name=frontend.name,
                architecture=frontend.architecture,
                session_len=frontend.session_len,
                vocab_size=frontend.engine.model.vocab_size,
                eos_token_ids=frontend.eos_ids,
                has_tokenizer=frontend.tokenizer is not None,
                max_batch_size=frontend.engine.sizes.slots,
                version=self._version,
            )
        return None  # not reached: _answering raises what it catches

    async def Tokenize(
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.TokenizeResponse | None:
        async with _answering(context):
            frontend = self._ready()
            _need_tokenizer(frontend)
            field = request.WhichOneof("input")
            prompt = messages.prompt_of(request, frontend.session_len)
            preprocess = request.do_preprocess if request.HasField("do_preprocess") else True
            try:
                ids = await asyncio.to_thread(frontend.token_ids, prompt, do_preprocess=preprocess)
            except ValueError as error:
                raise errors.bad_request(str(error), field) from error
            return pb.TokenizeResponse(token_ids=ids)
        return None

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse | None:
        async with _answering(context):
            frontend = self._ready()
            tokenizer = _need_tokenizer(frontend)
            vocab_size = frontend.engine.model.vocab_size
            skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True

            def decode() -> str:
                if (worst := max(request.token_ids, default=0)) >= vocab_size:
                    raise errors.bad_request(f"token id {worst}: ids go from 0 to {vocab_size - 1}", "token_ids")
                return tokenizer.decode(request.token_ids, skip_special_tokens=skip)

            return pb.DetokenizeResponse(text=await asyncio.to_thread(decode))
        return None

    # Generate, step by step.

    def _ready(self) -> Frontend:
        if self._frontend is None:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "the model is still loading")
        return self._frontend

    @contextlib.contextmanager
    def _claim(self, request_id: str) -> Iterator[None]:
        """Hold the id while the call runs. Raises Refusal (ALREADY_EXISTS) where another call holds it."""
        if request_id in self._live:
            raise Refusal(grpc.StatusCode.ALREADY_EXISTS, f"a request with id {request_id!r} is running")
        self._live[request_id] = []
        self._idle.clear()
        try:
            yield
        finally:
            self._cancel(self._live.pop(request_id))
            if not self._live:
                self._idle.set()

    def _cancel(self, engine_ids: list[str]) -> None:
        assert self._frontend is not None
        for engine_id in engine_ids:
            self._frontend.engine.cancel(engine_id)

    async def _generate(
        self, frontend: Frontend, request: pb.GenerateRequest, request_id: str, context: grpc.aio.ServicerContext
    ) -> None:
        config = messages.generation_config(request.generation_config)
        field = request.WhichOneof("input")
        if field in ("text", "messages"):
            _need_tokenizer(frontend)
        mailbox = Mailbox(self._doorbell)
        # In the engine every call has an id of its own: a cancel that comes late can't hit a retry of the same name.
        engine_id = f"{request_id}.{next(self._serial)}"
        try:
            requests = await asyncio.to_thread(_prepare, frontend, request, config, mailbox, engine_id)
            if self._cut:
                raise errors.shutting_down()
            for prepared in requests:
                frontend.engine.submit(prepared)
                self._live[request_id].append(prepared.id)
            await self._forward(frontend, requests, mailbox, self._live[request_id], context)
        except ValueError as error:
            raise errors.bad_request(str(error), messages.field_of(str(error), field)) from error
        except (QueueFull, EngineClosed) as error:
            raise errors.from_submit(error) from error
        finally:
            mailbox.close()

    async def _forward(
        self,
        frontend: Frontend,
        requests: list[Request],
        mailbox: Mailbox,
        running: list[str],
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Write what comes to the client until all choices are finished. running: ids of those that are not."""
        counts = [0] * len(requests)
        failure: Refusal | None = None
        while running:
            for choice, delta in (await mailbox.take()).items():
                counts[choice] += len(delta.token_ids)
                if delta.finish_reason:
                    running.remove(requests[choice].id)
                if delta.finish_reason == "abort" and failure is None:
                    failure = errors.shutting_down()
                if delta.finish_reason == "error" and failure is None:
                    code = grpc.StatusCode.UNAVAILABLE if frontend.engine.closed else grpc.StatusCode.INTERNAL
                    failure = Refusal(code, delta.error or "the request failed")
                for response in messages.responses(choice, delta, len(requests[choice].prompt), counts[choice]):
                    await context.write(response)
        if failure:
            raise failure


def _prepare(
    frontend: Frontend, request: pb.GenerateRequest, config: GenerationConfig, mailbox: Mailbox, engine_id: str
) -> list[Request]:
    """Requests for the engine; in a worker thread, for a long text takes seconds to tokenize."""
    prompt = messages.prompt_of(request, frontend.session_len)
    preprocess = request.do_preprocess if request.HasField("do_preprocess") else True
    return frontend.requests(prompt, config, mailbox.put, do_preprocess=preprocess, request_id=engine_id)


def _need_tokenizer(frontend: Frontend) -> Tokenizer:
    """The tokenizer. Raises Refusal (FAILED_PRECONDITION) if the model has none."""
    if frontend.tokenizer is None:
        raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "the model has no tokenizer and takes token_ids only")
    return frontend.tokenizer


async def _greet(context: grpc.aio.ServicerContext, request_id: str = "") -> str:
    """Send the initial metadata at once (gateways wait for it) with the request's id; returns the id.

    The id is the request's own, else the x-request-id of the metadata, else a new one. Raises Refusal for one that
    could not stand in metadata."""
    given = next((value for key, value in context.invocation_metadata() or () if key == REQUEST_ID), "")
    chosen = request_id or given or uuid.uuid4().hex
    echo = given or chosen
    await context.send_initial_metadata(((REQUEST_ID, echo),) if _is_header(echo) else ())
    for field, value in (("request_id", request_id), (REQUEST_ID, given)):
        if value and not _is_header(value):
            raise errors.bad_request(f"{field} must be at most {MAX_REQUEST_ID} printable ASCII characters", field)
    return chosen


def _is_header(value: str) -> bool:
    return len(value) <= MAX_REQUEST_ID and value.isascii() and value.isprintable()


@contextlib.asynccontextmanager
async def _answering(context: grpc.aio.ServicerContext, request_id: str = "") -> AsyncIterator[str]:
    """Greet, and give the request's id. Every way to fail becomes a status: a Refusal its own, all else INTERNAL, with
    the traceback in the log only."""
    name = "of no name yet"
    try:
        name = await _greet(context, request_id)
        yield name
    except Refusal as refusal:
        status = rpc_status.to_status(refusal.status())
        await context.abort(status.code, status.details, status.trailing_metadata)
    except Exception:
        log.exception("call %s failed", name)
        await context.abort(grpc.StatusCode.INTERNAL, "an error inside the server; its log has more")
