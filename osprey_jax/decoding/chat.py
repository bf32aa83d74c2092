"""What is said between a conversation and a model: prompts as serving renders them, answers as messages."""

import dataclasses
import functools
import re

import transformers

from osprey_jax.command import UserError
from osprey_jax.data.rendering import ChatTemplate, RecordRefused
from osprey_jax.data.spans import SpanFinder

# <think>, [THINK], ◁think▷ ... at the start of what the model wrote, or at the end of what it was asked with.
_OPENING = r"([<\[◁])([\w:]*(?:think|reason)[\w:]*)([>\]▷])"
_OPENS = re.compile(rf"\s*{_OPENING}", re.IGNORECASE)
_OPENED = re.compile(rf"{_OPENING}\s*$", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Chat:
    """A model's tokenizer and chat template, and the positions of its context."""

    tokenizer: transformers.PreTrainedTokenizerBase
    template: ChatTemplate
    context: int

    def prompt(self, messages: list[dict], tools: list[dict] | None = None) -> str:
        """A conversation up to where the assistant's turn begins. Raises `RecordRefused`."""
        return self.template.render(messages, add_generation_prompt=True, tools=tools)

    def prompt_ids(self, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
        """Token ids of `prompt`. Raises `RecordRefused`."""
        return self.token_ids(self.prompt(messages, tools))

    def token_ids(self, prompt: str) -> list[int]:
        return self.tokenizer(prompt, add_special_tokens=False)["input_ids"]

    def limit(self, prompt: list[int], max_new_tokens: int) -> int | None:
        """New tokens that `prompt` may get; None where it is too long for the context."""
        return token_limit(len(prompt), max_new_tokens, self.context)

    def message(self, messages: list[dict], text: str) -> dict[str, str]:
        """The assistant's message for what the model wrote to `messages`.

        Its thinking becomes `reasoning_content` where the chat template then renders the very text again; else
        everything stays in `content`.
        """
        whole = {"role": "assistant", "content": text}
        prompt = self.prompt(messages)
        opened, opens = _OPENED.search(prompt), _OPENS.match(text)
        tag = opens or opened
        if tag is None:
            return whole
        left, name, right = tag.groups()
        thinking, _, content = text[opens.end() if opens else 0 :].partition(f"{left}/{name}{right}")
        split = _assistant(thinking.strip("\n"), content.lstrip("\n"))
        return split if self._rendered(messages, split) == prompt + text else whole

    def tidied(self, messages: list[dict], reasoning: str, content: str) -> dict[str, str]:
        """The assistant's message where a server kept the thinking apart, without the template's newlines around it."""
        as_given, tidy = _assistant(reasoning, content), _assistant(reasoning.strip("\n"), content.lstrip("\n"))
        rendered = self._rendered(messages, tidy)
        return tidy if rendered is not None and rendered == self._rendered(messages, as_given) else as_given

    @functools.cached_property
    def _finder(self) -> SpanFinder:
        return SpanFinder(self.template)

    def _rendered(self, messages: list[dict], answer: dict) -> str | None:
        """The conversation up to the end of `answer`, without what ends a turn; None where that cannot be found."""
        turn = sum(message["role"] == "assistant" for message in messages)
        try:
            text, spans = self._finder.assistant_spans([*messages, answer], {turn})
        except (RecordRefused, UserError):
            return None
        return text[: spans[-1][1]]


def token_limit(prompt_length: int, max_new_tokens: int, context: int) -> int | None:
    """New tokens a prompt may have in a context of `context` positions; None where the prompt is too long.

    SGLang's rule (0.5.23: `managers/tp_worker.py`, `init_req_max_new_tokens` in `managers/scheduler.py`): a request
    ends two places before the context does, and a prompt within six places of its end is refused.
    """
    if prompt_length >= context - 6:
        return None
    return min(max_new_tokens, context - 2 - prompt_length)


def _assistant(reasoning: str, content: str) -> dict[str, str]:
    return {"role": "assistant"} | ({"reasoning_content": reasoning} if reasoning else {}) | {"content": content}
