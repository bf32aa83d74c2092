"""Inputs of the attention kernels."""

import jax.numpy as jnp
import numpy as np


def packed_rows(S, rng):
    """Two rows (2, S): many segments, some of one position; and one long segment before padding."""
    cuts = np.sort(rng.choice(np.arange(1, S), size=min(S // 3, 12), replace=False))
    cuts = np.union1d(cuts, cuts[:1] + 1) % S
    many = 1 + np.searchsorted(np.unique(cuts), np.arange(S), side="right")
    padded = np.where(np.arange(S) < S - S // 4, 1, 0)
    return np.stack([many, padded]).astype(np.int32)


def normal(rng, *shape, scale=1.0):
    return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)
