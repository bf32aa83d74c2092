"""Whether an exported drafter does, when served, what was trained: its files alone, replayed as SGLang would.

python -m export.check --export DIR --target DIR [--records FILE]

Compares with the trainer's own forward pass on held-out records, kept in the export (`check.npz`). With --records, or
for a drafter without that file, the comparison is with this project's drafter read from the same files, on the
conversations of FILE. Where the two disagree, each known fault is tried: the one without which they agree is named.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from export.comparison import Agreement, Comparison, Replayed
from export.exported import read_exported, read_rope
from export.faults import changed_tensors, meaning_faults, structure_faults
from export.reference import FILE, Reference, trainer_forward
from export.repairs import as_served, better, explained, find_repairs, within
from export.rows import STEPS, batch_of, rows_of_records
from export.target_pass import TargetPass, run_target
from osprey_jax.command import ArgumentParser, UserError, run
from osprey_jax.files import fingerprint, read_json, require_directory
from osprey_jax.models import hf, hf_config
from osprey_jax.reports.tables import console_table


def check(
    directory: Path,
    target_dir: Path,
    *,
    records: Path | None = None,
    passed: TargetPass | None = None,
    name: Path | None = None,
) -> None:
    """Print how the export at `directory` compares.

    Args:
      passed: what `run_target` gave for the reference's rows, to spare another run where it has the blocks.
      name: what messages call the directory.

    Raises:
      UserError: something is wrong with the export, all of it in one line; or there is nothing to compare with.
    """
    name = name or directory
    target = hf_config.transformer_config(target_dir)
    exported = read_exported(directory)
    _refuse(name, structure_faults(exported))
    reference = None
    if records is None:
        if not (directory / FILE).is_file():
            raise UserError(f"{name}: holds no {FILE} to compare with; give --records a file of conversations")
        reference = Reference.load(directory)
    faults, warnings = meaning_faults(exported, target_dir, target, reference)
    serving = as_served(exported, target)
    repairs = find_repairs(exported, serving, target, read_rope(read_json(target_dir / "config.json")), reference)
    if reference is not None and (changed := changed_tensors(exported, reference)):
        embedding = any(fault.startswith("embedding equal") for fault in faults)
        if changed := [tensor for tensor in changed if not (embedding and tensor == "embed_tokens.weight")]:
            faults.append(f"not the tensors that were trained: {', '.join(changed[:3])} ({len(changed)} in all)")
    sizes = (exported.target_hidden_size, exported.vocab_size) == (target.hidden_size, target.vocab_size)
    if not sizes or not within(serving.tap_layers, target.num_layers):
        _refuse(name, [repair.fault for repair in repairs if repair.certain] + faults)

    if reference is None:
        rows, drafter = rows_of_records(records, target_dir, STEPS), hf.load_drafter(directory)
    else:
        rows = reference.rows
    wanted = set(serving.tap_layers).union(*(repair.serving.tap_layers for repair in repairs))
    if passed is None or not wanted <= passed.states.keys():
        passed = run_target(target_dir, batch_of(rows), wanted)
    if reference is None:
        seen = trainer_forward(drafter, rows, passed.taps(serving.tap_layers), STEPS)
    else:
        seen = reference.seen
    comparison = Comparison(exported, target_dir, rows, passed, seen)
    replayed = comparison.replay(serving)
    agreement = comparison.agreement(replayed)
    _show(comparison, replayed, agreement, "the trainer" if reference else "the drafter as this project reads it")
    if agreement.holds:
        faults += [repair.fault for repair in repairs if repair.certain]
    else:
        faults += explained(comparison, agreement, repairs)
        if reference is not None and reference.facts["target"] != fingerprint(target_dir):
            faults.append(f"{target_dir} is not the target that it was trained against")
    if reference is None:
        warnings += better(comparison, replayed, repairs)
    for warning in warnings:
        print(f"warning: {name}: {warning}", file=sys.stderr)
    _refuse(name, faults)


def _show(comparison: Comparison, replayed: Replayed, agreement: Agreement, other: str) -> None:
    right_K = comparison.right(replayed)
    table = [
        [
            step,
            int(agreement.points_K[step]),
            f"{agreement.share_K[step]:.1%}",
            f"{agreement.difference_K[step]:.2g}",
            f"{right_K[step]:.1%}",
        ]
        for step in range(comparison.steps)
    ]
    print(f"replay of the files beside {other}:")
    print(console_table(["step", "positions", "top-1 agreement", "largest logit difference", "target's choice"], table))
    lengths = comparison.accepted_lengths(replayed)
    print(
        f"accepted length {np.mean(lengths):.2f}, simulated on {len(lengths)} turns of {len(comparison.rows)} records, "
        "whose text stands for the target's choices (right where the target wrote it greedily)",
        flush=True,
    )


def _refuse(name: Path, faults: list[str]) -> None:
    if faults:
        raise UserError(f"{name}: {'; '.join(dict.fromkeys(faults))}")


def main() -> None:
    parser = ArgumentParser(
        prog="python -m export.check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--export", type=Path, required=True, metavar="DIR", help="what export.to_sglang wrote")
    parser.add_argument("--target", type=Path, required=True, metavar="DIR", help="the target's checkpoint")
    parser.add_argument("--records", type=Path, metavar="FILE", help="conversations (JSONL), in place of check.npz")
    arguments = parser.parse_args()
    for path in (arguments.export, arguments.target):
        require_directory(path, "a checkpoint")
    check(arguments.export, arguments.target, records=arguments.records)
    print(f"{arguments.export}: no fault found")


if __name__ == "__main__":
    run(main)
