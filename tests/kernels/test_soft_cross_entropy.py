"""The fused losses against dense float64 ones, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from osprey_jax.kernels import soft_cross_entropy as soft_cross_entropy_module
from osprey_jax.kernels.soft_cross_entropy import best_is_among, hard_cross_entropy, soft_cross_entropy
from tests.kernels.cross_entropy import (
    HEAD,
    HIDDEN,
    IDS,
    LABELS,
    RNG,
    TEACHER_HEAD,
    TEACHER_HIDDEN,
    WEIGHT,
    H,
    K,
    N,
    T,
    dense,
    softmax,
)
from tests.objectives.cases import relative


def soft(hidden, head, weight=WEIGHT, **options):
    return soft_cross_entropy(hidden, head, TEACHER_HIDDEN, TEACHER_HEAD, weight, **{"chunk": 4} | options)


def with_gradients(loss, *arguments):
    """(sums, gradient of hidden, gradient of head)."""
    function = lambda *arguments: (lambda sums: (sums[0], sums))(loss(*arguments))
    (_, sums), gradients = jax.jit(jax.value_and_grad(function, argnums=(0, 1), has_aux=True))(*arguments)
    return sums, *gradients


def assert_same(actual, expected):
    (sums, *gradients), (expected_sums, *expected_gradients) = actual, expected
    for value, other in zip(sums[:2], expected_sums[:2], strict=True):
        assert relative(value, other) < 1e-5
    np.testing.assert_allclose(sums[2], expected_sums[2], rtol=1e-6)
    for value, other in zip(gradients, expected_gradients, strict=True):
        assert relative(value, other) < 1e-5


@pytest.mark.parametrize("chunk", [1, 5, N, 100])
def test_soft_loss_and_gradients(chunk):
    """Any chunk, dividing the supervised positions or not."""
    assert_same(with_gradients(lambda *x: soft(*x, chunk=chunk), HIDDEN, HEAD), dense(HIDDEN, HEAD))


@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_restricted_teacher(chunk):
    """With a draft vocabulary the teacher's softmax is over those tokens alone."""
    head, options = HEAD[: len(IDS)], {"target_ids_V": IDS, "chunk": chunk}
    assert_same(with_gradients(lambda *x: soft(*x, **options), HIDDEN, head), dense(HIDDEN, head, IDS))


@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_hard_labels(chunk):
    """The same against token ids."""
    hard = lambda hidden, head: hard_cross_entropy(hidden[0], head, LABELS, WEIGHT[0], chunk=chunk)
    sums, dhidden, dhead = with_gradients(hard, HIDDEN[:1], HEAD)
    expected = dense(HIDDEN[:1], HEAD, labels=LABELS, weight=WEIGHT[:1])
    assert_same((sums, dhidden, dhead), expected)


def test_by_finite_differences():
    """Independent of any formula: what the loss does when its arguments move."""
    loss = lambda hidden, head: soft(hidden, head)[0]
    check_grads(loss, (HIDDEN, HEAD), order=1, modes=["rev"], atol=2e-2, rtol=2e-2, eps=1e-2)


def test_without_gradients_the_sums_are_the_same():
    """Evaluation takes a pass that makes no gradients."""
    for value, other in zip(soft(HIDDEN, HEAD), dense(HIDDEN, HEAD)[0], strict=True):
        assert relative(value, other) < 1e-5
    plain = str(jax.make_jaxpr(lambda *x: soft(*x))(HIDDEN, HEAD))
    products = lambda text: text.count("dot_general")
    gradient = str(jax.make_jaxpr(jax.grad(lambda *x: soft(*x)[0], argnums=(0, 1)))(HIDDEN, HEAD))
    assert (products(plain), products(gradient)) == (2, 4)  # teacher, student; and the two gradients


@pytest.mark.parametrize("cotangent", [0.0, -2.5])
def test_cotangent(cotangent):
    """The backward pass scales what the forward pass made."""
    _, dhidden, dhead = with_gradients(lambda *x: [cotangent * y for y in soft(*x)], HIDDEN, HEAD)
    _, expected_dhidden, expected_dhead = dense(HIDDEN, HEAD)
    np.testing.assert_allclose(dhidden, cotangent * expected_dhidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dhead, cotangent * expected_dhead, rtol=1e-4, atol=1e-5)


def test_nothing_supervised():
    """Zero, not NaN, whatever the hidden states hold."""
    sums, *gradients = with_gradients(lambda *x: soft(*x, weight=np.zeros_like(WEIGHT)), HIDDEN * np.nan, HEAD)
    assert not any(np.any(np.asarray(value)) for value in (*sums, *gradients))


