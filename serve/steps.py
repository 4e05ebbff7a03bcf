"""The step programs as traced functions: prefill, decode, score, and the one that sets a slot's penalty counts.

They run inside one shard_map over the mesh. What a step needs from the host comes as one packed int32 array, whose
layout is written down here once, beside the code that reads it.
"""

import dataclasses
from collections.abc import Sequence as Seq

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasite.models.decoder import KVCache, TokenBatch
from pallasite.models.model import CallableModel
from pallasite.serve.config import BLOCK
from pallasite.serve.pages import SCRATCH
from pallasite.serve.sampling import NOT_FINITE, Sampled, sample
from pallasite.serve.slots import PARAMS_WIDTH, SlotState, pack_params, unpack_params
from pallasite.serve.types import MAX_LOGPROBS, Sequence

NOTHING = -1
"""In a step's tokens: this slot had stopped before."""

_ROW = ("slot", "start", "count", "first_block", "final")


@dataclasses.dataclass(frozen=True)
class Chunk:
    """`count` tokens of a sequence, from position `start`, to prefill in one step. final: the prompt ends with them."""

    seq: Sequence
    start: int
    count: int

    @property
    def final(self) -> bool:
        return self.start + self.count == len(self.seq.tokens)

    @property
    def blocks(self) -> int:
        """Blocks of BLOCK tokens that the chunk fills or begins."""
        return -(-self.count // BLOCK)


@dataclasses.dataclass(frozen=True)
class PrefillLayout:
    """Sizes of a prefill bucket: flat tokens, rows (sequences), pages in a table, and the scratch slot's number."""

    tokens: int
    rows: int
    max_pages: int
    scratch_slot: int

    @property
    def blocks(self) -> int:
        return self.tokens // BLOCK

    @property
    def width(self) -> int:
        """int32 words of the packed array."""
        return self.tokens + self.blocks + self.rows * (len(_ROW) + PARAMS_WIDTH + self.max_pages)

    def pack(self, chunks: Seq[Chunk]) -> np.ndarray:
        """The packed array of up to `rows` chunks, which together fill at most `blocks` blocks."""
        tokens = np.zeros(self.tokens, np.int32)
        block_rows = np.zeros(self.blocks, np.int32)
        rows = np.zeros((self.rows, len(_ROW)), np.int32)
        rows[:, 0] = self.scratch_slot
        rows[:, 3] = self.blocks  # no block belongs to an unused row
        params = np.zeros((self.rows, PARAMS_WIDTH), np.int32)
        tables = np.full((self.rows, self.max_pages), SCRATCH, np.int32)
        block = 0
        for i, chunk in enumerate(chunks):
            seq = chunk.seq
            tokens[block * BLOCK : block * BLOCK + chunk.count] = seq.tokens[chunk.start : chunk.start + chunk.count]
            block_rows[block : block + chunk.blocks] = i
            slot = seq.slot if seq.slot >= 0 else self.scratch_slot
            rows[i] = (slot, chunk.start, chunk.count, block, chunk.final)
            params[i] = pack_params(seq)
            tables[i, : len(seq.pages)] = seq.pages
            block += chunk.blocks
        # Padding blocks ride on the first unused row, which owns none, or on the last row, past its count.
        block_rows[block:] = min(len(chunks), self.rows - 1)
        return np.concatenate([tokens, block_rows, rows.ravel(), params.ravel(), tables.ravel()])

    def unpack(self, packed: jax.Array) -> tuple[jax.Array, ...]:
        """tokens [T], block_rows [T / BLOCK], rows [R, 5], params [R, PARAMS_WIDTH], tables [R, max_pages]."""
        shapes = [
            (self.tokens,),
            (self.blocks,),
            (self.rows, len(_ROW)),
            (self.rows, PARAMS_WIDTH),
            (self.rows, self.max_pages),
        ]
        parts, at = [], 0
        for shape in shapes:
            size = int(np.prod(shape))
            parts.append(packed[at : at + size].reshape(shape))
            at += size
        return tuple(parts)


def _prefill_batch(layout: PrefillLayout, packed: jax.Array, page_size: int):
    """The TokenBatch of a packed prefill, and the rows' fields, parameters, page tables and last tokens' places."""
    tokens, block_rows, rows, params, tables = layout.unpack(packed)
    slots, starts, counts, first_blocks, final = rows.T
    token_rows = jnp.repeat(block_rows, BLOCK)  # [T]
    place = jnp.arange(layout.tokens) - first_blocks[token_rows] * BLOCK  # [T], within the row's chunk
    live = (place >= 0) & (place < counts[token_rows])
    positions = jnp.where(live, starts[token_rows] + place, 0)
    page_of = tables[token_rows, positions // page_size]
    block_live = live[::BLOCK]
    batch = TokenBatch(
        tokens=tokens,
        positions=positions,
        prompt_lengths=unpack_params(params).prompt_lengths[token_rows],
        write_pages=jnp.where(live, page_of, SCRATCH),
        write_offsets=positions % page_size,
        page_tables=tables[block_rows],
        lengths=jnp.where(block_live, (starts + counts)[block_rows], 0),
    )
    last = jnp.clip(
        first_blocks * BLOCK + counts - 1, 0, layout.tokens - 1
    )  # [R], the chunk's last token in the flat array
    return batch, (slots, starts + counts, final != 0), params, tables, last


def prefill(
    model: CallableModel,
    caches: list[KVCache],
    state: SlotState,
    packed: jax.Array,
    *,
    layout: PrefillLayout,
    page_size: int,
) -> tuple[list[KVCache], SlotState, Sampled]:
    """Run a chunk of each row's prompt; where the prompt ends with it, sample the first token into the slot."""
    batch, (slots, ends_at, final), params, tables, last = _prefill_batch(layout, packed, page_size)
    hidden, caches = model(batch, caches)
    fields = unpack_params(params)
    state = dataclasses.replace(
        state, params=state.params.at[slots].set(params), page_tables=state.page_tables.at[slots].set(tables)
    )
    sampled = sample(model.logits(hidden[last]), fields, ends_at, state.prompt_seen, state.output_counts, slots)
    stopped = _stopped(sampled.tokens, fields.stop_ids) | (ends_at + 1 >= fields.ends)
    # Rows whose prompt goes on must not touch the slot's running fields: they write to the scratch slot instead.
    targets = jnp.where(final, slots, layout.scratch_slot)
    state = dataclasses.replace(
        state,
        tokens=state.tokens.at[targets].set(sampled.tokens),
        positions=state.positions.at[targets].set(ends_at),
        done=state.done.at[targets].set(stopped),
        output_counts=_count(state.output_counts, targets, sampled.tokens, fields.has_penalty),
    )
    return caches, state, jax.tree.map(lambda x: x[None], sampled)


def _stopped(tokens: jax.Array, stop_ids: jax.Array) -> jax.Array:
    """bool [B]: the token is one of the row's stop ids, or the row failed."""
    return (tokens[:, None] == stop_ids).any(axis=1) | (tokens == NOT_FINITE)


def _count(counts: jax.Array, slots: jax.Array, tokens: jax.Array, active: jax.Array) -> jax.Array:
    """Add the rows' tokens to their slots' output counts; rows that are not active (bool [B]) add nothing."""
    tokens = jnp.where(active & (tokens >= 0), tokens, counts.shape[1])
    return counts.at[slots, tokens].add(1, mode="drop")


def decode(
    model: CallableModel,
    caches: list[KVCache],
    state: SlotState,
    packed: jax.Array,
    *,
    slots: int,
    max_steps: int,
    page_size: int,
) -> tuple[list[KVCache], SlotState, Sampled]:
    """Run up to max_steps tokens of each slot of a bucket of `slots` rows.

    packed int32 [3 * slots + 1]: slot numbers, page-table columns (max_pages: no edit), page ids, number of steps.
    The results have a leading axis of max_steps; rows past the number of steps, and slots that had stopped, hold
    NOTHING.
    """
    ids, columns, page_ids, steps = packed[:slots], packed[slots : 2 * slots], packed[2 * slots : 3 * slots], packed[-1]
    page_tables = state.page_tables.at[ids, columns].set(page_ids, mode="drop")
    tables = page_tables[ids]  # [B, max_pages]
    fields = unpack_params(state.params[ids])
    results = Sampled(
        tokens=jnp.full((max_steps, slots), NOTHING, jnp.int32),
        logprobs=jnp.zeros((max_steps, slots), jnp.float32),
        top_logprobs=jnp.zeros((max_steps, slots, MAX_LOGPROBS), jnp.float32),
        top_ids=jnp.zeros((max_steps, slots, MAX_LOGPROBS), jnp.int32),
    )

    def step(i: jax.Array, carry):
        caches, tokens, positions, done, counts, results = carry
        pages = jnp.take_along_axis(tables, (positions // page_size)[:, None], axis=1)[:, 0]
        batch = TokenBatch(
            tokens=tokens,
            positions=positions,
            prompt_lengths=fields.prompt_lengths,
            write_pages=jnp.where(done, SCRATCH, pages),
            write_offsets=positions % page_size,
            page_tables=tables,
            lengths=jnp.where(done, 0, positions + 1),
        )
        hidden, caches = model(batch, caches)
        sampled = sample(model.logits(hidden), fields, positions + 1, state.prompt_seen, counts, ids)
        counts = _count(counts, ids, sampled.tokens, fields.has_penalty & ~done)
        stopped = done | _stopped(sampled.tokens, fields.stop_ids) | (positions + 2 >= fields.ends)
        emitted = dataclasses.replace(sampled, tokens=jnp.where(done, NOTHING, sampled.tokens))
        results = jax.tree.map(lambda all, new: all.at[i].set(new), results, emitted)
        tokens = jnp.where(done, tokens, sampled.tokens)
        positions = jnp.where(stopped, positions, positions + 1)
        return caches, tokens, positions, stopped, counts, results

    carry = (caches, state.tokens[ids], state.positions[ids], state.done[ids], state.output_counts, results)
    carry = lax.fori_loop(0, steps, step, carry)
    caches, tokens, positions, done, counts, results = carry
    state = dataclasses.replace(
        state,
        tokens=state.tokens.at[ids].set(tokens),
        positions=state.positions.at[ids].set(positions),
        done=state.done.at[ids].set(done),
        page_tables=page_tables,
        output_counts=counts,
    )
    return caches, state, results


def score(
    model: CallableModel, caches: list[KVCache], packed: jax.Array, *, layout: PrefillLayout, page_size: int
) -> tuple[list[KVCache], jax.Array, jax.Array]:
    """Run a chunk of one prompt for its logits: float32 [T, vocab], and the negative log-likelihood float32 [T] of the
    token that follows each (packed after the prefill's words; -1 where none does)."""
    batch, *_ = _prefill_batch(layout, packed[: layout.width], page_size)
    following = packed[layout.width :]  # [T]
    hidden, caches = model(batch, caches)
    logits = model.logits(hidden)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    nll = -jnp.take_along_axis(logprobs, jnp.maximum(following, 0)[:, None], axis=1)[:, 0]
    return caches, logits, nll


COUNT_TOKENS = 256
"""Tokens that one call of set_counts takes."""


def set_counts(state: SlotState, packed: jax.Array) -> SlotState:
    """Set, or add to, a slot's penalty counts. packed int32: slot, first (1: start from nothing), prompt tokens among
    these, tokens among these, then COUNT_TOKENS token ids: prompt tokens first, then generated ones."""
    slot, first, prompts, count = packed[0], packed[1], packed[2], packed[3]
    tokens, vocab = packed[4:], state.prompt_seen.shape[1]
    place = jnp.arange(COUNT_TOKENS)
    prompt = jnp.where(place < prompts, tokens, vocab)
    output = jnp.where((place >= prompts) & (place < count), tokens, vocab)
    seen = jnp.where(first != 0, False, state.prompt_seen[slot]).at[prompt].set(True, mode="drop")
    counts = jnp.where(first != 0, 0, state.output_counts[slot]).at[output].add(1, mode="drop")
    return dataclasses.replace(
        state,
        prompt_seen=state.prompt_seen.at[slot].set(seen),
        output_counts=state.output_counts.at[slot].set(counts.astype(jnp.int16)),
    )
