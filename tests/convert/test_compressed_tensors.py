"""compressed-tensors "pack-quantized" against linears that tests/support/quantized.py packs by the description."""

import copy

import numpy as np
import pytest
from support.quantized import FIELDS, Linear, quantize_linears, random_order

from pallasite.convert.formats import open_source
from pallasite.convert.formats.compressed_tensors import CompressedTensors
from pallasite.convert.formats.scheme import sorted_rows
from pallasite.convert.int4 import unpack_rows

Q = "model.layers.0.self_attn.q_proj"


def fields(**weights) -> dict:
    changed = copy.deepcopy(FIELDS["compressed-tensors"])
    changed["config_groups"]["group_0"]["weights"] |= weights
    return changed


@pytest.mark.parametrize("order", ["sequential", "random"])
@pytest.mark.parametrize(
    ("k", "n", "group"), [(512, 16, 32), (512, 16, 128), (512, 16, -1), (320, 16, 128), (100, 12, 32), (90, 8, -1)]
)
def test_a05_group_sizes(k, n, group, order):
    """Also where K and N are no multiples of 8: the last nibbles of a word are then nobody's."""
    index = random_order(k, k if group == -1 else group) if order == "random" else None
    linear = Linear(k, n, group, group_index=index)
    strategy = {"strategy": "channel", "group_size": None} if group == -1 else {"group_size": group}
    scheme = CompressedTensors(fields(**strategy))
    stored = {key.removeprefix("m."): tensor for key, tensor in linear.compressed_tensors("m").items()}
    parts = scheme.parts(k, n)
    assert all(parts[suffix].shape == tensor.shape for suffix, tensor in stored.items())
    permutation = sorted_rows(stored["weight_g_idx"], group) if "weight_g_idx" in stored else None
    tensor = scheme.read(stored, k, n, permutation)
    rows = np.arange(k) if permutation is None else permutation
    np.testing.assert_array_equal(unpack_rows(tensor.packed, -(-k // 8) * 8)[:k], linear.q[rows])
    assert not unpack_rows(tensor.packed, -(-k // 8) * 8)[k:].any()
    np.testing.assert_array_equal(tensor.zeros, linear.zeros)
    np.testing.assert_array_equal(tensor.dequantize(), linear.weight())


def test_symmetric_weights_have_no_zero_point(config, tensors, tmp_path, write_hf):
    linear = Linear(64, 64, 32)
    linear.zeros[:] = 8
    config["quantization_config"] = fields(symmetric=True, group_size=32)
    stored = {
        key: tensor
        for key, tensor in quantize_linears(tensors, "compressed-tensors", 32)[0].items()
        if not key.endswith("zero_point")
    }
    stored |= {key: t for key, t in linear.compressed_tensors(Q).items() if not key.endswith("zero_point")}
    source = open_source(write_hf(tmp_path / "without", config, stored))
    np.testing.assert_array_equal(source.read("layers.0.attn.q.weight").dequantize(), linear.weight())
    with pytest.raises(ValueError, match=r"extra tensors \(1\): .*q_proj\.weight_zero_point"):
        open_source(write_hf(tmp_path / "with", config, stored | linear.compressed_tensors(Q)))


def test_a_weight_shape_that_disagrees(config, tensors, tmp_path, write_hf):
    config["quantization_config"] = fields(group_size=32)
    stored, _ = quantize_linears(tensors, "compressed-tensors", 32)
    stored[f"{Q}.weight_shape"][1] = 63
    source = open_source(write_hf(tmp_path, config, stored))
    with pytest.raises(ValueError, match=rf"{Q}: weight_shape is \[64, 63\], expected \[64, 64\]"):
        source.read("layers.0.attn.q.weight")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (fields(num_bits=8), "bits is 8; only 4 is supported"),
        (fields(type="float"), "type of the weights is 'float'; only 'int' is supported"),
        (fields(strategy="tensor"), "strategy is 'tensor'; supported are 'group' and 'channel'"),
        (fields() | {"format": "marlin-24"}, "format is 'marlin-24'; only 'pack-quantized' is supported"),
        (fields() | {"config_groups": {}}, "config_groups is empty"),
        (
            fields() | {"config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}}},
            "2 config_groups quantize weights differently",
        ),
        (
            fields() | {"config_groups": {"a": {"weights": {"num_bits": 4}, "input_activations": {"num_bits": 8}}}},
            "input_activations are quantized; only weights may be",
        ),
    ],
)
def test_fields_that_are_refused(changed, message, config, tensors, tmp_path, write_hf):
    config["quantization_config"] = changed
    with pytest.raises(ValueError, match=message):
        open_source(write_hf(tmp_path, config, tensors))
