"""GenerationConfig and EngineConfig: every field's bounds, and messages that name field, value and range."""

import dataclasses
import re

import numpy as np
import pytest

from pallasite.serve.config import EngineConfig
from pallasite.serve.types import (
    MAX_BAD_IDS,
    MAX_LOGPROBS,
    MAX_STOP_IDS,
    MAX_STOP_WORDS,
    GenerationConfig,
    Response,
    describe_ids,
)

NAN, INF = float("nan"), float("inf")

INTEGERS = {
    "max_new_tokens": (1, 2**31 - 1),
    "top_k": (-1, 2**31 - 1),
    "min_new_tokens": (0, 512),
    "n": (1, 128),
    "logprobs": (0, MAX_LOGPROBS),
    "random_seed": (0, 2**64 - 1),
}
NUMBERS = {
    "temperature": (0.0, 100.0, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "repetition_penalty": (1e-6, 1e6, False),
    "presence_penalty": (-100.0, 100.0, False),
    "frequency_penalty": (-100.0, 100.0, False),
}
SWITCHES = ("do_sample", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
WORDS = {"stop_words": MAX_STOP_WORDS, "bad_words": MAX_BAD_IDS}

ENGINE_INTEGERS = {
    "session_len": (2, 2**24),
    "max_batch_size": (1, 1024),
    "tp": (1, 1024),
    "max_prefill_token_num": (64, 2**20),
    "cache_block_seq_len": (16, 128),
    "max_queue_size": (1, 2**20),
}


def refused(kind, name, value, *words: str) -> None:
    """kind(name=value) raises ValueError whose message has the field, the value and the words."""
    with pytest.raises(ValueError, match=re.escape(name)) as caught:
        kind(**{name: value})
    for word in words:
        assert word in str(caught.value)


def test_every_field_is_tested_here():
    fields = {f.name for f in dataclasses.fields(GenerationConfig)}
    assert fields == {*INTEGERS, *NUMBERS, *SWITCHES, *WORDS, "stop_token_ids"}


def test_defaults_are_those_of_lmdeploy():
    config = GenerationConfig()
    assert (config.max_new_tokens, config.do_sample, config.temperature, config.top_p, config.top_k) == (
        512,
        False,
        0.8,
        1.0,
        50,
    )
    assert (config.min_p, config.repetition_penalty, config.n, config.random_seed, config.ignore_eos) == (
        0,
        1,
        1,
        None,
        False,
    )
    assert config.greedy


def test_greedy_is_no_sampling_or_temperature_zero():
    assert not GenerationConfig(do_sample=True).greedy
    assert GenerationConfig(do_sample=True, temperature=0).greedy
    assert GenerationConfig(temperature=1.0).greedy


@pytest.mark.parametrize(("name", "bounds"), INTEGERS.items())
def test_integers(name, bounds):
    low, high = bounds
    for value in (low, high, np.int64(low), np.int32(low + 1)):
        assert getattr(GenerationConfig(**{name: value}), name) == value
    for value in (low - 1, high + 1, 1.0, 1.5, NAN, INF, "1", True, [1]):
        refused(GenerationConfig, name, value, repr(value), f"{low}..{high}")


@pytest.mark.parametrize("name", ["max_new_tokens", "top_k", "min_new_tokens", "n"])
def test_none_is_no_integer(name):
    refused(GenerationConfig, name, None, "None")


@pytest.mark.parametrize(("name", "bounds"), NUMBERS.items())
def test_numbers(name, bounds):
    low, high, open_low = bounds
    for value in (
        high,
        int(high),
        np.float32(high),
        np.int64(high),
        (low + high) / 2 or 0.5,
        *(() if open_low else (low,)),
    ):
        assert getattr(GenerationConfig(**{name: value}), name) == value
    interval = f"{'(' if open_low else '['}{low:g}, {high:g}]"
    wrong = [low - 1e-3, high * 1.001, NAN, INF, -INF, "0.5", None, True, [0.5], np.float32("nan"), 1j]
    for value in [*wrong, *([low, -0.0] if open_low else [])]:
        refused(GenerationConfig, name, value, repr(value), interval)


@pytest.mark.parametrize("value", [0, -1, -2.0, None])
def test_c01_repetition_penalty_of_zero_or_below_is_refused(value):
    refused(GenerationConfig, "repetition_penalty", value, "[1e-06, 1e+06]")


@pytest.mark.parametrize("value", [1e-6, 0.5, 1e6])
def test_c01_repetition_penalty_above_zero_is_legal(value):
    assert GenerationConfig(repetition_penalty=value).repetition_penalty == value


@pytest.mark.parametrize("name", SWITCHES)
def test_switches(name):
    assert getattr(GenerationConfig(**{name: True}), name) is True
    for value in (1, 0, None, "false", "True"):
        refused(GenerationConfig, name, value, repr(value), "True or False")


def test_c12_min_new_tokens_is_bounded_by_max_new_tokens():
    assert GenerationConfig(min_new_tokens=20, max_new_tokens=20).min_new_tokens == 20
    with pytest.raises(ValueError, match=r"min_new_tokens is 21; it must be an integer in 0\.\.20"):
        GenerationConfig(min_new_tokens=21, max_new_tokens=20)


@pytest.mark.parametrize(("name", "most"), WORDS.items())
def test_words(name, most):
    for value in (None, [], ["a"], ("a", "中文"), ["x"] * most):
        assert getattr(GenerationConfig(**{name: value}), name) == value
    refused(GenerationConfig, name, ["x"] * (most + 1), f"at most {most}")
    refused(GenerationConfig, name, "stop", "list")
    refused(GenerationConfig, name, b"stop", "list")
    for word in ("", None, 5, b"x"):
        refused(GenerationConfig, name, ["fine", word], repr(word))


def test_c09_stop_token_ids():
    for value in (None, [], [0, 5], (7,), np.asarray([1, 2]), [np.int32(3)], list(range(MAX_STOP_IDS))):
        assert GenerationConfig(stop_token_ids=value).stop_token_ids is value
    refused(GenerationConfig, "stop_token_ids", list(range(MAX_STOP_IDS + 1)), f"at most {MAX_STOP_IDS}")
    refused(GenerationConfig, "stop_token_ids", "12", "list")
    for wrong in (-1, 1.0, True, "1", None, NAN):
        refused(GenerationConfig, "stop_token_ids", [2, wrong], repr(wrong))


@pytest.mark.parametrize(("name", "bounds"), ENGINE_INTEGERS.items())
def test_engine_integers(name, bounds):
    low, high = bounds
    for value in (low, high):
        assert getattr(EngineConfig(**{name: value}), name) == value
    for value in (low - 1, high + 1, float(low), NAN, str(low), True):
        refused(EngineConfig, name, value, repr(value), f"{low}..{high}")


@pytest.mark.parametrize("name", ["session_len", "max_batch_size", "max_prefill_token_num"])
def test_engine_integers_that_may_be_left_open(name):
    assert getattr(EngineConfig(**{name: None}), name) is None


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("dtype", ("auto", "float32", "bfloat16")),
        ("model_format", ("auto", "hf", "gguf", "pallasite")),
        ("device", ("auto", "cpu", "gpu")),
    ],
)
def test_engine_choices(name, allowed):
    for value in allowed:
        assert getattr(EngineConfig(**{name: value}), name) == value
    for value in ("AUTO", "", None, 0, "float16 "):
        refused(EngineConfig, name, value, repr(value), ", ".join(allowed))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("cache_block_seq_len", 24, ("24", "a multiple of 16 in 16..128")),
        ("max_prefill_token_num", 100, ("100", "a multiple of 32")),
        ("quant_policy", 8, ("8", "only 0")),
        ("quant_policy", None, ("None", "only 0")),
        ("enable_prefix_caching", 1, ("1", "True or False")),
        ("cache_max_entry_count", 1, ("1", "at least 2")),
        ("cache_max_entry_count", 0, ("0", "at least 2")),
        ("cache_max_entry_count", 1.0, ("1.0", "(0, 1)")),
        ("cache_max_entry_count", 0.0, ("0.0", "(0, 1)")),
        ("cache_max_entry_count", -0.5, ("-0.5", "(0, 1)")),
        ("cache_max_entry_count", NAN, ("nan", "(0, 1)")),
        ("cache_max_entry_count", True, ("True", "(0, 1)")),
        ("cache_max_entry_count", "0.8", ("'0.8'", "(0, 1)")),
        ("cache_max_entry_count", None, ("None", "(0, 1)")),
    ],
)
def test_engine_values_that_are_refused(name, value, words):
    refused(EngineConfig, name, value, *words)


