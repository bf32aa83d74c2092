"""AdamW on float32 masters with global-norm clipping; linear warm-up, then cosine to zero."""

from types import ModuleType

import jax
import jax.numpy as jnp
import optax

from osprey_jax.config import Optimizer


def learning_rate(config: Optimizer, steps: int, xp: ModuleType = jnp) -> optax.Schedule:
    """Rate of the update numbered from 0: (i + 1) / warm-up of the peak, then half a cosine over the rest.

    `xp`: numpy for the reader of a log, who should wait for no device. Source: the release's schedule, so that the
    first update moves and the first after warm-up has the peak rate.
    """
    warmup = int(config.warmup_fraction * steps)

    def rate(i: jax.Array) -> jax.Array:
        rising = (i + 1) / max(warmup, 1)
        falling = 0.5 * (1 + xp.cos(xp.pi * (i - warmup) / max(steps - warmup, 1)))
        return config.learning_rate * xp.where(i < warmup, rising, falling)

    return rate


def make_optimizer(config: Optimizer, steps: int) -> optax.GradientTransformation:
    """Clip by global norm, Adam, decoupled weight decay, scheduled rate."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
        ),
    )
