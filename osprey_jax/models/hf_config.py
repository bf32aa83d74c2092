"""Hugging Face configs as ours and back: what a `config.json` says, checked, and what is refused by name."""

from pathlib import Path

import transformers

from osprey_jax.command import UserError
from osprey_jax.files import read_json, require_directory
from osprey_jax.models.drafter import DrafterConfig, default_tap_layers
from osprey_jax.models.transformer import Llama3Scaling, TransformerConfig

DRAFTER_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLMEagle3", "llama": "LlamaForCausalLMEagle3"}


def transformer_config(path: str | Path) -> TransformerConfig:
    """The numbers in a checkpoint's `config.json` (a directory holding one, or the file).

    transformers fills in what the architecture defaults; whatever this project does not compute is refused by name.
    """
    path = config_path(path)
    raw = read_json(path)
    kind = raw.get("model_type")
    if kind not in DRAFTER_ARCHITECTURES:
        raise UserError(f"{path}: model_type {kind!r} is not supported; use one of {', '.join(DRAFTER_ARCHITECTURES)}")
    try:
        hf = transformers.AutoConfig.for_model(**raw)
    except Exception as error:  # transformers raises many kinds for one cause: a config it cannot read
        raise UserError(f"{path}: not a usable {kind} config ({error})") from error
    if hf.hidden_act != "silu":
        raise UserError(f"{path}: hidden_act {hf.hidden_act!r} is not supported; only silu is")
    layer_types = set(getattr(hf, "layer_types", None) or ["full_attention"])
    if getattr(hf, "use_sliding_window", False) or layer_types != {"full_attention"}:
        raise UserError(f"{path}: sliding-window attention is not supported; only full attention is")
    try:
        config = TransformerConfig(
            vocab_size=int(hf.vocab_size),
            hidden_size=int(hf.hidden_size),
            intermediate_size=int(hf.intermediate_size),
            num_layers=int(hf.num_hidden_layers),
            num_heads=int(hf.num_attention_heads),
            num_kv_heads=int(hf.num_key_value_heads),
            head_dim=int(hf.head_dim),
            rms_norm_eps=float(hf.rms_norm_eps),
            rope_theta=float(hf.rope_parameters["rope_theta"]),
            rope_scaling=_rope_scaling(hf.rope_parameters, path),
            qk_norm=kind == "qwen3",
            attention_bias=bool(hf.attention_bias),
            mlp_bias=bool(getattr(hf, "mlp_bias", False)),  # Qwen3 has no such key and no such bias
            tie_word_embeddings=bool(hf.tie_word_embeddings),
            initializer_range=float(hf.initializer_range),
            max_position_embeddings=int(hf.max_position_embeddings),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: a number is missing or malformed ({error!r})") from error
    sizes = {
        name: value for name, value in vars(config).items() if isinstance(value, int) and not isinstance(value, bool)
    }
    for name, value in sizes.items():
        if value < 1:
            raise UserError(f"{path}: {name} is {value}; it must be at least 1")
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise UserError(
            f"{path}: {config.num_heads} heads, {config.num_kv_heads} key/value heads of size {config.head_dim}: "
            "the first must be a multiple of the second and the size even"
        )
    return config


def _rope_scaling(parameters: dict, path: Path) -> Llama3Scaling | None:
    kind = parameters["rope_type"]
    if kind == "default":
        return None
    if kind != "llama3":
        raise UserError(f"{path}: RoPE type {kind!r} is not supported; only default and llama3 are")
    return Llama3Scaling(
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_max_position_embeddings=int(parameters["original_max_position_embeddings"]),
    )


def drafter_config(path: str | Path) -> DrafterConfig:
    """The numbers in a drafter's `config.json`, in the released layout."""
    path = config_path(path)
    raw = read_json(path)
    transformer = transformer_config(path)
    architectures = raw.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else architectures
    if architecture not in DRAFTER_ARCHITECTURES.values():
        raise UserError(
            f"{path}: architecture {architecture!r} is not a drafter's ({', '.join(DRAFTER_ARCHITECTURES.values())}); "
            "run `python -m osprey_jax.convert` on a pruned backbone first"
        )
    for key in ("target_hidden_size", "draft_vocab_size"):
        if type(raw.get(key)) is not int or raw[key] < 1:
            raise UserError(f"{path}: {key} is {raw.get(key)!r}; it is not a drafter's config")
    swap = raw.get("swap_h_and_emb", False)  # absent in EAGLE-3's own checkpoints: not swapped
    if type(swap) is not bool:
        raise UserError(f"{path}: swap_h_and_emb is {swap!r}, neither true nor false")
    eagle = raw.get("eagle_config")
    taps = eagle.get("eagle_aux_hidden_state_layer_ids") if isinstance(eagle, dict) else None
    is_list = isinstance(taps, list) and all(type(i) is int for i in taps)
    if not (eagle is None or (isinstance(eagle, dict) and (taps is None or is_list))):
        raise UserError(f"{path}: eagle_config {eagle!r} lists no eagle_aux_hidden_state_layer_ids")
    if raw["draft_vocab_size"] > transformer.vocab_size:
        raise UserError(
            f"{path}: draft_vocab_size {raw['draft_vocab_size']} is not within vocab_size {transformer.vocab_size}"
        )
    return DrafterConfig(
        transformer=transformer,
        target_hidden_size=raw["target_hidden_size"],
        draft_vocab_size=raw["draft_vocab_size"],
        swap_h_and_emb=swap,
        tap_layers=None if taps is None else tuple(taps),
    )


def scratch_drafter_config(target: TransformerConfig, num_layers: int, draft_vocab_size: int | None) -> DrafterConfig:
    """EAGLE-3 from scratch for `target`: Llama blocks of its widths, its embedding, streams not swapped."""
    if target.attention_bias or target.mlp_bias:
        raise UserError("a drafter from scratch has no biases, and this target has: convert a backbone instead")
    transformer = TransformerConfig(
        **vars(target) | {"num_layers": num_layers, "qk_norm": False, "tie_word_embeddings": False}
    )
    return DrafterConfig(
        transformer=transformer,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=draft_vocab_size or target.vocab_size,
        swap_h_and_emb=False,
        tap_layers=None,
    )


def drafter_hf_config(config: DrafterConfig, tap_layers: tuple[int, ...]) -> dict:
    """A drafter's `config.json` in the released layout, from numbers alone: one from scratch has no source to copy."""
    c = config.transformer
    kind = "qwen3" if c.qk_norm else "llama"
    return {
        "architectures": [DRAFTER_ARCHITECTURES[kind]],
        "model_type": kind,
        "attention_bias": c.attention_bias,
        "attention_dropout": 0.0,
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(tap_layers), "use_aux_hidden_state": True},
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "initializer_range": c.initializer_range,
        "intermediate_size": c.intermediate_size,
        "max_position_embeddings": c.max_position_embeddings,
        "mlp_bias": c.mlp_bias,
        "num_attention_heads": c.num_heads,
        "num_hidden_layers": c.num_layers,
        "num_key_value_heads": c.num_kv_heads,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_parameters": rope_parameters(c),
        "swap_h_and_emb": config.swap_h_and_emb,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "vocab_size": c.vocab_size,
    }


