"""AWQ "gemm" folders, against linears that tests/support/quantized.py packs by the format's description."""

import json
import logging
import re

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import unpack
from support.quantized import FIELDS, Linear, quantize_linears

from pallasite.convert.convert import convert
from pallasite.convert.formats import awq, open_source
from pallasite.convert.int4 import Int4Tensor, unpack_rows
from pallasite.models.internlm2 import columns_by_group

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture
def quantized(config, tensors):
    """A config.json and the tensors of an AWQ folder in groups of 32, and the same with float32 weights."""
    config["quantization_config"] = FIELDS["awq"] | {"group_size": 32}
    return config, *quantize_linears(tensors, "awq", 32)


# The order of nibbles.


@pytest.mark.parametrize("n", [8, 64])
def test_a01_each_nibble_is_the_column_that_awq_puts_there(n):
    """Every column has a value of its own, so that any other order shows; word 0 by hand: columns 7 5 3 1 6 4 2 0."""
    q = np.tile(np.arange(n, dtype=np.uint8) % 16, (256, 1))
    packed = awq.pack_columns(q)
    assert packed.dtype == np.int32
    assert packed.shape == (256, n // 8)
    assert packed[0, 0] == 0x75316420
    np.testing.assert_array_equal(unpack.awq(packed), q)
    np.testing.assert_array_equal(awq.unpack_columns(packed), q)


def test_all_values_in_all_places_the_sign_bit_included():
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (40, 5)).astype(np.int32)
    assert (words < 0).any()
    q = awq.unpack_columns(words)
    np.testing.assert_array_equal(q, unpack.awq(words))
    np.testing.assert_array_equal(awq.pack_columns(q), words)


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match=r"N is 12; .* multiple of 8"):
        awq.pack_columns(np.zeros((1, 12), np.uint8))
    with pytest.raises(ValueError, match="the largest value is 16; four bits end at 15"):
        awq.pack_columns(np.full((1, 8), 16, np.uint8))


# Group sizes.


@pytest.mark.parametrize(
    ("k", "group"), [(512, 32), (512, 64), (512, 128), (512, 256), (512, -1), (320, 128), (64, 128)]
)
def test_a05_group_sizes(k, group):
    linear = Linear(k, 16, group)
    scheme = awq.AWQ(FIELDS["awq"] | {"group_size": group})
    stored = {key.removeprefix("m."): tensor for key, tensor in linear.awq("m").items()}
    assert {suffix: part.shape for suffix, part in scheme.parts(k, 16).items()} == {
        suffix: tensor.shape for suffix, tensor in stored.items()
    }
    tensor = scheme.read(stored, k, 16, None)
    assert tensor.group_size == (k if group == -1 else group)
    np.testing.assert_array_equal(unpack_rows(tensor.packed, k), linear.q)
    np.testing.assert_array_equal(tensor.zeros, linear.zeros)
    np.testing.assert_array_equal(tensor.dequantize(), linear.weight())


