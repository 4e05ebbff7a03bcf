"""From an opened checkpoint to a model on its mesh: fuse, pad for the shards, place by logical axes.

The checkpoint holds logical tensors (q, k, v apart, no padding); memory holds one matrix for q, k, v and one for gate
and up, with each shard's columns side by side. Nothing of a shard's layout is ever written to disk.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pallasite.convert.int4 import Int4Tensor
from pallasite.convert.source import Source, Tensor
from pallasite.models.config import ModelConfig
from pallasite.models.decoder import Decoder, PaddedSizes
from pallasite.models.layers import Int4Layout
from pallasite.models.model import CacheSpec, Model, Path, materialize
from pallasite.models.rope import page_tag

_FUSED = {
    "attn.qkv": ("attn.q", "attn.k", "attn.v"),
    "attn.o": ("attn.o",),
    "mlp.gate_up": ("mlp.gate", "mlp.up"),
    "mlp.down": ("mlp.down",),
}
"""Matrix in memory -> tensors of the checkpoint, side by side along N."""

_ROW_PARALLEL = ("attn.o", "mlp.down")
MLP_MULTIPLE = 128
"""A shard's MLP width is padded to whole INT4 groups, but of this size at most: larger groups are split instead."""
MIN_GROUP_SIZE = 32
"""Smallest INT4 group that stands in memory as INT4; a matrix that would need smaller ones is dequantized."""


