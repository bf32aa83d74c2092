"""The two stages, set up from their configs: everything cheap is checked before any weight is read."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from osprey_jax.command import UserError
from osprey_jax.config import DistillConfig, PretrainConfig
from osprey_jax.data.preparation import prepare
from osprey_jax.data.recipes import ConversationRecipe, Recipe, TextRecipe
from osprey_jax.data.records import find_files
from osprey_jax.data.rows import Rows
from osprey_jax.data.tokenizer import check_tokenizer, load_tokenizer
from osprey_jax.data.trimming import coverage, most_frequent_tokens
from osprey_jax.files import fingerprint, read_json
from osprey_jax.kernels.attention import Kernel, choose_kernel
from osprey_jax.models import hf, hf_config
from osprey_jax.models.causal_lm import CausalLM
from osprey_jax.models.drafter import Drafter, DrafterConfig, trained_variables
from osprey_jax.models.transformer import TransformerConfig
from osprey_jax.objectives.next_token import NextToken
from osprey_jax.objectives.objective import Objective
from osprey_jax.objectives.ttt import Distillation
from osprey_jax.training.mesh import check_splits, layout, parameter_shardings, whole_notes, with_shardings


@dataclasses.dataclass(frozen=True)
class Design:
    """What is trained and against what, as shapes: all that compiling a step needs. No weight has been read."""

    objective: Objective
    trained: TransformerConfig | DrafterConfig
    target: TransformerConfig | None
    abstract: tuple[nnx.State, nnx.State]  # trained parameters and constants, with their shardings
    frozen: Any  # what only the objective reads, with its shardings
    hf_config: dict  # of the trained model, for export
    notes: list[str]  # what was derived, for the reader of the log


@dataclasses.dataclass(frozen=True)
class Stage:
    """What the loop needs, whatever is trained."""

    design: Design
    start: Callable[[], tuple[nnx.State, nnx.State]]  # parameters and constants before the first step
    frozen: Any  # on the devices
    rows: Rows
    eval_rows: Rows | None
    tokenizer: Path  # directory of its tokenizer
    fingerprints: dict[str, str]
    notes: list[str]  # the design's, and what the data adds


def design(config: PretrainConfig | DistillConfig, mesh: Mesh) -> Design:
    """The step of a run on `mesh`. Of the checkpoints only each `config.json` is read.

    Raises:
      UserError: models that do not fit each other or the mesh; an attention kernel that cannot run.
    """
    check_length(config)
    return _pretrain_design(config, mesh) if isinstance(config, PretrainConfig) else _distill_design(config, mesh)


def set_up(config: PretrainConfig | DistillConfig, mesh: Mesh) -> Stage:
    """The run's design with its data and weights: everything cheap is checked before any weight is read."""
    return pretrain(config, mesh) if isinstance(config, PretrainConfig) else distill(config, mesh)


def prepared(config: PretrainConfig | DistillConfig) -> tuple[Rows, Rows | None]:
    """The rows of `data.train` and `data.eval`, from the cache or made now.

    Raises:
      UserError: as `prepare`; a row exceeds the model's positions, the tokenizer its vocabulary.
    """
    data, how = config.data, recipe(config)
    check_length(config)
    _, model = _numbers(config)
    check_tokenizer(load_tokenizer(how.tokenizer), model.vocab_size, str(how.tokenizer))
    for path in find_files(data.train) + (find_files(data.eval) if data.eval else []):
        how.check(path)
    rows = prepare(data.train, how, data.cache_dir, data.processes)
    return rows, prepare(data.eval, how, data.cache_dir, data.processes) if data.eval else None


def check_length(config: PretrainConfig | DistillConfig) -> None:
    """`UserError` where rows are longer than the model has positions."""
    source, model = _numbers(config)
    if config.data.length > model.max_position_embeddings:
        limit = model.max_position_embeddings
        raise UserError(f"data.length {config.data.length} exceeds max_position_embeddings {limit} of {source}")


def _numbers(config: PretrainConfig | DistillConfig) -> tuple[Path, TransformerConfig]:
    """(where they stand, the numbers) of the model that a run's rows are for."""
    source = config.target if isinstance(config, DistillConfig) else config.model.numbers_from
    return source, hf_config.transformer_config(source)


def recipe(config: PretrainConfig | DistillConfig) -> Recipe:
    """What the rows of a run depend on beside its data."""
    data = config.data
    if isinstance(config, PretrainConfig):
        return TextRecipe(config.model.tokenizer_from, data.length)
    return ConversationRecipe(config.target, data.length, data.template_options, data.only_last_turn, data.packing)


def _pretrain_design(config: PretrainConfig, mesh: Mesh) -> Design:
    """Next-token prediction on text."""
    model_config = hf_config.transformer_config(config.model.numbers_from)
    model = hf.abstract_causal_lm(model_config)
    model_def, *_ = nnx.split(model, nnx.Param, ...)
    shardings = parameter_shardings(nnx.state(model), mesh, trained=True)
    kernel = _attention(config, mesh, model_config)
    return Design(
        objective=NextToken(
            model_def,
            jnp.dtype(config.compute_dtype),
            config.loss_chunk,
            layout(shardings, mesh),
            kernel,
            config.remat,
        ),
        trained=model_config,
        target=None,
        abstract=nnx.split_state(with_shardings(nnx.state(model), shardings), nnx.Param, ...),
        frozen=None,
        hf_config=read_json(hf_config.config_path(config.model.numbers_from)),
        notes=[f"attention kernel {kernel}", *whole_notes(shardings, nnx.state(model))],
    )


