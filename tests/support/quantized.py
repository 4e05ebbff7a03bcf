"""Quantized checkpoints of random integers, written by the formats' descriptions, slowly and apart from the product."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns that the nibbles of a word hold, lowest first."""

FIELDS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": True},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 64},
            }
        },
        "ignore": ["lm_head"],
    },
}
"""quantization_config of the methods, to be changed."""


def words(values: np.ndarray, order: Sequence[int] = range(8)) -> np.ndarray:
    """Integers [R, 8 W] -> int32 [R, W]: nibble i of a word holds column order[i] of its eight."""
    rows = [
        [sum(int(row[8 * w + column]) << 4 * i for i, column in enumerate(order)) for w in range(len(row) // 8)]
        for row in values
    ]
    return np.array(rows, np.uint32).view(np.int32)


class Linear:
    """A random linear [K, N]: q [K, N] of 0..15, zeros [groups, N] of 1..15, scales [groups, N], group_index [K]."""

    def __init__(self, k: int, n: int, group: int, *, seed: int = 0, group_index: np.ndarray | None = None):
        rng = np.random.default_rng(seed)
        group = k if group == -1 else group
        self.group_index = np.arange(k) // group if group_index is None else group_index
        groups = -(-k // group)
        self.q = rng.integers(0, 16, (k, n))
        self.zeros = rng.integers(1, 16, (groups, n))
        self.scales = rng.uniform(0.01, 0.03, (groups, n)).astype(np.float16)

    def weight(self) -> np.ndarray:
        """float32 [K, N], exact: scales of 11 bits times integers of 5."""
        return (self.q - self.zeros[self.group_index]).astype(np.float32) * self.scales[self.group_index].astype(
            np.float32
        )

    def awq(self, module: str) -> Tensors:
        """AWQ "gemm"."""
        return {
            f"{module}.qweight": words(self.q, AWQ_ORDER),
            f"{module}.qzeros": words(self.zeros, AWQ_ORDER),
            f"{module}.scales": self.scales,
        }

    def gptq(self, module: str, less: int = 1) -> Tensors:
        """GPTQ, its zeros stored less `less`: 1 in v1, 0 in v2."""
        return {
            f"{module}.qweight": np.ascontiguousarray(words(self.q.T).T),
            f"{module}.qzeros": words(self.zeros - less),
            f"{module}.scales": self.scales,
            f"{module}.g_idx": self.group_index.astype(np.int32),
        }

    def compressed_tensors(self, module: str) -> Tensors:
        """compressed-tensors' "pack-quantized", asymmetric; the last nibbles where K or N is not a multiple of 8 are 7,
        for nothing is said of them."""
        k, n = self.q.shape
        q = np.pad(self.q.T, ((0, 0), (0, -k % 8)), constant_values=7)
        zeros = np.pad(self.zeros.T, ((0, -n % 8), (0, 0)), constant_values=7)
        stored = {
            f"{module}.weight_packed": words(q),
            f"{module}.weight_zero_point": np.ascontiguousarray(words(zeros.T).T),
            f"{module}.weight_scale": np.ascontiguousarray(self.scales.T),
            f"{module}.weight_shape": np.array([n, k]),
        }
        if (self.group_index != np.sort(self.group_index)).any():
            stored[f"{module}.weight_g_idx"] = self.group_index.astype(np.int32)
        return stored


def random_order(k: int, group: int, seed: int = 0) -> np.ndarray:
    """Group numbers [K] in a random order, as desc_act leaves them."""
    return np.random.default_rng(seed).permutation(np.arange(k) // group)


def quantize_linears(
    tensors: Mapping[str, np.ndarray], method: str, group: int, orders: Mapping[str, np.ndarray] | None = None
) -> tuple[Tensors, Tensors]:
    """A model's tensors by Hugging Face's names, every linear of its layers replaced by a random quantized one; and the
    same with their weights in float32. orders: group numbers by the end of a module's name ("q_proj")."""
    quantized, floating = dict(tensors), dict(tensors)
    for seed, (name, tensor) in enumerate(tensors.items()):
        module = name.removesuffix(".weight")
        if tensor.ndim != 2 or ".layers." not in name:
            continue
        n, k = tensor.shape
        linear = Linear(k, n, group, seed=seed, group_index=(orders or {}).get(module.rpartition(".")[2]))
        del quantized[name]
        quantized |= getattr(linear, method.replace("-", "_"))(module)
        floating[name] = np.ascontiguousarray(linear.weight().T)
    return quantized, floating
