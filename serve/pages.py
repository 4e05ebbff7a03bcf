"""The KV pool's pages on the host: who holds which, and which hold a prefix that another prompt may reuse.

A page is free, held (by one or more sequences), or cached: held by nobody, but its content is known by a hash and
stays until the space is needed, least recently used first. A page's hash covers its tokens, all tokens before them
(each hash covers the one before), and a tag for the rotary base they were written under.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

SCRATCH = 0
"""Page 0 belongs to nobody: padding and finished slots write there."""


def page_hashes(tokens: Sequence[int], page_size: int, tag: int = 0) -> list[bytes]:
    """The hash of each full page of `tokens`; chains of different tags have no hash in common."""
    ids = np.asarray(tokens, np.int64)
    hashes: list[bytes] = []
    previous = tag.to_bytes(8, "little")
    for i in range(len(ids) // page_size):
        digest = hashlib.blake2b(previous, digest_size=16)
        digest.update(ids[i * page_size : (i + 1) * page_size].tobytes())
        previous = digest.digest()
        hashes.append(previous)
    return hashes


class PagePool:
    """Allocation, sharing and eviction of `pages` pages, of which page 0 is scratch."""

    def __init__(self, pages: int):
        self.total = pages - 1
        self._free = list(range(pages - 1, SCRATCH, -1))
        self._holders = [0] * pages
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached pages that nobody holds, oldest first

    @property
    def available(self) -> int:
        """Pages that could be allocated now, cached ones included."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Pages whose content is known by a hash."""
        return len(self._hash_of)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages for one holder, evicting cached ones as needed; None (and none taken) if there are too few."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self._forget(page)
            self._holders[page] = 1
            taken.append(page)
        return taken

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The cached pages of the longest known prefix of `hashes`, now held once more each."""
        found = []
        for page_hash in hashes:
            page = self._page_of.get(page_hash)
            if page is None:
                break
            self._idle.pop(page, None)
            self._holders[page] += 1
            found.append(page)
        return found

    def publish(self, pages: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Make held pages findable. Where the content is known already, the page stays private."""
        for page, page_hash in zip(pages, hashes, strict=False):
            if page_hash not in self._page_of and page not in self._hash_of:
                self._hash_of[page] = page_hash
                self._page_of[page_hash] = page

    def release(self, pages: Sequence[int]) -> None:
        """Give up one hold on each page. The last pages of a sequence become the first to be evicted."""
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} released more often than held"
            if self._holders[page]:
                continue
            if page in self._hash_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def forget_all(self) -> None:
        """Drop the prefix cache: no page can be found any more. Held pages stay held."""
        for page in list(self._hash_of):
            self._forget(page)
        self._free.extend(self._idle)
        self._idle.clear()

    def _forget(self, page: int) -> None:
        del self._page_of[self._hash_of.pop(page)]
