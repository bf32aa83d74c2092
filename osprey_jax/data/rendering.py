"""Conversations to text, by a tokenizer's own chat template, as serving renders them."""

import contextlib
import datetime
import json
import re
from collections.abc import Callable
from typing import Any

import jinja2
import transformers

from osprey_jax.command import UserError
from osprey_jax.data.jinja import compile_template

_NOT_OPTIONS = ("messages", "add_generation_prompt", "tokenize")  # what `render` decides


class RecordRefused(Exception):
    """The chat template cannot render a conversation, for the reason that it states."""


class ChatTemplate:
    """A tokenizer's chat template with its options."""

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        options: dict[str, Any] | None = None,
        today: datetime.date | None = None,
    ):
        """`today` is the date for a template that writes it into the conversation: by default the clock's.

        Raises:
          UserError: no chat template, or an option that it does not know.
        """
        self.tokenizer = tokenizer
        self._options = options or {}
        self._special_tokens = tokenizer.special_tokens_map
        try:
            source = tokenizer.get_chat_template()
        except ValueError as error:
            raise UserError(f"{tokenizer.name_or_path}: the tokenizer has no chat template") from error
        for name in self._options:
            if name in _NOT_OPTIONS or not re.search(rf"\b{re.escape(name)}\b", source):
                raise UserError(f"template_options: the chat template has no option {name!r}")
        try:
            self._template = compile_template(source, today)
        except jinja2.TemplateError as error:
            raise UserError(f"{tokenizer.name_or_path}: the chat template is no valid Jinja ({error})") from error
        try:
            self.render([{"role": "user", "content": "?"}], add_generation_prompt=True)
        except RecordRefused as error:
            raise UserError(f"the chat template refuses a conversation of one user turn ({error})") from error

    def render(
        self, messages: list[dict], *, add_generation_prompt: bool = False, tools: list[dict] | None = None
    ) -> str:
        """The conversation as text. Raises `RecordRefused`.

        The arguments of tool calls have to be objects, as in serving; they become JSON text where the template refuses
        objects.
        """
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        if not all(isinstance(call["function"]["arguments"], dict) for call in calls):
            raise RecordRefused("a tool call's arguments are not a JSON object")
        try:
            return self._render(messages, add_generation_prompt, tools)
        except RecordRefused as refused:
            if not calls:
                raise
            texts = [
                with_arguments(message, lambda _, arguments: json.dumps(arguments, ensure_ascii=False))
                for message in messages
            ]
            with contextlib.suppress(RecordRefused):
                return self._render(texts, add_generation_prompt, tools)
            raise refused from None

    def _render(self, messages: list[dict], add_generation_prompt: bool, tools: list[dict] | None) -> str:
        # As `apply_chat_template`, gpt-oss's name for the reasoning included; it copies the messages twice besides.
        served = [
            {"thinking": message["reasoning_content"], **message} if "reasoning_content" in message else message
            for message in messages
        ]
        given = {"tools": None, "documents": None} | self._special_tokens | self._options
        given |= {"tools": tools} if tools else {}
        try:
            return self._template.render(messages=served, add_generation_prompt=add_generation_prompt, **given)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:  # odd tool calls
            raise RecordRefused(str(error)) from error


def with_arguments(message: dict, change: Callable[[int, Any], Any]) -> dict:
    """`message` with `change(number, arguments)` as its calls' arguments."""
    if not message.get("tool_calls"):
        return message
    functions = [
        {**call["function"], "arguments": change(number, call["function"]["arguments"])}
        for number, call in enumerate(message["tool_calls"])
    ]
    calls = zip(message["tool_calls"], functions, strict=True)
    return {**message, "tool_calls": [{**call, "function": function} for call, function in calls]}
