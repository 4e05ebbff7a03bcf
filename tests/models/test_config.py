"""config.json to ModelConfig: both spellings of transformers 4 and 5, defaults, and what is refused."""

import dataclasses
import json
import re

import pytest

from pallasite.models import llama
from pallasite.models.config import RopeConfig, TensorSpec, read_dtype, read_rope, read_token_ids
from pallasite.models.registry import family_of, read_config
from pallasite.models.tensors import tensor_specs

RAW = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 151,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def with_(**fields) -> dict:
    return RAW | fields


def without(*names: str) -> dict:
    return {k: v for k, v in RAW.items() if k not in names}


def test_defaults():
    config = read_config(RAW)
    assert config.architecture == "LlamaForCausalLM"
    assert config.head_dim == 48 // 6
    assert config.rms_norm_eps == 1e-6
    assert config.rope == RopeConfig(theta=10000.0, original_max_position=512)
    assert config.dtype == "float32"
    assert not any([config.tie_word_embeddings, config.qkv_bias, config.out_bias, config.mlp_bias])
    assert config.bos_token_id is None
    assert config.eos_token_ids == ()


def test_fields_that_are_given():
    config = read_config(
        with_(
            head_dim=16, rms_norm_eps=1e-5, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, bos_token_id=1
        )
    )
    assert (config.head_dim, config.rms_norm_eps, config.bos_token_id) == (16, 1e-5, 1)
    assert config.qkv_bias
    assert config.out_bias
    assert config.mlp_bias
    assert config.tie_word_embeddings


@pytest.mark.parametrize("fields", [{"num_key_value_heads": None}, {"num_key_value_heads": 6}])
def test_no_kv_heads_means_as_many_as_query_heads(fields):
    assert read_config(with_(**fields)).num_kv_heads == 6
    assert read_config(without("num_key_value_heads")).num_kv_heads == 6


def test_no_head_dim_means_the_hidden_size_over_the_heads():
    assert read_config(with_(head_dim=None)).head_dim == 8


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ],
)
def test_a_missing_or_wrong_field_is_named(name):
    for raw in (without(name), with_(**{name: None})):
        with pytest.raises(ValueError, match=f"config.json has no '{name}'"):
            read_config(raw)
    check_wrong_values(name)


@pytest.mark.parametrize("name", ["num_key_value_heads", "head_dim"])
def test_an_optional_field_that_is_wrong_is_named(name):
    check_wrong_values(name)


def check_wrong_values(name: str) -> None:
    for value in (0, -1, "many", [1], 8.0, True):
        with pytest.raises(
            ValueError, match=rf"config.json: {name} is {re.escape(repr(value))}; it must be an integer from 1"
        ):
            read_config(with_(**{name: value}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple of num_key_value_heads 4"),
        ({"head_dim": 9}, "head_dim is 9; rotary embeddings need an even number"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"torch_dtype": "int8"}, "dtype is 'int8'; it must be float32, float16 or bfloat16"),
    ],
)
def test_values_that_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        read_config(with_(**fields))


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({}, "float32"),
        ({"dtype": None}, "float32"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "float16"),
    ],
)
def test_dtype_in_both_spellings(raw, expected):
    assert read_dtype(raw) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(None, ()), (2, (2,)), ([2, 92542], (2, 92542)), ((7,), (7,)), ([], ()), (0, (0,))]
)
def test_eos_ids(value, expected):
    assert read_token_ids(value) == expected
    assert read_config(with_(eos_token_id=value)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("four", "five", "expected"),
    [
        ({}, {}, RopeConfig(10000.0, "default", 1.0, 512)),
        (
            {"rope_theta": 500000.0},
            {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
            RopeConfig(500000.0, "default", 1.0, 512),
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}},
            RopeConfig(1e6, "linear", 2.0, 512),
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
            RopeConfig(10000.0, "dynamic", 4.0, 512),
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 128}},
            {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 128}},
            RopeConfig(10000.0, "dynamic", 4.0, 128),
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": LLAMA3},
            {"rope_parameters": LLAMA3 | {"rope_theta": 1e4}},
            RopeConfig(1e4, "llama3", 8.0, 64, 1.0, 4.0),
        ),
    ],
)
def test_rope_in_both_spellings(four, five, expected):
    assert read_rope(with_(**four)) == expected
    assert read_rope(with_(**five)) == expected
    assert read_rope(with_(**four, **five)) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": None},
        {"rope_scaling": None, "rope_parameters": None},
        {"rope_scaling": {"type": None}},
        {"rope_scaling": {"type": "default", "rope_type": None}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ],
)
def test_null_means_no_scaling(fields):
    assert read_rope(with_(rope_theta=5e5, **fields)) == RopeConfig(5e5, "default", 1.0, 512)


