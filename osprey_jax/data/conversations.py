"""Conversations as they are found: records of many makes to messages for a chat template, or a reason why not."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from osprey_jax.command import UserError
from osprey_jax.data.records import Block, Rejection, find_files, kind_of, parse_line, read_blocks, record_name
from osprey_jax.files import write_text

# In lower case. ShareGPT names the product that answered; OpenAI's developer turn is what its models take for a system
# turn; a function_call is an answer whose whole content is the call.
_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "ai", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_response", "tool_response", "observation", "ipython"), "tool"),
}
TURNS = ("conversations", "messages", "conversation")
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
        check_kind(file)
    for block in read_blocks(files, _READ_BYTES):
        yield from block_records(block)


def block_records(block: Block) -> Iterator[Record | Rejection]:
    """The conversations in a block of JSONL, one for each line that is not blank.

    Raises:
      UserError: a block of another kind of file.
    """
    check_kind(block.path)
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


def check_kind(path: str | Path) -> None:
    """Raises `UserError` for a file whose kind does not hold conversations."""
    if kind_of(path) != "jsonl":
        raise UserError(f"{path}: conversations are read from .jsonl and .jsonl.gz files")


def _first(fields: dict, names: tuple[str, ...]) -> Any:
    """The value of the first of `names` that has one."""
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def _messages(record: Any) -> list[dict]:
    turns = _first(record, TURNS) if isinstance(record, dict) else None
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


def write_rejections(path: Path, rejections: list[Rejection]) -> None:
    """`rejections` as JSONL with `where`, `id` and `reason`, in one step."""
    write_text(path, "".join(json.dumps(dataclasses.asdict(line), ensure_ascii=False) + "\n" for line in rejections))
