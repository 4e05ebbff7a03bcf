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


def random_tensor(k: int, n: int, group: int, offset: str, permutation: np.ndarray | None) -> Int4Tensor:
    rng = np.random.default_rng(0)
    groups = -(-k // group)
    packed = pack_rows(rng.integers(0, 16, (k, n), np.uint8))
    scales = rng.uniform(0.01, 0.1, (groups, n)).astype(np.float16)
    zeros = rng.integers(0, 17, (groups, n), np.uint8) if offset == "zeros" else None
    minimums = rng.uniform(-1, 0, (groups, n)).astype(np.float16) if offset == "minimums" else None
    return Int4Tensor(packed, scales, zeros, minimums, group, (k, n), permutation)


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("offset", ["zeros", "minimums"])
@pytest.mark.parametrize(("k", "group"), [(96, 32), (80, 32), (24, 32), (64, 64)])
def test_dequantize_value_by_value(k, group, offset, permuted):
    """Whole groups, a ragged one, less than one; row r of the packed ones is row permutation[r] of the result."""
    permutation = np.random.default_rng(1).permutation(k).astype(np.int32) if permuted else None
    tensor = random_tensor(k, 5, group, offset, permutation)
    w, q = tensor.dequantize(), unpack_rows(tensor.packed, k)
    assert w.dtype == np.float32
    for r in range(k):
        row, g = r if permutation is None else permutation[r], r // group
        for c in range(5):
            scale = np.float32(tensor.scales[g, c])
            if tensor.zeros is not None:
                assert w[row, c] == scale * np.float32(int(q[r, c]) - int(tensor.zeros[g, c]))
            else:
                assert w[row, c] == scale * np.float32(q[r, c]) + np.float32(tensor.minimums[g, c])


@pytest.mark.parametrize("offset", ["zeros", "minimums"])
def test_columns(offset):
    tensor = random_tensor(40, 6, 32, offset, np.arange(40, dtype=np.int32)[::-1].copy())
    columns = np.array([5, 0, 2])
    part = tensor.columns(columns)
    assert part.shape == (40, 3)
    np.testing.assert_array_equal(part.dequantize(), tensor.dequantize()[:, columns])


@pytest.mark.parametrize("wrong", [[0, 1, 2, 2], [0, 1, 2], [1, 2, 3, 4]])
def test_a_permutation_holds_every_row_once(wrong):
    packed, scales = np.zeros((1, 2), np.int32), np.ones((1, 2), np.float16)
    with pytest.raises(ValueError, match="INT4 permutation does not hold each of the 4 rows once"):
        Int4Tensor(packed, scales, np.zeros((1, 2), np.uint8), None, 4, (4, 2), np.array(wrong, np.int32))
