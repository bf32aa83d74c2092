"""Whether an exported drafter does, when served, what was trained: its files alone, replayed as SGLang would.

python -m export.check --export DIR --target DIR [--records FILE]

Compares with the trainer's own forward pass on held-out records, kept in the export (`check.npz`). With --records, or
for a drafter without that file, the comparison is with this project's drafter read from the same files, on the
conversations of FILE. Where the two disagree, each known fault is tried: the one without which they agree is named.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np

from export.comparison import Agreement, Comparison, Replayed
from export.exported import Exported, Rope, read_exported, read_rope
from export.faults import changed_tensors, meaning_faults, structure_faults
from export.reference import FILE, Reference, trainer_forward
from export.replay import Serving
from export.rows import STEPS, batch_of, rows_of_records
from export.target_pass import TargetPass, run_target
from osprey_jax.command import ArgumentParser, UserError, run
from osprey_jax.files import fingerprint, read_json, require_directory
from osprey_jax.models import hf, hf_config
from osprey_jax.models.drafter import DrafterConfig, default_tap_layers
from osprey_jax.models.transformer import TransformerConfig
from osprey_jax.reports.tables import console_table


@dataclasses.dataclass(frozen=True)
class Repair:
    """A fault, and how the files would be served without it."""

    fault: str
    serving: Serving
    certain: bool = False  # a fault whatever the numbers say: the files contradict what was trained


def trained_facts(config: DrafterConfig, target: Path) -> dict[str, Any]:
    """What a reference keeps of a run's drafter beside its tensors and logits, as JSON."""
    scaling = config.transformer.rope_scaling
    return {
        "tap_layers": list(config.tap_layers),
        "swap_h_and_emb": config.swap_h_and_emb,
        "rope_theta": config.transformer.rope_theta,
        "rope_scaling": None if scaling is None else {name: float(value) for name, value in vars(scaling).items()},
        "target": fingerprint(target),
    }


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
      passed: what `run_target` gave for the reference's rows and all blocks `near` its taps; None: it is run here.
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
    repairs = _repairs(exported, serving, target, read_rope(read_json(target_dir / "config.json")), reference)
    if reference is not None and (changed := changed_tensors(exported, reference)):
        embedding = any(fault.startswith("embedding equal") for fault in faults)
        if changed := [tensor for tensor in changed if not (embedding and tensor == "embed_tokens.weight")]:
            faults.append(f"not the tensors that were trained: {', '.join(changed[:3])} ({len(changed)} in all)")
    sizes = (exported.target_hidden_size, exported.vocab_size) == (target.hidden_size, target.vocab_size)
    if not sizes or not _within(serving.tap_layers, target.num_layers):
        _refuse(name, [repair.fault for repair in repairs if repair.certain] + faults)

    if reference is None:
        rows, drafter = rows_of_records(records, target_dir, STEPS), hf.load_drafter(directory)
    else:
        rows = reference.rows
    if passed is None:
        sets = [serving.tap_layers, *(repair.serving.tap_layers for repair in repairs)]
        passed = run_target(target_dir, batch_of(rows), set().union(*sets))
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
        faults += _explained(comparison, agreement, repairs)
        if reference is not None and reference.facts["target"] != fingerprint(target_dir):
            faults.append(f"{target_dir} is not the target that it was exported against")
    if reference is None:
        warnings += _better(comparison, replayed, repairs)
    for warning in warnings:
        print(f"warning: {name}: {warning}", file=sys.stderr)
    _refuse(name, faults)


def as_served(exported: Exported, target: TransformerConfig) -> Serving:
    """What SGLang makes of the files for `target`."""
    return Serving(
        tap_layers=exported.tap_layers or default_tap_layers(target.num_layers),
        rope=exported.rope,
        swap=exported.swap_h_and_emb,
        target_embedding=not exported.swap_h_and_emb and exported.hidden_size == exported.target_hidden_size,
    )


def near(taps: tuple[int, ...], num_layers: int) -> list[tuple[int, ...]]:
    """`taps` and those one block off, as far as the target has them."""
    shifted = [tuple(i + off for i in taps) for off in (0, -1, 1)]
    return [layers for layers in shifted if _within(layers, num_layers)]


def _within(taps: tuple[int, ...], num_layers: int) -> bool:
    return len(taps) == 3 and all(0 <= i < num_layers for i in taps)


