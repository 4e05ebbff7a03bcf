"""Rotary embedding against the papers' formulas in float64, written here a second time."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from pallasite.models.config import RopeConfig
from pallasite.models.rope import apply_rope, logn_scale, page_tag, rope_angles, static_frequencies

LINEAR = RopeConfig(theta=10000.0, kind="linear", factor=4.0, original_max_position=512)
LLAMA3 = RopeConfig(500000.0, "llama3", 8.0, 8192, 1.0, 4.0)
DYNAMIC = RopeConfig(theta=10000.0, kind="dynamic", factor=2.0, original_max_position=64)
QWEN1 = RopeConfig(theta=10000.0, kind="qwen1", original_max_position=64)


def frequencies(theta: float, dim: int) -> np.ndarray:
    return np.asarray([theta ** (-2 * i / dim) for i in range(dim // 2)])


def llama3_frequency(frequency: float, rope: RopeConfig) -> float:
    """One frequency at a time, as Llama 3.1 brought it: by how many of its waves fit in the trained length."""
    waves = rope.original_max_position * frequency / (2 * np.pi)
    if waves < rope.low_freq_factor:
        return frequency / rope.factor
    if waves > rope.high_freq_factor:
        return frequency
    smooth = (waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


def angles(rope: RopeConfig, dim: int, positions, lengths=None) -> np.ndarray:
    positions = np.asarray(positions, np.int32)
    lengths = positions + 1 if lengths is None else np.asarray(lengths, np.int32)
    got = rope_angles(rope, dim, jnp.asarray(positions), jnp.asarray(lengths))
    assert got.dtype == jnp.float32
    return np.asarray(got, float)


@pytest.mark.parametrize("dim", [2, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_default(theta, dim):
    np.testing.assert_allclose(static_frequencies(RopeConfig(theta), dim), frequencies(theta, dim), rtol=1e-6)


def test_linear_divides_every_frequency():
    np.testing.assert_allclose(static_frequencies(LINEAR, 64), frequencies(1e4, 64) / 4, rtol=1e-6)


@pytest.mark.parametrize("rope", [LLAMA3, RopeConfig(1e4, "llama3", 32.0, 64, 1.0, 4.0)])
def test_llama3_divides_the_long_waves_only(rope):
    plain = frequencies(rope.theta, 128)
    expected = [llama3_frequency(f, rope) for f in plain]
    got = static_frequencies(rope, 128)
    np.testing.assert_allclose(got, expected, rtol=2e-6)
    # All three kinds are there, or the test shows nothing.
    ratio = got / plain
    assert np.isclose(ratio, 1).any()
    assert np.isclose(ratio, 1 / rope.factor).any()
    assert ((ratio > 1.1 / rope.factor) & (ratio < 0.9)).any()


@pytest.mark.parametrize("rope", [RopeConfig(1e4), RopeConfig(1e6), LINEAR, LLAMA3])
def test_angles_at_position_100000(rope):
    """Within a few roundings of float32: at most 100,000 x 2 ** -23 radians for the fastest wave."""
    dim = 64
    exact = frequencies(rope.theta, dim)
    if rope.kind == "linear":
        exact = exact / rope.factor
    if rope.kind == "llama3":
        exact = np.asarray([llama3_frequency(f, rope) for f in exact])
    got = angles(rope, dim, [0, 1, 4095, 100000])
    np.testing.assert_allclose(got, np.outer([0, 1, 4095, 100000], exact), rtol=1e-6)
    assert got[3, 0] == np.float32(100000 * static_frequencies(rope, dim)[0])


def test_a18_dynamic_takes_each_tokens_own_length():
    """One call with tokens of prompts of 40, 64, 65 and 130 tokens, trained length 64: a long one moves no other, and
    tokens generated after them (position 40 and on) count their own length."""
    dim, prompts, positions = 32, [40, 64, 65, 130, 130, 40, 40, 65], [39, 10, 64, 7, 129, 62, 99, 139]
    got = angles(DYNAMIC, dim, positions, prompts)
    for row, prompt, position in zip(got, prompts, positions, strict=True):
        length = prompt if position < prompt else position + 1
        growth = DYNAMIC.factor * max(length, 64) / 64 - (DYNAMIC.factor - 1)
        base = DYNAMIC.theta * growth ** (dim / (dim - 2))
        np.testing.assert_allclose(row, position * frequencies(base, dim), rtol=5e-6)


def test_dynamic_up_to_the_trained_length_is_the_default():
    got = angles(DYNAMIC, 32, [0, 5, 63], [1, 6, 64])
    np.testing.assert_allclose(got, angles(RopeConfig(1e4), 32, [0, 5, 63]), rtol=2e-6)


def test_a18_qwen1_keeps_the_prompts_base():
    """By the original's formula with its logarithm; the powers of two, where it is an integer, are among the cases."""
    dim, prompts = 32, [1, 40, 64, 65, 127, 128, 129, 256, 257, 511, 512, 513, 100_000]
    for position in (0, 39, 100_000):
        got = angles(QWEN1, dim, [position] * len(prompts), prompts)
        for row, prompt in zip(got, prompts, strict=True):
            alpha = max(2 ** math.ceil(math.log2(prompt / 64) + 1) - 1, 1)
            base = QWEN1.theta * alpha ** (dim / (dim - 2))
            np.testing.assert_allclose(row, position * frequencies(base, dim), rtol=5e-6)
    assert np.isfinite(angles(QWEN1, dim, [0], [0])).all()  # padding


