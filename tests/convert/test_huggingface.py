"""Hugging Face folders: what is read, what the index decides, and what is refused."""

import json
import logging

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from pallasite.convert.formats import open_source
from pallasite.convert.source import Source

HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"


def assert_same(a: Source, b: Source) -> None:
    """Two sources hold the same configuration and the same tensors, bit for bit."""
    assert a.info.config == b.info.config
    assert a.info.specs == b.info.specs
    for name in a.info.specs:
        np.testing.assert_array_equal(a.read(name), b.read(name), err_msg=name)


@pytest.mark.parametrize("case", ["llama-tied-tiny", "llama-rope3-tiny", "llama-rope3-tiny/sharded"])
def test_reads_every_tensor_transposed_where_linear(golden, case):
    source = open_source(golden / case)
    stored = {}
    for file in sorted((golden / case).glob("*.safetensors")):
        stored |= load_file(file)
    assert len(source.info.specs) == len(stored)
    np.testing.assert_array_equal(source.read("embed.weight"), stored[EMBED])
    np.testing.assert_array_equal(
        source.read("layers.1.attn_norm.weight"), stored["model.layers.1.input_layernorm.weight"]
    )
    for ours, theirs in {
        "layers.0.attn.q.weight": "model.layers.0.self_attn.q_proj.weight",
        "layers.1.attn.o.weight": "model.layers.1.self_attn.o_proj.weight",
        "layers.1.mlp.down.weight": "model.layers.1.mlp.down_proj.weight",
    }.items():
        np.testing.assert_array_equal(source.read(ours), stored[theirs].T)
    if HEAD in stored:
        np.testing.assert_array_equal(source.read("head.weight"), stored[HEAD].T)


def test_sharded_equals_whole(golden):
    assert_same(open_source(golden / "llama-rope3-tiny"), open_source(golden / "llama-rope3-tiny" / "sharded"))


@pytest.mark.parametrize("case", ["llama-tied-tiny", "llama-rope3-tiny"])
def test_both_spellings_of_the_configuration(golden, case, tmp_path):
    for file in ("model.safetensors", "generation_config.json"):
        (tmp_path / file).write_bytes((golden / case / file).read_bytes())
    (tmp_path / "config.json").write_bytes((golden / case / "config.v4.json").read_bytes())
    assert_same(open_source(golden / case), open_source(tmp_path))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dtypes_are_read_as_stored(tmp_path, config, tensors, write_hf, dtype):
    tensors = {name: array.astype(dtype) for name, array in tensors.items()}
    source = open_source(write_hf(tmp_path, config, tensors))
    assert set(source.info.dtypes.values()) == {np.dtype(dtype).name}
    q = source.read("layers.0.attn.q.weight")
    assert q.dtype == dtype
    np.testing.assert_array_equal(q, tensors["model.layers.0.self_attn.q_proj.weight"].T)


def test_a_tensor_of_several_chunks(tmp_path, config, write_hf, tensors, monkeypatch):
    monkeypatch.setattr("pallasite.convert.formats.files.CHUNK_BYTES", 1000)  # 3 rows of 64 float32, and a rest
    source = open_source(write_hf(tmp_path, config, tensors))
    np.testing.assert_array_equal(source.read("embed.weight"), tensors[EMBED])
    np.testing.assert_array_equal(source.read("head.weight"), tensors[HEAD].T)


# The index decides.


def test_stray_files_are_ignored_with_a_note(tmp_path, config, tensors, write_sharded, write_hf, caplog):
    wrong = {name: array + 1 for name, array in tensors.items()}
    write_hf(tmp_path / "m", config, wrong)  # a model.safetensors with other values
    names = sorted(tensors)
    shards = {"a.safetensors": {n: tensors[n] for n in names[:9]}, "b.safetensors": {n: tensors[n] for n in names[9:]}}
    write_sharded(tmp_path / "m", config, shards)
    (tmp_path / "m" / "consolidated.safetensors").write_bytes((tmp_path / "m" / "model.safetensors").read_bytes())
    with caplog.at_level(logging.WARNING):
        source = open_source(tmp_path / "m")
    assert "consolidated.safetensors, model.safetensors" in caplog.text
    np.testing.assert_array_equal(source.read("embed.weight"), tensors[EMBED])


