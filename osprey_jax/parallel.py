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


def gather_rows(x_Bx: jax.Array, axis: str | None) -> jax.Array:
    """The rows (leading axis) of all devices along the mesh's `axis`, in their order."""
    return x_Bx if axis is None else lax.all_gather(x_Bx, axis, axis=0, tiled=True)


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


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the variables of a trained model lie on the mesh: a `PartitionSpec` each. None: not on a mesh."""

    specs: nnx.State | None = None

    def spec(self, *path: str | int) -> PartitionSpec | None:
        """Of the variable at `path`."""
        return None if self.specs is None else dict(nnx.to_flat_state(self.specs))[path].get_value()

    def whole(self, shards: nnx.State, dtype: jnp.dtype) -> nnx.State:
        """Whole weights from their shards, each gathered once; their gradients are summed over the devices once.

        Matrices come in `dtype`; vectors, which are kept whole, and integers as they are.
        """
        flat = nnx.to_flat_state(shards)
        return nnx.from_flat_state(
            [
                (path, v.replace(_whole(v.get_value(), self.spec(*path), dtype if v.ndim > 1 else v.dtype)))
                for path, v in flat
            ]
        )

    def sum(self, x: jax.Array) -> jax.Array:
        """Over all devices."""
        return x if self.specs is None else lax.psum(x, BOTH)