def test_unsupervised_positions_are_skipped():
    """What stands there reaches nothing: they cost no product either, see `test_costs_what_is_supervised`."""
    skipped = ~np.any(WEIGHT > 0, axis=0)
    assert skipped.any()
    hidden = np.where(skipped[:, None], np.nan, HIDDEN)
    assert_same(with_gradients(soft, hidden, HEAD)[:1], dense(HIDDEN, HEAD)[:1])
    dhidden = with_gradients(soft, hidden, HEAD)[1]
    assert not np.any(dhidden[:, skipped])


@pytest.mark.parametrize(("supervised", "chunks"), [(0, 0), (1, 1), (4, 1), (5, 2), (N, 6)])
def test_costs_what_is_supervised(supervised, chunks, monkeypatch):
    """As many chunks are walked as the supervised positions fill."""
    trips = []

    def count(x):
        trips.append(0)
        return x

    weight = np.zeros((K, N), np.float32)
    weight[0, RNG.permutation(N)[:supervised]] = 1
    first_best = soft_cross_entropy_module._first_best  # taken of the teacher once a chunk

    def counted(*arguments):
        best = first_best(*arguments)
        return jax.pure_callback(count, jax.ShapeDtypeStruct(best.shape, best.dtype), best)

    monkeypatch.setattr(soft_cross_entropy_module, "_first_best", counted)
    jax.block_until_ready(jax.jit(lambda *x: soft(*x, weight=weight))(HIDDEN, HEAD))
    assert len(trips) == chunks


def test_zero_teacher_is_uniform():
    """A row of zeros teaches the uniform distribution, whose most likely token counts as id 0."""
    weight = np.ones((K, N), np.float32)
    zeros = np.zeros_like(TEACHER_HIDDEN)
    _, ce_sum_K, correct_K = soft_cross_entropy(HIDDEN, HEAD, zeros, TEACHER_HEAD, weight, chunk=4)
    logits = HIDDEN.astype(np.float64) @ HEAD.T.astype(np.float64)
    assert relative(ce_sum_K, -np.log(softmax(logits)).mean(-1).sum(-1)) < 1e-5
    np.testing.assert_array_equal(correct_K, (logits.argmax(-1) == 0).sum(-1))


def test_teacher_gets_no_gradient():
    """The target is frozen, whatever is differentiated."""
    loss = lambda hidden, head: soft_cross_entropy(HIDDEN, HEAD, hidden, head, WEIGHT, chunk=4)[0]
    grads = jax.grad(loss, argnums=(0, 1))(TEACHER_HIDDEN, TEACHER_HEAD)
    assert not any(np.any(np.asarray(grad)) for grad in grads)


def test_head_gradient_adds_up_in_float32():
    """With bfloat16 products, chunks of one position lose nothing that one chunk keeps."""
    hidden = jnp.asarray(HIDDEN, jnp.bfloat16)
    grads = [jax.grad(lambda head, chunk=chunk: soft(hidden, head, chunk=chunk)[0])(HEAD) for chunk in (1, N)]
    assert grads[0].dtype == jnp.float32
    assert relative(grads[0], dense(HIDDEN, HEAD)[2]) < 0.02
    assert relative(*grads) < 1e-5


def test_best_is_among():
    """Whether the teacher's favourite is in the draft vocabulary, where that is asked."""
    best, wanted = (TEACHER_HIDDEN @ TEACHER_HEAD.T).argmax(-1), WEIGHT[0] > 0
    for chunk in (1, 5, 100):
        found = jax.jit(lambda chunk=chunk: best_is_among(TEACHER_HIDDEN, TEACHER_HEAD, IDS, wanted, chunk=chunk))()
        np.testing.assert_array_equal(found, np.isin(best, IDS) & wanted)


def test_no_array_of_positions_by_vocabulary():
    """Neither forward nor backward, at any nesting: the largest one is a chunk's."""
    positions, vocabulary = 4 * N, 1009
    shape = jax.ShapeDtypeStruct
    arguments = (
        shape((K, positions, H), jnp.float32),
        shape((vocabulary, H), jnp.float32),
        shape((positions, T), jnp.float32),
        shape((vocabulary, T), jnp.float32),
        shape((K, positions), jnp.float32),
    )
    loss = lambda *x: soft_cross_entropy(*x, chunk=4)[0]
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*arguments)
    sizes = [aval.size for aval in avals(jaxpr.jaxpr) if vocabulary in aval.shape]
    assert max(sizes) <= vocabulary * max(H, T, K * 4)


def avals(jaxpr):
    for equation in jaxpr.eqns:
        yield from (v.aval for v in equation.outvars)
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from avals(inner)
