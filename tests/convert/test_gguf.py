"""GGUF files: each tensor type against the gguf library's own expansion, the order of q and k, what is refused."""

import gguf
import ml_dtypes
import numpy as np
import pytest

from pallasite.convert.formats import open_source
from pallasite.convert.int4 import Int4Tensor
from pallasite.models.config import RopeConfig
from pallasite.models.rope import static_frequencies

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")


def values(tensor) -> np.ndarray:
    """float32 of whatever a source reads."""
    return tensor.dequantize() if isinstance(tensor, Int4Tensor) else tensor.astype(np.float32)


def expanded(stored: np.ndarray, kind: str) -> np.ndarray:
    """A matrix [N, K] through the library: quantized and expanded again."""
    type_ = gguf.GGMLQuantizationType[kind]
    return gguf.quants.dequantize(gguf.quants.quantize(stored, type_), type_)


@pytest.mark.parametrize("kind", TYPES)
def test_every_tensor_equals_the_librarys_values(tmp_path, config, tensors, write_gguf, kind):
    source = open_source(write_gguf(tmp_path / "m.gguf", config, tensors, kind))
    for ours, theirs in {
        "layers.0.attn.q.weight": "model.layers.0.self_attn.q_proj.weight",  # rows are moved, never changed
        "layers.1.attn.k.weight": "model.layers.1.self_attn.k_proj.weight",
        "layers.1.attn.v.weight": "model.layers.1.self_attn.v_proj.weight",
        "layers.0.mlp.down.weight": "model.layers.0.mlp.down_proj.weight",
        "head.weight": "lm_head.weight",
    }.items():
        np.testing.assert_array_equal(values(source.read(ours)), expanded(tensors[theirs], kind).T, err_msg=ours)
    embed = expanded(tensors["model.embed_tokens.weight"], kind)
    np.testing.assert_array_equal(values(source.read("embed.weight")), embed)
    np.testing.assert_array_equal(source.read("norm.weight"), tensors["model.norm.weight"])


@pytest.mark.parametrize(("kind", "dtype"), [("F32", np.float32), ("F16", np.float16), ("BF16", ml_dtypes.bfloat16)])
def test_floats_are_read_as_stored(tmp_path, config, tensors, write_gguf, kind, dtype):
    source = open_source(write_gguf(tmp_path / "m.gguf", config, tensors, kind))
    assert source.read("layers.0.mlp.up.weight").dtype == dtype
    assert source.info.config.dtype == np.dtype(dtype).name
    assert source.info.group_sizes == {}


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_four_bit_linears_stay_int4(tmp_path, config, tensors, write_gguf, kind):
    source = open_source(write_gguf(tmp_path / "m.gguf", config, tensors, kind))
    linears = {name for name, spec in source.info.specs.items() if spec.kind == "linear"}
    assert source.info.group_sizes == dict.fromkeys(linears, 32)
    q = source.read("layers.0.attn.q.weight")
    assert isinstance(q, Int4Tensor)
    assert q.scales.dtype == np.float16
    if kind == "Q4_0":
        assert (q.zeros == 8).all()
    else:
        assert q.minimums is not None
        assert q.minimums.dtype == np.float16
    assert source.read("embed.weight").dtype == np.float32
    assert source.read("head.weight").dtype == np.float32


def test_several_chunks_of_rows(tmp_path, config, tensors, write_gguf, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", config, tensors, "Q4_1")
    whole = open_source(path)
    expected = {name: values(whole.read(name)) for name in whole.info.specs}
    monkeypatch.setattr("pallasite.convert.formats.gguf.CHUNK_VALUES", 500)
    for name, array in expected.items():
        np.testing.assert_array_equal(values(open_source(path).read(name)), array, err_msg=name)


def test_equals_the_hugging_face_folder(tmp_path, config, tensors, write_gguf, write_hf):
    a = open_source(write_hf(tmp_path / "hf", config, tensors))
    b = open_source(write_gguf(tmp_path / "m.gguf", config, tensors))
    assert a.info.config == b.info.config
    for name in a.info.specs:
        np.testing.assert_array_equal(a.read(name), b.read(name), err_msg=name)


def test_biases_of_q_and_k_are_put_in_order(tmp_path, config, tensors, write_gguf, write_hf):
    rng = np.random.default_rng(3)
    for i in range(2):
        for part, size in {"q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": 64}.items():
            tensors[f"model.layers.{i}.self_attn.{part}.bias"] = rng.standard_normal(size, np.float32)
    a = open_source(write_hf(tmp_path / "hf", config | {"attention_bias": True}, tensors))
    b = open_source(write_gguf(tmp_path / "m.gguf", config, tensors))
    assert a.info.config == b.info.config
    for name in ("q", "k", "v", "o"):
        np.testing.assert_array_equal(a.read(f"layers.1.attn.{name}.bias"), b.read(f"layers.1.attn.{name}.bias"))


def test_tied_when_there_is_no_output(tmp_path, config, tensors, write_gguf):
    del tensors["lm_head.weight"]
    source = open_source(write_gguf(tmp_path / "m.gguf", config, tensors))
    assert source.info.config.tie_word_embeddings
    assert "head.weight" not in source.info.specs


def test_a_folder_with_one_file_opens_as_it(tmp_path, config, tensors, write_gguf):
    write_gguf(tmp_path / "a.gguf", config, tensors)
    assert open_source(tmp_path).info.format == "gguf"
    write_gguf(tmp_path / "b.gguf", config, tensors)
    with pytest.raises(ValueError, match=r"holds 2 GGUF files; name one: a\.gguf, b\.gguf"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({}, RopeConfig(original_max_position=128)),
        ({"llama.rope.freq_base": 500000.0}, RopeConfig(theta=500000.0, original_max_position=128)),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5},
            RopeConfig(kind="linear", factor=2.5, original_max_position=128),
        ),
        ({"llama.rope.scale_linear": 4.0}, RopeConfig(kind="linear", factor=4.0, original_max_position=128)),
    ],
)
def test_rotary_metadata(tmp_path, config, tensors, write_gguf, metadata, rope):
    source = open_source(write_gguf(tmp_path / "m.gguf", config, tensors, metadata=metadata))
    assert source.info.config.rope == rope


