"""Rotary position embedding: frequencies for each kind of scaling, and the rotate-half application.

Source: RoFormer (Su et al. 2021, section 3.4.2). Scalings as in transformers' modeling_rope_utils: "linear" divides
all frequencies by the factor; "llama3" divides only the low ones, with a ramp between; "dynamic" (NTK-aware) raises
the base with the sequence's length.
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


def rope_angles(rope: RopeConfig, head_dim: int, positions: jax.Array, rope_lengths: jax.Array) -> jax.Array:
    """float32 [T, head_dim / 2] angles of tokens at `positions` int32 [T].

    rope_lengths int32 [T] is the sequence length whose base a token is written under; only "dynamic" reads it: past
    the trained length L0 the base grows to theta * (factor * length / L0 - (factor - 1)) ** (d / (d - 2)).
    """
    if rope.kind != "dynamic":
        return positions[:, None].astype(jnp.float32) * static_frequencies(rope, head_dim)
    length = jnp.maximum(rope_lengths, rope.original_max_position).astype(jnp.float32)
    growth = rope.factor * length / rope.original_max_position - (rope.factor - 1)
    base = rope.theta * growth ** (head_dim / (head_dim - 2))  # [T]
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return positions[:, None].astype(jnp.float32) / base[:, None] ** exponents


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x [T, heads, head_dim] by angles whose cosines and sines are cos, sin float32 [T, head_dim / 2].

    Element i is paired with i + head_dim / 2 (the "rotate half" layout). Returns x's shape and dtype.
    """
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)  # [T, heads, head_dim / 2] each
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
