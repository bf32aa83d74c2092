"""Targets and drafters worth serving: good ones, without training where that can be, and strongly non-uniform norms.

A drafter that is right nearly always shows every error as a shorter chain; norms far from 1 show a missing one.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from export.to_sglang import sglang_config
from osprey_jax.config import TTT
from osprey_jax.data.tokenizer import copy_tokenizer, load_tokenizer, rows_needed
from osprey_jax.decoding.generate import generate
from osprey_jax.decoding.requests import Request
from osprey_jax.models import hf, hf_config
from osprey_jax.models.causal_lm import CausalLM
from osprey_jax.models.drafter import Drafter, DrafterConfig, trained_variables
from osprey_jax.models.transformer import TransformerConfig
from osprey_jax.objectives.ttt import Distillation
from tests.checkpoints import read
from tests.conftest import GOLDEN
from tests.decoding import conftest as random_models

VOCAB = 64
BLOCKS = 2  # that do something
TAPS = (0, 1, 5)  # not the default ones, and blocks that differ


def shallow_target(*, deep: float = 0.002, **changes) -> CausalLM:
    """A random target of 7 blocks: two add something to the embedding, the others `deep`, which is hardly anything."""
    model = random_models.target(3, **{"vocab_size": VOCAB, "head_dim": 16} | changes)
    for projection in (model.layers.self_attn.o_proj, model.layers.mlp.down_proj):
        for parameter in jax.tree.leaves(nnx.state(projection), is_leaf=lambda x: isinstance(x, nnx.Variable)):
            value = parameter[...]
            parameter[...] = value.at[:BLOCKS].multiply(0.1).at[BLOCKS:].multiply(deep)
    return model


def tokenizer_rows() -> int:
    """As many as the golden tokenizer has entries: a target of this size can be given text, and writes some."""
    return rows_needed(load_tokenizer(GOLDEN / "qwen3" / "target"))


def widened_drafter(target: CausalLM, width: int, *, noise: float, draft_ids=None, mlp_bias=False) -> Drafter:
    """The drafter that a target's first blocks make in `width` dimensions, the new ones zero; then perturbed."""
    changes = vars(target.config) | {"num_layers": BLOCKS, "hidden_size": width, "mlp_bias": mlp_bias}
    made = random_models.drafter(4, target_hidden_size=target.config.hidden_size, draft_ids=draft_ids, **changes)
    blocks = dict(nnx.to_flat_state(nnx.state(target.layers)))
    outside = {
        "embed_tokens": target.embed_tokens.weight[...],
        "norm": target.norm.weight[...],
        "lm_head": target.lm_head.weight[...][slice(None) if draft_ids is None else np.asarray(draft_ids)],
    }
    state, rng = nnx.state(made, nnx.Param), np.random.default_rng(5)
    for path, parameter in nnx.to_flat_state(state):
        if path[0] == "fc":
            continue  # random
        if path[0] == "layers":
            i, name = path[1], ("input_layernorm" if path[2] == "hidden_norm" else path[2], *path[3:])
            source = blocks[name][...][i] if name in blocks else 0.1 * rng.standard_normal(parameter.shape)  # a bias
        else:
            source = outside[path[0]]
        source = np.asarray(source)
        value, spread = np.zeros(parameter.shape, np.float32), np.full(parameter.shape, source.std(), np.float32)
        start = 0
        if path[-2] in ("q_proj", "k_proj", "v_proj") and path[-1] == "weight":
            start = width  # the stream's half; on the other, the target's features are to matter
            spread[:, :width] *= 3
        value[tuple(slice(n) for n in source.shape[:-1])][..., start : start + source.shape[-1]] = source
        if value.shape == (width,) and path[-1] == "weight":  # a norm's mean is over more dimensions now
            value *= (len(source) / width) ** 0.5
        parameter[...] = jnp.asarray(value + noise * spread * rng.standard_normal(value.shape, np.float32))
    nnx.update(made, state)
    return made


