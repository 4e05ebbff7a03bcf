"""From the engine's thread to the event loop: a mailbox a call, which merges what its reader has not fetched yet.

However slowly a client reads, what waits for it is at most its answer, and costs one message when it reads on.
"""

import asyncio
import contextlib
import dataclasses
import threading

from pallasite.serve.types import FinishReason, StepOutput, TokenLogprob


@dataclasses.dataclass
class Delta:
    """What is new of one choice: the outputs of one or more steps, joined."""

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0

    def add(self, output: StepOutput) -> None:
        """Join the next step's output to it."""
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.finish_reason, self.error = output.finish_reason, output.error
        self.cached_tokens = output.cached_tokens


class Doorbell:
    """Sets events of one event loop from other threads; wakes the loop once for all that ring together (the engine's
    thread rings for every sequence of a step)."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._lock = threading.Lock()
        self._rung: list[asyncio.Event] = []

    def ring(self, event: asyncio.Event) -> None:
        """Set `event` soon. After the loop is closed nobody waits any more, and nothing happens."""
        with self._lock:
            self._rung.append(event)
            if len(self._rung) > 1:
                return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            rung, self._rung = self._rung, []
        for event in rung:
            event.set()


class Mailbox:
    """Outputs of one call's choices. `put` is for the engine's thread, `take` for one task of the event loop."""

    def __init__(self, doorbell: Doorbell):
        self._doorbell = doorbell
        self._event = asyncio.Event()
        self._lock = threading.Lock()
        self._pending: dict[int, Delta] = {}
        self._closed = False

    def put(self, choice: int, output: StepOutput) -> None:
        """Add a step's output of a choice. Neither blocks nor raises."""
        with self._lock:
            if self._closed:
                return
            first = not self._pending
            self._pending.setdefault(choice, Delta()).add(output)
        if first:
            self._doorbell.ring(self._event)

    async def take(self) -> dict[int, Delta]:
        """All that is new, by choice; waits for it."""
        await self._event.wait()
        self._event.clear()
        with self._lock:
            pending, self._pending = self._pending, {}
        return pending

    def close(self) -> None:
        """Drop what waits and what is still to come."""
        with self._lock:
            self._closed = True
            self._pending = {}
