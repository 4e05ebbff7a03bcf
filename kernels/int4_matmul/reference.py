"""Reference INT4 matrix product in plain JAX: dequantize in float32, then multiply."""

import jax
import jax.numpy as jnp


def dequantize(packed: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
    """w = scale * q + offset, in float32.

    packed int32 [K/8, N]: nibble j of word r is row 8*r + j; scale, offset float32 [K/group, N]. Returns [K, N].
    """
    k, n = packed.shape[0] * 8, packed.shape[1]
    group = k // scale.shape[0]
    shifts = jnp.arange(0, 32, 4, dtype=jnp.int32)[None, :, None]
    q = (packed[:, None, :] >> shifts) & 15  # [K/8, 8, N]; the sign bits that an arithmetic shift brings are masked off
    w = q.reshape(-1, group, n).astype(jnp.float32) * scale[:, None] + offset[:, None]
    return w.reshape(k, n)


def int4_matmul(x: jax.Array, packed: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
    """x [M, K] times the INT4 matrix of `dequantize`; returns [M, N] in x's dtype, accumulated in float32."""
    w = dequantize(packed, scale, offset).astype(x.dtype)
    return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)
