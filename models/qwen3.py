"""Qwen 3 (dense): each head's q and k are normed, the head size stands apart from the hidden size."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pallasite.models import llama, qwen2
from pallasite.models.config import ModelConfig
from pallasite.models.tensors import KeyTable

ARCHITECTURES = ("Qwen3ForCausalLM",)
HF_KEYS: KeyTable = {
    **llama.HF_KEYS,
    "model.layers.{i}.self_attn.q_norm.weight": "layers.{i}.attn.q_norm.weight",
    "model.layers.{i}.self_attn.k_norm.weight": "layers.{i}.attn.k_norm.weight",
}


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig from a Qwen3ForCausalLM config.json. Raises ValueError naming a field that is missing or wrong.

    Windows are Qwen 2's; attention_bias is for q, k, v and o.
    """
    bias = bool(raw.get("attention_bias", False))
    head_dim = 128 if raw.get("head_dim") is None else raw["head_dim"]
    return dataclasses.replace(
        qwen2.read_config({**raw, "head_dim": head_dim}),
        architecture=ARCHITECTURES[0],
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
    )
