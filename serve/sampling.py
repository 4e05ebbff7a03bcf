"""Sampling on the device: one call for the whole batch, every row with its own parameters and seed.

The order is: penalties, suppressed ids, temperature, top-k, top-p, min-p, noise. Noise is a function of the row's
seed, the position that the token will have, and the token id, so that a request draws the same tokens in any batch,
on any number of shards, and again after a preemption. Top-k and top-p find their threshold by bisection over the
bits of the float instead of a sort: exact, ties at the threshold are all kept.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallasite.serve.slots import SlotParams
from pallasite.serve.types import MAX_LOGPROBS

NOT_FINITE = -2
"""Returned in place of a token where the model's logits were NaN or infinite."""
_TINY = 1e-30
"""Smallest temperature and top_p that are told apart; float32 knows little below."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """tokens int32 [B]; logprobs float32 [B] of the chosen tokens; top_logprobs float32 and top_ids int32
    [B, MAX_LOGPROBS], zeros unless some row wants them. Log-probabilities are the model's own, before penalties."""

    tokens: jax.Array
    logprobs: jax.Array
    top_logprobs: jax.Array
    top_ids: jax.Array


def _ordered_bits(x: jax.Array) -> jax.Array:
    """uint32 keys that sort as the float32 values do."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type(bits ^ ((bits >> 31) & 0x7FFFFFFF), jnp.uint32) ^ jnp.uint32(0x80000000)


def _largest_key(keys: jax.Array, weights: jax.Array, needed: jax.Array) -> jax.Array:
    """For each row the largest key t such that the weights of keys >= t sum to at least `needed`.

    keys uint32 [B, V], weights float32 [B, V], needed float32 [B]; returns uint32 [B].
    """

    def set_bit(i: jax.Array, t: jax.Array) -> jax.Array:
        candidate = t | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        reached = jnp.sum(jnp.where(keys >= candidate[:, None], weights, 0), axis=-1)
        return jnp.where(reached >= needed, candidate, t)

    return lax.fori_loop(0, 32, set_bit, jnp.zeros(keys.shape[0], jnp.uint32))


def filter_logits(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Keep each row's top_k largest logits (0 or below: all), then of these the smallest set of most likely tokens
    whose probability reaches top_p (Holtzman et al. 2020, section 3.1); the rest become -inf.

    logits float32 [B, V], top_k int32 [B], top_p float32 [B].
    """

    # Two rounds of one loop body, not two bodies: every body is compiled, in each of the step programs.
    def cut(stage: jax.Array, x: jax.Array) -> jax.Array:
        likely = jnp.exp(x - x.max(axis=-1, keepdims=True))
        weights = jnp.where(stage == 0, jnp.ones_like(x), likely)
        # A top_p that is 0 in float32 would be reached by no token at all.
        needed = jnp.where(stage == 0, top_k.astype(jnp.float32), jnp.maximum(top_p, _TINY) * likely.sum(axis=-1))
        off = jnp.where(stage == 0, top_k <= 0, top_p >= 1)
        keys = _ordered_bits(x)
        threshold = _largest_key(keys, weights, needed)
        return jnp.where(off[:, None] | (keys >= threshold[:, None]), x, -jnp.inf)

    return lax.fori_loop(0, jnp.where((top_p < 1).any(), 2, 1), cut, logits)


def penalize(logits: jax.Array, params: SlotParams, prompt_seen: jax.Array, output_counts: jax.Array) -> jax.Array:
    """Repetition penalty (Keskar et al. 2019, section 4.1) over prompt and output, presence and frequency penalties
    over the output. logits float32 [B, V]; prompt_seen bool [B, V]; output_counts int16 [B, V]."""
    generated = output_counts > 0
    penalty = params.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = jnp.where(prompt_seen | generated, repeated, logits)
    logits -= params.presence_penalty[:, None] * generated
    return logits - params.frequency_penalty[:, None] * output_counts


def _suppress(logits: jax.Array, ids: jax.Array, active: jax.Array) -> jax.Array:
    """-inf at ids int32 [B, I] (negative: none) of the rows that are active bool [B]."""
    ids = jnp.where((ids >= 0) & active[:, None], ids, logits.shape[1])
    return logits.at[jnp.arange(logits.shape[0])[:, None], ids].set(-jnp.inf, mode="drop")


