"""Rotary position embedding: frequencies for each kind of scaling, and the rotate-half application.

Source: RoFormer (Su et al. 2021, section 3.4.2). Scalings as in transformers' modeling_rope_utils: "linear" divides
all frequencies by the factor; "llama3" divides only the low ones, with a ramp between. Two kinds raise the base with
the sequence's length (NTK-aware scaling), each as its original does it while it decodes with a cache: "dynamic" by the
prompt's length for the prompt, and by a token's own length for each one that is generated; "qwen1" by the prompt's
length for all of them, in doublings. A cached key keeps the base that it was written under. So the base is a function
of the prompt's length and the position, which chunks and recomputation don't change.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.models.config import RopeConfig


def static_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """float32 [head_dim / 2] inverse frequencies (radians a token) that no sequence length changes."""
    # In float32 step by step, as the originals do: the angle at position 100,000 shows any other rounding.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inverse = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.kind == "linear":
        return (inverse / np.float32(rope.factor)).astype(np.float32)
    if rope.kind != "llama3":
        return inverse
    wavelength = 2 * math.pi / inverse
    low = rope.original_max_position / rope.low_freq_factor  # longer waves are divided by the factor
    high = rope.original_max_position / rope.high_freq_factor  # shorter ones are kept
    ramp = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - ramp) * inverse / rope.factor + ramp * inverse
    scaled = np.where(wavelength > low, inverse / rope.factor, np.where(wavelength < high, inverse, between))
    return scaled.astype(np.float32)


def rope_angles(rope: RopeConfig, head_dim: int, positions: jax.Array, prompt_lengths: jax.Array) -> jax.Array:
    """float32 [T, head_dim / 2] angles of tokens at `positions` int32 [T].

    prompt_lengths int32 [T]: tokens in the prompt of each one's sequence, wherever the token itself stands. Only kinds
    whose base grows look at them: the base is theta * growth ** (d / (d - 2)).
    """
    if rope.kind not in ("dynamic", "qwen1"):
        return positions[:, None].astype(jnp.float32) * static_frequencies(rope, head_dim)
    trained = rope.original_max_position
    if rope.kind == "dynamic":
        lengths = jnp.where(positions < prompt_lengths, prompt_lengths, positions + 1)
        growth = rope.factor * jnp.maximum(lengths, trained).astype(jnp.float32) / trained - (rope.factor - 1)
    else:
        # 2 ** ceil(log2(length / trained) + 1) - 1 in integers, exact at the powers of two.
        pieces = jnp.maximum(prompt_lengths + trained - 1, trained) // trained
        growth = (jnp.left_shift(2, 32 - jax.lax.clz(pieces - 1)) - 1).astype(jnp.float32)
    base = rope.theta * growth ** (head_dim / (head_dim - 2))  # [T]
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return positions[:, None].astype(jnp.float32) / base[:, None] ** exponents


def page_tag(rope: RopeConfig, prompt_length: int) -> int:
    """What the bases in a sequence depend on beside positions: prefixes are alike only where the tags are."""
    trained = rope.original_max_position
    if rope.kind == "dynamic":
        return prompt_length if prompt_length > trained else 0
    if rope.kind == "qwen1":
        return (-(-prompt_length // trained) - 1).bit_length()  # doublings
    return 0


def logn_scale(positions: jax.Array, trained: int) -> jax.Array:
    """float32 [T]: the factor of Qwen 1's queries, log(length) / log(trained) past the trained length, else 1."""
    lengths = jnp.maximum(positions + 1, trained).astype(jnp.float32)
    return jnp.log(lengths) / math.log(trained)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x [T, heads, head_dim] by angles whose cosines and sines are cos, sin float32 [T, head_dim / 2].

    Element i is paired with i + head_dim / 2 (the "rotate half" layout). Returns x's shape and dtype.
    """
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)  # [T, heads, head_dim / 2] each
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
