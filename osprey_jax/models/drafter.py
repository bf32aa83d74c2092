"""The drafter: a shallow decoder in which every layer reads two inputs, the stream and the constant.

Axes as in `transformer.py`, and H drafter width, T target width, K steps of test-time training (TTT). Semantics:
EAGLE-3 (arXiv:2503.01840) for the unroll; Osprey for `swap_h_and_emb` and the zero-widened projections.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from osprey_jax.kernels.attention import Attend
from osprey_jax.models.transformer import (
    MLP,
    Attention,
    Embedding,
    Linear,
    RMSNorm,
    TransformerConfig,
    normal,
    uniform_fan_in,
)


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """A transformer's numbers and what makes it a drafter for one target."""

    transformer: TransformerConfig  # vocab_size is the target's: what the embedding reads
    target_hidden_size: int
    draft_vocab_size: int  # what the head writes; smaller than vocab_size where trimmed
    swap_h_and_emb: bool  # True: the stream starts as the token embedding (Osprey); False: as the feature (EAGLE-3)
    tap_layers: tuple[int, int, int] | None  # blocks of the target, 0-based; None: the target's default

    @property
    def trims_vocabulary(self) -> bool:
        return self.draft_vocab_size != self.transformer.vocab_size


class VocabularyMap(nnx.Variable):
    """Target ids of the draft vocabulary, int32: data, neither trained nor averaged."""


class DrafterLayer(nnx.Module):
    """A block whose q, k, v read [input_layernorm(constant) | hidden_norm(stream)]; the stream is the residual."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        init = uniform_fan_in
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, 2 * config.hidden_size, init=init, init_out=init, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, init=init, init_out=init, rngs=rngs)

    def __call__(
        self, constant_BxSxH, stream_BxSxH, positions_BxS, attend: Attend, memory: Any, *, remat_mlp: bool = False
    ):
        x_BxSx2H = jnp.concatenate([self.input_layernorm(constant_BxSxH), self.hidden_norm(stream_BxSxH)], axis=-1)
        attended_BxSxH, memory = self.self_attn(x_BxSx2H, positions_BxS, attend, memory)
        stream_BxSxH = stream_BxSxH + attended_BxSxH
        mlp = lambda stream: self.mlp(self.post_attention_layernorm(stream))
        return stream_BxSxH + (jax.checkpoint(mlp) if remat_mlp else mlp)(stream_BxSxH), memory


class Drafter(nnx.Module):
    """One step of drafting. What a step hands to the next is its un-normed stream, as the feature."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs):
        self.config = config
        c = config.transformer
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, init=normal(1.0), rngs=rngs)
        self.fc = Linear(c.hidden_size, 3 * config.target_hidden_size, ("embed", "taps"), rngs=rngs)
        self.layers = nnx.List([DrafterLayer(c, rngs=rngs) for _ in range(c.num_layers)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = Linear(config.draft_vocab_size, c.hidden_size, ("vocab", "embed"), rngs=rngs)
        # A head of equal size is the target's own vocabulary: no map.
        self.target_ids = (
            VocabularyMap(jnp.arange(config.draft_vocab_size, dtype=jnp.int32)) if config.trims_vocabulary else None
        )

    def project(self, taps_BxSx3T: jax.Array) -> jax.Array:
        """The target's three tapped hidden states as the feature of step 0, (B, S, H)."""
        return self.fc(taps_BxSx3T)

    def __call__(
        self,
        embedding_BxSxH: jax.Array,
        feature_BxSxH: jax.Array,
        positions_BxS: jax.Array,
        attend: Attend,
        memory: list[Any],
        *,
        remat: Literal["none", "mlp", "layer"] = "none",
    ) -> tuple[jax.Array, list[Any]]:
        """One step. `memory` has one entry a layer. Returns (un-normed stream_BxSxH, memory).

        `remat`: what the backward pass computes again.
        """
        if self.config.swap_h_and_emb:
            stream_BxSxH, constant_BxSxH = embedding_BxSxH, feature_BxSxH
        else:
            stream_BxSxH, constant_BxSxH = feature_BxSxH, embedding_BxSxH
        new_memory = []
        for layer, layer_memory in zip(self.layers, memory, strict=True):
            run = lambda constant, stream, memory, layer=layer: layer(
                constant, stream, positions_BxS, attend, memory, remat_mlp=remat == "mlp"
            )
            run = jax.checkpoint(run) if remat == "layer" else run
            stream_BxSxH, layer_memory = run(constant_BxSxH, stream_BxSxH, layer_memory)
            new_memory.append(layer_memory)
        return stream_BxSxH, new_memory

    def logits(self, stream_BxSxH: jax.Array) -> jax.Array:
        """Logits over the draft vocabulary, float32, from an un-normed stream."""
        hidden_BxSxH = self.norm(stream_BxSxH)
        head_VxH = self.lm_head.weight[...].astype(hidden_BxSxH.dtype)
        return jnp.einsum("...d,vd->...v", hidden_BxSxH, head_VxH, preferred_element_type=jnp.float32)

    def to_target_ids(self, draft_ids: jax.Array) -> jax.Array:
        """Ids of the draft vocabulary as ids of the target's."""
        return draft_ids if self.target_ids is None else self.target_ids[...][draft_ids]


def trained_variables(config: DrafterConfig) -> nnx.filterlib.Filter:
    """Which variables of a drafter are trained; the others are constants.

    SGLang serves an EAGLE-3 drafter (streams not swapped) with the target's own embedding: that one stays.
    """
    if config.swap_h_and_emb:
        return nnx.Param
    return nnx.All(nnx.Param, nnx.Not(nnx.PathContains("embed_tokens")))


def default_tap_layers(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's taps for a target of `num_layers` blocks, 0-based; may be unusable below 7 layers."""
    return (1, num_layers // 2 - 1, num_layers - 4)
