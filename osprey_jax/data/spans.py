"""Where a chat template puts the assistant's turns: found in the rendering itself, without a table of templates.

To find one turn, the conversation is rendered again with a marker as that turn's whole content. What the template
writes before the marker (up to the header's end) and after it (from the terminator's end) is then the frame of the
turn, and the same frame has to stand in the real rendering: what lies inside is the turn, whatever the template did to
its content (trimmed it, dropped or added thinking, wrote tool calls). Contents are never searched for, and text that
looks like a header or a terminator cannot mislead this.
"""

import itertools
import re
from collections.abc import Collection
from typing import Any

import jinja2
import transformers

from osprey_jax.command import UserError

# Names of <think>, [THINK], <thinking>, ◁think▷ ...: an opening tag, a closing one, or both around nothing.
_TAG = r"[<\[◁]{slash}[\w:]*(?:think|reason)[\w:]*[>\]▷]\s*"
_OPEN, _CLOSE = _TAG.format(slash=""), _TAG.format(slash="/")
_EMPTY_THINKING = re.compile(rf"\s*(?:{_OPEN}(?:{_CLOSE})?|{_CLOSE})", re.IGNORECASE)
_TRAILING_THINKING = re.compile(rf"(?:{_OPEN}(?:{_CLOSE})?|{_CLOSE})$", re.IGNORECASE)

_NOT_OPTIONS = ("messages", "add_generation_prompt", "tokenize")  # what `render` decides


class RecordRefused(Exception):
    """The chat template cannot render a conversation, for the reason that it states."""


class ChatTemplate:
    """A tokenizer's chat template with its options, as serving renders it."""

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase, options: dict[str, Any] | None = None):
        """Raises `UserError`: no chat template, or an option that it does not know."""
        self._tokenizer = tokenizer
        self._options = options or {}
        try:
            source = tokenizer.get_chat_template()
        except ValueError as error:
            raise UserError(f"{tokenizer.name_or_path}: the tokenizer has no chat template") from error
        for name in self._options:
            if name in _NOT_OPTIONS or not re.search(rf"\b{re.escape(name)}\b", source):
                raise UserError(f"template_options: the chat template has no option {name!r}")
        added = {token.content for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
        self._enders = tuple(sorted((token for token in added if token.strip()), key=len, reverse=True))
        self._terminator = re.compile(rf"\s*(?:{'|'.join(map(re.escape, self._enders)) or '(?!)'})")
        # What serving appends to ask for a turn; the thinking that it may open or rule out is missing in old turns.
        prompt = self._generation_prompt()
        self._header = _TRAILING_THINKING.sub("", prompt)
        self._opened_thinking = prompt[len(self._header) :]

    def render(self, messages: list[dict], *, add_generation_prompt: bool = False) -> str:
        """The conversation as text. Raises `RecordRefused`."""
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **self._options
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:  # odd tool calls
            raise RecordRefused(str(error)) from error

    def assistant_spans(
        self, messages: list[dict], unfinished: Collection[int] = ()
    ) -> tuple[str, list[tuple[int, int]]]:
        """The rendering, and the `(start, end)` characters of each assistant turn in it, in order.

        A span is what the model writes in serving: from the end of the header (and of an empty thinking block that
        the template itself puts there) to the end of the terminator. Of an `unfinished` turn (the first is 0), which
        a limit cut, the terminator is not the model's and lies outside.

        Raises:
          RecordRefused: the template refuses the conversation.
          UserError: a turn cannot be located reliably; the message shows the rendering.
        """
        text = self.render(messages)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [self._locate(text, messages, index, turn in unfinished) for turn, index in enumerate(turns)]
        if any(before[1] > after[0] for before, after in itertools.pairwise(spans)):
            raise _unreadable("assistant turns overlap", text)
        return text, spans

    def _locate(self, text: str, messages: list[dict], index: int, unfinished: bool) -> tuple[int, int]:
        marker = _marker(text)
        marked = self.render([*messages[:index], {"role": "assistant", "content": marker}, *messages[index + 1 :]])
        if marked.count(marker) != 1:
            raise _unreadable(f"message {index}'s content appears {marked.count(marker)} times", marked)
        before, after = marked.split(marker)

        header_end = self._header_end(before, messages, index)
        if not text.startswith(before[:header_end]):
            raise _unreadable(f"the text before message {index} depends on that message", text)
        start, gap = header_end, before[header_end:]
        if _EMPTY_THINKING.fullmatch(gap) and text.startswith(gap, start):
            start += len(gap)
        if text.startswith(self._opened_thinking, header_end):
            start = max(start, header_end + len(self._opened_thinking))

        terminator = self._terminator.match(after)
        if terminator is None and after.strip():
            raise _unreadable(f"no special token ends message {index}", marked)
        rest = after[terminator.end() :] if terminator else after
        end = len(text) - len(rest)
        if not text.endswith(rest) or end < start or (terminator and not text.endswith(self._enders, start, end)):
            raise _unreadable(f"the text after message {index} depends on that message", text)
        if unfinished and terminator:
            end = max(start, end - len(terminator.group()))
        return start, end

    def _header_end(self, before: str, messages: list[dict], index: int) -> int:
        """Where the header of the turn that follows `before` ends."""
        start = before.rfind(self._header)
        end = start + len(self._header)
        if start >= 0 and (end == len(before) or _EMPTY_THINKING.fullmatch(before, end)):
            return end
        # More than thinking between header and content (a channel name ...): it begins where the history ends.
        history = self.render(messages[:index]) if index else ""
        if before.startswith(history + self._header):
            return len(history) + len(self._header)
        raise _unreadable(f"the header {self._header!r} is not before message {index}", before)

    def _generation_prompt(self) -> str:
        conversation = [{"role": "user", "content": "?"}]
        try:
            without, asking = self.render(conversation), self.render(conversation, add_generation_prompt=True)
        except RecordRefused as error:
            raise UserError(f"the chat template refuses a conversation of one user turn ({error})") from error
        if not asking.startswith(without):
            raise _unreadable("the generation prompt is not at the end", asking)
        return asking[len(without) :]


def _marker(text: str) -> str:
    """Letters and digits that do not occur in `text`."""
    number = 0
    while (marker := f"osprey{number}turn") in text:
        number += 1
    return marker


def _unreadable(what: str, text: str) -> UserError:
    shown = text if len(text) <= 600 else f"{text[:300]} ... {text[-300:]}"
    return UserError(f"the chat template cannot be read: {what}; the rendering is {shown!r}")
