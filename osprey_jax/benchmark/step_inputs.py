"""The same drafter, batch and target for both sides of the `step` benchmark, as NumPy arrays. Needs NumPy alone.

Axes: B rows, S sequence, T target width.
"""

import dataclasses

import numpy as np

SUPERVISED = 0.75  # of the positions


@dataclasses.dataclass(frozen=True)
class StepShape:
    """Sizes of a step of distillation: a drafter of two Qwen3 layers, its streams swapped, all of its vocabulary."""

    sequence: int
    vocab: int
    rows: int = 1
    width: int = 256
    target_width: int = 512
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    inner: int = 1024
    steps: int = 5  # of the unroll
    decay: float = 0.8
    eps: float = 1e-6
    rope_theta: float = 1e6
    learning_rate: float = 1e-4
    clip_norm: float = 1.0


def drafter_weights(shape: StepShape) -> dict[str, np.ndarray]:
    """Random float32 weights under their names in a checkpoint, matrices (out, in), norms far from one."""
    s, random = shape, np.random.default_rng(0)
    heads, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    sizes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (s.vocab, s.width),
        "fc.weight": (s.width, 3 * s.target_width),
        "norm.weight": (s.width,),
        "lm_head.weight": (s.vocab, s.width),
    }
    for i in range(s.layers):
        layer = {
            "input_layernorm": (s.width,),
            "hidden_norm": (s.width,),
            "post_attention_layernorm": (s.width,),
            "self_attn.q_norm": (s.head_dim,),
            "self_attn.k_norm": (s.head_dim,),
            "self_attn.q_proj": (heads, 2 * s.width),
            "self_attn.k_proj": (kv, 2 * s.width),
            "self_attn.v_proj": (kv, 2 * s.width),
            "self_attn.o_proj": (s.width, heads),
            "mlp.gate_proj": (s.inner, s.width),
            "mlp.up_proj": (s.inner, s.width),
            "mlp.down_proj": (s.width, s.inner),
        }
        sizes |= {f"layers.{i}.{name}.weight": size for name, size in layer.items()}

    def weight(size: tuple[int, ...]) -> np.ndarray:
        if len(size) == 1:
            return random.uniform(0.5, 2.0, size).astype(np.float32)
        return random.standard_normal(size, np.float32) * np.float32(size[-1] ** -0.5)

    return {name: weight(size) for name, size in sizes.items()}


def batch(shape: StepShape) -> dict[str, np.ndarray]:
    """Token ids and loss mask (B, S), and what the target gives: taps (B, S, 3T), last hidden state (B, S, T)."""
    s, random = shape, np.random.default_rng(1)
    skipped = np.arange(s.sequence) >= round(SUPERVISED * s.sequence)
    return {
        "token_ids": random.integers(s.vocab, size=(s.rows, s.sequence), dtype=np.int32),
        "loss_mask": np.stack([random.permutation(~skipped) for _ in range(s.rows)]),
        "taps": random.standard_normal((s.rows, s.sequence, 3 * s.target_width), np.float32),
        "hidden": random.standard_normal((s.rows, s.sequence, s.target_width), np.float32),
    }


def target_head(shape: StepShape) -> np.ndarray:
    """(vocabulary, T), so that its logits have unit variance."""
    size = (shape.vocab, shape.target_width)
    return np.random.default_rng(2).standard_normal(size, np.float32) * np.float32(shape.target_width**-0.5)
