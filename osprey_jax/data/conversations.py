"""Conversations for distillation: records to messages, to tokens, to rows, with a reason for each one not used."""

import collections
import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import tqdm
import transformers

from osprey_jax.command import UserError
from osprey_jax.data.records import find_files, read_json_lines
from osprey_jax.data.rows import FIELDS, Rows
from osprey_jax.data.spans import ChatTemplate, RecordRefused
from osprey_jax.files import write_text

_ROLES = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "human": "user",
    "gpt": "assistant",
}
_MESSAGE_FIELDS = ("reasoning_content", "tool_calls", "tool_call_id", "name")  # passed to the template as they are
_BATCH = 256  # conversations tokenized at one time, on all cores


@dataclasses.dataclass(frozen=True)
class Record:
    """A conversation; `where` is "file:line".

    A message has `role` (system, user, assistant, tool), `content` (text), and `_MESSAGE_FIELDS` where they were given.
    Of the assistant's turns, `unfinished` are those that a limit cut, by `regenerate`'s `finish_reasons`.
    """

    where: str
    id: str
    messages: list[dict[str, Any]]
    unfinished: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Rejection:
    """A line that is not used, or not all of it, and why."""

    where: str
    id: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of the records, and the tokens of those used."""

    read: int
    used: int
    cut: int  # used, but longer than a row
    dropped: dict[str, int]  # reason -> records
    tokens: int
    supervised: int

    def __str__(self) -> str:
        dropped = "".join(f", {count} dropped: {reason}" for reason, count in self.dropped.items())
        return f"{self.read} records read, {self.used} used, {self.cut} of them cut{dropped}"


# ---- records


def read_records(patterns: list[str]) -> Iterator[Record | Rejection]:
    """The conversations in JSONL files (`.gz` too) or globs, in order; a line that holds none is a `Rejection`.

    A record is `{"id" or "uuid", "conversations" or "messages": [{"role", "content", ...}], ...}`, or has ShareGPT's
    `from` and `value`.
    Reasons: malformed JSON; not a conversation; unknown role; assistant first.

    Raises:
      UserError: a pattern that matches nothing, a file that cannot be read.
    """
    for path in find_files(patterns):
        for where, value in read_json_lines(path):
            if isinstance(value, ValueError):
                yield Rejection(where, where, "malformed JSON")
                continue
            name = where
            if isinstance(value, dict):
                name = next((str(value[key]) for key in ("id", "uuid") if value.get(key) not in (None, "")), where)
            try:
                yield Record(where, name, _messages(value), _unfinished(value))
            except _Unusable as reason:
                yield Rejection(where, name, str(reason))


def prompt_messages(messages: list[dict]) -> list[dict]:
    """The turns before the first assistant turn: what an evaluation asks."""
    roles = [message["role"] for message in messages]
    return messages[: roles.index("assistant")] if "assistant" in roles else messages


def asking_messages(messages: list[dict]) -> list[dict]:
    """The system and user turns in order: what is kept when the assistant's are written anew."""
    return [message for message in messages if message["role"] in ("system", "user")]


class _Unusable(Exception):
    """Why a line is no conversation."""


def _messages(record: Any) -> list[dict]:
    turns = record.get("conversations", record.get("messages")) if isinstance(record, dict) else None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise _Unusable("not a conversation")
    messages = [_message(turn) for turn in turns]
    messages = [message for message in messages if message["role"] != "system" or message["content"].strip()]
    if next((message["role"] for message in messages if message["role"] != "system"), None) == "assistant":
        raise _Unusable("assistant first")
    return messages


def _unfinished(record: dict) -> frozenset[int]:
    reasons = record.get("finish_reasons")
    return frozenset(i for i, reason in enumerate(reasons if isinstance(reasons, list) else []) if reason == "length")


def _message(turn: dict) -> dict:
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str):
        raise _Unusable("not a conversation")
    if role not in _ROLES:
        raise _Unusable("unknown role")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    elif content is None and turn.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise _Unusable("not a conversation")
    return {"role": _ROLES[role], "content": content} | {key: turn[key] for key in _MESSAGE_FIELDS if turn.get(key)}


# ---- tokens


