"""The families' config.json as it is published, in both spellings, and what each family refuses."""

import dataclasses
import re

import numpy as np
import pytest

from pallasite.models.config import RopeConfig
from pallasite.models.qwen import columns_side_by_side
from pallasite.models.registry import read_config
from pallasite.models.tensors import tensor_specs

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
INTERNLM2 = LLAMA | {
    "architectures": ["InternLM2ForCausalLM"],
    "bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 32768,
    "rope_scaling": {"factor": 2.0, "type": "dynamic"},
    "rope_theta": 1000000,
    "vocab_size": 92544,
}
MISTRAL = LLAMA | {
    "architectures": ["MistralForCausalLM"],
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
QWEN1 = {
    "architectures": ["QWenLMHeadModel"],
    "vocab_size": 152064,
    "hidden_size": 5120,
    "intermediate_size": 27392,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "kv_channels": 128,
    "layer_norm_epsilon": 1e-6,
    "max_position_embeddings": 8192,
    "no_bias": True,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "scale_attn_weights": True,
    "seq_length": 2048,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
}
QWEN2 = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_mrope": False,
    "use_sliding_window": False,
}
QWEN3 = QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "hidden_size": 1024, "head_dim": 128}


def layer(raw: dict) -> dict[str, tuple[int, ...]]:
    """Shapes of the last layer's tensors."""
    config = read_config(raw)
    prefix = f"layers.{config.num_layers - 1}."
    return {
        name.removeprefix(prefix): spec.shape for name, spec in tensor_specs(config).items() if name.startswith(prefix)
    }


def test_internlm2():
    config = read_config(INTERNLM2)
    assert config.rope == RopeConfig(1e6, "dynamic", 2.0, 32768)
    assert config.max_session_len is None
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert not any(name.endswith("bias") for name in layer(INTERNLM2))
    with_bias = layer({k: v for k, v in INTERNLM2.items() if k != "bias"})  # the original's default
    assert {name for name in with_bias if name.endswith("bias")} == {f"attn.{part}.bias" for part in "qkvo"}


def test_qwen1():
    """Qwen-14B-Chat: each branch of the MLP is half of intermediate_size; only q, k and v have biases."""
    config = read_config(QWEN1)
    assert config.rope == RopeConfig(10000.0, "qwen1", 1.0, 2048)
    assert (config.logn_length, config.max_position_embeddings, config.max_session_len) == (2048, 8192, None)
    assert config.dtype == "bfloat16"
    shapes = layer(QWEN1)
    assert shapes["mlp.gate.weight"] == shapes["mlp.up.weight"] == (5120, 13696)
    assert shapes["attn.k.weight"] == (5120, 5120)
    assert {name for name in shapes if name.endswith("bias")} == {f"attn.{part}.bias" for part in "qkv"}
    assert {name for name in layer(QWEN1 | {"no_bias": False}) if name.endswith("bias")} == {
        *(f"attn.{part}.bias" for part in "qkvo"),
        *(f"mlp.{part}.bias" for part in ("gate", "up", "down")),
    }


def test_qwen1_without_its_ways_past_the_trained_length():
    config = read_config(QWEN1 | {"use_dynamic_ntk": False, "use_logn_attn": False})
    assert (config.rope.kind, config.logn_length, config.max_session_len) == ("default", None, 8192)


def test_qwen1s_c_attn_is_q_then_k_then_v():
    config = dataclasses.replace(read_config(QWEN1), num_heads=2, num_kv_heads=2, head_dim=4)
    q, k, v = columns_side_by_side(config)
    np.testing.assert_array_equal([q, k, v], np.arange(24).reshape(3, 8))


def test_qwen2_and_qwen3():
    assert {name for name in layer(QWEN2) if name.endswith("bias")} == {f"attn.{part}.bias" for part in "qkv"}
    shapes = layer(QWEN3)
    assert shapes["attn.q_norm.weight"] == shapes["attn.k_norm.weight"] == (128,)
    assert shapes["attn.q.weight"] == (1024, 4096)  # 32 heads of 128, not of 1024 / 32
    assert layer({k: v for k, v in QWEN3.items() if k != "head_dim"}) == shapes
    assert {name for name in layer(QWEN3 | {"attention_bias": True}) if name.endswith("bias")} == {
        f"attn.{part}.bias" for part in "qkvo"
    }