@pytest.mark.parametrize("names", [("a.safetensors", "z.safetensors"), ("z.safetensors", "a.safetensors")])
def test_a_tensor_in_two_shards_is_read_where_the_index_says(tmp_path, config, tensors, write_sharded, names, caplog):
    first, second = names
    shards = {first: tensors, second: {EMBED: tensors[EMBED] + 1}}
    source = open_source(write_sharded(tmp_path, config, shards, weight_map=dict.fromkeys(tensors, first)))
    np.testing.assert_array_equal(source.read("embed.weight"), tensors[EMBED])
    places = dict.fromkeys(tensors, first) | {EMBED: second}
    source = open_source(write_sharded(tmp_path, config, shards, weight_map=places))
    np.testing.assert_array_equal(source.read("embed.weight"), tensors[EMBED] + 1)


def test_missing_shards_and_tensors_are_named(tmp_path, config, tensors, write_sharded):
    places = dict.fromkeys(tensors, "a.safetensors") | {HEAD: "gone.safetensors", "model.norm.weight": "b.safetensors"}
    shards = {"a.safetensors": tensors, "b.safetensors": {EMBED: tensors[EMBED]}}
    write_sharded(tmp_path, config, shards, weight_map=places)
    with pytest.raises(ValueError, match=r"missing files \(1\): gone\.safetensors; missing tensors \(2\)") as error:
        open_source(tmp_path)
    assert HEAD in str(error.value)
    assert "model.norm.weight (the index places it in b.safetensors)" in str(error.value)


def test_a_tensor_that_the_index_leaves_out_is_missing(tmp_path, config, tensors, write_sharded):
    places = {name: "a.safetensors" for name in tensors if name != HEAD}
    write_sharded(tmp_path, config, {"a.safetensors": tensors}, weight_map=places)
    with pytest.raises(ValueError, match=r"missing tensors \(1\): lm_head\.weight"):
        open_source(tmp_path)


def test_an_index_cannot_lead_out_of_its_folder(tmp_path, config, tensors, write_sharded):
    write_sharded(tmp_path / "m", config, {"a.safetensors": tensors}, weight_map={EMBED: "../a.safetensors"})
    with pytest.raises(ValueError, match=r"outside of its folder, '\.\./a"):
        open_source(tmp_path / "m")


# Tied embeddings: the flag and the tensor.


@pytest.mark.parametrize(
    ("flag", "head", "outcome"),
    [
        (True, "absent", "shared"),
        (True, "same", "shared"),
        (True, "different", "lm_head.weight differs from model.embed_tokens.weight"),
        (False, "absent", "missing tensors (1): lm_head.weight"),
        (False, "same", "own"),
        (False, "different", "own"),
        (None, "absent", "missing tensors (1): lm_head.weight"),  # Llama's default is untied
        (None, "same", "own"),
        (None, "different", "own"),
    ],
)
def test_tied_embeddings(tmp_path, config, tensors, write_hf, flag, head, outcome):
    del config["tie_word_embeddings"]
    if flag is not None:
        config["tie_word_embeddings"] = flag
    match head:
        case "absent":
            del tensors[HEAD]
        case "same":
            tensors[HEAD] = tensors[EMBED].copy()
    write_hf(tmp_path, config, tensors)
    if outcome not in ("shared", "own"):
        with pytest.raises(ValueError) as error:  # noqa: PT011  the text is compared below
            open_source(tmp_path)
        assert outcome in str(error.value)
        return
    source = open_source(tmp_path)
    assert source.info.config.tie_word_embeddings == (outcome == "shared")
    assert ("head.weight" in source.info.specs) == (outcome == "own")
    if outcome == "own":
        np.testing.assert_array_equal(source.read("head.weight"), tensors[HEAD].T)


