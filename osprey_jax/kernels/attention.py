"""Causal self-attention over whole rows: the target's and the backbone's.

Axes: B batch, S sequence, Q queries of a block, N query heads, G key/value heads, h head size.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""What a model's attention layers call: (q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, memory) -> (out_BxSxNxh, memory)."""

QUERY_BLOCK = 256  # queries whose scores exist at one time: (B, N, Q, S), computed again in the backward pass


def attend_rows(segment_ids_BxS: jax.Array) -> Attend:
    """An `Attend` that keeps no memory; rows may hold several segments and padding (segment 0)."""

    def attend(q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, memory):
        def block(q_BxQxNxh, mask_BxQxS):
            return jax.nn.dot_product_attention(q_BxQxNxh, k_BxSxGxh, v_BxSxGxh, mask=mask_BxQxS[:, None])

        return by_query_blocks(block, q_BxSxNxh, segment_ids_BxS), memory

    return attend


def by_query_blocks(
    block: Callable[..., jax.Array], queries: Any, segment_ids_BxS: jax.Array, size: int = QUERY_BLOCK
) -> jax.Array:
    """`block(queries, mask_BxQxS)` for all queries (B, S, ...), `size` of them at a time: memory linear in S.

    Args:
      queries: an array or a pytree of arrays (B, S, ...), everything that belongs to a query.

    Returns:
      What `block` returns, (B, S, ...). Its mask says which keys a query sees: itself and what precedes it in its
      segment.
    """
    B, S = segment_ids_BxS.shape
    keys_S = jnp.arange(S)

    def masked(queries, index_BxQ, segment_BxQ):
        mask_BxQxS = (keys_S <= index_BxQ[..., None]) & (segment_ids_BxS[:, None] == segment_BxQ[..., None])
        return block(queries, mask_BxQxS)

    inputs = (queries, jnp.broadcast_to(keys_S, (B, S)), segment_ids_BxS)
    if size >= S:
        return masked(*inputs)
    blocks = -(-S // size)

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, blocks * size - S)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, blocks, size, *x.shape[2:]), 1, 0)

    out = jax.lax.map(lambda inputs: jax.checkpoint(masked)(*inputs), jax.tree.map(split, inputs))
    return jnp.moveaxis(out, 0, 1).reshape(B, blocks * size, *out.shape[3:])[:, :S]