def _noise(seeds: jax.Array, positions: jax.Array, vocab: int) -> jax.Array:
    """Gumbel noise float32 [B, vocab]: MurmurHash3 (Appleby 2011, 32 bit) of (seed, position, token id), as a uniform
    number u, through -log(-log(u)). seeds uint32 [B], positions int32 [B]."""
    token_ids = jnp.arange(vocab, dtype=jnp.uint32)[None]
    h = jnp.zeros((1, 1), jnp.uint32)
    for word in (seeds[:, None], positions.astype(jnp.uint32)[:, None], token_ids):
        k = _rotate_left(word * jnp.uint32(0xCC9E2D51), 15) * jnp.uint32(0x1B873593)
        h = _rotate_left(h ^ k, 13) * jnp.uint32(5) + jnp.uint32(0xE6546B64)
    h ^= jnp.uint32(12)  # the message's length in bytes
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    h ^= h >> 16
    # The largest noises decide, those with u near 1: so it is 1 - u that is formed, where float32 keeps all 32 bits
    # apart. It is never 0 and, cut below, never 1, whose logarithms would be infinite.
    rest = jnp.minimum((h.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32), jnp.float32(1 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-rest))


def _rotate_left(x: jax.Array, bits: int) -> jax.Array:
    return (x << bits) | (x >> (32 - bits))


def sample(
    logits: jax.Array,
    params: SlotParams,
    positions: jax.Array,
    prompt_seen: jax.Array,
    output_counts: jax.Array,
    slots: jax.Array,
) -> Sampled:
    """Choose the next token of each row.

    logits float32 [B, V] (-inf where an id is no token); positions int32 [B] that the new tokens will have;
    prompt_seen bool and output_counts int16 [slots, V], of which `slots` int32 [B] picks the rows. Branches that no
    row needs are skipped at run time.
    """
    raw = logits
    logits = lax.cond(
        params.has_penalty.any(),
        lambda x: penalize(x, params, prompt_seen[slots], output_counts[slots]),
        lambda x: x,
        logits,
    )
    logits = _suppress(logits, params.bad_ids, jnp.ones_like(params.has_penalty))
    logits = _suppress(logits, params.stop_ids, positions < params.min_positions)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw(x: jax.Array) -> jax.Array:
        # Logits divided by a smaller temperature might overflow.
        temperature = jnp.where(params.temperature > 0, jnp.maximum(params.temperature, _TINY), 1.0)
        x = x / temperature[:, None]
        x = filter_logits(x, params.top_k, params.top_p)
        # p >= min_p * p_max, in logarithms; min_p 0 keeps all.
        x = jnp.where(x >= x.max(axis=-1, keepdims=True) + jnp.log(params.min_p)[:, None], x, -jnp.inf)
        drawn = jnp.argmax(x + _noise(params.seeds, positions, x.shape[1]), axis=-1).astype(jnp.int32)
        return jnp.where(params.temperature > 0, drawn, greedy)

    tokens = lax.cond((params.temperature > 0).any(), draw, lambda x: greedy, logits)
    # max carries NaN along, so one reduction finds NaN, +inf, and a row that is -inf throughout.
    finite = jnp.isfinite(raw.max(axis=-1)) & (logits.max(axis=-1) > -jnp.inf)  # the second: not every id is forbidden

    def report(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        logprobs = jax.nn.log_softmax(x, axis=-1)
        top, ids = lax.top_k(logprobs, min(MAX_LOGPROBS, x.shape[1]))
        missing = [(0, 0), (0, MAX_LOGPROBS - top.shape[1])]
        chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
        return chosen, jnp.pad(top, missing), jnp.pad(ids, missing)

    def silent(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        b = x.shape[0]
        return jnp.zeros(b), jnp.zeros((b, MAX_LOGPROBS)), jnp.zeros((b, MAX_LOGPROBS), jnp.int32)

    chosen, top, ids = lax.cond(params.wants_logprobs.any(), report, silent, raw)
    return Sampled(jnp.where(finite, tokens, NOT_FINITE), chosen, top, ids)
