"""Next-token prediction on text (stage 2). Axes: B batch, S sequence, D model width."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from osprey_jax.kernels.attention import Kernel, attend_rows
from osprey_jax.kernels.soft_cross_entropy import hard_cross_entropy
from osprey_jax.models.transformer import EMBEDDING, HEAD
from osprey_jax.objectives.objective import Batch
from osprey_jax.objectives.shift import shift_left
from osprey_jax.parallel import ONE_DEVICE, Layout


@dataclasses.dataclass(frozen=True)
class NextToken:
    """Mean cross-entropy of the next token over the supervised tokens of the global batch."""

    model_def: nnx.GraphDef  # of a CausalLM
    dtype: jnp.dtype
    loss_chunk: int
    layout: Layout = ONE_DEVICE
    attention: Kernel = "xla"
    remat: Literal["none", "mlp", "layer"] = "none"

    @property
    def weights_need_lessons(self) -> bool:
        return False

    def teach(self, constants: nnx.State, frozen: Any, batch: Batch) -> None:
        return None

    def weights(self, batch: Batch, lessons: None) -> jax.Array:
        """(B, S): position p predicts token p+1 where that is supervised and of the same segment."""
        mask_BxS = shift_left(batch["loss_mask"], 1, batch["segment_ids"]).astype(jnp.float32)
        return mask_BxS / jnp.maximum(self.layout.sum(jnp.sum(mask_BxS)), 1)

    def loss(self, params, constants, frozen, batch: Batch, lessons: None, weights_BxS: jax.Array):
        layout, segments = self.layout, batch["segment_ids"]
        # Layers and vocabulary tables stay sharded here: each is gathered where it is used, and gone after.
        norm = layout.whole(nnx.State({"norm": params["norm"]}), self.dtype)
        others = nnx.State({name: part for name, part in params.items() if name != "norm"})
        model = nnx.merge(self.model_def, norm, others, constants)
        table_VxD = model.embed_tokens.weight[...]
        hidden_BxSxD = model.trained(
            layout.lookup(table_VxD, batch["token_ids"], EMBEDDING, self.dtype),
            batch["positions"],
            attend_rows(segments, self.attention),
            whole=lambda layer: layout.whole(layer, self.dtype, ("layers",), stacked=True),
            remat=self.remat,
        )
        head = EMBEDDING if model.config.tie_word_embeddings else HEAD
        loss, ce_sum, correct = hard_cross_entropy(
            hidden_BxSxD.reshape(-1, hidden_BxSxD.shape[-1]),
            model.head_VxD,
            shift_left(batch["token_ids"], 1, segments).reshape(-1),
            weights_BxS.reshape(-1),
            chunk=self.loss_chunk,
            head_spec=layout.spec(head),
            vocab_axis=layout.vocab_axis(head),
        )
        supervised = jnp.sum(weights_BxS > 0, dtype=jnp.float32)
        return loss, {"loss": loss, "ce_sum": ce_sum, "correct": correct, "supervised": supervised}

    def report(self, metrics: dict[str, Any]) -> dict[str, float]:
        logged = {"loss": float(metrics["loss"])} if "loss" in metrics else {}
        count = max(float(metrics["supervised"]), 1.0)
        return logged | {"ce": float(metrics["ce_sum"]) / count, "accuracy": float(metrics["correct"]) / count}
