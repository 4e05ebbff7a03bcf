"""Small random models as Hugging Face folders, for the tests of the conversion."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes  # noqa: F401  registers bfloat16 for safetensors
import numpy as np
import pytest
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "vocab_size": 80,
}

Tensors = dict[str, np.ndarray]


def make_tensors(config: dict[str, Any], dtype: Any = np.float32, seed: int = 0) -> Tensors:
    """Random tensors of a Llama under Hugging Face's names, linears [N, K]."""
    rng = np.random.default_rng(seed)
    d, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, d)
    for i in range(config["num_hidden_layers"]):
        attention = {"q_proj": (q, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, q)}
        shapes |= {f"model.layers.{i}.self_attn.{n}.weight": s for n, s in attention.items()}
        mlps = {"gate_proj": (mlp, d), "up_proj": (mlp, d), "down_proj": (d, mlp)}
        shapes |= {f"model.layers.{i}.mlp.{n}.weight": s for n, s in mlps.items()}
        shapes |= {f"model.layers.{i}.{n}.weight": (d,) for n in ("input_layernorm", "post_attention_layernorm")}
    return {name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()}


@pytest.fixture
def config() -> dict[str, Any]:
    """A config.json that a test may change."""
    return json.loads(json.dumps(CONFIG))


@pytest.fixture
def tensors(config: dict[str, Any]) -> Tensors:
    """The tensors that fit `config`."""
    return make_tensors(config)


@pytest.fixture
def write_hf() -> Callable[..., Path]:
    """write_hf(folder, config, tensors): a Hugging Face folder, whole; returns the folder."""

    def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        return folder

    return write


@pytest.fixture
def write_sharded() -> Callable[..., Path]:
    """write_sharded(folder, config, shards, weight_map=None): shards by file name, and an index that names all."""

    def write(
        folder: Path, config: dict[str, Any], shards: dict[str, Tensors], weight_map: dict[str, str] | None = None
    ) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        for file, tensors in shards.items():
            save_file(tensors, folder / file)
        places = weight_map or {name: file for file, tensors in shards.items() for name in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
        return folder

    return write


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """GGUF's order of q and k rows: in each head, row j of the first half, then row j of the second."""
    out = np.empty_like(rows)
    dim = len(rows) // heads
    for h in range(heads):
        for j in range(dim // 2):
            out[h * dim + 2 * j] = rows[h * dim + j]
            out[h * dim + 2 * j + 1] = rows[h * dim + dim // 2 + j]
    return out


@pytest.fixture
def write_gguf() -> Callable[..., Path]:
    """write_gguf(path, config, tensors, matrices="F32", metadata={}, types={}): a GGUF file of HF-named tensors.

    `matrices` is the type of every 2-D tensor, `types` of single ones by GGUF name; `metadata` adds or, with None,
    removes pairs."""

    def write(
        path: Path,
        config: dict[str, Any],
        tensors: Tensors,
        matrices: str = "F32",
        metadata: dict[str, Any] | None = None,
        types: dict[str, str] | None = None,
    ) -> Path:
        pairs: dict[str, Any] = {
            "llama.block_count": config["num_hidden_layers"],
            "llama.context_length": config["max_position_embeddings"],
            "llama.embedding_length": config["hidden_size"],
            "llama.feed_forward_length": config["intermediate_size"],
            "llama.attention.head_count": config["num_attention_heads"],
            "llama.attention.head_count_kv": config["num_key_value_heads"],
            "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "llama.rope.freq_base": config["rope_parameters"]["rope_theta"],
            "tokenizer.ggml.bos_token_id": config["bos_token_id"],
            "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        }
        pairs |= metadata or {}
        writer = gguf.GGUFWriter(path, pairs.pop("general.architecture", "llama"))
        for key, value in pairs.items():
            match value:
                case bool():
                    writer.add_bool(key, value)
                case int():
                    writer.add_uint32(key, value)
                case float():
                    writer.add_float32(key, value)
                case str():
                    writer.add_string(key, value)
                case list():
                    writer.add_array(key, value)
        for name, array in tensors.items():
            for heads, part in (("num_attention_heads", "q_proj"), ("num_key_value_heads", "k_proj")):
                if part in name:
                    array = interleave(array, config[heads])
            for theirs, ours in GGUF_NAMES.items():
                name = name.replace(theirs, ours)
            kind = (types or {}).get(name, matrices if array.ndim == 2 else "F32")
            kind = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(array.astype(np.float32), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
