"""The objective against golden values made with an independent float64 PyTorch implementation (tests/golden)."""

import jax
import numpy as np
import pytest
from flax import nnx

from osprey_jax.config import Mesh, Optimizer
from osprey_jax.objectives.ttt import supervised
from osprey_jax.training.mesh import make_mesh, parameter_shardings
from osprey_jax.training.optimizer import learning_rate, make_optimizer
from osprey_jax.training.state import make_train_step, new_state
from tests.objectives.cases import EXACT, RELEASED, golden_objective, loss_and_grads, on_mesh, relative, streams

CASES = [("converted", RELEASED), ("perturbed", RELEASED), ("perturbed_exact", EXACT)]
each_case = pytest.mark.parametrize(("name", "ttt"), CASES, ids=[name for name, _ in CASES])


@each_case
def test_loss_and_gradients(golden, golden_batch, name, ttt):
    """Total loss to 1e-5 relative, each gradient to 1e-4 of its norm, supervised and correct positions exactly."""
    expected = np.load(golden / "expected" / "ttt" / f"{name}.npz")
    (loss, metrics), grads = loss_and_grads(*golden_objective(golden, name, ttt), golden_batch)
    assert relative(loss, expected["total"]) < 1e-5
    assert relative(metrics["ce_sum"], expected["ce_sum"].sum(axis=1)) < 1e-5
    np.testing.assert_array_equal(metrics["supervised"], expected["supervised"].sum(axis=1))
    np.testing.assert_array_equal(metrics["correct"], expected["correct"].sum(axis=1))
    for path, grad in nnx.to_flat_state(grads):
        golden_grad = expected["grad/" + ".".join(map(str, path))]
        # The converted drafter ignores its features (zero halves), so that fc has no gradient yet.
        tolerance = 1e-4 * np.linalg.norm(golden_grad)
        assert np.linalg.norm(grad.get_value() - golden_grad) <= tolerance, path


@each_case
def test_loss_by_sequence(golden, golden_batch, name, ttt):
    """Each sequence alone has its golden cross-entropy, accuracy and number of supervised positions."""
    expected = np.load(golden / "expected" / "ttt" / f"{name}.npz")
    case = golden_objective(golden, name, ttt)
    for row in range(3):
        keep = (np.arange(3) == row).astype(np.int32)[:, None]  # the others become padding: one compilation
        alone = {key: value * keep for key, value in golden_batch.items()}
        (_, metrics), _ = loss_and_grads(*case, alone)
        assert relative(metrics["ce_sum"], expected["ce_sum"][:, row]) < 1e-5
        np.testing.assert_array_equal(metrics["correct"], expected["correct"][:, row])
        np.testing.assert_array_equal(supervised(alone, ttt).sum(axis=(1, 2)), expected["supervised"][:, row])


def test_streams(golden, golden_batch):
    """Un-normed streams of every step, at every real position."""
    expected = np.load(golden / "expected" / "ttt" / "perturbed.npz")
    case = golden_objective(golden, "perturbed", RELEASED)
    for k, stream in enumerate(streams(*case, golden_batch)):
        for row, length in enumerate(golden_batch["segment_ids"].sum(axis=1)):
            assert relative(stream[row, :length], expected[f"hidden_{k}_{row}"]) < 1e-5, (k, row)


def test_twelve_optimizer_steps(golden, golden_batch):
    """AdamW on masters, clipping and schedule: losses to 1e-3, rates and gradient norms along the way."""
    expected = np.load(golden / "expected" / "train.npz")
    objective, params, constants, frozen = golden_objective(golden, "converted", RELEASED)
    mesh = make_mesh(Mesh(), rows=jax.device_count())
    place = lambda state, trained: jax.device_put(state, parameter_shardings(state, mesh, trained=trained))
    config = Optimizer(learning_rate=1e-3, warmup_fraction=0.2)
    optimizer = make_optimizer(config, steps=20)
    rate = learning_rate(config, steps=20)
    state = new_state(place(params, True), constants, optimizer)
    frozen, batch = place(frozen, False), {name: value[None] for name, value in golden_batch.items()}
    objective = on_mesh(objective, params, constants, mesh)
    step = make_train_step(objective, optimizer, mesh, state, frozen)
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
