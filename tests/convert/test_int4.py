"""The INT4 tensor as it is stored: packing, dequantizing, and shapes that do not fit."""

import numpy as np
import pytest

from pallasite.convert.int4 import Int4Tensor, pack_rows, unpack_rows


@pytest.mark.parametrize("k", [1, 8, 13, 32])
def test_packing_is_reversible_with_all_sixteen_values(k):
    q = (np.arange(k * 16).reshape(k, 16) * 7 % 16).astype(np.uint8)
    packed = pack_rows(q)
    assert packed.dtype == np.int32
    assert packed.shape == (-(-k // 8), 16)
    np.testing.assert_array_equal(unpack_rows(packed, k), q)


def test_nibble_j_of_a_word_is_row_j():
    q = np.arange(8, dtype=np.uint8)[:, None] + 8
    assert pack_rows(q).view(np.uint32)[0, 0] == 0xFEDCBA98


@pytest.mark.parametrize("offset", ["zeros", "minimums"])
def test_dequantize_of_a_ragged_tensor(offset):
    rng = np.random.default_rng(0)
    k, n, g = 80, 3, 32
    q = rng.integers(0, 16, (k, n), np.uint8)
    scales = rng.random((3, n), np.float32).astype(np.float16)
    zeros = rng.integers(0, 16, (3, n), np.uint8) if offset == "zeros" else None
    minimums = -rng.random((3, n), np.float32).astype(np.float16) if offset == "minimums" else None
    w = Int4Tensor(pack_rows(q), scales, zeros, minimums, g, (k, n)).dequantize()
    for i in range(k):
        for j in range(n):
            s = np.float32(scales[i // g, j])
            if zeros is not None:
                assert w[i, j] == s * np.float32(int(q[i, j]) - int(zeros[i // g, j]))
            else:
                assert minimums is not None
                assert w[i, j] == s * np.float32(q[i, j]) + np.float32(minimums[i // g, j])


def test_shapes_that_do_not_fit_are_refused():
    packed, scales, zeros = np.zeros((8, 4), np.int32), np.ones((2, 4), np.float16), np.zeros((2, 4), np.uint8)
    Int4Tensor(packed, scales, zeros, None, 32, (64, 4))
    with pytest.raises(ValueError, match="exactly one of them"):
        Int4Tensor(packed, scales, zeros, scales, 32, (64, 4))
    with pytest.raises(ValueError, match=r"INT4 scales has shape \(2, 4\); K=64, N=4, group_size=64"):
        Int4Tensor(packed, scales, zeros, None, 64, (64, 4))
