"""GPTQ folders, against linears that tests/support/quantized.py packs by the format's description."""

import json
import logging

import numpy as np
import pytest
from support.quantized import FIELDS, Linear, quantize_linears, random_order

from pallasite.convert.convert import convert
from pallasite.convert.formats import open_source
from pallasite.convert.formats.gptq import GPTQ
from pallasite.convert.formats.scheme import sorted_rows
from pallasite.convert.int4 import unpack_rows

Q = "model.layers.0.self_attn.q_proj"
OURS = "layers.0.attn.q.weight"


@pytest.fixture
def quantized(config, tensors):
    """A config.json and the tensors of a GPTQ v1 folder in groups of 32, and the same with float32 weights."""
    config["quantization_config"] = FIELDS["gptq"] | {"group_size": 32}
    return config, *quantize_linears(tensors, "gptq", 32)


def read(stored: dict[str, np.ndarray], k: int, n: int, **fields):
    """The linear "m" of `stored` as the scheme reads it."""
    scheme = GPTQ(FIELDS["gptq"] | fields)
    parts = {key.removeprefix("m."): tensor for key, tensor in stored.items()}
    permutation = sorted_rows(parts["g_idx"], scheme.group_size(k)) if "g_idx" in parts else None
    return scheme.read(parts, k, n, permutation)


# Groups.


@pytest.mark.parametrize("order", ["sequential", "random"])
@pytest.mark.parametrize(("k", "group"), [(512, 32), (512, 64), (512, 128), (512, 256), (512, -1), (320, 128)])
def test_a05_group_sizes(k, group, order):
    index = random_order(k, k if group == -1 else group) if order == "random" else None
    linear = Linear(k, 16, group, group_index=index)
    tensor = read(linear.gptq("m"), k, 16, group_size=group)
    assert (tensor.permutation is None) == (order == "sequential" or group == -1)
    np.testing.assert_array_equal(tensor.zeros, linear.zeros)
    np.testing.assert_array_equal(tensor.scales, linear.scales)
    np.testing.assert_array_equal(tensor.dequantize(), linear.weight())


def test_a05_a_size_that_is_refused(quantized, tmp_path, write_hf):
    config, stored, _ = quantized
    config["quantization_config"]["group_size"] = 100
    with pytest.raises(ValueError, match=r"group_size is 100, so that K=64 is 0\.64 groups"):
        open_source(write_hf(tmp_path, config, stored))


@pytest.mark.parametrize("desc_act", [True, False])
@pytest.mark.parametrize("order", ["sequential", "random"])
def test_a04_g_idx_is_read_whatever_desc_act_says(config, tensors, tmp_path, write_hf, desc_act, order):
    config["quantization_config"] = FIELDS["gptq"] | {"group_size": 32, "desc_act": desc_act}
    orders = {"q_proj": random_order(64, 32), "down_proj": random_order(96, 32)} if order == "random" else None
    stored, floating = quantize_linears(tensors, "gptq", 32, orders)
    convert(write_hf(tmp_path / "hf", config, stored), tmp_path / "out", progress=False)
    for source in (open_source(tmp_path / "hf"), open_source(tmp_path / "out")):
        q, k = source.read(OURS), source.read("layers.0.attn.k.weight")
        assert (q.permutation is not None) == (order == "random")
        assert k.permutation is None
        permuted = {n for n in source.info.specs if n.endswith(("q.weight", "down.weight"))} if orders else set()
        assert source.info.permutations.keys() == permuted
        np.testing.assert_array_equal(q.dequantize(), floating[f"{Q}.weight"].T)


def test_a04_orders_without_groups_of_one_size_are_refused(quantized, tmp_path, write_hf):
    config, stored, _ = quantized
    stored[f"{Q}.g_idx"][0] = 1
    message = rf"{Q}\.g_idx: g_idx puts 31 of K=64 rows into group 0; groups of 32 have 32 there"
    with pytest.raises(ValueError, match=message):
        open_source(write_hf(tmp_path / "one", config, stored))
    for wrong, bounds in ((-1, "-1 to 1"), (2, "0 to 2"), (2**31 - 1, "0 to 2147483647")):
        stored[f"{Q}.g_idx"][0] = wrong
        with pytest.raises(ValueError, match=rf"g_idx runs from {bounds}; K=64 in groups of 32 has groups 0 to 1"):
            open_source(write_hf(tmp_path / str(wrong), config, stored))


