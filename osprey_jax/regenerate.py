"""The target writes the assistant's turns of conversations, so that a drafter learns from the target's own text.

python -m osprey_jax.regenerate --config X.yaml [key=value ...]

Every user turn is answered in order, each answer being part of the next prompt; the turns that the assistant and its
tools had are dropped. The target answers in this process, or `servers` do. A record of the output is the input's with
other `conversations`, whose assistant turns have the target's thinking apart (`reasoning_content`), and
- `finish_reasons`: one for each assistant turn, `stop`, or `length` where `max_new_tokens` or the context cut it;
- `unanswered`: user turns left out at the end because they could not be asked (too long ...), where there are any.

What is finished is kept in `<output>.partial` under the record's id and what is asked, so that a second run goes on
after any end of the first, also with an input that has other records too, or another order. `<output>.rejected` lists
what is not in the output, or not all of it, and why.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from osprey_jax.command import UserError, run
from osprey_jax.config import RegenerateConfig, parse_arguments
from osprey_jax.data.conversations import parse_record, write_rejections
from osprey_jax.data.records import Rejection, find_files, kind_of, read_json_lines
from osprey_jax.decoding.dialogues import Dialogue, make_dialogue
from osprey_jax.decoding.journal import Journal
from osprey_jax.decoding.sink import Sink
from osprey_jax.files import alone, new_file

# Of the input's fields: other names of the turns, what goes with the turns that are dropped, an earlier regeneration's.
_DROPPED = {"messages", "conversation", "tools", "functions", "unanswered"}


def regenerate(config: RegenerateConfig) -> None:
    """Write `config.output`.

    Raises:
      UserError: unusable input, a partial output made with other settings, conversations that failed for a reason that
        may pass (what is answered is kept), no server for too long.
    """
    config.output.parent.mkdir(parents=True, exist_ok=True)
    with alone(config.output, config.output.with_name(f".{config.output.name}.lock")):
        if config.output.exists():
            raise UserError(f"{config.output}: already exists; choose another output or remove it first")
        find_files(config.input)
        if config.servers:
            from osprey_jax.decoding.servers import Source
        else:
            from osprey_jax.decoding.in_process import Source  # and JAX, which takes seconds
        source = Source(config)
        given = ("max_new_tokens", "temperature", "top_p", "seed", "template_options")
        settings = config.model_dump(mode="json", include=set(given)) | source.facts
        journal = Journal(_beside(config.output, "partial"), settings)
        failed_before = frozenset(journal.failed)
        dialogues, total = _unanswered(config, journal)
        if dialogues:
            with Sink(journal, total - len(dialogues), total) as sink:
                source.answer(dialogues, sink)
        _finish(config, journal, sum(not journal.read(key)["for_good"] for key in journal.failed - failed_before))


def _read(config: RegenerateConfig, description: str) -> Iterator[tuple[str, Any, Dialogue | Rejection]]:
    """Each line of the input: where, as it stands there, and what is to be asked."""
    seen: Counter[str] = Counter()
    for path in find_files(config.input):
        kind_of(path)
        for where, value in tqdm(read_json_lines(path), desc=f"{description} {path}", unit=" records", disable=None):
            record = parse_record(where, value)
            yield where, value, record if isinstance(record, Rejection) else make_dialogue(record, seen)


def _unanswered(config: RegenerateConfig, journal: Journal) -> tuple[list[Dialogue], int]:
    """What is still to be asked, and how many there are in all."""
    dialogues, total, reasons = [], 0, Counter()
    for _, _, made in _read(config, "read"):
        if isinstance(made, Rejection):
            reasons[made.reason] += 1
            continue
        total += 1
        if made.key not in journal or made.key in journal.failed:
            dialogues.append(made)
    if not total:
        counts = ", ".join(f"{reason}: {count}" for reason, count in reasons.items()) or "the files are empty"
        raise UserError(f"{', '.join(config.input)}: no usable conversation ({counts})")
    return dialogues, total


def _finish(config: RegenerateConfig, journal: Journal, passing: int) -> None:
    """The input with its answers, in its order; then the journal goes. `passing`: failures worth another try."""
    rejected = _beside(config.output, "rejected")
    rejections: list[Rejection] = []
    finish_reasons: Counter[str] = Counter()
    records = 0
    with new_file(config.output) as output:
        for record, rejection in _results(config, journal):
            if record is not None:
                output.write(json.dumps(record, ensure_ascii=False) + "\n")
                finish_reasons.update(record["finish_reasons"])
                records += 1
            if rejection is not None:
                rejections.append(rejection)
        rejected.unlink(missing_ok=True)
        if rejections:
            write_rejections(rejected, rejections)
        if passing:
            raise UserError(
                f"{passing} conversations failed for reasons that may pass, listed in {rejected}; all others are kept. "
                "Run the same command again: it asks these once more and goes without those that fail again"
            )
        if not records:
            raise UserError(f"{config.output}: no conversation was answered; the reasons are in {rejected}")
    journal.path.unlink()
    counts = ", ".join(f"{reason}: {count}" for reason, count in sorted(finish_reasons.items()))
    print(f"{config.output}: {records} conversations, {finish_reasons.total()} assistant turns ({counts})")
    for reason, count in Counter(rejection.reason for rejection in rejections).items():
        print(f"{rejected}: {count} records: {reason}")


def _results(config: RegenerateConfig, journal: Journal) -> Iterator[tuple[dict | None, Rejection | None]]:
    """What each line of the input becomes, and why it is not used, or not all of it."""
    for where, value, made in _read(config, "write"):
        if isinstance(made, Rejection):
            yield None, made
            continue
        entry = journal.read(made.key)
        if entry is None:
            raise UserError(f"{where}: the input changed while it was being answered; run the command again")
        reason = entry.get("failed", entry.get("left_out"))
        rejection = None if reason is None else Rejection(where, made.id, reason)
        if "record" not in entry:
            yield None, rejection
            continue
        kept = {name: field for name, field in value.items() if name not in _DROPPED}
        # Python reads NaN and Infinity, which JSON does not have.
        kept = json.loads(json.dumps(kept), parse_constant=lambda name: None)
        yield kept | entry["record"], rejection


def _beside(output: Path, ending: str) -> Path:
    return output.with_name(f"{output.name}.{ending}")


def main() -> None:
    config = parse_arguments("osprey_jax.regenerate", __doc__, RegenerateConfig)
    regenerate(config)


if __name__ == "__main__":
    run(main)
