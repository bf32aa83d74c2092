"""What the backward pass computes again changes memory, never a number."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from osprey_jax.models import hf
from osprey_jax.objectives.next_token import NextToken
from tests.conftest import GOLDEN, load_batch
from tests.objectives.cases import RELEASED, golden_objective, loss_and_grads, relative, worst_gradient_error


def checkpoints(function, *arguments) -> int:
    """How many parts of `function` are computed again in its backward pass."""
    return str(jax.make_jaxpr(function)(*arguments)).count("remat2[")


@pytest.mark.parametrize("remat", ["mlp", "layer", "step"])
def test_of_the_unroll(remat):
    """Each MLP, each layer of each step, or each step."""
    ttt = RELEASED.model_copy(update={"length": 2})
    objective, *state = golden_objective(GOLDEN / "qwen3", "perturbed", ttt)
    batch = load_batch(GOLDEN / "qwen3")
    (loss, _), grads = loss_and_grads(dataclasses.replace(objective, remat=remat), *state, batch)
    (expected, _), expected_grads = loss_and_grads(objective, *state, batch)
    assert relative(loss, expected) < 1e-6
    assert worst_gradient_error(grads, expected_grads) < 1e-5

    def forward(params):
        lessons = objective.teach(*state[1:], batch)
        weights = objective.weights(batch, lessons)
        return dataclasses.replace(objective, remat=remat).loss(params, *state[1:], batch, lessons, weights)[0]

    layers = len(hf.load_drafter(GOLDEN / "qwen3" / "expected" / "converted").layers)
    assert checkpoints(forward, state[0]) == {"mlp": 2 * layers, "layer": 2 * layers, "step": 2}[remat]


@pytest.mark.parametrize("remat", ["mlp", "layer"])
def test_of_the_backbone(remat):
    model_def, params, constants = nnx.split(hf.load_causal_lm(GOLDEN / "llama" / "target"), nnx.Param, ...)
    batch = load_batch(GOLDEN / "llama")

    def gradients(remat):
        objective = NextToken(model_def, jnp.dtype(jnp.float32), 16, remat=remat)
        weights = objective.weights(batch, None)
        loss = lambda params: objective.loss(params, constants, None, batch, None, weights)[0]
        return jax.jit(jax.value_and_grad(loss))(params), checkpoints(loss, params)

    (loss, grads), parts = gradients(remat)
    (expected, expected_grads), none = gradients("none")
    assert relative(loss, expected) < 1e-6
    assert worst_gradient_error(grads, expected_grads) < 1e-5
    assert none == 0 and parts > 0
