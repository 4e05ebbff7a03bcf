"""Qwen 2 and 2.5: Llama with biases for q, k and v, and in some sizes a sliding window in the upper layers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pallasite.models import llama
from pallasite.models.config import ModelConfig, read_size, read_windows, refuse_other_values

ARCHITECTURES = ("Qwen2ForCausalLM",)
HF_KEYS = llama.HF_KEYS


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig from a Qwen2ForCausalLM config.json. Raises ValueError naming a field that is missing or wrong.

    The window counts only where use_sliding_window is true; max_window_layers is the first layer that has it.
    """
    refuse_other_values(raw, use_mrope=False)
    window, first = None, 0
    if raw.get("use_sliding_window", False):
        window, first = read_size(raw, "sliding_window", 4096), read_size(raw, "max_window_layers", 28, least=0)
    return dataclasses.replace(
        llama.read_config(raw),
        architecture=ARCHITECTURES[0],
        qkv_bias=True,
        out_bias=False,
        mlp_bias=False,
        windows=read_windows(raw, window, first),
    )
