"""The device mesh and the one table that maps logical axes to mesh axes (Megatron tensor parallelism).

Every array of a model names its axes logically ("vocab", "heads", ...); this table alone says which of them are cut
over the mesh. Loading, the step programs and the KV pool all read their shardings from here.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TP = "tp"
"""Name of the tensor-parallel mesh axis; collectives inside the step programs use it."""

LOGICAL_TO_MESH: dict[str, str | None] = {
    "vocab": TP,  # embedding rows and head columns
    "qkv": TP,  # fused q, k, v columns, by whole kv groups
    "heads": TP,  # rows of the output projection
    "kv_heads": TP,  # the KV pool
    "gate_up": TP,  # fused gate and up columns
    "mlp": TP,  # rows of the down projection
    "embed": None,  # the residual stream is replicated
    "pages": None,
    "page": None,
    "head_dim": None,
}


def make_mesh(tp: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A one-axis mesh of `tp` devices (the first ones of `devices`, by default all that JAX sees).

    Raises ValueError if fewer than `tp` devices are there.
    """
    devices = list(jax.devices()) if devices is None else list(devices)
    if not 1 <= tp <= len(devices):
        hint = " (XLA_FLAGS=--xla_force_host_platform_device_count=N gives N)" if devices[0].platform == "cpu" else ""
        raise ValueError(f"tp is {tp}; it must lie in 1..{len(devices)}, the {devices[0].platform} devices here{hint}")
    return Mesh(np.asarray(devices[:tp]), (TP,))


def spec(axes: Sequence[str | None]) -> PartitionSpec:
    """PartitionSpec of an array with these logical axes.

    Raises ValueError if a mesh axis would be used twice, KeyError for an unknown logical axis.
    """
    mesh_axes = [None if a is None else LOGICAL_TO_MESH[a] for a in axes]
    used = [a for a in mesh_axes if a is not None]
    if len(used) != len(set(used)):
        raise ValueError(f"logical axes {tuple(axes)} use a mesh axis twice: {mesh_axes}")
    return PartitionSpec(*mesh_axes)


def sharding(mesh: Mesh, axes: Sequence[str | None]) -> NamedSharding:
    """NamedSharding on `mesh` of an array with these logical axes."""
    return NamedSharding(mesh, spec(axes))


def replicated(mesh: Mesh) -> NamedSharding:
    """NamedSharding that keeps a whole copy on every device of `mesh`."""
    return NamedSharding(mesh, PartitionSpec())
