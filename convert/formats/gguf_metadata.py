"""From a GGUF file's metadata to a Hugging Face style config.json (transformers 5's spelling)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pallasite.models.config import RopeConfig
from pallasite.models.rope import static_frequencies

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""GGUF's name of an architecture, and Hugging Face's. Mistral is a "llama"."""

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Llama 3.1's and 3.2's constants. A GGUF file holds only the factors that come of them: see read_llama3_rope."""


class Metadata(dict[str, Any]):
    """A GGUF file's key-value pairs. `need` raises where a key is absent."""

    def need(self, key: str) -> Any:
        """The value of a key; raises ValueError naming it if the file has none."""
        if key not in self:
            raise ValueError(f"the metadata has no {key!r}")
        return self[key]

    def uniform(self, key: str, default: Any = None) -> int:
        """An integer that some files give for each layer: all must be equal."""
        value = self.need(key) if default is None else self.get(key, default)
        values = set(value) if isinstance(value, list) else {value}
        if len(values) != 1:
            raise ValueError(f"{key} differs between layers ({sorted(values)}), which is not supported")
        return int(values.pop())


def shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05 for the file's 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def read_config_json(metadata: Metadata, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """config.json's fields from the metadata and the tensors (gguf's ReaderTensor by name).

    Raises ValueError naming what is missing or not supported: another architecture, experts, a sliding window, rotary
    scalings other than linear and Llama 3's, a file that is one of several.
    """
    kind = metadata.need("general.architecture")
    if kind not in ARCHITECTURES:
        raise ValueError(f"unknown architecture: {kind!r}; supported in GGUF: {', '.join(ARCHITECTURES)}")
    if int(metadata.get("split.count", 0)) > 1:
        raise ValueError(f"is one of {metadata['split.count']} parts; merge them into one file first")
    if int(metadata.get(f"{kind}.expert_count", 0)) > 0:
        raise ValueError(f"is a mixture of {metadata[f'{kind}.expert_count']} experts, which is not supported")
    if metadata.get(f"{kind}.attention.sliding_window"):
        raise ValueError(f"{kind}.attention.sliding_window is not supported in GGUF; convert the original checkpoint")
    if "token_embd.weight" not in tensors:
        raise ValueError("missing tensors (1): token_embd.weight")
    hidden = metadata.uniform(f"{kind}.embedding_length")
    heads = metadata.uniform(f"{kind}.attention.head_count")
    head_dim = metadata.uniform(f"{kind}.attention.key_length", hidden // heads)
    for key in (f"{kind}.attention.value_length", f"{kind}.rope.dimension_count"):
        if metadata.uniform(key, head_dim) != head_dim:
            raise ValueError(f"{key} is {metadata[key]} and the head dimension {head_dim}; they must be equal")
    attention_bias = "blk.0.attn_q.bias" in tensors
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "attention_bias": attention_bias,
        "bias": attention_bias,  # InternLM2's name for it
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "dtype": read_dtype(tensors),
        "eos_token_id": read_eos(metadata),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": metadata.uniform(f"{kind}.feed_forward_length"),
        "max_position_embeddings": int(metadata.need(f"{kind}.context_length")),
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "num_attention_heads": heads,
        "num_hidden_layers": int(metadata.need(f"{kind}.block_count")),
        "num_key_value_heads": metadata.uniform(f"{kind}.attention.head_count_kv", heads),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": shortest(metadata.need(f"{kind}.attention.layer_norm_rms_epsilon")),
        "rope_parameters": read_rope_json(kind, metadata, tensors, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        # Rows, not the metadata's vocab_size: files exist whose tokenizer is smaller than the padded embedding.
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
    }


def read_dtype(tensors: Mapping[str, Any]) -> str:
    """The dtype that holds every matrix exactly: the one they are all stored in, else float32."""
    names = {"F16": "float16", "BF16": "bfloat16"}
    kinds = {names.get(t.tensor_type.name, "float32") for t in tensors.values() if len(t.shape) > 1}
    return kinds.pop() if len(kinds) == 1 else "float32"


def read_eos(metadata: Metadata) -> int | list[int] | None:
    """Every id that ends a sequence: the end of text, and of a turn or a message where the file names them."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = list(dict.fromkeys(int(metadata[f"tokenizer.ggml.{k}"]) for k in keys if f"tokenizer.ggml.{k}" in metadata))
    return ids if len(ids) > 1 else ids[0] if ids else None


def read_rope_json(architecture: str, metadata: Metadata, tensors: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """config.json's rope_parameters. Raises ValueError for a scaling that the decoder doesn't know."""
    rope: dict[str, Any] = {
        "rope_theta": shortest(metadata.get(f"{architecture}.rope.freq_base", 10000.0)),
        "rope_type": "default",
    }
    old_factor = metadata.get(f"{architecture}.rope.scale_linear", 1.0)
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none" if old_factor == 1 else "linear")
    if kind == "linear":
        factor = metadata.get(f"{architecture}.rope.scaling.factor", old_factor)
        rope |= {"rope_type": "linear", "factor": shortest(factor)}
    elif kind != "none":
        raise ValueError(f"{architecture}.rope.scaling.type is {kind!r}; supported are 'none' and 'linear'")
    if "rope_freqs.weight" not in tensors:
        return rope
    if kind != "none":
        raise ValueError(f"has both rope_freqs.weight and {kind!r} rope scaling, which is not supported")
    return rope | read_llama3_rope(np.asarray(tensors["rope_freqs.weight"].data), rope["rope_theta"], head_dim)


def read_llama3_rope(factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's rotary scaling from the frequency divisors that GGUF stores, float [head_dim / 2].

    The largest divisor is the factor; with the constants that all published models share the others must follow from
    it, or ValueError is raised.
    """
    if factors.shape == (head_dim // 2,):
        rope = RopeConfig(
            theta=theta,
            kind="llama3",
            factor=shortest(factors.max()),
            original_max_position=int(LLAMA3_ROPE["original_max_position_embeddings"]),
            low_freq_factor=LLAMA3_ROPE["low_freq_factor"],
            high_freq_factor=LLAMA3_ROPE["high_freq_factor"],
        )
        divisors = static_frequencies(RopeConfig(theta=theta), head_dim) / static_frequencies(rope, head_dim)
        if np.allclose(factors, divisors, rtol=1e-4):
            return {"rope_type": "llama3", "factor": rope.factor, **LLAMA3_ROPE}
    raise ValueError("rope_freqs.weight holds frequency factors that are not Llama 3's, which is not supported")
