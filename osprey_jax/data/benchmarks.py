"""Prompts of the public benchmarks, from the files they are published as, and of conversations.

| benchmark | a row is known by | what is asked |
| --- | --- | --- |
| MT-Bench | `turns`: both turns of `question.jsonl` | the turns as they are |
| HumanEval | `task_id`, `prompt`, `entry_point` | to complete the function |
| MATH-500 | `problem`, `solution` | the problem, the answer to be boxed |
| GSM8K, MGSM | `question`, `answer` (MGSM's `.tsv` has no header) | the question |
| Global-MMLU | `question`, `option_a` to `option_d` | the question and its options |
| any | `prompt`, a text | the prompt |

Rows with `conversations` or `messages`, and all others, are conversations (`conversations.parse_record`): the turns
before the first assistant turn are asked.
"""

import csv
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from osprey_jax.command import UserError
from osprey_jax.data.conversations import TURNS, Record, parse_record, prompt_messages
from osprey_jax.data.records import Rejection, read_json_lines
from osprey_jax.files import require_file

_IDS = ("question_id", "task_id", "unique_id", "sample_id")
_OPTIONS = ("option_a", "option_b", "option_c", "option_d")
_COLUMNS = (
    "question",
    "prompt",
    "problem",
    "id",
    *_IDS,
)  # of which a table's first line names one, unless it is MGSM's
_TABLES = {".csv": ",", ".tsv": "\t"}
csv.field_size_limit(2**24)


@dataclasses.dataclass(frozen=True)
class Questions:
    """What is asked, turn by turn: each a list of messages that ends with the user's. `where` is "file:line"."""

    where: str
    id: str
    turns: list[list[dict[str, Any]]]
    tools: list[dict[str, Any]] | None = None


def read_questions(path: Path) -> Iterator[Questions | Rejection]:
    """The rows of a file in order: JSONL (`.gz` too), `.csv`, `.tsv` or `.parquet`.

    Raises:
      UserError: the file cannot be read.
    """
    for where, row in _rows(require_file(path, "a prompt set")):
        yield _questions(where, row)


def _questions(where: str, row: Any) -> Questions | Rejection:
    if isinstance(row, Rejection):
        return row
    benchmark = isinstance(row, dict) and all(row.get(key) is None for key in TURNS)
    if benchmark and (texts := _texts(row)) is not None:
        name = next((str(row[key]) for key in ("id", "uuid", *_IDS) if row.get(key) not in (None, "")), where)
        return Questions(where, name, [[{"role": "user", "content": text}] for text in texts])
    record = parse_record(where, row)
    if isinstance(record, Record):
        messages = prompt_messages(record.messages)
        if not any(message["role"] == "user" for message in messages):
            return Rejection(where, record.id, "no user turn")
        return Questions(where, record.id, [messages], record.tools)
    return record


def _texts(row: dict[str, Any]) -> list[str] | None:
    """The user's turns of a benchmark's row; None where it is no benchmark's."""

    def has(*keys: str) -> bool:
        return all(isinstance(row.get(key), str) and row[key].strip() for key in keys)

    turns = row.get("turns")
    if isinstance(turns, list) and turns and all(isinstance(turn, str) and turn.strip() for turn in turns):
        return turns
    if has("prompt", "entry_point"):
        return [f"Complete this Python function; give all of it.\n\n```python\n{row['prompt'].rstrip()}\n```"]
    if has("problem"):
        return [f"{row['problem']}\n\nReason step by step, and put the final answer in \\boxed{{}}."]
    if has("question", *_OPTIONS):
        options = [f"{letter}. {row[key]}" for letter, key in zip("ABCD", _OPTIONS, strict=True)]
        return ["\n".join([row["question"], "", *options])]
    if has("question"):
        return [row["question"]]
    return [row["prompt"]] if has("prompt") else None


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """("file:line", row) of each row, or why it is none."""
    if path.suffix == ".parquet":
        try:
            for number, row in enumerate(pyarrow.parquet.read_table(path).to_pylist(), start=1):
                yield f"{path}:{number}", row
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{path}: not a readable Parquet file ({error})") from error
    elif path.suffix in _TABLES:
        yield from _table(path)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        yield from read_json_lines(path)
    else:
        raise UserError(f"{path}: prompts are read from .jsonl, .jsonl.gz, .csv, .tsv and .parquet files")


def _table(path: Path) -> Iterator[tuple[str, Any]]:
    tabs = path.suffix == ".tsv"
    # Quotes mean nothing in MGSM's files, and hold together a field in all others.
    options = {"delimiter": _TABLES[path.suffix], "quoting": csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL}
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            lines = csv.reader(stream, strict=True, **options)
            header = first = next(lines, [])
            if tabs and len(first) == 2 and not {*first} & {*_COLUMNS}:
                header = ["question", "answer"]
                yield f"{path}:1", dict(zip(header, first, strict=True))
            for row in lines:
                where = f"{path}:{lines.line_num}"
                if any(row[len(header) :]):  # a separator within a text cuts it
                    reason = f"{len(row)} fields, {len(header)} columns; quote texts that hold a separator"
                    yield where, Rejection(where, where, reason)
                elif row:
                    yield where, dict(zip(header, row, strict=False))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not a readable table ({error})") from error
