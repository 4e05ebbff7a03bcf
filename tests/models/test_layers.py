"""The parts of a decoder, run as the step programs run them: inside shard_map, on 1, 2 and 4 virtual devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from pallasite.convert.int4 import pack_rows
from pallasite.models.config import ModelConfig, RopeConfig
from pallasite.models.decoder import MLP, Attention, Decoder, PaddedSizes, TokenBatch
from pallasite.models.layers import Embedding, Head, Int4Layout, Linear, RMSNorm
from pallasite.models.model import CacheSpec, Model, materialize
from pallasite.sharding.mesh import TP, make_mesh

F32 = jnp.dtype(jnp.float32)
WHOLE = PartitionSpec()


def build(make, tp: int = 1, **arrays: np.ndarray) -> Model:
    """A Model of the module that make() makes, with parameters by name ("a.b")."""
    return materialize(
        make,
        make_mesh(tp),
        lambda path, abstract: arrays[".".join(map(str, path))],
        cache=CacheSpec(1, 1, 2, F32),
        vocab_size=1,
        padded_vocab=1,
        max_session_len=None,
        default_session_len=64,
    )


def run(model: Model, call, *inputs, in_specs=WHOLE, out_specs=WHOLE):
    """call(module, *inputs) on the model's mesh."""

    @functools.partial(
        jax.shard_map,
        mesh=model.mesh,
        in_specs=(model.specs, *[in_specs] * len(inputs)),
        out_specs=out_specs,
        check_vma=False,
    )
    def local(leaves, *xs):
        return call(model.bind(leaves), *xs)

    return jax.jit(local)(model.leaves, *inputs)


def apply(model: Model, x, **specs):
    return run(model, lambda module, x: module(x), x, **specs)


def rng_floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_rms_norm_against_float64():
    x, w = rng_floats(5, 48) * 100, rng_floats(48, seed=1)
    x[1] = 0
    x[2] *= 1e-6
    wide = x.astype(float)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * w
    got = apply(build(lambda: RMSNorm(48, 1e-5, F32), weight=w), x)
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-12)


def test_rms_norm_of_bfloat16_does_not_overflow_or_round_its_sum():
    x = jnp.full((1, 4096), 3e19, jnp.bfloat16)  # its square is past float32's half
    norm = build(lambda: RMSNorm(4096, 1e-5, jnp.dtype(jnp.bfloat16)), weight=jnp.ones(4096, jnp.bfloat16))
    got = apply(norm, x / 1e6)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), 1)


