"""Several records in a row, each a segment: the numbers are those of every record alone in a row of its own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

from osprey_jax.config import TTT
from osprey_jax.models import hf
from osprey_jax.objectives.next_token import NextToken
from osprey_jax.objectives.ttt import supervised
from osprey_jax.parallel import BOTH
from osprey_jax.training.mesh import parameter_shardings, rows_over
from osprey_jax.training.state import make_train_step, new_state
from tests.conftest import GOLDEN
from tests.objectives.cases import golden_objective, on_mesh, relative, streams, worst_gradient_error

STEPS = 3  # K; segments of 1 to K+2 tokens are those that a step's shift can leave
LENGTH = 40
# Rows of segments: one segment, a row full to its last place, and one with padding that has twins side by side.
ROWS = [[40], [17, 9, 5, 4, 3, 2], [1, 1, 2, 12, 12, 6]]
TWINS = 10, 11  # of all segments in order: the same tokens and the same mask
SEGMENTS = sum(map(len, ROWS))
BATCH = 16  # of either layout, so that one compilation serves both and eight devices divide it

golden_cases = pytest.mark.parametrize("name", ["qwen3", "llama"])
all_forms = pytest.mark.parametrize(
    "ttt",
    [
        TTT(length=STEPS, supervision=supervision, normalization=normalization, loss_chunk=16)
        for supervision in ("released", "exact")
        for normalization in ("sequence", "token")
    ],
    ids=lambda ttt: f"{ttt.supervision}-{ttt.normalization}",
)
DRAFT_IDS = np.sort(np.random.default_rng(1).permutation(456)[:300])
vocabularies = pytest.mark.parametrize("target_ids", [None, DRAFT_IDS], ids=["whole", "trimmed"])


# ---- records


def records() -> list[tuple[np.ndarray, np.ndarray]]:
    """(token ids, loss mask) of every segment; masks reach both ends of some, so that spans of neighbours touch."""
    rng = np.random.default_rng(0)
    made = []
    for i, n in enumerate(n for row in ROWS for n in row):
        runs = np.repeat(rng.permutation([0, 1] * n), rng.integers(1, 6, 2 * n))[:n]
        made.append((rng.integers(1, 448, n), np.ones(n, int) if i % 3 == 1 else runs))
    made[TWINS[1]] = made[TWINS[0]]
    return made


def laid_out(made, rows: list[list[int]]) -> dict[str, np.ndarray]:
    """A batch of `BATCH` rows that hold the given records, one after another."""
    batch = {
        name: np.zeros((BATCH, LENGTH), np.int32) for name in ("token_ids", "loss_mask", "segment_ids", "positions")
    }
    for row, members in enumerate(rows):
        start = 0
        for segment, i in enumerate(members, start=1):
            token_ids, loss_mask = made[i]
            place = row, slice(start, start := start + len(token_ids))
            batch["token_ids"][place], batch["loss_mask"][place] = token_ids, loss_mask
            batch["segment_ids"][place], batch["positions"][place] = segment, np.arange(len(token_ids))
    return batch


def packed(made) -> dict[str, np.ndarray]:
    ends = np.cumsum([len(row) for row in ROWS])
    return laid_out(made, [list(range(end - len(row), end)) for row, end in zip(ROWS, ends, strict=True)])


def alone(made) -> dict[str, np.ndarray]:
    return laid_out(made, [[i] for i in range(len(made))])


def places(batch) -> list[tuple[int, np.ndarray]]:
    """(row, columns) of every segment, in order."""
    return [
        (row, np.flatnonzero(ids == segment))
        for row, ids in enumerate(batch["segment_ids"])
        for segment in range(1, ids.max() + 1)
    ]


# ---- numbers


class Case:
    """A golden objective compiled once for all forms, which differ in their weights alone."""

    def __init__(self, name: str, trims: bool):
        ttt = TTT(length=STEPS, loss_chunk=16)
        target_ids = DRAFT_IDS if trims else None
        self.objective, *self.state = golden_objective(GOLDEN / name, "perturbed", ttt, target_ids)
        self._teach = jax.jit(lambda ttt, *rest: self.in_form(ttt).teach(*rest), static_argnums=0)
        self.loss_and_grads = functools.partial(
            jax.jit(jax.value_and_grad(self.objective.loss, has_aux=True)), *self.state
        )

    def in_form(self, ttt: TTT):
        return dataclasses.replace(self.objective, ttt=ttt)

    def teach(self, batch, ttt: TTT | None = None):
        """Lessons; those of a trimmed vocabulary depend on what is supervised, the others on no form."""
        same_for_all = ttt is None or "target_ids" not in self.state[1]
        return self._teach(self.objective.ttt if same_for_all else ttt, *self.state[1:], batch)


@functools.cache
def compiled(name: str, trims: bool) -> Case:
    return Case(name, trims)


def assert_same(actual, expected):
    (loss, metrics), grads = actual
    (expected_loss, expected_metrics), expected_grads = expected
    assert expected_loss > 0
    assert relative(loss, expected_loss) < 1e-6
    for count in ("supervised", "correct"):
        np.testing.assert_array_equal(metrics[count], expected_metrics[count])
    assert relative(metrics["ce_sum"], expected_metrics["ce_sum"]) < 1e-6
    assert worst_gradient_error(grads, expected_grads) < 1e-5


@golden_cases
@vocabularies
@all_forms
def test_packed_equals_alone(name, target_ids, ttt):
    """Losses, counts and gradients, wherever the steps' shifts leave a segment."""
    case = compiled(name, target_ids is not None)
    results = []
    for batch in (packed(records()), alone(records())):
        lessons = case.teach(batch, ttt)
        weights = case.in_form(ttt).weights(batch, lessons)
        results.append(case.loss_and_grads(batch, lessons, weights))
    assert_same(*results)


