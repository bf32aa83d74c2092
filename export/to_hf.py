"""Write the language model of a pretraining run as a Hugging Face checkpoint."""

from pathlib import Path

from export.run_directory import exported, load_trained, model_config, parse_arguments, require_stage
from osprey_jax.command import run


def to_hf(run_dir: Path, out: Path, step: int | None = None) -> int:
    """Export a `stage: pretrain` run to `out`; returns the step. Tied heads stay tied: no `lm_head` tensor."""
    model, config, step = load_trained(run_dir, step)
    require_stage(config, "pretrain", "export.to_sglang")
    with exported(run_dir, out, model, model_config(run_dir)):
        pass
    return step


def main() -> None:
    arguments = parse_arguments("export.to_hf", __doc__)
    step = to_hf(arguments.run, arguments.out, arguments.step)
    print(f"step {step} of {arguments.run} -> {arguments.out}")


if __name__ == "__main__":
    run(main)
