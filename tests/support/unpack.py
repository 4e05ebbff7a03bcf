"""Other people's INT4 formats by their descriptions, written apart from the product and slowly: one value at a time."""

import numpy as np


def nibble(word: int, i: int) -> int:
    """Bits 4i to 4i+3 of an int32."""
    return (int(word) >> 4 * i) & 15


def along_rows(packed: np.ndarray, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> np.ndarray:
    """int32 [R, W] -> [R, 8 W]: column c of a row stands in word c // 8, in the nibble where `order` has c % 8."""
    return np.array(
        [[nibble(row[c // 8], order.index(c % 8)) for c in range(8 * len(row))] for row in packed.tolist()], np.int64
    )


def awq(packed: np.ndarray) -> np.ndarray:
    """AWQ "gemm": nibbles 0..7 hold columns 0, 2, 4, 6, 1, 3, 5, 7."""
    return along_rows(packed, (0, 2, 4, 6, 1, 3, 5, 7))
