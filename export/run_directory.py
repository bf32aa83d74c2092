"""Reading a run: what was trained, from its newest intact checkpoint or a named one."""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
from flax import nnx

from osprey_jax.command import UserError
from osprey_jax.config import DistillConfig, PretrainConfig, TrainConfig, load_config
from osprey_jax.data.tokenizer import copy_tokenizer
from osprey_jax.files import new_directory, read_json, require_directory
from osprey_jax.models import hf, hf_config
from osprey_jax.models.drafter import trained_variables
from osprey_jax.training.checkpoint import read_fields


def load_trained(run_dir: Path, step: int | None) -> tuple[nnx.Module, PretrainConfig | DistillConfig, int]:
    """(the `CausalLM` or `Drafter` that a run trained, its config, the step), float32 on the default device.

    Raises:
      UserError: not a run directory, or no intact checkpoint (of that step).
    """
    require_directory(run_dir, "a run of `osprey_jax.train`")
    config = load_config(run_dir / "config.yaml", [], TrainConfig)
    if isinstance(config, PretrainConfig):
        model = hf.abstract_causal_lm(hf_config.transformer_config(run_dir / "model"))
        trained = nnx.Param
    else:
        drafter_config = hf_config.drafter_config(run_dir / "model")
        model = hf.abstract_drafter(drafter_config)
        trained = trained_variables(drafter_config)
    params, constants = nnx.split_state(nnx.state(model), trained, ...)
    fields = {"params": params, "constants": constants}
    values, _, step = read_fields(run_dir / "checkpoints", jax.tree.map(_on_default_device, fields), step)
    nnx.update(model, values["params"], values["constants"])
    return model, config, step


def _on_default_device(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def parse_arguments(program: str, description: str) -> argparse.Namespace:
    """`--run DIR [--step N] --out DIR`."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run directory of osprey_jax.train")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint to export; the newest intact one if absent")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new directory for the exported files")
    return parser.parse_args()


@contextlib.contextmanager
def exported(run_dir: Path, out: Path, model: nnx.Module, config: dict) -> Iterator[Path]:
    """Write weights, config and tokenizer files to `out`, which appears once the block has looked at them."""
    with new_directory(out) as directory:
        hf.write_checkpoint(directory, hf.model_tensors(model), config)
        copy_tokenizer(run_dir / "model", directory)
        yield directory


def model_config(run_dir: Path) -> dict:
    """The trained model's `config.json`, its weights being float32 masters."""
    return read_json(run_dir / "model" / "config.json") | {"dtype": "float32"}


def require_stage(config: PretrainConfig | DistillConfig, stage: str, other: str) -> None:
    """`UserError` where a run is of the other stage, naming the command for that."""
    if config.stage != stage:
        raise UserError(f"{config.run_dir}: a run of stage {config.stage}; export it with `python -m {other}`")
