"""The tensors that a checkpoint holds under our own names, and what a family's key table can say about them.

A key table maps a format's tensor names to ours, with {i} for a layer's number and {leaf} for "weight" or "bias". A
value is our name, or a `Fused` for a tensor that holds several of ours.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from pallasite.models.config import ModelConfig, TensorSpec


@dataclasses.dataclass(frozen=True)
class Fused:
    """A tensor of a format that holds several of ours, whole columns of each.

    parts: our names. columns: for a configuration, an int array for each part: its columns among those of the fused
    tensor, in our order. Together they are every column once. A bias is cut like the columns of its matrix.
    """

    parts: tuple[str, ...]
    columns: Callable[[ModelConfig], tuple[np.ndarray, ...]]


KeyTable = Mapping[str, str | Fused]


def tensor_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor that a checkpoint of this configuration holds, by our name. Linears are [K, N] (input, output)."""
    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    specs = {
        "embed.weight": TensorSpec((c.vocab_size, c.hidden_size), "embed"),
        "norm.weight": TensorSpec((c.hidden_size,), "norm"),
    }
    if not c.tie_word_embeddings:
        specs["head.weight"] = TensorSpec((c.hidden_size, c.vocab_size), "head")
    linears = {
        "attn.q": (c.hidden_size, q, c.qkv_bias),
        "attn.k": (c.hidden_size, kv, c.qkv_bias),
        "attn.v": (c.hidden_size, kv, c.qkv_bias),
        "attn.o": (q, c.hidden_size, c.out_bias),
        "mlp.gate": (c.hidden_size, c.intermediate_size, c.mlp_bias),
        "mlp.up": (c.hidden_size, c.intermediate_size, c.mlp_bias),
        "mlp.down": (c.intermediate_size, c.hidden_size, c.mlp_bias),
    }
    norms = {"attn_norm": c.hidden_size, "mlp_norm": c.hidden_size}
    if c.qk_norm:
        norms |= {"attn.q_norm": c.head_dim, "attn.k_norm": c.head_dim}
    for i in range(c.num_layers):
        for name, size in norms.items():
            specs[f"layers.{i}.{name}.weight"] = TensorSpec((size,), "norm")
        for name, (k, n, bias) in linears.items():
            specs[f"layers.{i}.{name}.weight"] = TensorSpec((k, n), "linear")
            if bias:
                specs[f"layers.{i}.{name}.bias"] = TensorSpec((n,), "bias")
    return specs
