"""The two stages, set up from their configs: everything cheap is checked before any weight is read."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from osprey_jax.command import UserError
from osprey_jax.config import DistillConfig, PretrainConfig
from osprey_jax.data.conversations import Rejection, conversation_rows
from osprey_jax.data.rows import Rows
from osprey_jax.data.text import text_rows
from osprey_jax.data.tokenizer import check_tokenizer, load_tokenizer
from osprey_jax.data.trimming import most_frequent_tokens
from osprey_jax.files import fingerprint, read_json
from osprey_jax.models import hf, hf_config
from osprey_jax.models.causal_lm import CausalLM
from osprey_jax.models.drafter import Drafter, DrafterConfig, trained_variables
from osprey_jax.objectives.next_token import NextToken
from osprey_jax.objectives.objective import Objective
from osprey_jax.objectives.ttt import Distillation
from osprey_jax.training.mesh import parameter_shardings, with_shardings


@dataclasses.dataclass(frozen=True)
class Stage:
    """What the loop needs, whatever is trained."""

    objective: Objective
    abstract: tuple[nnx.State, nnx.State]  # trained parameters and constants: shapes with their shardings
    start: Callable[[], tuple[nnx.State, nnx.State]]  # their values before the first step
    frozen: Any  # what only the objective reads, on the devices
    rows: Rows
    eval_rows: Rows | None
    rejected: list[Rejection]  # records dropped or cut
    hf_config: dict  # of the trained model, for export
    tokenizer: Path  # directory of its tokenizer
    fingerprints: dict[str, str]
    notes: list[str]  # what was derived, for the reader of the log


def pretrain(config: PretrainConfig, mesh: jax.sharding.Mesh) -> Stage:
    """Next-token prediction on text, from a checkpoint or from random values."""
    start = config.model
    source = start.checkpoint or start.config
    model_config = hf_config.transformer_config(source)
    _check_length(config.data.length, model_config.max_position_embeddings, source)
    tokenizer_dir = start.checkpoint or start.tokenizer
    tokenizer = load_tokenizer(tokenizer_dir)
    check_tokenizer(tokenizer, model_config.vocab_size, str(tokenizer_dir))
    rows = text_rows(config.data.train, tokenizer, config.data.length)
    eval_rows = text_rows(config.data.eval, tokenizer, config.data.length) if config.data.eval else None

    model = hf.abstract_causal_lm(model_config)
    model_def, *_ = nnx.split(model, nnx.Param, ...)
    shardings = parameter_shardings(nnx.state(model), mesh, trained=True)

    def values():
        if start.checkpoint is not None:
            state = hf.load_parameters(model, start.checkpoint, shardings=shardings)
        else:
            state = _random(lambda: CausalLM(model_config, rngs=nnx.Rngs(config.seed)), shardings)
        return nnx.split_state(state, nnx.Param, ...)

    return Stage(
        objective=NextToken(model_def, jnp.dtype(config.compute_dtype), config.loss_chunk),
        abstract=nnx.split_state(with_shardings(nnx.state(model), shardings), nnx.Param, ...),
        start=values,
        frozen=None,
        rows=rows,
        eval_rows=eval_rows,
        rejected=[],
        hf_config=read_json(hf_config.config_path(source)),
        tokenizer=tokenizer_dir,
        fingerprints={"start": fingerprint(source), "tokenizer": fingerprint(tokenizer_dir)},
        notes=[],
    )


def distill(config: DistillConfig, mesh: jax.sharding.Mesh) -> Stage:
    """A drafter learns its target's distributions, from a converted checkpoint or (EAGLE-3) from scratch."""
    target_config = hf_config.transformer_config(config.target)
    drafter_config, raw_config, taps = _drafter(config, target_config)
    _check_length(config.data.length, target_config.max_position_embeddings, config.target)
    tokenizer = load_tokenizer(config.target)
    check_tokenizer(tokenizer, target_config.vocab_size, str(config.target))
    data = config.data
    rows, rejected, report = conversation_rows(data.train, tokenizer, data.length, data.template_options)
    notes, eval_rows = [f"data.train: {report}"], None
    if data.eval:
        eval_rows, eval_rejected, report = conversation_rows(data.eval, tokenizer, data.length, data.template_options)
        rejected = rejected + eval_rejected
        notes.append(f"data.eval: {report}")
    notes += [f"tap layers {list(taps)} of {target_config.num_layers}"]

    model = hf.abstract_drafter(drafter_config)
    trained, frozen_embedding = trained_variables(drafter_config), not drafter_config.swap_h_and_emb
    drafter_def, *_ = nnx.split(model, trained, ...)
    shardings = parameter_shardings(nnx.state(model), mesh, trained=True)
    notes.append(f"embedding {'of the target, frozen' if frozen_embedding else 'of the drafter, trained'}")

    target = hf.abstract_causal_lm(target_config)
    target_def, _ = nnx.split(target)
    compute_dtype = jnp.dtype(config.compute_dtype)
    if config.drafter.scratch is not None and drafter_config.trims_vocabulary:
        size, vocab_size = drafter_config.draft_vocab_size, target_config.vocab_size
        target_ids, coverage = most_frequent_tokens(rows, size, vocab_size)
        notes.append(f"draft vocabulary: {size} of {vocab_size} tokens, {coverage:.1%} of the supervised ones")

    def values():
        if config.drafter.checkpoint is not None:
            state = hf.load_parameters(model, config.drafter.checkpoint, shardings=shardings)
        else:
            state = _random(lambda: Drafter(drafter_config, rngs=nnx.Rngs(config.seed)), shardings)
            if drafter_config.trims_vocabulary:
                state["target_ids"].set_value(jax.device_put(target_ids, shardings["target_ids"].get_value()))
        if frozen_embedding:
            table, sharding = state["embed_tokens"]["weight"], shardings["embed_tokens"]["weight"].get_value()
            table.set_value(hf.load_embedding(config.target, table.get_value(), sharding))
        return nnx.split_state(state, trained, ...)

    target_shardings = parameter_shardings(nnx.state(target), mesh, trained=False)
    return Stage(
        objective=Distillation(drafter_def, target_def, taps, config.ttt, compute_dtype),
        abstract=nnx.split_state(with_shardings(nnx.state(model), shardings), trained, ...),
        start=values,
        frozen=hf.load_parameters(target, config.target, dtype=compute_dtype, shardings=target_shardings),
        rows=rows,
        eval_rows=eval_rows,
        rejected=rejected,
        hf_config=raw_config,
        tokenizer=config.target,
        fingerprints={
            "target": fingerprint(config.target),
            "start": "scratch" if config.drafter.checkpoint is None else fingerprint(config.drafter.checkpoint),
        },
        notes=notes,
    )


