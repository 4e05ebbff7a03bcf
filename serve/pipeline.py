"""The notebook API: `pipeline(model)` and what can be asked of it, blocking or async.

Calls may come from several threads; the engine batches whatever is open. An abandoned call (an exception, Ctrl-C, a
generator that is not read to its end, a cancelled task) cancels its requests.
"""

import asyncio
import contextlib
import dataclasses
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from pallasite.serve.config import EngineConfig
from pallasite.serve.frontend import Frontend, Prompt
from pallasite.serve.open import open_frontend
from pallasite.serve.types import GenerationConfig, Request, Response, StepOutput, TokenLogprob

Configs = GenerationConfig | Sequence[GenerationConfig] | None
Key = tuple[int, int]
"""(place of the prompt in the list, choice)."""


def pipeline(
    model_path: str | Path, backend_config: EngineConfig | None = None, *, progress: bool = True
) -> "Pipeline":
    """Open a model for use in this process.

    model_path: a converted checkpoint, or a source one (a Hugging Face folder, a GGUF file), which is converted in
    memory while loading. progress: bars on stderr while loading and compiling. Raises ValueError or OSError saying what
    is wrong with the path or the config.
    """
    if not isinstance(backend_config, EngineConfig | None):
        raise ValueError(f"backend_config is a {type(backend_config).__name__}; it must be an EngineConfig")
    return Pipeline(open_frontend(model_path, backend_config or EngineConfig(), progress=progress))


@dataclasses.dataclass
class Session:
    """A conversation: the messages so far, and the last answer."""

    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    response: Response | None = None


class _Answer:
    """Joins one request's outputs."""

    def __init__(self, request: Request | None, key: Key, prompt_len: int):
        self.request, self.key, self.prompt_len = request, key, prompt_len
        self.tokens: list[int] = []
        self.text: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.last = StepOutput()

    def add(self, output: StepOutput) -> Response:
        """Take an output; returns it as a Response that holds only the new part (lengths are totals)."""
        self.tokens += output.token_ids
        self.text.append(output.text)
        self.logprobs += output.logprobs
        self.last = output
        return self._response(list(output.token_ids), output.text, list(output.logprobs))

    def whole(self) -> Response:
        """All outputs joined."""
        return self._response(self.tokens, "".join(self.text), self.logprobs)

    @property
    def done(self) -> bool:
        return self.last.finish_reason is not None

    def _response(self, tokens: list[int], text: str, logprobs: list[TokenLogprob]) -> Response:
        wanted = self.request is not None and self.request.config.logprobs is not None
        return Response(
            text=text,
            generate_token_len=len(self.tokens),
            input_token_len=self.prompt_len,
            token_ids=tokens,
            finish_reason=self.last.finish_reason,
            logprobs=logprobs if wanted else None,
            cached_tokens=self.last.cached_tokens,
            index=self.key[0],
            choice=self.key[1],
            error=self.last.error,
        )


class _Call:
    """The requests of one call. `put` receives (key, output), on this thread or the engine's."""

    def __init__(self, frontend: Frontend, put: Callable[[tuple[Key, StepOutput]], None]):
        self.frontend, self.put = frontend, put
        self.answers: dict[Key, _Answer] = {}
        self._cancelled = False

    def submit(self, index: int, prompt: Prompt, config: GenerationConfig, do_preprocess: bool, alone: bool) -> None:
        """Queue a prompt's requests. A prompt that can't be served raises ValueError if it is alone, else it is
        answered with finish_reason "error"."""
        try:
            requests = self.frontend.requests(
                prompt, config, lambda choice, output: self.put(((index, choice), output)), do_preprocess=do_preprocess
            )
        except ValueError as error:
            if alone:
                raise
            self.answers[index, 0] = _Answer(None, (index, 0), 0)
            self.put(((index, 0), StepOutput(finish_reason="error", error=str(error))))
            return
        for choice, request in enumerate(requests):
            self.answers[index, choice] = _Answer(request, (index, choice), len(request.prompt))
            self.frontend.engine.submit(request, wait=True)
            if self._cancelled:  # by another thread, perhaps before the engine knew of the request
                return self.cancel()

    @property
    def done(self) -> bool:
        return all(answer.done for answer in self.answers.values())

    def cancel(self) -> None:
        """Cancel what is still open, and what a thread may be about to submit."""
        self._cancelled = True
        for answer in list(self.answers.values()):
            if not answer.done and answer.request is not None:
                self.frontend.engine.cancel(answer.request.id)


