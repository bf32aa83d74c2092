"""Attention of the drafter's unroll (EAGLE-3's test-time training).

Step k at position p sees the keys of step 0 at positions up to p, and one key of each step 1..k at p itself: what a
chain of k drafted tokens finds in the cache when it is served. Nothing else.

Axes: B batch, S sequence, Q queries of a block, N query heads, G key/value heads, M = N / G, h head size.
"""

import jax
import jax.numpy as jnp

from osprey_jax.kernels.attention import QUERY_BLOCK, Attend, by_query_blocks

_MASKED = -1e30  # finite: a query of padding that sees no key gives no NaN


def attend_unroll(segment_ids_BxS: jax.Array) -> Attend:
    """An `Attend` whose memory, a tuple of (keys, values), grows by one entry a step. Start it with ()."""

    def attend(q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, memory):
        memory = (*memory, (k_BxSxGxh, v_BxSxGxh))
        (k0, v0), diagonal = memory[0], memory[1:]
        return ttt_attention(q_BxSxNxh, k0, v0, diagonal, segment_ids_BxS), memory

    return attend


def ttt_attention(
    q_BxSxNxh: jax.Array,
    k0_BxSxGxh: jax.Array,
    v0_BxSxGxh: jax.Array,
    diagonal: tuple[tuple[jax.Array, jax.Array], ...],
    segment_ids_BxS: jax.Array,
    *,
    query_block: int = QUERY_BLOCK,
) -> jax.Array:
    """One softmax over the causal keys of step 0 and the diagonal keys of later steps. Returns (B, S, N, h).

    Softmax and sums in float32. `query_block` changes memory, not the result.
    """
    S = q_BxSxNxh.shape[1]

    def block(queries, mask_BxQxS):
        q_BxQxNxh, diagonal = queries
        B, Q, N, h = q_BxQxNxh.shape
        G = k0_BxSxGxh.shape[2]
        q_BxQxGxMxh = q_BxQxNxh.reshape(B, Q, G, N // G, h)
        scores = jnp.einsum("bqgmh,bsgh->bqgms", q_BxQxGxMxh, k0_BxSxGxh, preferred_element_type=jnp.float32)
        scores = jnp.where(mask_BxQxS[:, :, None, None], scores * h**-0.5, _MASKED)
        # Multiply and reduce: as products of matrices these would be B * Q * G tiny ones.
        later = [_over_heads(q_BxQxGxMxh, k).sum(axis=-1, keepdims=True) * h**-0.5 for k, _ in diagonal]
        weights = jax.nn.softmax(jnp.concatenate([scores, *later], axis=-1), axis=-1)
        out = jnp.einsum(
            "bqgms,bsgh->bqgmh",
            weights[..., :S].astype(v0_BxSxGxh.dtype),
            v0_BxSxGxh,
            preferred_element_type=jnp.float32,
        )
        for i, (_, v) in enumerate(diagonal):
            out += _over_heads(weights[..., S + i, None], v)
        return out.reshape(B, Q, N, h).astype(q_BxQxNxh.dtype)

    return by_query_blocks(block, (q_BxSxNxh, diagonal), segment_ids_BxS, query_block)


def _over_heads(x_BxQxGxMxh: jax.Array, y_BxQxGxh: jax.Array) -> jax.Array:
    """Elementwise product in float32, each key/value head serving its M query heads."""
    return x_BxQxGxMxh.astype(jnp.float32) * y_BxQxGxh[:, :, :, None].astype(jnp.float32)
