"""The fused losses on several devices: positions over all of them, heads split one way or the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from osprey_jax.kernels.soft_cross_entropy import best_is_among, hard_cross_entropy, soft_cross_entropy
from osprey_jax.parallel import BOTH
from tests.kernels.cross_entropy import (
    HEAD,
    HIDDEN,
    IDS,
    LABELS,
    TEACHER_HEAD,
    TEACHER_HIDDEN,
    WEIGHT,
    dense,
)
from tests.kernels.test_soft_cross_entropy import assert_same

pytestmark = pytest.mark.multidevice
P = PartitionSpec
ROWS = P(("tensor", "data"), None)  # of a head, so that what `data` gathers is a run of the vocabulary
COLUMNS = P(None, BOTH)  # where no number of devices divides the vocabulary
WAYS = [
    ((8, 1), ROWS, None),
    ((2, 4), ROWS, None),
    ((2, 4), ROWS, "tensor"),
    ((4, 2), ROWS, "tensor"),
    ((1, 8), ROWS, "tensor"),
    ((2, 4), COLUMNS, None),
    ((2, 4), P(), None),
]
each_way = pytest.mark.parametrize(("shape", "spec", "axis"), WAYS)
# One device of a row of the mesh has nothing supervised, the others different numbers of positions.
UNEVEN = np.where(np.arange(24) // 3 == 1, 0, WEIGHT)


def on_mesh(shape, function, in_specs, out_specs, *arguments):
    mesh = jax.make_mesh(shape, BOTH, axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped)(*arguments)


def sums_and_gradients(loss):
    """Of each device's contribution, summed as the step does."""

    def function(hidden, head, *rest):
        with_sums = lambda hidden, head: (lambda sums: (sums[0], sums))(loss(hidden, head, *rest))
        (_, sums), gradients = jax.value_and_grad(with_sums, argnums=(0, 1), has_aux=True)(hidden, head)
        return lax.psum(sums, BOTH), *gradients

    return function


@each_way
@pytest.mark.parametrize("ids", [None, IDS], ids=["whole", "trimmed"])
def test_soft(shape, spec, axis, ids):
    """The sum over devices is the dense loss; each shard of the head gets its part of the gradient."""
    head = HEAD if ids is None else HEAD[: len(IDS)]
    teacher_spec = P("tensor", None)

    def loss(hidden, head, teacher_hidden, teacher_head, weight):
        options = {"head_spec": spec, "teacher_spec": teacher_spec, "vocab_axis": axis, "target_ids_V": ids}
        return soft_cross_entropy(hidden, head, teacher_hidden, teacher_head, weight, chunk=2, **options)

    positions = P(None, BOTH)
    in_specs = (positions, spec, P(BOTH), teacher_spec, positions)
    out_specs = (P(), positions, spec)
    arguments = (HIDDEN, head, TEACHER_HIDDEN, TEACHER_HEAD, UNEVEN)
    actual = on_mesh(shape, sums_and_gradients(loss), in_specs, out_specs, *arguments)
    assert_same(actual, dense(HIDDEN, head, ids, weight=UNEVEN))


@each_way
def test_hard(shape, spec, axis):
    loss = lambda hidden, head, labels, weight: hard_cross_entropy(
        hidden, head, labels, weight, chunk=2, head_spec=spec, vocab_axis=axis
    )
    in_specs, out_specs = (P(BOTH), spec, P(BOTH), P(BOTH)), (P(), P(BOTH), spec)
    sums, dhidden, dhead = on_mesh(
        shape, sums_and_gradients(loss), in_specs, out_specs, HIDDEN[0], HEAD, LABELS, UNEVEN[0]
    )
    expected = dense(HIDDEN[:1], HEAD, labels=LABELS, weight=UNEVEN[:1])
    assert_same((sums, dhidden[None], dhead), expected)


@pytest.mark.parametrize(("shape", "axis"), [((8, 1), None), ((2, 4), None), ((2, 4), "tensor")])
def test_best_is_among(shape, axis):
    """Each device learns it of its own positions, wherever the favourite's row lies."""
    wanted, spec = UNEVEN[0] > 0, P("tensor", None)
    function = lambda hidden, head, wanted: best_is_among(
        hidden, head, jnp.asarray(IDS), wanted, chunk=2, teacher_spec=spec, vocab_axis=axis
    )
    found = on_mesh(shape, function, (P(BOTH), spec, P(BOTH)), P(BOTH), TEACHER_HIDDEN, TEACHER_HEAD, wanted)
    best = (TEACHER_HIDDEN @ TEACHER_HEAD.T).argmax(-1)
    np.testing.assert_array_equal(found, np.isin(best, IDS) & wanted)
