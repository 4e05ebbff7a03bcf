"""The engine: one thread that owns the device and the loop.

The loop takes new requests and cancels, launches the next step, and only then reads the step before: the device never
waits for Python. Steps alternate between prefill and decode while both have work, so that a long prompt doesn't stop
the others' decoding. At most two launches are in flight; a decode launch runs several steps while they are short, at
most LAUNCH_SECONDS. What callers submit and cancel crosses over in an inbox under one lock; what they get back they
get through Request.emit, called from this thread.
"""

import atexit
import dataclasses
import itertools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from pallasite.models.model import Model
from pallasite.serve.config import EngineConfig
from pallasite.serve.memory import resolve_sizes
from pallasite.serve.programs import CompileCounter, Launch, Programs, read
from pallasite.serve.sampling import NOT_FINITE
from pallasite.serve.scheduler import PagesShort, Scheduler
from pallasite.serve.slots import has_penalty
from pallasite.serve.steps import NOTHING
from pallasite.serve.types import (
    EngineClosed,
    FinishReason,
    Phase,
    QueueFull,
    Request,
    Sequence,
    StepOutput,
    TokenLogprob,
    describe_ids,
)

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 2
LAUNCH_SECONDS = 0.020
"""Longest a decode launch may run: a cancel, or a newcomer, waits for the launches in flight."""


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """What the engine is doing now, and has done since it started."""

    running: int
    waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int
    preemptions: int
    compilations: int
    failed_steps: int
    generated_tokens: int