def _distill_design(config: DistillConfig, mesh: Mesh) -> Design:
    """A drafter learns its target's distributions."""
    target_config = hf_config.transformer_config(config.target)
    check_splits(target_config, mesh, str(config.target))
    drafter_config, raw_config, taps = _drafter(config, target_config)
    model = hf.abstract_drafter(drafter_config)
    trained = trained_variables(drafter_config)
    drafter_def, *_ = nnx.split(model, trained, ...)
    shardings = parameter_shardings(nnx.state(model), mesh, trained=True)
    target = hf.abstract_causal_lm(target_config)
    target_def, target_state = nnx.split(target)
    compute_dtype = jnp.dtype(config.compute_dtype)
    kernel = _attention(config, mesh, target_config, drafter_config.transformer)
    target_state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, compute_dtype), target_state)
    return Design(
        objective=Distillation(
            drafter_def,
            target_def,
            taps,
            config.ttt,
            compute_dtype,
            drafter_config.trims_vocabulary,
            layout(shardings, mesh),
            kernel,
            config.remat,
        ),
        trained=drafter_config,
        target=target_config,
        abstract=nnx.split_state(with_shardings(nnx.state(model), shardings), trained, ...),
        frozen=with_shardings(target_state, parameter_shardings(target_state, mesh, trained=False)),
        hf_config=raw_config,
        notes=[
            f"tap layers {list(taps)} of {target_config.num_layers}",
            f"embedding {'of the drafter, trained' if drafter_config.swap_h_and_emb else 'of the target, frozen'}",
            f"attention kernel {kernel}",
            *whole_notes(shardings, nnx.state(model)),
        ],
    )


def _attention(config: PretrainConfig | DistillConfig, mesh: Mesh, *models: TransformerConfig) -> Kernel:
    """The attention kernel of a step: one that runs for all its models."""
    dtype, device = jnp.dtype(config.compute_dtype), mesh.devices.flat[0]
    kernels = {choose_kernel(config.attention, device=device, dtype=dtype, head_dim=m.head_dim) for m in models}
    return kernels.pop() if len(kernels) == 1 else "xla"


def pretrain(config: PretrainConfig, mesh: Mesh) -> Stage:
    """Next-token prediction on text, from a checkpoint or from random values."""
    start, planned = config.model, design(config, mesh)
    rows, eval_rows = prepared(config)

    def values():
        shardings = _shardings(planned.abstract)
        if start.checkpoint is not None:
            model = hf.abstract_causal_lm(planned.trained)
            state = hf.load_parameters(model, start.checkpoint, shardings=shardings)
        else:
            state = _random(lambda: CausalLM(planned.trained, rngs=nnx.Rngs(config.seed)), shardings)
        return nnx.split_state(state, nnx.Param, ...)

    return Stage(
        design=planned,
        start=values,
        frozen=None,
        rows=rows,
        eval_rows=eval_rows,
        tokenizer=start.tokenizer_from,
        fingerprints={"start": fingerprint(start.numbers_from), "tokenizer": fingerprint(start.tokenizer_from)},
        notes=planned.notes,
    )


def distill(config: DistillConfig, mesh: Mesh) -> Stage:
    """A drafter learns its target's distributions, from a converted checkpoint or (EAGLE-3) from scratch."""
    planned = design(config, mesh)
    drafter_config, notes = planned.trained, list(planned.notes)
    rows, eval_rows = prepared(config)
    if drafter_config.trims_vocabulary:
        counted_V = rows.supervised_count_V  # of the tokenizer, which has fewer ids than the target has rows
        count_V = np.pad(counted_V, (0, planned.target.vocab_size - len(counted_V)))
        target_ids, note = _draft_vocabulary(config.drafter.checkpoint, drafter_config, count_V)
        notes.append(note)

    def values():
        shardings = _shardings(planned.abstract)
        if config.drafter.checkpoint is not None:
            state = _load_drafter(config.drafter.checkpoint, mesh)
            if drafter_config.trims_vocabulary and "target_ids" not in state:
                state = _trim_head(state, target_ids, shardings)
        else:
            state = _random(lambda: Drafter(drafter_config, rngs=nnx.Rngs(config.seed)), shardings)
            if drafter_config.trims_vocabulary:
                state["target_ids"].set_value(jax.device_put(target_ids, shardings["target_ids"].get_value()))
        if not drafter_config.swap_h_and_emb:
            table, sharding = state["embed_tokens"]["weight"], shardings["embed_tokens"]["weight"].get_value()
            table.set_value(hf.load_embedding(config.target, table.get_value(), sharding))
        return nnx.split_state(state, trained_variables(drafter_config), ...)

    target = hf.abstract_causal_lm(planned.target)
    compute_dtype = jnp.dtype(config.compute_dtype)
    return Stage(
        design=planned,
        start=values,
        frozen=hf.load_parameters(
            target, config.target, dtype=compute_dtype, shardings=jax.tree.map(lambda x: x.sharding, planned.frozen)
        ),
        rows=rows,
        eval_rows=eval_rows,
        tokenizer=config.target,
        fingerprints={
            "target": fingerprint(config.target),
            "start": "scratch" if config.drafter.checkpoint is None else fingerprint(config.drafter.checkpoint),
        },
        notes=notes,
    )