class Pipeline:
    """A model in this process. Use it as a context manager, or close() it, to free the device memory."""

    def __init__(self, frontend: Frontend):
        self.frontend = frontend

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving; open calls end with an error. The device memory is freed. May be called twice."""
        self.frontend.close()

    # Generation.

    def __call__(
        self,
        prompts: Prompt | Sequence[Prompt],
        gen_config: Configs = None,
        *,
        do_preprocess: bool = True,
        use_tqdm: bool = False,
    ) -> Response | list[Response]:
        """Answer one prompt, or a list of prompts in one batch.

        prompts: a text, a list of texts, one conversation (list of {"role", "content"}), or a list of these.
        gen_config: one for all, or one for each. do_preprocess=False skips the chat template. Returns a Response for a
        single prompt, a list for a list; with n > 1 always a list, a prompt's answers side by side.

        Raises ValueError for a wrong config or a wrong single prompt. In a list a wrong prompt's Response has
        finish_reason "error" and `error`, and the others are answered.
        """
        many, alone = _as_list(prompts)
        configs = _configs(gen_config, len(many))
        with (
            tqdm(total=sum(c.n for c in configs), desc="answers", disable=not use_tqdm) as bar,
            self._blocking(many, configs, do_preprocess, alone) as (call, outputs),
        ):
            for key, output in outputs:
                call.answers[key].add(output)
                bar.update(output.finish_reason is not None)
        return _gather(call, alone)

    def generate(
        self, input_ids: Sequence[int] | Sequence[Sequence[int]], gen_config: Configs = None, *, use_tqdm: bool = False
    ) -> Response | list[Response]:
        """Answer token ids, one list or several, as they are. Like calling the pipeline otherwise."""
        return self(_as_ids(input_ids), gen_config, use_tqdm=use_tqdm)

    def stream_infer(
        self, prompts: Prompt | Sequence[Prompt], gen_config: Configs = None, *, do_preprocess: bool = True
    ) -> Iterator[Response]:
        """Answer like a call, yielding pieces as they come: text and token_ids of each Response are new ones only, and
        `index` (with `choice`, for n > 1) says whose. The last piece of an answer has its finish_reason."""
        many, alone = _as_list(prompts)
        configs = _configs(gen_config, len(many))
        with self._blocking(many, configs, do_preprocess, alone) as (call, outputs):
            for key, output in outputs:
                yield call.answers[key].add(output)

    def chat(
        self, prompt: Prompt, session: Session | None = None, gen_config: GenerationConfig | None = None
    ) -> Session:
        """One turn of a conversation: pass the returned session on to the next. `.response` is the answer.

        prompt: a text (a user message), or a list of messages. gen_config: with n 1. Where it can't be served,
        ValueError is raised and the session stays as it was.
        """
        session, messages = _turn(prompt, session, gen_config)
        [response] = self([messages], gen_config)  # type: ignore[misc]
        return _take_turn(session, messages, response)

    # Evaluation.

    def get_logits(self, input_ids: Sequence[int] | Sequence[Sequence[int]]) -> np.ndarray | list[np.ndarray]:
        """float32 [T, vocab]: the logits after each token of each list of ids. One array for one list."""
        many, alone = _as_list(_as_ids(input_ids))
        scores = self._score(many, "logits")
        return scores[0] if alone else scores

    def get_ppl(self, input_ids: Sequence[int] | Sequence[Sequence[int]]) -> float | list[float]:
        """Mean negative log-likelihood a token (nats), the first token not scored, of each list of at least two ids."""
        many, alone = _as_list(_as_ids(input_ids))
        means = [float(np.mean(nll, dtype=np.float64)) for nll in self._score(many, "nll")]
        return means[0] if alone else means

    def _score(self, many: Sequence[Any], kind: Any) -> list[np.ndarray]:
        config = GenerationConfig(max_new_tokens=1)
        inbox: queue.SimpleQueue[tuple[int, StepOutput]] = queue.SimpleQueue()
        requests: list[Request] = []
        found: dict[int, np.ndarray] = {}

        def ask(i: int, ids: Any) -> Request:
            [request] = self.frontend.requests(ids, config, lambda _, output: inbox.put((i, output)), score=kind)
            if kind == "nll" and len(request.prompt) < 2:
                raise ValueError(f"perplexity needs at least 2 token ids, got {len(request.prompt)}")
            return request

        try:
            requests = [ask(i, ids) for i, ids in enumerate(many)]
            for request in requests:
                self.frontend.engine.submit(request, wait=True)
            while len(found) < len(many):
                i, output = inbox.get()
                if output.scores is None:
                    raise RuntimeError(f"scoring prompt {i} failed: {output.error}")
                found[i] = output.scores
        finally:
            for request in requests:
                self.frontend.engine.cancel(request.id)
        return [found[i] for i in range(len(many))]

    # Async twins.

    async def agenerate(
        self, prompts: Prompt | Sequence[Prompt], gen_config: Configs = None, *, do_preprocess: bool = True
    ) -> Response | list[Response]:
        """Like calling the pipeline, for use where an event loop runs."""
        many, alone = _as_list(prompts)
        configs = _configs(gen_config, len(many))
        async with self._awaiting(many, configs, do_preprocess, alone) as (call, outputs):
            async for key, output in outputs:
                call.answers[key].add(output)
        return _gather(call, alone)

    async def astream_infer(
        self, prompts: Prompt | Sequence[Prompt], gen_config: Configs = None, *, do_preprocess: bool = True
    ) -> AsyncIterator[Response]:
        """Like stream_infer."""
        many, alone = _as_list(prompts)
        configs = _configs(gen_config, len(many))
        async with self._awaiting(many, configs, do_preprocess, alone) as (call, outputs):
            async for key, output in outputs:
                yield call.answers[key].add(output)

    async def achat(
        self, prompt: Prompt, session: Session | None = None, gen_config: GenerationConfig | None = None
    ) -> Session:
        """Like chat."""
        session, messages = _turn(prompt, session, gen_config)
        [response] = await self.agenerate([messages], gen_config)  # type: ignore[misc]
        return _take_turn(session, messages, response)

    # The two ways to wait.

    @contextlib.contextmanager
    def _blocking(self, many: Sequence[Prompt], configs: Sequence[GenerationConfig], do_preprocess: bool, alone: bool):
        inbox: queue.SimpleQueue[tuple[Key, StepOutput]] = queue.SimpleQueue()
        call = _Call(self.frontend, inbox.put)

        def outputs() -> Iterator[tuple[Key, StepOutput]]:
            while not call.done:
                yield inbox.get()

        try:
            for i, (prompt, config) in enumerate(zip(many, configs, strict=True)):
                call.submit(i, prompt, config, do_preprocess, alone)
            yield call, outputs()
        finally:
            call.cancel()

    @contextlib.asynccontextmanager
    async def _awaiting(
        self, many: Sequence[Prompt], configs: Sequence[GenerationConfig], do_preprocess: bool, alone: bool
    ):
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[tuple[Key, StepOutput]] = asyncio.Queue()

        def put(item: tuple[Key, StepOutput]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(inbox.put_nowait, item)

        call = _Call(self.frontend, put)

        async def outputs() -> AsyncIterator[tuple[Key, StepOutput]]:
            while not call.done:
                yield await inbox.get()

        try:
            for i, (prompt, config) in enumerate(zip(many, configs, strict=True)):
                # Tokenizing takes time, and a full queue makes submit wait: neither may hold up the loop.
                await asyncio.to_thread(call.submit, i, prompt, config, do_preprocess, alone)
            yield call, outputs()
        finally:
            call.cancel()


def _is_messages(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence) and not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)
    )


def _as_list(prompts: Any) -> tuple[Sequence[Any], bool]:
    """(prompts as a list, whether it was a single one)."""
    if isinstance(prompts, str) or _is_messages(prompts):
        return [prompts], True
    if isinstance(prompts, np.ndarray) or (
        isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], int | np.integer)
    ):
        return [prompts], True
    if isinstance(prompts, Sequence):
        return prompts, False
    raise ValueError(f"prompts must be a text, a list of messages, or a list of these, not {type(prompts).__name__}")


def _as_ids(input_ids: Any) -> Any:
    """input_ids, after a check that they are one or several lists of numbers."""
    for ids in input_ids if isinstance(input_ids, Sequence) else ():
        if isinstance(ids, str | Mapping) or _is_messages(ids):
            raise ValueError(f"input_ids holds {ids!r}; it must be a list of token ids, or a list of such lists")
    return input_ids


def _configs(gen_config: Configs, count: int) -> Sequence[GenerationConfig]:
    """One config for each prompt."""
    if gen_config is None:
        gen_config = GenerationConfig()
    if isinstance(gen_config, GenerationConfig):
        return [gen_config] * count
    if not isinstance(gen_config, Sequence):
        raise ValueError(
            f"gen_config is a {type(gen_config).__name__}; it must be a GenerationConfig, or a list of them"
        )
    configs = list(gen_config)
    if len(configs) != count:
        raise ValueError(f"gen_config holds {len(configs)} configs for {count} prompts")
    for config in configs:
        if not isinstance(config, GenerationConfig):
            raise ValueError(f"gen_config holds a {type(config).__name__}; it must be a GenerationConfig")
    return configs


def _gather(call: _Call, alone: bool) -> Response | list[Response]:
    responses = [call.answers[key].whole() for key in sorted(call.answers)]
    return responses[0] if alone and len(responses) == 1 else responses


def _turn(prompt: Prompt, session: Session | None, gen_config: GenerationConfig | None) -> tuple[Session, list[Any]]:
    session = Session() if session is None else session
    if not isinstance(session, Session):
        raise ValueError(f"session is a {type(session).__name__}; it must be what chat returned, or None")
    if isinstance(gen_config, GenerationConfig) and gen_config.n > 1:
        raise ValueError(f"n is {gen_config.n}; a conversation goes on from one answer, so it must be 1")
    if not isinstance(prompt, str) and not _is_messages(prompt):
        raise ValueError(f"a turn is a text or a list of messages, got {prompt!r}")
    new = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return session, [*session.messages, *new]


def _take_turn(session: Session, messages: list[Any], response: Response) -> Session:
    if response.finish_reason == "error":
        raise ValueError(response.error)
    session.messages = [*messages, {"role": "assistant", "content": response.text}]
    session.response = response
    return session
