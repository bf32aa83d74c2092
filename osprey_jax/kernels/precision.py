"""How exact a product is."""

import contextlib

import jax
import jax.numpy as jnp


def exact_products(dtype: jnp.dtype) -> contextlib.AbstractContextManager:
    """float32 means float32: accelerators would otherwise round the factors of a product to fewer bits."""
    return jax.default_matmul_precision("highest") if dtype == jnp.float32 else contextlib.nullcontext()
