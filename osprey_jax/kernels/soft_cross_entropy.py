"""Cross-entropy of a head over a large vocabulary, fused with its gradients: no array of shape (.., N, V).

The supervised positions are walked in chunks. Of a chunk the teacher's softmax is taken once for all K steps, and the
gradients are made in the same pass as the loss: nothing differentiates through the loop, so that the number of chunks
may depend on the data (unsupervised positions cost nothing), and the backward pass only multiplies by the cotangent.

On a mesh (see `parallel.py`) every device has positions of its own. The heads are gathered whole, or with `vocab_axis`
stay split over that axis; then the positions of a chunk are gathered over it instead, and the statistics of the softmax
reduced. What is returned are each device's contributions: their sum over the mesh is the total.

Axes: K steps that share a teacher, N positions of this device's rows, C positions of a chunk (of all devices along
`vocab_axis`), H student width, T teacher width, V this device's part of the student's vocabulary, U of the teacher's.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from osprey_jax.parallel import gather_rows, gather_weight, reduce_gradient, scatter_rows


def soft_cross_entropy(
    hidden_KxNxH: jax.Array,
    head: jax.Array,
    teacher_hidden_NxT: jax.Array,
    teacher_head: jax.Array,
    weight_KxN: jax.Array,
    *,
    chunk: int,
    head_spec: PartitionSpec | None = None,
    teacher_spec: PartitionSpec | None = None,
    vocab_axis: str | None = None,
    target_ids_V: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sum over k and n of weight * CE(teacher's softmax, student's softmax). All products in the dtype of `hidden`.

    Args:
      head: float32, this device's shard of (vocabulary, H), laid out by `head_spec`.
      teacher_hidden_NxT: a row of zeros teaches the uniform distribution.
      teacher_head: this device's shard of (vocabulary of the teacher, T), laid out by `teacher_spec`.
      weight_KxN: float32, not negative, scaling and mask in one. Differentiated: `hidden` and `head`, nothing else.
      chunk: positions of each device whose logits exist at one time. Changes memory, not the result.
      vocab_axis: the mesh axis over which both heads stay split, along the vocabulary.
      target_ids_V: rows of the teacher's head that the student's vocabulary has, all of it on each device; None: all,
        in order. The teacher's softmax is taken over them alone.

    Returns:
      (loss, ce_sum_K, correct_K), float32: without gradients the sums over supervised positions (weight > 0) of the
      cross-entropy, and of whether the teacher's most likely token is the student's.
    """
    plan = _Plan(chunk, head_spec, teacher_spec, vocab_axis)
    return _cross_entropy(hidden_KxNxH, head, _Soft(teacher_hidden_NxT, teacher_head, target_ids_V), weight_KxN, plan)


