"""Paged attention and page writes against dense attention in float64, over tables that scatter the pages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasite.kernels.paged_attention import paged_attention, write_pages
from pallasite.kernels.paged_attention.reference import BLOCK_TOKENS_CPU

DIM = 8


class Pool:
    """Sequences of the given lengths in shuffled pages; every row that no sequence owns holds `stale`."""

    def __init__(self, lengths, page_size, *, kv_heads=2, max_pages=None, stale=np.nan, seed=0):
        rng = np.random.default_rng(seed)
        needed = [-(-n // page_size) for n in lengths]
        total = sum(needed) + 2
        order = list(rng.permutation(np.arange(1, total)))
        self.lengths, self.kv_heads = lengths, kv_heads
        self.k_pages, self.v_pages = np.full((2, total, kv_heads, page_size, DIM), stale, np.float32)
        self.tables = np.zeros((len(lengths), max_pages or max(needed, default=1)), np.int32)
        self.keys, self.values = [], []  # of each sequence, [length, kv_heads, DIM]
        for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
            k, v = rng.normal(size=(2, length, kv_heads, DIM)).astype(np.float32)
            self.keys.append(k)
            self.values.append(v)
            for i in range(count):
                page = self.tables[row, i] = order.pop()
                part = slice(i * page_size, min(length, (i + 1) * page_size))
                self.k_pages[page, :, : part.stop - part.start] = k[part].swapaxes(0, 1)
                self.v_pages[page, :, : part.stop - part.start] = v[part].swapaxes(0, 1)

    def dense(self, q: np.ndarray, positions: np.ndarray, window: int | None = None) -> np.ndarray:
        """float64 [R, Q, heads, DIM]: every query alone, with a plain softmax over the keys that it sees."""
        out = np.zeros(q.shape)
        group = q.shape[2] // self.kv_heads
        for r, i, h in np.ndindex(q.shape[:3]):
            end = min(positions[r, i] + 1, self.lengths[r])
            first = max(0, positions[r, i] + 1 - window) if window else 0
            if end <= first:
                continue
            seen = slice(first, end)
            k, v = self.keys[r][seen, h // group].astype(float), self.values[r][seen, h // group].astype(float)
            scores = k @ q[r, i, h].astype(float) / np.sqrt(DIM)
            weights = np.exp(scores - scores.max())
            out[r, i, h] = weights @ v / weights.sum()
        return out

    def check(self, q: np.ndarray, positions: np.ndarray, window: int | None = None) -> np.ndarray:
        attend = jax.jit(functools.partial(paged_attention, window=window))
        lengths = np.asarray(self.lengths, np.int32)
        got = np.asarray(attend(q, self.k_pages, self.v_pages, self.tables, positions, lengths))
        np.testing.assert_allclose(got, self.dense(q, positions, window), atol=2e-6, rtol=1e-5)
        return got


def queries(rows: int, count: int, heads: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, count, heads, DIM)).astype(np.float32)


@pytest.mark.parametrize(
    ("page_size", "heads", "kv_heads"), [(16, 2, 2), (16, 4, 1), (16, 6, 2), (64, 6, 2), (128, 6, 2)]
)
def test_decode_rows_of_ragged_lengths(page_size, heads, kv_heads):
    lengths = [1, page_size - 1, page_size, page_size + 1, 200]
    pool = Pool(lengths, page_size, kv_heads=kv_heads)
    positions = np.asarray(lengths, np.int32)[:, None] - 1
    pool.check(queries(len(lengths), 1, heads), positions)


@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_prefill_rows_are_causal(page_size):
    """Blocks of 8 tokens at the start, in the middle and at the end of their sequences."""
    pool = Pool([8, 120, 200], page_size, max_pages=16)
    starts = np.asarray([0, 57, 192])
    pool.check(queries(3, 8, 4), (starts[:, None] + np.arange(8)).astype(np.int32))


def test_contexts_longer_than_one_block_of_keys():
    lengths = [BLOCK_TOKENS_CPU - 1, BLOCK_TOKENS_CPU, BLOCK_TOKENS_CPU + 1, 3 * BLOCK_TOKENS_CPU + 5]
    pool = Pool(lengths, 64)
    pool.check(queries(4, 1, 4), np.asarray(lengths, np.int32)[:, None] - 1)


def test_a_table_wider_than_a_block_and_no_multiple_of_it():
    pool = Pool([300, 17], 16, max_pages=21)  # 8 pages are one block
    pool.check(queries(2, 1, 2), np.asarray([[299], [16]], np.int32))


@pytest.mark.parametrize("window", [1, 17, BLOCK_TOKENS_CPU, 1000])
def test_a_window_ends_behind_the_query(window):
    """Decoding, and blocks of 8 queries; the first block of keys holds nothing that the longest row may see."""
    lengths = [1, 15, 16, 17, 130, 600]
    pool = Pool(lengths, 16, max_pages=40)
    pool.check(queries(6, 1, 4), np.asarray(lengths, np.int32)[:, None] - 1, window)
    starts = np.asarray([0, 7, 8, 9, 122, 592])
    pool.check(queries(6, 8, 4), (starts[:, None] + np.arange(8)).astype(np.int32), window)


def test_blocks_before_every_window_are_not_read():
    """And padding, whose positions are 0, doesn't make them be: a row of length 0, and queries behind a row's last."""
    pool = Pool([BLOCK_TOKENS_CPU * 4, 0, BLOCK_TOKENS_CPU * 5], 16)
    block = BLOCK_TOKENS_CPU // 16
    for row in (0, 2):
        pool.v_pages[pool.tables[row, : 2 * block]] = np.nan
    positions = np.asarray([[505, 506, 511, 0], [0, 0, 0, 0], [620, 630, 639, 0]], np.int32)
    lengths = np.asarray(pool.lengths, np.int32)
    attend = jax.jit(functools.partial(paged_attention, window=BLOCK_TOKENS_CPU))
    got = attend(queries(3, 4, 4), pool.k_pages, pool.v_pages, pool.tables, positions, lengths)
    want = pool.dense(queries(3, 4, 4), positions, BLOCK_TOKENS_CPU)
    np.testing.assert_allclose(np.asarray(got)[:, :3], want[:, :3], atol=2e-6, rtol=1e-5)


def test_large_scores_neither_overflow_nor_lose_the_largest_key():
    pool = Pool([600], 64)
    pool.check(queries(1, 1, 2) * 300, np.asarray([[599]], np.int32))


def test_padding_rows_and_padding_queries():
    """A row of length 0 is zero; queries past their row's length see the row's keys and are finite."""
    pool = Pool([0, 5, 0], 16, max_pages=4)
    got = pool.check(queries(3, 4, 4), np.asarray([[0, 1, 2, 3], [3, 4, 5, 6], [0, 0, 0, 0]], np.int32))
    assert not got[[0, 2]].any()


def test_only_padding_rows():
    assert not Pool([0, 0], 16, max_pages=2).check(queries(2, 1, 2), np.zeros((2, 1), np.int32)).any()


@pytest.mark.parametrize("stale", [np.nan, np.inf, -np.inf])
def test_stale_pages_do_not_leak(stale):
    """What a freed page, the scratch page, or the rest of a last page holds changes no bit of the result."""
    lengths, q = [3, 16, 130], queries(3, 4, 4)
    positions = np.asarray([[0, 1, 2, 9], [12, 13, 14, 15], [3, 4, 128, 129]], np.int32)
    clean = Pool(lengths, 16, max_pages=12, stale=0).check(q, positions)
    np.testing.assert_array_equal(Pool(lengths, 16, max_pages=12, stale=stale).check(q, positions), clean)


def test_a_row_does_not_depend_on_its_neighbours():
    """Longer neighbours add loop steps, which must leave the row's own sums alone."""
    crowd, q = Pool([100, 600, 7], 16, max_pages=40), queries(3, 1, 4)
    positions = np.asarray([[99], [599], [6]], np.int32)
    together = crowd.check(q, positions)
    crowd.lengths = [100, 0, 0]
    np.testing.assert_array_equal(crowd.check(q, positions)[0], together[0])


