"""The mesh, and the one table from a parameter's logical axes to the mesh's.

Mesh axes: `data` and `tensor`. A frozen model is tensor-parallel; a trained one is fully sharded over both axes along
its model width, so that masters and moments take 1/devices of their size each.
"""

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from osprey_jax.command import UserError
from osprey_jax.config import Mesh

BOTH = ("data", "tensor")

# logical axis: (of a frozen model, of a trained one)
TABLE: dict[str, tuple[str | None, tuple[str, str] | None]] = {
    "vocab": ("tensor", None),
    "heads": ("tensor", None),
    "mlp": ("tensor", None),
    "embed": (None, BOTH),
    "taps": (None, None),
    "norm": (None, None),
}


def make_mesh(config: Mesh, rows: int) -> jax.sharding.Mesh:
    """A mesh over all devices for parts of a batch of `rows`.

    Raises:
      UserError: the axes do not multiply to the number of devices, or the devices do not divide the rows.
    """
    devices = jax.device_count()
    if config.data is None and devices % config.tensor:
        raise UserError(f"mesh.tensor {config.tensor} does not divide the {devices} device(s) of this machine")
    data = devices // config.tensor if config.data is None else config.data
    if data * config.tensor != devices:
        raise UserError(f"mesh: data {data} x tensor {config.tensor} is not the {devices} device(s) of this machine")
    if rows % devices:
        raise UserError(
            f"batch_size / accumulation is {rows} rows, which {devices} devices do not divide; "
            f"use a multiple of {devices} (or fewer devices)"
        )
    return jax.make_mesh((data, config.tensor), BOTH, axis_types=(AxisType.Auto, AxisType.Auto))


def parameter_shardings(state: nnx.State, mesh: jax.sharding.Mesh, *, trained: bool) -> nnx.State:
    """A `NamedSharding` for each variable of an abstract state, of the same structure.

    A dimension that its mesh axes do not divide stays whole: small models on many devices lose memory, not numbers.
    """

    def sharding(variable):
        axes = variable.get_metadata().get("axes", ())  # a vocabulary map has none
        shape = variable.shape
        axes = (None,) * (len(shape) - len(axes)) + tuple(axes)  # stacked over layers: one more in front
        spec = [_mesh_axes(axis, size, mesh, trained) for axis, size in zip(axes, shape, strict=True)]
        used = [name for entry in spec if entry for name in ((entry,) if isinstance(entry, str) else entry)]
        if len(used) != len(set(used)):
            raise ValueError(f"logical axes {axes} map to one mesh axis twice: {spec}")
        return variable.replace(NamedSharding(mesh, PartitionSpec(*spec)))

    return nnx.from_flat_state([(path, sharding(variable)) for path, variable in nnx.to_flat_state(state)])


def _mesh_axes(axis: str | None, size: int, mesh: jax.sharding.Mesh, trained: bool):
    names = None if axis is None else TABLE[axis][trained]
    if names is None:
        return None
    parts = np.prod([mesh.shape[name] for name in ((names,) if isinstance(names, str) else names)])
    return names if size % parts == 0 else None


def with_shardings(state: nnx.State, shardings: nnx.State) -> nnx.State:
    """An abstract state whose leaves carry their shardings (what restoring needs)."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def rows_over(mesh: jax.sharding.Mesh, axes: str | tuple[str, ...], *, leading: int = 0) -> NamedSharding:
    """Rows over `axes`, with `leading` whole axes in front of them."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * leading, axes))