@pytest.mark.parametrize("supervision", ["released", "exact"])
def test_supervised_by_definition(supervision):
    """Record by record: step k at p is there where x[p+k] is in the mask, or x[p+1] to x[p+2+k] in one span."""
    made, batch = records(), packed(records())
    expected = np.zeros((STEPS, BATCH, LENGTH), bool)
    for (_, mask), (row, columns) in zip(made, places(batch), strict=True):
        for k in range(STEPS):
            for p in range(len(mask) - k):
                span = mask[p + 1 : p + 3 + k]
                exact = len(span) == k + 2 and all(span)
                expected[k, row, columns[p + k]] = mask[p + k] if supervision == "released" else exact
    ttt = TTT(length=STEPS, supervision=supervision)
    np.testing.assert_array_equal(supervised(batch, ttt), expected)


# ---- no record reaches another


def changed(batch, place, rng) -> dict[str, np.ndarray]:
    """`batch` with other tokens and another mask in one segment."""
    batch = {name: value.copy() for name, value in batch.items()}
    batch["token_ids"][place] = 1 + (batch["token_ids"][place] + rng.integers(1, 440)) % 447
    batch["loss_mask"][place] ^= 1
    return batch


def elsewhere(place, array):
    """`array` (B, S, ...) with zeros in one segment."""
    array = np.array(array)
    array[place] = 0
    return array


@pytest.mark.parametrize("segment", [0, 1, 4, 7, 8, 10, 12])
@vocabularies
def test_a_segment_reaches_no_other(segment, target_ids):
    """Other tokens, mask or features in one segment leave what is read, taught and supervised in all others the same
    to the bit, and their part of loss and gradients."""
    case, rng = compiled("qwen3", target_ids is not None), np.random.default_rng(segment)
    batch = packed(records())
    place = places(batch)[segment]
    others = changed(batch, place, rng)
    lessons, other_lessons = case.teach(batch), case.teach(others)
    for name, value in lessons.items():
        np.testing.assert_array_equal(elsewhere(place, other_lessons[name]), elsewhere(place, value))
    for supervision in ("released", "exact"):
        ttt = TTT(length=STEPS, supervision=supervision)
        for mask, other_mask in zip(supervised(batch, ttt), supervised(others, ttt), strict=True):
            np.testing.assert_array_equal(elsewhere(place, other_mask), elsewhere(place, mask))
    before, after = (streams(case.objective, *case.state, each) for each in (batch, others))
    for stream, other_stream in zip(before, after, strict=True):
        np.testing.assert_array_equal(elsewhere(place, other_stream), elsewhere(place, stream))

        assert np.any(np.asarray(other_stream)[place] != np.asarray(stream)[place])

    # Step k at p is weighed at u = p + k, which is in p's own segment.
    weights = np.stack([elsewhere(place, weights) for weights in case.objective.weights(batch, lessons)])
    noisy = {name: np.array(value) for name, value in lessons.items()}
    for name in ("taps", "hidden"):
        noisy[name][place] = rng.normal(size=noisy[name][place].shape)
    expected = case.loss_and_grads(batch, lessons, weights)
    assert expected[0][0] > 0
    for result in (case.loss_and_grads(others, other_lessons, weights), case.loss_and_grads(batch, noisy, weights)):
        for value, expected_value in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(value, expected_value)