def test_without_g_idx_rows_are_in_order(quantized, tmp_path, write_hf):
    config, stored, floating = quantized
    stored = {key: tensor for key, tensor in stored.items() if not key.endswith("g_idx")}
    source = open_source(write_hf(tmp_path, config, stored))
    np.testing.assert_array_equal(source.read(OURS).dequantize(), floating[f"{Q}.weight"].T)


# Zeros.


def symmetric(k: int = 128, n: int = 16) -> Linear:
    linear = Linear(k, n, 64)
    linear.zeros[:] = 8
    return linear


def test_a03_the_two_formats_are_the_same_weights():
    linear = symmetric()
    v1 = read(linear.gptq("m", less=1), 128, 16, sym=True)
    v2 = read(linear.gptq("m", less=0), 128, 16, sym=True, checkpoint_format="gptq_v2")
    for tensor in (v1, v2):
        assert (tensor.zeros == 8).all()
        np.testing.assert_array_equal(tensor.dequantize(), linear.weight())


@pytest.mark.parametrize("sym", [True, None])
@pytest.mark.parametrize(("said", "less"), [("gptq", 0), ("gptq_v2", 1)])
def test_a03_a_symmetric_file_that_says_the_wrong_format(caplog, said, less, sym):
    """Its zeros tell: all of them are 8 in the other format. It is read so, with a warning."""
    linear = symmetric()
    tensor = read(linear.gptq("m", less=less), 128, 16, sym=sym, checkpoint_format=said)
    assert (tensor.zeros == 8).all()
    np.testing.assert_array_equal(tensor.dequantize(), linear.weight())
    assert f"checkpoint_format is '{said}', and its symmetric zeros are stored as {8 - less}" in caplog.text


@pytest.mark.parametrize(("said", "less", "doubt"), [("gptq", 0, "-"), ("gptq_v2", 1, "+"), ("gptq", 1, None)])
def test_a03_an_asymmetric_file_that_says_the_wrong_format(caplog, said, less, doubt):
    """Nothing proves it, but weights that average a step from 0 are told; the file is believed."""
    linear, noise = Linear(512, 64, 64), np.random.default_rng(1).normal(0, 1, (512, 64))
    linear.zeros = np.clip(linear.zeros, 4, 11)
    linear.q = np.rint(np.clip(linear.zeros[linear.group_index] + noise, 0, 15)).astype(int)
    tensor = read(linear.gptq("m", less=less), 512, 64, checkpoint_format=said)
    np.testing.assert_array_equal(tensor.zeros, linear.zeros - less + (said == "gptq"))
    assert (f"weights average {doubt}" in caplog.text) if doubt else not caplog.text


def test_a03_a_stored_fifteen_is_a_zero_of_sixteen(tmp_path, config, tensors, write_hf):
    """It survives a conversion, too."""
    linear = Linear(64, 64, 32)
    linear.zeros[:] = 16
    linear.zeros[0, 1::2] = 1
    tensor = read(linear.gptq("m"), 64, 64, group_size=32)
    np.testing.assert_array_equal(tensor.zeros, linear.zeros)
    config["quantization_config"] = FIELDS["gptq"] | {"group_size": 32}
    stored, _ = quantize_linears(tensors, "gptq", 32)
    convert(write_hf(tmp_path / "hf", config, stored | linear.gptq(Q)), tmp_path / "out", progress=False)
    converted = open_source(tmp_path / "out").read(OURS)
    np.testing.assert_array_equal(converted.zeros, linear.zeros)
    np.testing.assert_array_equal(converted.dequantize(), linear.weight())


def test_the_warning_comes_once(quantized, tmp_path, write_hf, caplog):
    config, stored, _ = quantized
    config["quantization_config"]["sym"] = True
    source = open_source(write_hf(tmp_path, config, stored))
    with caplog.at_level(logging.WARNING):
        for name in source.info.group_sizes:
            source.read(name)
    assert caplog.text.count("sym is true, and zeros differ from 8") == 1


# Files.