def rope_parameters(config: TransformerConfig) -> dict:
    """RoPE in transformers 5's form."""
    if config.rope_scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    return {"rope_type": "llama3", "rope_theta": config.rope_theta} | vars(config.rope_scaling)


def check_tap_layers(taps: tuple[int, ...] | None, num_layers: int) -> tuple[int, int, int]:
    """`taps`, or the default of a target of `num_layers` blocks, if they are three different blocks in order."""
    chosen = default_tap_layers(num_layers) if taps is None else tuple(taps)
    if len(chosen) != 3 or list(chosen) != sorted(set(chosen)) or chosen[0] < 0 or chosen[-1] >= num_layers:
        origin = "the default tap layers" if taps is None else "tap layers"
        raise UserError(
            f"{origin} {list(chosen)} are not three different blocks, ascending, within 0..{num_layers - 1} "
            f"of the target's {num_layers} layers; give tap_layers"
        )
    return chosen


def check_fits_target(drafter: DrafterConfig, target: TransformerConfig, where: str) -> None:
    """`UserError` where a drafter was made for another target: by width or by vocabulary."""
    if drafter.target_hidden_size != target.hidden_size:
        raise UserError(
            f"{where}: target_hidden_size is {drafter.target_hidden_size}, but the target's hidden size is "
            f"{target.hidden_size}; convert the backbone for this target"
        )
    if drafter.transformer.vocab_size != target.vocab_size:
        raise UserError(
            f"{where}: vocab_size is {drafter.transformer.vocab_size}, but the target's is {target.vocab_size}; "
            "convert the backbone for this target"
        )


def config_path(path: str | Path) -> Path:
    """The `config.json` of a checkpoint directory, or the JSON file itself."""
    path = Path(path)
    if path.suffix == ".json":
        return path
    return require_directory(path, "a Hugging Face checkpoint on disk; download a hub's model first") / "config.json"
