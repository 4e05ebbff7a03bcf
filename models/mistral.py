"""Mistral: Llama with a sliding attention window (Jiang et al. 2023, section 2), in the versions that have one."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pallasite.models import llama
from pallasite.models.config import ModelConfig, read_size, read_windows

ARCHITECTURES = ("MistralForCausalLM",)
HF_KEYS = llama.HF_KEYS


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig from a MistralForCausalLM config.json. Raises ValueError naming a field that is missing or wrong.

    A sliding_window of null is none; the field's default is transformers'. There are no biases.
    """
    given = "sliding_window" not in raw or raw["sliding_window"] is not None
    window = read_size(raw, "sliding_window", 4096) if given else None
    return dataclasses.replace(
        llama.read_config(raw),
        architecture=ARCHITECTURES[0],
        windows=read_windows(raw, window, first=0),
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
    )
