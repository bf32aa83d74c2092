"""Write the drafter of a distillation run in the released layout, for SGLang."""

from pathlib import Path

import numpy as np

from export.run_directory import load_trained, parse_arguments, write_model
from osprey_jax.command import UserError, run
from osprey_jax.files import new_directory
from osprey_jax.models import hf, hf_config
from osprey_jax.models.drafter import DrafterConfig


def to_sglang(run_dir: Path, out: Path, step: int | None = None) -> int:
    """Export a `stage: distill` run to `out`; returns the step. What is on disk is read back and compared."""
    with new_directory(out) as directory:
        model, raw, step = load_trained(run_dir, step, "distill")
        write_model(run_dir, directory, model, sglang_config(raw, model.config))
        written, wanted = hf.model_tensors(hf.load_drafter(directory)), hf.model_tensors(model)
        for name, value in wanted.items():
            if not np.array_equal(written[name], value):
                raise UserError(f"{out}: {name} does not read back as it was written; is the disk sound?")
    return step


def sglang_config(raw: dict, numbers: DrafterConfig) -> dict:
    """A drafter's `config.json` with what SGLang needs spelt out; `numbers` are what it was read as.

    Both generations of RoPE keys, since SGLang 0.5.9 reads `rope_theta` and `rope_scaling` and 0.5.23 reads
    `rope_parameters`; the head untied, or the loader would tie it. The tap ids stay 0-based: SGLang adds its own 1.
    """
    parameters = hf_config.rope_parameters(numbers.transformer)
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    return raw | {
        "rope_parameters": parameters,
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": None if numbers.transformer.rope_scaling is None else scaling,
        "tie_word_embeddings": False,
    }


def main() -> None:
    arguments = parse_arguments("export.to_sglang", __doc__)
    step = to_sglang(arguments.run, arguments.out, arguments.step)
    print(f"step {step} of {arguments.run} -> {arguments.out}")


if __name__ == "__main__":
    run(main)
