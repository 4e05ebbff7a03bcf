"""A model that is ready to be called: its structure, its arrays on the mesh, and what the engine must know of it.

Across `jit` go flat tuples of arrays only: dispatching an nnx.Module or nnx.State costs milliseconds a step.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from pallasite.models.decoder import KVCache, TokenBatch
from pallasite.sharding.mesh import sharding, spec


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """The KV pool that a model needs: layers, kv heads (padded for tp), head size, and the dtype of its pages."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: Any

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page of `page_size` tokens, K and V of all layers, over all shards."""
        return 2 * self.layers * self.kv_heads * page_size * self.head_dim * jnp.dtype(self.dtype).itemsize


class CallableModel(Protocol):
    """What the step programs call inside shard_map; models/decoder.py is the real one, tests have a hand-sized one."""

    def __call__(self, batch: TokenBatch, caches: list[KVCache]) -> tuple[jax.Array, list[KVCache]]: ...

    def logits(self, x: jax.Array) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Model:
    """leaves are the arrays in the order of `treedef`; specs their PartitionSpecs. vocab_size is the logical one;
    padded_vocab what `logits` returns. max_session_len: None where the model sets no limit; default_session_len: the
    length that it was made for. page_tag: of a prompt's length, an int that is equal wherever equal tokens have equal K
    and V."""

    graphdef: nnx.GraphDef
    treedef: Any
    leaves: tuple[jax.Array, ...]
    specs: tuple[PartitionSpec, ...]
    mesh: Mesh
    cache: CacheSpec
    vocab_size: int
    padded_vocab: int
    max_session_len: int | None
    default_session_len: int
    page_tag: Callable[[int], int] = lambda prompt_length: 0

    def bind(self, leaves: Sequence[jax.Array]) -> CallableModel:
        """The module over `leaves` (inside a trace: the local shards)."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters, over all shards."""
        return sum(leaf.nbytes for leaf in self.leaves)


Path = tuple[Any, ...]
"""A parameter's place in the module: attribute names and list indices."""


def materialize(
    build: Callable[[], nnx.Module],
    mesh: Mesh,
    make: Callable[[Path, jax.ShapeDtypeStruct], Any],
    **facts: Any,
) -> Model:
    """Build a module abstractly and fill each parameter with `make(path, abstract array)`, placed by its logical axes.

    facts are the remaining fields of Model. Raises ValueError where an array has another shape than the parameter.
    """
    graphdef, state = nnx.split(nnx.eval_shape(build))
    leaves, specs = [], []
    for path, variable in nnx.to_flat_state(state):
        abstract = variable.get_value()
        value = make(path, abstract)
        if value.shape != abstract.shape or value.dtype != abstract.dtype:
            name = ".".join(map(str, path))
            raise ValueError(f"parameter {name}: got {value.dtype}{value.shape}, need {abstract.dtype}{abstract.shape}")
        axes = variable.get_metadata()["axes"]
        leaves.append(jax.device_put(value, sharding(mesh, axes)))
        specs.append(spec(axes))
    treedef = jax.tree.structure(state)
    return Model(graphdef=graphdef, treedef=treedef, leaves=tuple(leaves), specs=tuple(specs), mesh=mesh, **facts)
