"""The chunked losses against dense float64 ones, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osprey_jax.kernels.soft_cross_entropy import best_is_among, hard_cross_entropy, soft_cross_entropy
from tests.objectives.cases import relative

K, B, S, H, T, V = 3, 2, 11, 6, 5, 17
RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(K, B, S, H)).astype(np.float32)
HEAD = RNG.normal(size=(V, H)).astype(np.float32)
TEACHER_HIDDEN = 2 * RNG.normal(size=(B, S, T)).astype(np.float32)
TEACHER_HEAD = RNG.normal(size=(V, T)).astype(np.float32)
WEIGHT = (RNG.random((K, B, S)) * (RNG.random((K, B, S)) > 0.4)).astype(np.float32)
IDS = np.array([1, 2, 5, 8, 13, 16])


def dense(hidden, head, ids=None):
    """(loss, gradient of hidden, gradient of head) by the formulas, in float64."""
    hidden, head = hidden.astype(np.float64), head.astype(np.float64)
    teacher = TEACHER_HIDDEN.astype(np.float64) @ TEACHER_HEAD.T.astype(np.float64)
    teacher = softmax(teacher if ids is None else teacher[..., ids])
    student = softmax(hidden @ head.T)
    loss = -(WEIGHT[..., None] * teacher * np.log(student)).sum()
    dlogits = WEIGHT[..., None] * (student - teacher)
    return loss, dlogits @ head, np.einsum("kbsv,kbsh->vh", dlogits, hidden)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
def test_soft_loss_and_gradients(chunk):
    """Any chunk, dividing the row or not."""
    loss = lambda hidden, head: soft_cross_entropy(
        hidden, head, TEACHER_HIDDEN, TEACHER_HEAD, WEIGHT, target_ids_V=None, chunk=chunk
    )[0]
    value, grads = jax.value_and_grad(loss, argnums=(0, 1))(HIDDEN, HEAD)
    for actual, expected in zip((value, *grads), dense(HIDDEN, HEAD), strict=True):
        assert relative(actual, expected) < 1e-5


def test_restricted_teacher():
    """With a draft vocabulary the teacher's softmax is over those tokens alone."""
    loss, ce, _ = soft_cross_entropy(
        HIDDEN, HEAD[: len(IDS)], TEACHER_HIDDEN, TEACHER_HEAD, WEIGHT, target_ids_V=IDS, chunk=4
    )
    assert relative(loss, dense(HIDDEN, HEAD[: len(IDS)], IDS)[0]) < 1e-5
    assert relative(np.sum(WEIGHT * ce), loss) < 1e-5


def test_zero_teacher_is_uniform():
    """A row of zeros teaches the uniform distribution, whose most likely token counts as id 0."""
    zeros = np.zeros_like(TEACHER_HIDDEN)
    _, ce, correct = soft_cross_entropy(HIDDEN, HEAD, zeros, TEACHER_HEAD, WEIGHT, target_ids_V=None, chunk=4)
    logits = HIDDEN.astype(np.float64) @ HEAD.T.astype(np.float64)
    assert relative(ce, -np.log(softmax(logits)).mean(-1)) < 1e-5
    np.testing.assert_array_equal(correct, logits.argmax(-1) == 0)


def test_teacher_gets_no_gradient():
    """The target is frozen, whatever is differentiated."""
    loss = lambda hidden, head: soft_cross_entropy(HIDDEN, HEAD, hidden, head, WEIGHT, target_ids_V=None, chunk=4)[0]
    grads = jax.grad(loss, argnums=(0, 1))(TEACHER_HIDDEN, TEACHER_HEAD)
    assert not any(np.any(np.asarray(grad)) for grad in grads)


def test_head_gradient_adds_up_in_float32():
    """With bfloat16 products, chunks of one position lose nothing that one chunk keeps."""
    hidden = jnp.asarray(HIDDEN, jnp.bfloat16)
    grads = [
        jax.grad(
            lambda head, chunk=chunk: soft_cross_entropy(
                hidden, head, TEACHER_HIDDEN, TEACHER_HEAD, WEIGHT, target_ids_V=None, chunk=chunk
            )[0]
        )(HEAD)
        for chunk in (1, S)
    ]
    assert grads[0].dtype == jnp.float32
    assert relative(grads[0], dense(HIDDEN, HEAD)[2]) < 0.02
    assert relative(*grads) < 0.01


def test_hard_labels():
    """The same against token ids."""
    labels = RNG.integers(0, V, (B, S))
    loss, ce, correct = hard_cross_entropy(HIDDEN[0], HEAD, labels, WEIGHT[0], chunk=4)
    probability = softmax(HIDDEN[0].astype(np.float64) @ HEAD.T.astype(np.float64))
    expected = -np.log(np.take_along_axis(probability, labels[..., None], -1)[..., 0])
    assert relative(ce, expected) < 1e-5 and relative(loss, (WEIGHT[0] * expected).sum()) < 1e-5
    np.testing.assert_array_equal(correct, probability.argmax(-1) == labels)


def test_best_is_among():
    """Whether the teacher's favourite is in the draft vocabulary."""
    best = (TEACHER_HIDDEN @ TEACHER_HEAD.T).argmax(-1)
    np.testing.assert_array_equal(best_is_among(TEACHER_HIDDEN, TEACHER_HEAD, IDS, chunk=4), np.isin(best, IDS))
