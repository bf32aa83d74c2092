"""One conversation at a time, for tests: what `ConversationEncoder` does in batches."""

import numpy as np

from osprey_jax.data.encoding import exact_tokenizer, span_mask
from osprey_jax.data.rendering import ChatTemplate
from osprey_jax.data.spans import SpanFinder


def assistant_spans(tokenizer, messages, template_options=None):
    """(rendering, assistant spans in characters)."""
    return SpanFinder(ChatTemplate(tokenizer, template_options)).assistant_spans(messages)


def tokenize(tokenizer, messages, length, template_options=None):
    """(token_ids, loss_mask), at most `length` of them."""
    text, spans = assistant_spans(tokenizer, messages, template_options)
    encoding = exact_tokenizer(tokenizer).encode(text, add_special_tokens=False)
    return np.array(encoding.ids[:length], np.int32), span_mask(encoding, spans, length).astype(np.int32)
