"""Text from a language model: prefill, then one token a step, greedy or sampled, a batch of rows at a time.

Axes as in `transformer.py`, and P padded prompt length, R new tokens.

A row's tokens depend on its own prompt, limit and random numbers alone, not on the rows beside it. (Rounding can
differ between batch shapes, and decides where two tokens tie.)
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from osprey_jax.decoding.cache import KVCache, cached_attend, stacked_cache
from osprey_jax.decoding.requests import (
    PREFILL_CHUNK,
    Batch,
    Completion,
    Request,
    limit_bucket,
    make_batch,
    settle,
)
from osprey_jax.kernels.precision import exact_products
from osprey_jax.models.causal_lm import CausalLM


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy. Top-p keeps the fewest tokens whose probabilities, after temperature, reach it."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def generate(
    model: CausalLM,
    requests: Sequence[Request],
    *,
    stop_ids: Sequence[int],
    sampling: Sampling = Sampling(),
    rows: int = 1,
    dtype: jnp.dtype = jnp.float32,
) -> list[Completion]:
    """Complete `requests` in one batch of at least `rows` rows."""
    batch = make_batch(requests, stop_ids, model.config.vocab_size, rows)
    graph, weights = nnx.split(model)
    with exact_products(dtype):
        out_BxR, count_B, stopped_B = jax.device_get(
            _generate(
                graph,
                weights,
                batch,
                jnp.uint32(sampling.seed),
                jnp.float32(sampling.temperature),
                jnp.float32(sampling.top_p),
                new_tokens=limit_bucket(int(batch.limits_B.max())),
                greedy=sampling.temperature == 0,
                truncated=sampling.top_p < 1,
                dtype=dtype,
            )
        )
    return completions(len(requests), out_BxR, count_B, stopped_B)


def completions(n: int, out_BxR: np.ndarray, count_B: np.ndarray, stopped_B: np.ndarray) -> list[Completion]:
    """The first `n` rows of a decoded batch."""
    return [Completion(out_BxR[i, : count_B[i]].tolist(), "stop" if stopped_B[i] else "length") for i in range(n)]


def prefill(
    model: CausalLM,
    batch: Batch,
    cache: KVCache,
    *,
    tap_layers: tuple[int, ...] = (),
    dtype: jnp.dtype,
    follow: Callable[[Any, jax.Array, jax.Array, jax.Array], Any] | None = None,
    followed: Any = None,
) -> tuple[jax.Array, jax.Array | None, KVCache, Any]:
    """Read the prompts into `cache`, a chunk at a time.

    Args:
      follow: called after each chunk as `follow(followed, next_tokens_BxS, taps_BxSx3T, positions_BxS) -> followed`,
        where the next tokens are those of positions + 1 (at and past a prompt's last position: padding).

    Returns:
      (logits_BxV and taps_Bx3T at each prompt's last token, cache, followed).
    """
    B, P = batch.prompt_BxP.shape
    S = min(P, PREFILL_CHUNK)
    chunked = lambda x_BxP: jnp.moveaxis(x_BxP.reshape(B, P // S, S), 1, 0)
    next_BxP = jnp.pad(batch.prompt_BxP[:, 1:], ((0, 0), (0, 1)))
    positions_BxP = jnp.broadcast_to(jnp.arange(P), (B, P))

    def read(carry, chunk):
        cache, last, followed = carry
        tokens_BxS, next_BxS, positions_BxS = chunk
        hidden_BxSxD, taps_BxSx3T, cache = model(
            tokens_BxS, positions_BxS, cached_attend(positions_BxS), cache, tap_layers=tap_layers, dtype=dtype
        )
        if follow is not None:
            followed = follow(followed, next_BxS, taps_BxSx3T, positions_BxS)
        place_B = batch.lengths_B - 1 - positions_BxS[:, 0]
        here_Bx1 = ((place_B >= 0) & (place_B < S))[:, None]
        rows_B = jnp.arange(B)
        last = jax.tree.map(
            lambda old, new_BxSxX: jnp.where(here_Bx1, new_BxSxX[rows_B, jnp.clip(place_B, 0, S - 1)], old),
            last,
            (hidden_BxSxD, taps_BxSx3T),
        )
        return (cache, last, followed), None

    D = model.config.hidden_size
    last = (jnp.zeros((B, D), dtype), jnp.zeros((B, len(tap_layers) * D), dtype) if tap_layers else None)
    chunks = (chunked(batch.prompt_BxP), chunked(next_BxP), chunked(positions_BxP))
    (cache, (hidden_BxD, taps_Bx3T), followed), _ = jax.lax.scan(read, (cache, last, followed), chunks)
    return model.logits(hidden_BxD), taps_Bx3T, cache, followed


@functools.partial(jax.jit, static_argnames=("graph", "new_tokens", "greedy", "truncated", "dtype"))
def _generate(graph, weights, batch, seed, temperature, top_p, *, new_tokens, greedy, truncated, dtype):
    """(out_BxR, count_B, stopped_B). The weights are arguments: closed over, they would be copied into the program."""
    model = nnx.merge(graph, weights)
    B, P = batch.prompt_BxP.shape
    keys_B = jax.vmap(lambda record, turn: jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), record), turn))(
        batch.records_B, batch.turns_B
    )

    def choose(logits_BxV, step):
        if greedy:
            return jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
        logits_BxV = logits_BxV / temperature
        if truncated:
            logits_BxV = jnp.where(nucleus(logits_BxV, top_p), logits_BxV, -jnp.inf)
        draw = lambda key, logits_V: jax.random.categorical(jax.random.fold_in(key, step), logits_V)
        return jax.vmap(draw)(keys_B, logits_BxV).astype(jnp.int32)

    def keep(out_BxR, count_B, stopped_B, done_B, token_B, step):
        """Add one token to the rows still decoding."""
        out_BxR = out_BxR.at[:, step].set(token_B)
        new_count_B, new_stopped_B, new_done_B = settle(
            count_B, token_B[:, None], jnp.ones_like(count_B), batch.limits_B, batch.stop_ids
        )
        return (
            out_BxR,
            jnp.where(done_B, count_B, new_count_B),
            stopped_B | new_stopped_B,
            done_B | new_done_B,
        )

    cache = stacked_cache(model.config, B, P + new_tokens, dtype)
    logits_BxV, _, cache, _ = prefill(model, batch, cache, dtype=dtype)
    token_B = choose(logits_BxV, 0)
    nothing = (jnp.zeros((B, new_tokens), jnp.int32), jnp.zeros(B, jnp.int32), jnp.zeros(B, bool), batch.limits_B == 0)
    carry = (jnp.int32(1), token_B, cache, *keep(*nothing, token_B, 0))

    def step(carry):
        step, token_B, cache, *kept = carry
        positions_Bx1 = (batch.lengths_B + step - 1)[:, None]
        hidden_Bx1xD, _, cache = model(
            token_B[:, None], positions_Bx1, cached_attend(positions_Bx1), cache, dtype=dtype
        )
        token_B = choose(model.logits(hidden_Bx1xD[:, 0]), step)
        return (step + 1, token_B, cache, *keep(*kept, token_B, step))

    *_, out_BxR, count_B, stopped_B, _ = jax.lax.while_loop(lambda carry: ~jnp.all(carry[-1]), step, carry)
    return out_BxR, count_B, stopped_B


def nucleus(logits_BxV: jax.Array, top_p: jax.Array) -> jax.Array:
    """True for the likeliest tokens that together reach probability `top_p`; always for the likeliest one."""
    sorted_BxV = jnp.sort(logits_BxV, axis=-1, descending=True)
    probability_BxV = jax.nn.softmax(sorted_BxV, axis=-1)
    before_BxV = jnp.cumsum(probability_BxV, axis=-1) - probability_BxV
    least_B = jnp.min(jnp.where(before_BxV < top_p, sorted_BxV, jnp.inf), axis=-1)
    return logits_BxV >= least_B[:, None]
