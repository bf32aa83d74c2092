"""The released models' numbers, and training configs of such shapes without a checkpoint.

Sources: the `config.json` of Qwen/Qwen3-4B, Qwen/Qwen3-8B and meta-llama/Llama-3.3-70B-Instruct. The backbone is
Qwen3-4B cut to its first 2 layers; converted for a target it has the target's vocabulary and an untied head.
"""

import dataclasses
from pathlib import Path
from typing import Any

from osprey_jax.config import DistillConfig, PretrainConfig
from osprey_jax.files import write_json
from osprey_jax.models import hf_config
from osprey_jax.models.drafter import DrafterConfig
from osprey_jax.models.transformer import Llama3Scaling, TransformerConfig

QWEN3_4B_2LAYER = TransformerConfig(
    vocab_size=151936,
    hidden_size=2560,
    intermediate_size=9728,
    num_layers=2,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    rope_scaling=None,
    qk_norm=True,
    attention_bias=False,
    mlp_bias=False,
    tie_word_embeddings=True,
    initializer_range=0.02,
    max_position_embeddings=40960,
)
QWEN3_8B = dataclasses.replace(
    QWEN3_4B_2LAYER, hidden_size=4096, intermediate_size=12288, num_layers=36, tie_word_embeddings=False
)
LLAMA_3_3_70B = dataclasses.replace(
    QWEN3_8B,
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_layers=80,
    num_heads=64,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192),
    qk_norm=False,
    max_position_embeddings=131072,
)


def converted(backbone: TransformerConfig, target: TransformerConfig) -> DrafterConfig:
    """The drafter that `convert` makes of a backbone for a target, at the target's default taps."""
    transformer = dataclasses.replace(backbone, vocab_size=target.vocab_size, tie_word_embeddings=False)
    return DrafterConfig(transformer, target.hidden_size, target.vocab_size, swap_h_and_emb=True, tap_layers=None)


def model_json(config: TransformerConfig) -> dict[str, Any]:
    """A `config.json` from which `hf_config.transformer_config` reads the same numbers."""
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": hf_config.rope_parameters(config),
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "max_position_embeddings": config.max_position_embeddings,
    }


def distill_config(
    directory: Path, target: TransformerConfig, drafter: DrafterConfig, *, rows: int, length: int, **others: Any
) -> DistillConfig:
    """A run's config whose models are nothing but a `config.json` each, written to `directory`."""
    taps = drafter.tap_layers or hf_config.check_tap_layers(None, target.num_layers)
    write_json(_made(directory / "target") / "config.json", model_json(target))
    write_json(_made(directory / "drafter") / "config.json", hf_config.drafter_hf_config(drafter, taps))
    run = _run(directory, rows, length) | {"target": directory / "target"}
    return DistillConfig(stage="distill", drafter={"checkpoint": directory / "drafter"}, **run | others)


def pretrain_config(
    directory: Path, model: TransformerConfig, *, rows: int, length: int, **others: Any
) -> PretrainConfig:
    """A run's config whose model is nothing but a `config.json`, written to `directory`."""
    write_json(_made(directory / "model") / "config.json", model_json(model))
    run = _run(directory, rows, length) | {"model": {"checkpoint": directory / "model"}}
    return PretrainConfig(stage="pretrain", **run | others)


def _run(directory: Path, rows: int, length: int) -> dict[str, Any]:
    data = {"train": [], "length": length, "cache_dir": directory / "prepared"}
    rest = {"optimizer": {"learning_rate": 1e-4, "warmup_fraction": 0}, "steps": 10**6}
    return {"run_dir": directory / "run", "data": data, "batch_size": rows, **rest}


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory
