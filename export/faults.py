"""What can be seen to be wrong in an export's files by reading them beside the target's, before anything is computed.

Each fault is one clause that says what is wrong and what to do, without the directory's name.
"""

from pathlib import Path

import numpy as np

from export.exported import Exported, rope_keys_agree
from export.reference import Reference, digest
from osprey_jax.command import UserError
from osprey_jax.data.tokenizer import TOKENIZER_FILES
from osprey_jax.models import hf
from osprey_jax.models.hf_config import check_tap_layers
from osprey_jax.models.transformer import TransformerConfig

LAYOUT = 1  # of the files: `osprey_layout` in config.json
KINDS = {"Qwen3ForCausalLMEagle3": "qwen3", "LlamaForCausalLMEagle3": "llama"}  # architecture -> model_type

_FLOATING = ("float32", "bfloat16", "float16")
_NORMED = ("norm_output", "norm_before_residual")
_OTHER_INPUTS = ("norm_before_fc", "fc_norm", "use_aux_norm", "bias")
_SPEAKS = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")  # what decides on ids
_ROWS = 1 << 14  # of a table, compared at one time


def structure_faults(exported: Exported) -> list[str]:
    """Faults with which there is nothing to compute."""
    kind = KINDS.get(exported.architecture)
    if kind is None:
        return [f"wrong architecture: {exported.architecture!r} is none of {', '.join(KINDS)}"]
    faults, tensors, expected = [], exported.tensors, exported.shapes()
    if exported.config.get("model_type") != kind:
        found = exported.config.get("model_type")
        faults.append(f"wrong architecture: {exported.architecture} with model_type {found!r}, not {kind!r}")
    normed = [name for name in tensors if name.endswith((".q_norm.weight", ".k_norm.weight"))]
    if bool(normed) != exported.qk_norm:
        has = f"has {normed[0]}, which only Qwen3 has" if normed else "lacks the q_norm and k_norm of Qwen3"
        return [*faults, f"wrong architecture: {exported.architecture}, but model.safetensors {has}"]
    layout = exported.config.get("osprey_layout", LAYOUT)
    if layout != LAYOUT:
        faults.append(f"osprey_layout is {layout!r}, this reads {LAYOUT}: check it with the release that wrote it")
    optional = {"d2t", "t2d"}
    if not exported.swap_h_and_emb and exported.hidden_size == exported.target_hidden_size:
        optional.add("embed_tokens.weight")  # the target's is served
    if missing := sorted(expected.keys() - tensors.keys() - optional):
        faults.append(_missing(missing))
    if extra := sorted(tensors.keys() - expected.keys() - {"d2t", "t2d"}):
        faults.append(f"unexpected tensor {_some(extra)}: no server reads it")
    for name in sorted(expected.keys() & tensors.keys()):
        value = tensors[name]
        if value.shape != expected[name]:
            faults.append(f"{name} has shape {value.shape}, config.json asks for {expected[name]}")
        elif value.dtype.name not in _FLOATING:
            faults.append(f"{name} is {value.dtype.name}, not one of {', '.join(_FLOATING)}")
        elif not np.isfinite(value.astype(np.float32, copy=False)).all():
            faults.append(f"{name} holds values that are not finite")
    return faults + _vocabulary_faults(exported)


