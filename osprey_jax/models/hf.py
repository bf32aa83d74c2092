"""Hugging Face checkpoints: their tensors as our parameters, and back.

Parameters keep HF's names and layout, so the mapping is a list of names: a stacked parameter has one name a layer.
Reading is lazy: each device's shard is sliced out of the safetensors files, and no host holds a whole model.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from osprey_jax.command import UserError
from osprey_jax.files import read_json, require_directory, require_file, write_json
from osprey_jax.models.causal_lm import CausalLM
from osprey_jax.models.drafter import Drafter, DrafterConfig, VocabularyMap
from osprey_jax.models.hf_config import drafter_config, transformer_config
from osprey_jax.models.transformer import TransformerConfig

DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}

# ---- names


def hf_names(path: tuple, *, num_layers: int, drafter: bool) -> list[str]:
    """Tensor names of one parameter: one, or `num_layers` of them for a parameter stacked over layers."""
    if drafter:
        if path[0] == "layers" and num_layers == 1:
            path = ("midlayer", *path[2:])
        return [".".join(str(part) for part in path)]
    if path[0] == "layers":
        rest = ".".join(path[1:])
        return [f"model.layers.{i}.{rest}" for i in range(num_layers)]
    name = ".".join(path)
    return [name if path[0] == "lm_head" else f"model.{name}"]


# ---- reading


class TensorFiles:
    """The tensors of a checkpoint directory by name, one file or sharded by an index, read lazily by slices."""

    def __init__(self, directory: str | Path):
        self.directory = require_directory(directory, "a Hugging Face checkpoint")
        index = self.directory / "model.safetensors.index.json"
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
                raise UserError(f"{index}: no weight_map of names to files")
            if any(Path(file).name != file for file in weight_map.values()):
                raise UserError(f"{index}: names a file outside the checkpoint")
            files = sorted(set(weight_map.values()))
        else:
            if (self.directory / "pytorch_model.bin").exists() and not (self.directory / "model.safetensors").exists():
                raise UserError(
                    f"{self.directory}: holds only a pickled pytorch_model.bin, which is never loaded; save it as "
                    "safetensors first (`model.save_pretrained(DIR)` in transformers)"
                )
            files = ["model.safetensors"]
        self._slices = {}
        for file in files:
            path = require_file(self.directory / file, "weights of the checkpoint")
            try:
                handle = safe_open(path, framework="np")
                for name in handle.keys():  # noqa: SIM118
                    self._slices[name] = handle.get_slice(name)
            except SafetensorError as error:
                raise UserError(f"{path}: not a readable safetensors file ({error})") from error
        if index.is_file() and set(weight_map) != set(self._slices):
            odd = sorted(set(weight_map) ^ set(self._slices))
            raise UserError(f"{index}: disagrees with the files about {_some(odd)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._slices)

    def __contains__(self, name: str) -> bool:
        return name in self._slices

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slices[name].get_shape())

    def read(self, name: str, index: tuple[slice, ...] = (), dtype: np.dtype | None = None) -> np.ndarray:
        """A tensor or a rectangular part of it, in its own dtype (bool and integers too) or cast to `dtype`."""
        try:
            value = self._slices[name][index or (slice(None),)]
        except (SafetensorError, TypeError) as error:
            raise UserError(f"{self.directory}: tensor {name} cannot be read ({error})") from error
        return value if dtype is None else value.astype(dtype)

    def check_floating(self, name: str) -> None:
        kind = self._slices[name].get_dtype()
        if kind not in DTYPES:
            raise UserError(
                f"{self.directory}: tensor {name} is {kind}, only {', '.join(DTYPES)} are read; dequantise it"
            )


def tensor_shapes(model: nnx.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of a `CausalLM` or `Drafter` (abstract will do) under its HF name."""
    is_drafter = isinstance(model, Drafter)
    config = model.config.transformer if is_drafter else model.config
    shapes = {}
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        names = hf_names(path, num_layers=config.num_layers, drafter=is_drafter)
        shape = tuple(parameter.shape)
        shapes |= dict.fromkeys(names, shape[1:] if not is_drafter and path[0] == "layers" else shape)
    return shapes


def check_tensors(files: TensorFiles, model: nnx.Module) -> None:
    """`UserError` naming a tensor that is missing, unexpected, of another shape than in `model`, or not floating."""
    where, expected = files.directory, tensor_shapes(model)
    extra = set(files) - set(expected)
    if isinstance(model, Drafter):
        extra -= {"t2d", "d2t"}
    else:
        # HF keeps neither: a tied head is the embedding, and the buffers follow from the config.
        extra -= {"lm_head.weight"} if model.config.tie_word_embeddings else set()
        extra = {name for name in extra if not name.endswith("rotary_emb.inv_freq")}
    missing = sorted(set(expected) - set(files))
    if missing:
        raise UserError(f"{where}: missing {_some(missing)}")
    if extra:
        raise UserError(f"{where}: unexpected {_some(sorted(extra))}")
    for name, shape in expected.items():
        files.check_floating(name)
        if files.shape(name) != shape:
            raise UserError(f"{where}: {name} has shape {files.shape(name)}, the config asks for {shape}")


