"""What a drafter's checkpoint must be: a config of which every key is honoured, and exactly the tensors it implies.

SGLang's own loading leaves what is missing at random values and drops what it does not know.
"""

from collections.abc import Iterable

import torch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

# What SGLang's EAGLE-3 or its relatives can do, and this package cannot: wrong output if ignored.
UNSUPPORTED = (
    "bias",  # on fc
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "tie_word_embeddings",
    "use_aux_norm",
    "use_sliding_window",
)
LAYOUT = 1  # of the exports; those without the key, as the release's, are of this one
REQUIRED = ("draft_vocab_size", "target_hidden_size", "head_dim")

# Parameters that hold several of a checkpoint's tensors, and what their loaders call each.
STACKED = {
    "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
    "gate_up_proj": {"gate_proj": 0, "up_proj": 1},
}


def check_layout(config) -> None:
    """`ValueError` where the checkpoint was written for a later version of this package."""
    layout = getattr(config, "osprey_layout", LAYOUT)
    if layout != LAYOUT:
        raise ValueError(
            f"{_name(config)}: osprey_layout {layout} in config.json, and this is for {LAYOUT}: the drafter was "
            "written by a newer osprey-jax; update sglang_patches to it"
        )


def check_config(config) -> None:
    """`ValueError` naming a key that is missing, or that asks for what this package does not compute."""
    check_layout(config)
    eagle = getattr(config, "eagle_config", None) or {}
    for key in REQUIRED:
        if not isinstance(getattr(config, key, None), int):
            raise ValueError(f"{_name(config)}: config.json lacks {key}")
    for key in UNSUPPORTED:
        value = eagle.get(key, getattr(config, key, None))
        if value:
            raise ValueError(f"{_name(config)}: {key}: {value} in config.json is not supported by osprey_sgl_models")
    taps = eagle.get("eagle_aux_hidden_state_layer_ids")
    supported = {
        "hidden_act": (config.hidden_act, "silu"),
        "num_aux_hidden_states": (getattr(config, "num_aux_hidden_states", None) or 3, 3),
        "eagle_config.use_aux_hidden_state": (eagle.get("use_aux_hidden_state", True), True),
        "the number of eagle_config.eagle_aux_hidden_state_layer_ids": (3 if taps is None else len(taps), 3),
    }
    for key, (value, only) in supported.items():
        if value != only:
            raise ValueError(f"{_name(config)}: {key} is {value}; osprey_sgl_models supports only {only}")
    # SGLang captures in the target's order, each once; -1 would be the target's embedding.
    if taps is not None and (taps != sorted(set(taps)) or taps[0] < 0):
        raise ValueError(
            f"{_name(config)}: eagle_aux_hidden_state_layer_ids {taps} in config.json are not different blocks, "
            "counted from 0, in ascending order"
        )


def load_checkpoint(
    model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]], optional: set[str]
) -> torch.Tensor | None:
    """Load every tensor; returns the target ids of a trimmed draft vocabulary, int64, or None.

    Raises:
      ValueError: one line naming a tensor that is missing (and not `optional`), unexpected, or of another shape.
    """
    config, where = model.config, _name(model.config)
    trimmed = config.draft_vocab_size != config.vocab_size
    places = _places(dict(model.named_parameters()))
    maps: dict[str, torch.Tensor] = {}
    seen, unexpected = set(), []
    for name, tensor in weights:
        if name in ("d2t", "t2d"):
            maps[name] = tensor
            continue
        if config.num_hidden_layers == 1 and name.startswith("midlayer."):
            name = name.replace("midlayer.", "layers.0.", 1)
        if name not in places:
            unexpected.append(name)
            continue
        seen.add(name)
        parameter, shard = places[name]
        load = getattr(parameter, "weight_loader", default_weight_loader)
        try:
            load(parameter, tensor, *shard)
        except (AssertionError, RuntimeError, ValueError) as error:
            shape = tuple(tensor.shape)
            raise ValueError(f"{where}: {name} has shape {shape}, config.json asks for another") from error
    missing = set(places) - seen - optional | ({"d2t", "t2d"} - set(maps) if trimmed else set())
    for kind, names in (("missing", sorted(missing)), ("unexpected", sorted(unexpected))):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{where}: {kind} {', '.join(names[:3])}{more}; export the drafter again")
    return _target_ids(maps, config) if trimmed else None


def _places(parameters: dict[str, nn.Parameter]) -> dict[str, tuple[nn.Parameter, tuple]]:
    """Parameter, and which shard of it, for the name of each tensor that a checkpoint must have."""
    places = {}
    for name, parameter in parameters.items():
        name = name.removeprefix("model.")
        stacked = [key for key in STACKED if f".{key}." in name]
        if not stacked:
            places[name] = (parameter, ())
        for key in stacked:
            for part, shard in STACKED[key].items():
                places[name.replace(key, part)] = (parameter, (shard,))
    return places


def _target_ids(maps: dict[str, torch.Tensor], config) -> torch.Tensor:
    offsets, among = maps["d2t"], maps["t2d"]
    ids = offsets + torch.arange(len(offsets), device=offsets.device)
    chosen = among.nonzero().flatten().to(ids.device)
    if (len(ids), len(among)) != (config.draft_vocab_size, config.vocab_size) or not torch.equal(ids, chosen):
        raise ValueError(
            f"{_name(config)}: d2t (offsets, target id minus draft id) and t2d disagree with each other or with "
            f"draft_vocab_size {config.draft_vocab_size}, vocab_size {config.vocab_size}"
        )
    return ids


def _name(config) -> str:
    return f"draft model {config._name_or_path}"