def meaning_faults(
    exported: Exported, target_dir: Path, target: TransformerConfig, reference: Reference | None
) -> tuple[list[str], list[str]]:
    """(faults, warnings) of files that can be computed with."""
    config, faults, warnings = exported.config, [], []
    eagle = config.get("eagle_config") or {}
    if config.get("tie_word_embeddings"):
        faults.append("head tied: tie_word_embeddings is true, with which a server drops the trained lm_head.weight")
    asked = [key for key in (*_NORMED, *_OTHER_INPUTS) if eagle.get(key, config.get(key))]
    for key in asked:
        what = "stream normed" if key in _NORMED else "target's features changed before fc"
        faults.append(f"{what}: {key} in config.json asks a server for what training does not do")
    if eagle.get("use_aux_hidden_state") is False:
        faults.append("eagle_config.use_aux_hidden_state is false: a server would give no features of the target")
    if not rope_keys_agree(config):
        faults.append("RoPE: rope_parameters (SGLang 0.5.23) disagree with rope_theta and rope_scaling (0.5.9)")
    for key, ours, theirs in (
        ("target_hidden_size", exported.target_hidden_size, target.hidden_size),
        ("vocab_size", exported.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            faults.append(f"{key} is {ours}, the target's is {theirs}: this drafter is for another target")
    if exported.max_position_embeddings < target.max_position_embeddings:
        ours, theirs = exported.max_position_embeddings, target.max_position_embeddings
        faults.append(f"max_position_embeddings is {ours}, the target has {theirs} positions")
    try:
        check_tap_layers(exported.tap_layers, target.num_layers)
    except UserError as error:
        faults.append(f"eagle_aux_hidden_state_layer_ids: {error}")
    for name in TOKENIZER_FILES:
        ours, theirs = exported.directory / name, target_dir / name
        if name != "generation_config.json" and ours.is_file() and _content(ours) != _content(theirs):
            text = f"{name} is not the target's"
            (faults if name in _SPEAKS else warnings).append(text)
    _embedding_faults(exported, target_dir, reference, faults, warnings)
    return faults, warnings


def changed_tensors(exported: Exported, reference: Reference) -> list[str]:
    """Names of tensors whose bytes are not those that were trained; of files in float32 alone."""
    return sorted(
        name
        for name, value in exported.tensors.items()
        if value.dtype.name not in ("bfloat16", "float16") and digest(value) != reference.digests.get(name)
    )


def table_equals_targets(exported: Exported, target_dir: Path) -> bool:
    """Whether the embedding is the target's own table, by value."""
    files = hf.TensorFiles(target_dir)
    table, name = exported.tensors.get("embed_tokens.weight"), "model.embed_tokens.weight"
    if table is None or name not in files or files.shape(name) != table.shape:
        return False
    parts = (slice(first, min(first + _ROWS, len(table))) for first in range(0, len(table), _ROWS))
    return all(np.array_equal(table[part], files.read(name, (part,), table.dtype)) for part in parts)


def _embedding_faults(
    exported: Exported, target_dir: Path, reference: Reference | None, faults: list[str], warnings: list[str]
) -> None:
    table = exported.tensors.get("embed_tokens.weight")
    if table is None:
        return
    equal = table_equals_targets(exported, target_dir)
    if exported.swap_h_and_emb and equal:
        text = "embed_tokens.weight is the target's own table, not the drafter's"
        if reference is None:
            warnings.append(f"{text}; right only where the drafter was made of the target itself")
        elif table.dtype != np.float32 or digest(table) != reference.digests.get("embed_tokens.weight"):
            faults.append(f"embedding equal to the target's: {text}")
    elif not exported.swap_h_and_emb and not equal and exported.hidden_size == exported.target_hidden_size:
        faults.append("embed_tokens.weight is not the target's, which SGLang serves in its place (streams not swapped)")


def _vocabulary_faults(exported: Exported) -> list[str]:
    """Of `d2t` (offsets: target id minus draft id) and `t2d` (whether a target id is in the draft vocabulary)."""
    sizes = {"d2t": exported.draft_vocab_size, "t2d": exported.vocab_size}
    trimmed = exported.draft_vocab_size != exported.vocab_size
    if missing := [name for name in sizes if name not in exported.tensors]:
        return [_missing(missing)] if trimmed else []
    for name, size in sizes.items():
        if exported.tensors[name].shape != (size,):
            return [f"{name} has shape {exported.tensors[name].shape}, config.json asks for ({size},)"]
    d2t, among = exported.tensors["d2t"], np.flatnonzero(exported.tensors["t2d"])
    if d2t.dtype.kind not in "iu":
        return [f"d2t is {d2t.dtype.name}, not integers"]
    if np.array_equal(d2t + np.arange(len(d2t)), among):
        return []
    if np.array_equal(d2t, among):
        return ["d2t not offsets: it holds target ids, a server adds the draft id to each"]
    return ["d2t and t2d disagree: d2t (offsets, target id minus draft id) must name the ids that t2d marks"]


def _missing(names: list[str]) -> str:
    known = {"lm_head.weight": "head missing: ", "embed_tokens.weight": "embedding missing: "}
    first = next((name for name in names if name in known), names[0])
    names = [first, *(name for name in names if name != first)]
    return f"{known.get(first, '')}no tensor {_some(names)}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
