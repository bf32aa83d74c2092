"""Conversations whose assistant turns are being written, turn by turn."""

import dataclasses
import hashlib
import json
from collections import Counter

from osprey_jax.data.conversations import Record, asking_messages
from osprey_jax.data.records import Rejection
from osprey_jax.data.rendering import RecordRefused
from osprey_jax.decoding.chat import Chat


class Unanswerable(Exception):
    """Why a turn cannot be asked, now or ever."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A turn to be answered, with at most `limit` tokens. Its random numbers are made of `number` and `turn`."""

    messages: list[dict]
    prompt: list[int]
    limit: int
    number: int  # the dialogue's
    turn: int


@dataclasses.dataclass
class Dialogue:
    """A record being answered. `key` names its id and what is asked: the same in every run and order of the input."""

    key: str
    id: str
    turns: list[list[dict]]  # each ends with a user turn; a system turn may precede it
    messages: list[dict] = dataclasses.field(default_factory=list)
    finish_reasons: list[str] = dataclasses.field(default_factory=list)

    @property
    def answered(self) -> int:
        return len(self.finish_reasons)

    @property
    def complete(self) -> bool:
        return self.answered == len(self.turns)

    def question(self, chat: Chat, max_new_tokens: int) -> Question:
        """The next turn. Raises `Unanswerable`."""
        messages = self.messages + self.turns[self.answered]
        try:
            prompt = chat.prompt_ids(messages)
        except RecordRefused as error:
            raise Unanswerable(f"refused by the chat template: {error}") from error
        limit = chat.limit(prompt, max_new_tokens)
        if limit is None:
            raise Unanswerable("the prompt exceeds the target's context")
        return Question(messages, prompt, limit, int(self.key[:8], 16), self.answered)

    def answer(self, question: Question, message: dict, finish_reason: str) -> None:
        self.messages = [*question.messages, message]
        self.finish_reasons.append(finish_reason)

    def written(self) -> dict:
        """What the record becomes."""
        left = len(self.turns) - self.answered
        return {"conversations": self.messages, "finish_reasons": self.finish_reasons} | (
            {"unanswered": left} if left else {}
        )


def make_dialogue(record: Record, seen: Counter[str]) -> Dialogue | Rejection:
    """`record` without its answers. `seen` counts the records alike so far, each of which is asked on its own."""
    turns: list[list[dict]] = [[]]
    for message in asking_messages(record.messages):
        turns[-1].append(message)
        if message["role"] == "user":
            turns.append([])
    if len(turns) == 1:
        return Rejection(record.where, record.id, "no user turn")
    # A record without an id is named by its place in a file, which changes when the file does.
    name = None if record.id == record.where else record.id
    key = _digest([name, turns[:-1]])
    seen[key] += 1
    return Dialogue(key if seen[key] == 1 else _digest([key, seen[key]]), record.id, turns[:-1])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()[:32]