def conversation_rows(
    patterns: list[str],
    tokenizer: transformers.PreTrainedTokenizerBase,
    length: int,
    template_options: dict[str, Any] | None = None,
) -> tuple[Rows, list[Rejection], Report]:
    """All usable conversations, one a row, cut or right-padded to `length`; what was dropped or cut; the counts.

    Reasons beside those of `read_records`: no assistant turn; refused by the chat template; nothing supervised within
    the length.

    Raises:
      UserError: as `read_records` and `ChatTemplate`; no usable record.
    """
    template, encoder = ChatTemplate(tokenizer, template_options), _encoder(tokenizer)
    ids: list[str] = []
    token_ids: list[np.ndarray] = []
    loss_masks: list[np.ndarray] = []
    rejections: list[Rejection] = []
    cut: list[Rejection] = []
    read = 0
    records = tqdm.tqdm(read_records(patterns), desc="tokenize", unit=" conversations", disable=None)
    stream = (_locate(template, record) for record in records)
    while batch := list(itertools.islice(stream, _BATCH)):
        read += len(batch)
        texts = [item.text for item in batch if isinstance(item, _Located)]
        encodings = iter(encoder.encode_batch(texts, add_special_tokens=False))
        for item in batch:
            if isinstance(item, Rejection):
                rejections.append(item)
                continue
            encoding = next(encodings)
            tokens, mask = _masked(encoding, item.spans, length)
            if not mask.any():
                rejections.append(Rejection(item.where, item.id, "nothing supervised within the length"))
                continue
            if len(encoding) > length:
                cut.append(Rejection(item.where, item.id, f"cut at {length} of {len(encoding)} tokens"))
            ids.append(item.id)
            token_ids.append(tokens)
            loss_masks.append(mask)

    dropped = dict(collections.Counter(rejection.reason for rejection in rejections))
    if not ids:
        counts = ", ".join(f"{reason}: {count}" for reason, count in dropped.items()) or "the files are empty"
        raise UserError(f"{', '.join(patterns)}: no usable conversation among {read} records ({counts})")
    tokens, supervised = sum(map(len, token_ids)), int(sum(mask.sum() for mask in loss_masks))
    report = Report(read, len(ids), len(cut), dropped, tokens, supervised)
    return _pad(ids, token_ids, loss_masks, length), rejections + cut, report


def write_rejections(path: Path, rejections: list[Rejection]) -> None:
    """`rejections` as JSONL with `where`, `id` and `reason`, in one step."""
    write_text(path, "".join(json.dumps(dataclasses.asdict(line), ensure_ascii=False) + "\n" for line in rejections))


@dataclasses.dataclass(frozen=True)
class _Located:
    where: str
    id: str
    text: str
    spans: list[tuple[int, int]]


def _locate(template: ChatTemplate, record: Record | Rejection) -> _Located | Rejection:
    if isinstance(record, Rejection):
        return record
    if not any(message["role"] == "assistant" for message in record.messages):
        return Rejection(record.where, record.id, "no assistant turn")
    try:
        return _Located(record.where, record.id, *template.assistant_spans(record.messages, record.unfinished))
    except RecordRefused as error:
        return Rejection(record.where, record.id, f"refused by the chat template: {error}")
    except UserError as error:
        raise UserError(f"{record.where}: {error}") from error


def _encoder(tokenizer: transformers.PreTrainedTokenizerBase) -> tokenizers.Tokenizer:
    """The tokenizer with exact offsets: a byte-level post-processor may trim the spaces off a token's offsets."""
    if not tokenizer.is_fast:
        raise UserError(f"{tokenizer.name_or_path}: the tokenizer gives no offsets; it needs a tokenizer.json")
    encoder = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    encoder.post_processor = None
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def _masked(encoding: tokenizers.Encoding, spans: list[tuple[int, int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)[:length]
    first, last = offsets[:, 0], offsets[:, 1]
    mask = np.zeros(len(offsets), np.int32)
    for start, end in spans:
        inside = (first >= start) & (last <= end)
        # Without characters (a prefix that the tokenizer inserts) a token at an edge belongs to what lies outside.
        empty_at_edge = (first == last) & ((first == start) | (last == end))
        mask |= inside & ~empty_at_edge
    return np.array(encoding.ids[:length], np.int32), mask


def _pad(ids: list[str], token_ids: list[np.ndarray], loss_masks: list[np.ndarray], length: int) -> Rows:
    arrays = {name: np.zeros((len(ids), length), np.int32) for name in FIELDS}
    for row, (tokens, mask) in enumerate(zip(token_ids, loss_masks, strict=True)):
        count = len(tokens)
        arrays["token_ids"][row, :count] = tokens
        arrays["loss_mask"][row, :count] = mask
        arrays["segment_ids"][row, :count] = 1
        arrays["positions"][row, :count] = np.arange(count)
    return Rows(arrays, ids)
