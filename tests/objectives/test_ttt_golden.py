"""The objective against golden values made with an independent float64 PyTorch implementation (tests/golden)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from osprey_jax.config import TTT, Mesh, Optimizer
from osprey_jax.models import hf
from osprey_jax.objectives.ttt import Distillation, supervised, unroll
from osprey_jax.training.mesh import make_mesh, parameter_shardings
from osprey_jax.training.optimizer import learning_rate, make_optimizer
from osprey_jax.training.state import make_train_step, new_state

RELEASED = TTT(supervision="released", normalization="sequence", loss_chunk=16)
EXACT = TTT(supervision="exact", normalization="token", loss_chunk=7)
CASES = [("converted", RELEASED), ("perturbed", RELEASED), ("perturbed_exact", EXACT)]


def relative(actual, expected):
    """Largest difference relative to the largest expected value."""
    return np.max(np.abs(np.asarray(actual) - expected)) / np.max(np.abs(expected))


def make(golden, weights, ttt, dtype=jnp.float32):
    """(objective, params, constants, target parameters) of a golden case."""
    target = hf.load_causal_lm(golden / "target")
    drafter = hf.load_drafter(golden / "expected" / "converted")
    if weights != "converted":
        tensors = load_file(golden / "expected" / "ttt" / "perturbed.safetensors")
        for path, parameter in nnx.to_flat_state(nnx.state(drafter, nnx.Param)):
            parameter.set_value(jnp.asarray(tensors[".".join(map(str, path))]))
    taps = tuple(int(i) for i in np.load(golden / "expected" / "target.npz")["tap_layers"])
    drafter_def, params, constants = nnx.split(drafter, nnx.Param, ...)
    target_def, frozen = nnx.split(target)
    return Distillation(drafter_def, target_def, taps, ttt, dtype), params, constants, frozen


@pytest.mark.parametrize(("name", "ttt"), CASES, ids=[name for name, _ in CASES])
def test_loss_and_gradients(golden, golden_batch, name, ttt):
    """Total loss to 1e-5 relative, each gradient to 1e-4 of its norm, supervised and correct positions exactly."""
    expected = np.load(golden / "expected" / "ttt" / f"{name}.npz")
    objective, params, constants, frozen = make(golden, name, ttt)

    @jax.jit
    def value_and_grad(params):
        lessons = objective.teach(constants, frozen, golden_batch)
        weights = objective.weights(golden_batch, lessons)
        loss = lambda params: objective.loss(params, constants, frozen, golden_batch, lessons, weights)  # noqa: E731
        return jax.value_and_grad(loss, has_aux=True)(params)

    (loss, metrics), grads = value_and_grad(params)
    assert relative(loss, expected["total"]) < 1e-5
    assert relative(metrics["ce_sum"], expected["ce_sum"].sum(axis=1)) < 1e-5
    np.testing.assert_array_equal(metrics["supervised"], expected["supervised"].sum(axis=1))
    np.testing.assert_array_equal(metrics["correct"], expected["correct"].sum(axis=1))
    for path, grad in nnx.to_flat_state(grads):
        golden_grad = expected["grad/" + ".".join(map(str, path))]
        # The converted drafter ignores its features (zero halves), so that fc has no gradient yet.
        tolerance = 1e-4 * np.linalg.norm(golden_grad)
        assert np.linalg.norm(grad.get_value() - golden_grad) <= tolerance, path


@pytest.mark.parametrize(("name", "ttt"), CASES, ids=[name for name, _ in CASES])
def test_supervised_positions_by_sequence(golden, golden_batch, name, ttt):
    """Masks agree for each step and sequence, not only in sum."""
    expected = np.load(golden / "expected" / "ttt" / f"{name}.npz")
    np.testing.assert_array_equal(supervised(golden_batch, ttt).sum(axis=2), expected["supervised"])


def test_streams(golden, golden_batch):
    """Un-normed streams of every step, at every real position."""
    expected = np.load(golden / "expected" / "ttt" / "perturbed.npz")
    objective, params, constants, frozen = make(golden, "perturbed", RELEASED)
    lessons = objective.teach(constants, frozen, golden_batch)
    drafter = nnx.merge(objective.drafter_def, params, constants)
    streams = unroll(drafter, golden_batch, lessons["taps"], steps=5, dtype=jnp.float32)
    for k, stream in enumerate(streams):
        for row, length in enumerate(golden_batch["segment_ids"].sum(axis=1)):
            assert relative(stream[row, :length], expected[f"hidden_{k}_{row}"]) < 1e-5, (k, row)


def test_twelve_optimizer_steps(golden, golden_batch):
    """AdamW on masters, clipping and schedule: losses to 1e-3, rates and gradient norms along the way."""
    expected = np.load(golden / "expected" / "train.npz")
    objective, params, constants, frozen = make(golden, "converted", RELEASED)
    mesh = make_mesh(Mesh(), rows=jax.device_count())
    place = lambda state, trained: jax.device_put(state, parameter_shardings(state, mesh, trained=trained))  # noqa: E731
    config = Optimizer(learning_rate=1e-3, warmup_fraction=0.2)
    optimizer = make_optimizer(config, steps=20)
    rate = learning_rate(config, steps=20)
    state = new_state(place(params, True), constants, optimizer)
    step = make_train_step(objective, optimizer, mesh)
    frozen, batch = place(frozen, False), {name: value[None] for name, value in golden_batch.items()}
    for i in range(12):
        state, metrics = step(state, frozen, batch)
        golden_loss = np.sum(expected["step_loss"][i] * 0.8 ** np.arange(5))
        assert relative(metrics["loss"], golden_loss) < 1e-3, i
        assert relative(metrics["grad_norm"], expected["grad_norm"][i]) < 1e-3, i
        np.testing.assert_allclose(rate(i), expected["lr"][i], rtol=1e-5)
    for path, parameter in nnx.to_flat_state(state.params):
        golden_value = expected["param/" + ".".join(map(str, path))]
        error = np.linalg.norm(parameter.get_value() - golden_value) / np.linalg.norm(golden_value)
        assert error < 1e-3, path
