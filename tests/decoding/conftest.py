"""Small random models, with strongly non-uniform norms so that a missing or doubled norm shows; servers."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from osprey_jax.config import RegenerateConfig
from osprey_jax.decoding import endpoint
from osprey_jax.models.causal_lm import CausalLM
from osprey_jax.models.drafter import Drafter, DrafterConfig, VocabularyMap
from osprey_jax.models.hf import abstract_causal_lm, abstract_drafter
from osprey_jax.models.transformer import TransformerConfig
from tests.decoding.fake_server import RECORDS, TARGET, FakeServer, write


def transformer(**changes) -> TransformerConfig:
    return TransformerConfig(
        **dict(
            vocab_size=11,
            hidden_size=32,
            intermediate_size=48,
            num_layers=7,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            rms_norm_eps=1e-6,
            rope_theta=1e4,
            rope_scaling=None,
            qk_norm=True,
            attention_bias=False,
            mlp_bias=False,
            tie_word_embeddings=False,
            initializer_range=1.0,
            max_position_embeddings=256,
        )
        | changes
    )


def _filled(model: nnx.Module, seed: int) -> nnx.Module:
    """An abstract model with random values: made by numpy, since initialising for real compiles every shape."""
    rng = np.random.default_rng(seed)
    state = nnx.state(model)
    for path, variable in nnx.to_flat_state(state):
        shape = variable.shape
        if any("norm" in str(part) for part in path):
            value = rng.uniform(0.3, 3.0, shape)
        elif path[0] in ("embed_tokens", "lm_head"):
            value = rng.standard_normal(shape)
        else:  # what a block adds outweighs the embedding, so that the next token depends on all of the context
            gain = 4.0 if "o_proj" in path or "down_proj" in path else 1.0
            value = gain * rng.standard_normal(shape) * shape[-1] ** -0.5
        variable.set_value(jnp.asarray(value.astype(np.float32)))
    nnx.update(model, state)
    return model


def target(seed: int = 0, **changes) -> CausalLM:
    return _filled(abstract_causal_lm(transformer(**changes)), seed)


def drafter(seed: int = 0, *, target_hidden_size=32, draft_ids=None, swap=True, **changes) -> Drafter:
    config = transformer(**{"num_layers": 2} | changes)
    size = config.vocab_size if draft_ids is None else len(draft_ids)
    model = _filled(abstract_drafter(DrafterConfig(config, target_hidden_size, size, swap, None)), seed)
    if draft_ids is not None:
        model.target_ids = VocabularyMap(jnp.asarray(draft_ids, jnp.int32))
    return model


def alike(seed: int = 0, *, noise: float = 0.0, **changes) -> tuple[CausalLM, Drafter]:
    """A target whose blocks after the second add nothing, and the drafter that the first two make.

    The drafter then computes what the target does, except that it never sees the first token: it is right nearly
    always, and less so the more `noise` its weights get.
    """
    model = target(seed, **changes)
    for projection in (model.layers.self_attn.o_proj, model.layers.mlp.down_proj):
        weight = projection.weight[...]
        projection.weight[...] = weight.at[2:].set(0.0)
    made = drafter(seed + 1, target_hidden_size=model.config.hidden_size, **changes)
    for i, layer in enumerate(made.layers):
        block = jax.tree.map(lambda leaf, i=i: leaf[i], nnx.state(model.layers))
        for path, parameter in nnx.to_flat_state(nnx.state(layer)):
            name = "input_layernorm" if path[0] == "hidden_norm" else path[0]
            value = dict(nnx.to_flat_state(block))[(name, *path[1:])].get_value()
            widened = len(path) == 3 and path[1] in ("q_proj", "k_proj", "v_proj")
            parameter.set_value(jnp.concatenate([0 * value, value], axis=1) if widened else value)
    for name in ("embed_tokens", "norm", "lm_head"):
        getattr(made, name).weight[...] = getattr(model, name).weight[...]
    rng = np.random.default_rng(seed)
    for _, parameter in nnx.to_flat_state(nnx.state(made, nnx.Param)):
        value = np.asarray(parameter[...])
        parameter.set_value(jnp.asarray(value + noise * value.std() * rng.standard_normal(value.shape, np.float32)))
    return model, made


def causal(q, k, v, memory):
    """Attention over the whole row, without a cache."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bsnh,btnh->bnst", q, k) / q.shape[-1] ** 0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1), v), memory


def prompts(lengths, vocab_size=11, seed=0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, n).tolist() for n in lengths]


@pytest.fixture(scope="session")
def make():
    """The builders above."""
    return types.SimpleNamespace(target=target, drafter=drafter, alike=alike, causal=causal, prompts=prompts)


@pytest.fixture
def fast(monkeypatch):
    """Short waits."""
    monkeypatch.setattr(endpoint, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(endpoint, "LONGEST_DELAY_S", 0.05)
    monkeypatch.setattr(endpoint, "PATIENCE_S", 2.0)


@pytest.fixture
def start(fast):
    """`start(...) -> FakeServer`, stopped after the test."""
    started = []

    def make(*arguments, **options):
        started.append(FakeServer(*arguments, **options))
        return started[-1]

    yield make
    for server in started:
        server.stop()


@pytest.fixture
def config(tmp_path):
    """`config(server, ...) -> RegenerateConfig`, whose input is `RECORDS`."""
    write(tmp_path / "in.jsonl", RECORDS)

    def make(*fakes, **changes):
        values = {
            "target": TARGET,
            "servers": [fake.url for fake in fakes],
            "input": [str(tmp_path / "in.jsonl")],
            "output": tmp_path / "out.jsonl",
            "max_new_tokens": 16,
            "concurrency": 3,
            "timeout": 5.0,
        }
        return RegenerateConfig(**values | changes)

    return make
