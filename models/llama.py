"""The Llama family (Llama 1 to 3.x and what copies its layout): config reader and key table.

The decoder itself is models/decoder.py. Field meanings follow transformers' LlamaConfig.
"""

from collections.abc import Mapping
from typing import Any

from pallasite.models.config import (
    ModelConfig,
    read_dtype,
    read_number,
    read_rope,
    read_size,
    read_token_ids,
    refuse_other_values,
)
from pallasite.models.tensors import KeyTable

ARCHITECTURES = ("LlamaForCausalLM",)

HF_KEYS: KeyTable = {
    "model.embed_tokens.weight": "embed.weight",
    "model.layers.{i}.input_layernorm.weight": "layers.{i}.attn_norm.weight",
    "model.layers.{i}.self_attn.q_proj.{leaf}": "layers.{i}.attn.q.{leaf}",
    "model.layers.{i}.self_attn.k_proj.{leaf}": "layers.{i}.attn.k.{leaf}",
    "model.layers.{i}.self_attn.v_proj.{leaf}": "layers.{i}.attn.v.{leaf}",
    "model.layers.{i}.self_attn.o_proj.{leaf}": "layers.{i}.attn.o.{leaf}",
    "model.layers.{i}.post_attention_layernorm.weight": "layers.{i}.mlp_norm.weight",
    "model.layers.{i}.mlp.gate_proj.{leaf}": "layers.{i}.mlp.gate.{leaf}",
    "model.layers.{i}.mlp.up_proj.{leaf}": "layers.{i}.mlp.up.{leaf}",
    "model.layers.{i}.mlp.down_proj.{leaf}": "layers.{i}.mlp.down.{leaf}",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
"""Hugging Face tensor name -> ours; {i} is a layer number, {leaf} "weight" or "bias". HF stores every linear as
[N, K]; ours are [K, N]."""


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig from a LlamaForCausalLM config.json. Raises ValueError naming the field that is missing or wrong."""
    refuse_other_values(raw, hidden_act="silu")
    heads = read_size(raw, "num_attention_heads")
    hidden = read_size(raw, "hidden_size")
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=ARCHITECTURES[0],
        vocab_size=read_size(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=read_size(raw, "intermediate_size"),
        num_layers=read_size(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=read_size(raw, "num_key_value_heads", heads),
        head_dim=read_size(raw, "head_dim", hidden // heads),
        rms_norm_eps=read_number(raw, "rms_norm_eps", 1e-6),
        rope=read_rope(raw),
        max_position_embeddings=read_size(raw, "max_position_embeddings"),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        dtype=read_dtype(raw),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=read_token_ids(raw.get("eos_token_id")),
    )
