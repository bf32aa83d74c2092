"""Attention of the drafter's unroll (EAGLE-3's test-time training).

Step k at position p sees the keys of step 0 at positions up to p, and one key of each step 1..k at p itself: what a
chain of k drafted tokens finds in the cache when it is served. Nothing else.

Causal flash attention over the keys of step 0 is merged with the k diagonal logits through the log-sum-exp. The
gradients are written out: flash kernels ignore the cotangent of their log-sum-exp without an error. With the merged
output and residuals, the flash kernel's backward pass gives exactly the part of the step-0 keys.

Axes: B batch, S sequence, N query heads, G key/value heads, M = N / G, h head size.
"""

from functools import partial

import jax
import jax.numpy as jnp

from osprey_jax.kernels.attention import Attend, Kernel, flash_backward, flash_forward, segment_starts

Diagonal = tuple[tuple[jax.Array, jax.Array], ...]
"""(keys_BxSxGxh, values_BxSxGxh) of each later step."""


def attend_unroll(segment_ids_BxS: jax.Array, kernel: Kernel = "xla") -> Attend:
    """An `Attend` whose memory, a tuple of (keys, values), grows by one entry a step. Start it with ()."""
    start_BxS = segment_starts(segment_ids_BxS)

    def attend(q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, memory):
        memory = (*memory, (k_BxSxGxh, v_BxSxGxh))
        (k0, v0), diagonal = memory[0], memory[1:]
        return ttt_attention(q_BxSxNxh, k0, v0, diagonal, start_BxS, kernel), memory

    return attend


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def ttt_attention(
    q_BxSxNxh: jax.Array,
    k0_BxSxGxh: jax.Array,
    v0_BxSxGxh: jax.Array,
    diagonal: Diagonal,
    start_BxS: jax.Array,
    kernel: Kernel,
) -> jax.Array:
    """One softmax over the keys of step 0 from `start` on and the diagonal keys of later steps. Returns (B, S, N, h).

    Softmax and sums in float32, products of matrices in q's dtype.
    """
    return _forward(q_BxSxNxh, k0_BxSxGxh, v0_BxSxGxh, diagonal, start_BxS, kernel)[0]


def _forward(q, k0, v0, diagonal, start, kernel):
    out, (max_BxNxS, sum_BxNxS) = flash_forward(q, k0, v0, start, kernel=kernel)
    if diagonal:
        logits_BxSxN = [_dots(q, k) * q.shape[-1] ** -0.5 for k, _ in diagonal]
        max0_BxSxN, sum0_BxSxN = _swap(max_BxNxS), _swap(sum_BxNxS)
        max_BxSxN = jnp.max(jnp.stack([max0_BxSxN, *logits_BxSxN]), axis=0)
        kept_BxSxN = sum0_BxSxN * jnp.exp(max0_BxSxN - max_BxSxN)
        weights_BxSxN = [jnp.exp(logits - max_BxSxN) for logits in logits_BxSxN]
        sum_BxSxN = kept_BxSxN + sum(weights_BxSxN)
        merged = out.astype(jnp.float32) * (kept_BxSxN / sum_BxSxN)[..., None]
        for weights, (_, v) in zip(weights_BxSxN, diagonal, strict=True):
            merged += _times(weights / sum_BxSxN, v)
        # The barrier: what is kept for the backward pass is this, not the float32 that it is rounded from.
        out, max_BxNxS, sum_BxNxS = (
            jax.lax.optimization_barrier(merged.astype(q.dtype)),
            _swap(max_BxSxN),
            _swap(sum_BxSxN),
        )
    return out, (q, k0, v0, diagonal, start, out, (max_BxNxS, sum_BxNxS))


def _backward(kernel, saved, dout):
    q, k0, v0, diagonal, start, out, residuals = saved
    dq, dk0, dv0 = flash_backward(q, k0, v0, start, out, residuals, dout, kernel=kernel)
    if not diagonal:
        return dq, dk0, dv0, (), None
    G, scale = k0.shape[2], q.shape[-1] ** -0.5
    max_BxSxN, sum_BxSxN = map(_swap, residuals)
    delta_BxSxN = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    dq, ddiagonal = dq.astype(jnp.float32), []
    for k, v in diagonal:
        weights_BxSxN = jnp.exp(_dots(q, k) * scale - max_BxSxN) / sum_BxSxN
        dlogits_BxSxN = weights_BxSxN * (_dots(dout, v) - delta_BxSxN) * scale
        dq += _times(dlogits_BxSxN, k)
        dk, dv = _over_groups(dlogits_BxSxN, q, G), _over_groups(weights_BxSxN, dout, G)
        ddiagonal.append((dk.astype(k.dtype), dv.astype(v.dtype)))
    return dq.astype(q.dtype), dk0, dv0, tuple(ddiagonal), None


ttt_attention.defvjp(_forward, _backward)


# Multiply and reduce in float32: as products of matrices the diagonals would be B * S * G tiny ones.


def _dots(x_BxSxNxh: jax.Array, y_BxSxGxh: jax.Array) -> jax.Array:
    """Of each query head with its key/value head, (B, S, N)."""
    B, S, N, h = x_BxSxNxh.shape
    G = y_BxSxGxh.shape[2]
    products = x_BxSxNxh.reshape(B, S, G, N // G, h).astype(jnp.float32) * y_BxSxGxh[:, :, :, None].astype(jnp.float32)
    return products.sum(axis=-1).reshape(B, S, N)


def _times(weights_BxSxN: jax.Array, y_BxSxGxh: jax.Array) -> jax.Array:
    """Each query head's weight times its key/value head, (B, S, N, h)."""
    B, S, G, h = y_BxSxGxh.shape
    N = weights_BxSxN.shape[2]
    return (weights_BxSxN.reshape(B, S, G, N // G, 1) * y_BxSxGxh[:, :, :, None].astype(jnp.float32)).reshape(
        B, S, N, h
    )


def _over_groups(weights_BxSxN: jax.Array, x_BxSxNxh: jax.Array, G: int) -> jax.Array:
    """Weighted sums over the query heads of each key/value head, (B, S, G, h)."""
    B, S, N, h = x_BxSxNxh.shape
    return (weights_BxSxN[..., None] * x_BxSxNxh.astype(jnp.float32)).reshape(B, S, G, N // G, h).sum(axis=3)


def _swap(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, 1, 2)
