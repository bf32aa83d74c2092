"""Conversations as they are found: records of many makes to messages for a chat template, or a reason why not."""

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
from osprey_jax.data.records import Block, Rejection, find_files, kind_of, parse_line, read_blocks, record_name
from osprey_jax.data.rows import FIELDS, Rows
from osprey_jax.data.spans import ChatTemplate, RecordRefused
from osprey_jax.files import write_text

# In lower case. ShareGPT names the product that answered; OpenAI's developer turn is what its models take for a system
# turn; a function_call is an answer whose whole content is the call.
_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "ai", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_response", "tool_response", "observation", "ipython"), "tool"),
}
_TURNS = ("conversations", "messages", "conversation")
_REASONING = ("reasoning_content", "reasoning", "thinking")  # names of one thing; the first is ours
_PASSED = ("tool_call_id", "name")  # to the template as they are
_READ_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Record:
    """A conversation; `where` is "file:line".

    A message has `role` (system, user, assistant, tool), `content` (text), and where they were given
    `reasoning_content` (text), `tool_calls` (`[{"function": {"name", "arguments"}, ...}]`, the arguments an object
    wherever they are one), `tool_call_id` and `name`.
    Of the assistant's turns, `unfinished` are those that a limit cut, by `regenerate`'s `finish_reasons`.
    `tools` are the definitions that the template shows to the model (`[{"type": "function", "function": {...}}]`).
    """

    where: str
    id: str
    messages: list[dict[str, Any]]
    unfinished: frozenset[int] = frozenset()
    tools: list[dict[str, Any]] | None = None


# ---- records


def read_records(patterns: list[str]) -> Iterator[Record | Rejection]:
    """The conversations in JSONL files (`.gz` too) or globs, in order; as `parse_record`.

    Raises:
      UserError: a pattern that matches nothing, a file of another kind, one that cannot be read.
    """
    files = find_files(patterns)
    for file in files:
        _check_kind(file)
    for block in read_blocks(files, _READ_BYTES):
        yield from block_records(block)


def block_records(block: Block) -> Iterator[Record | Rejection]:
    """The conversations in a block of JSONL, one for each line that is not blank.

    Raises:
      UserError: a block of another kind of file.
    """
    _check_kind(block.path)
    for number, line in enumerate(block.items, start=block.first):
        if line.strip():
            yield parse_record(f"{block.path}:{number}", parse_line(line))


def parse_record(where: str, value: Any) -> Record | Rejection:
    """The conversation in `value`, a line's JSON (or the `ValueError` that it gave).

    A record is `{"id" or "uuid", "conversations" or "messages": [{"role", "content", ...}], "tools"?, ...}`, or has
    ShareGPT's `from` and `value`. Reasons for none: malformed JSON; not a conversation; unknown role; assistant first;
    unreadable tool call; unreadable tools.
    """
    if isinstance(value, ValueError):
        return Rejection(where, where, "malformed JSON")
    name = record_name(where, value)
    try:
        return Record(where, name, _messages(value), _unfinished(value), _tools(value))
    except _Unusable as reason:
        return Rejection(where, name, str(reason))


def prompt_messages(messages: list[dict]) -> list[dict]:
    """The turns before the first assistant turn: what an evaluation asks."""
    roles = [message["role"] for message in messages]
    return messages[: roles.index("assistant")] if "assistant" in roles else messages


def asking_messages(messages: list[dict]) -> list[dict]:
    """The system and user turns in order: what is kept when the assistant's are written anew."""
    return [message for message in messages if message["role"] in ("system", "user")]


class _Unusable(Exception):
    """Why a line is no conversation."""


def _check_kind(path: str | Path) -> None:
    if kind_of(path) != "jsonl":
        raise UserError(f"{path}: conversations are read from .jsonl and .jsonl.gz files")


def _first(fields: dict, names: tuple[str, ...]) -> Any:
    """The value of the first of `names` that has one."""
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def _messages(record: Any) -> list[dict]:
    turns = _first(record, _TURNS) if isinstance(record, dict) else None
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
    given, content = _first(turn, ("role", "from")), _first(turn, ("content", "value"))
    if not isinstance(given, str):
        raise _Unusable("not a conversation")
    role = _ROLES.get(given.lower())
    if role is None:
        raise _Unusable("unknown role")
    calls, reasoning = _tool_calls(turn), _first(turn, _REASONING)
    if given.lower() == "function_call":
        calls, content = _calls_in_text(content), ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    elif content is None and (calls or reasoning):
        content = ""
    if not isinstance(content, str) or not isinstance(reasoning, str | None):
        raise _Unusable("not a conversation")
    more = {"reasoning_content": reasoning, "tool_calls": calls} | {key: turn.get(key) for key in _PASSED}
    return {"role": role, "content": content} | {key: value for key, value in more.items() if value}


# ---- tools


def _tool_calls(turn: dict) -> list[dict]:
    calls = turn.get("tool_calls")
    if not calls and turn.get("function_call"):  # OpenAI's before there were several
        calls = [{"type": "function", "function": turn["function_call"]}]
    if calls and not isinstance(calls, list):
        raise _Unusable("unreadable tool call")
    return [_call(call) for call in calls or []]


def _call(call: Any) -> dict:
    """A call in OpenAI's form, but its arguments an object, as servers pass it to templates."""
    if isinstance(call, dict) and "function" not in call:
        call = {"type": "function", "function": call}
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _Unusable("unreadable tool call")
    arguments = function.get("arguments", {} if function.keys() == {"name"} else None)
    if isinstance(arguments, str):
        parsed = parse_line(arguments.encode()) if arguments.strip() else {}
        arguments = parsed if isinstance(parsed, dict) else arguments
    if arguments is None:
        raise _Unusable("unreadable tool call")
    return {**call, "function": {**function, "arguments": arguments}}


def _calls_in_text(content: Any) -> list[dict]:
    """A ShareGPT turn whose text is one call or a list of them."""
    calls = parse_line(content.encode()) if isinstance(content, str) else None
    if not calls:
        raise _Unusable("unreadable tool call")
    return [_call(call) for call in (calls if isinstance(calls, list) else [calls])]


def _tools(record: dict) -> list[dict] | None:
    tools = _first(record, ("tools", "functions"))
    if isinstance(tools, str):
        tools = parse_line(tools.encode()) if tools.strip() else None
    if not tools and not isinstance(tools, ValueError):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _Unusable("unreadable tools")
    bare = [tool.keys() >= {"name"} and "function" not in tool for tool in tools]
    return [{"type": "function", "function": tool} if alone else tool for tool, alone in zip(tools, bare, strict=True)]


# ---- tokens

_BATCH = 256  # conversations tokenized at one time, on all cores


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
