"""Round-to-nearest against a float64 computation written one value at a time."""

import ml_dtypes
import numpy as np
import pytest

from pallasite.convert.int4 import unpack_rows
from pallasite.convert.quantize import rtn


def by_hand(w: np.ndarray, g: int, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [K, N], zeros and ideal float64 scales [groups, N], from `scales` as stored."""
    k, n = w.shape
    q, zeros, ideal = np.zeros((k, n), int), np.zeros(scales.shape, int), np.ones(scales.shape)
    for group in range(-(-k // g)):
        for j in range(n):
            values = [float(v) for v in w[group * g : min((group + 1) * g, k), j]]
            lo, hi = min(0.0, *values), max(0.0, *values)
            if hi > lo:
                ideal[group, j] = (hi - lo) / 15
            s = float(scales[group, j])
            zeros[group, j] = min(max(round(-lo / s), 0), 15)
            for i, v in enumerate(values):
                q[group * g + i, j] = min(max(round(v / s) + zeros[group, j], 0), 15)
    return q, zeros, ideal


@pytest.mark.parametrize(
    ("k", "g"), [(128, 128), (576, 128), (576, 64), (96, 32), (320, 128), (40, 32), (7, 32)], ids=lambda v: str(v)
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_equals_a_float64_computation(k, g, dtype):
    rng = np.random.default_rng(k + g)
    w = rng.standard_normal((k, 6)).astype(dtype)
    w[:, 1] = np.abs(w[:, 1])  # zero at an end of the range
    w[:, 2] = -np.abs(w[:, 2])
    w[:, 3] = 0
    t = rtn.quantize("w", w, g)
    assert t.shape == (k, 6)
    assert t.scales.shape == (-(-k // g), 6)
    assert t.scales.dtype == np.float16
    assert t.zeros is not None
    q, zeros, ideal = by_hand(w, g, t.scales)
    np.testing.assert_allclose(t.scales.astype(np.float64), ideal, rtol=2**-10)
    np.testing.assert_array_equal(t.zeros, zeros)
    # float32 and float64 may round a tie apart: one step, on almost no weight.
    difference = np.abs(unpack_rows(t.packed, k).astype(int) - q)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.002
    error = np.abs(t.dequantize() - w.astype(np.float32))
    half = np.repeat(t.scales.astype(np.float32), g, axis=0)[:k] / 2
    # Half a step, and as much again where the rounded zero cuts an end of the range off.
    assert (error <= 2 * half * 1.01).all()
    assert (error <= half * 1.01).mean() > 0.9
    np.testing.assert_array_equal(t.dequantize()[:, 3], 0)


def test_the_ragged_group_has_a_range_of_its_own():
    w = np.full((576, 1), 100, np.float32)
    w[512:] = 0.15  # the last half group
    t = rtn.quantize("w", w, 128)
    assert float(t.scales[4, 0]) == pytest.approx(0.01, rel=1e-3)
    np.testing.assert_allclose(t.dequantize()[512:], 0.15, rtol=1e-3)


def test_zero_is_exact_and_zero_groups_are_safe():
    rng = np.random.default_rng(1)
    w = rng.standard_normal((64, 4)).astype(np.float32)
    w[5] = 0
    w[:32, 2] = 0
    t = rtn.quantize("w", w, 32)
    assert (t.dequantize()[5] == 0).all()
    assert (t.dequantize()[:32, 2] == 0).all()
    assert t.scales[0, 2] == 1


@pytest.mark.parametrize(("size", "dtype"), [(1.0, np.float16), (2e6, np.float32), (1e-5, np.float32)])
def test_scales_are_float32_where_float16_would_lose_more_than_rounding(size, dtype):
    w = np.random.default_rng(2).standard_normal((32, 4)).astype(np.float32)
    w[:, 1] *= np.float32(size)
    t = rtn.quantize("w", w, 32)
    assert t.scales.dtype == dtype
    assert np.abs(t.dequantize() - w)[:, 1].max() <= np.ptp(w[:, 1]) / 15 * 1.01


def test_chunks_of_columns_change_nothing(monkeypatch):
    w = np.random.default_rng(4).standard_normal((96, 50)).astype(np.float32)
    whole = rtn.quantize("w", w, 64)
    monkeypatch.setattr(rtn, "CHUNK_BYTES", 96 * 4 * 7)
    pieces = rtn.quantize("w", w, 64)
    for field in ("packed", "scales", "zeros"):
        np.testing.assert_array_equal(getattr(whole, field), getattr(pieces, field))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(bad):
    w = np.ones((64, 4), np.float32)
    w[40, 3] = bad
    with pytest.raises(ValueError, match=r"layers\.3\.mlp\.down\.weight: has weights that are not finite"):
        rtn.quantize("layers.3.mlp.down.weight", w, 32)


@pytest.mark.parametrize("group_size", [0, 16, 100, 256, -1])
def test_other_group_sizes_are_refused(group_size):
    with pytest.raises(ValueError, match=f"group_size is {group_size}; it must be one of 32, 64, 128"):
        rtn.quantize("w", np.ones((64, 4), np.float32), group_size)
