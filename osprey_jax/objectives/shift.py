"""Moving rows by a few positions without crossing from one segment into another. Axes: B batch, S sequence."""

import jax
import jax.numpy as jnp


def shift_left(x_BxS: jax.Array, n: int, segment_ids_BxS: jax.Array) -> jax.Array:
    """The value at p+n in place p, 0 where p+n is beyond p's segment. `x` may have more axes."""
    return _keep(_roll(x_BxS, -n), _inside(segment_ids_BxS, -n))


def shift_right(x_BxS: jax.Array, n: int, segment_ids_BxS: jax.Array) -> jax.Array:
    """The value at p-n in place p, 0 where p-n is before p's segment. `x` may have more axes."""
    return _keep(_roll(x_BxS, n), _inside(segment_ids_BxS, n))


def has_left(n: int, segment_ids_BxS: jax.Array) -> jax.Array:
    """Whether p+n lies in p's segment. Bool (B, S)."""
    return _inside(segment_ids_BxS, -n)


def _roll(x: jax.Array, n: int) -> jax.Array:
    """Along axis 1, zeros moving in. Further than the row is long: zeros."""
    S = x.shape[1]
    n = max(-S, min(n, S))
    before, after = max(n, 0), max(-n, 0)
    padding = [(0, 0), (before, after)] + [(0, 0)] * (x.ndim - 2)
    return jax.lax.slice_in_dim(jnp.pad(x, padding), after, after + S, axis=1)


def _inside(segment_ids_BxS: jax.Array, n: int) -> jax.Array:
    return (_roll(segment_ids_BxS, n) == segment_ids_BxS) & (segment_ids_BxS > 0)


def _keep(x: jax.Array, keep_BxS: jax.Array) -> jax.Array:
    return jnp.where(keep_BxS.reshape(keep_BxS.shape + (1,) * (x.ndim - 2)), x, 0)