def _shardings(abstract: tuple[nnx.State, nnx.State]) -> nnx.State:
    """Of the whole model, from its parameters and constants."""
    return jax.tree.map(lambda x: x.sharding, nnx.merge_state(*abstract))


def _drafter(config: DistillConfig, target) -> tuple[DrafterConfig, dict, tuple[int, int, int]]:
    """(drafter's numbers, its `config.json` to be, tap layers), checked against the target."""
    checkpoint, scratch, size = config.drafter.checkpoint, config.drafter.scratch, config.drafter.draft_vocab_size
    if size is not None and size > target.vocab_size:
        raise UserError(f"drafter.draft_vocab_size {size} exceeds the target's vocabulary of {target.vocab_size}")
    if checkpoint is not None:
        drafter = hf_config.drafter_config(checkpoint)
        hf_config.check_fits_target(drafter, target, str(checkpoint))
        if None not in (drafter.tap_layers, config.tap_layers) and drafter.tap_layers != config.tap_layers:
            raise UserError(
                f"tap_layers {list(config.tap_layers)} contradict those of {checkpoint}, {list(drafter.tap_layers)}; "
                "leave the key out or convert again"
            )
        if drafter.trims_vocabulary and size not in (None, drafter.draft_vocab_size):
            raise UserError(
                f"drafter.draft_vocab_size {size} contradicts {checkpoint}, which keeps its own draft vocabulary of "
                f"{drafter.draft_vocab_size} tokens; leave the key out or convert again"
            )
        drafter = dataclasses.replace(drafter, draft_vocab_size=size or drafter.draft_vocab_size)
        raw = read_json(hf_config.config_path(checkpoint)) | {"draft_vocab_size": drafter.draft_vocab_size}
    else:
        drafter, raw = hf_config.scratch_drafter_config(target, scratch.num_layers, size), {}
    taps = hf_config.check_tap_layers(config.tap_layers or drafter.tap_layers, target.num_layers)
    raw = raw or hf_config.drafter_hf_config(drafter, taps)
    raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(taps), "use_aux_hidden_state": True}
    # SGLang gives a draft the target's positions: its own limit must reach them.
    limits = drafter.transformer.max_position_embeddings, target.max_position_embeddings
    raw["max_position_embeddings"] = max(limits)
    return drafter, raw, taps


def _draft_vocabulary(checkpoint: Path | None, drafter: DrafterConfig, count_V: np.ndarray) -> tuple[np.ndarray, str]:
    """(target ids of a trimmed draft vocabulary, what it covers): the checkpoint's own, else the most frequent tokens.

    Args:
      count_V: how often the training data supervises each target token.
    """
    if checkpoint is not None and hf_config.drafter_config(checkpoint).trims_vocabulary:
        target_ids, origin = hf.read_vocabulary_map(hf.TensorFiles(checkpoint), drafter), "of the checkpoint"
        covered = coverage(count_V, target_ids)
    else:
        (target_ids, covered), origin = most_frequent_tokens(count_V, drafter.draft_vocab_size), "most frequent"
    size = f"{len(target_ids)} of {len(count_V)} tokens"
    return target_ids, f"draft vocabulary ({origin}): {size}, {covered:.1%} of the supervised ones"


def _load_drafter(checkpoint: Path, mesh: Mesh) -> nnx.State:
    """A drafter checkpoint's state with the vocabulary that it has."""
    model = hf.abstract_drafter(hf_config.drafter_config(checkpoint))
    shardings = parameter_shardings(nnx.state(model), mesh, trained=True)
    return hf.load_parameters(model, checkpoint, shardings=shardings)


def _trim_head(state: nnx.State, target_ids: np.ndarray, shardings: nnx.State) -> nnx.State:
    """An untrimmed drafter's state with the rows `target_ids` of its head alone, and the map; in `shardings`."""
    head, sharding = state["lm_head"]["weight"], shardings["lm_head"]["weight"].get_value()
    head.set_value(jax.jit(lambda head_VxH: head_VxH[target_ids], out_shardings=sharding)(head.get_value()))
    map_sharding = shardings["target_ids"]
    state["target_ids"] = map_sharding.replace(jax.device_put(target_ids, map_sharding.get_value()))
    return state


def _random(make: Callable[[], nnx.Module], shardings: nnx.State) -> nnx.State:
    """A fresh model's state, created in its sharding; the values do not depend on it."""
    return jax.jit(lambda: nnx.state(make()), out_shardings=shardings)()
