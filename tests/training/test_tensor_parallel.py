"""The training step on meshes and models that the golden cases do not reach: against one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

from osprey_jax.config import TTT
from osprey_jax.models.causal_lm import CausalLM
from osprey_jax.models.drafter import Drafter, DrafterConfig, trained_variables
from osprey_jax.models.transformer import TransformerConfig
from osprey_jax.objectives.next_token import NextToken
from osprey_jax.objectives.ttt import Distillation
from osprey_jax.parallel import BOTH
from osprey_jax.training.mesh import parameter_shardings, rows_over, whole_notes
from osprey_jax.training.state import make_train_step, new_state
from tests.objectives.cases import on_mesh, worst_gradient_error

TARGET = TransformerConfig(
    vocab_size=64,
    hidden_size=24,
    intermediate_size=32,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=4,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    qk_norm=False,
    attention_bias=True,
    mlp_bias=True,
    tie_word_embeddings=True,
    initializer_range=0.5,
    max_position_embeddings=64,
)
SMALL = dataclasses.replace(TARGET, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, qk_norm=True)
ROWS, LENGTH = 16, 12


def scattered(model: nnx.Module) -> nnx.Module:
    """With every norm and bias far from where it starts: near 1 and 0 they hide errors."""
    rng = np.random.default_rng(3)
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if variable.get_metadata()["axes"] == ("norm",) or len(variable.get_metadata()["axes"]) == 1:
            variable.set_value(jnp.asarray(rng.uniform(0.3, 2.0, variable.shape), jnp.float32))
    return model


def distillation(draft_vocab_size: int, swap: bool = True, **ttt):
    """(objective, params, constants, target's parameters)."""
    config = DrafterConfig(SMALL, TARGET.hidden_size, draft_vocab_size, swap, (0, 1, 2))
    drafter, target = scattered(Drafter(config, rngs=nnx.Rngs(1))), scattered(CausalLM(TARGET, rngs=nnx.Rngs(2)))
    if config.trims_vocabulary:
        ids = np.sort(np.random.default_rng(4).permutation(64)[:draft_vocab_size])
        drafter.target_ids.set_value(jnp.asarray(ids, jnp.int32))
    drafter_def, params, constants = nnx.split(drafter, trained_variables(config), ...)
    target_def, frozen = nnx.split(target)
    ttt = TTT(length=3, loss_chunk=5, **ttt)
    trims = config.trims_vocabulary
    objective = Distillation(drafter_def, target_def, (0, 1, 2), ttt, jnp.dtype(jnp.float32), trims)
    return objective, params, constants, frozen


def pretraining(tied: bool):
    config = dataclasses.replace(SMALL, tie_word_embeddings=tied)
    model_def, params, constants = nnx.split(scattered(CausalLM(config, rngs=nnx.Rngs(5))), nnx.Param, ...)
    return NextToken(model_def, jnp.dtype(jnp.float32), 5), params, constants, None


def rows() -> dict[str, np.ndarray]:
    """Packed rows, some with padding, one empty."""
    rng = np.random.default_rng(6)
    segments = np.sort(rng.integers(0, 4, (ROWS, LENGTH)), axis=1)[:, ::-1].copy()
    segments[3] = 0
    segments = np.where(segments > 0, 4 - segments, 0)
    positions = np.array([[i - np.argmax(row == row[i]) for i in range(LENGTH)] for row in segments])
    real = segments > 0
    arrays = {
        "token_ids": rng.integers(1, 64, (ROWS, LENGTH)) * real,
        "loss_mask": (rng.random((ROWS, LENGTH)) > 0.3) & real,
        "segment_ids": segments,
        "positions": positions * real,
    }
    return {name: array.astype(np.int32) for name, array in arrays.items()}


def step(case, shape, parts: int):
    """(metrics, gradients) of the training step on a mesh."""
    objective, params, constants, frozen = case
    mesh = jax.make_mesh(shape, BOTH, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: np.prod(shape)])
    objective = on_mesh(objective, params, constants, mesh)

    def place(state, trained):  # a copy: the step takes its buffers
        return jax.device_put(jax.tree.map(np.array, state), parameter_shardings(state, mesh, trained=trained))

    optimizer = optax.trace(decay=0.0)  # keeps the gradients
    state = new_state(place(params, True), place(constants, True), optimizer)
    frozen = None if frozen is None else place(frozen, False)
    count = np.prod(shape) * parts
    batch = {name: np.zeros((-(-ROWS // count) * count, LENGTH), np.int32) for name in rows()}
    for name, array in rows().items():
        batch[name][:ROWS] = array
    batch = {name: array.reshape(parts, -1, LENGTH) for name, array in batch.items()}
    batch = jax.device_put(batch, rows_over(mesh, leading=1))
    state, metrics = make_train_step(objective, optimizer, mesh, state, frozen)(state, frozen, batch)
    return jax.device_get(metrics), jax.device_get(state.opt_state.trace)


CASES = {
    "whole vocabulary": lambda: distillation(64),
    "trimmed, split by vocabulary": lambda: distillation(40, supervision="exact", normalization="token"),
    "trimmed, split by width": lambda: distillation(37, normalization="token"),
    "frozen embedding": lambda: distillation(64, swap=False, supervision="exact"),
    "stage 2, tied": lambda: pretraining(True),
    "stage 2, untied": lambda: pretraining(False),
}


@pytest.mark.multidevice
@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (5, 1)], ids=["2x4", "1x4", "5x1"])
@pytest.mark.parametrize("case", CASES)
def test_equals_one_device(case, shape):
    """Tensor-parallel over four, without `data`, and on devices that divide nothing: with biases and tied heads."""
    case = CASES[case]()
    metrics, grads = step(case, shape, parts=2)
    expected, expected_grads = step(case, (1, 1), parts=1)
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    assert worst_gradient_error(grads, expected_grads) < 1e-5


@pytest.mark.multidevice
def test_what_stays_whole_is_said():
    """Devices that divide no dimension cost memory: the reader of the log learns it."""
    mesh = jax.make_mesh((5, 1), BOTH, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:5])
    state = pretraining(True)[1]
    (note,) = whole_notes(parameter_shardings(state, mesh, trained=True), state)
    assert "5 devices divide no dimension" in note and "embed_tokens.weight" in note
    mesh = jax.make_mesh((8, 1), BOTH, axis_types=(AxisType.Auto,) * 2)
    assert whole_notes(parameter_shardings(state, mesh, trained=True), state) == []
