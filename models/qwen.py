"""Qwen 1 (QWenLMHeadModel): q, k and v in one tensor, and two ways past the trained length, NTK and logn.

Field meanings and defaults follow QWenConfig of the published checkpoints. The MLP is c_proj(w1(x) * silu(w2(x))), and
intermediate_size counts w1 and w2 together.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pallasite.models.config import (
    ModelConfig,
    RopeConfig,
    read_dtype,
    read_number,
    read_size,
    read_token_ids,
    refuse_other_values,
)
from pallasite.models.tensors import Fused, KeyTable

ARCHITECTURES = ("QWenLMHeadModel",)


def columns_side_by_side(config: ModelConfig) -> tuple[np.ndarray, ...]:
    """Columns of q, k and v in c_attn: all of q, then all of k, then all of v."""
    heads = np.cumsum([config.num_heads, config.num_kv_heads, config.num_kv_heads])
    *parts, _ = np.split(np.arange(heads[-1] * config.head_dim), heads * config.head_dim)
    return tuple(parts)


HF_KEYS: KeyTable = {
    "transformer.wte.weight": "embed.weight",
    "transformer.h.{i}.ln_1.weight": "layers.{i}.attn_norm.weight",
    "transformer.h.{i}.attn.c_attn.{leaf}": Fused(
        ("layers.{i}.attn.q.{leaf}", "layers.{i}.attn.k.{leaf}", "layers.{i}.attn.v.{leaf}"), columns_side_by_side
    ),
    "transformer.h.{i}.attn.c_proj.{leaf}": "layers.{i}.attn.o.{leaf}",
    "transformer.h.{i}.ln_2.weight": "layers.{i}.mlp_norm.weight",
    "transformer.h.{i}.mlp.w2.{leaf}": "layers.{i}.mlp.gate.{leaf}",
    "transformer.h.{i}.mlp.w1.{leaf}": "layers.{i}.mlp.up.{leaf}",
    "transformer.h.{i}.mlp.c_proj.{leaf}": "layers.{i}.mlp.down.{leaf}",
    "transformer.ln_f.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig from a QWenLMHeadModel config.json. Raises ValueError naming a field that is missing or wrong."""
    refuse_other_values(raw, rotary_pct=1.0, scale_attn_weights=True)
    width = read_size(raw, "intermediate_size")
    if width % 2:
        raise ValueError(
            f"config.json: intermediate_size is {width}; w1 and w2 have half of it each, so it must be even"
        )
    heads = read_size(raw, "num_attention_heads")
    longest = read_size(raw, "max_position_embeddings", 8192)
    trained = read_size(raw, "seq_length", longest, least=2)
    bias = not raw.get("no_bias", True)  # of all linears but c_attn, which always has one
    return ModelConfig(
        architecture=ARCHITECTURES[0],
        vocab_size=read_size(raw, "vocab_size"),
        hidden_size=read_size(raw, "hidden_size"),
        intermediate_size=width // 2,
        num_layers=read_size(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=read_size(raw, "kv_channels", 128),
        rms_norm_eps=read_number(raw, "layer_norm_epsilon", 1e-6),
        rope=RopeConfig(
            theta=read_number(raw, "rotary_emb_base", 10000.0),
            kind="qwen1" if raw.get("use_dynamic_ntk", True) else "default",
            original_max_position=trained,
        ),
        max_position_embeddings=longest,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=True,
        out_bias=bias,
        mlp_bias=bias,
        logn_length=trained if raw.get("use_logn_attn", True) else None,
        dtype=read_dtype(raw),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=read_token_ids(raw.get("eos_token_id")),
    )
