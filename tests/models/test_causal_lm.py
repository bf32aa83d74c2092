"""Language models: golden taps and logits, an independent NumPy forward, and the two forms of the layer scan."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from osprey_jax.kernels.attention import attend_rows
from osprey_jax.models import hf
from osprey_jax.models.causal_lm import CausalLM
from osprey_jax.models.transformer import Linear, Llama3Scaling, TransformerConfig
from tests.objectives.cases import relative

CONFIG = TransformerConfig(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    qk_norm=False,
    attention_bias=False,
    mlp_bias=False,
    tie_word_embeddings=False,
    initializer_range=0.02,
    max_position_embeddings=128,
)
SCALING = Llama3Scaling(8.0, 1.0, 4.0, 16)
VARIANTS = {
    "llama": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"qk_norm": True},
    "tied_llama3": {"tie_word_embeddings": True, "rope_scaling": SCALING},
    "one_layer_mha": {"num_layers": 1, "num_kv_heads": 6},
}


@functools.partial(jax.jit, static_argnames="taps")
def forward(model, batch, taps=()):
    model = nnx.merge(*model)
    attend = attend_rows(batch["segment_ids"])
    hidden, tapped, _ = model(batch["token_ids"], batch["positions"], attend, tap_layers=taps)
    return model.logits(hidden), tapped


def test_golden_taps_and_logits(golden, golden_batch):
    """Outputs of the tapped blocks and logits at every real position."""
    expected = np.load(golden / "expected" / "target.npz")
    model = nnx.split(hf.load_causal_lm(golden / "target"))
    logits, taps = forward(model, golden_batch, tuple(int(i) for i in expected["tap_layers"]))
    real = golden_batch["segment_ids"] > 0
    assert relative(logits[real], expected["logits"][real]) < 1e-5
    assert relative(taps[real], expected["aux_hidden_states"][real]) < 1e-5


def test_taps_change_nothing(golden, golden_batch):
    """The scan over indices, split at the taps, gives the logits of the scan over the weights."""
    model = nnx.split(hf.load_causal_lm(golden / "target"))
    plain, none = forward(model, golden_batch)
    tapped, _ = forward(model, golden_batch, (0, 4, 8))
    assert none is None
    assert relative(tapped, plain) < 1e-6


@pytest.mark.parametrize("name", VARIANTS)
def test_against_numpy(name):
    """Biases, head norms, tied heads, grouped heads and RoPE scaling, against a forward pass written out in float64."""
    config = dataclasses.replace(CONFIG, **VARIANTS[name])
    model = hf.abstract_causal_lm(config)
    rng = np.random.default_rng(0)
    state = nnx.state(model)
    for path, variable in nnx.to_flat_state(state):
        spread = 1.0 if "norm" in str(path) else 0.4
        values = (
            np.abs(rng.normal(1.0, 0.6, variable.shape)) if "norm" in str(path) else rng.normal(size=variable.shape)
        )
        variable.set_value(jnp.asarray(spread * values, jnp.float32))
    nnx.update(model, state)
    ids = rng.integers(0, 50, (1, 21)).astype(np.int32)
    batch = {"token_ids": ids, "segment_ids": np.ones_like(ids), "positions": np.arange(21, dtype=np.int32)[None]}
    logits, _ = forward(nnx.split(model), batch)
    assert relative(logits[0], numpy_logits(config, hf.model_tensors(model), ids[0])) < 1e-5


def numpy_logits(config: TransformerConfig, tensors: dict, ids: np.ndarray) -> np.ndarray:
    """Logits (S, V) in float64, straight from the architecture's definition, from tensors by their HF names."""
    w = {name: value.astype(np.float64) for name, value in tensors.items()}
    norm = lambda x, name: x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * w[f"{name}.weight"]
    linear = lambda x, name: x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)
    S, half = len(ids), config.head_dim // 2
    theta = 1 / config.rope_theta ** (np.arange(half) / half)
    if config.rope_scaling:  # transformers: _compute_llama3_parameters
        s, scaled = config.rope_scaling, []
        for frequency in theta:
            wavelength = 2 * np.pi / frequency
            smooth = (s.original_max_position_embeddings / wavelength - s.low_freq_factor) / (
                s.high_freq_factor - s.low_freq_factor
            )
            if wavelength > s.original_max_position_embeddings / s.low_freq_factor:
                scaled.append(frequency / s.factor)
            elif wavelength < s.original_max_position_embeddings / s.high_freq_factor:
                scaled.append(frequency)
            else:
                scaled.append((1 - smooth) * frequency / s.factor + smooth * frequency)
        theta = np.array(scaled)
    angle = np.arange(S)[:, None] * theta
    cos, sin = np.cos(angle), np.sin(angle)
    rotate = lambda x: np.concatenate(
        [x[:, :half] * cos - x[:, half:] * sin, x[:, half:] * cos + x[:, :half] * sin], -1
    )
    x = w["model.embed_tokens.weight"][ids]
    for i in range(config.num_layers):
        at, h = f"model.layers.{i}", norm(x, f"model.layers.{i}.input_layernorm")
        q, k, v = (linear(h, f"{at}.self_attn.{p}_proj").reshape(S, -1, config.head_dim) for p in "qkv")
        heads = []
        for head in range(config.num_heads):
            group = head // (config.num_heads // config.num_kv_heads)
            qh, kh = q[:, head], k[:, group]
            if config.qk_norm:
                qh, kh = norm(qh, f"{at}.self_attn.q_norm"), norm(kh, f"{at}.self_attn.k_norm")
            scores = rotate(qh) @ rotate(kh).T / np.sqrt(config.head_dim) + np.triu(np.full((S, S), -np.inf), 1)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, group])
        x = x + linear(np.concatenate(heads, -1), f"{at}.self_attn.o_proj")
        h = norm(x, f"{at}.post_attention_layernorm")
        gate = linear(h, f"{at}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
    head = w["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return norm(x, "model.norm") @ head.T


def test_gradient_reaches_every_parameter():
    """Training from nothing moves all of the model, tied or not."""
    for tied in (False, True):
        config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
        model = nnx.split(CausalLM(config, rngs=nnx.Rngs(0)))
        ids = jnp.arange(8)[None]
        batch = {"token_ids": ids, "segment_ids": jnp.ones_like(ids), "positions": ids}
        grads = jax.grad(lambda state, model=model, batch=batch: forward((model[0], state), batch)[0].std())(model[1])
        assert all(np.any(np.asarray(grad)) for grad in jax.tree.leaves(grads))


def test_embedding_gradient_adds_up_in_float32():
    """In bfloat16 the gradient of a token that comes often would stop growing: 256 + 1 is 256 there."""
    embedding = hf.abstract_causal_lm(CONFIG).embed_tokens
    embedding.weight.set_value(jnp.ones((50, 24)))
    graph, state = nnx.split(embedding)
    ids = jnp.zeros((1, 5000), jnp.int32)
    grad = jax.grad(lambda state: nnx.merge(graph, state)(ids, jnp.bfloat16).astype(jnp.float32).sum())(state)
    assert grad["weight"][...][0, 0] == 5000


def test_a_bias_s_gradient_adds_up_in_float32():
    """Of products in bfloat16: 1000 times 1 would stop at 256 there."""
    layer = Linear(2, 3, ("mlp", "embed"), bias=True, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    x = jnp.zeros((1000, 3), jnp.bfloat16)
    loss = lambda state: jnp.sum(nnx.merge(graph, state)(x), dtype=jnp.float32)
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(state)["bias"].get_value(), 1000.0)