class Engine:
    """Serves requests for one model until it is closed."""

    def __init__(
        self, model: Model, config: EngineConfig, progress: Callable[[int, int], None] = lambda done, total: None
    ):
        """Takes the pool's memory and compiles every program; progress is called with (programs done, of how many).

        Raises ValueError where config can't be had: a session_len beyond the model or the pool, a pool too small.
        """
        self.model, self.config = model, config
        self.sizes = resolve_sizes(model, config)
        self.programs = Programs(model, self.sizes, progress)
        self.scheduler = self._new_scheduler()
        self._lock = threading.Condition()
        self._inbox: deque[Sequence] = deque()
        self._cancels: set[str] = set()
        self._closing = False
        self._closed = False
        self._process = os.getpid()
        self._failure: BaseException | None = None
        self._sequences: dict[str, Sequence] = {}  # all that are open, by request id, those in the inbox included
        self._order = itertools.count()
        self._flight: deque[Launch] = deque()
        self._launching: list[Sequence] = []  # whose step is being launched: it may fail before it is in flight
        self._prefill_next = self._score_next = True
        self._step_seconds = LAUNCH_SECONDS
        self._last_ready = 0.0
        self._generated = 0
        self._failed_steps = 0
        self._compilations = CompileCounter()
        self._thread = threading.Thread(target=self._main, name="pallasite-engine", daemon=True)
        self._thread.start()
        self._at_exit = _close_at_exit(self)

    # For callers, from any thread.

    def submit(self, request: Request, *, wait: bool = False) -> None:
        """Queue a request. Raises ValueError (naming value and limit) for one that can't be served, QueueFull where the
        queue has no place and wait is False, EngineClosed."""
        self.check(request)
        if self._forked:
            raise EngineClosed(
                f"this is a fork of process {self._process}, where the engine's thread is: "
                "start worker processes with the spawn method, and open the model in the one that uses it"
            )
        tokens = [int(t) for t in request.prompt]
        end = min(len(tokens) + request.config.max_new_tokens, self.sizes.session_len)
        if request.score:
            end = len(tokens)
        with self._lock:
            while wait and self._failure is None and not self._closing and self._queued() >= self.config.max_queue_size:
                self._lock.wait()
            if self._failure is not None or self._closing:
                raise EngineClosed(f"the engine is closed{f': {self._failure}' if self._failure else ''}")
            if self._queued() >= self.config.max_queue_size:
                raise QueueFull(f"{self._queued()} requests are waiting, the limit of max_queue_size")
            if request.id in self._sequences:
                raise ValueError(f"request id {request.id!r} is in use")
            seq = Sequence(request, tokens, len(tokens), end, next(self._order))
            self._sequences[request.id] = seq
            self._inbox.append(seq)
            self._lock.notify_all()

    def check(self, request: Request) -> None:
        """Raise ValueError where the request can never be served."""
        problem = describe_ids(request.prompt, self.model.vocab_size)
        if problem is None and len(request.prompt) >= self.sizes.session_len + bool(request.score):
            problem = f"the prompt has {len(request.prompt)} tokens; with session_len {self.sizes.session_len} at most "
            problem += f"{self.sizes.session_len - (not request.score)} fit"
        for name, ids in (("stop_token_ids", request.stop_ids), ("bad_words", request.bad_ids)):
            wrong = [i for i in ids if not 0 <= i < self.model.vocab_size]
            if problem is None and wrong:
                problem = f"{name} holds {wrong[0]}; token ids go from 0 to {self.model.vocab_size - 1}"
        if problem:
            raise ValueError(problem)

    def cancel(self, request_id: str) -> None:
        """Stop a request; its pages are free within the launches in flight. Unknown and finished ids are ignored."""
        if self._forked:
            return
        with self._lock:
            self._cancels.add(request_id)
            self._lock.notify_all()

    def stats(self) -> EngineStats:
        """A snapshot; the numbers may be of neighbouring moments."""
        s = self.scheduler
        return EngineStats(
            running=len(s.active),
            waiting=self._queued(),
            pages_total=s.pool.total,
            pages_free=s.pool.available,
            pages_cached=s.pool.cached,
            preemptions=s.preemptions,
            compilations=self._compilations.count,
            failed_steps=self._failed_steps,
            generated_tokens=self._generated,
        )

    def close(self) -> None:
        """Stop the thread, answer all open requests with an error, free the device memory. May be called twice, and
        from any thread but the engine's."""
        if self._forked:
            return
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._thread.join()
        with self._lock:
            if not self._closed:
                self._closed = True
                self.programs.close()
                self.model = dataclasses.replace(self.model, leaves=())  # callers may hold on to a closed engine
                self._compilations.close()
                atexit.unregister(self._at_exit)

    @property
    def closed(self) -> bool:
        """True once no request is taken any more."""
        return self._closing or self._failure is not None

    @property
    def _forked(self) -> bool:
        # A forked child has the memory, but neither the thread nor the device; the lock may be held for ever.
        return os.getpid() != self._process

    def _queued(self) -> int:
        return len(self._inbox) + len(self.scheduler.waiting)

    # The engine's thread.

    def _new_scheduler(self) -> Scheduler:
        rows = self.programs.prefill_buckets[-1].rows
        return Scheduler(self.sizes, rows, self.config.enable_prefix_caching, self.model.page_tag)

    def _main(self) -> None:
        self._compilations.watch_this_thread()
        try:
            while self._take_inbox():
                try:
                    self._turn()
                except Exception as error:
                    self._recover(error)
        except BaseException as error:  # a defect of ours: nobody may wait for ever
            log.exception("the engine's thread died")
            self._failure = error
        reason = f"the engine failed: {self._failure}" if self._failure else "the engine was closed"
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        # Nothing but the answer: after a defect the scheduler may not be able to let go of anything.
        for seq in self._sequences.values():
            seq.request.emit(StepOutput(finish_reason="error", error=reason, cached_tokens=seq.reused or 0))
        self._sequences.clear()

    def _take_inbox(self) -> bool:
        """New requests and cancels; sleeps while there is nothing to do. False when the engine closes."""
        with self._lock:
            if self._queued() < self.config.max_queue_size:
                self._lock.notify_all()  # the last turn may have admitted somebody, and so made room in the queue
            while not (self._cancels or self._closing or self._flight or self._sequences):
                self._lock.wait()
            if self._closing:
                return False
            while self._inbox:
                self.scheduler.add(self._inbox.popleft())
            cancels, self._cancels = self._cancels, set()
        for request_id in cancels:
            if open_seq := self._sequences.get(request_id):
                self._finish(open_seq, "abort")
        return True

    def _turn(self) -> None:
        """Launch one step if there is one, then read the oldest launch once two are in flight or nothing is left."""
        launched = self._launch()
        if self._flight and (len(self._flight) >= MAX_IN_FLIGHT or not launched):
            self._read_oldest()

    def _launch(self) -> bool:
        self.scheduler.admit()
        if self._score_next and self._launch_score():
            return True
        self._score_next = True
        kinds = (self._launch_prefill, self._launch_decode)
        first, second = kinds if self._prefill_next else kinds[::-1]
        return first() or second() or self._launch_score()

    def _launch_score(self) -> bool:
        chunk = self.scheduler.next_score()
        if chunk is None:
            return False
        self._dispatch([chunk.seq], lambda: self.programs.score(chunk))
        self._score_next = False  # generation gets every other step at least
        return True

    def _launch_prefill(self) -> bool:
        chunks = self.scheduler.next_chunks()
        if not chunks:
            return False

        def launch() -> Launch:
            for chunk in chunks:
                if chunk.final and has_penalty(chunk.seq):
                    self.programs.set_counts(chunk.seq)
            return self.programs.prefill(chunks)

        self._dispatch([chunk.seq for chunk in chunks], launch)
        self._prefill_next = False
        return True

    def _launch_decode(self) -> bool:
        steps = 1
        if not self.scheduler.waiting and not self.scheduler.prefilling:
            steps = max(1, min(self.sizes.max_steps, int(LAUNCH_SECONDS / self._step_seconds)))
        try:
            rows, edits, steps = self.scheduler.next_decode(steps, may_preempt=not self._flight)
        except PagesShort:
            # Sequences that end in the launches under way may free a page; to preempt one, its tokens must be known.
            while self._flight:
                self._read_oldest()
            self.scheduler.admit()
            rows, edits, steps = self.scheduler.next_decode(steps, may_preempt=True)
        if not rows:
            return False
        self._dispatch(rows, lambda: self.programs.decode(rows, edits, steps))
        self._prefill_next = True
        return True

    def _dispatch(self, rows: list[Sequence], launch: Callable[[], Launch]) -> None:
        self._launching = rows
        self._flight.append(launch())
        self._launching = []

    # Reading results.

    def _read_oldest(self) -> None:
        launch = self._flight[0]
        if launch.kind == "score":
            self._read_score(launch)
        else:
            self._read_tokens(launch)
        self._flight.popleft()

    def _read_tokens(self, launch: Launch) -> None:
        rows = launch.rows or [chunk.seq for chunk in launch.chunks]
        wanted = any(seq.request.config.logprobs is not None for seq in rows)
        result = read(launch.result, wanted)
        now = time.monotonic()
        if launch.kind == "decode":
            seconds = (now - max(launch.started, self._last_ready)) / launch.steps
            self._step_seconds += 0.2 * (seconds - self._step_seconds)
        self._last_ready = now
        finals = [True] * len(rows) if launch.rows else [chunk.final for chunk in launch.chunks]
        for chunk in launch.chunks:
            if chunk.seq.phase is not Phase.FINISHED:
                self.scheduler.publish(chunk.seq, chunk.start + chunk.count)
        for i, (seq, final) in enumerate(zip(rows, finals, strict=True)):
            if final and seq.phase is Phase.DECODE:
                tokens = result.tokens[: launch.steps, i]
                logprobs: list[TokenLogprob | None] = [None] * launch.steps
                if (count := seq.request.config.logprobs) is not None:
                    logprobs = [_logprob(result, step, i, count) for step in range(launch.steps)]
                self._advance(seq, tokens.tolist(), logprobs)

    def _advance(self, seq: Sequence, tokens: list[int], logprobs: list[TokenLogprob | None]) -> None:
        """Take a sequence's new tokens, up to the first that ends it, and tell its caller."""
        request, config = seq.request, seq.request.config
        kept: list[int] = []
        kept_logprobs: list[TokenLogprob] = []
        text = ""
        reason: FinishReason | None = None
        error: str | None = None
        for token, logprob in zip(tokens, logprobs, strict=True):
            if token == NOTHING:
                break
            if token == NOT_FINITE:
                reason, error = "error", "the model's logits are not finite numbers"
                break
            if token in request.stop_ids:
                reason = "stop"
                break
            seq.tokens.append(token)
            kept.append(token)
            if logprob is not None:
                kept_logprobs.append(logprob)
            if request.text is not None:
                piece, stopped = request.text.push(token, may_stop=seq.generated >= config.min_new_tokens)
                text += piece
                if stopped:
                    reason = "stop"
                    break
            if len(seq.tokens) >= seq.end:
                reason = "length"
                break
        self._generated += len(kept)
        output = StepOutput(tuple(kept), text, tuple(kept_logprobs), cached_tokens=seq.reused or 0)
        if reason:
            self._finish(seq, reason, error, output)
        elif kept:
            request.emit(output)

    def _finish(
        self, seq: Sequence, reason: FinishReason, error: str | None = None, last: StepOutput | None = None
    ) -> None:
        """Free what the sequence holds and send its last output."""
        last = last or StepOutput(cached_tokens=seq.reused or 0)
        if seq.request.text is not None and last.scores is None:
            last = dataclasses.replace(last, text=last.text + seq.request.text.finish())
        self.scheduler.remove(seq)
        self._sequences.pop(seq.request.id, None)
        seq.request.emit(dataclasses.replace(last, finish_reason=reason, error=error))

    def _read_score(self, launch: Launch) -> None:
        [chunk] = launch.chunks
        seq = chunk.seq
        logits, nll = launch.result
        part = np.asarray(logits if seq.request.score == "logits" else nll)[: chunk.count]
        if seq.phase is Phase.FINISHED:
            return
        seq.scored.append(part[:, : self.model.vocab_size] if part.ndim == 2 else part)
        if chunk.final:
            scores = np.concatenate(seq.scored)
            scores = scores if seq.request.score == "logits" else scores[:-1]
            if np.isfinite(scores).all():
                self._finish(seq, "length", last=StepOutput(scores=scores))
            else:
                self._finish(seq, "error", "the model's logits are not finite numbers")

    def _recover(self, error: Exception) -> None:
        """A step failed: its pool is lost. Fail the requests in the launches under way, requeue all others. Where none
        was under way, fail all that hold pages. Raises `error` where nobody is to blame, for it would come again."""
        self._failed_steps += 1
        involved = {seq for launch in self._flight for seq in (*launch.rows, *(c.seq for c in launch.chunks))}
        involved |= set(self._launching)
        self._launching = []
        self._flight.clear()
        self._step_seconds = LAUNCH_SECONDS
        lost = self.scheduler.reset()
        involved = involved or set(lost)
        names = ", ".join(seq.request.id for seq in lost if seq in involved)
        log.exception("a step failed; these requests end with an error: %s", names or "none")
        if not involved:
            raise error
        self.programs.reset()
        for seq in lost:
            if seq in involved:
                seq.phase = Phase.FINISHED
                self._finish(seq, "error", f"a step failed: {error}")
            else:
                seq.scored.clear()
                self.scheduler.add(seq)


def _logprob(result, step: int, row: int, count: int) -> TokenLogprob:
    pairs = zip(
        result.top_ids[step, row, :count].tolist(), result.top_logprobs[step, row, :count].tolist(), strict=True
    )
    # A vocabulary smaller than `count` fills up with -inf.
    top = tuple((token, logprob) for token, logprob in pairs if logprob > -np.inf)
    return TokenLogprob(int(result.tokens[step, row]), float(result.logprobs[step, row]), top)


def _close_at_exit(engine: Engine) -> Callable[[], None]:
    """Close the engine when the interpreter ends, without keeping it alive until then."""
    reference = weakref.ref(engine)

    def close() -> None:
        if (alive := reference()) is not None and not alive.closed:
            alive.close()

    atexit.register(close)
    return close
