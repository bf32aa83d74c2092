"""The drafter's layers: each reads two inputs, the stream (the residual) and the constant (the same for every layer).

Tensors are (tokens, width), as everywhere in SGLang. Under tensor parallelism q, k, v, gate and up are split by
columns, `o_proj` and `down_proj` by rows and summed by themselves (`RowParallelLinear`'s default), so that the stream
is whole on every rank between the two; `fc` and the norms are copied.
"""

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.models.utils import apply_qk_norm
from sglang.srt.utils import add_prefix
from torch import nn

from .versions import draft_window, rope_config


class Attention(nn.Module):
    """Grouped-query attention whose q, k, v read twice the width."""

    def __init__(self, config, layer_id, quant_config, prefix, *, qk_norm, window):
        super().__init__()
        heads, kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.qkv_proj = QKVParallelLinear(
            2 * config.hidden_size,
            self.head_dim,
            heads,
            kv_heads,
            bias=config.attention_bias,
            quant_config=quant_config,
            prefix=add_prefix("qkv_proj", prefix),
        )
        self.o_proj = RowParallelLinear(
            heads * self.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            quant_config=quant_config,
            prefix=add_prefix("o_proj", prefix),
        )
        self.qk_norm = qk_norm
        if qk_norm:
            self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        theta, scaling = rope_config(config)
        self.rotary_emb = get_rope(
            self.head_dim,
            rotary_dim=self.head_dim,
            max_position=config.max_position_embeddings,
            base=theta,
            rope_scaling=scaling,
        )
        num_heads, num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads  # this rank's
        self.sizes = [num_heads * self.head_dim, num_kv_heads * self.head_dim, num_kv_heads * self.head_dim]
        self.attn = RadixAttention(
            num_heads,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=num_kv_heads,
            layer_id=layer_id,
            sliding_window_size=-1 if window is None else window,
            quant_config=quant_config,
            prefix=add_prefix("attn", prefix),
        )

    def forward(self, positions, x, forward_batch):
        qkv, _ = self.qkv_proj(x)
        q, k, v = qkv.split(self.sizes, dim=-1)
        if self.qk_norm:
            q, k = apply_qk_norm(q=q, k=k, q_norm=self.q_norm, k_norm=self.k_norm, head_dim=self.head_dim)
        q, k = self.rotary_emb(positions, q, k)
        out, _ = self.o_proj(self.attn(q, k, v, forward_batch))
        return out


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config, quant_config, prefix):
        super().__init__()
        bias = getattr(config, "mlp_bias", False)  # Qwen3 has no such key and no such bias
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [config.intermediate_size] * 2,
            bias=bias,
            quant_config=quant_config,
            prefix=add_prefix("gate_up_proj", prefix),
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            bias=bias,
            quant_config=quant_config,
            prefix=add_prefix("down_proj", prefix),
        )
        self.act = SiluAndMul()

    def forward(self, x):
        gate_up, _ = self.gate_up_proj(x)
        out, _ = self.down_proj(self.act(gate_up))
        return out


class TwoStreamLayer(nn.Module):
    """q, k, v read [input_layernorm(constant) | hidden_norm(stream)]."""

    def __init__(self, config, layer_id, quant_config, prefix, *, qk_norm, window):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps=eps)
        self.hidden_norm = RMSNorm(size, eps=eps)
        self.self_attn = Attention(
            config, layer_id, quant_config, add_prefix("self_attn", prefix), qk_norm=qk_norm, window=window
        )
        self.post_attention_layernorm = RMSNorm(size, eps=eps)
        self.mlp = MLP(config, quant_config, add_prefix("mlp", prefix))

    def forward(self, positions, constant, stream, forward_batch):
        x = torch.cat([self.input_layernorm(constant), self.hidden_norm(stream)], dim=-1)
        attended = self.self_attn(positions, x, forward_batch)
        normed, stream = self.post_attention_layernorm(attended, stream)  # also adds: stream + attended
        return stream + self.mlp(normed)


class TwoStreamModel(nn.Module):
    """Embedding, projection of the target's features, layers and final norm."""

    def __init__(self, config, quant_config, prefix, *, qk_norm):
        super().__init__()
        self.name = f"draft model {config._name_or_path}"
        self.swap = bool(getattr(config, "swap_h_and_emb", False))
        self.window = draft_window()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=add_prefix("embed_tokens", prefix)
        )
        self.fc = nn.Linear(3 * config.target_hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(
            TwoStreamLayer(
                config, i, quant_config, add_prefix(f"layers.{i}", prefix), qk_norm=qk_norm, window=self.window
            )
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, input_ids, positions, forward_batch, input_embeds=None, pp_proxy_tensors=None):
        """(normed stream for the head, [un-normed stream]): what the next step of a chain gets as its feature."""
        embedding = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
        if embedding.shape[0] == 0:  # a rank with nothing to do
            return embedding, [embedding]
        feature = forward_batch.spec_info.hidden_states
        # Steps of a chain carry our own stream, all others the target's three states. Their widths may be equal.
        if not forward_batch.forward_mode.is_decode():
            feature = self._project(feature)
        stream, constant = (embedding, feature) if self.swap else (feature, embedding)
        for layer in self.layers:
            stream = layer(positions, constant, stream, forward_batch)
        return self.norm(stream), [stream]

    def _project(self, features):
        if features.shape[-1] != self.fc.in_features:
            raise ValueError(
                f"{self.name}: the target gives {features.shape[-1]} numbers a token, the drafter reads "
                f"{self.fc.in_features}; it was made for another target, or taps a block that this one does not have"
            )
        return self.fc(features)
