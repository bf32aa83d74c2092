"""The pieces that target, backbone and drafter share: RMSNorm, RoPE, attention projections, MLP.

Axes: B batch, S sequence, D model width (or an attention's input width), N query heads, G key/value heads, h head size,
F MLP width, V vocabulary.

Weights keep the Hugging Face names and layout, `(out, in)`, so that loading and export move bytes and change nothing.
Every parameter carries the logical `axes` of its dimensions, from which `training/mesh.py` derives its sharding.

Attention itself is a function given by the caller, `attend(q, k, v, memory) -> (out, memory)`: over the whole row in
training, over growing keys in the drafter's unroll, over a cache in decoding. The modules are the same in all three.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from osprey_jax.kernels.attention import Attend
from osprey_jax.parallel import gather_rows, scatter_rows


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Frequency scaling of Llama 3.1 and later (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The numbers of a Qwen3 or Llama decoder. Made from an HF config by `hf_config.py`, which knows the defaults."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    qk_norm: bool  # RMSNorm on each head of q and k before RoPE (Qwen3)
    attention_bias: bool  # on q, k, v and o
    mlp_bias: bool
    tie_word_embeddings: bool
    initializer_range: float
    max_position_embeddings: int


# ---- parameters

EMBEDDING, HEAD = ("embed_tokens", "weight"), ("lm_head", "weight")  # paths of the vocabulary tables in every model


def normal(std: float):
    """Initialiser: normal with standard deviation `std`."""
    return lambda key, shape: std * jax.random.normal(key, shape, jnp.float32)


def uniform_fan_in(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """PyTorch's default for `nn.Linear`: uniform within 1 / sqrt(fan in)."""
    bound = shape[-1] ** -0.5
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)


def normal_fan_in(scale: float):
    """Initialiser: normal with standard deviation `scale` / sqrt(fan in), the fan in being the last axis."""
    return lambda key, shape: scale * shape[-1] ** -0.5 * jax.random.normal(key, shape, jnp.float32)