def test_a_tied_head_that_differs_in_its_last_value_is_refused(tmp_path, config, tensors, write_hf, monkeypatch):
    monkeypatch.setattr("pallasite.convert.formats.files.CHUNK_BYTES", 1000)
    config["tie_word_embeddings"] = True
    tensors[HEAD] = tensors[EMBED].copy()
    tensors[HEAD][-1, -1] += 1e-3
    with pytest.raises(ValueError, match="differs"):
        open_source(write_hf(tmp_path, config, tensors))


# What is refused.


def test_all_mismatches_stand_in_one_error(tmp_path, config, tensors, write_hf):
    del tensors["model.layers.0.mlp.up_proj.weight"]
    del tensors["model.norm.weight"]
    tensors["model.layers.7.mlp.up_proj.weight"] = np.zeros((96, 64), np.float32)
    tensors["model.layers.1.self_attn.k_proj.weight"] = np.zeros((64, 32), np.float32)
    tensors["model.layers.1.self_attn.v_proj.weight"] = np.zeros((32, 64), np.int8)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)  # harmless, and not listed
    with pytest.raises(ValueError, match="does not fit") as error:
        open_source(write_hf(tmp_path, config, tensors))
    text = str(error.value)
    assert "missing tensors (2): model.layers.0.mlp.up_proj.weight, model.norm.weight" in text
    assert "extra tensors (1): model.layers.7.mlp.up_proj.weight" in text
    assert "wrong shapes (1): model.layers.1.self_attn.k_proj.weight: [64, 32], expected [32, 64]" in text
    assert "unsupported dtypes (1): model.layers.1.self_attn.v_proj.weight: I8" in text
    assert "inv_freq" not in text


def test_long_lists_are_cut_with_a_count(tmp_path, config, tensors, write_hf):
    config["num_hidden_layers"] = 30
    with pytest.raises(ValueError, match=r"missing tensors \(252\): .*, and 240 more"):
        open_source(write_hf(tmp_path, config, tensors))


def test_harmless_buffers_are_no_error(tmp_path, config, tensors, write_hf):
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    assert len(open_source(write_hf(tmp_path, config, tensors)).info.specs) == len(tensors) - 1


@pytest.mark.parametrize("keep", [0, 4, 100, -4])
def test_truncated_safetensors(tmp_path, config, tensors, write_hf, keep):
    file = write_hf(tmp_path, config, tensors) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors: truncated or damaged"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GrokForCausalLM"]},
            r"unknown architecture: GrokForCausalLM; supported: .*LlamaForCausalLM",
        ),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            r"config\.json: quantization 'hqq' is not supported; .* awq, gptq",
        ),
        ({"hidden_size": None}, "no 'hidden_size'"),
    ],
)
def test_configurations_that_are_refused(tmp_path, config, tensors, write_hf, change, message):
    with pytest.raises(ValueError, match=message):
        open_source(write_hf(tmp_path, config | change, tensors))


def test_damaged_json_is_named(tmp_path, config, tensors, write_hf):
    (write_hf(tmp_path, config, tensors) / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        open_source(tmp_path)


def test_pickled_weights_are_never_loaded(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="pickled PyTorch weights, which are never loaded"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "union"),
    [(2, [2, 7], (2, 7)), (2, 7, (2, 7)), (None, [5], (5,)), ([3, 2], None, (3, 2)), (None, None, ())],
)
def test_end_of_sequence_ids_are_a_union(tmp_path, config, tensors, write_hf, in_config, in_generation, union):
    config["eos_token_id"] = in_config
    write_hf(tmp_path, config, tensors)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation}))
    assert open_source(tmp_path).info.config.eos_token_ids == union


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        open_source(tmp_path / "nothing")
    with pytest.raises(ValueError, match="is an empty folder"):
        open_source(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match="holds no checkpoint"):
        open_source(tmp_path)
    with pytest.raises(ValueError, match="is not a GGUF file"):
        open_source(tmp_path / "notes.txt")