def _columns(parts: list[np.ndarray], widths: list[int], tp: int) -> np.ndarray:
    """Join parts [..., N_p] along N, each zero-padded to its width, so that shard s holds its share of every part."""
    shards = []
    for part, width in zip(parts, widths, strict=True):
        padding = [(0, 0)] * (part.ndim - 1) + [(0, width - part.shape[-1])]
        shards.append(np.pad(part, padding).reshape(*part.shape[:-1], tp, width // tp))
    joined = np.concatenate(shards, axis=-1)  # [..., tp, N / tp]
    return joined.reshape(*joined.shape[:-2], -1)


def _rows(array: np.ndarray, rows: int) -> np.ndarray:
    """Zero-pad the first axis to `rows`."""
    return np.pad(array, [(0, rows - array.shape[0])] + [(0, 0)] * (array.ndim - 1))


def _linear_shape(name: str, config: ModelConfig, sizes: PaddedSizes) -> tuple[int, list[int]]:
    """K in memory, and the padded widths of the parts along N."""
    head = config.head_dim
    match name:
        case "attn.qkv":
            return config.hidden_size, [sizes.heads * head, sizes.kv_heads * head, sizes.kv_heads * head]
        case "attn.o":
            return sizes.heads * head, [config.hidden_size]
        case "mlp.gate_up":
            return config.hidden_size, [sizes.intermediate] * 2
        case _:
            return sizes.intermediate, [config.hidden_size]


def _int4_layouts(source: Source, sizes: PaddedSizes) -> tuple[dict[str, Int4Layout], ...]:
    """For each layer the matrices that stay INT4 in memory, with the group size that they get there.

    A group may not straddle shards, nor may one end ragged; both are mended exactly by repeating scales over smaller
    groups. Parts of a fused matrix share the smallest group size, and one order of rows; where a part is not INT4, or
    their orders differ, the matrix is floating point.
    """
    config, groups, orders = source.info.config, source.info.group_sizes, source.info.permutations
    layouts = []
    for i in range(config.num_layers):
        layer: dict[str, Int4Layout] = {}
        for name, parts in _FUSED.items():
            names = [f"layers.{i}.{part}.weight" for part in parts]
            sizes_on_disk = [groups.get(name) for name in names]
            parts_orders = {orders.get(name) for name in names}
            if None in sizes_on_disk or len(parts_orders) > 1:
                continue
            k, _ = _linear_shape(name, config, sizes)
            k_local = k // sizes.tp if name in _ROW_PARALLEL else k
            group = math.gcd(k_local, *(g for g in sizes_on_disk if g is not None))
            if group >= MIN_GROUP_SIZE:
                layer[name] = Int4Layout(group, permuted=parts_orders != {None})
        layouts.append(layer)
    return tuple(layouts)


class _Reader:
    """Fills the decoder's parameters from a source; keeps the last INT4 matrix's parts, which three arrays share."""

    def __init__(self, source: Source, sizes: PaddedSizes, dtype: Any, int4: tuple[Mapping[str, Int4Layout], ...]):
        self.source, self.sizes, self.dtype, self.int4 = source, sizes, dtype, int4
        self.read = functools.lru_cache(maxsize=3)(source.read)

    def floating(self, name: str) -> np.ndarray:
        """The tensor in the compute dtype."""
        tensor: Tensor = self.read(name)
        array = tensor.dequantize() if isinstance(tensor, Int4Tensor) else tensor
        return array.astype(self.dtype)

    def __call__(self, path: Path, abstract: Any) -> np.ndarray:
        match path:
            case ("embed", "weight"):
                return _rows(self.floating("embed.weight"), self.sizes.vocab)
            case ("head", "weight"):
                return _rows(self.floating("head.weight").T, self.sizes.vocab)
            case ("layers", int(i), block, linear, leaf) if f"{block}.{linear}" in _FUSED:
                return self.linear(i, f"{block}.{linear}", str(leaf))
        return self.floating(".".join(map(str, path)))  # norms

    def linear(self, i: int, name: str, leaf: str) -> np.ndarray:
        """One array of a Linear: weight, bias, packed, scale, offset or permutation."""
        k, widths = _linear_shape(name, self.source.info.config, self.sizes)
        weights = [f"layers.{i}.{part}.weight" for part in _FUSED[name]]
        if leaf == "bias":
            biases = [self.floating(f"layers.{i}.{part}.bias") for part in _FUSED[name]]
            return _columns(biases, widths, self.sizes.tp if name not in _ROW_PARALLEL else 1)
        if leaf == "permutation":
            return _permutation(self.read(weights[0]), k)
        if leaf == "weight":
            parts, rows = [self.floating(w) for w in weights], k
        else:
            group = self.int4[i][name].group_size
            parts = [_int4_leaf(self.read(w), leaf, group) for w in weights]
            rows = k // (8 if leaf == "packed" else group)
        joined = _rows(parts[0], rows) if name in _ROW_PARALLEL else _columns(parts, widths, self.sizes.tp)
        return joined.T if leaf == "weight" else joined


def _int4_leaf(tensor: Tensor, leaf: str, group: int) -> np.ndarray:
    """packed, scale or offset of an INT4 tensor in memory's layout, with scales repeated for a smaller group."""
    assert isinstance(tensor, Int4Tensor)
    if leaf == "packed":
        return tensor.packed
    values = tensor.scales.astype(np.float32) if leaf == "scale" else tensor.offsets()
    k = tensor.shape[0]
    return np.repeat(values, tensor.group_size // group, axis=0)[: -(-k // group)]


def _permutation(tensor: Tensor, rows: int) -> np.ndarray:
    """int32 [rows]: the tensor's permutation, and the rows of padding behind it in their own places."""
    assert isinstance(tensor, Int4Tensor)
    assert tensor.permutation is not None
    return np.concatenate([tensor.permutation, np.arange(len(tensor.permutation), rows, dtype=np.int32)])


def load_model(
    source: Source,
    mesh: Mesh,
    dtype: str,
    *,
    keep_int4: bool,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Model:
    """The checkpoint's model on `mesh`, computing in `dtype` ("float32" or "bfloat16").

    keep_int4=False dequantizes INT4 weights into `dtype` (for backends without an INT4 kernel). progress is called
    with the bytes of each array placed. Memory on the host stays at a few tensors.
    """
    config, tp = source.info.config, mesh.devices.size
    groups = [g for name, g in source.info.group_sizes.items() if ".mlp.down." in name] if keep_int4 else []
    sizes = PaddedSizes.of(config, tp, mlp_multiple=min(max(groups, default=1), MLP_MULTIPLE))
    int4 = _int4_layouts(source, sizes) if keep_int4 else tuple({} for _ in range(config.num_layers))
    compute = jnp.dtype(dtype)
    reader = _Reader(source, sizes, compute, int4)

    def make(path: Path, abstract: Any) -> np.ndarray:
        array = reader(path, abstract)
        progress(array.nbytes)
        return array

    return materialize(
        lambda: Decoder(config, sizes, compute, int4), mesh, make, **decoder_facts(config, sizes, compute)
    )


def decoder_facts(config: ModelConfig, sizes: PaddedSizes, dtype: Any) -> dict[str, Any]:
    """The fields of Model that follow from a decoder's configuration."""
    return {
        "cache": CacheSpec(config.num_layers, sizes.kv_heads, config.head_dim, dtype),
        "vocab_size": config.vocab_size,
        "padded_vocab": sizes.vocab,
        "max_session_len": config.max_session_len,
        "default_session_len": config.max_position_embeddings,
        "page_tag": functools.partial(page_tag, config.rope),
    }
