"""Write the drafter of a distillation run in the released layout, for SGLang."""

import sys
from pathlib import Path

import numpy as np

from export.check import check
from export.faults import LAYOUT
from export.reference import Reference, digests, trained_facts, trainer_forward
from export.repairs import near
from export.rows import STEPS, batch_of, rows_of_run
from export.run_directory import Trained, load_trained, run_parser, write_model
from export.target_pass import run_target
from osprey_jax.command import UserError, run
from osprey_jax.config import TrainConfig, load_config
from osprey_jax.files import fingerprint, new_directory
from osprey_jax.models import hf, hf_config
from osprey_jax.models.drafter import DrafterConfig


def to_sglang(
    run_dir: Path,
    out: Path,
    step: int | None = None,
    *,
    target: Path | None = None,
    records: Path | None = None,
    checked: bool = True,
) -> int:
    """Export a `stage: distill` run to `out`; returns the step. What is on disk is read back, compared and replayed.

    Args:
      target: where the run's target is now; None: where its config says.
      records: held-out conversations to replay; None: those of the run's config.
      checked: False leaves the replay out, and what it needs, `check.npz`.
    """
    with new_directory(out) as directory:
        trained = load_trained(run_dir, step, "distill")
        model = trained.model
        write_model(run_dir, directory, model, sglang_config(trained.config, model.config))
        written, wanted = hf.model_tensors(hf.load_drafter(directory)), hf.model_tensors(model)
        for name, value in wanted.items():
            if not np.array_equal(written[name], value):
                raise UserError(f"{out}: {name} does not read back as it was written; is the disk sound?")
        if checked:
            _check(run_dir, trained, directory, out, target, records)
    return trained.step


def _check(run_dir: Path, trained: Trained, directory: Path, out: Path, target: Path | None, records: Path | None):
    """Write what the run's own forward pass says into `directory`, and replay the files beside it."""
    config, model = load_config(run_dir / "config.yaml", [], TrainConfig), trained.model
    target = target or config.target
    if not target.is_dir():
        raise UserError(f"{target}: no such directory (the run's target); give --target, or --skip-check")
    target_config = hf_config.transformer_config(target)
    hf_config.check_fits_target(model.config, target_config, str(run_dir))
    if fingerprint(target) != trained.facts["target"]:
        print(f"warning: {target}: not the files that the run was trained against", file=sys.stderr)
    steps = max(STEPS, config.ttt.length)
    try:
        rows, name = rows_of_run(config, target, steps, records)
    except UserError as error:
        raise UserError(f"{error}; give --records a file of conversations, or --skip-check") from error
    print(f"checking on {len(rows)} records of {name}", flush=True)
    taps = model.config.tap_layers
    passed = run_target(target, batch_of(rows), set().union(*near(taps, target_config.num_layers)))
    seen = trainer_forward(model, rows, passed.taps(taps), steps)
    Reference(rows, seen, trained_facts(model.config, trained.facts["target"]), digests(model)).save(directory)
    check(directory, target, passed=passed, name=out)


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
        "osprey_layout": LAYOUT,
    }


def main() -> None:
    parser = run_parser("export.to_sglang", __doc__)
    parser.add_argument("--target", type=Path, metavar="DIR", help="the target's checkpoint, where it is moved")
    parser.add_argument("--records", type=Path, metavar="FILE", help="conversations (JSONL) for the check")
    parser.add_argument("--skip-check", action="store_true", help="do not replay the exported files")
    arguments = parser.parse_args()
    if arguments.skip_check and (arguments.target or arguments.records):
        raise UserError("--target and --records are for the check, which --skip-check leaves out")
    if arguments.skip_check:
        print("warning: --skip-check: nobody knows whether these files do what was trained", file=sys.stderr)
    step = to_sglang(
        arguments.run,
        arguments.out,
        arguments.step,
        target=arguments.target,
        records=arguments.records,
        checked=not arguments.skip_check,
    )
    print(f"step {step} of {arguments.run} -> {arguments.out}")


if __name__ == "__main__":
    run(main)
