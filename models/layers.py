"""The parts that every decoder shares: Linear (float or INT4), RMSNorm, Embedding, and the vocabulary head.

They run inside one `shard_map` over the mesh, so arrays are the local shard's and collectives are written out. A
parameter's logical axes stand beside its shape; sharding/mesh.py says what each axis means on the mesh.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from pallasite.kernels.int4_matmul import int4_matmul
from pallasite.sharding.mesh import TP

Axes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Int4Layout:
    """A Linear's INT4 weight in memory: packed int32 [K/8, N], scale and offset float32 [K/group_size, N].

    permuted: its rows are in another order than its inputs, and permutation int32 [K] is the input of each row.
    """

    group_size: int
    permuted: bool = False


def parameter(shape: tuple[int, ...], dtype: jnp.dtype, axes: Axes) -> nnx.Param:
    """A parameter with its logical axes. Models are built under `nnx.eval_shape`, so nothing is allocated here."""
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes)


class Linear(nnx.Module):
    """y = x @ w + b, with w [K, N] in floating point or INT4.

    A floating-point w stands in memory transposed, [N, K]: with few tokens XLA's CPU product of w.T and x.T takes half
    the time of x and w (docs/performance.md), and cuBLAS takes either. `axes` are the logical axes of K and N. Where K
    is cut over the mesh (row parallel, reduce=True) the partial products are summed over it, and the bias is added
    once, after the sum.
    """

    def __init__(
        self, k: int, n: int, axes: Axes, dtype: jnp.dtype, *, bias: bool, int4: Int4Layout | None, reduce: bool
    ):
        if int4 is None:
            self.weight = parameter((n, k), dtype, axes[::-1])
        else:
            self.packed = parameter((k // 8, n), jnp.dtype(jnp.int32), axes)
            self.scale = parameter((k // int4.group_size, n), jnp.dtype(jnp.float32), axes)
            self.offset = parameter((k // int4.group_size, n), jnp.dtype(jnp.float32), axes)
            if int4.permuted:
                self.permutation = parameter((k,), jnp.dtype(jnp.int32), axes[:1])
        if bias:
            self.bias = parameter((n,), dtype, axes[1:])
        self.has_bias = bias
        self.quantized = int4 is not None
        self.permuted = int4 is not None and int4.permuted
        self.reduce = reduce

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, K local] -> [T, N local] in x's dtype."""
        if self.permuted:
            if self.reduce:  # a shard's rows take inputs of every shard
                x = jax.lax.all_gather(x, TP, axis=1, tiled=True)  # [T, K]
            x = x[:, self.permutation[...]]  # [T, K local]
        if self.quantized:
            y = int4_matmul(x, self.packed[...], self.scale[...], self.offset[...])
        else:
            y = _times_transposed(x, self.weight[...]).astype(x.dtype)
        if self.reduce:
            y = jax.lax.psum(y, TP)
        return y + self.bias[...] if self.has_bias else y


class RMSNorm(nnx.Module):
    """Root mean square norm (Zhang and Sennrich 2019), computed in float32."""

    def __init__(self, dim: int, eps: float, dtype: jnp.dtype):
        self.weight = parameter((dim,), dtype, ("embed",))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, dim] -> the same shape and dtype."""
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * self.weight[...]


class Embedding(nnx.Module):
    """Token embedding [vocab, dim], its rows cut over the mesh; also the head's matrix where the two are tied."""

    def __init__(self, vocab: int, dim: int, dtype: jnp.dtype):
        self.weight = parameter((vocab, dim), dtype, ("vocab", "embed"))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens int32 [T] -> [T, dim]: every shard looks up the rows that it holds, and the sum is the embedding."""
        weight = self.weight[...]
        local = tokens - jax.lax.axis_index(TP) * weight.shape[0]
        held = (local >= 0) & (local < weight.shape[0])
        rows = weight[jnp.where(held, local, 0)]
        return jax.lax.psum(jnp.where(held[:, None], rows, 0), TP)

    def attend(self, x: jax.Array) -> jax.Array:
        """x [T, dim] times the transposed embedding: float32 [T, vocab local]."""
        return _times_transposed(x, self.weight[...])


class Head(nnx.Module):
    """The untied vocabulary head, [vocab, dim] in memory, its rows cut over the mesh."""

    def __init__(self, dim: int, vocab: int, dtype: jnp.dtype):
        self.weight = parameter((vocab, dim), dtype, ("vocab", "embed"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, dim] -> float32 [T, vocab local]."""
        return _times_transposed(x, self.weight[...])


def _times_transposed(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [T, K] times the transpose of w [N, K], computed as (w @ x.T).T: float32 [T, N]."""
    product = jnp.einsum("nk,tk->nt", w, x, preferred_element_type=jnp.float32)
    # Without the barrier XLA's CPU compiler turns the transposed product back into the slower x @ w.T.
    return jax.lax.platform_dependent(product, cpu=lambda y: jax.lax.optimization_barrier(y).T, default=jnp.transpose)