def hard_cross_entropy(
    hidden_NxH: jax.Array,
    head: jax.Array,
    labels_N: jax.Array,
    weight_N: jax.Array,
    *,
    chunk: int,
    head_spec: PartitionSpec | None = None,
    vocab_axis: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sum of weight * CE against token ids; arguments and results as in `soft_cross_entropy`, without K."""
    plan = _Plan(chunk, head_spec, None, vocab_axis)
    loss, ce_sum_1, correct_1 = _cross_entropy(hidden_NxH[None], head, _Hard(labels_N), weight_N[None], plan)
    return loss, ce_sum_1[0], correct_1[0]


def best_is_among(
    teacher_hidden_NxT: jax.Array,
    teacher_head: jax.Array,
    target_ids_V: jax.Array,
    wanted_N: jax.Array,
    *,
    chunk: int,
    teacher_spec: PartitionSpec | None = None,
    vocab_axis: str | None = None,
) -> jax.Array:
    """Whether the teacher's most likely token is one of `target_ids_V`. Bool (N,), False where it is not wanted."""
    dtype, axis = teacher_hidden_NxT.dtype, vocab_axis
    head_UxT = gather_weight(teacher_head, teacher_spec, dtype, keep=axis)
    among = jnp.zeros(head_UxT.shape[0] * _size(axis), bool).at[target_ids_V].set(True)
    chunks = _Chunks(wanted_N, chunk, axis)

    def body(i, result):
        logits_CxU = _product(chunks.take(i, teacher_hidden_NxT), head_UxT, 1, 1)
        found_C = among[_first_best(logits_CxU, _max(logits_CxU, axis), axis)]
        return lax.dynamic_update_slice_in_dim(result, chunks.own(found_C), i * chunks.size, 0)

    result = lax.fori_loop(0, chunks.count, body, jnp.zeros(chunks.capacity, bool))
    return chunks.put_back(result)


# ---- one pass


class _Plan(NamedTuple):
    chunk: int
    head_spec: PartitionSpec | None
    teacher_spec: PartitionSpec | None
    vocab_axis: str | None


class _Soft(NamedTuple):
    hidden_NxT: jax.Array
    head: jax.Array
    target_ids_V: jax.Array | None


class _Hard(NamedTuple):
    labels_N: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _cross_entropy(hidden_KxNxH, head, teacher: _Soft | _Hard, weight_KxN, plan: _Plan):
    sums, _ = _one_pass(hidden_KxNxH, head, teacher, weight_KxN, plan, with_gradients=False)
    return sums


def _forward(hidden_KxNxH, head, teacher, weight_KxN, plan):
    return _one_pass(hidden_KxNxH, head, teacher, weight_KxN, plan, with_gradients=True)


def _backward(plan, gradients, cotangents):
    dhidden_KxNxH, dhead = gradients
    cotangent = cotangents[0]  # of the loss; the other sums are for the reader
    return (dhidden_KxNxH * cotangent).astype(dhidden_KxNxH.dtype), dhead * cotangent, None, None


_cross_entropy.defvjp(_forward, _backward)


def _one_pass(hidden_KxNxH, head, teacher, weight_KxN, plan, *, with_gradients: bool):
    """((loss, ce_sum_K, correct_K), (gradient of hidden, gradient of the head's shard in float32) or None)."""
    K, _, H = hidden_KxNxH.shape
    dtype, axis = hidden_KxNxH.dtype, plan.vocab_axis
    head_VxH = gather_weight(head, plan.head_spec, dtype, keep=axis)
    V = head_VxH.shape[0]
    if isinstance(teacher, _Soft):
        teacher_VxT = gather_weight(teacher.head, plan.teacher_spec, dtype, keep=axis)
        if teacher.target_ids_V is not None:
            teacher_VxT = _rows(teacher_VxT, teacher.target_ids_V, axis)
    chunks = _Chunks(jnp.any(weight_KxN > 0, axis=0), plan.chunk, axis)
    id_V = jnp.arange(V) + _index(axis) * V

    def lesson(i):
        """(the teacher's probabilities, None for one token; that token, or the most likely one)."""
        if isinstance(teacher, _Hard):
            return None, chunks.take(i, teacher.labels_N)
        logits_CxV = _product(chunks.take(i, teacher.hidden_NxT), teacher_VxT, 1, 1)
        max_C = _max(logits_CxV, axis)
        exp_CxV = jnp.exp(logits_CxV - max_C[:, None])
        probability_CxV = exp_CxV / _sum(jnp.sum(exp_CxV, axis=-1), axis)[:, None]
        return probability_CxV, _first_best(logits_CxV, max_C, axis)

    def body(i, carry):
        sums, dhidden_KxNxH, dhead_VxH = carry
        probability_CxV, best_C = lesson(i)
        best_CxV = best_C[:, None] == id_V

        def step(_, inputs):  # one k at a time: unrolled, the logits of all K would be alive together
            hidden_CxH, weight_C = inputs
            logits_CxV = _product(hidden_CxH, head_VxH, 1, 1)
            max_C = _max(logits_CxV, axis)
            exp_CxV = jnp.exp(logits_CxV - max_C[:, None])
            sum_C = _sum(jnp.sum(exp_CxV, axis=-1), axis)
            at_best_C = jnp.sum(jnp.where(best_CxV, logits_CxV, 0), axis=-1)
            expected_C = at_best_C if probability_CxV is None else jnp.sum(probability_CxV * logits_CxV, axis=-1)
            # What all devices of the axis know is shared out, so that their contributions add up.
            ce_C = (max_C + jnp.log(sum_C)) / _size(axis) - expected_C
            correct_C = (_sum(at_best_C, axis) == max_C) / _size(axis)
            supervised_C = weight_C > 0
            sums = jnp.sum(weight_C * ce_C), jnp.sum(supervised_C * ce_C), jnp.sum(supervised_C * correct_C)
            if not with_gradients:
                return None, (sums, None)
            taught_CxV = best_CxV if probability_CxV is None else probability_CxV
            dlogits_CxV = ((exp_CxV / sum_C[:, None] - taught_CxV) * weight_C[:, None]).astype(dtype)
            dhidden_CxH = scatter_rows(_product(dlogits_CxV, head_VxH, 1, 0), axis).astype(dtype)
            return None, (sums, (dlogits_CxV, dhidden_CxH))

        hidden_KxCxH = chunks.take(i, hidden_KxNxH, leading=1)
        _, (new, gradients) = lax.scan(step, None, (hidden_KxCxH, chunks.take(i, weight_KxN, leading=1)))
        sums = sums[0] + jnp.sum(new[0]), sums[1] + new[1], sums[2] + new[2]
        if with_gradients:
            dlogits_KxCxV, part_KxCxH = gradients
            # All K in one product: the float32 sum is read and written once a chunk.
            dhead_VxH += _product(dlogits_KxCxV.reshape(-1, V), hidden_KxCxH.reshape(-1, H), 0, 0)
            dhidden_KxNxH = lax.dynamic_update_slice_in_dim(dhidden_KxNxH, part_KxCxH, i * chunks.size, 1)
        return sums, dhidden_KxNxH, dhead_VxH

    zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
    gradients = (jnp.zeros((K, chunks.capacity, H), dtype), zeros((V, H))) if with_gradients else (None, None)
    sums, dhidden, dhead = lax.fori_loop(0, chunks.count, body, ((zeros(()), zeros(K), zeros(K)), *gradients))
    if not with_gradients:
        return sums, None
    # Reduced here: the whole float32 gradient of the head does not live through the backward pass of the rest.
    return sums, (chunks.put_back(dhidden, axis=1), reduce_gradient(dhead, plan.head_spec, keep=axis))


class _Chunks:
    """The wanted positions of each device in chunks of `size`, as many (`count`, traced) as there are.

    Along `vocab_axis` all devices walk as many as the one with the most, and see the positions of all of them.
    """

    def __init__(self, wanted_N: jax.Array, size: int, vocab_axis: str | None):
        N = wanted_N.shape[0]
        self.size = min(size, N)
        self.capacity = -(-N // self.size) * self.size
        count = -(-jnp.sum(wanted_N, dtype=jnp.int32) // self.size)
        self.count = count if vocab_axis is None else lax.pmax(count, vocab_axis)
        self._wanted_N, self._axis = wanted_N, vocab_axis
        self._positions = jnp.nonzero(wanted_N, size=self.capacity, fill_value=N)[0]

    def take(self, i: jax.Array, x: jax.Array, leading: int = 0) -> jax.Array:
        """Chunk i of x, whose axis `leading` (0 or 1) is N; zeros beyond the wanted positions."""
        positions_C = lax.dynamic_slice_in_dim(self._positions, i * self.size, self.size)
        chosen = jnp.take(x, positions_C, axis=leading, mode="fill", fill_value=0)
        return gather_rows(chosen, self._axis, dimension=leading)

    def own(self, x_C: jax.Array) -> jax.Array:
        """This device's positions of a chunk."""
        return x_C if self._axis is None else lax.dynamic_slice_in_dim(x_C, _index(self._axis) * self.size, self.size)

    def put_back(self, chunks: jax.Array, axis: int = 0) -> jax.Array:
        """Chunks laid one after another along `axis`, as positions N; zeros where a position was not wanted."""
        place_N = jnp.cumsum(self._wanted_N) - 1
        kept = self._wanted_N.reshape((1,) * axis + (-1,) + (1,) * (chunks.ndim - axis - 1))
        return jnp.where(kept, jnp.take(chunks, place_N, axis=axis, mode="clip"), 0)


# ---- along the vocabulary


def _product(a: jax.Array, b: jax.Array, contract_a: int, contract_b: int) -> jax.Array:
    """Product of matrices over one axis of each, float32."""
    return lax.dot_general(a, b, (((contract_a,), (contract_b,)), ((), ())), preferred_element_type=jnp.float32)


def _max(x_CxV: jax.Array, axis: str | None) -> jax.Array:
    max_C = jnp.max(x_CxV, axis=-1)
    return max_C if axis is None else lax.pmax(max_C, axis)


def _sum(x_C: jax.Array, axis: str | None) -> jax.Array:
    return x_C if axis is None else lax.psum(x_C, axis)


def _first_best(x_CxV: jax.Array, max_C: jax.Array, axis: str | None) -> jax.Array:
    """Id of the first maximum. Two plain reductions: an argmax, which is one of pairs, is slow on a CPU."""
    V = x_CxV.shape[-1]
    id_V = jnp.arange(V) + _index(axis) * V
    first_C = jnp.min(jnp.where(x_CxV == max_C[:, None], id_V, jnp.iinfo(id_V.dtype).max), axis=-1)
    return first_C if axis is None else lax.pmin(first_C, axis)


def _rows(head_UxT: jax.Array, ids: jax.Array, axis: str | None) -> jax.Array:
    """Rows `ids` of a head; where it is split over `axis`, this device's equal part of them."""
    if axis is None:
        return head_UxT[ids]
    U = head_UxT.shape[0]
    local = ids - _index(axis) * U
    held = (local >= 0) & (local < U)
    return scatter_rows(jnp.where(held[:, None], head_UxT.at[local].get(mode="clip"), 0), axis)


def _index(axis: str | None) -> jax.Array | int:
    return 0 if axis is None else lax.axis_index(axis)


def _size(axis: str | None) -> int:
    return 1 if axis is None else lax.axis_size(axis)
