"""Write the language model of a pretraining run as a Hugging Face checkpoint."""

from pathlib import Path

from export.run_directory import load_trained, run_parser, write_model
from osprey_jax.command import run
from osprey_jax.files import new_directory


def to_hf(run_dir: Path, out: Path, step: int | None = None) -> int:
    """Export a `stage: pretrain` run to `out`; returns the step. Tied heads stay tied: no `lm_head` tensor."""
    with new_directory(out) as directory:
        model, raw, step, _ = load_trained(run_dir, step, "pretrain")
        write_model(run_dir, directory, model, raw)
    return step


def main() -> None:
    arguments = run_parser("export.to_hf", __doc__).parse_args()
    step = to_hf(arguments.run, arguments.out, arguments.step)
    print(f"step {step} of {arguments.run} -> {arguments.out}")


if __name__ == "__main__":
    run(main)
