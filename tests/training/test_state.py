"""The update: accumulation and the mesh change no number."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from osprey_jax.config import Optimizer
from osprey_jax.parallel import BOTH
from osprey_jax.training.mesh import parameter_shardings, rows_over
from osprey_jax.training.optimizer import make_optimizer
from osprey_jax.training.state import make_eval_step, make_train_step, new_state
from tests.conftest import GOLDEN, load_batch
from tests.objectives.cases import EXACT, RELEASED, golden_objective, on_mesh, relative

TTTS = pytest.mark.parametrize("ttt", [RELEASED, EXACT], ids=["released", "exact"])
TTT_LENGTH = {"length": 2}  # as good as five here, and compiled faster


def eight_rows() -> dict[str, np.ndarray]:
    """Eight different rows, short and long, one without anything supervised."""
    batch = {name: np.concatenate([value] * 3)[:8] for name, value in load_batch(GOLDEN / "qwen3").items()}
    length = np.array([40, 31, 37, 22, 13, 30, 8, 40])[:, None]
    keep = np.arange(40) < length
    batch = {name: value * keep for name, value in batch.items()}
    batch["token_ids"] = (batch["token_ids"] + 17 * np.arange(8, dtype=np.int32)[:, None]) % 440 * keep
    return batch


def train(ttt, mesh, parts: int, target_ids=None, steps: int = 3):
    """(losses, final parameters, evaluation) of a few updates on `eight_rows`."""
    case = golden_objective(GOLDEN / "qwen3", "perturbed", ttt.model_copy(update=TTT_LENGTH), target_ids)
    objective, params, constants, frozen = case
    objective = on_mesh(objective, params, constants, mesh)
    place = lambda state, trained: jax.device_put(state, parameter_shardings(state, mesh, trained=trained))
    # A large epsilon: with Adam's own, an element whose gradient is rounding noise moves as far as any other.
    optimizer = make_optimizer(Optimizer(learning_rate=1e-2, epsilon=1e-2), steps=10)
    state = new_state(place(params, True), place(constants, True), optimizer)
    frozen = place(frozen, False)
    batch = {name: value.reshape(parts, 8 // parts, -1) for name, value in eight_rows().items()}
    batch = jax.device_put(batch, rows_over(mesh, leading=1))
    step, losses = make_train_step(objective, optimizer, mesh, state, frozen), []
    for _ in range(steps):
        state, metrics = step(state, frozen, batch)
        losses.append(float(metrics["loss"]))
    rows = jax.device_put(eight_rows(), rows_over(mesh))
    evaluation = make_eval_step(objective, mesh, state, frozen)(state, frozen, rows)
    return losses, jax.device_get(state.params), jax.device_get(evaluation)


def one_device():
    return jax.make_mesh((1, 1), BOTH, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])


def assert_same(actual, expected):
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    pairs = zip(jax.tree.leaves(actual[1]), jax.tree.leaves(expected[1]), strict=True)
    assert all(relative(a, b) < 2e-5 for a, b in pairs)
    for name, value in expected[2].items():
        np.testing.assert_allclose(actual[2][name], value, rtol=1e-5)


@TTTS
def test_accumulation_changes_nothing(ttt):
    """Four parts one after another make the update of the whole batch, whatever each part supervises."""
    assert_same(train(ttt, one_device(), parts=4), train(ttt, one_device(), parts=1))


def test_accumulation_with_a_trimmed_vocabulary():
    """The number of supervised positions depends on the target then, and is still the global batch's."""
    target_ids = np.arange(0, 456, 2)
    one, four = (train(EXACT, one_device(), parts, target_ids) for parts in (1, 4))
    assert_same(four, one)


@pytest.mark.multidevice
@pytest.mark.parametrize("shape", [(8, 1), (4, 2)])
@TTTS
def test_eight_devices_equal_one(ttt, shape):
    """Rows over all devices, the drafter fully sharded, the target tensor-parallel."""
    mesh = jax.make_mesh(shape, BOTH, axis_types=(AxisType.Auto,) * 2)
    assert_same(train(ttt, mesh, parts=1), train(ttt, one_device(), parts=1))


@pytest.mark.multidevice
def test_drafter_is_sharded_over_all_devices():
    """Masters and moments of every matrix take an eighth of their size on each device."""
    _, params, _, _ = golden_objective(GOLDEN / "qwen3", "perturbed", EXACT)
    mesh = jax.make_mesh((4, 2), BOTH, axis_types=(AxisType.Auto,) * 2)
    params = jax.device_put(params, parameter_shardings(params, mesh, trained=True))
    state = new_state(params, params.__class__({}), make_optimizer(Optimizer(learning_rate=1e-3), steps=10))
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        if leaf.ndim == 2:
            assert leaf.addressable_shards[0].data.size * 8 == leaf.size
