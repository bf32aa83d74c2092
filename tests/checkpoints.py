"""Random checkpoints like a golden case's source, with whatever the config is to say differently."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from osprey_jax.data.tokenizer import copy_tokenizer
from osprey_jax.models.hf import abstract_causal_lm, tensor_shapes
from osprey_jax.models.hf_config import transformer_config


def write_backbone(
    like: Path, out: Path, *, dtype: np.dtype = np.float32, shards: int = 1, seed: int = 0, **changes
) -> dict[str, np.ndarray]:
    """Write a checkpoint of random tensors to `out`; its config is `like`'s with `changes`. Returns the tensors."""
    out.mkdir(parents=True)
    copy_tokenizer(like, out)
    config = read(like / "config.json") | changes
    if "layer_types" in config:
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    write(out / "config.json", config)
    rng = np.random.default_rng(seed)
    shapes = tensor_shapes(abstract_causal_lm(transformer_config(out)))
    tensors = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    write_weights(out, tensors, shards)
    return tensors


def write_weights(out: Path, tensors: dict[str, np.ndarray], shards: int = 1) -> None:
    """One `model.safetensors`, or several files and their index."""
    if shards == 1:
        save_file(tensors, out / "model.safetensors")
        return
    files = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: value for name, value in tensors.items() if files[name] == file}, out / file)
    write(out / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})


def assert_same_tensors(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """Same names, dtypes, shapes and bytes."""
    assert sorted(got) == sorted(want)
    for name, value in want.items():
        assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape), name
        assert got[name].tobytes() == value.tobytes(), name


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
