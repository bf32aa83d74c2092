"""Cross-entropy of heads over large vocabularies, a chunk of positions at a time: no array of shape (.., S, V).

Axes: K steps that share a teacher, B batch, S positions of a row, C positions of a chunk, H student width, T teacher
width, V vocabulary of the student's head, U of the teacher's.

The teacher comes as its last hidden state and head, never as logits. The backward pass computes a chunk's logits
again; gradients of the head add up in float32, because it is cast to the compute dtype inside the loop.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def soft_cross_entropy(
    hidden_KxBxSxH: jax.Array,
    head_VxH: jax.Array,
    teacher_hidden_BxSxT: jax.Array,
    teacher_head_UxT: jax.Array,
    weight_KxBxS: jax.Array,
    *,
    target_ids_V: jax.Array | None,
    chunk: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sum over k, b, s of weight * CE(teacher's softmax, student's softmax). All products in the dtype of `hidden`.

    Args:
      teacher_hidden_BxSxT: a row of zeros teaches the uniform distribution.
      weight_KxBxS: float32, scaling and mask in one. Differentiated: `hidden` and `head`, nothing else.
      target_ids_V: rows of the teacher's head that the student's vocabulary has; None: all, in order. The teacher's
        softmax is taken over them alone.
      chunk: positions of a row whose logits exist at one time. Changes memory, not the result.

    Returns:
      (loss, ce_KxBxS, correct_KxBxS): float32 scalar; cross-entropy and whether both have the same most likely token
      at each position, supervised or not, without gradients.
    """
    dtype = hidden_KxBxSxH.dtype

    def body(hidden_KxBxCxH, teacher_hidden_BxCxT, weight_KxBxC):
        teacher_head = jax.lax.stop_gradient(teacher_head_UxT).astype(dtype)
        teacher_logits_BxCxV = _logits(jax.lax.stop_gradient(teacher_hidden_BxCxT).astype(dtype), teacher_head)
        if target_ids_V is not None:
            teacher_logits_BxCxV = teacher_logits_BxCxV[..., target_ids_V]
        teacher_BxCxV = jax.nn.softmax(teacher_logits_BxCxV, axis=-1)
        best_BxC = jnp.argmax(teacher_logits_BxCxV, axis=-1)
        head = head_VxH.astype(dtype)

        def step(loss, inputs):  # one k at a time: unrolled, the logits of all K would be alive together
            hidden_BxCxH, weight_BxC = inputs
            logits_BxCxV = _logits(hidden_BxCxH, head)
            ce_BxC = jax.nn.logsumexp(logits_BxCxV, axis=-1) - jnp.sum(teacher_BxCxV * logits_BxCxV, axis=-1)
            correct_BxC = jnp.argmax(logits_BxCxV, axis=-1) == best_BxC
            return loss + jnp.sum(weight_BxC * ce_BxC), (jax.lax.stop_gradient(ce_BxC), correct_BxC)

        return jax.lax.scan(step, jnp.float32(0), (hidden_KxBxCxH, weight_KxBxC))

    return _by_chunks(body, (hidden_KxBxSxH, teacher_hidden_BxSxT, weight_KxBxS), (2, 1, 2), chunk)


def hard_cross_entropy(
    hidden_BxSxH: jax.Array, head_VxH: jax.Array, labels_BxS: jax.Array, weight_BxS: jax.Array, *, chunk: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sum of weight * CE against token ids; arguments and results as in `soft_cross_entropy`, without K."""

    def body(hidden_BxCxH, labels_BxC, weight_BxC):
        logits_BxCxV = _logits(hidden_BxCxH, head_VxH.astype(hidden_BxCxH.dtype))
        label_logits_BxC = jnp.take_along_axis(logits_BxCxV, labels_BxC[..., None], axis=-1)[..., 0]
        ce_BxC = jax.nn.logsumexp(logits_BxCxV, axis=-1) - label_logits_BxC
        correct_BxC = jnp.argmax(logits_BxCxV, axis=-1) == labels_BxC
        return jnp.sum(weight_BxC * ce_BxC), (jax.lax.stop_gradient(ce_BxC), correct_BxC)

    return _by_chunks(body, (hidden_BxSxH, labels_BxS, weight_BxS), (1, 1, 1), chunk)


def best_is_among(
    teacher_hidden_BxSxT: jax.Array, teacher_head_UxT: jax.Array, target_ids_V: jax.Array, *, chunk: int
) -> jax.Array:
    """Whether the teacher's most likely token is one of `target_ids_V`. Bool (B, S)."""
    among_U = jnp.zeros(teacher_head_UxT.shape[0], bool).at[target_ids_V].set(True)

    def body(teacher_hidden_BxCxT):
        logits_BxCxU = _logits(teacher_hidden_BxCxT, teacher_head_UxT.astype(teacher_hidden_BxCxT.dtype))
        return jnp.float32(0), (among_U[jnp.argmax(logits_BxCxU, axis=-1)],)

    return _by_chunks(body, (teacher_hidden_BxSxT,), (1,), chunk)[1]


def _logits(hidden_xD: jax.Array, head_VxD: jax.Array) -> jax.Array:
    return jnp.einsum("...d,vd->...v", hidden_xD, head_VxD, preferred_element_type=jnp.float32)


def _by_chunks(body: Callable, arrays: tuple[jax.Array, ...], axes: tuple[int, ...], chunk: int) -> tuple:
    """Run `body`, which returns (loss, arrays ending in C), over chunks of the S axis of `arrays`; rejoin the arrays.

    Rows that a chunk does not divide are padded with zeros, whose weight is zero.
    """
    S = arrays[0].shape[axes[0]]
    chunk = min(chunk, S)
    chunks = -(-S // chunk)

    def split(array, axis):
        padding = [(0, 0)] * array.ndim
        padding[axis] = (0, chunks * chunk - S)
        parts = jnp.pad(array, padding).reshape(*array.shape[:axis], chunks, chunk, *array.shape[axis + 1 :])
        return jnp.moveaxis(parts, axis, 0)

    @jax.checkpoint
    def add(loss, parts):
        part_loss, outputs = body(*parts)
        return loss + part_loss, outputs

    loss, outputs = jax.lax.scan(add, jnp.float32(0), tuple(map(split, arrays, axes)))
    join = lambda y: jnp.moveaxis(y, 0, -2).reshape(*y.shape[1:-1], chunks * chunk)[..., :S]
    return (loss, *map(join, outputs))
