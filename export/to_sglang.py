"""Write the drafter of a distillation run in the released layout, for SGLang."""

from pathlib import Path

import numpy as np

from export.run_directory import exported, load_trained, model_config, parse_arguments, require_stage
from osprey_jax.command import UserError, run
from osprey_jax.models import hf


def to_sglang(run_dir: Path, out: Path, step: int | None = None) -> int:
    """Export a `stage: distill` run to `out`; returns the step. What is on disk is read back and compared."""
    model, config, step = load_trained(run_dir, step)
    require_stage(config, "distill", "export.to_hf")
    with exported(run_dir, out, model, sglang_config(model_config(run_dir))) as directory:
        written, wanted = hf.model_tensors(hf.load_drafter(directory)), hf.model_tensors(model)
        for name, value in wanted.items():
            if not np.array_equal(written[name], value):
                raise UserError(f"{out}: {name} does not read back as it was written; is the disk sound?")
    return step


def sglang_config(config: dict) -> dict:
    """A drafter's config with what SGLang needs spelt out.

    Both generations of RoPE keys, since SGLang 0.5.9 reads `rope_theta` and `rope_scaling` and 0.5.23 reads
    `rope_parameters`; the head untied, or the loader would tie it. The tap ids stay 0-based: SGLang adds its own 1.
    """
    parameters = config.get("rope_parameters") or _rope_parameters(config)
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    return config | {
        "rope_parameters": parameters,
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": None if parameters["rope_type"] == "default" else scaling,
        "tie_word_embeddings": False,
    }


def _rope_parameters(config: dict) -> dict:
    """transformers 5's form of the keys that transformers 4 wrote."""
    scaling = dict(config.get("rope_scaling") or {"rope_type": "default"})
    if "type" in scaling:  # an older name still
        scaling.setdefault("rope_type", scaling.pop("type"))
    return scaling | {"rope_theta": config["rope_theta"]}


def main() -> None:
    arguments = parse_arguments("export.to_sglang", __doc__)
    step = to_sglang(arguments.run, arguments.out, arguments.step)
    print(f"step {step} of {arguments.run} -> {arguments.out}")


if __name__ == "__main__":
    run(main)
