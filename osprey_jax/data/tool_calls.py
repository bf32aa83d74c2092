"""The tool calls of an assistant message, `{"id", "type", "function": {"name", "arguments"}}` or the function alone."""

import json
from collections.abc import Callable
from typing import Any


def calls_of(message: dict) -> list[dict]:
    """The called functions, in order. Raises `ValueError`: the calls are not a list of objects."""
    calls = message.get("tool_calls") or []
    if isinstance(calls, list) and all(isinstance(call, dict) for call in calls):
        functions = [call.get("function", call) for call in calls]
        if all(isinstance(function, dict) for function in functions):
            return functions
    raise ValueError("tool_calls are not a list of calls")


def with_arguments(message: dict, change: Callable[[int, Any], Any]) -> dict:
    """`message` with `change(number, arguments)` as each call's arguments (a call that has none: None)."""
    functions = calls_of(message)
    if not functions:
        return message
    calls = []
    for number, (call, function) in enumerate(zip(message["tool_calls"], functions, strict=True)):
        changed = {**function, "arguments": change(number, function.get("arguments"))}
        calls.append({**call, "function": changed} if "function" in call else changed)
    return {**message, "tool_calls": calls}


def as_object(_: int, arguments: Any) -> dict:
    """Arguments as serving gives them to the template. Raises `ValueError`: serving would refuse them."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError("a tool call's arguments are not a JSON object")
    return value


def as_text(_: int, arguments: dict) -> str:
    """Arguments for a template that wants JSON text."""
    return json.dumps(arguments, ensure_ascii=False)