def _drafter(config: DistillConfig, target) -> tuple[DrafterConfig, dict, tuple[int, int, int]]:
    """(drafter's numbers, its `config.json` to be, tap layers), checked against the target."""
    checkpoint, scratch = config.drafter.checkpoint, config.drafter.scratch
    if checkpoint is not None:
        drafter = hf_config.drafter_config(checkpoint)
        hf_config.check_fits_target(drafter, target, str(checkpoint))
        if None not in (drafter.tap_layers, config.tap_layers) and drafter.tap_layers != config.tap_layers:
            raise UserError(
                f"tap_layers {list(config.tap_layers)} contradict those of {checkpoint}, {list(drafter.tap_layers)}; "
                "leave the key out or convert again"
            )
        raw = read_json(hf_config.config_path(checkpoint))
    else:
        drafter, raw = hf_config.scratch_drafter_config(target, scratch.num_layers, scratch.draft_vocab_size), {}
    taps = hf_config.check_tap_layers(config.tap_layers or drafter.tap_layers, target.num_layers)
    raw = raw or hf_config.drafter_hf_config(drafter, taps)
    raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(taps), "use_aux_hidden_state": True}
    # SGLang gives a draft the target's positions: its own limit must reach them.
    limits = drafter.transformer.max_position_embeddings, target.max_position_embeddings
    raw["max_position_embeddings"] = max(limits)
    return drafter, raw, taps


def _random(make: Callable[[], nnx.Module], shardings: nnx.State) -> nnx.State:
    """A fresh model's state, created in its sharding; the values do not depend on it."""
    return jax.jit(lambda: nnx.state(make()), out_shardings=shardings)()


def _check_length(length: int, limit: int, where: Path) -> None:
    if length > limit:
        raise UserError(f"data.length {length} exceeds max_position_embeddings {limit} of {where}")
