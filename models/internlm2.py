"""InternLM2 and 2.5: Llama's decoder under other names, with q, k and v in one tensor, kv group by kv group.

Field meanings follow InternLM2Config of the published checkpoints.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from pallasite.models import llama
from pallasite.models.config import ModelConfig
from pallasite.models.tensors import Fused, KeyTable

ARCHITECTURES = ("InternLM2ForCausalLM",)


def columns_by_group(config: ModelConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Columns of q, k and v in wqkv: for each kv head its query heads, then the key head, then the value head."""
    group = config.num_heads // config.num_kv_heads
    columns = np.arange(config.num_kv_heads * (group + 2) * config.head_dim)
    by_group = columns.reshape(config.num_kv_heads, group + 2, config.head_dim)
    return by_group[:, :group].reshape(-1), by_group[:, group].reshape(-1), by_group[:, group + 1].reshape(-1)


HF_KEYS: KeyTable = {
    "model.tok_embeddings.weight": "embed.weight",
    "model.layers.{i}.attention_norm.weight": "layers.{i}.attn_norm.weight",
    "model.layers.{i}.attention.wqkv.{leaf}": Fused(
        ("layers.{i}.attn.q.{leaf}", "layers.{i}.attn.k.{leaf}", "layers.{i}.attn.v.{leaf}"), columns_by_group
    ),
    "model.layers.{i}.attention.wo.{leaf}": "layers.{i}.attn.o.{leaf}",
    "model.layers.{i}.ffn_norm.weight": "layers.{i}.mlp_norm.weight",
    "model.layers.{i}.feed_forward.w1.{leaf}": "layers.{i}.mlp.gate.{leaf}",
    "model.layers.{i}.feed_forward.w3.{leaf}": "layers.{i}.mlp.up.{leaf}",
    "model.layers.{i}.feed_forward.w2.{leaf}": "layers.{i}.mlp.down.{leaf}",
    "model.norm.weight": "norm.weight",
    "output.weight": "head.weight",
}


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig from an InternLM2ForCausalLM config.json. Raises ValueError naming a field that is missing or wrong.

    `bias` is for q, k, v and o; the MLP has none.
    """
    bias = bool(raw.get("bias", True))
    return dataclasses.replace(
        llama.read_config(raw), architecture=ARCHITECTURES[0], qkv_bias=bias, out_bias=bias, mlp_bias=False
    )
