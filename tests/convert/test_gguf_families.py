"""GGUF files of the other architectures: the golden models under the names that the gguf library gives their tensors,
against the same models read from their Hugging Face folders."""

import dataclasses

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from pallasite.convert.formats import open_source
from pallasite.convert.formats.gguf import unpermute


def write(path, source, tensors, kind: str, metadata: dict) -> None:
    """`tensors` [N, K] by Hugging Face's name; the library's own map tells GGUF's."""
    config = source.info.config
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, config.num_layers)
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in metadata.items():
        writer.add_uint32(key, value)
    for name, array in tensors.items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """[N, K] with the rows of each head in GGUF's order: 0, half, 1, half + 1, ..."""
    halves = weight.reshape(-1, 2, head_dim // 2, weight.shape[-1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def stored(golden, kind: str, case: str):
    """The Hugging Face folder as a source, and its tensors as llama.cpp's converter would cut and turn them."""
    source = open_source(golden / case)
    tensors = load_file(golden / case / "model.safetensors")
    if kind == "internlm2":  # it splits wqkv, and turns q and k
        for i in range(source.info.config.num_layers):
            del tensors[f"model.layers.{i}.attention.wqkv.weight"]
            for part in "qkv":
                weight = source.read(f"layers.{i}.attn.{part}.weight").T
                turned = weight if part == "v" else interleaved(weight, source.info.config.head_dim)
                tensors[f"model.layers.{i}.attention.w{part}.weight"] = turned
    return source, tensors


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        ("qwen2", "qwen2-tiny"),
        ("qwen3", "qwen3-tiny"),
        ("internlm2", "internlm2-tiny"),
    ],
)
def test_equals_the_hugging_face_folder(tmp_path, golden, kind, case):
    source, tensors = stored(golden, kind, case)
    path = tmp_path / "m.gguf"
    write(path, source, tensors, kind, {})
    got = open_source(path)
    # llama.cpp's converter leaves dynamic scaling out: the file says the model as far as it was trained.
    rope = dataclasses.replace(source.info.config.rope, kind="default", factor=1.0)
    assert got.info.config == dataclasses.replace(source.info.config, rope=rope)
    assert got.info.specs == source.info.specs
    for name in source.info.specs:
        np.testing.assert_array_equal(got.read(name), source.read(name), err_msg=name)


def test_rows_are_put_back_where_they_were(golden):
    rows = np.arange(32)[:, None]
    np.testing.assert_array_equal(interleaved(rows, 16)[unpermute(2, 16)], rows)


def test_a_window_that_the_file_names_is_refused(tmp_path, golden):
    source, tensors = stored(golden, "qwen2", "qwen2-tiny")
    write(tmp_path / "m.gguf", source, tensors, "qwen2", {"qwen2.attention.sliding_window": 64})
    with pytest.raises(ValueError, match=r"m\.gguf: qwen2\.attention\.sliding_window is not supported"):
        open_source(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", ["qwen", "qwen2moe", "qwen2vl", "gemma3"])
def test_other_architectures_are_refused_by_name(tmp_path, golden, kind):
    """Qwen 1 among them: a file says neither seq_length, nor whether logn and NTK are used."""
    write(tmp_path / "m.gguf", open_source(golden / "qwen2-tiny"), {}, kind, {})
    message = f"unknown architecture: '{kind}'; supported in GGUF: llama, internlm2, qwen2, qwen3"
    with pytest.raises(ValueError, match=message):
        open_source(tmp_path / "m.gguf")
