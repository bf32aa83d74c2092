"""One conversation at a time, for tests: what `conversation_rows` does in batches."""

from osprey_jax.data.conversations import _encoder, _masked
from osprey_jax.data.spans import ChatTemplate


def assistant_spans(tokenizer, messages, template_options=None):
    """(rendering, assistant spans in characters)."""
    return ChatTemplate(tokenizer, template_options).assistant_spans(messages)


def tokenize(tokenizer, messages, length, template_options=None):
    """(token_ids, loss_mask), at most `length` of them."""
    text, spans = assistant_spans(tokenizer, messages, template_options)
    return _masked(_encoder(tokenizer).encode(text, add_special_tokens=False), spans, length)
