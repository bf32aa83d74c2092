"""Causal self-attention over whole rows: the target's and the backbone's.

Axes: B batch, S sequence, N query heads, G key/value heads, h head size.
"""

import jax
import jax.numpy as jnp

from osprey_jax.models.transformer import Attend


def row_mask(segment_ids_BxS: jax.Array) -> jax.Array:
    """Which key (last axis) a query sees: itself and what precedes it in its segment. Bool (B, S, S)."""
    S = segment_ids_BxS.shape[1]
    causal_SxS = jnp.tril(jnp.ones((S, S), bool))
    return causal_SxS & (segment_ids_BxS[:, :, None] == segment_ids_BxS[:, None, :])


def attend_rows(segment_ids_BxS: jax.Array) -> Attend:
    """An `Attend` that keeps no memory; rows may hold several segments and padding (segment 0)."""
    mask_Bx1xSxS = row_mask(segment_ids_BxS)[:, None]

    def attend(q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, memory):
        return jax.nn.dot_product_attention(q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, mask=mask_Bx1xSxS), memory

    return attend