@golden_cases
def test_every_segment_ends_as_a_row_does(name):
    """The last position of each is taught the uniform distribution where its token is in the mask (`released`)."""
    case, batch = compiled(name, False), packed(records())
    batch["loss_mask"][:] = batch["segment_ids"] > 0
    lessons = case.teach(batch)
    ends = tuple(np.array([(row, columns[-1]) for row, columns in places(batch)]).T)
    assert not np.any(lessons["hidden"][ends]) and len(ends[0]) == SEGMENTS
    weights = np.asarray(case.objective.weights(batch, lessons))
    only_ends = np.zeros_like(weights)
    only_ends[:, *ends] = weights[:, *ends]
    (_, metrics), _ = case.loss_and_grads(batch, lessons, only_ends)

    drafter = nnx.merge(case.objective.drafter_def, *case.state[:2])
    for k, stream in enumerate(streams(case.objective, *case.state, batch)):
        logits = [drafter.logits(stream[row, columns[-1 - k]]) for row, columns in places(batch) if len(columns) > k]
        expected = sum(float(jax.nn.logsumexp(each) - jnp.mean(each)) for each in logits)
        assert metrics["supervised"][k] == len(logits) > 0
        assert relative(metrics["ce_sum"][k], expected) < 1e-6


# ---- pretraining


def backbone(name: str):
    """(objective, params, constants) of a golden language model."""
    model_def, params, constants = nnx.split(hf.load_causal_lm(GOLDEN / name / "target"), nnx.Param, ...)
    return NextToken(model_def, jnp.dtype(jnp.float32), 16), params, constants


@golden_cases
def test_pretraining_packed_equals_alone(name):
    """Documents of a row: none predicts the next one's first token, none sees another."""
    objective, params, constants = backbone(name)
    loss = jax.jit(jax.value_and_grad(objective.loss, has_aux=True), static_argnums=(2, 4))
    results = []
    for batch in (packed(records()), alone(records())):
        results.append(loss(params, constants, None, batch, None, objective.weights(batch, None)))
    assert_same(*results)
    batch = packed(records())
    batch["loss_mask"][:] = batch["segment_ids"] > 0
    assert np.sum(objective.weights(batch, None) > 0) == np.sum(batch["segment_ids"] > 0) - SEGMENTS


# ---- several devices


def trained(objective, params, constants, frozen, batch, mesh, parts: int):
    """((loss, metrics), gradients) of the training step itself."""

    def place(state, trained):  # a copy: the step takes its buffers
        shardings = parameter_shardings(state, mesh, trained=trained)
        return jax.device_put(jax.tree.map(np.array, state), shardings)

    objective = on_mesh(objective, params, constants, mesh)
    optimizer = optax.trace(decay=0.0)  # keeps the gradients
    state = new_state(place(params, True), place(constants, True), optimizer)
    frozen = None if frozen is None else place(frozen, False)
    batch = {name: value.reshape(parts, BATCH // parts, LENGTH) for name, value in batch.items()}
    batch = jax.device_put(batch, rows_over(mesh, leading=1))
    state, metrics = make_train_step(objective, optimizer, mesh, state, frozen)(state, frozen, batch)
    metrics = jax.device_get(metrics)
    return (metrics["loss"], metrics), jax.device_get(state.opt_state.trace)


def mesh_of(shape):
    devices = jax.devices()[: np.prod(shape)]
    return jax.make_mesh(shape, BOTH, axis_types=(AxisType.Auto,) * 2, devices=devices)


def spread(batch) -> dict[str, np.ndarray]:
    """The same rows in another order, so that full and empty ones are on all devices."""
    order = np.random.default_rng(2).permutation(BATCH)
    return {name: value[order] for name, value in batch.items()}


@pytest.mark.multidevice
@pytest.mark.parametrize("shape", [(8, 1), (4, 2)], ids=["8x1", "4x2"])
@golden_cases
@all_forms
def test_packed_on_eight_devices_equals_alone_on_one(name, shape, ttt):
    """The training step: rows over all devices, the drafter sharded, a batch in two parts."""
    trims = ttt.supervision == "exact"  # of both vocabularies, without doubling what is compiled
    case = compiled(name, trims)
    objective = case.in_form(ttt)
    actual = trained(objective, *case.state, spread(packed(records())), mesh_of(shape), parts=2)
    batch = alone(records())
    lessons = case.teach(batch, ttt)
    assert_same(actual, case.loss_and_grads(batch, lessons, objective.weights(batch, lessons)))


@pytest.mark.multidevice
@pytest.mark.parametrize("shape", [(8, 1), (4, 2)], ids=["8x1", "4x2"])
@golden_cases
def test_pretraining_packed_on_eight_devices_equals_alone_on_one(name, shape):
    objective, params, constants = backbone(name)
    actual = trained(objective, params, constants, None, spread(packed(records())), mesh_of(shape), parts=2)
    assert_same(actual, trained(objective, params, constants, None, alone(records()), mesh_of((1, 1)), parts=1))
