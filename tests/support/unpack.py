"""Other people's INT4 formats by their descriptions, written apart from the product and slowly: one value at a time."""

from typing import Any

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


def linear(
    stored: dict[str, np.ndarray], module: str, config: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A quantized linear out of its tensors: q [K, N], zeros [groups, N], scales [groups, N], group of each row [K]."""
    part = {key.rpartition(".")[2]: array for key, array in stored.items() if key.rpartition(".")[0] == module}
    match config["quant_method"]:
        case "awq":
            q, zeros, scales = awq(part["qweight"]), awq(part["qzeros"]), part["scales"]
            group = np.arange(len(q)) // config["group_size"]
        case "gptq":
            q, scales, group = along_rows(part["qweight"].T).T, part["scales"], part["g_idx"]
            zeros = along_rows(part["qzeros"]) + (config.get("checkpoint_format", "gptq") == "gptq")
        case "compressed-tensors":
            q, scales = along_rows(part["weight_packed"]).T, part["weight_scale"].T
            zeros = np.full(scales.shape, 8)
            if "weight_zero_point" in part:
                zeros = along_rows(part["weight_zero_point"].T)
            group = np.arange(len(q)) // config["config_groups"]["group_0"]["weights"]["group_size"]
    return q, zeros, scales, group
