"""Key/value caches, and the attention that writes to one and reads from it.

Axes as in `transformer.py`, and C the positions a cache holds.

Every row has its own positions, so rows of different lengths share a batch. What padding writes past a row's length
is never seen: a query sees the cache up to its own position, and the row's own tokens overwrite those places first.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from osprey_jax.kernels.attention import Attend
from osprey_jax.models.transformer import TransformerConfig


class KVCache(NamedTuple):
    """Keys (after RoPE) and values by position: (B, C, G, h), or (L, B, C, G, h) for a `CausalLM`'s stacked blocks."""

    key: jax.Array
    value: jax.Array


def stacked_cache(config: TransformerConfig, rows: int, length: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache for a `CausalLM`."""
    shape = (config.num_layers, rows, length, config.num_kv_heads, config.head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def layer_caches(config: TransformerConfig, rows: int, length: int, dtype: jnp.dtype) -> list[KVCache]:
    """Empty caches for a `Drafter`, one a layer."""
    shape = (rows, length, config.num_kv_heads, config.head_dim)
    return [KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers)]


def cached_attend(positions_BxS: jax.Array) -> Attend:
    """Attention that puts keys and values at their positions and reads the cache up to each query's position.

    The memory is one layer's `KVCache`; positions past its end are dropped. Softmax in float32.
    """

    def attend(q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, cache: KVCache):
        B, S, N, h = q_BxSxNxh.shape
        rows_Bx1 = jnp.arange(B)[:, None]
        cache = KVCache(
            cache.key.at[rows_Bx1, positions_BxS].set(k_BxSxGxh, mode="drop"),
            cache.value.at[rows_Bx1, positions_BxS].set(v_BxSxGxh, mode="drop"),
        )
        C, G = cache.key.shape[1:3]
        q_BxSxGxqxh = q_BxSxNxh.reshape(B, S, G, N // G, h)  # q query heads share a key/value head
        scores_BxGxqxSxC = h**-0.5 * jnp.einsum(
            "bsgqh,bcgh->bgqsc", q_BxSxGxqxh, cache.key, preferred_element_type=jnp.float32
        )
        seen_BxSxC = jnp.arange(C) <= positions_BxS[..., None]
        weights_BxGxqxSxC = jax.nn.softmax(jnp.where(seen_BxSxC[:, None, None], scores_BxGxqxSxC, -jnp.inf), axis=-1)
        out_BxSxGxqxh = jnp.einsum("bgqsc,bcgh->bsgqh", weights_BxGxqxSxC.astype(cache.value.dtype), cache.value)
        return out_BxSxGxqxh.reshape(B, S, N, h), cache

    return attend
