"""What a step changes, and the step. Axes: A accumulated parts, B rows of a part, S sequence, K TTT steps."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from osprey_jax.objectives.objective import Objective
from osprey_jax.training.mesh import replicated, rows_over


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that resuming needs beside the config: nothing in a step is random."""

    step: jax.Array  # int32, updates made
    params: nnx.State  # float32 masters
    constants: nnx.State  # parts of the trained model that are not trained: a frozen embedding, a vocabulary map
    opt_state: Any


def new_state(params: nnx.State, constants: nnx.State, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first update."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(params, constants, optimizer))
    opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(params)
    return TrainState(jax.device_put(jnp.int32(0), shardings.step), params, constants, opt_state)


def abstract_state(params: nnx.State, constants: nnx.State, optimizer: optax.GradientTransformation) -> TrainState:
    """Shapes, dtypes and shardings of a state, from arrays or from abstract values that carry their shardings.

    Moments are sharded as their parameters.
    """

    def abstract(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params, constants = jax.tree.map(lambda x: abstract(x, x.sharding), (params, constants))
    whole = replicated(jax.tree.leaves(params)[0].sharding.mesh)
    opt_state = optax.tree.map_params(
        optimizer,
        lambda moment, parameter: abstract(moment, parameter.sharding),
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda x: abstract(x, whole),
    )
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32, sharding=whole), params, constants, opt_state)


def make_train_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    state: TrainState,
    frozen: Any,
) -> Callable[[TrainState, Any, dict], tuple[TrainState, dict]]:
    """The compiled update: (state, frozen, batch of arrays (A, B, S)) -> (state, metrics). The state is donated.

    Each device computes gradients on its own rows, with explicit collectives; the optimizer is elementwise on the
    shards but for the gradient's norm, and is left to the partitioner.

    Args:
      state, frozen: of the step's arguments, or abstract values with their shardings.
    """
    specs = _specs((state.params, state.constants, frozen))
    gradients = jax.shard_map(
        functools.partial(_gradients, objective),
        mesh=mesh,
        in_specs=(*specs, rows_over(mesh, leading=1).spec),
        out_specs=(specs[0], PartitionSpec()),
        check_vma=False,
    )
    shardings = jax.tree.map(lambda x: x.sharding, state)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(shardings, replicated(mesh)))
    def train_step(state: TrainState, frozen: Any, batch_AxBxS: dict[str, jax.Array]):
        grads, metrics = gradients(state.params, state.constants, frozen, batch_AxBxS)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics["grad_norm"] = optax.tree.norm(grads)
        return TrainState(state.step + 1, params, state.constants, opt_state), metrics

    return train_step


def make_eval_step(
    objective: Objective, mesh: jax.sharding.Mesh, state: TrainState, frozen: Any
) -> Callable[[TrainState, Any, dict], dict]:
    """Sums over one batch of arrays (B, S), without an update. No `loss`: it would depend on the batch's size."""
    metrics = jax.shard_map(
        functools.partial(_metrics, objective),
        mesh=mesh,
        in_specs=(*_specs((state.params, state.constants, frozen)), rows_over(mesh).spec),
        out_specs=PartitionSpec(),
        check_vma=False,
    )

    @jax.jit
    def eval_step(state: TrainState, frozen: Any, batch: dict[str, jax.Array]):
        return metrics(state.params, state.constants, frozen, batch)

    return eval_step


def _specs(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding.spec, tree)


# ---- on each device


def _gradients(objective: Objective, params, constants, frozen, batch_AxBxS) -> tuple[nnx.State, dict]:
    """(gradients of this device's shards, summed over all devices; metrics of the global batch)."""
    teach = functools.partial(objective.teach, constants, frozen)
    # Kept for all parts only where the weights depend on them, which are the global batch's.
    lessons = jax.lax.map(teach, batch_AxBxS) if objective.weights_need_lessons else None
    weights = _weights(objective, batch_AxBxS, lessons)

    def add_part(grads, part):
        batch, part_weights, part_lessons = part
        part_lessons = teach(batch) if part_lessons is None else part_lessons
        loss = lambda params: objective.loss(params, constants, frozen, batch, part_lessons, part_weights)
        (_, metrics), part_grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(jnp.add, grads, part_grads), metrics

    zeros = jax.tree.map(jnp.zeros_like, params)
    grads, metrics = jax.lax.scan(add_part, zeros, (batch_AxBxS, weights, lessons))
    return grads, objective.layout.sum(jax.tree.map(lambda x: jnp.sum(x, axis=0), metrics))


def _metrics(objective: Objective, params, constants, frozen, batch) -> dict:
    lessons = objective.teach(constants, frozen, batch)
    weights = objective.weights(batch, lessons)
    _, metrics = objective.loss(params, constants, frozen, batch, lessons, weights)
    return {name: value for name, value in objective.layout.sum(metrics).items() if name != "loss"}


def _weights(objective: Objective, batch_AxBxS: dict, lessons: Any) -> jax.Array:
    """Weights of all parts together, as their normalisers are the global batch's; returned by part, (A, .., B, S)."""
    parts, rows = jax.tree.leaves(batch_AxBxS)[0].shape[:2]
    joined = jax.tree.map(lambda x: x.reshape(parts * rows, *x.shape[2:]), (batch_AxBxS, lessons))
    weights = objective.weights(*joined)
    return jnp.moveaxis(weights.reshape(*weights.shape[:-2], parts, rows, weights.shape[-1]), -3, 0)