def load_parameters(
    model: nnx.Module,
    directory: str | Path,
    *,
    dtype: jnp.dtype = jnp.float32,
    shardings: nnx.State | None = None,
) -> nnx.State:
    """Parameters (and vocabulary map) of an HF checkpoint for `model`, an abstract `CausalLM` or `Drafter`.

    Args:
      model: from `nnx.eval_shape`; decides names and shapes.
      dtype: of the floating parameters; checkpoints are float32, bfloat16 or float16.
      shardings: a sharding for each parameter, of `nnx.state(model)`'s structure; None for the default device.

    Raises:
      UserError: a tensor is missing, unexpected, of another shape or of another kind of number; it is named.
    """
    files = TensorFiles(directory)
    check_tensors(files, model)
    is_drafter = isinstance(model, Drafter)
    config = model.config.transformer if is_drafter else model.config
    plan = []
    state = nnx.state(model)
    for path, variable in nnx.to_flat_state(state):
        if not isinstance(variable, VocabularyMap):
            names = hf_names(path, num_layers=config.num_layers, drafter=is_drafter)
            plan.append((path, names, tuple(variable.shape), not is_drafter and path[0] == "layers"))

    by_path = {} if shardings is None else dict(nnx.to_flat_state(shardings))
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    loaded = dict(nnx.to_flat_state(state))
    for path, names, shape, stacked in plan:

        def read(index, names=names, stacked=stacked):
            if not stacked:
                return files.read(names[0], index, dtype)
            return np.stack([files.read(name, index[1:], dtype) for name in names[index[0]]])

        sharding = by_path[path].get_value() if path in by_path else default
        loaded[path] = loaded[path].replace(jax.make_array_from_callback(shape, sharding, read, dtype=dtype))
    if is_drafter and model.config.trims_vocabulary:
        target_ids = read_vocabulary_map(files, model.config)
        path = ("target_ids",)
        sharding = by_path[path].get_value() if path in by_path else default
        loaded[path] = loaded[path].replace(jax.device_put(target_ids, sharding))
    return nnx.from_flat_state(loaded)


def load_embedding(directory: str | Path, like: jax.ShapeDtypeStruct | jax.Array, sharding) -> jax.Array:
    """The token embedding of a `CausalLM` checkpoint alone, of the shape and dtype of `like`."""
    files, name = TensorFiles(directory), "model.embed_tokens.weight"
    if name not in files or files.shape(name) != like.shape:
        raise UserError(f"{files.directory}: no {name} of shape {like.shape}")
    read = lambda index: files.read(name, index, like.dtype)
    return jax.make_array_from_callback(like.shape, sharding, read, dtype=like.dtype)


def read_vocabulary_map(files: TensorFiles, config: DrafterConfig) -> np.ndarray:
    """Target ids of a trimmed draft vocabulary, int32, ascending, from `d2t`'s offsets; `t2d` must agree."""
    where, sizes = files.directory, {"d2t": config.draft_vocab_size, "t2d": config.transformer.vocab_size}
    for name, size in sizes.items():
        if name not in files:
            raise UserError(f"{where}: missing {name}, which a trimmed draft vocabulary needs")
        if files.shape(name) != (size,):
            raise UserError(f"{where}: {name} has shape {files.shape(name)}, the config asks for ({size},)")
    target_ids = files.read("d2t").astype(np.int64) + np.arange(config.draft_vocab_size)
    if not np.array_equal(target_ids, np.flatnonzero(files.read("t2d"))):
        raise UserError(f"{where}: d2t and t2d disagree (d2t holds offsets: target id minus draft id)")
    return target_ids.astype(np.int32)


def _some(names: list[str]) -> str:
    """The first few names and how many more."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ---- models


def abstract_causal_lm(config: TransformerConfig) -> CausalLM:
    """A `CausalLM` of shapes without values."""
    return nnx.eval_shape(lambda: CausalLM(config, rngs=nnx.Rngs(0)))


def abstract_drafter(config: DrafterConfig) -> Drafter:
    """A `Drafter` of shapes without values."""
    return nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0)))


def load_causal_lm(directory: str | Path, *, dtype: jnp.dtype = jnp.float32) -> CausalLM:
    """The Qwen3 or Llama model of an HF checkpoint on the default device."""
    model = abstract_causal_lm(transformer_config(directory))
    nnx.update(model, load_parameters(model, directory, dtype=dtype))
    return model


def load_drafter(directory: str | Path, *, dtype: jnp.dtype = jnp.float32) -> Drafter:
    """The drafter of a checkpoint in the released layout on the default device."""
    model = abstract_drafter(drafter_config(directory))
    nnx.update(model, load_parameters(model, directory, dtype=dtype))
    return model


# ---- writing


def model_tensors(model: nnx.Module) -> dict[str, np.ndarray]:
    """Every tensor of a `CausalLM` or `Drafter` under its HF name, on the host; a drafter's `t2d` and `d2t` too."""
    is_drafter = isinstance(model, Drafter)
    config = model.config.transformer if is_drafter else model.config
    tensors = {}
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        names = hf_names(path, num_layers=config.num_layers, drafter=is_drafter)
        value = np.asarray(parameter.get_value())
        stacked = not is_drafter and path[0] == "layers"
        tensors |= zip(names, value, strict=True) if stacked else [(names[0], value)]
    if is_drafter:
        ids = None if model.target_ids is None else np.asarray(model.target_ids[...])
        tensors |= vocabulary_tensors(ids, model.config.transformer.vocab_size)
    return tensors


def vocabulary_tensors(target_ids: np.ndarray | None, vocab_size: int) -> dict[str, np.ndarray]:
    """`t2d` (bool, by target id) and `d2t` (int64 offsets, by draft id) of a draft vocabulary; None: all of it."""
    ids = np.arange(vocab_size, dtype=np.int64) if target_ids is None else np.asarray(target_ids, np.int64)
    t2d = np.zeros(vocab_size, np.bool_)
    t2d[ids] = True
    return {"t2d": t2d, "d2t": ids - np.arange(len(ids))}


def write_checkpoint(directory: Path, tensors: Mapping[str, np.ndarray], config: dict) -> None:
    """`model.safetensors` and `config.json` into an existing directory (see `files.new_directory`)."""
    contiguous = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # safetensors leaves it to its owner alone: a server may be another
    write_json(directory / "config.json", config)
