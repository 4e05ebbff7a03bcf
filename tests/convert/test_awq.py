"""AWQ "gemm": the order of its nibbles, against an unpacker written from the description (tests/support/unpack.py)."""

import numpy as np
import pytest
from support import unpack

from pallasite.convert.formats import awq


@pytest.mark.parametrize("n", [8, 64])
def test_a01_each_nibble_is_the_column_that_awq_puts_there(n):
    """Every column has a value of its own, so that any other order shows; word 0 by hand: columns 7 5 3 1 6 4 2 0."""
    q = np.tile(np.arange(n, dtype=np.uint8) % 16, (256, 1))
    packed = awq.pack_columns(q)
    assert packed.dtype == np.int32
    assert packed.shape == (256, n // 8)
    assert packed[0, 0] == 0x75316420
    np.testing.assert_array_equal(unpack.awq(packed), q)
    np.testing.assert_array_equal(awq.unpack_columns(packed), q)


def test_all_values_in_all_places_the_sign_bit_included():
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (40, 5)).astype(np.int32)
    assert (words < 0).any()
    q = awq.unpack_columns(words)
    np.testing.assert_array_equal(q, unpack.awq(words))
    np.testing.assert_array_equal(awq.pack_columns(q), words)


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match=r"N is 12; .* multiple of 8"):
        awq.pack_columns(np.zeros((1, 12), np.uint8))
    with pytest.raises(ValueError, match="the largest value is 16; four bits end at 15"):
        awq.pack_columns(np.full((1, 8), 16, np.uint8))
