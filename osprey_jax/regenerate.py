"""The target writes the assistant's turns of conversations, so that a drafter learns from the target's own text.

python -m osprey_jax.regenerate --config X.yaml [key=value ...]

Every user turn is answered in order, each answer being part of the next prompt; the turns that the assistant had are
dropped. A record of the output is the input's with other `conversations`, and
- `finish_reasons`: one for each assistant turn, `stop`, or `length` where `max_new_tokens` or the context cut it;
- `unanswered`: user turns left out at the end because they no longer fit the context, where there are any.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from tqdm import tqdm

from osprey_jax.command import UserError, run
from osprey_jax.config import RegenerateConfig, parse_arguments
from osprey_jax.data.conversations import Record, Rejection, asking_messages, read_records, write_rejections
from osprey_jax.data.records import find_files, read_json_lines
from osprey_jax.data.spans import RecordRefused
from osprey_jax.decoding.generate import Sampling, generate
from osprey_jax.decoding.requests import Request, by_length
from osprey_jax.decoding.target import Target, open_target
from osprey_jax.files import fingerprint, write_text


@dataclasses.dataclass
class Dialogue:
    """A record being answered. `number`: the same in every run and order, for the random numbers."""

    index: int  # in the input
    number: int
    turns: list[list[dict]]  # each ends with a user turn; a system turn may precede it
    first_prompt: list[int]
    messages: list[dict] = dataclasses.field(default_factory=list)
    finish_reasons: list[str] = dataclasses.field(default_factory=list)

    @property
    def answered(self) -> int:
        return len(self.finish_reasons)


def regenerate(config: RegenerateConfig) -> None:
    """Write `config.output`; progress is kept in `<output>.partial`, from which a second run goes on.

    Raises:
      UserError: unusable input, or a partial output made with other settings.
    """
    if config.output.exists():
        raise UserError(f"{config.output}: already exists; choose another output or remove it first")
    target = open_target(config.target, config.template_options)
    files = find_files(config.input)
    dialogues, rejections = _read(config, target)
    # A batch's size and place on the disk change nothing but rounding.
    settings = config.model_dump(mode="json", exclude={"target", "input", "output", "batch_size"})
    settings |= {"target": fingerprint(config.target), "input": fingerprint(*files)}
    config.output.parent.mkdir(parents=True, exist_ok=True)
    partial = config.output.with_name(config.output.name + ".partial")
    done = _resume(partial, settings)
    _answer(config, target, dialogues, partial, set(done))

    done, reasons = _resume(partial, settings), collections.Counter()
    raw = dict(enumerate(value for file in files for _, value in read_json_lines(file)))
    lines = []
    for index, written in sorted(done.items()):
        reasons.update(written["finish_reasons"])
        kept = {key: value for key, value in raw[index].items() if key != "unanswered"}  # of an earlier regeneration
        lines.append(_line(kept | written))
    if rejections:
        write_rejections(config.output.with_name(config.output.name + ".rejected"), rejections)
    write_text(config.output, "".join(lines))
    partial.unlink()
    counts = ", ".join(f"{reason}: {count}" for reason, count in sorted(reasons.items()))
    print(f"{config.output}: {len(lines)} conversations, {reasons.total()} assistant turns ({counts})")
    for reason, count in collections.Counter(rejection.reason for rejection in rejections).items():
        print(f"{config.output}.rejected: {count} records: {reason}")


def _read(config: RegenerateConfig, target: Target) -> tuple[list[Dialogue], list[Rejection]]:
    dialogues, rejections = [], []
    records = tqdm(read_records(config.input), desc="read", unit=" records", disable=None)
    for index, record in enumerate(records):
        made = record if isinstance(record, Rejection) else _dialogue(index, record, config, target)
        (rejections if isinstance(made, Rejection) else dialogues).append(made)
    if not dialogues:
        reasons = ", ".join(sorted({rejection.reason for rejection in rejections})) or "the files are empty"
        raise UserError(f"{', '.join(config.input)}: no usable conversation ({reasons})")
    return dialogues, rejections


def _dialogue(index: int, record: Record, config: RegenerateConfig, target: Target) -> Dialogue | Rejection:
    turns: list[list[dict]] = [[]]
    for message in asking_messages(record.messages):
        turns[-1].append(message)
        if message["role"] == "user":
            turns.append([])
    if len(turns) == 1:
        return Rejection(record.where, record.id, "no user turn")
    try:
        prompt = target.prompt_ids(turns[0])
    except RecordRefused as error:
        return Rejection(record.where, record.id, f"refused by the chat template: {error}")
    if target.limit(prompt, config.max_new_tokens) is None:
        return Rejection(record.where, record.id, "the prompt exceeds the target's context")
    number = int.from_bytes(hashlib.sha256(record.id.encode()).digest()[:4])
    return Dialogue(index, number, turns[:-1], prompt)


def _answer(config: RegenerateConfig, target: Target, dialogues: list[Dialogue], partial: Path, done: set[int]) -> None:
    """Append what is missing to `partial`, group by group; the groups are the same in every run."""
    dialogues = sorted(dialogues, key=lambda dialogue: len(dialogue.turns))
    groups = by_length([len(dialogue.first_prompt) for dialogue in dialogues], config.batch_size)
    groups = [[dialogues[i] for i in group] for group in groups]
    groups = [group for group in groups if not {dialogue.index for dialogue in group} <= done]
    if not groups:
        return
    dtype = jnp.dtype(config.compute_dtype)
    model = target.load(dtype)
    sampling = Sampling(config.temperature, config.top_p, config.seed)
    tokens, start = 0, time.monotonic()
    bar = tqdm(total=len(dialogues), initial=len(done), desc="answer", unit=" conversations", disable=None)
    with partial.open("a", encoding="utf-8") as stream, bar:
        for group in groups:
            for turn in range(max(len(dialogue.turns) for dialogue in group)):
                asked = _ask(group, turn, config, target)
                if not asked:
                    break
                requests = [request for _, request in asked]
                completions = generate(
                    model, requests, stop_ids=target.stop_ids, sampling=sampling, rows=config.batch_size, dtype=dtype
                )
                for (dialogue, _), completion in zip(asked, completions, strict=True):
                    content = target.text(completion.token_ids)
                    dialogue.messages.append({"role": "assistant", "content": content})
                    dialogue.finish_reasons.append(completion.finish_reason)
                    tokens += len(completion.token_ids)
                bar.set_postfix_str(f"{tokens / (time.monotonic() - start):.0f} tokens/s", refresh=False)
            missing = [dialogue for dialogue in group if dialogue.index not in done]
            stream.write("".join(_line(_written(dialogue)) for dialogue in missing))
            stream.flush()
            os.fsync(stream.fileno())
            bar.update(len(missing))


def _ask(group: list[Dialogue], turn: int, config: RegenerateConfig, target: Target) -> list[tuple[Dialogue, Request]]:
    """The dialogues that go on with their turn number `turn`, their user turn added, and what the target is asked."""
    asked = []
    for dialogue in group:
        if dialogue.answered < turn or turn >= len(dialogue.turns):
            continue
        messages = dialogue.messages + dialogue.turns[turn]
        with contextlib.suppress(RecordRefused):  # by a later turn: the conversation ends before it
            prompt = dialogue.first_prompt if turn == 0 else target.prompt_ids(messages)
            limit = target.limit(prompt, config.max_new_tokens)
            if limit is not None:
                dialogue.messages = messages
                asked.append((dialogue, Request(prompt, limit, dialogue.number, turn)))
    return asked


def _written(dialogue: Dialogue) -> dict[str, Any]:
    unanswered = len(dialogue.turns) - dialogue.answered
    return {
        "index": dialogue.index,
        "record": {"conversations": dialogue.messages, "finish_reasons": dialogue.finish_reasons}
        | ({"unanswered": unanswered} if unanswered else {}),
    }


def _line(value: dict) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def _resume(partial: Path, settings: dict[str, Any]) -> dict[int, dict]:
    """What `partial` already holds by index in the input; a last line cut off by a kill is removed from the file."""
    if not partial.exists():
        write_text(partial, _line({"settings": settings}))
    whole, newline, _ = partial.read_bytes().rpartition(b"\n")
    try:
        header, *lines = [json.loads(line) for line in whole.decode("utf-8").split("\n")]
        before, done = header["settings"], {line["index"]: line["record"] for line in lines}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{partial}: not a partial output of this command; remove it to start again") from error
    changed = sorted(key for key in before.keys() | settings.keys() if before.get(key) != settings.get(key))
    if changed:
        raise UserError(
            f"{partial}: was made with another {', '.join(changed)}; restore that to go on, or remove the file to "
            "start again"
        )
    os.truncate(partial, len(whole) + len(newline))
    return done


def main() -> None:
    config = parse_arguments("osprey_jax.regenerate", __doc__.splitlines()[0], RegenerateConfig)
    regenerate(config)


if __name__ == "__main__":
    run(main)
