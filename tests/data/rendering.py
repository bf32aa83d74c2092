"""One conversation at a time, for tests: what `ConversationEncoder` does in batches."""

import datetime

import numpy as np

from osprey_jax.data.conversations import Record
from osprey_jax.data.encoding import ConversationEncoder, exact_tokenizer, span_mask
from osprey_jax.data.rendering import ChatTemplate
from osprey_jax.data.spans import SpanFinder

TODAY = datetime.date(2025, 1, 1)  # the encoder's


def assistant_spans(tokenizer, messages, template_options=None):
    """(rendering, assistant spans in characters)."""
    return SpanFinder(ChatTemplate(tokenizer, template_options, TODAY)).assistant_spans(messages)


def tokenize(tokenizer, messages, length, template_options=None):
    """(token_ids, loss_mask), at most `length` of them."""
    text, spans = assistant_spans(tokenizer, messages, template_options)
    encoding = exact_tokenizer(tokenizer).encode(text, add_special_tokens=False)
    return np.array(encoding.ids[:length], np.int32), span_mask(encoding, spans, length).astype(np.int32)


def supervised(tokenizer, messages, options=None, **fields):
    """The supervised text of each turn: from the characters, checked against the tokens of the encoder."""
    finder = SpanFinder(ChatTemplate(tokenizer, options, TODAY))
    record = Record("a.jsonl:1", "a", messages, **fields)
    text, spans = finder.assistant_spans(record.messages, record.unfinished, record.tools)
    parts = [text[start:end] for start, end in spans]
    [tokens] = ConversationEncoder(tokenizer, 10**6, options).encode([record])
    assert tokenizer.decode(tokens.token_ids[tokens.loss_mask]) == "".join(parts)
    assert tokenizer.decode(tokens.token_ids) == text
    return parts
