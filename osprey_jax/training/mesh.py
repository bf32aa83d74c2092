"""The mesh, and the one table from a parameter's logical axes to the mesh's.

Mesh axes: `data` and `tensor`. A frozen model is tensor-parallel. A trained one is fully sharded over both axes, so
that masters and moments take 1/devices of their size each: along the first of its dimensions that the devices divide,
of which each device then holds rows that lie together in memory.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from osprey_jax import config
from osprey_jax.command import UserError
from osprey_jax.models.transformer import TransformerConfig
from osprey_jax.parallel import BOTH, DATA, TENSOR, Layout

# logical axis: (mesh axis of a frozen model, whether a trained one may be split along it)
TABLE: dict[str, tuple[str | None, bool]] = {
    "vocab": (TENSOR, True),
    "heads": (TENSOR, True),
    "mlp": (TENSOR, True),
    "embed": (None, True),
    "taps": (None, True),
    "norm": (None, False),
}

SHARDED = (TENSOR, DATA)  # in this order: what is left of a head gathered over `data` is a run of the vocabulary


def make_mesh(mesh: config.Mesh, rows: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over all devices (or `devices`) for parts of a batch of `rows`.

    Raises:
      UserError: the axes do not multiply to the number of devices, or the devices do not divide the rows.
    """
    count = jax.device_count() if devices is None else len(devices)
    if mesh.data is None and count % mesh.tensor:
        raise UserError(f"mesh.tensor {mesh.tensor} does not divide the {count} device(s)")
    data = count // mesh.tensor if mesh.data is None else mesh.data
    if data * mesh.tensor != count:
        raise UserError(f"mesh: data {data} x tensor {mesh.tensor} is not the {count} device(s)")
    if rows % count:
        raise UserError(
            f"batch_size / accumulation is {rows} rows, which {count} devices do not divide; "
            f"use a multiple of {count} (or fewer devices)"
        )
    shape, axis_types = (data, mesh.tensor), (AxisType.Auto, AxisType.Auto)
    if devices is None:
        return jax.make_mesh(shape, BOTH, axis_types=axis_types)
    return Mesh(np.array(devices).reshape(shape), BOTH, axis_types=axis_types)


def check_splits(model: TransformerConfig, mesh: Mesh, where: str) -> None:
    """`UserError` where `tensor` does not divide what a frozen model is split along."""
    tensor = mesh.shape[TENSOR]
    sizes = {
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
    }
    for name, size in sizes.items():
        if size % tensor:
            raise UserError(
                f"mesh.tensor {tensor} does not divide {name} {size} of {where}; use a divisor of all of "
                f"{', '.join(map(str, sizes.values()))}"
            )


def parameter_shardings(state: nnx.State, mesh: Mesh, *, trained: bool) -> nnx.State:
    """A `NamedSharding` for each variable of an abstract state, of the same structure.

    A trained parameter of which the devices divide no dimension stays whole, which costs memory and changes no number:
    see `whole_notes`.
    """

    def sharding(variable):
        axes = variable.get_metadata().get("axes", ())  # a vocabulary map has none
        axes = (None,) * (len(variable.shape) - len(axes)) + tuple(axes)  # stacked over layers: one more in front
        spec = _trained(axes, variable.shape, mesh.size) if trained else _frozen(axes, variable.shape, mesh)
        return variable.replace(NamedSharding(mesh, PartitionSpec(*spec)))

    return nnx.from_flat_state([(path, sharding(variable)) for path, variable in nnx.to_flat_state(state)])


def _trained(axes: tuple[str | None, ...], shape: tuple[int, ...], devices: int) -> list[tuple[str, str] | None]:
    for i, (axis, size) in enumerate(zip(axes, shape, strict=True)):
        if axis is not None and TABLE[axis][1] and size % devices == 0:
            return [None] * i + [SHARDED]
    return []


def _frozen(axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh) -> list[str | None]:
    spec = [None if axis is None else TABLE[axis][0] for axis in axes]
    for axis, size, name in zip(axes, shape, spec, strict=True):
        if name is not None and size % mesh.shape[name]:
            raise ValueError(f"{name} {mesh.shape[name]} does not divide {axis} {size}")
    if sum(name is not None for name in spec) > 1:
        raise ValueError(f"logical axes {axes} map to one mesh axis twice: {spec}")
    return spec


def whole_notes(shardings: nnx.State, state: nnx.State) -> list[str]:
    """A line for the reader of the log where matrices of a trained model stay whole on every device."""
    specs = dict(nnx.to_flat_state(shardings))
    splits = lambda variable: any(
        axis is not None and TABLE[axis][1] for axis in variable.get_metadata().get("axes", ())
    )
    whole = [
        (".".join(map(str, path)), variable)
        for path, variable in nnx.to_flat_state(state)
        if len(variable.shape) > 1 and splits(variable) and not any(specs[path].get_value().spec)
    ]
    if not whole:
        return []
    devices = jax.tree.leaves(shardings)[0].mesh.size
    names = ", ".join(name for name, _ in whole[:3]) + (f" and {len(whole) - 3} more" if len(whole) > 3 else "")
    size = sum(math.prod(variable.shape) for _, variable in whole)
    return [f"whole on every device, since {devices} devices divide no dimension: {names} ({size:,} parameters)"]


def layout(shardings: nnx.State, mesh: Mesh) -> Layout:
    """What code on each device must know of a trained model's shardings."""
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    return Layout(specs, TENSOR if mesh.shape[TENSOR] > 1 else None)


def with_shardings(state: nnx.State, shardings: nnx.State) -> nnx.State:
    """An abstract state whose leaves carry their shardings (what restoring needs)."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def rows_over(mesh: Mesh, *, leading: int = 0) -> NamedSharding:
    """Rows over all devices, with `leading` whole axes in front of them."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * leading, BOTH))
