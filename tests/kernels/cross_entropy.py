"""A small head, its teacher, and the dense cross-entropy in float64, for the tests of the fused one."""

import numpy as np

K, N, H, T, V = 3, 24, 8, 5, 16
RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(K, N, H)).astype(np.float32)
HEAD = RNG.normal(size=(V, H)).astype(np.float32)
TEACHER_HIDDEN = 2 * RNG.normal(size=(N, T)).astype(np.float32)
TEACHER_HEAD = RNG.normal(size=(V, T)).astype(np.float32)
# Some positions are supervised at some steps alone, some at none.
WEIGHT = (RNG.random((K, N)) * (RNG.random((K, N)) > 0.4) * (RNG.random(N) > 0.3)).astype(np.float32)
LABELS = RNG.integers(0, V, N).astype(np.int32)
IDS = np.array([1, 2, 5, 6, 8, 10, 13, 15], np.int32)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def dense(hidden, head, ids=None, labels=None, weight=WEIGHT):
    """((loss, ce_sum_K, correct_K), gradient of hidden, gradient of head) by the formulas."""
    hidden, head = hidden.astype(np.float64), head.astype(np.float64)
    if labels is None:
        teacher_logits = TEACHER_HIDDEN.astype(np.float64) @ TEACHER_HEAD.T.astype(np.float64)
        teacher_logits = teacher_logits if ids is None else teacher_logits[..., ids]
        teacher, best = softmax(teacher_logits), teacher_logits.argmax(-1)
    else:
        teacher, best = np.eye(len(head))[labels], labels
    student = softmax(hidden @ head.T)
    ce = -(teacher * np.log(student)).sum(-1)
    correct = student.argmax(-1) == best
    dlogits = weight[..., None] * (student - teacher)
    sums = (weight * ce).sum(), (ce * (weight > 0)).sum(-1), (correct & (weight > 0)).sum(-1)
    return sums, dlogits @ head, np.einsum("knv,knh->vh", dlogits, hidden)
