"""Where a chat template puts the assistant's turns: found in the rendering itself, without a table of templates.

The conversation is rendered a second time with a marker as each assistant turn's whole content, and as the arguments
of its tool calls. What the template writes outside the turns, from one turn's terminator to the next turn's header, has
to stand in the real rendering in the same order: what lies between is the turns, whatever the template did to their
content (trimmed it, dropped or added thinking, wrote tool calls). Where contents repeat an outside part, so that it
could stand at several places, that turn is marked alone: then the parts outside are all before and all after it, and
have to be the real rendering's beginning and end. Contents are never interpreted, and text in them that looks like a
header or a terminator cannot mislead this.
"""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Collection, Sequence

from osprey_jax.command import UserError
from osprey_jax.data.rendering import ChatTemplate, RecordRefused, with_arguments

# Names of <think>, [THINK], <thinking>, ◁think▷ ...: an opening tag, a closing one, or both around nothing.
_TAG = r"[<\[◁]{slash}[\w:]*(?:think|reason)[\w:]*[>\]▷]\s*"
_OPEN, _CLOSE = _TAG.format(slash=""), _TAG.format(slash="/")
_EMPTY_THINKING = re.compile(rf"\s*(?:{_OPEN}(?:{_CLOSE})?|{_CLOSE})", re.IGNORECASE)
_CLOSED_THINKING = re.compile(rf"\s*{_CLOSE}$", re.IGNORECASE)
_TRAILING_THINKING = re.compile(rf"(?:{_OPEN}(?:{_CLOSE})?|{_CLOSE})$", re.IGNORECASE)

# Small conversations, to learn from them what the template writes around turns; `_NAME` is the called function's.
_NAME = "ospreyfunction"
_CALL = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": {}}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_QUESTION = {"role": "user", "content": "?"}
_ANSWER = {"role": "assistant", "content": "!"}
_RESULT = {"role": "tool", "tool_call_id": "call00000", "name": _NAME, "content": "?"}


@dataclasses.dataclass
class _Surroundings:
    """What a template writes around a turn that follows a message of a certain role.

    `text_gaps` are what may stand between header and content, `call_gaps` between header and a call's arguments, and
    `call_tails` between the last arguments and the terminator's end; with `_NAME` for the function's name.
    """

    header: str  # what serving appends to ask for the turn, but for thinking
    opened_thinking: str  # the thinking that it opens or rules out there; old turns lack it
    text_gaps: set[str] = dataclasses.field(default_factory=lambda: {""})
    call_gaps: set[str] = dataclasses.field(default_factory=set)
    call_tails: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class _Conversation:
    messages: list[dict]
    tools: list[dict] | None
    text: str  # as it is rendered
    marker: str  # not in the text


@dataclasses.dataclass(frozen=True)
class _Turn:
    """An assistant turn in a rendering with markers; `start` and `end` are its first marker's and its last's."""

    index: int  # of its message
    start: int
    end: int
    begins_with_call: bool
    names: list[str]  # of the functions it calls


@dataclasses.dataclass(frozen=True)
class _Edge:
    """What of a turn in a rendering with markers is not its content."""

    thinking: str  # the template's own, after the header
    terminator: str
    opened_thinking: str  # what serving's header ends with, where the turn has it


