"""A decoder written a second time, in float64 and without a cache: whole prompts, one head at a time."""

import math

import numpy as np

from pallasite.convert.source import Source
from pallasite.models.config import ModelConfig


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotated(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """x [tokens, head_dim], the token's place being its row."""
    length, dim = x.shape
    theta, trained = config.rope.theta, config.rope.original_max_position
    if config.rope.kind == "dynamic" and length > trained:
        theta *= (config.rope.factor * length / trained - (config.rope.factor - 1)) ** (dim / (dim - 2))
    if config.rope.kind == "qwen1" and length > trained:
        theta *= (2 ** math.ceil(math.log2(length / trained) + 1) - 1) ** (dim / (dim - 2))
    turns = np.exp(1j * np.outer(np.arange(length), theta ** (-np.arange(0, dim, 2) / dim)))
    z = (x[:, : dim // 2] + 1j * x[:, dim // 2 :]) * turns
    return np.concatenate([z.real, z.imag], -1)


def logits(source: Source, tokens: list[int]) -> np.ndarray:
    """float64 [tokens, vocab] of a checkpoint in floating point, with default, dynamic or Qwen 1's rope."""
    c, length = source.info.config, len(tokens)

    def read(name: str) -> np.ndarray:
        return np.asarray(source.read(name), np.float64)

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        y = x @ read(f"{name}.weight")
        return y + read(f"{name}.bias") if f"{name}.bias" in source.info.specs else y

    x = read("embed.weight")[tokens]
    places = np.arange(length)
    scale = np.ones(length)
    if c.logn_length:
        scale = np.log(np.maximum(places + 1, c.logn_length)) / math.log(c.logn_length)
    for i in range(c.num_layers):
        layer = f"layers.{i}"
        h = norm(x, read(f"{layer}.attn_norm.weight"), c.rms_norm_eps)
        q, k, v = (linear(h, f"{layer}.attn.{part}").reshape(length, -1, c.head_dim) for part in "qkv")
        if c.qk_norm:
            q = norm(q, read(f"{layer}.attn.q_norm.weight"), c.rms_norm_eps)
            k = norm(k, read(f"{layer}.attn.k_norm.weight"), c.rms_norm_eps)
        window = (c.windows[i] if c.windows else None) or length
        distance = places[:, None] - places
        seen = (distance >= 0) & (distance < window)
        heads = []
        for head in range(c.num_heads):
            of = head * c.num_kv_heads // c.num_heads
            scores = rotated(q[:, head], c) * scale[:, None] @ rotated(k[:, of], c).T / math.sqrt(c.head_dim)
            weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, of])
        x = x + linear(np.concatenate(heads, -1), f"{layer}.attn.o")
        h = norm(x, read(f"{layer}.mlp_norm.weight"), c.rms_norm_eps)
        gate = linear(h, f"{layer}.mlp.gate")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, f"{layer}.mlp.up"), f"{layer}.mlp.down")
    x = norm(x, read("norm.weight"), c.rms_norm_eps)
    return x @ (read("embed.weight").T if c.tie_word_embeddings else read("head.weight"))