def test_biases_of_zeros_are_ignored(quantized, tmp_path, write_hf):
    """AutoGPTQ gave every linear a bias, whether the model has one or not."""
    config, stored, _ = quantized
    biases = {f"{Q}.bias": np.zeros(64, np.float16)}
    assert f"{OURS[:-7]}.bias" not in open_source(write_hf(tmp_path / "zeros", config, stored | biases)).info.specs
    biases[f"{Q}.bias"][3] = 0.5
    with pytest.raises(ValueError, match=rf"extra tensors \(1\): {Q}\.bias"):
        open_source(write_hf(tmp_path / "others", config, stored | biases))


def test_autogptqs_older_file(quantized, tmp_path, write_hf):
    config, stored, floating = quantized
    del config["quantization_config"]
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 32, "sym": false, "desc_act": false}')
    source = open_source(write_hf(tmp_path, config, stored))
    assert source.info.quantization == "gptq"
    np.testing.assert_array_equal(source.read(OURS).dequantize(), floating[f"{Q}.weight"].T)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 3}, "bits is 3; only 4 is supported"),
        ({"bits": None}, "bits is None; only 4 is supported"),
        ({"checkpoint_format": "marlin"}, "GPTQ checkpoint_format is 'marlin'; supported are gptq, gptq_v2"),
        ({"is_marlin_format": True}, "GPTQ checkpoint_format is 'marlin'"),
        ({"group_size": "128"}, "group_size is '128'; it must be an integer from 1"),
    ],
)
def test_fields_that_are_refused(quantized, tmp_path, write_hf, fields, message):
    config, stored, _ = quantized
    config["quantization_config"] |= fields
    with pytest.raises(ValueError, match=message):
        open_source(write_hf(tmp_path, config, stored))


def test_a_width_that_words_of_eight_do_not_hold(config, tmp_path, write_hf, tensors):
    config["quantization_config"] = FIELDS["gptq"] | {"group_size": 32}
    config["intermediate_size"] = 100
    stored, _ = quantize_linears(tensors, "gptq", 32)
    with pytest.raises(ValueError, match=r"up_proj: N=100 is 12\.5 words of 8 values; it must be a multiple of 8"):
        open_source(write_hf(tmp_path, config, stored))


def test_integers_are_kept(quantized, tmp_path, write_hf):
    """Rows sorted by group hold the integers of the file, each in its row."""
    index = random_order(64, 32, seed=5)
    linear = Linear(64, 64, 32, group_index=index)
    tensor = read(linear.gptq("m"), 64, 64, group_size=32)
    assert tensor.permutation.tolist() == sorted(range(64), key=lambda row: (index[row], row))
    np.testing.assert_array_equal(unpack_rows(tensor.packed, 64), linear.q[tensor.permutation])


# Our checkpoint of it.


@pytest.fixture
def converted(config, tensors, tmp_path, write_hf):
    """A checkpoint of ours in which every q has permuted rows."""
    config["quantization_config"] = FIELDS["gptq"] | {"group_size": 32}
    stored, _ = quantize_linears(tensors, "gptq", 32, {"q_proj": random_order(64, 32)})
    convert(write_hf(tmp_path / "hf", config, stored), tmp_path / "out", progress=False)
    return tmp_path / "out"


def test_a_conversion_of_a_conversion_changes_nothing(converted, tmp_path):
    convert(converted, tmp_path / "again", progress=False)
    first, second = open_source(converted), open_source(tmp_path / "again")
    assert first.info.permutations == second.info.permutations
    assert len(first.info.permutations) == 2
    for name in first.info.group_sizes:
        a, b = first.read(name), second.read(name)
        for field in ("packed", "scales", "zeros", "permutation"):
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field))


def test_another_permutation_than_the_manifest_says_is_refused(converted):
    manifest = json.loads((converted / "manifest.json").read_text())
    manifest["tensors"][OURS]["permutation"] = "0" * 32
    (converted / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"q\.weight\.permutation' is not the one that the manifest names"):
        open_source(converted).read(OURS)


def test_version_1_is_read(converted):
    manifest = json.loads((converted / "manifest.json").read_text())
    assert manifest["format_version"] == 2
    (converted / "manifest.json").write_text(json.dumps(manifest | {"format_version": 1}))
    assert open_source(converted).read("layers.0.attn.k.weight").shape == (64, 32)
