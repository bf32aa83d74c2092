"""Qwen3 and Llama causal language models at any depth: the target, and the backbone a drafter is made of.

Axes as in `transformer.py`, and L layers, T the width of a target. The blocks are stacked on a leading axis L and run
as a `lax.scan`, so that a model of 80 layers compiles as fast as one of 2.
"""

from collections.abc import Callable
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
    normal_fan_in,
)


class Block(nnx.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        init, init_out = normal_fan_in(0.5), normal_fan_in(0.5 * (2 * config.num_layers) ** -0.5)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, config.hidden_size, init=init, init_out=init_out, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, init=init, init_out=init_out, rngs=rngs)

    def __call__(
        self,
        x_BxSxD: jax.Array,
        positions_BxS: jax.Array,
        attend: Attend,
        memory: Any,
        *,
        tensor_axis: str | None = None,
        remat_mlp: bool = False,
    ):
        attended_BxSxD, memory = self.self_attn(
            self.input_layernorm(x_BxSxD), positions_BxS, attend, memory, tensor_axis
        )
        x_BxSxD = x_BxSxD + attended_BxSxD
        mlp = lambda x: self.mlp(self.post_attention_layernorm(x), tensor_axis)
        return x_BxSxD + (jax.checkpoint(mlp) if remat_mlp else mlp)(x_BxSxD), memory


class CausalLM(nnx.Module):
    """Decoder-only language model.

    Initial values, for training from nothing: blocks by fan-in, the residual outputs scaled down by depth. An untied
    embedding has unit rows, so that the stream starts at the scale the norms expect (tied models stall on a plateau
    of unigram loss when small); a head, tied or not, starts at the config's `initializer_range`.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        tied = config.tie_word_embeddings
        self.embed_tokens = Embedding(
            config.vocab_size,
            config.hidden_size,
            init=normal(config.initializer_range if tied else 1.0),
            rngs=rngs,
        )

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap
        def stack(rngs):
            return Block(config, rngs=rngs)

        self.layers = stack(rngs)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not tied:
            init = normal(config.initializer_range)
            self.lm_head = Linear(config.vocab_size, config.hidden_size, ("vocab", "embed"), init=init, rngs=rngs)

    @property
    def head_VxD(self) -> jax.Array:
        """Weights of the head, the embedding's own where tied."""
        return (self.embed_tokens if self.config.tie_word_embeddings else self.lm_head).weight[...]

    def logits(self, hidden_BxSxD: jax.Array) -> jax.Array:
        """Logits (..., V) in float32 of normed hidden states."""
        head_VxD = self.head_VxD.astype(hidden_BxSxD.dtype)
        return jnp.einsum("...d,vd->...v", hidden_BxSxD, head_VxD, preferred_element_type=jnp.float32)

    def __call__(
        self,
        token_ids_BxS: jax.Array,
        positions_BxS: jax.Array,
        attend: Attend,
        memory: Any = None,
        *,
        tap_layers: tuple[int, ...] = (),
        dtype: jnp.dtype = jnp.float32,
        tensor_axis: str | None = None,
    ) -> tuple[jax.Array, jax.Array | None, Any]:
        """Run the blocks in `dtype`, without a thought of gradients.

        Args:
          memory: what `attend` keeps for each layer, a pytree whose leaves have a leading axis L; None for none.
          tap_layers: 0-based ids of blocks, ascending, whose outputs are wanted.
          tensor_axis: the mesh axis that the weights are split over, in code that runs on each device's own part.
            Token ids and results are then this device's rows, positions and `attend` those of the whole axis.

        Returns:
          (hidden_BxSxD after the final norm, taps_BxSx(3D) concatenated or None, memory).
        """
        layers_def, layers = nnx.split(self.layers)

        # Over an index: slices of the stacked weights between the taps would be copies of them.
        def at(i, stacked):
            return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False), stacked)

        def body(carry, i):
            x_BxSxD, memory = carry
            block = nnx.merge(layers_def, at(i, layers))
            x_BxSxD, new = block(x_BxSxD, positions_BxS, attend, at(i, memory), tensor_axis=tensor_axis)
            put = lambda leaf, value: jax.lax.dynamic_update_index_in_dim(leaf, value, i, 0)
            return (x_BxSxD, jax.tree.map(put, memory, new)), None

        taps, start, carry = [], 0, (self.embed_tokens(token_ids_BxS, dtype, tensor_axis), memory)
        for stop in (*(i + 1 for i in tap_layers), self.config.num_layers):
            carry, _ = jax.lax.scan(body, carry, jnp.arange(start, stop))
            taps.append(carry[0])
            start = stop
        x_BxSxD, memory = carry
        return self.norm(x_BxSxD), (jnp.concatenate(taps[:-1], axis=-1) if tap_layers else None), memory

    def trained(
        self,
        embedding_BxSxD: jax.Array,
        positions_BxS: jax.Array,
        attend: Attend,
        *,
        whole: Callable[[nnx.State], nnx.State],
        remat: Literal["none", "mlp", "layer"],
    ) -> jax.Array:
        """Run the blocks so that gradients flow. Returns hidden_BxSxD after the final norm.

        Args:
          whole: one layer's weights from their shards.
          remat: what the backward pass computes again: nothing, each MLP, or each layer, of which then only the input
            is kept.
        """
        layers_def, layers = nnx.split(self.layers)

        def block(x_BxSxD, layer):
            module = nnx.merge(layers_def, whole(layer))
            return module(x_BxSxD, positions_BxS, attend, None, remat_mlp=remat == "mlp")[0]

        if remat == "layer":
            step = jax.checkpoint(block)
            x_BxSxD, _ = jax.lax.scan(lambda x, layer: (step(x, layer), None), embedding_BxSxD, layers)
            return self.norm(x_BxSxD)
        # Not a scan: that would stack what each layer keeps as autodiff leaves it, in float32 and much more of it.
        x_BxSxD = embedding_BxSxD
        for i in range(self.config.num_layers):
            x_BxSxD = block(x_BxSxD, jax.tree.map(lambda leaf, i=i: leaf[i], layers))
        return self.norm(x_BxSxD)