@pytest.mark.parametrize("rope", [DYNAMIC, QWEN1, LLAMA3], ids=lambda rope: rope.kind)
def test_tags_are_equal_where_all_bases_are(rope):
    """Over prompts of 1 to 300 tokens: angles at all positions, of the prompt or generated after it."""
    positions, prompts = np.arange(320), np.arange(1, 301)
    count = len(positions)
    got = angles(rope, 16, np.tile(positions, len(prompts)), np.repeat(prompts, count)).reshape(len(prompts), -1)
    tags = np.asarray([page_tag(rope, int(p)) for p in prompts])
    _, kinds = np.unique(got, axis=0, return_inverse=True)
    same = kinds[:, None] == kinds
    np.testing.assert_array_equal(same, tags[:, None] == tags)


def test_logn_by_hand():
    got = logn_scale(jnp.asarray([0, 62, 63, 64, 127, 4095]), 64)
    np.testing.assert_allclose(got, [1, 1, 1, math.log(65) / math.log(64), 7 / 6, 2], rtol=1e-6)


def test_other_kinds_do_not_look_at_the_length():
    for rope in (RopeConfig(1e4), LINEAR, LLAMA3):
        np.testing.assert_array_equal(
            angles(rope, 16, [7, 7], [8, 100000])[0], angles(rope, 16, [7, 7], [8, 100000])[1]
        )


def test_apply_rope_is_a_complex_multiplication():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 3, 16)).astype(np.float32)
    theta = rng.uniform(-100, 100, (5, 8)).astype(np.float32)
    got = apply_rope(jnp.asarray(x), jnp.cos(theta), jnp.sin(theta))
    turned = (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * theta[:, None].astype(float))
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], -1), atol=2e-6)


def test_scores_depend_on_the_distance_only():
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(2, 1, 1, 64)).astype(np.float32)

    def score(i: int, j: int) -> float:
        theta = rope_angles(RopeConfig(1e4), 64, jnp.asarray([i, j]), jnp.asarray([0, 0]))
        cos, sin = jnp.cos(theta), jnp.sin(theta)
        return float(jnp.vdot(apply_rope(q, cos[:1], sin[:1]), apply_rope(k, cos[1:], sin[1:])))

    assert score(17, 3) == pytest.approx(score(1017, 1003), abs=2e-3)
    assert abs(score(17, 3) - score(17, 4)) > 1e-2


def test_apply_rope_computes_in_float32_and_returns_the_inputs_dtype():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(4, 2, 8)), jnp.bfloat16)
    theta = jnp.asarray(np.random.default_rng(3).uniform(0, 6, (4, 4)), jnp.float32)
    got = apply_rope(x, jnp.cos(theta), jnp.sin(theta))
    assert got.dtype == jnp.bfloat16
    wide = apply_rope(x.astype(jnp.float32), jnp.cos(theta), jnp.sin(theta))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(wide.astype(jnp.bfloat16), np.float32))
