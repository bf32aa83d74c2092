"""Next-token prediction on text (stage 2). Axes: B batch, S sequence."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from osprey_jax.kernels.attention import attend_rows
from osprey_jax.kernels.soft_cross_entropy import hard_cross_entropy
from osprey_jax.objectives.objective import Batch
from osprey_jax.objectives.shift import shift_left


@dataclasses.dataclass(frozen=True)
class NextToken:
    """Mean cross-entropy of the next token over the supervised tokens of the global batch."""

    model_def: nnx.GraphDef  # of a CausalLM
    dtype: jnp.dtype
    loss_chunk: int

    def teach(self, constants: nnx.State, frozen: Any, batch: Batch) -> None:
        return None

    def weights(self, batch: Batch, lessons: None) -> jax.Array:
        """(B, S): position p predicts token p+1 where that is supervised and of the same segment."""
        mask_BxS = shift_left(batch["loss_mask"], 1, batch["segment_ids"]).astype(jnp.float32)
        return mask_BxS / jnp.maximum(jnp.sum(mask_BxS), 1)

    def loss(self, params, constants, frozen, batch: Batch, lessons: None, weights_BxS: jax.Array):
        model = nnx.merge(self.model_def, params, constants)
        hidden_BxSxD, _, _ = model(
            batch["token_ids"], batch["positions"], attend_rows(batch["segment_ids"]), dtype=self.dtype
        )
        labels_BxS = shift_left(batch["token_ids"], 1, batch["segment_ids"])
        loss, ce_BxS, correct_BxS = hard_cross_entropy(
            hidden_BxSxD, model.head_VxD, labels_BxS, weights_BxS, chunk=self.loss_chunk
        )
        supervised_BxS = weights_BxS > 0
        return loss, {
            "loss": loss,
            "ce_sum": jnp.sum(ce_BxS * supervised_BxS),
            "correct": jnp.sum(correct_BxS & supervised_BxS, dtype=jnp.float32),
            "supervised": jnp.sum(supervised_BxS, dtype=jnp.float32),
        }

    def report(self, metrics: dict[str, Any]) -> dict[str, float]:
        logged = {"loss": float(metrics["loss"])} if "loss" in metrics else {}
        count = max(float(metrics["supervised"]), 1.0)
        return logged | {"ce": float(metrics["ce_sum"]) / count, "accuracy": float(metrics["correct"]) / count}
