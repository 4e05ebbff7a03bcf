"""The page pool: who holds which page, what a prefix finds, and in which order cached pages go."""

import random

import pytest

from pallasite.serve.pages import SCRATCH, PagePool, page_hashes

TOKENS = list(range(64))


def fill(pool: PagePool, hashes: list[bytes]) -> list[int]:
    """A sequence that comes, publishes its pages and goes."""
    pages = pool.allocate(len(hashes))
    assert pages is not None
    pool.publish(pages, hashes)
    pool.release(pages)
    return pages


def test_every_page_but_scratch_can_be_allocated_once():
    pool = PagePool(9)
    pages = pool.allocate(8)
    assert sorted(pages) == list(range(1, 9))
    assert SCRATCH not in pages
    assert pool.available == 0
    pool.release(pages)
    assert pool.available == pool.total == 8


def test_too_many_takes_nothing():
    pool = PagePool(5)
    held = pool.allocate(3)
    assert pool.allocate(2) is None
    assert pool.available == 1
    assert pool.allocate(0) == []
    pool.release(held)
    assert len(pool.allocate(4)) == 4


def test_a_prefix_is_found_and_shared():
    pool, hashes = PagePool(9), page_hashes(TOKENS, 16)
    pages = pool.allocate(4)
    pool.publish(pages, hashes)
    assert pool.match(hashes[:2]) == pages[:2]
    pool.release(pages)
    # The first two still have a holder, the others are cached.
    assert pool.available == 6
    assert pool.match(hashes) == pages
    pool.release(pages)
    pool.release(pages[:2])
    assert pool.available == 8
    assert pool.cached == 4


def test_a_match_ends_at_the_first_unknown_page():
    pool, hashes = PagePool(9), page_hashes(TOKENS, 16)
    pages = fill(pool, hashes[:3])
    other = page_hashes([*TOKENS[:32], *reversed(TOKENS[32:])], 16)
    assert pool.match(other) == pages[:2]
    assert pool.match(page_hashes(TOKENS[1:], 16)) == []
    # A later page alone is no prefix.
    assert pool.match([b"unknown", *hashes[1:]]) == []


def test_the_least_recently_used_is_evicted_first():
    pool = PagePool(4)
    old, middle, new = (page_hashes([n] * 16, 16) for n in range(3))
    for hashes in (old, middle, new):
        fill(pool, hashes)
    pool.release(pool.match(old))  # now it is the most recently used
    pool.allocate(1)
    assert pool.match(middle) == []
    assert len(pool.match(new)) == len(pool.match(old)) == 1


def test_free_pages_go_before_cached_ones():
    pool = PagePool(5)
    hashes = page_hashes(TOKENS[:32], 16)
    fill(pool, hashes)
    pool.allocate(2)
    assert pool.cached == 2
    assert len(pool.match(hashes)) == 2


def test_of_a_sequence_the_tail_is_evicted_first():
    """A prefix without its first page is worth nothing."""
    pool, hashes = PagePool(5), page_hashes(TOKENS, 16)
    pages = fill(pool, hashes)
    pool.allocate(1)
    assert pool.match(hashes) == pages[:3]
    pool.release(pages[:3])
    pool.allocate(2)
    assert pool.match(hashes) == pages[:1]


def test_a_held_page_is_never_evicted():
    pool, hashes = PagePool(4), page_hashes(TOKENS[:48], 16)
    fill(pool, hashes)
    held = pool.match(hashes)
    assert pool.allocate(1) is None
    pool.release(held[1:])
    assert set(pool.allocate(2)) == set(held[1:])
    assert pool.match(hashes) == held[:1]


def test_known_content_stays_private_the_second_time():
    """Two sequences compute the same prefix at once: the first page published counts, the other is freed at the end."""
    pool, hashes = PagePool(5), page_hashes(TOKENS[:32], 16)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.publish(first, hashes)
    pool.publish(second, hashes)
    assert pool.cached == 2
    pool.release(second)
    assert pool.match(hashes) == first
    assert set(pool.allocate(2)) == set(second)


def test_publishing_again_changes_nothing():
    pool, hashes = PagePool(5), page_hashes(TOKENS[:32], 16)
    pages = pool.allocate(2)
    pool.publish(pages, hashes)
    pool.publish(pages, page_hashes(TOKENS[32:], 16))
    assert pool.match(page_hashes(TOKENS[32:], 16)) == []
    assert pool.match(hashes) == pages


def test_forget_all_keeps_held_pages_and_frees_the_rest():
    pool, hashes = PagePool(6), page_hashes(TOKENS, 16)
    pages = fill(pool, hashes)
    held = pool.match(hashes[:1])
    pool.forget_all()
    assert pool.cached == 0
    assert pool.match(hashes) == []
    assert pool.available == 4
    pool.release(held)
    assert sorted(pool.allocate(5)) == sorted({*pages, *range(1, 6)})


