"""Distillation by test-time training (stage 4): the drafter unrolled K steps against the target's distributions.

Axes: B batch, S sequence, K steps, H drafter width, T target width, V vocabulary. Source of the unroll: EAGLE-3
(arXiv:2503.01840); of the released masks and normalisation: Osprey's training code.

Position p holds the target's feature after token x[p]; step k reads token x[p+1+k] and predicts the target's
distribution at x[p+1+k]. Everything about step k is kept at u = p + k, where all steps share one teacher row.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from osprey_jax.config import TTT
from osprey_jax.kernels.attention import attend_rows
from osprey_jax.kernels.soft_cross_entropy import best_is_among, soft_cross_entropy
from osprey_jax.kernels.ttt_attention import attend_unroll
from osprey_jax.models.drafter import Drafter
from osprey_jax.objectives.objective import Batch
from osprey_jax.objectives.shift import has_left, shift_left, shift_right


@dataclasses.dataclass(frozen=True)
class Distillation:
    """Sum over steps k of decay^k times the step's soft cross-entropy. `frozen` is the target's parameters."""

    drafter_def: nnx.GraphDef  # merges with params and constants
    target_def: nnx.GraphDef
    tap_layers: tuple[int, int, int]
    ttt: TTT
    dtype: jnp.dtype

    def teach(self, constants: nnx.State, frozen: nnx.State, batch: Batch) -> dict[str, jax.Array]:
        """The target's taps (B, S, 3T) at p, and its last hidden state (B, S, T) moved to the u it teaches.

        Beyond a segment's end the hidden state is zero, which teaches the uniform distribution, as in the release.
        With a trimmed vocabulary also `among` (B, S): whether the target's most likely token is in it.
        """
        target = nnx.merge(self.target_def, frozen)
        hidden_BxSxT, taps_BxSx3T, _ = target(
            batch["token_ids"],
            batch["positions"],
            attend_rows(batch["segment_ids"]),
            tap_layers=self.tap_layers,
            dtype=self.dtype,
        )
        hidden_BxSxT = shift_left(hidden_BxSxT, 1, batch["segment_ids"])
        lessons = {"taps": taps_BxSx3T, "hidden": hidden_BxSxT}
        if "target_ids" in constants:
            target_ids_V = constants["target_ids"].get_value()
            lessons["among"] = best_is_among(hidden_BxSxT, target.head_VxD, target_ids_V, chunk=self.ttt.loss_chunk)
        return lessons

    def weights(self, batch: Batch, lessons: dict[str, jax.Array]) -> jax.Array:
        """(K, B, S) at u = p + k, without decay."""
        mask_KxBxS = supervised(batch, self.ttt)
        if "among" in lessons:
            mask_KxBxS = mask_KxBxS & lessons["among"]
        mask_KxBxS = mask_KxBxS.astype(jnp.float32)
        if self.ttt.normalization == "token":
            return mask_KxBxS / jnp.maximum(jnp.sum(mask_KxBxS, axis=(1, 2), keepdims=True), 1)
        length_BxS, sequences = segment_lengths(batch["segment_ids"])
        return mask_KxBxS / (jnp.maximum(length_BxS, 1) * jnp.maximum(sequences, 1))

    def loss(self, params, constants, frozen, batch: Batch, lessons: dict[str, jax.Array], weights_KxBxS: jax.Array):
        drafter = nnx.merge(self.drafter_def, params, constants)
        K, segments = self.ttt.length, batch["segment_ids"]
        streams = unroll(drafter, batch, lessons["taps"], steps=K, dtype=self.dtype)
        hidden_KxBxSxH = jnp.stack([shift_right(drafter.norm(x), k, segments) for k, x in enumerate(streams)])
        decay_K = self.ttt.decay ** jnp.arange(K, dtype=jnp.float32)
        loss, ce_KxBxS, correct_KxBxS = soft_cross_entropy(
            hidden_KxBxSxH,
            drafter.lm_head.weight[...],
            lessons["hidden"],
            nnx.merge(self.target_def, frozen).head_VxD,
            decay_K[:, None, None] * weights_KxBxS,
            target_ids_V=None if drafter.target_ids is None else drafter.target_ids[...],
            chunk=self.ttt.loss_chunk,
        )
        supervised_KxBxS = weights_KxBxS > 0
        return loss, {
            "loss": loss,
            "ce_sum": jnp.sum(ce_KxBxS * supervised_KxBxS, axis=(1, 2)),
            "correct": jnp.sum(correct_KxBxS & supervised_KxBxS, axis=(1, 2), dtype=jnp.float32),
            "supervised": jnp.sum(supervised_KxBxS, axis=(1, 2), dtype=jnp.float32),
        }

    def report(self, metrics: dict[str, Any]) -> dict[str, float]:
        logged = {"loss": float(metrics["loss"])} if "loss" in metrics else {}
        steps = zip(metrics["ce_sum"], metrics["correct"], metrics["supervised"], strict=True)
        for k, (ce_sum, correct, count) in enumerate(steps):
            count = max(float(count), 1.0)
            logged |= {f"ce_{k}": float(ce_sum) / count, f"accuracy_{k}": float(correct) / count}
        return logged


def unroll(drafter: Drafter, batch: Batch, taps_BxSx3T: jax.Array, *, steps: int, dtype) -> list[jax.Array]:
    """Un-normed streams (B, S, H) of each step, at p. Tokens are forced; one beyond a segment's end reads id 0."""
    segments_BxS = batch["segment_ids"]
    attend = attend_unroll(segments_BxS)
    # Looked up once and moved, so that the gradient of the table is one scatter.
    embedding_BxSxH = drafter.embed_tokens(batch["token_ids"], dtype)
    padding_H = drafter.embed_tokens(jnp.zeros((), jnp.int32), dtype)
    feature_BxSxH = drafter.project(taps_BxSx3T.astype(dtype))
    memory, streams = [()] * len(drafter.layers), []
    for k in range(steps):
        inside_BxSx1 = has_left(k + 1, segments_BxS)[..., None]
        next_BxSxH = jnp.where(inside_BxSx1, shift_left(embedding_BxSxH, k + 1, segments_BxS), padding_H)
        feature_BxSxH, memory = drafter(next_BxSxH, feature_BxSxH, batch["positions"] + k, attend, memory)
        streams.append(feature_BxSxH)
    return streams


