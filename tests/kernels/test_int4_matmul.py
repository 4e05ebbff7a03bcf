"""INT4 dequantizing and matrix product against numpy, from matrices packed as they are in a checkpoint."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallasite.convert.int4 import pack_rows
from pallasite.kernels.int4_matmul import dequantize, int4_matmul


def matrix(k: int, n: int, group: int, seed: int = 0):
    """(q [K, N], packed, scale, offset [K / group, N]); every column and group has its own scale and offset."""
    rng = np.random.default_rng(seed)
    q = rng.integers(0, 16, (k, n), np.uint8)
    scale, offset = rng.uniform(0.01, 0.1, (k // group, n)), rng.uniform(-1, 0, (k // group, n))
    return q, pack_rows(q), scale.astype(np.float32), offset.astype(np.float32)


def expand(q: np.ndarray, scale: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """float64 [K, N] by the formula."""
    group = q.shape[0] // scale.shape[0]
    return q * np.repeat(scale, group, axis=0).astype(float) + np.repeat(offset, group, axis=0)


@pytest.mark.parametrize(("k", "n", "group"), [(128, 24, 32), (256, 8, 64), (256, 5, 128), (96, 3, 96), (8, 1, 8)])
def test_dequantize(k, n, group):
    q, packed, scale, offset = matrix(k, n, group)
    got = dequantize(packed, scale, offset)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expand(q, scale, offset), rtol=1e-6, atol=1e-7)


def test_all_sixteen_values_in_every_nibble_the_sign_bit_included():
    """Where row 8r + 7 is 8 or more the word is negative, and a shift must not drag its sign along."""
    q = (np.arange(128)[:, None] // 8 + np.arange(8)[None] * 2 + np.arange(128)[:, None] % 8).astype(np.uint8) % 16
    packed = pack_rows(q)
    assert (packed < 0).any()
    ones, zeros = np.ones((1, 8), np.float32), np.zeros((1, 8), np.float32)
    np.testing.assert_array_equal(dequantize(packed, ones, zeros), q)


@pytest.mark.parametrize("m", [1, 7])
def test_matmul(m):
    q, packed, scale, offset = matrix(256, 12, 64)
    x = np.random.default_rng(1).normal(size=(m, 256)).astype(np.float32)
    got = int4_matmul(jnp.asarray(x), packed, scale, offset)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, x.astype(float) @ expand(q, scale, offset), rtol=1e-5, atol=1e-5)


def test_bfloat16_input_accumulates_in_float32():
    """4096 products of one size: summed in bfloat16 they would stop growing at 256 times the first."""
    q = np.full((4096, 2), 15, np.uint8)
    scale, offset = np.full((32, 2), 1 / 16, np.float32), np.zeros((32, 2), np.float32)
    got = int4_matmul(jnp.ones((1, 4096), jnp.bfloat16), pack_rows(q), scale, offset)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.float32(4096 * 15 / 16))