def _repairs(
    exported: Exported, serving: Serving, target: TransformerConfig, target_rope: Rope, reference: Reference | None
) -> list[Repair]:
    """Each known fault that only numbers show, one at a time; first those that contradict the reference."""

    def changed(**changes) -> Serving:
        return dataclasses.replace(serving, **changes)

    other_swap = changed(
        swap=not serving.swap,
        target_embedding=serving.swap and exported.hidden_size == exported.target_hidden_size,
    )
    swap_fault = f"streams swapped: swap_h_and_emb is {_json(serving.swap)}, trained was {_json(not serving.swap)}"
    taps_now = f"eagle_aux_hidden_state_layer_ids are {list(serving.tap_layers)}"
    certain, guesses = [], []
    if reference is not None:
        facts = reference.facts
        taps, rope = tuple(facts["tap_layers"]), Rope(facts["rope_theta"], facts["rope_scaling"])
        if taps != serving.tap_layers:
            off = {a - b for a, b in zip(serving.tap_layers, taps, strict=True)}
            how = "off by one" if off in ({1}, {-1}) else "wrong"
            certain.append((f"tap ids {how}: {taps_now}, trained were {list(taps)}", changed(tap_layers=taps)))
        if rope != serving.rope:
            how = "scaling lost" if serving.rope.scaling is None and rope.scaling is not None else "changed"
            fault = f"RoPE {how}: config.json says {serving.rope}, trained was {rope}"
            certain.append((fault, changed(rope=rope)))
        if facts["swap_h_and_emb"] != serving.swap:
            certain.append((swap_fault, other_swap))
    elif target_rope != serving.rope:
        fault = f"RoPE: config.json says {serving.rope}, the target has {target_rope}"
        guesses.append((fault, changed(rope=target_rope)))
    for layers in near(serving.tap_layers, target.num_layers)[1:]:
        guesses.append((f"tap ids off by one: {taps_now}, trained were {list(layers)}", changed(tap_layers=layers)))
    fault = "stream normed: training handed on the stream after the final norm, servers hand it on before"
    guesses += [(fault, changed(normed_stream=True)), (swap_fault, other_swap)]
    if exported.hidden_size == exported.target_hidden_size and "embed_tokens.weight" in exported.tensors:
        other = not serving.target_embedding
        fault = f"embedding: trained was {'the target' if other else 'embed_tokens.weight'}'s, served is the other"
        guesses.append((fault, changed(target_embedding=other)))
    served = [repair for _, repair in certain]
    return [Repair(*item, certain=True) for item in certain] + [
        Repair(*item) for item in guesses if item[1] not in served
    ]


def _explained(comparison: Comparison, agreement: Agreement, repairs: list[Repair]) -> list[str]:
    """Why replay and trainer differ: the repair under which they do not, else by how much."""
    healed = next((r for r in repairs if comparison.agreement(comparison.replay(r.serving)).holds), None)
    others = [repair.fault for repair in repairs if repair.certain and repair is not healed]
    if healed is not None:
        return [f"{healed.fault} (so repaired, the replay agrees with what was trained)", *others]
    wrong_K = (agreement.share_K < 1) | (agreement.relative_K > agreement.tolerance_K)
    step = int(np.argmax(wrong_K))
    return [
        *others,
        f"the replay differs from what was trained and no single known repair mends it: at step {step}, top-1 "
        f"agreement {agreement.share_K[step]:.1%}, largest logit difference {agreement.difference_K[step]:.3g}",
    ]


def _better(comparison: Comparison, replayed: Replayed, repairs: list[Repair]) -> list[str]:
    """Without the trainer's word: repairs with which the target's choices are drafted clearly more often."""
    now, warnings = comparison.right(replayed).mean(), []
    margin = max(0.03, 3 * (0.5 / replayed.best_KxP.shape[1]) ** 0.5)
    for repair in repairs:
        then = comparison.right(comparison.replay(repair.serving)).mean()
        if then > now + margin:
            warnings.append(f"{repair.fault}? so served, {then:.1%} of drafts are the target's choices, not {now:.1%}")
    return warnings


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
        f"accepted length {np.mean(lengths):.2f}, simulated on {len(lengths)} turns of {len(comparison.rows)} records "
        "(their text taken for the target's choices: so it is where the target wrote it greedily)",
        flush=True,
    )


def _refuse(name: Path, faults: list[str]) -> None:
    if faults:
        raise UserError(f"{name}: {'; '.join(dict.fromkeys(faults))}")


def _json(value: bool) -> str:
    return "true" if value else "false"


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
