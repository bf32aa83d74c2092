"""Small random objectives, and the golden ones, for the tests of this folder and of `tests/training`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from osprey_jax.config import TTT
from osprey_jax.kernels.ttt_attention import attend_unroll
from osprey_jax.models import hf
from osprey_jax.objectives.ttt import Distillation, unroll
from osprey_jax.training.mesh import layout, parameter_shardings

RELEASED = TTT(supervision="released", normalization="sequence", loss_chunk=16)
EXACT = TTT(supervision="exact", normalization="token", loss_chunk=7)


def relative(actual, expected) -> float:
    """Largest difference relative to the largest expected value."""
    return float(np.max(np.abs(np.asarray(actual) - np.asarray(expected))) / np.max(np.abs(np.asarray(expected))))


def golden_objective(golden, weights: str, ttt: TTT, target_ids: np.ndarray | None = None):
    """(objective, params, constants, target parameters) of a golden case with `converted` or perturbed weights.

    With `target_ids` the head is cut to that draft vocabulary.
    """
    target = hf.load_causal_lm(golden / "target")
    drafter = hf.load_drafter(golden / "expected" / "converted")
    if weights != "converted":
        tensors = load_file(golden / "expected" / "ttt" / "perturbed.safetensors")
        for path, parameter in nnx.to_flat_state(nnx.state(drafter, nnx.Param)):
            parameter.set_value(jnp.asarray(tensors[".".join(map(str, path))]))
    if target_ids is not None:
        drafter = trimmed(drafter, target_ids)
    taps = tuple(int(i) for i in np.load(golden / "expected" / "target.npz")["tap_layers"])
    drafter_def, params, constants = nnx.split(drafter, nnx.Param, ...)
    target_def, frozen = nnx.split(target)
    trims, float32 = target_ids is not None, jnp.dtype(jnp.float32)
    return Distillation(drafter_def, target_def, taps, ttt, float32, trims), params, constants, frozen


def on_mesh(objective, params, constants, mesh):
    """`objective` for the parts of arrays that the devices of `mesh` hold."""
    shardings = parameter_shardings(nnx.merge_state(params, constants), mesh, trained=True)
    return dataclasses.replace(objective, layout=layout(shardings, mesh))


def trimmed(drafter, target_ids: np.ndarray):
    """`drafter` with its head cut to `target_ids`."""
    config = dataclasses.replace(drafter.config, draft_vocab_size=len(target_ids))
    small = hf.abstract_drafter(config)
    state = nnx.to_flat_state(nnx.state(small))
    values = dict(nnx.to_flat_state(nnx.state(drafter)))

    def value(path, variable):
        if path == ("target_ids",):
            return variable.replace(jnp.asarray(target_ids, jnp.int32))
        if path == ("lm_head", "weight"):
            return variable.replace(values[path].get_value()[target_ids])
        return values[path]

    nnx.update(small, nnx.from_flat_state([(path, value(path, variable)) for path, variable in state]))
    return small


@functools.partial(jax.jit, static_argnums=0)
def loss_and_grads(objective, params, constants, frozen, batch):
    """((loss, metrics), gradients) of one batch."""
    lessons = objective.teach(constants, frozen, batch)
    weights = objective.weights(batch, lessons)
    loss = lambda params: objective.loss(params, constants, frozen, batch, lessons, weights)
    return jax.value_and_grad(loss, has_aux=True)(params)


@functools.partial(jax.jit, static_argnums=0)
def streams(objective, params, constants, frozen, batch):
    """The un-normed streams of every step, (B, S, H) each."""
    drafter = nnx.merge(objective.drafter_def, params, constants)
    taps = objective.teach(constants, frozen, batch)["taps"]
    return unroll(
        drafter,
        batch,
        taps,
        drafter.embed_tokens(batch["token_ids"], objective.dtype),
        drafter.embed_tokens(np.int32(0), objective.dtype),
        steps=objective.ttt.length,
        attend=attend_unroll(batch["segment_ids"]),
    )


def worst_gradient_error(grads, expected) -> float:
    """Largest error of a gradient relative to its own norm; exact where that is zero."""
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.linalg.norm(a - b) / jnp.maximum(jnp.linalg.norm(b), 1e-20)) for a, b in pairs)
