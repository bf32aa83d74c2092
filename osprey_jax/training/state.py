"""What a step changes, and the step. Axes: A accumulated parts, B rows of a part, S sequence, K TTT steps."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from osprey_jax.objectives.objective import Objective
from osprey_jax.training.mesh import BOTH, parameter_shardings, replicated, rows_over


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
    objective: Objective, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> Callable[[TrainState, Any, dict], tuple[TrainState, dict]]:
    """The compiled update: (state, frozen, batch of arrays (A, B, S)) -> (state, metrics). The state is donated.

    What the frozen side says of all A parts is kept until each has had its turn, since their weights depend on it.
    """
    teach, weigh, gather = _teach(objective, mesh), _weigh(objective), _gather(mesh)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, frozen: Any, batch_AxBxS: dict[str, jax.Array]):
        lessons = jax.lax.map(lambda part: teach(state.constants, frozen, part), batch_AxBxS)
        weights = weigh(batch_AxBxS, lessons)

        def loss(params, part):
            return objective.loss(gather(params), state.constants, frozen, *part)

        def add_part(grads, part):
            (_, metrics), part_grads = jax.value_and_grad(loss, has_aux=True)(state.params, part)
            return jax.tree.map(jnp.add, grads, part_grads), metrics

        zeros = jax.tree.map(jnp.zeros_like, state.params)
        grads, metrics = jax.lax.scan(add_part, zeros, (batch_AxBxS, lessons, weights))
        metrics = jax.tree.map(lambda x: jnp.sum(x, axis=0), metrics)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics["grad_norm"] = optax.tree.norm(grads)
        return TrainState(state.step + 1, params, state.constants, opt_state), metrics

    return train_step


def make_eval_step(objective: Objective, mesh: jax.sharding.Mesh) -> Callable[[TrainState, Any, dict], dict]:
    """Sums over one batch of arrays (B, S), without an update. No `loss`: it would depend on the batch's size."""
    teach, weigh, gather = _teach(objective, mesh), _weigh(objective), _gather(mesh)

    @jax.jit
    def eval_step(state: TrainState, frozen: Any, batch: dict[str, jax.Array]):
        lessons = teach(state.constants, frozen, batch)
        weights = weigh(*jax.tree.map(lambda x: x[None], (batch, lessons)))[0]
        _, metrics = objective.loss(gather(state.params), state.constants, frozen, batch, lessons, weights)
        return {name: value for name, value in metrics.items() if name != "loss"}

    return eval_step


def _teach(objective: Objective, mesh: jax.sharding.Mesh) -> Callable:
    """The frozen side reads rows over `data` alone, since its weights are split over `tensor`."""

    def teach(constants, frozen, batch):
        batch = jax.lax.with_sharding_constraint(batch, rows_over(mesh, "data"))
        lessons = jax.lax.stop_gradient(objective.teach(constants, frozen, batch))
        return jax.lax.with_sharding_constraint(lessons, rows_over(mesh, BOTH))

    return teach


def _gather(mesh: jax.sharding.Mesh) -> Callable[[nnx.State], nnx.State]:
    """Whole weights from their shards before they are used, and shards of the gradients after.

    Left to itself, the partitioner may split a product along the sharded width instead, and then every device holds
    the logits of every row.
    """

    def gather(params):
        return jax.lax.with_sharding_constraint(params, replicated(mesh))

    def backward(_, grads):
        return (jax.lax.with_sharding_constraint(grads, parameter_shardings(grads, mesh, trained=True)),)

    gather = jax.custom_vjp(gather)
    gather.defvjp(lambda params: (gather(params), None), backward)
    return gather


def _weigh(objective: Objective) -> Callable:
    """Weights of all parts together, as their normalisers are the global batch's; returned by part, (A, .., B, S)."""

    def weigh(batch_AxBxS, lessons):
        parts, rows = jax.tree.leaves(batch_AxBxS)[0].shape[:2]
        joined = jax.tree.map(lambda x: x.reshape(parts * rows, *x.shape[2:]), (batch_AxBxS, lessons))
        weights = objective.weights(*joined)
        return jnp.moveaxis(weights.reshape(*weights.shape[:-2], parts, rows, weights.shape[-1]), -3, 0)

    return weigh