def test_llama3_frequency_factors(tmp_path, config, tensors, write_gguf):
    rope = RopeConfig(kind="llama3", theta=500000.0, factor=32.0, original_max_position=8192)
    factors = static_frequencies(RopeConfig(theta=500000.0), 16) / static_frequencies(rope, 16)
    assert factors.min() == 1
    assert factors.max() == 32
    metadata = {"llama.rope.freq_base": 500000.0}
    tensors["rope_freqs.weight"] = factors
    path = write_gguf(tmp_path / "m.gguf", config, tensors, metadata=metadata)
    assert open_source(path).info.config.rope == rope
    tensors["rope_freqs.weight"] = factors * np.linspace(1, 1.1, 8, dtype=np.float32)
    write_gguf(path, config, tensors, metadata=metadata)
    with pytest.raises(ValueError, match=r"rope_freqs\.weight holds frequency factors that are not Llama 3's"):
        open_source(path)


def test_every_end_token_counts(tmp_path, config, tensors, write_gguf):
    metadata = {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 2}
    source = open_source(write_gguf(tmp_path / "m.gguf", config, tensors, metadata=metadata))
    assert source.info.config.eos_token_ids == (2, 9)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "grok"}, "unknown architecture: 'grok'"),
        ({"llama.block_count": None}, r"the metadata has no 'llama\.block_count'"),
        ({"llama.expert_count": 8}, "a mixture of 8 experts"),
        ({"split.count": 3}, "is one of 3 parts"),
        ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.type is 'yarn'"),
        ({"llama.attention.head_count": [4, 2]}, r"head_count differs between layers \(\[2, 4\]\)"),
        ({"llama.rope.dimension_count": 8}, r"dimension_count is 8 and the head dimension 16"),
    ],
)
def test_metadata_that_is_refused(tmp_path, config, tensors, write_gguf, metadata, message):
    path = write_gguf(tmp_path / "m.gguf", config, tensors, metadata=metadata)
    with pytest.raises(ValueError, match=message) as error:
        open_source(path)
    assert str(path) in str(error.value)


def test_all_mismatches_stand_in_one_error(tmp_path, config, tensors, write_gguf):
    del tensors["model.norm.weight"]
    tensors["blk.0.surprise.weight"] = np.zeros(4, np.float32)
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((64, 64), np.float32)
    path = write_gguf(tmp_path / "m.gguf", config, tensors, types={"blk.0.attn_v.weight": "Q5_1"})
    with pytest.raises(ValueError, match="does not fit") as error:
        open_source(path)
    text = str(error.value)
    assert "missing tensors (1): output_norm.weight" in text
    assert "extra tensors (1): blk.0.surprise.weight" in text
    assert "wrong shapes (1): blk.1.ffn_up.weight: [64, 64], expected [96, 64]" in text
    assert "unsupported types (1): blk.0.attn_v.weight: Q5_1, supported are BF16, F16, F32, Q4_0, Q4_1, Q8_0" in text


@pytest.mark.parametrize("keep", [4, 40, 600, -4])
def test_truncated_files(tmp_path, config, tensors, write_gguf, keep):
    path = write_gguf(tmp_path / "m.gguf", config, tensors)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"m\.gguf: truncated, damaged or not a GGUF file"):
        open_source(path)


def test_the_real_model(smollm2_gguf):
    source = open_source(smollm2_gguf)
    tensors = {t.name: t for t in gguf.GGUFReader(smollm2_gguf).tensors}
    config = source.info.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)
    assert config.rms_norm_eps == 1e-5
    stored = tensors["blk.29.attn_k.weight"]
    k = gguf.quants.dequantize(stored.data, stored.tensor_type)
    order = [h * 64 + 2 * (r % 32) + r // 32 for h in range(3) for r in range(64)]
    np.testing.assert_array_equal(values(source.read("layers.29.attn.k.weight")), k[order].T)
    stored = tensors["token_embd.weight"]
    np.testing.assert_array_equal(source.read("embed.weight"), gguf.quants.dequantize(stored.data, stored.tensor_type))