@pytest.mark.parametrize(("group", "ratio"), [(100, "0.64"), (16, "4"), (48, "1.33333")])
def test_a05_other_group_sizes_are_refused_with_the_arithmetic(quantized, tmp_path, write_hf, group, ratio):
    config, stored, _ = quantized
    config["quantization_config"]["group_size"] = group
    with pytest.raises(ValueError, match=rf"q_proj: group_size is {group}, so that K=64 is {ratio} groups"):
        convert(write_hf(tmp_path / "hf", config, stored), tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


# Scales.


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_a14_scales_stay_as_they_are_stored(quantized, tmp_path, write_hf, dtype):
    """In their dtype, and where it is float32 with values that float16 can't hold."""
    config, stored, _ = quantized
    scales = stored[f"{Q}.scales"].astype(dtype)
    if dtype == np.float32:
        scales[0, :2] = 7e4, 1e-9
    source = write_hf(tmp_path / "hf", config, stored | {f"{Q}.scales": scales})
    convert(source, tmp_path / "out", progress=False)
    for opened in (open_source(source), open_source(tmp_path / "out")):
        tensor = opened.read("layers.0.attn.q.weight")
        assert tensor.scales.dtype == dtype
        np.testing.assert_array_equal(tensor.scales, scales)
    if dtype == np.float32:
        with pytest.raises(
            ValueError, match=r"layers\.0\.attn\.q\.weight: has the value .*, and float16 ends at 65504"
        ):
            convert(source, tmp_path / "half", dequantize=True, dtype="float16", progress=False)


def test_a14_scales_that_overflowed_are_refused(quantized, tmp_path, write_hf):
    config, stored, _ = quantized
    stored[f"{Q}.scales"][1, 3] = np.inf
    with pytest.raises(ValueError, match=r"q_proj: 1 of its scales are not finite, the first is inf"):
        convert(write_hf(tmp_path / "hf", config, stored), tmp_path / "out", progress=False)


# Modules that are not quantized.


def test_a16_the_tensors_decide_what_is_quantized(quantized, tmp_path, write_hf, caplog):
    """A down_proj in float, a quantized head, and a list that says otherwise of both and of q_proj."""
    config, stored, floating = quantized
    config["quantization_config"]["modules_to_not_convert"] = ["vision_model", "q_proj"]
    head = Linear(64, 80, 32, seed=99)
    mixed = {k: v for k, v in stored.items() if not k.startswith((DOWN, "lm_head"))} | head.awq("lm_head")
    mixed[f"{DOWN}.weight"] = floating[f"{DOWN}.weight"].astype(np.float16)
    with caplog.at_level(logging.WARNING):
        source = open_source(write_hf(tmp_path / "hf", config, mixed))
    assert f"2 linears are quantized though the configuration says that they are not, the first is {Q}" in caplog.text
    assert f"1 linears are not quantized though the configuration does not say so, the first is {DOWN}" in caplog.text
    down = source.read("layers.0.mlp.down.weight")
    assert down.dtype == np.float16
    np.testing.assert_array_equal(down, mixed[f"{DOWN}.weight"].T)
    np.testing.assert_array_equal(source.read("layers.0.attn.q.weight").dequantize(), floating[f"{Q}.weight"].T)
    np.testing.assert_array_equal(source.read("head.weight"), head.weight())
    assert source.info.dtypes["head.weight"] == "float32"
    manifest = convert(tmp_path / "hf", tmp_path / "out", progress=False)
    assert manifest["quantization"]["exceptions"]["floating point"] == ["layers.0.mlp.down.weight"]
    assert manifest["quantization"]["method"] == "kept from awq"


@pytest.mark.parametrize(
    ("skipped", "plain"),
    [
        (["lm_head", "down_proj"], "down_proj"),
        ([DOWN], r"layers\.0\.mlp\.down_proj"),
        (["model.layers.0"], r"layers\.0\."),
        (["re:.*down_proj$"], "down_proj"),
    ],
)
def test_a16_a_list_that_agrees_is_quiet(quantized, tmp_path, write_hf, caplog, skipped, plain):
    config, stored, floating = quantized
    config["quantization_config"]["modules_to_not_convert"] = skipped
    mixed = {key: tensor for key, tensor in stored.items() if not re.search(plain, key)}
    mixed |= {key: tensor for key, tensor in floating.items() if re.search(plain, key)}
    source = open_source(write_hf(tmp_path, config, mixed))
    expected = {key for key in floating if "_proj" in key and not re.search(plain, key)}
    assert sum(dtype == "int4" for dtype in source.info.dtypes.values()) == len(expected)
    assert not caplog.text


# Fused tensors.


def test_parts_of_a_fused_linear(golden, tmp_path, write_hf):
    """InternLM2's wqkv in AWQ: q, k and v are columns of one packed matrix."""
    config = json.loads((golden / "internlm2-tiny" / "config.json").read_text())
    config["quantization_config"] = FIELDS["awq"] | {"group_size": 32}
    stored, floating = quantize_linears(load_file(golden / "internlm2-tiny" / "model.safetensors"), "awq", 32)
    write_hf(tmp_path / "hf", config, stored)
    convert(tmp_path / "hf", tmp_path / "out", progress=False)
    source, converted = open_source(tmp_path / "hf"), open_source(tmp_path / "out")
    wqkv = floating["model.layers.1.attention.wqkv.weight"].T
    for part, columns in zip("qkv", columns_by_group(source.info.config), strict=True):
        for opened in (source, converted):
            tensor = opened.read(f"layers.1.attn.{part}.weight")
            assert isinstance(tensor, Int4Tensor)
            np.testing.assert_array_equal(tensor.dequantize(), wqkv[:, columns])


# What is refused.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 8}, r"config\.json: bits is 8; only 4 is supported"),
        ({"version": "gemv"}, "AWQ version is 'gemv'; only 'gemm' is supported"),
        ({"group_size": None}, "group_size is None; it must be an integer"),
        ({"group_size": 0}, "group_size is 0; it must be an integer"),
        ({"quant_method": "hqq"}, "quantization 'hqq' is not supported; supported are awq, gptq"),
    ],
)
def test_fields_that_are_refused(quantized, tmp_path, write_hf, fields, message):
    config, stored, _ = quantized
    config["quantization_config"] |= fields
    with pytest.raises(ValueError, match=message):
        open_source(write_hf(tmp_path, config, stored))


