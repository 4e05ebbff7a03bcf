"""The slots: what the device knows of each running sequence, and how the host writes it there.

A slot's parameters travel and stay as one row of int32 (floats bit by bit), so that the whole state is a few arrays,
donated through every step. The last row is a scratch slot, which padding points at.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasite.serve.types import MAX_BAD_IDS, MAX_STOP_IDS, Sequence

MAX_EOS_IDS = 16
"""End-of-sequence ids that a model may have, beside a request's own stop ids."""

_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INTS = ("top_k", "seed", "end", "min_position", "prompt_length", "has_penalty", "wants_logprobs")
_SCALARS = len(_FLOATS) + len(_INTS)
_STOP_WIDTH = MAX_STOP_IDS + MAX_EOS_IDS
PARAMS_WIDTH = _SCALARS + MAX_BAD_IDS + _STOP_WIDTH
"""int32 words of one slot's parameters."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotState:
    """Device state of S slots and a scratch one; every array has S + 1 rows.

    tokens int32: the next token to run. positions int32: where it stands in its sequence. done bool: it stopped, and
    whatever still runs for it writes to the scratch page. page_tables int32 [., max_pages]. params int32
    [., PARAMS_WIDTH]. prompt_seen bool and output_counts int16 [., vocab]: for penalties, kept only for the slots
    that have one.
    """

    tokens: jax.Array
    positions: jax.Array
    done: jax.Array
    page_tables: jax.Array
    params: jax.Array
    prompt_seen: jax.Array
    output_counts: jax.Array

    @classmethod
    def empty(cls, slots: int, max_pages: int, vocab: int) -> "SlotState":
        """Zeros; to be called under jit or eval_shape."""
        rows = slots + 1
        return cls(
            tokens=jnp.zeros(rows, jnp.int32),
            positions=jnp.zeros(rows, jnp.int32),
            done=jnp.ones(rows, bool),
            page_tables=jnp.zeros((rows, max_pages), jnp.int32),
            params=jnp.zeros((rows, PARAMS_WIDTH), jnp.int32),
            prompt_seen=jnp.zeros((rows, vocab), bool),
            output_counts=jnp.zeros((rows, vocab), jnp.int16),
        )


@dataclasses.dataclass(frozen=True)
class SlotParams:
    """Parameters of B rows, unpacked inside a step: see GenerationConfig for their meaning.

    ends: total tokens at which a sequence stops. min_positions: before this position no stop id may be sampled.
    bad_ids, stop_ids: int32, padded with -1.
    """

    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    top_k: jax.Array
    seeds: jax.Array
    ends: jax.Array
    min_positions: jax.Array
    prompt_lengths: jax.Array
    has_penalty: jax.Array
    wants_logprobs: jax.Array
    bad_ids: jax.Array
    stop_ids: jax.Array


def pack_params(seq: Sequence) -> np.ndarray:
    """int32 [PARAMS_WIDTH] of a sequence's request."""
    request, config = seq.request, seq.request.config
    penalized = has_penalty(seq)
    floats = [getattr(config, name) for name in _FLOATS]
    floats[0] = 0.0 if config.greedy else config.temperature
    row = np.full(PARAMS_WIDTH, -1, np.int32)
    row[: len(_FLOATS)] = np.asarray(floats, np.float32).view(np.int32)
    row[len(_FLOATS) : _SCALARS] = np.asarray(
        [
            max(config.top_k, 0),
            request.seed & 0xFFFFFFFF,
            seq.end,
            seq.prompt_len + config.min_new_tokens,
            seq.prompt_len,
            penalized,
            config.logprobs is not None,
        ],
        np.uint32,
    ).view(np.int32)
    row[_SCALARS : _SCALARS + len(request.bad_ids)] = request.bad_ids
    stop = _SCALARS + MAX_BAD_IDS
    row[stop : stop + len(request.stop_ids)] = request.stop_ids
    return row


def has_penalty(seq: Sequence) -> bool:
    """True where the slot's token counts matter."""
    c = seq.request.config
    return c.repetition_penalty != 1.0 or c.presence_penalty != 0.0 or c.frequency_penalty != 0.0


def unpack_params(params: jax.Array) -> SlotParams:
    """params int32 [B, PARAMS_WIDTH], inside a step."""
    floats = lax.bitcast_convert_type(params[:, : len(_FLOATS)], jnp.float32)
    ints = params[:, len(_FLOATS) : _SCALARS]
    return SlotParams(
        **{name: floats[:, i] for i, name in enumerate(_FLOATS)},
        top_k=ints[:, 0],
        seeds=lax.bitcast_convert_type(ints[:, 1], jnp.uint32),
        ends=ints[:, 2],
        min_positions=ints[:, 3],
        prompt_lengths=ints[:, 4],
        has_penalty=ints[:, 5] != 0,
        wants_logprobs=ints[:, 6] != 0,
        bad_ids=params[:, _SCALARS : _SCALARS + MAX_BAD_IDS],
        stop_ids=params[:, _SCALARS + MAX_BAD_IDS :],
    )