def trained_drafter(target: CausalLM, prompts: list[list[int]], *, num_layers: int, steps: int) -> Drafter:
    """EAGLE-3 from scratch, the target's embedding frozen, taught on what the target makes of `prompts`."""
    config = hf_config.scratch_drafter_config(target.config, num_layers, None)
    drafter = Drafter(config, rngs=nnx.Rngs(6))
    drafter.embed_tokens.weight[...] = target.embed_tokens.weight[...]
    rng = np.random.default_rng(7)
    for path, parameter in nnx.to_flat_state(nnx.state(drafter, nnx.Param)):
        if "norm" in path[-2]:
            parameter[...] = jnp.asarray(rng.uniform(0.3, 3.0, parameter.shape), jnp.float32)

    requests = [Request(prompt, 64) for prompt in prompts]
    answers = generate(target, requests, stop_ids=(VOCAB,))
    rows = [request.prompt + answer.token_ids for request, answer in zip(requests, answers, strict=True)]
    length = max(len(row) for row in rows)
    token_ids = np.array([row + [0] * (length - len(row)) for row in rows], np.int32)
    real = np.array([[1] * len(row) + [0] * (length - len(row)) for row in rows], np.int32)
    batch = {
        "token_ids": token_ids,
        "loss_mask": real,
        "segment_ids": real,
        "positions": np.arange(length, dtype=np.int32) * real,
    }
    drafter_def, params, constants = nnx.split(drafter, trained_variables(config), ...)
    target_def, frozen = nnx.split(target)
    ttt = TTT(supervision="exact", normalization="token", loss_chunk=64)
    objective = Distillation(drafter_def, target_def, TAPS, ttt, jnp.dtype(jnp.float32))
    optimizer = optax.adam(4e-3)
    lessons = jax.jit(objective.teach)(constants, frozen, batch)
    weights = objective.weights(batch, lessons)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, moments):
        loss = lambda params: objective.loss(params, constants, frozen, batch, lessons, weights)[0]
        updates, moments = optimizer.update(jax.grad(loss)(params), moments)
        return optax.apply_updates(params, updates), moments

    moments = optimizer.init(params)
    for _ in range(steps):
        params, moments = step(params, moments)
    return nnx.merge(drafter_def, params, constants)


def write_target(out: Path, target: CausalLM, eos_token_id: int) -> None:
    """An HF checkpoint with the golden tokenizer, which has more entries than a model of `VOCAB`: that speaks ids."""
    c = target.config
    kind = "qwen3" if c.qk_norm else "llama"
    golden = GOLDEN / kind / "target"
    out.mkdir()
    copy_tokenizer(golden, out)
    (out / "generation_config.json").unlink()
    own = {"architectures": ["Qwen3ForCausalLM" if c.qk_norm else "LlamaForCausalLM"], "eos_token_id": eos_token_id}
    config = read(golden / "config.json") | _numbers(c) | own
    if "layer_types" in config:
        config["layer_types"] = ["full_attention"] * c.num_layers
    hf.write_checkpoint(out, hf.model_tensors(target), config)


def _numbers(config: TransformerConfig) -> dict:
    """What a drafter's `config.json` says of the same architecture, without what makes it a drafter."""
    raw = hf_config.drafter_hf_config(DrafterConfig(config, config.hidden_size, config.vocab_size, True, None), TAPS)
    drafters = {"architectures", "draft_vocab_size", "eagle_config", "swap_h_and_emb", "target_hidden_size"}
    return {key: value for key, value in raw.items() if key not in drafters}


def write_drafter(out: Path, drafter: Drafter, *, without: str | None = None) -> None:
    """As `export.to_sglang` writes one; `without` a tensor."""
    out.mkdir()
    config = sglang_config(hf_config.drafter_hf_config(drafter.config, TAPS), drafter.config)
    tensors = {name: value for name, value in hf.model_tensors(drafter).items() if name != without}
    hf.write_checkpoint(out, tensors, config)
