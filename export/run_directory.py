"""Reading a run: what was trained, from its newest intact checkpoint or a named one."""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from osprey_jax.command import ArgumentParser, UserError
from osprey_jax.config import TrainConfig, load_config
from osprey_jax.data.tokenizer import copy_tokenizer
from osprey_jax.files import read_json
from osprey_jax.models import hf, hf_config
from osprey_jax.models.drafter import trained_variables
from osprey_jax.training.checkpoint import read_fields

EXPORTS = {"pretrain": "export.to_hf", "distill": "export.to_sglang"}


class Trained(NamedTuple):
    model: nnx.Module  # `CausalLM` or `Drafter`
    config: dict[str, Any]  # its `config.json`
    step: int
    facts: dict[str, Any]  # of the run, as its checkpoint has them: fingerprints of what went in, and more


def load_trained(run_dir: Path, step: int | None, stage: str) -> Trained:
    """What a run trained, float32 on the default device.

    Warns where the run had not come to its end: a stopped run looks like a finished one.

    Raises:
      UserError: not a run directory, a run of another stage than `stage`, or no intact checkpoint (of that step).
    """
    if not (run_dir / "config.yaml").is_file():
        raise UserError(f"{run_dir}: not a run directory of osprey_jax.train, it has no config.yaml")
    config = load_config(run_dir / "config.yaml", [], TrainConfig)
    if config.stage != stage:
        raise UserError(f"{run_dir}: a run of stage {config.stage}; export it with `python -m {EXPORTS[config.stage]}`")
    if stage == "pretrain":
        model = hf.abstract_causal_lm(hf_config.transformer_config(run_dir / "model"))
        trained = nnx.Param
    else:
        drafter_config = hf_config.drafter_config(run_dir / "model")
        model = hf.abstract_drafter(drafter_config)
        trained = trained_variables(drafter_config)
    params, constants = nnx.split_state(nnx.state(model), trained, ...)
    fields = {"params": params, "constants": constants}
    values, facts, step = read_fields(run_dir / "checkpoints", jax.tree.map(_on_default_device, fields), step)
    if step < facts["steps"]:
        print(f"warning: {run_dir}: this is step {step} of {facts['steps']}", file=sys.stderr)
    nnx.update(model, values["params"], values["constants"])
    return Trained(model, read_json(run_dir / "model" / "config.json"), step, facts)


def _on_default_device(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def run_parser(program: str, description: str) -> ArgumentParser:
    """A parser of `--run DIR [--step N] --out DIR`."""
    parser = ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run directory of osprey_jax.train")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint to export; the newest intact one if absent")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new directory for the exported files")
    return parser


def write_model(run_dir: Path, directory: Path, model: nnx.Module, config: dict) -> None:
    """Weights, config and tokenizer files of a run into an existing `directory`. The weights are float32 masters."""
    config = {key: value for key, value in config.items() if key != "torch_dtype"}  # transformers 4's name for dtype
    hf.write_checkpoint(directory, hf.model_tensors(model), config | {"dtype": "float32"})
    copy_tokenizer(run_dir / "model", directory)
