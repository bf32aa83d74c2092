"""The files of an exported drafter, read as SGLang reads them: `config.json` and every `*.safetensors`, nothing else.

Written on its own: what reads a drafter to train it (`osprey_jax.models`) must not be what judges the files.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from osprey_jax.command import UserError

LAYER_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


@dataclasses.dataclass(frozen=True)
class Rope:
    """`scaling` are llama3's four numbers, None for plain RoPE."""

    theta: float
    scaling: dict[str, float] | None

    def __str__(self) -> str:
        return f"theta {self.theta:g}, {'no scaling' if self.scaling is None else f'llama3 scaling {self.scaling}'}"


@dataclasses.dataclass(frozen=True)
class Exported:
    """A drafter as its files say it is; tensors in the dtypes of the files."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    architecture: str | None
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    vocab_size: int  # of the target: what the embedding reads
    draft_vocab_size: int  # what the head writes
    target_hidden_size: int
    max_position_embeddings: int
    swap_h_and_emb: bool
    tap_layers: tuple[int, ...] | None  # 0-based; None: SGLang's default for the target
    rope: Rope

    @property
    def qk_norm(self) -> bool:
        return str(self.architecture).startswith("Qwen3")

    def layer(self, i: int) -> str:
        """What the names of layer i's tensors start with: one layer alone has a name of its own."""
        return "midlayer." if self.num_layers == 1 else f"layers.{i}."

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every floating tensor that such a drafter has, by name."""
        H, F, queries, keys = (
            self.hidden_size,
            self.intermediate_size,
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        )
        shapes = {
            "embed_tokens.weight": (self.vocab_size, H),
            "fc.weight": (H, 3 * self.target_hidden_size),
            "norm.weight": (H,),
            "lm_head.weight": (self.draft_vocab_size, H),
        }
        attention = {
            "q_proj": (queries, 2 * H),
            "k_proj": (keys, 2 * H),
            "v_proj": (keys, 2 * H),
            "o_proj": (H, queries),
        }
        mlp = {"gate_proj": (F, H), "up_proj": (F, H), "down_proj": (H, F)}
        for i in range(self.num_layers):
            layer = self.layer(i)
            shapes |= {f"{layer}{name}.weight": (H,) for name in LAYER_NORMS}
            if self.qk_norm:
                shapes |= {f"{layer}self_attn.{name}.weight": (self.head_dim,) for name in ("q_norm", "k_norm")}
            for part, products, bias in (
                ("self_attn", attention, self.attention_bias),
                ("mlp", mlp, self.mlp_bias),
            ):
                shapes |= {f"{layer}{part}.{name}.weight": shape for name, shape in products.items()}
                if bias:
                    shapes |= {f"{layer}{part}.{name}.bias": shape[:1] for name, shape in products.items()}
        return shapes


def read_exported(directory: Path) -> Exported:
    """Raises `UserError` where a file is missing or unreadable, or `config.json` lacks a number."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        architectures = config.get("architectures") or [None]
        qwen3 = str(architectures[0]).startswith("Qwen3")
        heads = int(config["num_attention_heads"])
        eagle = config.get("eagle_config") or {}
        taps = eagle.get("eagle_aux_hidden_state_layer_ids")
        return Exported(
            directory=directory,
            config=config,
            tensors=_read_tensors(directory),
            architecture=architectures[0],
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            # What transformers puts in place of an absent key: Qwen3's is a number, Llama's follows from others.
            num_kv_heads=int(config.get("num_key_value_heads") or (32 if qwen3 else heads)),
            head_dim=int(config.get("head_dim") or (128 if qwen3 else config["hidden_size"] // heads)),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)) and not qwen3,
            vocab_size=int(config["vocab_size"]),
            draft_vocab_size=int(config["draft_vocab_size"]),
            target_hidden_size=int(config["target_hidden_size"]),
            max_position_embeddings=int(config.get("max_position_embeddings", 0)),
            swap_h_and_emb=bool(config.get("swap_h_and_emb", False)),
            tap_layers=None if taps is None else tuple(int(i) for i in taps),
            rope=read_rope(config),
        )
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); --export names what export.to_sglang wrote"
        ) from error
    except KeyError as error:
        raise UserError(f"{path}: {error} is missing; it is not a drafter's config") from error
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not a usable config ({error})") from error


def _read_tensors(directory: Path) -> dict[str, np.ndarray]:
    tensors, files = {}, sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError(f"{directory}: no *.safetensors file; export the drafter again")
    for file in files:
        try:
            found = load_file(file)
        except SafetensorError as error:
            raise UserError(f"{file}: not a readable safetensors file ({error})") from error
        if twice := sorted(tensors.keys() & found.keys()):
            raise UserError(f"{file}: {twice[0]} is in another file of the directory too")
        tensors |= found
    return tensors


def read_rope(config: dict[str, Any]) -> Rope:
    """RoPE of a `config.json`: SGLang 0.5.23 reads `rope_parameters`, 0.5.9 (and absent the first) the older keys."""
    parameters = config.get("rope_parameters")
    return _older_rope(config) if parameters is None else _rope(parameters.get("rope_theta"), parameters, config)


def rope_keys_agree(config: dict[str, Any]) -> bool:
    """Whether both generations of keys, where both are there, say the same."""
    older = config.keys() & {"rope_theta", "rope_scaling"}
    return not older or config.get("rope_parameters") is None or _older_rope(config) == read_rope(config)


def _older_rope(config: dict[str, Any]) -> Rope:
    return _rope(config.get("rope_theta"), config.get("rope_scaling") or {}, config)


def _rope(theta: Any, scaling: dict[str, Any], config: dict[str, Any]) -> Rope:
    theta = float(config.get("rope_theta", 10000.0) if theta is None else theta)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return Rope(theta, None)
    if kind != "llama3":
        raise ValueError(f"RoPE of type {kind!r}; only default and llama3 are supported")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return Rope(theta, {name: float(scaling[name]) for name in names})
