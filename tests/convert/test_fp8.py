"""FP8 folders with a scale a block: expanded to float32, against a computation in float64."""

import ml_dtypes
import numpy as np
import pytest

from pallasite.convert.convert import convert
from pallasite.convert.formats import open_source
from pallasite.convert.inspect import describe

FIELDS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 48]}
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture
def quantized(config, tensors):
    """config.json and tensors in blocks of 32 x 48, the last ones cut off; and the weights in float64 [K, N]."""
    config["quantization_config"] = dict(FIELDS)
    rng = np.random.default_rng(0)
    stored, right = dict(tensors), {}
    for name, tensor in tensors.items():
        if "_proj" in name:
            n, k = tensor.shape
            weight = tensor.astype(ml_dtypes.float8_e4m3fn)
            scale = rng.uniform(0.1, 2, (-(-n // 32), -(-k // 48))).astype(np.float32)
            stored |= {name: weight, f"{name}_scale_inv": scale}
            right[name] = np.array(
                [[float(weight[row, col]) * float(scale[row // 32, col // 48]) for row in range(n)] for col in range(k)]
            )
    return config, stored, right


def test_every_block_has_its_scale(quantized, tmp_path, write_hf):
    config, stored, right = quantized
    source = open_source(write_hf(tmp_path / "hf", config, stored))
    convert(tmp_path / "hf", tmp_path / "out", progress=False)
    converted = open_source(tmp_path / "out")
    for ours, theirs in {
        "attn.k": "self_attn.k_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.down": "mlp.down_proj",
    }.items():
        name = f"layers.1.{ours}.weight"
        got = source.read(name)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, right[f"model.layers.1.{theirs}.weight"], rtol=1e-7)
        np.testing.assert_array_equal(converted.read(name), got)
    assert source.info.dtypes["layers.0.mlp.down.weight"] == "float8_e4m3fn"
    assert "14 float8_e4m3fn" in describe(tmp_path / "hf")


def test_all_values_of_the_format(quantized, tmp_path, write_hf):
    """The 254 that are numbers, subnormals and 448 among them."""
    config, stored, _ = quantized
    codes = np.resize(np.array([c for c in range(256) if c & 127 != 127], np.uint8), (64, 96))
    stored[f"{DOWN}.weight"] = codes.view(ml_dtypes.float8_e4m3fn)
    stored[f"{DOWN}.weight_scale_inv"] = np.ones((2, 2), np.float32)
    got = open_source(write_hf(tmp_path, config, stored)).read("layers.0.mlp.down.weight").T
    sign, exponent, mantissa = codes >> 7, (codes >> 3) & 15, codes & 7
    right = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7), mantissa / 8 * 2.0**-6)
    np.testing.assert_array_equal(got, right * np.where(sign, -1, 1))
    assert np.abs(got).max() == 448


def test_what_is_not_finite_is_refused(quantized, tmp_path, write_hf):
    config, stored, _ = quantized
    stored[f"{DOWN}.weight_scale_inv"][0, 1] = np.nan
    source = open_source(write_hf(tmp_path, config, stored))
    with pytest.raises(ValueError, match=rf"{DOWN}: has weights or scales that are not finite"):
        source.read("layers.0.mlp.down.weight")


def test_shapes_and_dtypes_that_do_not_fit(quantized, tmp_path, write_hf):
    config, stored, _ = quantized
    stored[f"{DOWN}.weight_scale_inv"] = np.ones((2, 3), np.float32)
    stored["model.layers.0.self_attn.q_proj.weight"] = np.zeros((64, 64), np.float16)
    with pytest.raises(ValueError, match="does not fit") as refused:
        open_source(write_hf(tmp_path, config, stored))
    assert "down_proj.weight_scale_inv: [2, 3], expected [2, 2] (N/b=64/32, K/c=96/48)" in str(refused.value)
    assert "q_proj.weight: F16, supported are F8_E4M3" in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight_block_size": None}, "weight_block_size is None; it must be two integers"),
        ({"weight_block_size": [128]}, r"weight_block_size is \[128\]; it must be two integers"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'; only 'e4m3' is supported"),
    ],
)
def test_fields_that_are_refused(quantized, tmp_path, write_hf, fields, message):
    config, stored, _ = quantized
    config["quantization_config"] |= fields
    with pytest.raises(ValueError, match=message):
        open_source(write_hf(tmp_path, config, stored))
