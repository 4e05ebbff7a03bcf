"""The packed array of a prefill step, and what the device makes of it."""

import jax.numpy as jnp
import numpy as np

from pallasite.serve.steps import Chunk, PrefillLayout, _prefill_batch
from pallasite.serve.types import GenerationConfig, Request, Sequence

LAYOUT = PrefillLayout(tokens=128, rows=2, max_pages=8, scratch_slot=4)


def sequence(tokens: list[int], prompt_len: int, pages: list[int], slot: int) -> Sequence:
    request = Request("steps", tokens[:prompt_len], GenerationConfig(), lambda output: None)
    return Sequence(request, tokens, prompt_len, 200, 0, slot=slot, pages=pages)


def test_two_chunks_in_one_step():
    """The second chunk of a recomputed sequence (prompt of 50 and 20 generated), and the first of a short prompt."""
    long = sequence(list(range(100, 170)), 50, [5, 6, 7, 2, 3], slot=1)
    short = sequence([7, 8, 9], 3, [9], slot=3)
    packed = jnp.asarray(LAYOUT.pack([Chunk(long, 32, 38), Chunk(short, 0, 3)]))
    batch, (slots, ends, final), _, tables, last = _prefill_batch(LAYOUT, packed, page_size=16)

    live = np.r_[0:38, 64:67]  # a chunk begins on a block of 32
    padding = np.setdiff1d(np.arange(128), live)
    places = np.r_[32:70, 0:3]
    np.testing.assert_array_equal(batch.tokens[live], [*range(132, 170), 7, 8, 9])
    np.testing.assert_array_equal(batch.positions[live], places)
    # The prompt's, not that of all tokens to prefill, nor the chunk's.
    np.testing.assert_array_equal(batch.prompt_lengths[live], [50] * 38 + [3] * 3)
    pages = [[5, 6, 7, 2, 3][p // 16] for p in range(32, 70)] + [9] * 3
    np.testing.assert_array_equal(batch.write_pages[live], pages)
    np.testing.assert_array_equal(batch.write_offsets[live], places % 16)
    np.testing.assert_array_equal(batch.write_pages[padding], 0)

    np.testing.assert_array_equal(batch.lengths, [70, 70, 3, 0])  # a row of queries a block; 0: padding
    np.testing.assert_array_equal(batch.page_tables[2, :1], [9])
    np.testing.assert_array_equal(slots, [1, 3])
    np.testing.assert_array_equal(ends, [70, 3])
    np.testing.assert_array_equal(final, [True, True])
    np.testing.assert_array_equal(last, [37, 66])
    assert tables.shape == (2, 8)


def test_unused_rows_and_blocks_are_inert():
    batch, (slots, _, final), *_ = _prefill_batch(LAYOUT, jnp.asarray(LAYOUT.pack([])), page_size=16)
    np.testing.assert_array_equal(slots, [4, 4])  # the scratch slot
    np.testing.assert_array_equal(final, [False, False])
    np.testing.assert_array_equal(batch.write_pages, 0)
    np.testing.assert_array_equal(batch.lengths, 0)
