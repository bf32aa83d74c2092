"""Collectives of code that each device runs on its own part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from osprey_jax.parallel import BOTH, Layout, gather_rows, gather_weight, reduce_gradient, scatter_rows

P = PartitionSpec
SHARDED = ("tensor", "data")
SPECS = [P(SHARDED, None), P(None, SHARDED), P(None, None), P()]
RNG = np.random.default_rng(0)
WEIGHT = RNG.normal(size=(16, 24)).astype(np.float32)


@pytest.fixture
def mesh():
    return jax.make_mesh((2, 4), BOTH, axis_types=(AxisType.Auto,) * 2)


def on_each(mesh, function, in_specs, out_specs):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def test_identity_off_a_mesh():
    """One device needs no mesh: the same code runs with nothing around it."""
    state = nnx.State({"w": nnx.Param(jnp.asarray(WEIGHT))})
    np.testing.assert_array_equal(Layout().whole(state, jnp.float32)["w"].get_value(), WEIGHT)
    np.testing.assert_array_equal(Layout().sum(jnp.arange(3)), np.arange(3))
    np.testing.assert_array_equal(gather_rows(WEIGHT, None), WEIGHT)
    np.testing.assert_array_equal(scatter_rows(WEIGHT, None), WEIGHT)


@pytest.mark.multidevice
@pytest.mark.parametrize("spec", SPECS)
def test_a_weight_comes_back_whole_and_in_order(mesh, spec):
    """Whatever dimension is split, and with the axes in the order that the shards lie in."""
    whole = on_each(mesh, lambda shard: gather_weight(shard, spec, jnp.float32), spec, P())(WEIGHT)
    np.testing.assert_array_equal(whole, WEIGHT)


@pytest.mark.multidevice
def test_a_weight_stays_split_over_the_kept_axis(mesh):
    """Gathered over `data` alone, each device of `tensor` has one run of the rows."""
    spec = P(SHARDED, None)
    keep = on_each(mesh, lambda shard: gather_weight(shard, spec, jnp.float32, keep="tensor"), spec, P("tensor", None))
    np.testing.assert_array_equal(keep(WEIGHT), WEIGHT)


@pytest.mark.multidevice
@pytest.mark.parametrize(("spec", "keep"), [(spec, None) for spec in SPECS] + [(SPECS[0], "tensor")])
def test_gradients_add_up_over_the_devices(mesh, spec, keep):
    """Each device contributes another multiple; along a kept axis each speaks of its own rows."""

    def contribution(shard):
        n = jax.lax.axis_index(BOTH).astype(jnp.float32)
        return reduce_gradient(n * gather_weight(shard, spec, jnp.float32, keep=keep), spec, keep=keep)

    total = np.asarray(on_each(mesh, contribution, spec, spec)(WEIGHT))
    devices = np.arange(8).reshape(2, 4)  # data x tensor
    scale = devices.sum() if keep is None else np.repeat(devices.sum(axis=0), 4)[:, None]
    np.testing.assert_allclose(total, WEIGHT * scale, rtol=1e-6)


@pytest.mark.multidevice
@pytest.mark.parametrize("spec", SPECS)
def test_looked_up_rows_and_their_gradient(mesh, spec):
    """Rows of the whole table for each device's ids; gradients of one token on all devices meet in its row."""
    state = nnx.State({"table": nnx.Param(WEIGHT)})
    layout = Layout(jax.tree.map(lambda _: spec, state), "tensor")
    ids = RNG.integers(0, 16, (8, 5)).astype(np.int32)
    scale = RNG.normal(size=(8, 5, 24)).astype(np.float32)

    def loss(shard, ids, scale):
        rows = layout.lookup(shard, ids, ("table",), jnp.float32)
        return jnp.sum(rows * scale), rows

    gradient = jax.value_and_grad(loss, has_aux=True)
    (_, rows), grad = on_each(mesh, gradient, (spec, P(BOTH), P(BOTH)), ((P(), P(BOTH)), spec))(WEIGHT, ids, scale)
    expected = np.zeros_like(WEIGHT)
    np.add.at(expected, ids, scale)
    np.testing.assert_array_equal(rows, WEIGHT[ids])
    np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("on_mesh", [False, True])
def test_a_table_s_gradient_adds_up_in_float32(on_mesh):
    """Of a table read in bfloat16: 1000 times 1 in one row would stop at 256 there."""
    state = nnx.State({"table": nnx.Param(jnp.zeros((2, 3)))})
    layout = Layout(jax.tree.map(lambda _: P(SHARDED), state)) if on_mesh else Layout()
    ids = jnp.zeros(1000, jnp.int32)
    gradient = jax.grad(lambda table: jnp.sum(layout.lookup(table, ids, ("table",), jnp.bfloat16), dtype=jnp.float32))
    if on_mesh:
        one = jax.make_mesh((1, 1), BOTH, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])
        gradient = on_each(one, gradient, P(SHARDED), P(SHARDED))
    np.testing.assert_array_equal(gradient(jnp.zeros((2, 3)))[0], 1000.0)


@pytest.mark.multidevice
def test_whole_sums_matrices_and_vectors(mesh):
    """A matrix is gathered and its gradient scattered, a vector is everywhere and its gradient summed."""
    state = nnx.State({"w": nnx.Param(WEIGHT), "v": nnx.Param(WEIGHT[0])})
    specs = jax.tree.map(lambda leaf: P(SHARDED) if leaf.ndim == 2 else P(), state)
    layout = Layout(specs)

    def loss(state):
        whole = layout.whole(state, jnp.bfloat16)
        assert whole["w"].get_value().dtype == jnp.bfloat16 and whole["v"].get_value().dtype == jnp.float32
        return sum(jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(whole))

    grads = on_each(mesh, jax.grad(loss), (specs,), specs)(state)
    for leaf in jax.tree.leaves(grads):
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(leaf, 8.0)


@pytest.mark.multidevice
def test_rows_there_and_back(mesh):
    """Gathered rows come in the order of the axis; scattered ones are summed over it, each to its own device."""
    x = RNG.normal(size=(8, 3)).astype(np.float32)
    there = on_each(mesh, lambda x: gather_rows(x, "tensor"), P(BOTH), P("data"))(x)
    np.testing.assert_array_equal(there, x)
    back = on_each(mesh, lambda x: scatter_rows(x, "tensor"), P("data"), P(BOTH))(x)
    np.testing.assert_allclose(back, 4 * x, rtol=1e-6)
    assert NamedSharding(mesh, P(BOTH)).is_equivalent_to(back.sharding, 2)