def test_release_without_a_hold_is_a_bug_that_shows():
    pool = PagePool(3)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match=f"page {pages[0]} released more often than held"):
        pool.release(pages)


def test_only_full_pages_have_a_hash():
    assert [len(page_hashes(TOKENS[:n], 16)) for n in (0, 15, 16, 17, 31, 32)] == [0, 0, 1, 1, 1, 2]
    assert page_hashes(TOKENS[:40], 16) == page_hashes(TOKENS, 16)[:2]


def test_hashes_depend_on_tokens_order_and_everything_before():
    base = page_hashes(TOKENS, 16)
    assert base == page_hashes(tuple(TOKENS), 16)
    assert len(set(base)) == 4
    swapped = page_hashes([*TOKENS[16:32], *TOKENS[:16], *TOKENS[32:]], 16)
    assert not set(base) & set(swapped)
    changed = page_hashes([*TOKENS[:20], 99, *TOKENS[21:]], 16)
    assert [a == b for a, b in zip(base, changed, strict=True)] == [True, False, False, False]
    assert page_hashes([1, 0] * 8, 16) != page_hashes([0, 1] * 8, 16)
    assert page_hashes([2**31 - 1] * 16, 16) != page_hashes([-1] * 16, 16)


def test_hashes_depend_on_tags():
    base = page_hashes(TOKENS, 16)
    assert page_hashes(TOKENS, 16, tag=0) == base
    assert not set(base) & set(page_hashes(TOKENS, 16, tag=80))
    assert page_hashes(TOKENS, 16, tag=80) == page_hashes(TOKENS, 16, tag=80)


class Ledger:
    """What the pool must be, kept the slow way: who holds what, and what is known about each page."""

    def __init__(self, pages: int):
        self.pool = PagePool(pages)
        self.holds: list[tuple[list[int], list[bytes]]] = []
        self.content: dict[int, bytes] = {}

    def check(self) -> None:
        held = {p for pages, _ in self.holds for p in pages}
        idle = set(self.content) - held
        free = self.pool.total - len(held | idle)
        assert self.pool.available == free + len(idle)
        assert self.pool.cached == len(self.content)
        assert len(set(self.content.values())) == len(self.content)
        # Nothing lost, nothing owned twice: the pool's own lists say the same.
        assert sorted(self.pool._free) == sorted(set(range(1, self.pool.total + 1)) - held - idle)
        assert set(self.pool._idle) == idle
        for page in range(1, self.pool.total + 1):
            assert self.pool._holders[page] == sum(pages.count(page) for pages, _ in self.holds)

    def admit(self, hashes: list[bytes], more: int) -> None:
        found = self.pool.match(hashes)
        assert [self.content[p] for p in found] == hashes[: len(found)]
        assert len(found) == len(hashes) or hashes[len(found)] not in self.content.values()
        self.holds.append((found, hashes))
        held = {p for pages, _ in self.holds for p in pages}
        taken = self.pool.allocate(len(hashes) - len(found) + more)
        room = self.pool.total - len(held)
        assert (taken is None) == (room < len(hashes) - len(found) + more)
        if taken is None:
            self.release(len(self.holds) - 1)
            return
        assert not set(taken) & held
        assert len(set(taken)) == len(taken)
        for page in taken:
            self.content.pop(page, None)
        found.extend(taken)

    def publish(self, which: int) -> None:
        pages, hashes = self.holds[which]
        self.pool.publish(pages, hashes)
        for page, page_hash in zip(pages, hashes, strict=False):
            if page_hash not in self.content.values():
                self.content.setdefault(page, page_hash)

    def release(self, which: int) -> None:
        self.pool.release(self.holds.pop(which)[0])


@pytest.mark.parametrize("seed", range(8))
def test_random_life_against_a_ledger(seed):
    """Sequences with common prefixes come, publish, and go in any order; the pool is whole after every event."""
    rng, ledger = random.Random(seed), Ledger(24)
    stories = [page_hashes([s // 2] * 32 + [s] * 96, 16) for s in range(6)]
    for _ in range(400):
        event = rng.random()
        if event < 0.4:
            story = rng.choice(stories)
            ledger.admit(story[: rng.randrange(len(story) + 1)], rng.randrange(3))
        elif ledger.holds and event < 0.65:
            ledger.publish(rng.randrange(len(ledger.holds)))
        elif ledger.holds and event < 0.99:
            ledger.release(rng.randrange(len(ledger.holds)))
        elif event >= 0.99:
            ledger.pool.forget_all()
            ledger.content.clear()
        ledger.check()
    while ledger.holds:
        ledger.release(0)
    ledger.check()
    assert ledger.pool.available == ledger.pool.total
