"""Attention of the drafter's unroll (EAGLE-3's test-time training).

Step k at position p sees the keys of step 0 at positions up to p, and one key of each step 1..k at p itself: what a
chain of k drafted tokens finds in the cache when it is served. Nothing else.

Axes: B batch, S sequence, N query heads, G key/value heads, M = N / G, h head size, k steps so far.
"""

import jax
import jax.numpy as jnp

from osprey_jax.kernels.attention import row_mask
from osprey_jax.models.transformer import Attend


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
) -> jax.Array:
    """One softmax over the causal keys of step 0 and the diagonal keys of later steps. Returns (B, S, N, h).

    The plain form: its logits are (B, N, S, S) in float32.
    """
    B, S, N, h = q_BxSxNxh.shape
    G = k0_BxSxGxh.shape[2]
    scale = h**-0.5
    q_BxSxGxMxh = q_BxSxNxh.reshape(B, S, G, N // G, h)
    logits_BxGxMxSxS = jnp.einsum("bsgmh,btgh->bgmst", q_BxSxGxMxh, k0_BxSxGxh, preferred_element_type=jnp.float32)
    logits_BxGxMxSxS = jnp.where(row_mask(segment_ids_BxS)[:, None, None], logits_BxGxMxSxS * scale, -jnp.inf)
    # Multiply and reduce: as a product of matrices these would be B * S * G tiny ones.
    diagonal_logits = [
        jnp.sum(q_BxSxGxMxh.astype(jnp.float32) * k_BxSxGxh[:, :, :, None].astype(jnp.float32), axis=-1) * scale
        for k_BxSxGxh, _ in diagonal
    ]
    diagonal_BxGxMxSxk = jnp.stack(diagonal_logits, axis=-1).transpose(0, 2, 3, 1, 4) if diagonal else None
    parts = [logits_BxGxMxSxS] if diagonal_BxGxMxSxk is None else [logits_BxGxMxSxS, diagonal_BxGxMxSxk]
    weights = jax.nn.softmax(jnp.concatenate(parts, axis=-1), axis=-1)
    causal_BxGxMxSxS, diagonal_BxGxMxSxk = weights[..., :S], weights[..., S:]
    out_BxSxGxMxh = jnp.einsum(
        "bgmst,btgh->bsgmh", causal_BxGxMxSxS.astype(v0_BxSxGxh.dtype), v0_BxSxGxh, preferred_element_type=jnp.float32
    )
    for i, (_, v_BxSxGxh) in enumerate(diagonal):
        weight_BxSxGxM = diagonal_BxGxMxSxk[..., i].transpose(0, 3, 1, 2)
        out_BxSxGxMxh += weight_BxSxGxM[..., None] * v_BxSxGxh[:, :, :, None].astype(jnp.float32)
    return out_BxSxGxMxh.reshape(B, S, N, h).astype(q_BxSxNxh.dtype)