@pytest.mark.parametrize("value", [0.01, 0.999, 2, 100000])
def test_engine_cache_size(value):
    assert EngineConfig(cache_max_entry_count=value).cache_max_entry_count == value


@pytest.mark.parametrize("ids", [[0], [63, 0, 5], (1, 2), np.asarray([3]), np.asarray([63], np.uint8)])
def test_token_ids_of_the_vocabulary(ids):
    assert describe_ids(ids, 64) is None


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "at least one token id, got shape (0,)"),
        (5, "got shape ()"),
        ([[1, 2]], "got shape (1, 2)"),
        ([1, -1], "token id -1 lies outside the vocabulary; ids go from 0 to 63"),
        ([64], "token id 64"),
        ([5, 151645], "token id 151645"),
        ([2**31], "token id 2147483648"),
        ([1.0], "must be integers, got float64"),
        ([True], "must be integers, got bool"),
        (["1"], "must be integers"),
        ([2**70], "must be integers"),
        ([None], "must be integers"),
    ],
)
def test_c09_token_ids_outside_the_vocabulary(ids, words):
    assert words in describe_ids(ids, 64)


def test_response_repr_is_short():
    long = repr(Response(text="x" * 500, generate_token_len=3, input_token_len=2, finish_reason="length"))
    assert len(long) < 200
    assert "finish_reason='length', tokens=2+3" in long
    assert "error='boom'" in repr(Response(error="boom", finish_reason="error"))
