"""Reference paged attention in plain JAX, for every backend: online softmax over blocks of pages.

The cache is a pool of pages, [pages, kv_heads, page_size, head_dim] for K and for V; a sequence owns the pages that
its row of the page table lists, in order. Queries come in rows of one sequence each: decoding has one query a row,
prefill a block of consecutive tokens a row, so that one function serves both. The softmax is accumulated block by
block (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"), up to the longest live context:
gathering whole page tables would cost memory in proportion to the longest context allowed.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

BLOCK_TOKENS_CPU, BLOCK_TOKENS = 128, 512
"""Keys that one loop step looks at. Larger blocks waste work on short contexts, smaller ones pay more loop overhead:
on a GPU the host decides after each step whether another follows."""


def write_pages(pages: jax.Array, new: jax.Array, page_ids: jax.Array, offsets: jax.Array) -> jax.Array:
    """Write K or V of new tokens into the pool.

    pages [pages, kv_heads, page_size, head_dim]; new [T, kv_heads, head_dim]; page_ids, offsets int32 [T]: the page
    and the row in it of each token. Tokens that must not be kept point at a scratch page.
    """
    return pages.at[page_ids, :, offsets].set(new.astype(pages.dtype))


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_tables: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    *,
    window: int | None = None,
) -> jax.Array:
    """Causal attention of query rows to their sequences' pages, with grouped query heads.

    q [R, Q, heads, head_dim]; k_pages, v_pages [pages, kv_heads, page_size, head_dim]; page_tables int32
    [R, max_pages]; positions int32 [R, Q]: a query sees the keys at positions up to its own; lengths int32 [R]: keys
    that the row may see (0 for a padding row, whose output is zero). With a `window` a query sees its own position and
    the window - 1 before it. Each row's first query is its earliest. Scores are scaled by head_dim ** -0.5; softmax
    and accumulation are float32. Returns [R, Q, heads, head_dim] in q's dtype.
    """
    arguments = (q, k_pages, v_pages, page_tables, positions, lengths)
    return lax.platform_dependent(
        *arguments,
        cpu=functools.partial(_attend, window=window, block_tokens=BLOCK_TOKENS_CPU),
        default=functools.partial(_attend, window=window, block_tokens=BLOCK_TOKENS),
    )


def _attend(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_tables: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    *,
    window: int | None,
    block_tokens: int,
) -> jax.Array:
    r, nq, heads, dim = q.shape
    _, kv_heads, page_size, _ = k_pages.shape
    group = heads // kv_heads
    per_block = max(1, min(block_tokens // page_size, page_tables.shape[1]))
    span = per_block * page_size
    # Padding the table with page 0 keeps the last, partial block's slice inside the table.
    page_tables = jnp.pad(page_tables, ((0, 0), (0, -page_tables.shape[1] % per_block)))
    # [R, kv_heads, group * Q, head_dim]
    qt = q.reshape(r, nq, kv_heads, group, dim).transpose(0, 2, 3, 1, 4).reshape(r, kv_heads, group * nq, dim)
    limits = jnp.minimum(positions, lengths[:, None] - 1)  # [R, Q], last key position that the query sees

    def gather(pages: jax.Array, ids: jax.Array) -> jax.Array:
        # Indexed as [pages * kv_heads] so that the heads come out in front of the pages: no transposed copy.
        rows = ids[:, None, :] * kv_heads + jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
        flat = pages.reshape(-1, page_size, dim)
        block = flat.at[rows].get(mode="promise_in_bounds")  # [R, kv_heads, per_block, page_size, head_dim]
        return block.reshape(r, kv_heads, span, dim)

    def step(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        best, total, acc = carry  # [R, kv_heads, group * Q, 1], same, [R, kv_heads, group * Q, head_dim]
        ids = lax.dynamic_slice_in_dim(page_tables, j * per_block, per_block, axis=1)
        keys = j * span + jnp.arange(span, dtype=jnp.int32)  # [span]
        seen = keys <= limits[..., None]  # [R, Q, span]
        if window is not None:
            seen &= keys > positions[..., None] - window
        mask = jnp.broadcast_to(seen[:, None, None], (r, kv_heads, group, nq, span)).reshape(r, kv_heads, -1, span)
        k = gather(k_pages, ids)
        # A freed page may hold anything, NaN included, and 0 * NaN is NaN: unseen values are cleared, not weighed 0.
        live = keys < lengths[:, None]  # [R, span]
        v = jnp.where(live[:, None, :, None], gather(v_pages, ids), 0)
        scores = jnp.einsum("rkqd,rksd->rkqs", qt, k, preferred_element_type=jnp.float32) * dim**-0.5
        scores = jnp.where(mask, scores, -jnp.inf)
        new_best = jnp.maximum(best, scores.max(axis=-1, keepdims=True))
        # Before any key is seen best is -inf, and -inf - -inf is NaN.
        safe = jnp.where(new_best == -jnp.inf, 0.0, new_best)
        weights = jnp.exp(scores - safe)
        scale = jnp.exp(best - safe)
        block = jnp.einsum("rkqs,rksd->rkqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_best, total * scale + weights.sum(axis=-1, keepdims=True), acc * scale + block

    shape = (r, kv_heads, group * nq)
    start = (
        jnp.full((*shape, 1), -jnp.inf, jnp.float32),
        jnp.zeros((*shape, 1), jnp.float32),
        jnp.zeros((*shape, dim), jnp.float32),
    )
    blocks = (lengths.max() + span - 1) // span
    first = jnp.int32(0)
    if window is not None:  # blocks before everybody's window are passed over
        earliest = jnp.where(lengths > 0, positions[:, 0] - window + 1, lengths.max())
        first = jnp.maximum(earliest.min(), 0) // span
    _, total, acc = lax.fori_loop(first, blocks, step, start)
    out = acc / jnp.maximum(total, 1e-30)  # a padding row has total 0
    return out.reshape(r, kv_heads, group, nq, dim).transpose(0, 3, 1, 2, 4).reshape(r, nq, heads, dim).astype(q.dtype)
