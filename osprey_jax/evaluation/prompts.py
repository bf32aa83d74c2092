"""Prompt sets: what is asked, in file order or a random sample of it, and what is not asked and why."""

import dataclasses
import hashlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

from osprey_jax.command import UserError
from osprey_jax.config import EvaluateConfig
from osprey_jax.data.benchmarks import Questions, read_questions
from osprey_jax.data.records import Rejection
from osprey_jax.data.rendering import RecordRefused
from osprey_jax.decoding.chat import Chat
from osprey_jax.decoding.requests import Request


@dataclasses.dataclass(frozen=True)
class Item:
    """One request: a turn of a conversation, with the messages that lead to it."""

    questions: Questions
    turn: int
    messages: list[dict[str, Any]]
    request: Request

    @property
    def name(self) -> dict[str, Any]:
        return {"id": self.questions.id, "turn": self.turn}


@dataclasses.dataclass
class PromptSet:
    """The first turns of what is asked; `skipped` grows when a later turn cannot be asked."""

    name: str
    items: list[Item]
    skipped: list[Rejection]

    @property
    def later_turns(self) -> bool:
        """Whether anything is asked after an answer."""
        return any(len(item.questions.turns) > 1 for item in self.items)


def read_prompt_set(name: str, path: Path, config: EvaluateConfig, chat: Chat) -> PromptSet:
    """The prompts in `path`; with `config.sample`, so many drawn at random.

    Raises:
      UserError: the file cannot be read, or holds no prompt that can be asked.
    """
    prompts, seen, taken = PromptSet(name, [], []), Counter(), set()
    for questions in read_questions(path):
        if isinstance(questions, Questions):  # results are told apart by their ids
            first = questions.id
            while questions.id in taken:
                seen[first] += 1
                questions = dataclasses.replace(questions, id=f"{first}#{seen[first] + 1}")
            taken.add(questions.id)
        found = questions if isinstance(questions, Rejection) else _item(questions, 0, [], config, chat)
        (prompts.skipped if isinstance(found, Rejection) else prompts.items).append(found)
    if not prompts.items:
        reasons = ", ".join(sorted({rejection.reason for rejection in prompts.skipped})) or "the file is empty"
        raise UserError(f"{path}: no usable prompt ({reasons})")
    if config.sample is not None and config.sample < len(prompts.items):
        chosen = sorted(random.Random(config.seed).sample(range(len(prompts.items)), config.sample))
        prompts.items[:] = [prompts.items[i] for i in chosen]
    return prompts


def next_turns(
    prompts: PromptSet, items: list[Item], texts: list[str | None], config: EvaluateConfig, chat: Chat
) -> list[Item]:
    """What is asked after `items`, given what the target wrote to each (None: it did not)."""
    following = []
    for item, text in zip(items, texts, strict=True):
        questions, turn = item.questions, item.turn + 1
        if turn == len(questions.turns):
            continue
        if text is None:
            found = Rejection(questions.where, questions.id, f"turn {item.turn} was not answered")
        else:
            found = _item(questions, turn, [*item.messages, chat.message(item.messages, text)], config, chat)
        if not isinstance(found, Rejection):
            following.append(found)
        elif found not in prompts.skipped:  # an answer may be looked at more than once
            prompts.skipped.append(found)
    return following


def fingerprint(items: list[Item]) -> str:
    """sha256 over what is asked."""
    asked = [[*item.name.values(), item.request.prompt, item.request.limit] for item in items]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def _item(questions: Questions, turn: int, before: list[dict], config: EvaluateConfig, chat: Chat) -> Item | Rejection:
    messages = [*before, *questions.turns[turn]]
    try:
        prompt = chat.prompt_ids(messages, questions.tools)
    except RecordRefused as error:
        return Rejection(questions.where, questions.id, f"refused by the chat template: {error}")
    limit = chat.limit(prompt, config.max_new_tokens)
    if limit is None:
        return Rejection(questions.where, questions.id, "the prompt exceeds the target's context")
    return Item(questions, turn, messages, Request(prompt, limit))