def test_all_that_does_not_fit_stands_in_one_error(quantized, tmp_path, write_hf):
    config, stored, _ = quantized
    del stored[f"{Q}.scales"]
    stored[f"{DOWN}.qzeros"] = stored[f"{DOWN}.qzeros"][:2].copy()
    stored[f"{DOWN}.scales"] = stored[f"{DOWN}.scales"].astype(np.float64)
    stored[f"{Q}.weight"] = np.zeros((64, 64), np.float16)
    with pytest.raises(ValueError, match="does not fit its configuration") as refused:
        open_source(write_hf(tmp_path, config, stored))
    for line in (
        f"missing tensors (1): {Q}.scales",
        f"extra tensors (1): {Q}.weight",
        f"wrong shapes (1): {DOWN}.qzeros: [2, 8], expected [3, 8] (K/g=96/32, N/8=64/8)",
        f"unsupported dtypes (1): {DOWN}.scales: F64, supported are F16, BF16, F32",
    ):
        assert line in str(refused.value)


def test_quantized_tensors_that_nothing_describes(quantized, tmp_path, write_hf):
    config, stored, _ = quantized
    del config["quantization_config"]
    with pytest.raises(ValueError, match=r"is quantized, and neither config\.json's quantization_config nor a file"):
        open_source(write_hf(tmp_path, config, stored))


def test_autoawqs_older_file(quantized, tmp_path, write_hf):
    config, stored, floating = quantized
    del config["quantization_config"]
    (tmp_path / "quant_config.json").write_text(
        '{"zero_point": true, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}'
    )
    source = open_source(write_hf(tmp_path, config, stored))
    assert source.info.quantization == "awq"
    np.testing.assert_array_equal(source.read("layers.0.attn.q.weight").dequantize(), floating[f"{Q}.weight"].T)


def test_the_quantization_config_does_not_travel(quantized, tmp_path, write_hf):
    """A conversion says in its manifest how it is quantized; expanded, it isn't."""
    config, stored, floating = quantized
    source = write_hf(tmp_path / "hf", config, stored)
    manifest = convert(source, tmp_path / "out", dequantize=True, progress=False)
    assert manifest["quantization"] is None
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()
    np.testing.assert_array_equal(
        open_source(tmp_path / "out").read("layers.0.attn.q.weight"), floating[f"{Q}.weight"].T
    )