def test_bfloat16_pages_accumulate_in_float32():
    pool = Pool([700], 64)
    for pages in ("k_pages", "v_pages"):
        setattr(pool, pages, jnp.asarray(getattr(pool, pages), jnp.bfloat16))
    pool.keys = [np.asarray(k.astype(jnp.bfloat16), np.float32) for k in pool.keys]
    pool.values = [np.asarray(v.astype(jnp.bfloat16), np.float32) for v in pool.values]
    q = jnp.asarray(queries(1, 1, 4), jnp.bfloat16)
    positions = np.asarray([[699]], np.int32)
    got = paged_attention(q, pool.k_pages, pool.v_pages, pool.tables, positions, np.asarray([700], np.int32))
    assert got.dtype == jnp.bfloat16
    want = pool.dense(np.asarray(q, np.float32), positions)
    # bf16 keeps 8 bits: of the weights (relative to each) and of the result.
    np.testing.assert_allclose(np.asarray(got, float), want, atol=2e-3, rtol=2**-7)


def test_write_pages_writes_the_tokens_rows_and_nothing_else():
    rng = np.random.default_rng(3)
    pages = rng.normal(size=(5, 2, 16, DIM)).astype(np.float32)
    new = rng.normal(size=(4, 2, DIM)).astype(np.float32)
    ids, offsets = np.asarray([3, 3, 1, 4], np.int32), np.asarray([15, 0, 7, 2], np.int32)
    want = pages.copy()
    for t in range(4):
        want[ids[t], :, offsets[t]] = new[t]
    np.testing.assert_array_equal(write_pages(jnp.asarray(pages), new, ids, offsets), want)


def test_write_pages_rounds_to_the_pools_dtype():
    pages = write_pages(
        jnp.zeros((2, 1, 16, 1), jnp.bfloat16), np.float32([[[1 + 2**-10]]]), np.int32([1]), np.int32([4])
    )
    assert pages.dtype == jnp.bfloat16
    assert pages[1, 0, 4, 0] == 1
