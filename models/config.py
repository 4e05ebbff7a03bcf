"""The model configuration that every decoder is built from, read from a Hugging Face config.json.

A family (models/llama.py, ...) turns its own config.json into a ModelConfig; the pieces that families share, such as
the two spellings of the rotary fields, are read here.
"""

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any, Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "qwen1"]
SCALINGS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "llama3")
"""Kinds that a config.json may name; "qwen1" follows from Qwen 1's own fields."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    theta: base of the frequencies. kind: how they are rescaled beyond the trained length, see models/rope.py; `factor`
    is the rescaling, `original_max_position` the trained length (tokens), and the low/high frequency factors belong to
    "llama3".
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a decoder-only transformer; logical sizes, before any padding for tensor parallelism.

    qk_norm: q and k of each head are normed (RMSNorm) before they are rotated. windows: for each layer how many tokens
    a query sees, itself included (None: all before it); () where no layer has one. logn_length: queries past this
    length are scaled by log(length) / log(logn_length).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    logn_length: int | None = None
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"config: {name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"config: num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(
                f"config: {len(self.windows)} layers have a kind, and num_hidden_layers is {self.num_layers}"
            )
        if self.head_dim % 2:
            raise ValueError(f"config: head_dim is {self.head_dim}; rotary embeddings need an even number")

    @property
    def max_session_len(self) -> int | None:
        """Longest sequence (tokens) the positions allow; None where dynamic rope scaling sets no limit."""
        return None if self.rope.kind in ("dynamic", "qwen1") else self.max_position_embeddings


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor of a checkpoint under our own names: its logical shape and what it is.

    kind "linear" is a matrix [K, N] that may be stored in INT4; "embed" [vocab, hidden], "head" [hidden, vocab],
    "norm" and "bias" vectors stay in floating point.
    """

    shape: tuple[int, ...]
    kind: Literal["linear", "embed", "head", "norm", "bias"]


def read_size(raw: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1) -> int:
    """raw[key] as an integer from `least`. Raises ValueError naming the key where it is something else, or is absent or
    null and there is no default."""
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"config.json has no {key!r}")
        return default
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"config.json: {key} is {value!r}; it must be an integer from {least}")
    return int(value)


def read_number(raw: Mapping[str, Any], key: str, default: float) -> float:
    """raw[key] as a positive number, `default` where it is absent or null. Raises ValueError naming the key."""
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"config.json: {key} is {value!r}; it must be a positive number")
    return float(value)


def read_windows(raw: Mapping[str, Any], window: int | None, first: int) -> tuple[int | None, ...]:
    """Each layer's attention window: `window` where "layer_types" says so, and without that field from layer `first`
    on. () where no layer has one. Raises ValueError for kinds of layers that we don't know."""
    kinds = {"full_attention": None, "sliding_attention": window}
    types = raw.get("layer_types")
    if types is not None and not isinstance(types, list):
        raise ValueError(f"config.json: layer_types is {types!r}; it must be a list")
    if types is None:
        count = read_size(raw, "num_hidden_layers")
        types = ["full_attention"] * min(first, count) + ["sliding_attention"] * max(0, count - first)
    elif unknown := sorted({str(t) for t in types if t not in kinds}):
        raise ValueError(f"config.json: layer_types has {', '.join(unknown)}; supported are {', '.join(kinds)}")
    elif window is None and "sliding_attention" in types:
        raise ValueError("config.json: layer_types has sliding_attention, and there is no sliding_window in use")
    windows = tuple(kinds[t] for t in types)
    return windows if any(windows) else ()


def refuse_other_values(raw: Mapping[str, Any], **supported: Any) -> None:
    """Raise ValueError naming a field that stands in `raw` (and is not null) with another value than the supported."""
    for name, value in supported.items():
        if raw.get(name) is not None and raw[name] != value:
            raise ValueError(f"config.json: {name} is {raw[name]!r}; only {value!r} is supported")


def read_dtype(raw: Mapping[str, Any]) -> str:
    """Parameters' dtype, from either spelling ("dtype" of transformers 5, "torch_dtype" of 4); float32 if absent."""
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"config.json: dtype is {name!r}; it must be float32, float16 or bfloat16")
    return name


def read_token_ids(value: Any) -> tuple[int, ...]:
    """A token id field that may be null, a number or a list of numbers."""
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list | tuple) else (int(value),)


def read_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """The rotary fields, from either spelling ("rope_parameters" of transformers 5; "rope_theta" and "rope_scaling").

    Raises ValueError for an unknown kind, for "type" and "rope_type" that disagree, for missing fields, for a rotation
    of part of a head, and for parameters that differ between layers.
    """
    scaling = dict(raw.get("rope_scaling") or {})
    scaling |= {k: v for k, v in (raw.get("rope_parameters") or {}).items() if v is not None}
    layered = sorted(k for k, v in scaling.items() if isinstance(v, Mapping))
    if layered:
        raise ValueError(f"config.json: rope parameters apart for {', '.join(layered)} are not supported")
    refuse_other_values(raw, partial_rotary_factor=1.0)
    refuse_other_values(scaling, partial_rotary_factor=1.0)
    kinds: set[Any] = {scaling[k] for k in ("type", "rope_type") if scaling.get(k) is not None}
    if len(kinds) > 1:
        raise ValueError(f"config.json: rope scaling names two kinds, {sorted(kinds)}")
    kind: Any = kinds.pop() if kinds else "default"
    if kind not in SCALINGS:
        known = ", ".join(SCALINGS)
        raise ValueError(f"config.json: rope scaling {kind!r} is not supported; known: {known}")
    theta = read_number(scaling, "rope_theta", read_number(raw, "rope_theta", 10000.0))
    max_position = read_size(raw, "max_position_embeddings")
    if kind == "default":
        return RopeConfig(theta=theta, original_max_position=max_position)

    def number(key: str) -> float:
        value = scaling.get(key)
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ValueError(f"config.json: rope scaling {kind!r} needs a positive {key!r}, got {value!r}")
        return float(value)

    rope = RopeConfig(theta=theta, kind=kind, factor=number("factor"), original_max_position=max_position)
    if kind == "dynamic" and scaling.get("original_max_position_embeddings"):
        return dataclasses.replace(rope, original_max_position=int(number("original_max_position_embeddings")))
    if kind == "llama3":
        return dataclasses.replace(
            rope,
            original_max_position=int(number("original_max_position_embeddings")),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
        )
    return rope