class SpanFinder:
    """Finds the assistant's turns in the renderings of a chat template."""

    def __init__(self, template: ChatTemplate):
        """Raises `UserError`: the template's generation prompt is not at the end."""
        self._template = template
        tokenizer = template.tokenizer
        added = {token.content for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
        self._enders = tuple(sorted((token for token in added if token.strip()), key=len, reverse=True))
        self._terminator = re.compile(rf"\s*(?:{'|'.join(map(re.escape, self._enders)) or '(?!)'})")
        self._around = {"user": self._learn([_QUESTION])}
        for history in ([_QUESTION, _ANSWER], [_QUESTION, _CALLING, _RESULT]):
            with contextlib.suppress(RecordRefused, UserError):  # there are templates without tools
                self._around[history[-1]["role"]] = self._learn(history)
        stop, header = str(tokenizer.eos_token or ""), self._around["user"].header
        self._next_turn = re.compile(re.escape(stop) + r"\s*" + re.escape(header) if stop and header else "(?!)")

    def assistant_spans(
        self, messages: list[dict], unfinished: Collection[int] = (), tools: list[dict] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The rendering, and the `(start, end)` characters of each assistant turn in it, in order.

        A span is what the model writes in serving: from the end of the header (and of an empty thinking block that
        the template itself puts there) to the end of the terminator. Of an `unfinished` turn (the first is 0), which
        a limit cut, the terminator is not the model's and lies outside, and what closes its thinking where it has
        nothing else.

        Raises:
          RecordRefused: the template refuses the conversation, or leaves out tool calls: a turn that ends where the
            model would call teaches it to stop there.
          UserError: a turn cannot be located reliably; the message shows the rendering.
        """
        text = self._template.render(messages, tools=tools)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        conversation = _Conversation(messages, tools, text, _marker(text))
        spans = []
        for turn, span in enumerate(self._spans_of_all(conversation, turns)):
            start, end, terminator = span or self._span_of_one(conversation, turns[turn])
            if turn in unfinished:
                message, end = messages[turns[turn]], end - len(terminator)
                if not message["content"] and not message.get("tool_calls"):
                    closed = _CLOSED_THINKING.search(text, start, end)
                    end = closed.start() if closed else end
            spans.append((start, max(start, end)))
        if any(before[1] > after[0] for before, after in itertools.pairwise(spans)):
            raise _unreadable("assistant turns overlap", text)
        return text, spans

    # ---- turns in the real rendering: (start, end, terminator), the end behind the terminator

    def _spans_of_all(self, conversation: _Conversation, turns: list[int]) -> list[tuple[int, int, str] | None]:
        """Each turn's span, from one rendering with all of them marked; None where it is not certain."""
        try:
            outside, edges = self._read(conversation, turns)
        except (UserError, RecordRefused):
            return [None] * len(turns)
        places = _certain_places(conversation.text, outside)
        return [
            place and self._span(conversation.text, *place, edge) for place, edge in zip(places, edges, strict=True)
        ]

    def _span_of_one(self, conversation: _Conversation, index: int) -> tuple[int, int, str]:
        (before, after), [edge] = self._read(conversation, [index])
        text = conversation.text
        if not text.startswith(before):
            raise _unreadable(f"the text before message {index} depends on that message", text)
        span = self._span(text, len(before), len(text) - len(after), edge)
        if not text.endswith(after) or span is None:
            raise _unreadable(f"the text after message {index} depends on that message", text)
        return span

    def _span(self, text: str, header_end: int, end: int, edge: _Edge) -> tuple[int, int, str] | None:
        start = header_end
        if text.startswith(edge.thinking, start):
            start += len(edge.thinking)
        if text.startswith(edge.opened_thinking, header_end):
            start = max(start, header_end + len(edge.opened_thinking))
        if end < start or (edge.terminator and not text.endswith(self._enders, start, end)):
            return None
        return start, end, edge.terminator

    # ---- turns in a rendering with markers

    def _read(self, conversation: _Conversation, turns: list[int]) -> tuple[list[str], list[_Edge]]:
        """The parts outside these turns, one more than turns, and the turns' edges, from a rendering with markers."""
        outside, edges = [], []
        rendering, marked_turns = self._mark(conversation, turns)
        position = 0
        for turn in marked_turns:
            before = rendering[position : turn.start]
            header_end, around = self._header(before, turn, conversation, alone=len(turns) == 1)
            thinking = _EMPTY_THINKING.match(before, header_end)
            position, terminator = self._end(rendering, turn, around)
            if self._next_turn.search(rendering, turn.start, position):
                raise _unreadable(f"message {turn.index} becomes more than one turn", rendering)
            outside.append(before[:header_end])
            edges.append(_Edge(thinking.group() if thinking else "", terminator, around.opened_thinking))
        return [*outside, rendering[position:]], edges

    def _mark(self, conversation: _Conversation, turns: list[int]) -> tuple[str, list[_Turn]]:
        """The rendering with each of these turns' content and arguments replaced by a marker of its own."""
        messages, marker = conversation.messages, conversation.marker
        marked = list(messages)
        for index in turns:
            marked[index] = _marked(messages[index], f"{marker}{index}")
        rendering = self._template.render(marked, tools=conversation.tools)

        found: dict[int, list[re.Match]] = {index: [] for index in turns}
        for match in re.finditer(rf"{marker}({'|'.join(map(str, turns))})(?:c(\d+))?x", rendering):
            found[int(match[1])].append(match)
        marked_turns = []
        for index, matches in found.items():
            names = [call["function"]["name"] for call in messages[index].get("tool_calls", ())]
            if {str(call) for call in range(len(names))} - {match[2] for match in matches}:
                raise RecordRefused("it leaves out tool calls")
            if not matches or (len(matches) > 1 and not names):
                raise _unreadable(f"message {index}'s content appears {len(matches)} times", rendering)
            begins_with_call = matches[0][2] is not None
            marked_turns.append(_Turn(index, matches[0].start(), matches[-1].end(), begins_with_call, names))
        if any(before.end > after.start for before, after in itertools.pairwise(marked_turns)):
            raise _unreadable("assistant turns overlap", rendering)
        return rendering, marked_turns

    def _header(self, before: str, turn: _Turn, conversation: _Conversation, alone: bool) -> tuple[int, _Surroundings]:
        """Where the turn's header ends in `before`, which ends at its first marker."""
        history = conversation.messages[: turn.index]
        previous = history[-1]["role"] if history else "user"
        # Where serving appends no header (after results, say), a template may yet write the user's.
        for around in [self._around[role] for role in dict.fromkeys((previous, "user")) if role in self._around]:
            header_end = _header_end(before, turn, around)
            if header_end is not None:
                return header_end, around
            if alone:  # an unknown gap begins where the history ends
                header = (self._template.render(history, tools=conversation.tools) if history else "") + around.header
                if before.startswith(header):
                    return len(header), around
        raise _unreadable(f"the header {around.header!r} is not before message {turn.index}", before)

    def _end(self, rendering: str, turn: _Turn, around: _Surroundings) -> tuple[int, str]:
        """Where the turn's terminator ends in a rendering with markers, and the terminator."""
        if turn.names:
            for tail in around.call_tails:
                tail = tail.replace(_NAME, turn.names[-1])
                if rendering.startswith(tail, turn.end):
                    return turn.end + len(tail), next(ender for ender in self._enders if tail.endswith(ender))
        elif terminator := self._terminator.match(rendering, turn.end):
            return terminator.end(), terminator.group()
        elif not rendering[turn.end :].strip():
            return turn.end, ""
        raise _unreadable(f"no special token ends message {turn.index}", rendering)

    # ---- what the template writes around turns

    def _learn(self, history: list[dict]) -> _Surroundings:
        """What surrounds the turn after `history`, from conversations that begin with it."""
        without, asking = self._template.render(history), self._template.render(history, add_generation_prompt=True)
        if not asking.startswith(without):
            raise _unreadable("the generation prompt is not at the end", asking)
        prompt = asking[len(without) :]
        header = _TRAILING_THINKING.sub("", prompt)
        around = _Surroundings(header, prompt[len(header) :])
        later = [_RESULT, _ANSWER, _QUESTION]
        for turn, rest in ((_ANSWER, [_QUESTION]), (_CALLING, later), (_CALLING | {"content": "!"}, later)):
            for conversation in ([*history, turn], [*history, turn, *rest]):
                with contextlib.suppress(RecordRefused, UserError):
                    self._learn_turn(around, without, conversation, len(history))
        return around

    def _learn_turn(self, around: _Surroundings, history: str, messages: list[dict], index: int) -> None:
        rendering, [turn] = self._mark(_Conversation(messages, None, history, _marker(history)), [index])
        if rendering.startswith(history + around.header):
            gap = rendering[len(history + around.header) : turn.start]
            (around.call_gaps if turn.begins_with_call else around.text_gaps).add(gap)
        tail = rendering[turn.end :].rstrip()
        if turn.names and index == len(messages) - 1 and tail.endswith(self._enders):
            around.call_tails.add(tail)


def _marked(message: dict, marker: str) -> dict:
    """An assistant message with markers as content and as each call's arguments, without its thinking."""
    if not message.get("tool_calls"):
        return {"role": "assistant", "content": f"{marker}x"}
    # Templates may write either the content or the calls.
    turn = {"role": "assistant", "content": message["content"] and f"{marker}x", "tool_calls": message["tool_calls"]}
    return with_arguments(turn, lambda call, _: {"argument": f"{marker}c{call}x"})


def _header_end(before: str, turn: _Turn, around: _Surroundings) -> int | None:
    """Where the turn's header ends in `before`, which ends at its first marker; None where what follows is unknown."""
    if turn.begins_with_call:
        gaps = [gap.replace(_NAME, turn.names[0]) for gap in around.call_gaps]
    else:
        gaps = around.text_gaps
    gap = max((gap for gap in gaps if before.endswith(around.header + gap)), key=len, default=None)
    return None if gap is None else len(before) - len(gap)


def _certain_places(text: str, outside: Sequence[str]) -> list[tuple[int, int] | None]:
    """Between which characters of `text` each turn lies; None where the parts outside could stand otherwise too."""
    earliest = _earliest(text, outside)
    latest = _earliest(text[::-1], [part[::-1] for part in reversed(outside)])
    if earliest is None or latest is None:
        return [None] * (len(outside) - 1)
    latest = [len(text) - start - len(part) for start, part in zip(reversed(latest), outside, strict=True)]
    certain = [start if start == other else None for start, other in zip(earliest, latest, strict=True)]
    return [
        None if start is None or end is None else (start + len(part), end)
        for part, (start, end) in zip(outside[:-1], itertools.pairwise(certain), strict=True)
    ]


def _earliest(text: str, parts: Sequence[str]) -> list[int] | None:
    """Where the parts begin when each stands as early as it can: the first at the beginning, the last at the end."""
    limit = len(text) - len(parts[-1])
    if not text.startswith(parts[0]) or not text.endswith(parts[-1]):
        return None
    starts, position = [0], len(parts[0])
    for part in parts[1:-1]:
        start = text.find(part, position, limit)
        if start < 0:
            return None
        starts.append(start)
        position = start + len(part)
    return [*starts, limit]


def _marker(text: str) -> str:
    """Letters and digits that do not occur in `text`."""
    number = 0
    while (marker := f"osprey{number}turn") in text:
        number += 1
    return marker


def _unreadable(what: str, text: str) -> UserError:
    shown = text if len(text) <= 600 else f"{text[:300]} ... {text[-300:]}"
    return UserError(f"the chat template cannot be read: {what}; the rendering is {shown!r}")
