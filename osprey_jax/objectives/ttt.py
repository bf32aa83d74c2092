"""Distillation by test-time training (stage 4): the drafter unrolled K steps against the target's distributions.

Axes: B batch, S sequence, K steps, H drafter width, T target width, V vocabulary. Source of the unroll: EAGLE-3
(arXiv:2503.01840); of the released masks and normalisation: Osprey's training code.

Position p holds the target's feature after token x[p]; step k reads token x[p+1+k] and predicts the target's
distribution at x[p+1+k]. Everything about step k is kept at u = p + k, where all steps share one teacher row.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from osprey_jax.config import TTT
from osprey_jax.kernels.attention import Attend, Kernel, attend_rows
from osprey_jax.kernels.soft_cross_entropy import best_is_among, soft_cross_entropy
from osprey_jax.kernels.ttt_attention import attend_unroll
from osprey_jax.models.drafter import Drafter
from osprey_jax.models.transformer import EMBEDDING, HEAD
from osprey_jax.objectives.objective import Batch
from osprey_jax.objectives.shift import has_left, shift_left, shift_right
from osprey_jax.parallel import ONE_DEVICE, Layout, gather_rows


@dataclasses.dataclass(frozen=True)
class Distillation:
    """Sum over steps k of decay^k times the step's soft cross-entropy. `frozen` is the target's parameters."""

    drafter_def: nnx.GraphDef  # merges with params and constants
    target_def: nnx.GraphDef
    tap_layers: tuple[int, int, int]
    ttt: TTT
    dtype: jnp.dtype
    trims_vocabulary: bool = False
    layout: Layout = ONE_DEVICE
    attention: Kernel = "xla"
    remat: Literal["none", "mlp", "layer", "step"] = "none"

    @property
    def weights_need_lessons(self) -> bool:
        return self.trims_vocabulary

    def teach(self, constants: nnx.State, frozen: nnx.State, batch: Batch) -> dict[str, jax.Array]:
        """The target's taps (B, S, 3T) at p, and its last hidden state (B, S, T) moved to the u it teaches.

        Beyond a segment's end the hidden state is zero, which teaches the uniform distribution, as in the release.
        With a trimmed vocabulary also `among` (B, S): where u is supervised, whether the target's most likely token is
        in it.
        """
        target, axis = nnx.merge(self.target_def, frozen), self.layout.tensor_axis
        hidden_BxSxT, taps_BxSx3T, _ = target(
            batch["token_ids"],
            gather_rows(batch["positions"], axis),
            attend_rows(gather_rows(batch["segment_ids"], axis), self.attention),
            tap_layers=self.tap_layers,
            dtype=self.dtype,
            tensor_axis=axis,
        )
        hidden_BxSxT = shift_left(hidden_BxSxT, 1, batch["segment_ids"])
        lessons = {"taps": taps_BxSx3T, "hidden": hidden_BxSxT}
        if self.trims_vocabulary:
            wanted_BxS = jnp.any(supervised(batch, self.ttt), axis=0)
            among_N = best_is_among(
                hidden_BxSxT.reshape(-1, hidden_BxSxT.shape[-1]),
                target.head_VxD,
                constants["target_ids"].get_value(),
                wanted_BxS.reshape(-1),
                chunk=self.ttt.loss_chunk,
                teacher_spec=self._target_head_spec,
                vocab_axis=axis,
            )
            lessons["among"] = among_N.reshape(wanted_BxS.shape)
        return lessons

    def weights(self, batch: Batch, lessons: dict[str, jax.Array] | None) -> jax.Array:
        """(K, B, S) at u = p + k, without decay."""
        mask_KxBxS = supervised(batch, self.ttt)
        if self.trims_vocabulary:
            mask_KxBxS = mask_KxBxS & lessons["among"]
        mask_KxBxS = mask_KxBxS.astype(jnp.float32)
        if self.ttt.normalization == "token":
            count_Kx1x1 = self.layout.sum(jnp.sum(mask_KxBxS, axis=(1, 2), keepdims=True))
            return mask_KxBxS / jnp.maximum(count_Kx1x1, 1)
        length_BxS, sequences = segment_lengths(batch["segment_ids"])
        return mask_KxBxS / (jnp.maximum(length_BxS, 1) * jnp.maximum(self.layout.sum(sequences), 1))

    def loss(self, params, constants, frozen, batch: Batch, lessons: dict[str, jax.Array], weights_KxBxS: jax.Array):
        K, layout, segments = self.ttt.length, self.layout, batch["segment_ids"]
        shards = nnx.merge_state(params, constants)
        # The two vocabulary tables stay sharded here: each is gathered where it is used, and gone after.
        others = nnx.State({name: part for name, part in shards.items() if name not in ("embed_tokens", "lm_head")})
        whole = layout.whole(others, self.dtype)
        tables = nnx.State({name: shards[name] for name in ("embed_tokens", "lm_head")})
        drafter = nnx.merge(self.drafter_def, whole, tables)
        table_VxH, head_VxH = drafter.embed_tokens.weight[...], drafter.lm_head.weight[...]
        # Looked up once for all steps, so that the table's gradient is one scatter; last the id beyond an end.
        ids = jnp.append(batch["token_ids"].reshape(-1), 0)
        embedding_NxH = layout.lookup(table_VxH, ids, EMBEDDING, self.dtype)
        streams = unroll(
            drafter,
            batch,
            lessons["taps"],
            embedding_NxH[:-1].reshape(*segments.shape, -1),
            embedding_NxH[-1],
            steps=K,
            attend=attend_unroll(segments, self.attention),
            remat=self.remat,
        )
        hidden_KxBxSxH = jnp.stack([shift_right(drafter.norm(x), k, segments) for k, x in enumerate(streams)])
        decay_K = self.ttt.decay ** jnp.arange(K, dtype=jnp.float32)
        flat = lambda x, leading: x.reshape(*x.shape[:leading], -1, *x.shape[leading + 2 :])
        loss, ce_sum_K, correct_K = soft_cross_entropy(
            flat(hidden_KxBxSxH, 1),
            head_VxH,
            flat(lessons["hidden"], 0),
            nnx.merge(self.target_def, frozen).head_VxD,
            flat(decay_K[:, None, None] * weights_KxBxS, 1),
            chunk=self.ttt.loss_chunk,
            head_spec=layout.spec(HEAD),
            teacher_spec=self._target_head_spec,
            vocab_axis=layout.vocab_axis(HEAD),
            target_ids_V=None if drafter.target_ids is None else drafter.target_ids[...],
        )
        supervised_K = jnp.sum(weights_KxBxS > 0, axis=(1, 2), dtype=jnp.float32)
        return loss, {"loss": loss, "ce_sum": ce_sum_K, "correct": correct_K, "supervised": supervised_K}

    @property
    def _target_head_spec(self) -> PartitionSpec | None:
        return None if self.layout.specs is None else PartitionSpec(self.layout.tensor_axis)

    def report(self, metrics: dict[str, Any]) -> dict[str, float]:
        logged = {"loss": float(metrics["loss"])} if "loss" in metrics else {}
        steps = zip(metrics["ce_sum"], metrics["correct"], metrics["supervised"], strict=True)
        for k, (ce_sum, correct, count) in enumerate(steps):
            count = max(float(count), 1.0)
            logged |= {f"ce_{k}": float(ce_sum) / count, f"accuracy_{k}": float(correct) / count}
        return logged


def unroll(
    drafter: Drafter,
    batch: Batch,
    taps_BxSx3T: jax.Array,
    embedding_BxSxH: jax.Array,
    beyond_H: jax.Array,
    *,
    steps: int,
    attend: Attend,
    remat: Literal["none", "mlp", "layer", "step"] = "none",
) -> list[jax.Array]:
    """Un-normed streams (B, S, H) of each step, at p. Tokens are forced; beyond a segment's end `beyond_H` is read.

    Args:
      embedding_BxSxH: the drafter's embedding of each token, whose dtype is that of all.
      attend: from `attend_unroll`.
    """
    segments_BxS = batch["segment_ids"]

    def step(feature_BxSxH, memory, k):
        inside_BxSx1 = has_left(k + 1, segments_BxS)[..., None]
        next_BxSxH = shift_left(embedding_BxSxH, k + 1, segments_BxS).astype(jnp.float32)
        # In float32: what reaches `beyond` is a sum over positions.
        next_BxSxH = jnp.where(inside_BxSx1, next_BxSxH, beyond_H.astype(jnp.float32)).astype(beyond_H.dtype)
        of_layers = "none" if remat == "step" else remat
        return drafter(next_BxSxH, feature_BxSxH, batch["positions"] + k, attend, memory, remat=of_layers)

    feature_BxSxH = drafter.project(taps_BxSx3T.astype(embedding_BxSxH.dtype))
    memory, streams = [()] * len(drafter.layers), []
    for k in range(steps):
        run = jax.checkpoint(step, static_argnums=2) if remat == "step" else step
        feature_BxSxH, memory = run(feature_BxSxH, memory, k)
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
