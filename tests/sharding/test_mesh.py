"""The mesh, and the one table of logical axes."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pallasite.sharding.mesh import LOGICAL_TO_MESH, TP, make_mesh, replicated, sharding, spec


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_mesh_takes_the_first_devices(tp):
    mesh = make_mesh(tp)
    assert mesh.axis_names == (TP,)
    assert list(mesh.devices) == jax.devices()[:tp]


def test_mesh_of_given_devices():
    assert list(make_mesh(2, jax.devices()[4:]).devices) == jax.devices()[4:6]


@pytest.mark.parametrize("tp", [0, -1, 9])
def test_mesh_that_cannot_be_names_value_and_limit(tp):
    with pytest.raises(ValueError, match=rf"tp is {tp}; it must lie in 1\.\.8, the cpu devices here .*XLA_FLAGS"):
        make_mesh(tp)


def test_every_logical_axis_means_a_mesh_axis_or_none():
    assert set(LOGICAL_TO_MESH.values()) <= {TP, None}


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (("vocab", "embed"), PartitionSpec(TP, None)),
        (("embed", "qkv"), PartitionSpec(None, TP)),
        (("heads", "embed"), PartitionSpec(TP, None)),
        (("embed", "gate_up"), PartitionSpec(None, TP)),
        (("mlp", "embed"), PartitionSpec(TP, None)),
        (("pages", "kv_heads", "page", "head_dim"), PartitionSpec(None, TP, None, None)),
        ((None, "vocab"), PartitionSpec(None, TP)),
        ((), PartitionSpec()),
    ],
)
def test_spec(axes, expected):
    """Megatron: columns of qkv and gate-up, rows of o and down, vocabulary rows, kv heads of the cache."""
    assert spec(axes) == expected


def test_a_mesh_axis_used_twice_is_refused():
    with pytest.raises(ValueError, match=r"\('heads', 'mlp'\) use a mesh axis twice"):
        spec(("heads", "mlp"))


def test_an_unknown_logical_axis_is_refused():
    with pytest.raises(KeyError, match="headz"):
        spec(("embed", "headz"))


def test_arrays_are_cut_as_the_table_says():
    mesh = make_mesh(4)
    array = jax.device_put(np.arange(32).reshape(4, 8), sharding(mesh, ("embed", "mlp")))
    assert [s.data.shape for s in array.addressable_shards] == [(4, 2)] * 4
    np.testing.assert_array_equal(array.addressable_shards[1].data, np.arange(32).reshape(4, 8)[:, 2:4])
    whole = jax.device_put(np.arange(4), replicated(mesh))
    assert isinstance(whole.sharding, NamedSharding)
    assert [s.data.shape for s in whole.addressable_shards] == [(4,)] * 4