def test_type_and_rope_type_may_both_stand_there_if_they_agree():
    assert read_rope(with_(rope_scaling={"type": "linear", "rope_type": "linear", "factor": 2})).kind == "linear"


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "linear", "rope_type": "dynamic", "factor": 2}, r"names two kinds, \['dynamic', 'linear'\]"),
        ({"rope_type": "yarn", "factor": 4}, "'yarn' is not supported; known: default, linear, dynamic, llama3"),
        ({"type": "longrope"}, "'longrope' is not supported"),
        ({"type": "linear"}, "'linear' needs a positive 'factor', got None"),
        ({"type": "dynamic", "factor": 0}, "'dynamic' needs a positive 'factor', got 0"),
        ({"type": "linear", "factor": "2"}, "'linear' needs a positive 'factor', got '2'"),
        ({"type": "linear", "factor": float("nan")}, "needs a positive 'factor', got nan"),
        *(
            ({k: v for k, v in LLAMA3.items() if k != name}, f"'llama3' needs a positive {name!r}, got None")
            for name in LLAMA3
            if name != "rope_type"
        ),
    ],
)
def test_rope_scaling_that_is_refused(scaling, message):
    for spelling in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ValueError, match=message):
            read_config(with_(**{spelling: scaling}))


def test_the_two_spellings_may_not_disagree():
    with pytest.raises(ValueError, match="names two kinds"):
        read_rope(
            with_(rope_scaling={"type": "linear", "factor": 2}, rope_parameters={"rope_type": "dynamic", "factor": 2})
        )


def test_only_dynamic_scaling_goes_past_the_trained_length():
    assert read_config(RAW).max_session_len == 512
    assert read_config(with_(rope_scaling={"type": "linear", "factor": 2})).max_session_len == 512
    assert read_config(with_(rope_scaling={"type": "dynamic", "factor": 2})).max_session_len is None


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        ({"architectures": ["FooForCausalLM"]}, "FooForCausalLM"),
        ({"architectures": ["A", "B"]}, "A, B"),
        ({"architectures": None, "model_type": "llama"}, r"none named \(model_type 'llama'\)"),
        ({}, r"none named \(model_type None\)"),
    ],
)
def test_an_unknown_architecture_is_named_with_those_that_are_known(raw, found):
    with pytest.raises(ValueError, match=f"unknown architecture: {found}; supported: .*LlamaForCausalLM"):
        family_of(raw)


def test_the_first_known_architecture_counts():
    assert family_of({"architectures": ["Foo", "LlamaForCausalLM"]}) is llama


@pytest.mark.parametrize(
    "name", ["llama-tied-tiny", "llama-rope3-tiny", "qwen2-tiny", "qwen3-tiny", "mistral-swa-tiny"]
)
def test_golden_configs_read_alike_in_both_spellings(golden, name):
    five, four = (read_config(json.loads((golden / name / f).read_text())) for f in ("config.json", "config.v4.json"))
    assert dataclasses.asdict(five) == dataclasses.asdict(four)


def test_tensor_specs_follow_the_config():
    specs = tensor_specs(read_config(with_(head_dim=10, attention_bias=True)))
    layer = {name.removeprefix("layers.1."): s for name, s in specs.items() if name.startswith("layers.1.")}
    assert layer == {
        "attn_norm.weight": TensorSpec((48,), "norm"),
        "attn.q.weight": TensorSpec((48, 60), "linear"),
        "attn.q.bias": TensorSpec((60,), "bias"),
        "attn.k.weight": TensorSpec((48, 30), "linear"),
        "attn.k.bias": TensorSpec((30,), "bias"),
        "attn.v.weight": TensorSpec((48, 30), "linear"),
        "attn.v.bias": TensorSpec((30,), "bias"),
        "attn.o.weight": TensorSpec((60, 48), "linear"),
        "attn.o.bias": TensorSpec((48,), "bias"),
        "mlp_norm.weight": TensorSpec((48,), "norm"),
        "mlp.gate.weight": TensorSpec((48, 80), "linear"),
        "mlp.up.weight": TensorSpec((48, 80), "linear"),
        "mlp.down.weight": TensorSpec((80, 48), "linear"),
    }
    rest = {name: s for name, s in specs.items() if not name.startswith("layers.")}
    assert rest == {
        "embed.weight": TensorSpec((151, 48), "embed"),
        "norm.weight": TensorSpec((48,), "norm"),
        "head.weight": TensorSpec((48, 151), "head"),
    }
    assert len(specs) == 2 * len(layer) + len(rest)


def test_a_tied_model_has_no_head_tensor():
    assert "head.weight" not in tensor_specs(read_config(with_(tie_word_embeddings=True)))


def test_every_tensor_has_one_key_of_the_checkpoint():
    specs = tensor_specs(read_config(with_(attention_bias=True, mlp_bias=True)))
    ours = {
        name.format(i=i, leaf=leaf)
        for name in llama.HF_KEYS.values()
        for i in range(RAW["num_hidden_layers"])
        for leaf in ("weight", "bias")
    }
    assert set(specs) == ours
    assert len(set(llama.HF_KEYS.values())) == len(llama.HF_KEYS)