class Linear(nnx.Module):
    """y = x W^T + b, with W (out, in) as in Hugging Face checkpoints, computed in the dtype of x."""

    def __init__(self, out_size: int, in_size: int, axes: tuple[str, str], *, bias=False, init=uniform_fan_in, rngs):
        self.weight = nnx.Param(init(rngs.params(), (out_size, in_size)), axes=axes)
        self.bias = nnx.Param(jnp.zeros(out_size, jnp.float32), axes=axes[:1]) if bias else None

    def __call__(self, x: jax.Array, *, sum_over: str | None = None) -> jax.Array:
        """`sum_over`: a mesh axis that the inputs are split over; then the rows come back to their own devices."""
        y = jnp.einsum("...i,oi->...o", x, self.weight[...].astype(x.dtype))
        y = scatter_rows(y, sum_over)
        if self.bias is None:
            return y
        # In float32: what reaches a bias is a sum over all positions.
        return (y.astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(y.dtype)


class Embedding(nnx.Module):
    """A table (V, D): token ids in, rows in `dtype` out."""

    def __init__(self, vocab_size: int, hidden_size: int, *, init, rngs):
        self.weight = nnx.Param(init(rngs.params(), (vocab_size, hidden_size)), axes=("vocab", "embed"))

    def __call__(self, token_ids_BxS: jax.Array, dtype: jnp.dtype, tensor_axis: str | None = None) -> jax.Array:
        """With `tensor_axis`, of this device's part of the table."""
        table_VxD = self.weight[...]
        if tensor_axis is None:
            return table_VxD[token_ids_BxS].astype(dtype)  # in this order: its gradient adds up in float32
        ids_BxS = gather_rows(token_ids_BxS, tensor_axis) - jax.lax.axis_index(tensor_axis) * table_VxD.shape[0]
        held_BxSx1 = ((ids_BxS >= 0) & (ids_BxS < table_VxD.shape[0]))[..., None]
        rows_BxSxD = table_VxD.at[ids_BxS].get(mode="clip").astype(dtype)
        return scatter_rows(jnp.where(held_BxSx1, rows_BxSxD, 0), tensor_axis)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight. Statistics and product in float32, result in the dtype of x."""

    def __init__(self, size: int, eps: float):
        self.weight = nnx.Param(jnp.ones(size, jnp.float32), axes=("norm",))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (normed * self.weight[...].astype(jnp.float32)).astype(x.dtype)


# ---- rotary position embedding


def rope_frequencies(config: TransformerConfig) -> np.ndarray:
    """Angular frequencies (head_dim / 2,), float32, radians per position.

    Source: transformers `modeling_rope_utils.py`, `default` and `llama3`.
    """
    frequency = config.rope_theta ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is not None:
        wavelength = 2 * math.pi / frequency
        turns = scaling.original_max_position_embeddings / wavelength
        smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
    return frequency.astype(np.float32)


def apply_rope(x_BxSxNxh: jax.Array, positions_BxS: jax.Array, frequencies: np.ndarray) -> jax.Array:
    """Rotate each head by its position, first half against second half, in float32."""
    angle_BxSx1xf = (positions_BxS[..., None].astype(jnp.float32) * frequencies)[:, :, None, :]
    cos, sin = jnp.cos(angle_BxSx1xf), jnp.sin(angle_BxSx1xf)
    first, second = jnp.split(x_BxSxNxh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BxSxNxh.dtype)


# ---- the two halves of a block


class Attention(nnx.Module):
    """Projections, head norms and RoPE around the caller's `attend`. `input_size` is 2 D in a drafter layer.

    With `tensor_axis` this device has some of the heads and computes them for the rows of all devices of the axis, of
    which `positions` and `attend` speak; x and the result are its own rows.
    """

    def __init__(self, config: TransformerConfig, input_size: int, *, init, init_out, rngs):
        c, bias = config, config.attention_bias
        heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.q_proj = Linear(heads, input_size, ("heads", "embed"), bias=bias, init=init, rngs=rngs)
        self.k_proj = Linear(kv_heads, input_size, ("heads", "embed"), bias=bias, init=init, rngs=rngs)
        self.v_proj = Linear(kv_heads, input_size, ("heads", "embed"), bias=bias, init=init, rngs=rngs)
        self.o_proj = Linear(c.hidden_size, heads, ("embed", "heads"), bias=bias, init=init_out, rngs=rngs)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.config = config

    def __call__(
        self,
        x_BxSxD: jax.Array,
        positions_BxS: jax.Array,
        attend: Attend,
        memory: Any,
        tensor_axis: str | None = None,
    ):
        """Returns (out_BxSxD, memory)."""
        x_BxSxD = gather_rows(x_BxSxD, tensor_axis)
        B, S, _ = x_BxSxD.shape
        q_BxSxNxh, k_BxSxGxh, v_BxSxGxh = (
            proj(x_BxSxD).reshape(B, S, -1, self.config.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.config.qk_norm:
            q_BxSxNxh, k_BxSxGxh = self.q_norm(q_BxSxNxh), self.k_norm(k_BxSxGxh)
        frequencies = rope_frequencies(self.config)
        q_BxSxNxh = apply_rope(q_BxSxNxh, positions_BxS, frequencies)
        k_BxSxGxh = apply_rope(k_BxSxGxh, positions_BxS, frequencies)
        out_BxSxNxh, memory = attend(q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, memory)
        return self.o_proj(out_BxSxNxh.reshape(B, S, -1), sum_over=tensor_axis), memory


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). With `tensor_axis` this device has some of the inner width."""

    def __init__(self, config: TransformerConfig, *, init, init_out, rngs):
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(inner, width, ("mlp", "embed"), bias=bias, init=init, rngs=rngs)
        self.up_proj = Linear(inner, width, ("mlp", "embed"), bias=bias, init=init, rngs=rngs)
        self.down_proj = Linear(width, inner, ("embed", "mlp"), bias=bias, init=init_out, rngs=rngs)

    def __call__(self, x_BxSxD: jax.Array, tensor_axis: str | None = None) -> jax.Array:
        x_BxSxD = gather_rows(x_BxSxD, tensor_axis)
        inner_BxSxF = jax.nn.silu(self.gate_proj(x_BxSxD)) * self.up_proj(x_BxSxD)
        return self.down_proj(inner_BxSxF, sum_over=tensor_axis)
