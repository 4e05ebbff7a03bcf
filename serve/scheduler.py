"""Who runs next: admission in arrival order, prompts cut into chunks, pages for decoding, preemption when they run out.

Pure host logic, no JAX: it plans, the engine launches. Launches run on the device in the order they are made, so a
page given up now may be handed out at once: whatever the launches in flight still write there, its next owner's
prefill comes after and overwrites it.
"""

import bisect
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

from pallasite.serve.config import BLOCK
from pallasite.serve.pages import PagePool, page_hashes
from pallasite.serve.programs import Sizes
from pallasite.serve.steps import Chunk
from pallasite.serve.types import Phase, Sequence


class PagesShort(Exception):
    """Decoding needs a page and none is left; the launches in flight must be read before a sequence is preempted."""


class Scheduler:
    """Sequences by phase, and the pages and slots that they hold.

    page_tag: of a prompt's length, see Model: pages are shared only between sequences whose tags are equal.
    """

    def __init__(self, sizes: Sizes, max_rows: int, prefix_caching: bool, page_tag: Callable[[int], int]):
        self.sizes, self.max_rows = sizes, max_rows
        self.prefix_caching, self.page_tag = prefix_caching, page_tag
        self.pool = PagePool(sizes.pages)
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.scoring: list[Sequence] = []
        self.running: list[Sequence] = []  # decoding, by arrival
        self.preemptions = 0
        self._slots = list(range(sizes.slots - 1, -1, -1))

    @property
    def active(self) -> list[Sequence]:
        """Sequences that hold pages."""
        return [*self.running, *self.prefilling, *self.scoring]

    def add(self, seq: Sequence) -> None:
        """Put a sequence in the queue at the place of its arrival."""
        seq.phase = Phase.WAITING
        if not self.waiting or self.waiting[-1].order < seq.order:
            self.waiting.append(seq)
        else:
            at = bisect.bisect([s.order for s in self.waiting], seq.order)
            self.waiting.insert(at, seq)

    # Admission.

    def admit(self) -> None:
        """Give pages and slots to waiting sequences, in arrival order, as far as they go."""
        while self.waiting:
            seq = self.waiting[0]
            if not seq.request.score and not self._slots:
                return
            hashes = self._hashes(seq, len(seq.tokens) - 1)
            found = self.pool.match(hashes)
            need = self._pages_for(len(seq.tokens)) - len(found)
            # Keep a page for each decoding sequence, or the newcomer would soon be preempted for them.
            if self.active and self.pool.available - need < len(self.running):
                self.pool.release(found)
                return
            pages = self.pool.allocate(need)
            if pages is None:
                self.pool.release(found)
                return
            self.waiting.popleft()
            seq.pages = found + pages
            seq.prefilled = len(found) * self.sizes.page_size
            seq.position = len(seq.tokens)
            if seq.reused is None:
                seq.reused = min(seq.prefilled, seq.prompt_len)
            seq.phase = Phase.PREFILL
            if seq.request.score:
                self.scoring.append(seq)
            else:
                seq.slot = self._slots.pop()
                bisect.insort(self.prefilling, seq, key=lambda s: s.order)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.sizes.page_size)

    def _hashes(self, seq: Sequence, tokens: int) -> list[bytes]:
        """Hashes of the full pages in the first `tokens` tokens; none where prefixes are not shared."""
        if not self.prefix_caching or seq.request.score:
            return []
        return page_hashes(seq.tokens[:tokens], self.sizes.page_size, self.page_tag(seq.prompt_len))

    # Prefill.

    def next_chunks(self) -> list[Chunk]:
        """Chunks for one prefill step, [] if no prompt is waiting for one.

        The oldest sequence gets half of the step's tokens at least, so that it always ends; the others share the rest,
        the shortest remainder first, so that a short prompt needn't wait for a long one.
        """
        queue = self.prefilling
        if not queue:
            return []
        budget = self.sizes.prefill_tokens // BLOCK
        oldest, others = queue[0], sorted(queue[1:], key=lambda s: len(s.tokens) - s.prefilled)
        blocks = {seq: -(-(len(seq.tokens) - seq.prefilled) // BLOCK) for seq in queue}
        given = {oldest: min(blocks[oldest], max(1, budget // 2))}
        budget -= given[oldest]
        for seq in others[: self.max_rows - 1]:
            if budget <= 0:
                break
            given[seq] = min(blocks[seq], budget)
            budget -= given[seq]
        given[oldest] += min(budget, blocks[oldest] - given[oldest])
        return [self._take(seq, count * BLOCK) for seq, count in given.items()]

    def next_score(self) -> Chunk | None:
        """A chunk for one scoring step."""
        seq = next((seq for seq in self.scoring if seq.prefilled < len(seq.tokens)), None)
        return self._take(seq, self.sizes.prefill_tokens) if seq else None

    def _take(self, seq: Sequence, most: int) -> Chunk:
        chunk = Chunk(seq, seq.prefilled, min(most, len(seq.tokens) - seq.prefilled))
        seq.prefilled += chunk.count
        seq.known_pages = len(seq.pages)  # each chunk brings the whole page table along
        if chunk.final and not seq.request.score:
            self.prefilling.remove(seq)
            seq.phase = Phase.DECODE
            bisect.insort(self.running, seq, key=lambda s: s.order)
        return chunk

    def publish(self, seq: Sequence, tokens: int) -> None:
        """Let others find the pages of the first `tokens` tokens, whose K and V are written."""
        self.pool.publish(seq.pages, self._hashes(seq, tokens))

    # Decode.

    def next_decode(self, steps: int, may_preempt: bool) -> tuple[list[Sequence], list[tuple[int, int]], int]:
        """Rows of one decode launch, for each the page-table edit it needs (column, page), and the number of steps.

        Pages for every position that the launch can write are taken first. Raises PagesShort where none is left and
        may_preempt is False; else the latest arrivals give up theirs.
        """
        rows: list[Sequence] = []
        ready = [seq for seq in self.running if seq.steps_left > 0]
        steps = min(steps, max((seq.steps_left for seq in ready), default=0))
        for seq in ready:
            if seq.phase is not Phase.DECODE:
                continue  # preempted for an earlier one
            # One page is enough: a launch has at most a page's worth of steps.
            if self._pages_for(seq.position + min(steps, seq.steps_left)) > len(seq.pages):
                page = self._page_for(seq, may_preempt)
                if page is None:
                    continue
                seq.pages.append(page)
            rows.append(seq)
        rows = [seq for seq in rows if seq.phase is Phase.DECODE]
        edits = [(self.sizes.max_pages, 0)] * len(rows)
        for i, seq in enumerate(rows):
            seq.position += min(steps, seq.steps_left)
            if seq.known_pages < len(seq.pages):
                edits[i] = (len(seq.pages) - 1, seq.pages[-1])
                seq.known_pages = len(seq.pages)
        return rows, edits, steps

    def _page_for(self, seq: Sequence, may_preempt: bool) -> int | None:
        """A page for `seq`, preempting the latest arrival as often as needed; None if that was `seq` itself."""
        while (pages := self.pool.allocate(1)) is None:
            if not may_preempt:
                raise PagesShort
            victim = max(self.active, key=lambda s: s.order)
            self.preempt(victim)
            if victim is seq:
                return None
        return pages[0]

    # Leaving.

    def preempt(self, seq: Sequence) -> None:
        """Take a sequence's pages; it goes back to the queue and is recomputed from its tokens. Nothing of it may be
        in flight."""
        self.preemptions += 1
        self.remove(seq)
        seq.scored.clear()
        self.add(seq)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it is; its full pages stay findable."""
        if seq.phase is Phase.WAITING:
            self.waiting.remove(seq)
        for group in (self.prefilling, self.scoring, self.running):
            if seq in group:
                group.remove(seq)
        if seq.phase is Phase.DECODE:
            # The last token's K and V may not be written yet.
            self.publish(seq, len(seq.tokens) - 1)
        self.pool.release(seq.pages)
        seq.pages = []
        if seq.slot >= 0:
            self._slots.append(seq.slot)
            seq.slot = -1
        seq.phase = Phase.FINISHED

    def reset(self) -> Seq[Sequence]:
        """Forget the pool's content; returns the sequences that held pages, now in no phase's list."""
        lost = self.active
        for seq in lost:
            seq.pages, seq.slot = [], -1
        self.running, self.prefilling, self.scoring = [], [], []
        self.pool = PagePool(self.sizes.pages)
        self._slots = list(range(self.sizes.slots - 1, -1, -1))
        return lost