@pytest.mark.parametrize("bias", [False, True])
def test_linear_holds_its_weight_transposed(bias):
    w, b, x = rng_floats(7, 24), rng_floats(7, seed=1), rng_floats(3, 24, seed=2)
    arrays = {"weight": w} | ({"bias": b} if bias else {})
    got = apply(build(lambda: Linear(24, 7, ("embed", "qkv"), F32, bias=bias, int4=None, reduce=False), **arrays), x)
    np.testing.assert_allclose(got, x.astype(float) @ w.T + (b if bias else 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("group", [None, 32])
def test_column_parallel_linear(group, tp):
    """Columns cut over the mesh, bias with them; the shards side by side are the whole product."""
    check_linear(tp, group, ("embed", "qkv"), reduce=False)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("group", [None, 32])
def test_row_parallel_linear_adds_the_bias_once(group, tp):
    check_linear(tp, group, ("mlp", "embed"), reduce=True)


def check_linear(tp: int, group: int | None, axes, *, reduce: bool) -> None:
    k, n = 128, 24
    b, x = rng_floats(n, seed=1), rng_floats(3, k, seed=2)
    if group is None:
        w = rng_floats(n, k)
        arrays, dense = {"weight": w, "bias": b}, w.T.astype(float)
    else:
        q = np.random.default_rng(0).integers(0, 16, (k, n), np.uint8)
        scale, offset = np.abs(rng_floats(k // group, n, seed=3)), rng_floats(k // group, n, seed=4)
        arrays = {"packed": pack_rows(q), "scale": scale, "offset": offset, "bias": b}
        dense = q * np.repeat(scale, group, 0).astype(float) + np.repeat(offset, group, 0)
    int4 = None if group is None else Int4Layout(group)
    model = build(lambda: Linear(k, n, axes, F32, bias=True, int4=int4, reduce=reduce), tp, **arrays)
    cut = PartitionSpec(None, TP)
    got = apply(model, x, **({"in_specs": cut} if reduce else {"out_specs": cut}))
    np.testing.assert_allclose(got, x.astype(float) @ dense + b, rtol=1e-5, atol=2e-4)


def test_linear_in_bfloat16_accumulates_in_float32():
    """256 + 1 is no bfloat16: 512 products of 1 would stop growing at 256."""
    dtype = jnp.dtype(jnp.bfloat16)
    model = build(
        lambda: Linear(512, 1, ("embed", "qkv"), dtype, bias=False, int4=None, reduce=False),
        weight=jnp.ones((1, 512), dtype),
    )
    got = apply(model, jnp.ones((1, 512), dtype))
    assert got.dtype == dtype
    assert got[0, 0] == 512


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_embedding_and_tied_head(tp):
    """151 rows padded to 256 (A19): any shard's rows are found, and the head's shards are the vocabulary in order."""
    w = np.zeros((256, 8), np.float32)
    w[:151] = rng_floats(151, 8)
    model = build(lambda: Embedding(256, 8, F32), tp, weight=w)
    tokens = np.asarray([0, 150, 63, 64, 127, 128, 150], np.int32)
    np.testing.assert_array_equal(apply(model, tokens), w[tokens])
    x = rng_floats(3, 8, seed=1)
    got = run(model, lambda module, x: module.attend(x), x, out_specs=PartitionSpec(None, TP))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, x.astype(float) @ w.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tp", [1, 2])
def test_untied_head(tp):
    w, x = rng_floats(256, 8), rng_floats(3, 8, seed=1)
    got = apply(build(lambda: Head(8, 256, F32), tp, weight=w), x, out_specs=PartitionSpec(None, TP))
    np.testing.assert_allclose(got, x.astype(float) @ w.T, rtol=1e-5, atol=1e-5)


def test_head_of_bfloat16_gives_float32_logits():
    w = jnp.asarray([[1, 2**-8], [1, 0]], jnp.bfloat16)
    got = apply(build(lambda: Head(2, 2, jnp.dtype(jnp.bfloat16)), weight=w), jnp.asarray([[256, 1]], jnp.bfloat16))
    np.testing.assert_array_equal(got, np.float32([[256 + 2**-8, 256]]))


@pytest.mark.parametrize("tp", [1, 2])
def test_mlp_against_float64(tp):
    """gate and up stand side by side shard by shard, so the same matrix is laid out anew for tp=2."""
    config = model_config(hidden_size=8, intermediate_size=12)
    gate, up, down = rng_floats(12, 8), rng_floats(12, 8, seed=1), rng_floats(8, 12, seed=2)
    fused = np.concatenate([m.reshape(tp, -1, 8) for m in (gate, up)], axis=1).reshape(-1, 8)
    sizes = PaddedSizes.of(config, tp)
    model = build(lambda: MLP(config, sizes, F32, {}), tp, **{"gate_up.weight": fused, "down.weight": down})
    x = rng_floats(3, 8, seed=3)
    g, u = x.astype(float) @ gate.T, x.astype(float) @ up.T
    np.testing.assert_allclose(apply(model, x), (g / (1 + np.exp(-g)) * u) @ down.T, rtol=1e-5, atol=1e-5)


def model_config(**fields) -> ModelConfig:
    defaults = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 151,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(original_max_position=64),
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    return ModelConfig(**(defaults | fields))


@pytest.mark.parametrize(
    ("fields", "tp", "multiple", "expected"),
    [
        # SmolLM2: three kv groups of three heads; two shards get two groups each, the last one of zeros.
        ({"num_kv_heads": 3, "num_heads": 9, "vocab_size": 49152}, 1, 1, (3, 9, 16, 49152)),
        ({"num_kv_heads": 3, "num_heads": 9, "vocab_size": 49152}, 2, 1, (4, 12, 16, 49152)),
        ({"num_kv_heads": 3, "num_heads": 9, "vocab_size": 49152}, 8, 1, (8, 24, 16, 49152)),
        # Qwen-14B: 13696 is 107 groups of 128, which no even number of shards divides (A06).
        ({"intermediate_size": 13696}, 1, 128, (1, 2, 13696, 256)),
        ({"intermediate_size": 13696}, 2, 128, (2, 4, 13824, 256)),
        ({"intermediate_size": 13696}, 4, 128, (4, 8, 13824, 512)),
        # Odd vocabularies (A19).
        ({"vocab_size": 151}, 4, 1, (4, 8, 16, 512)),
        ({"vocab_size": 65167}, 2, 1, (2, 4, 16, 65280)),
        ({"vocab_size": 256}, 2, 1, (2, 4, 16, 256)),
        ({"intermediate_size": 17}, 2, 1, (2, 4, 18, 256)),
    ],
)
def test_padded_sizes(fields, tp, multiple, expected):
    sizes = PaddedSizes.of(model_config(**fields), tp, multiple)
    assert (sizes.kv_heads, sizes.heads, sizes.intermediate, sizes.vocab) == expected
    assert not any(size % tp for size in expected)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_decoder_logits_are_whole_and_minus_infinity_past_the_vocabulary(tied, tp):
    config = model_config(tie_word_embeddings=tied)
    sizes = PaddedSizes.of(config, tp)
    w = rng_floats(sizes.vocab, 8)  # padding rows hold numbers too: only the mask hides them
    model = materialize(
        lambda: Decoder(config, sizes, F32),
        make_mesh(tp),
        lambda path, a: w if path[-2:] in (("head", "weight"), ("embed", "weight")) else np.ones(a.shape, a.dtype),
        cache=CacheSpec(1, sizes.kv_heads, 4, F32),
        vocab_size=151,
        padded_vocab=sizes.vocab,
        max_session_len=64,
        default_session_len=64,
    )
    x = rng_floats(2, 8, seed=1)
    got = np.asarray(run(model, lambda module, x: module.logits(x), x))
    normed = x / np.sqrt((x.astype(float) ** 2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(got[:, :151], normed @ w[:151].T, rtol=1e-5, atol=1e-5)
    assert got.shape == (2, sizes.vocab)
    assert (got[:, 151:] == -np.inf).all()


def test_materialize_refuses_a_wrong_shape_and_a_wrong_dtype():
    for wrong in (np.ones(7, np.float32), np.ones(8, np.float16)):
        with pytest.raises(ValueError, match=r"parameter weight: got float\d+\(\d,\), need float32\(8,\)"):
            build(lambda: RMSNorm(8, 1e-5, F32), weight=wrong)


def test_a_module_is_built_without_allocating():
    huge = nnx.eval_shape(lambda: Linear(2**20, 2**20, ("embed", "qkv"), F32, bias=False, int4=None, reduce=False))
    assert huge.weight.get_value().shape == (2**20, 2**20)


def test_page_bytes_count_k_and_v_of_all_layers():
    assert CacheSpec(layers=3, kv_heads=4, head_dim=64, dtype=jnp.bfloat16).page_bytes(16) == 2 * 3 * 4 * 64 * 2 * 16


def test_layers_of_one_window_share_a_trace(monkeypatch):
    config = model_config(num_layers=5, windows=(None, 4, None, 4, 4))
    sizes = PaddedSizes.of(config, 1)
    traced = []
    attend = Attention.__call__
    monkeypatch.setattr(Attention, "__call__", lambda self, *a: (traced.append(self.window), attend(self, *a))[1])
    model = materialize(
        lambda: Decoder(config, sizes, F32),
        make_mesh(1),
        lambda path, a: np.ones(a.shape, a.dtype),
        cache=CacheSpec(5, sizes.kv_heads, 4, F32),
        vocab_size=151,
        padded_vocab=sizes.vocab,
        max_session_len=64,
        default_session_len=64,
    )
    pages, one = jnp.zeros((3, 1, 16, 4)), jnp.ones(1, jnp.int32)
    batch = TokenBatch(one, one, one, one, one, jnp.ones((1, 1), jnp.int32), one)
    run(model, lambda module, *_: module(batch, [(pages, pages)] * 5)[0], jnp.zeros(1))
    assert traced == [None, 4]
    assert [layer.attn.window for layer in model.bind(model.leaves).layers] == [None, 4, None, 4, 4]
