"""Collectives of code that runs on each device's own part of the arrays (inside `jax.shard_map`).

All explicit communication of the training step is made of these, so that none of it is a surprise: rows of a
tensor-parallel product, weights gathered once and their gradients reduced once, sums over the mesh. Outside a mesh
each of them is the identity.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

DATA, TENSOR = "data", "tensor"
BOTH = (DATA, TENSOR)


def gather_rows(x_Bx: jax.Array, axis: str | None, *, dimension: int = 0) -> jax.Array:
    """The rows (entries along `dimension`) of all devices along the mesh's `axis`, in their order."""
    return x_Bx if axis is None else lax.all_gather(x_Bx, axis, axis=dimension, tiled=True)


def scatter_rows(x_Bx: jax.Array, axis: str | None) -> jax.Array:
    """Sum over the devices along `axis`, of which each keeps its own rows. Transpose of `gather_rows`."""
    return x_Bx if axis is None else lax.psum_scatter(x_Bx, axis, scatter_dimension=0, tiled=True)


def gather_weight(
    shard: jax.Array, spec: PartitionSpec | None, dtype: jnp.dtype, *, keep: str | None = None
) -> jax.Array:
    """A weight in `dtype` from its shards; along the mesh axis `keep` it stays split. `spec` None: not on a mesh."""
    shard = shard.astype(dtype)
    if spec is None:
        return shard
    dimension, axes = _split(spec, keep)
    return lax.all_gather(shard, axes, axis=dimension, tiled=True) if axes else shard


def reduce_gradient(gradient: jax.Array, spec: PartitionSpec | None, *, keep: str | None = None) -> jax.Array:
    """Sum over the devices of a gradient of what `gather_weight` gave, in float32; each keeps its shard's part."""
    gradient = gradient.astype(jnp.float32)
    if spec is None:
        return gradient
    dimension, axes = _split(spec, keep)
    if axes:
        gradient = lax.psum_scatter(gradient, axes, scatter_dimension=dimension, tiled=True)
    others = tuple(name for name in BOTH if name not in axes and name != keep)
    return lax.psum(gradient, others) if others else gradient


def _split(spec: PartitionSpec, keep: str | None) -> tuple[int, tuple[str, ...]]:
    """(the dimension that is split, the mesh axes it is split over but for `keep`)."""
    for dimension, names in enumerate(spec):
        if names is not None:
            names = (names,) if isinstance(names, str) else tuple(names)
            return dimension, tuple(name for name in names if name != keep)
    return 0, ()


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _whole(shard, spec, dtype):
    return gather_weight(shard, spec, dtype)


_whole.defvjp(
    lambda shard, spec, dtype: (gather_weight(shard, spec, dtype), None),
    lambda spec, dtype, _, gradient: (reduce_gradient(gradient, spec),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(shard, ids, spec, dtype):
    if spec is None or not any(spec):
        return shard[ids].astype(dtype)
    return gather_weight(shard, spec, dtype)[ids]


def _lookup_backward(spec, dtype, saved, gradient):
    # In float32 from the first addition: a token's rows are many.
    ids, like = saved
    whole = (like.shape[0], gradient.shape[-1]) if spec is None else _whole_shape(like.shape, spec)
    table = jnp.zeros(whole, jnp.float32).at[ids].add(gradient.astype(jnp.float32))
    return reduce_gradient(table, spec), None


_lookup.defvjp(lambda shard, ids, spec, dtype: (_lookup(shard, ids, spec, dtype), (ids, shard)), _lookup_backward)


def _whole_shape(shape: tuple[int, ...], spec: PartitionSpec) -> tuple[int, ...]:
    dimension, axes = _split(spec, None)
    parts = lax.axis_size(axes) if axes else 1
    return tuple(size * parts if i == dimension else size for i, size in enumerate(shape))


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Where a step's arrays lie, for the code that each device runs. Without arguments: all on one device.

    Attributes:
      specs: a `PartitionSpec` for each variable of the trained model.
      tensor_axis: the mesh axis that frozen weights are split over, None where it has one device.
    """

    specs: nnx.State | None = None
    tensor_axis: str | None = None

    def spec(self, path: tuple) -> PartitionSpec | None:
        """Of the variable at `path`; None off the mesh."""
        return None if self.specs is None else dict(nnx.to_flat_state(self.specs))[path].get_value()

    def vocab_axis(self, path: tuple) -> str | None:
        """The mesh axis that the head at `path` may stay split over, along its vocabulary."""
        spec = self.spec(path)
        return self.tensor_axis if spec is not None and any(spec[:1]) else None

    def whole(self, shards: nnx.State, dtype: jnp.dtype, prefix: tuple = (), *, stacked: bool = False) -> nnx.State:
        """Whole weights from their shards, each gathered once; their gradients are summed over the devices once.

        Args:
          dtype: of the matrices; vectors and integers stay as they are.
          prefix: path of `shards` in the model.
          stacked: `shards` are one entry of variables that are stacked along their first axis.
        """

        def gather(path, variable):
            spec, shard = self.spec(prefix + path), variable.get_value()
            if spec is not None and stacked:
                spec = PartitionSpec(*spec[1:])
            return variable.replace(_whole(shard, spec, dtype if shard.ndim > 1 else shard.dtype))

        return nnx.from_flat_state([(path, gather(path, variable)) for path, variable in nnx.to_flat_state(shards)])

    def lookup(self, shard: jax.Array, ids: jax.Array, path: tuple, dtype: jnp.dtype) -> jax.Array:
        """Rows `ids` in `dtype` of the table at `path`; the gradients of a row add up in float32."""
        return _lookup(shard, ids, self.spec(path), dtype)

    def sum(self, x: jax.Array) -> jax.Array:
        """Over all devices."""
        return x if self.specs is None else lax.psum(x, BOTH)


ONE_DEVICE = Layout()
