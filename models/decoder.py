"""The decoder that every family shares: embedding, pre-norm blocks of attention and gated MLP, norm, head.

`Decoder` is built abstractly (nnx.eval_shape), filled by convert/load.py, and called inside the step programs'
shard_map. It keeps no cache and no positions of its own: all that a call needs comes in a `TokenBatch`.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from pallasite.kernels.paged_attention import paged_attention, write_pages
from pallasite.models.config import ModelConfig
from pallasite.models.layers import Embedding, Head, Int4Layout, Linear, RMSNorm
from pallasite.models.rope import apply_rope, logn_scale, rope_angles
from pallasite.sharding.mesh import TP

VOCAB_MULTIPLE = 128
"""The vocabulary is padded to this multiple times tp, so that each shard's logits fill whole vector lanes."""

KVCache = tuple[jax.Array, jax.Array]
"""K and V pages of a layer, each [pages, kv_heads, page_size, head_dim]."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """The tokens of one call, as R rows of Q consecutive tokens of one sequence (decode: Q = 1); T = R * Q.

    tokens int32 [T]; positions int32 [T], place in its sequence; prompt_lengths int32 [T], tokens of its sequence's
    prompt; write_pages, write_offsets int32 [T], where the token's K and V go (a scratch page for padding);
    page_tables int32 [R, max_pages]; lengths int32 [R], keys the row may see, its own included (0: a padding row).
    """

    tokens: jax.Array
    positions: jax.Array
    prompt_lengths: jax.Array
    write_pages: jax.Array
    write_offsets: jax.Array
    page_tables: jax.Array
    lengths: jax.Array


@dataclasses.dataclass(frozen=True)
class PaddedSizes:
    """Sizes as they stand in memory: zero padding makes them divide over `tp` shards, and changes no result.

    Whole kv groups are added (a kv head with its query heads), MLP columns up to whole INT4 groups a shard, and
    vocabulary rows, whose logits are masked where they are sampled.
    """

    tp: int
    kv_heads: int
    heads: int
    intermediate: int
    vocab: int

    @classmethod
    def of(cls, config: ModelConfig, tp: int, mlp_multiple: int = 1) -> "PaddedSizes":
        """Sizes of `config` for `tp` shards; each shard's MLP width is a multiple of `mlp_multiple`."""

        def up(value: int, multiple: int) -> int:
            return -(-value // multiple) * multiple

        kv_heads = up(config.num_kv_heads, tp)
        return cls(
            tp=tp,
            kv_heads=kv_heads,
            heads=kv_heads * (config.num_heads // config.num_kv_heads),
            intermediate=up(config.intermediate_size, mlp_multiple * tp),
            vocab=up(config.vocab_size, VOCAB_MULTIPLE * tp),
        )


class Attention(nnx.Module):
    """Grouped-query attention over the paged cache; window: tokens that a query sees, itself included (None: all)."""

    def __init__(
        self,
        config: ModelConfig,
        sizes: PaddedSizes,
        dtype: jnp.dtype,
        int4: Mapping[str, Int4Layout],
        window: int | None,
    ):
        q, kv = sizes.heads * config.head_dim, sizes.kv_heads * config.head_dim
        d = config.hidden_size
        # One matrix; each shard's columns are its own q heads, then its k, then its v.
        self.qkv = Linear(
            d, q + 2 * kv, ("embed", "qkv"), dtype, bias=config.qkv_bias, int4=int4.get("attn.qkv"), reduce=False
        )
        self.o = Linear(q, d, ("heads", "embed"), dtype, bias=config.out_bias, int4=int4.get("attn.o"), reduce=True)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.window = window
        self.logn_length = config.logn_length
        self.head_dim = config.head_dim
        self.group = config.num_heads // config.num_kv_heads

    def __call__(
        self, x: jax.Array, cache: KVCache, batch: TokenBatch, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        """x [T, hidden], cos and sin float32 [T, head_dim / 2] -> ([T, hidden], the cache with the tokens written)."""
        t, r = x.shape[0], batch.lengths.shape[0]
        qkv = self.qkv(x)  # [T, (group + 2) * kv_heads * head_dim]
        kv_heads = qkv.shape[1] // ((self.group + 2) * self.head_dim)
        heads = kv_heads * self.group
        q, k, v = jnp.split(
            qkv.reshape(t, -1, self.head_dim), [heads, heads + kv_heads], axis=1
        )  # [T, heads, head_dim]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        if self.logn_length is not None:
            q = (q * logn_scale(batch.positions, self.logn_length)[:, None, None]).astype(q.dtype)
        k_pages = write_pages(cache[0], k, batch.write_pages, batch.write_offsets)
        v_pages = write_pages(cache[1], v, batch.write_pages, batch.write_offsets)
        out = paged_attention(
            q.reshape(r, t // r, heads, self.head_dim),
            k_pages,
            v_pages,
            batch.page_tables,
            batch.positions.reshape(r, t // r),
            batch.lengths,
            window=self.window,
        )
        return self.o(out.reshape(t, heads * self.head_dim)), (k_pages, v_pages)


class MLP(nnx.Module):
    """SiLU-gated MLP (Shazeer 2020, "GLU variants"): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, sizes: PaddedSizes, dtype: jnp.dtype, int4: Mapping[str, Int4Layout]):
        d, n, bias = config.hidden_size, sizes.intermediate, config.mlp_bias
        self.gate_up = Linear(
            d, 2 * n, ("embed", "gate_up"), dtype, bias=bias, int4=int4.get("mlp.gate_up"), reduce=False
        )
        self.down = Linear(n, d, ("mlp", "embed"), dtype, bias=bias, int4=int4.get("mlp.down"), reduce=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, hidden] -> the same shape."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)  # [T, intermediate local] each
        return self.down(jax.nn.silu(gate) * up)


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        config: ModelConfig,
        sizes: PaddedSizes,
        dtype: jnp.dtype,
        int4: Mapping[str, Int4Layout],
        window: int | None,
    ):
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attn = Attention(config, sizes, dtype, int4, window)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, sizes, dtype, int4)

    def __call__(
        self, x: jax.Array, cache: KVCache, batch: TokenBatch, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        """x [T, hidden] -> ([T, hidden], the layer's cache)."""
        attended, cache = self.attn(self.attn_norm(x), cache, batch, cos, sin)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), cache


@jax.jit(static_argnums=0)
def _run_layer(graphdef: nnx.GraphDef, state: nnx.State, x, cache, batch, cos, sin):
    # An inner jit of its own, keyed by the structure that layers share (of each window): traced once, not once a layer.
    return nnx.merge(graphdef, state)(x, cache, batch, cos, sin)


class Decoder(nnx.Module):
    """The whole model. int4 maps "attn.qkv", "attn.o", "mlp.gate_up", "mlp.down" to a layout for each layer."""

    def __init__(
        self,
        config: ModelConfig,
        sizes: PaddedSizes,
        dtype: jnp.dtype,
        int4: tuple[Mapping[str, Int4Layout], ...] | None = None,
    ):
        int4 = int4 or tuple({} for _ in range(config.num_layers))
        self.embed = Embedding(sizes.vocab, config.hidden_size, dtype)
        windows = config.windows or (None,) * config.num_layers
        self.layers = nnx.List(
            [DecoderLayer(config, sizes, dtype, *of_layer) for of_layer in zip(int4, windows, strict=True)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.head = None if config.tie_word_embeddings else Head(config.hidden_size, sizes.vocab, dtype)
        self.config = config

    def __call__(self, batch: TokenBatch, caches: list[KVCache]) -> tuple[jax.Array, list[KVCache]]:
        """Runs the batch's tokens. Returns ([T, hidden], before the final norm) and the caches, one a layer."""
        x = self.embed(batch.tokens)
        angles = rope_angles(self.config.rope, self.config.head_dim, batch.positions, batch.prompt_lengths)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        caches = list(caches)
        for i, layer in enumerate(self.layers):
            x, caches[i] = _run_layer(*nnx.split(layer), x, caches[i], batch, cos, sin)
        return x, caches

    def logits(self, x: jax.Array) -> jax.Array:
        """float32 [T, vocab] of hidden states [T, hidden], whole on every shard; padded vocabulary is -inf."""
        x = self.norm(x)
        local = self.embed.attend(x) if self.head is None else self.head(x)
        logits = jax.lax.all_gather(local, TP, axis=1, tiled=True)  # [T, padded vocab]
        return jnp.where(jnp.arange(logits.shape[1]) < self.config.vocab_size, logits, -jnp.inf)