@pytest.mark.parametrize(
    ("raw", "windows"),
    [
        (MISTRAL, (4096,) * 32),
        (MISTRAL | {"sliding_window": None}, ()),  # version 0.2 and later
        ({k: v for k, v in MISTRAL.items() if k != "sliding_window"}, (4096,) * 32),
        (MISTRAL | {"layer_types": ["full_attention", "sliding_attention"] * 16}, (None, 4096) * 16),
        (QWEN2, ()),
        (QWEN2 | {"use_sliding_window": True}, (None,) * 28 + (131072,) * 4),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 0}, (131072,) * 32),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 40}, ()),
        (QWEN2 | {"layer_types": ["full_attention"] * 32}, ()),
        (
            QWEN3 | {"use_sliding_window": True, "layer_types": ["sliding_attention"] + ["full_attention"] * 31},
            (131072, *[None] * 31),
        ),
        (LLAMA | {"sliding_window": 4096}, ()),  # transformers' Llama has none
    ],
)
def test_windows(raw, windows):
    assert read_config(raw).windows == windows


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (MISTRAL | {"sliding_window": 0}, "sliding_window is 0; it must be an integer from 1"),
        (MISTRAL | {"layer_types": ["sliding_attention"] * 3}, "3 layers have a kind, and num_hidden_layers is 32"),
        (MISTRAL | {"layer_types": "sliding_attention"}, "layer_types is 'sliding_attention'; it must be a list"),
        (
            QWEN2 | {"layer_types": ["full_attention", "chunked_attention", "linear_attention"]},
            "layer_types has chunked_attention, linear_attention; supported are full_attention, sliding_attention",
        ),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 32}, "layer_types has sliding_attention, and there is no"),
        (
            QWEN2 | {"use_sliding_window": True, "max_window_layers": -1},
            "max_window_layers is -1; it must be an integer from 0",
        ),
        (QWEN2 | {"use_mrope": True}, "use_mrope is True; only False is supported"),
        (QWEN2 | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "'mrope' is not supported"),
        (QWEN2 | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
        (QWEN1 | {"rotary_pct": 0.5}, "rotary_pct is 0.5; only 1.0 is supported"),
        (QWEN1 | {"scale_attn_weights": False}, "scale_attn_weights is False; only True is supported"),
        (QWEN1 | {"intermediate_size": 27393}, "intermediate_size is 27393; .* must be even"),
        (QWEN1 | {"seq_length": 1}, "seq_length is 1; it must be an integer from 2"),
        (QWEN1 | {"layer_norm_epsilon": "small"}, "layer_norm_epsilon is 'small'; it must be a positive number"),
        (LLAMA | {"rope_theta": -1}, "rope_theta is -1; it must be a positive number"),
        (LLAMA | {"rms_norm_eps": [1e-5]}, r"rms_norm_eps is \[1e-05\]; it must be a positive number"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only 1.0 is supported"),
        (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25; only 1.0"),
        (
            LLAMA | {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {}}},
            "rope parameters apart for full_attention, sliding_attention are not supported",
        ),
        (INTERNLM2 | {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is supported"),
        *((raw | {"num_attention_heads": None}, "no 'num_attention_heads'") for raw in (INTERNLM2, MISTRAL, QWEN1)),
        *(
            ({"architectures": [name]}, re.escape(f"unknown architecture: {name}; supported: InternLM2ForCausalLM,"))
            for name in ("Qwen2MoeForCausalLM", "Qwen2VLForConditionalGeneration", "MixtralForCausalLM")
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(raw, message):
    with pytest.raises(ValueError, match=message):
        read_config(raw)


@pytest.mark.parametrize("raw", [INTERNLM2, QWEN1, MISTRAL], ids=lambda raw: raw["architectures"][0])
def test_the_other_spelling(raw):
    """The older, published style above, and the same as transformers 5 would write it."""
    five = {k: v for k, v in raw.items() if k not in ("torch_dtype", "rope_theta", "rope_scaling")}
    five["dtype"] = raw["torch_dtype"]
    if "rope_theta" in raw:
        scaling = raw["rope_scaling"] or {"type": "default"}
        rest = {k: v for k, v in scaling.items() if k != "type"}
        five["rope_parameters"] = {"rope_theta": raw["rope_theta"], "rope_type": scaling["type"], **rest}
    assert read_config(five) == read_config(raw)
