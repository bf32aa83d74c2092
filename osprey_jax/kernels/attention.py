"""Causal flash attention within segments, forward and backward, and the choice of its kernel.

Two kernels: `xla` runs anywhere, `mosaic` is tokamax's for recent NVIDIA GPUs.

Axes: B batch, S sequence, N query heads, G key/value heads, h head size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from osprey_jax.command import UserError
from osprey_jax.kernels import blockwise, mosaic
from osprey_jax.kernels.precision import exact_products

Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""What a model's attention layers call: (q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, memory) -> (out_BxSxNxh, memory)."""

Kernel = Literal["xla", "mosaic"]


def choose_kernel(
    requested: Literal["auto", "xla", "mosaic"], *, device: jax.Device, dtype: jnp.dtype, head_dim: int
) -> Kernel:
    """`auto`: mosaic where it can run. The device may be one that is only compiled for.

    Raises:
      UserError: mosaic is requested and cannot run.
    """
    if requested == "xla":
        return "xla"
    unmet = mosaic.unmet(device, dtype, head_dim)
    if unmet is None:
        return "mosaic"
    if requested == "auto":
        return "xla"
    raise UserError(f"attention: mosaic needs {unmet}; or set attention: auto or xla")


def segment_starts(segment_ids_BxS: jax.Array) -> jax.Array:
    """First position of the run of equal ids that a position lies in, int32 (B, S). Padding is a run like any other."""
    index_S = jnp.arange(segment_ids_BxS.shape[1], dtype=jnp.int32)
    changes_BxS = segment_ids_BxS[:, 1:] != segment_ids_BxS[:, :-1]
    first_BxS = jnp.pad(changes_BxS, ((0, 0), (1, 0)))
    return jax.lax.cummax(jnp.where(first_BxS, index_S, 0), axis=1)


@partial(jax.jit, static_argnames="kernel")
def flash_forward(
    q_BxSxNxh: jax.Array, k_BxSxGxh: jax.Array, v_BxSxGxh: jax.Array, start_BxS: jax.Array, *, kernel: Kernel
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Softmax attention of each position i over start[i] <= j <= i, logits scaled by h**-0.5.

    Returns:
      (out_BxSxNxh in q's dtype, (max_BxNxS, sum_BxNxS)): the softmax's maximum and sum of exponentials, float32.
    """
    if kernel == "mosaic":
        return mosaic.forward(q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, start_BxS)
    with exact_products(q_BxSxNxh.dtype):
        return blockwise.forward(q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, start_BxS)


@partial(jax.jit, static_argnames="kernel")
def flash_backward(
    q_BxSxNxh: jax.Array,
    k_BxSxGxh: jax.Array,
    v_BxSxGxh: jax.Array,
    start_BxS: jax.Array,
    out_BxSxNxh: jax.Array,
    residuals: tuple[jax.Array, jax.Array],
    dout_BxSxNxh: jax.Array,
    *,
    kernel: Kernel,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k, v in their dtypes.

    `out` and `residuals` may be those of a softmax over more keys than these: the gradients are then these keys' part.
    """
    arguments = (q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, start_BxS, out_BxSxNxh, residuals, dout_BxSxNxh)
    if kernel == "mosaic":
        return mosaic.backward(*arguments)
    with exact_products(q_BxSxNxh.dtype):
        return blockwise.backward(*arguments)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _flash(q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, start_BxS, kernel: Kernel) -> jax.Array:
    return flash_forward(q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, start_BxS, kernel=kernel)[0]


def _flash_forward(q, k, v, start, kernel):
    out, residuals = flash_forward(q, k, v, start, kernel=kernel)
    return out, (q, k, v, start, out, residuals)


def _flash_backward(kernel, saved, dout):
    return *flash_backward(*saved, dout, kernel=kernel), None


_flash.defvjp(_flash_forward, _flash_backward)


def attend_rows(segment_ids_BxS: jax.Array, kernel: Kernel = "xla") -> Attend:
    """An `Attend` that keeps no memory; rows may hold several segments and padding (segment 0)."""
    start_BxS = segment_starts(segment_ids_BxS)

    def attend(q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, memory):
        return _flash(q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, start_BxS, kernel), memory

    return attend