def supervised(batch: Batch, ttt: TTT) -> jax.Array:
    """Which u = p + k are supervised at step k. Bool (K, B, S).

    `released`: where x[p+k] is in the loss mask, one position late. `exact`: where x[p+1] and x[p+2+k] lie in the same
    assistant span, which is what serving meets.
    """
    segments_BxS, mask_BxS = batch["segment_ids"], batch["loss_mask"] > 0
    if ttt.supervision == "released":
        # p must exist: u - k in u's segment.
        real_BxS = segments_BxS > 0
        return jnp.stack([mask_BxS & shift_right(real_BxS, k, segments_BxS) for k in range(ttt.length)])
    starts_BxS = mask_BxS & ~shift_right(mask_BxS, 1, segments_BxS)
    span_BxS = jnp.where(mask_BxS, jnp.cumsum(starts_BxS, axis=1), 0)
    predicted_BxS = shift_left(span_BxS, 2, segments_BxS)  # the span of x[u+2] = x[p+2+k]

    def same_span(k):  # x[p+1] is x[u+1-k]
        read_BxS = shift_left(span_BxS, 1, segments_BxS) if k == 0 else shift_right(span_BxS, k - 1, segments_BxS)
        exists_BxS = shift_right(segments_BxS > 0, k, segments_BxS)
        return (read_BxS == predicted_BxS) & (predicted_BxS > 0) & exists_BxS

    return jnp.stack([same_span(k) for k in range(ttt.length)])


def segment_lengths(segment_ids_BxS: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(tokens in the segment of each position, 0 in padding (B, S); number of segments), both float32."""
    real_BxS = segment_ids_BxS > 0
    S = segment_ids_BxS.shape[1]
    count = jax.vmap(lambda real, ids: jax.ops.segment_sum(real.astype(jnp.float32), ids, num_segments=S + 1)[ids])
    starts_BxS = real_BxS & ~shift_right(real_BxS, 1, segment_ids_BxS)
    return count(real_BxS, segment_ids_BxS), jnp.sum(starts_BxS, dtype=jnp.float32)
