"""Conversations to tokens: rendered as serving renders them, tokenized once, with a mask of what the model writes."""

import bisect
import dataclasses
import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import tokenizers
import transformers

from osprey_jax.command import UserError
from osprey_jax.data.conversations import Record
from osprey_jax.data.records import Rejection
from osprey_jax.data.rendering import ChatTemplate, RecordRefused
from osprey_jax.data.spans import SpanFinder

_TODAY = datetime.date(2025, 1, 1)  # for templates that write the date: rows must not depend on the day they are made
_BATCH_CHARACTERS = 1 << 21  # tokenized at one time: more is faster, but an encoding takes some hundred bytes a token

_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """A conversation's first tokens: token_ids int32 (n,), loss_mask bool (n,), True inside assistant spans.

    `where` and `id` are its record's, `whole` is its number of tokens before the cut (n or more).
    """

    where: str
    id: str
    token_ids: np.ndarray
    loss_mask: np.ndarray
    whole: int


class ConversationEncoder:
    """Records to at most `length` tokens each, by a tokenizer's own chat template with its options.

    The whole rendering is tokenized, as serving does it. So a special token's name in a user's text becomes that token,
    here as there; it starts or ends no turn, because spans are characters of the rendering, not searched for in tokens.
    """

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        length: int,
        template_options: dict[str, Any] | None = None,
        only_last_turn: bool = False,
    ):
        """`only_last_turn` supervises the last assistant turn alone. Raises `UserError`: as `ChatTemplate`."""
        self._finder = SpanFinder(ChatTemplate(tokenizer, template_options, _TODAY))
        self._tokenizer = exact_tokenizer(tokenizer)
        self._length = length
        self._only_last_turn = only_last_turn

    def encode(self, records: Sequence[Record]) -> list[Tokens | Rejection]:
        """One for each record, in order: its tokens, or why it is not used.

        Reasons: no assistant turn; refused by the chat template; nothing supervised within the length.

        Raises:
          UserError: a turn cannot be located reliably in a rendering, which the message shows.
        """
        located = map(self._locate, records)
        batches = by_characters(located, lambda item: len(item.text) if isinstance(item, _Located) else 0)
        return [result for batch in batches for result in self._encode_batch(batch)]

    def _locate(self, record: Record) -> "_Located | Rejection":
        if not any(message["role"] == "assistant" for message in record.messages):
            return Rejection(record.where, record.id, "no assistant turn")
        try:
            text, spans = self._finder.assistant_spans(record.messages, record.unfinished, record.tools)
        except RecordRefused as error:
            return Rejection(record.where, record.id, f"refused by the chat template: {error}")
        except UserError as error:
            raise UserError(f"{record.where}: {error}") from error
        return _Located(record.where, record.id, text, spans[-1:] if self._only_last_turn else spans)

    def _encode_batch(self, batch: "list[_Located | Rejection]") -> Iterator[Tokens | Rejection]:
        texts = [item.text for item in batch if isinstance(item, _Located)]
        encodings = iter(self._tokenizer.encode_batch(texts, add_special_tokens=False))
        for item in batch:
            if isinstance(item, Rejection):
                yield item
                continue
            encoding = next(encodings)
            mask = span_mask(encoding, item.spans, self._length)
            if mask.any():
                ids = np.array(encoding.ids[: self._length], np.int32)
                yield Tokens(item.where, item.id, ids, mask, len(encoding))
            else:
                yield Rejection(item.where, item.id, "nothing supervised within the length")


def exact_tokenizer(tokenizer: transformers.PreTrainedTokenizerBase) -> tokenizers.Tokenizer:
    """The tokenizer with exact offsets: a byte-level post-processor may trim the spaces off a token's offsets."""
    if not tokenizer.is_fast:
        raise UserError(f"{tokenizer.name_or_path}: the tokenizer gives no offsets; it needs a tokenizer.json")
    exact = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    exact.post_processor = None
    exact.no_truncation()
    exact.no_padding()
    return exact


def span_mask(encoding: tokenizers.Encoding, spans: list[tuple[int, int]], length: int) -> np.ndarray:
    """bool (at most `length`,): the tokens that lie wholly inside one of the spans, which are characters.

    A token without characters (a prefix that the tokenizer inserts) at a span's edge belongs to what lies outside.
    """
    mask = np.zeros(min(len(encoding), length), bool)
    tokens = range(len(mask))
    # A token's offsets never decrease, so its edges are searched for: a list of all offsets is slow to make.
    for start, end in spans:
        first = bisect.bisect_left(tokens, start, key=lambda token: encoding.token_to_chars(token)[0])
        last = bisect.bisect_right(tokens, end, lo=first, key=lambda token: encoding.token_to_chars(token)[1])
        while first < last and encoding.token_to_chars(first) == (start, start):
            first += 1
        while first < last and encoding.token_to_chars(last - 1) == (end, end):
            last -= 1
        mask[first:last] = True
    return mask


@dataclasses.dataclass(frozen=True)
class _Located:
    where: str
    id: str
    text: str
    spans: list[tuple[int, int]]


def by_characters(items: Iterable[_Item], characters: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """The items in order, so many at a time that the tokenizer gets them at one time."""
    batch: list[_Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += characters(item)
        if total >= _BATCH_CHARACTERS:
            yield batch
            batch, total = [], 0
    yield batch
