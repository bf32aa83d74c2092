"""Greedy chain speculation, as SGLang serves EAGLE-3 with top-k 1: the drafter proposes, the target verifies.

Axes as in `transformer.py`, and P padded prompt length, R new tokens, H drafter width, T target width, K draft steps,
J = K + 1 the positions of one verification.

With n tokens known in a row, prompt and generated, the target's cache holds positions 0..n-2 and the drafter's the
same: at position p it has read the token x[p+1] and the target's feature of p. A step is then

1. re-read: the drafter reads the tokens that the last verification added, with the target's true features; its
   stream at p = n-2 gives the first drafted token;
2. draft: K-1 steps more, step k at position p+k with the token drafted before and the un-normed stream as feature;
3. verify: the target reads x[n-1] and the K drafted tokens in one forward pass, accepts the longest prefix equal to
   its own choices, and adds the choice that follows it.

What 2 and 3 write for rejected tokens lies past the known ones, and the next step overwrites it before it is seen.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from osprey_jax.decoding.cache import KVCache, cached_attend, layer_caches, stacked_cache
from osprey_jax.decoding.generate import completions, prefill
from osprey_jax.decoding.requests import Batch, Completion, Request, limit_bucket, make_batch, settle
from osprey_jax.kernels.precision import exact_products
from osprey_jax.models.causal_lm import CausalLM
from osprey_jax.models.drafter import Drafter


@dataclasses.dataclass(frozen=True)
class Speculation:
    """A completion and what it took.

    SGLang's bookkeeping (0.5.23: `_resolve_spec_v2_tokens` in managers/scheduler_components/batch_result_processor.py,
    `update_finish_state` in managers/schedule_batch.py, `spec_accept_length` in
    managers/tokenizer_manager.py): the first token, from the prefill, is a completion token without a verification;
    the verification in which a request ends counts in full, and the histogram holds all it accepted, while the
    completion is cut at the stop token or the limit.
    """

    completion: Completion
    verifications: int
    histogram: tuple[int, ...]  # verifications that accepted 0, 1, .. K drafted tokens

    @property
    def accepted_length(self) -> float | None:
        """Completion tokens / verifications; None (as SGLang, which leaves it out) where the first token ended it."""
        return len(self.completion.token_ids) / self.verifications if self.verifications else None


def speculate(
    target: CausalLM,
    drafter: Drafter,
    requests: Sequence[Request],
    *,
    tap_layers: tuple[int, int, int],
    draft_steps: int,
    stop_ids: Sequence[int],
    rows: int = 1,
    dtype: jnp.dtype = jnp.float32,
) -> list[Speculation]:
    """Complete `requests` greedily in one batch of at least `rows` rows; the drafter changes the speed, not the text.

    Args:
      tap_layers: blocks of the target whose outputs the drafter reads, 0-based, ascending.
      draft_steps: K, tokens drafted before each verification.
    """
    batch = make_batch(requests, stop_ids, target.config.vocab_size, rows)
    target_graph, target_weights = nnx.split(target)
    drafter_graph, drafter_weights = nnx.split(drafter)
    with exact_products(dtype):
        end = _speculate(
            target_graph,
            target_weights,
            drafter_graph,
            drafter_weights,
            batch,
            new_tokens=limit_bucket(int(batch.limits_B.max())),
            tap_layers=tap_layers,
            draft_steps=draft_steps,
            dtype=dtype,
        )
    out_BxR, count_B, stopped_B, histogram_BxJ = jax.device_get(end)
    texts = completions(len(requests), out_BxR, count_B, stopped_B)
    return [
        Speculation(text, int(histogram_J.sum()), tuple(histogram_J.tolist()))
        for text, histogram_J in zip(texts, histogram_BxJ, strict=False)  # rows beyond the requests are empty
    ]


class _State(NamedTuple):
    """Of every row, between two steps."""

    target_cache: KVCache
    drafter_cache: list[KVCache]
    known_B: jax.Array  # n, without what the last verification added
    new_BxJ: jax.Array  # what it added,
    num_new_B: jax.Array  # how many of them,
    taps_BxJx3T: jax.Array  # and the target's features of positions n-1, n, ..
    out_BxR: jax.Array
    count_B: jax.Array
    stopped_B: jax.Array
    done_B: jax.Array
    histogram_BxJ: jax.Array


@functools.partial(
    jax.jit, static_argnames=("target_graph", "drafter_graph", "new_tokens", "tap_layers", "draft_steps", "dtype")
)
def _speculate(
    target_graph,
    target_weights,
    drafter_graph,
    drafter_weights,
    batch: Batch,
    *,
    new_tokens: int,
    tap_layers: tuple[int, int, int],
    draft_steps: int,
    dtype: jnp.dtype,
):
    """(out_BxR, count_B, stopped_B, histogram_BxJ). Weights are arguments, or they would be copied into the program."""
    target = nnx.merge(target_graph, target_weights)
    drafter = nnx.merge(drafter_graph, drafter_weights)
    (B, P), J = batch.prompt_BxP.shape, draft_steps + 1
    rows_B, j_J = jnp.arange(B), jnp.arange(J)

    def read(cache, token_ids_BxS, feature_BxSxH, positions_BxS):
        """One forward pass of the drafter: (un-normed stream_BxSxH, cache)."""
        embedding_BxSxH = drafter.embed_tokens(token_ids_BxS, dtype)
        return drafter(embedding_BxSxH, feature_BxSxH, positions_BxS, cached_attend(positions_BxS), cache)

    def start() -> _State:
        capacity = P + new_tokens + J
        logits_BxV, taps_Bx3T, target_cache, drafter_cache = prefill(
            target,
            batch,
            stacked_cache(target.config, B, capacity, dtype),
            tap_layers=tap_layers,
            dtype=dtype,
            follow=lambda cache, next_BxS, taps_BxSx3T, positions_BxS: read(
                cache, next_BxS, drafter.project(taps_BxSx3T), positions_BxS
            )[1],
            followed=layer_caches(drafter.config.transformer, B, capacity, dtype),
        )
        state = _State(
            target_cache,
            drafter_cache,
            known_B=batch.lengths_B,
            new_BxJ=jnp.zeros((B, J), jnp.int32).at[:, 0].set(jnp.argmax(logits_BxV, axis=-1)),
            num_new_B=jnp.ones(B, jnp.int32),
            taps_BxJx3T=jnp.zeros((B, J, taps_Bx3T.shape[-1]), dtype).at[:, 0].set(taps_Bx3T),
            out_BxR=jnp.zeros((B, new_tokens), jnp.int32),
            count_B=jnp.zeros(B, jnp.int32),
            stopped_B=jnp.zeros(B, bool),
            done_B=batch.limits_B == 0,
            histogram_BxJ=jnp.zeros((B, J), jnp.int32),
        )
        return keep(state)

    def keep(state: _State) -> _State:
        """Add the new tokens to the rows still decoding."""
        places_BxJ = state.count_B[:, None] + j_J
        valid_BxJ = (j_J < state.num_new_B[:, None]) & ~state.done_B[:, None]
        out_BxR = state.out_BxR.at[rows_B[:, None], jnp.where(valid_BxJ, places_BxJ, new_tokens)].set(
            state.new_BxJ, mode="drop"
        )
        count_B, stopped_B, done_B = settle(
            state.count_B, state.new_BxJ, state.num_new_B, batch.limits_B, batch.stop_ids
        )
        return state._replace(
            out_BxR=out_BxR,
            count_B=jnp.where(state.done_B, state.count_B, count_B),
            stopped_B=state.stopped_B | stopped_B,
            done_B=state.done_B | done_B,
        )

    def draft(state: _State):
        """(drafted_BxK, drafter_cache): re-read what is new, then go on alone."""
        stream_BxJxH, cache = read(
            state.drafter_cache,
            state.new_BxJ,
            drafter.project(state.taps_BxJx3T),
            (state.known_B - 1)[:, None] + j_J,
        )
        last_B = state.num_new_B - 1
        stream_Bx1xH = stream_BxJxH[rows_B, last_B][:, None]
        position_Bx1 = (state.known_B - 1 + last_B)[:, None]

        def choose(stream_Bx1xH):
            best_Bx1 = jnp.argmax(drafter.logits(stream_Bx1xH), axis=-1)
            return drafter.to_target_ids(best_Bx1).astype(jnp.int32)

        def step(carry, k):
            cache, stream_Bx1xH, token_Bx1 = carry
            stream_Bx1xH, cache = read(cache, token_Bx1, stream_Bx1xH, position_Bx1 + k)
            token_Bx1 = choose(stream_Bx1xH)
            return (cache, stream_Bx1xH, token_Bx1), token_Bx1[:, 0]

        first_Bx1 = choose(stream_Bx1xH)
        (cache, _, _), rest_KxB = jax.lax.scan(step, (cache, stream_Bx1xH, first_Bx1), jnp.arange(1, draft_steps))
        return jnp.concatenate([first_Bx1, rest_KxB.T], axis=1), cache

    def verify(state: _State) -> _State:
        drafted_BxK, drafter_cache = draft(state)
        known_B = state.known_B + state.num_new_B
        newest_Bx1 = state.new_BxJ[rows_B, state.num_new_B - 1][:, None]
        positions_BxJ = (known_B - 1)[:, None] + j_J
        hidden_BxJxD, taps_BxJx3T, target_cache = target(
            jnp.concatenate([newest_Bx1, drafted_BxK], axis=1),
            positions_BxJ,
            cached_attend(positions_BxJ),
            state.target_cache,
            tap_layers=tap_layers,
            dtype=dtype,
        )
        chosen_BxJ = jnp.argmax(target.logits(hidden_BxJxD), axis=-1).astype(jnp.int32)
        accepted_B = jnp.sum(jnp.cumprod(drafted_BxK == chosen_BxJ[:, :-1], axis=1), axis=1)
        counted_BxJ = (j_J == accepted_B[:, None]) & ~state.done_B[:, None]
        return keep(
            state._replace(
                target_cache=target_cache,
                drafter_cache=drafter_cache,
                known_B=known_B,
                new_BxJ=chosen_BxJ,
                num_new_B=accepted_B + 1,
                taps_BxJx3T=taps_BxJx3T,
                histogram_BxJ=state.histogram_BxJ + counted_BxJ,
            )
        )

    end = jax.lax.while_loop(lambda state: ~jnp.all(state.done_B), verify, start())
    return end.out_BxR, end.count_B, end.stopped_B, end.histogram_BxJ
