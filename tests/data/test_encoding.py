"""Records to tokens and masks, at the edges."""

import random
import time

import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import models, normalizers, pre_tokenizers, trainers

import osprey_jax.data.encoding
from osprey_jax.command import UserError
from osprey_jax.data.conversations import Record
from osprey_jax.data.encoding import ConversationEncoder, Tokens, span_mask
from osprey_jax.data.records import Rejection
from tests.data.test_spans import CHATML, LLAMA, QWEN3, assistant, user

PAIR = [user("hi"), assistant("yes no yes no")]


def record(messages, number=1, **fields) -> Record:
    return Record(f"a.jsonl:{number}", f"id{number}", messages, **fields)


@pytest.fixture
def encode(make_tokenizer):
    """`encode(messages, length, template, **options)`: (tokenizer, what becomes of that one record)."""

    def encode(messages, length=10**6, template=CHATML, only_last_turn=False, **fields):
        tokenizer = make_tokenizer(template)
        encoder = ConversationEncoder(tokenizer, length, only_last_turn=only_last_turn)
        [result] = encoder.encode([record(messages, **fields)])
        return tokenizer, result

    return encode


def taught(tokenizer, tokens: Tokens) -> str:
    return tokenizer.decode(tokens.token_ids[tokens.loss_mask])


def test_tokens(encode):
    """The tokens of the whole rendering, and which of them the model writes."""
    tokenizer, tokens = encode(PAIR)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes no yes no<|im_end|>\n"
    assert (tokens.where, tokens.id, tokens.whole) == ("a.jsonl:1", "id1", len(tokens.token_ids))
    assert (tokens.token_ids.dtype, tokens.loss_mask.dtype) == (np.int32, np.bool_)
    assert tokens.token_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert taught(tokenizer, tokens) == "yes no yes no<|im_end|>"


def test_results_in_order(make_tokenizer, monkeypatch):
    """One for each record, in their order, however they are batched for the tokenizer."""
    records = [
        record([user("hi"), assistant("no " * number)] if number % 3 else [user("hi")], number) for number in range(20)
    ]
    encoder = ConversationEncoder(make_tokenizer(CHATML), 100)
    whole = encoder.encode(records)
    assert [(result.where, result.id) for result in whole] == [(item.where, item.id) for item in records]
    assert [isinstance(result, Rejection) for result in whole] == [number % 3 == 0 for number in range(20)]
    monkeypatch.setattr(osprey_jax.data.encoding, "_BATCH_CHARACTERS", 150)
    for one, other in zip(whole, encoder.encode(records), strict=True):
        assert type(one) is type(other)
        assert isinstance(one, Rejection) or one.token_ids.tolist() == other.token_ids.tolist()
    assert encoder.encode([]) == []


@pytest.mark.parametrize("messages", [[], [{"role": "system", "content": "s"}], [user("hi")]])
def test_no_assistant_turn(encode, messages):
    """Nothing, a system turn alone, a question alone: a rejection, and no template is asked to render it."""
    assert encode(messages)[1] == Rejection("a.jsonl:1", "id1", "no assistant turn")


def test_two_users_in_a_row(encode):
    """Both are context."""
    tokenizer, tokens = encode([user("hi"), user("hello"), assistant("yes")])
    assert "hello<|im_end|>" in tokenizer.decode(tokens.token_ids)
    assert taught(tokenizer, tokens) == "yes<|im_end|>"


def test_refused_by_the_template(encode):
    """A template that insists on turns in alternation rejects a record, with its own words."""
    strict = CHATML + "{% if messages | length == 3 %}{{ raise_exception('roles must alternate') }}{% endif %}"
    _, rejection = encode([user("hi"), user("hello"), assistant("yes")], template=strict)
    assert rejection.reason == "refused by the chat template: roles must alternate"


@pytest.mark.parametrize("content", ["", "I add."])
def test_lost_tool_calls(encode, content):
    """A turn without the calls that it made would teach to stop where the model has to call."""
    call = {"function": {"name": "add", "arguments": {}}}
    messages = [user("hi"), assistant(content, tool_calls=[call]), {"role": "tool", "content": "3"}, assistant("3")]
    assert encode(messages)[1].reason == "refused by the chat template: it leaves out tool calls"
    tokenizer, tokens = encode(messages, template=QWEN3)
    assert "<tool_call>add{}</tool_call><|im_end|>" in taught(tokenizer, tokens)


def test_template_that_cannot_be_located(encode):
    """It concerns all records, so the run stops and names the first."""
    twice = "{% for m in messages %}{{ m.content + m.content + eos_token }}{% endfor %}"
    with pytest.raises(UserError, match=r"^a\.jsonl:1: the chat template cannot be read: .* 'hihi</s>"):
        encode(PAIR, template=twice)


def test_cut(encode):
    """A cut keeps the beginning with its mask, inside an assistant turn too, and says how long the whole was."""
    _, whole = encode(PAIR)
    first = int(whole.loss_mask.argmax())
    _, tokens = encode(PAIR, first + 2)
    assert tokens.token_ids.tolist() == whole.token_ids[: first + 2].tolist()
    assert tokens.loss_mask.tolist() == [False] * first + [True, True]
    assert tokens.whole == len(whole.token_ids)


def test_nothing_left_after_the_cut(encode):
    """A row of context alone teaches nothing."""
    first = int(encode(PAIR)[1].loss_mask.argmax())
    assert encode(PAIR, first)[1].reason == "nothing supervised within the length"


def test_only_last_turn(encode):
    """Earlier turns are context; a record whose last turn is cut away is of no use."""
    messages = [*PAIR, user("no"), assistant("hello"), user("no")]
    tokenizer, tokens = encode(messages, only_last_turn=True)
    assert taught(tokenizer, tokens) == "hello<|im_end|>"
    _, whole = encode(messages)
    assert whole.token_ids.tolist() == tokens.token_ids.tolist()
    assert encode(messages, int(tokens.loss_mask.argmax()), only_last_turn=True)[1].reason.startswith("nothing")


@pytest.mark.parametrize("only_last_turn", [True, False])
def test_unfinished_turn(encode, only_last_turn):
    """Of a turn that a limit cut, the terminator is not the model's, in the last turn too."""
    messages = [user("hi"), assistant("hello"), user("no"), assistant("yes")]
    tokenizer, tokens = encode(messages, only_last_turn=only_last_turn, unfinished=frozenset({1}))
    assert taught(tokenizer, tokens) == "yes" if only_last_turn else "hello<|im_end|>yes"


@pytest.mark.parametrize(("template", "expected"), [(CHATML, " \n <|im_end|>"), (LLAMA, "<|eot_id|>")])
def test_turn_of_only_whitespace(encode, template, expected):
    """It is what the template makes of it: the whitespace, or nothing but the terminator."""
    tokenizer, tokens = encode([user("hi"), assistant(" \n ")], template=template)
    assert taught(tokenizer, tokens) == expected


def test_empty_thinking_block(encode):
    """The template's own is not the model's; the record's own text is, where the template leaves it."""
    tokenizer, tokens = encode([user("hi"), assistant("yes")], template=QWEN3)
    assert "<think>\n\n</think>\n\nyes" in tokenizer.decode(tokens.token_ids)
    assert taught(tokenizer, tokens) == "yes<|im_end|>"
    tokenizer, tokens = encode([user("hi"), assistant("<think>\n\n</think>\n\nyes")])
    assert taught(tokenizer, tokens) == "<think>\n\n</think>\n\nyes<|im_end|>"


def test_special_tokens_in_a_users_text(encode):
    """They become the special tokens, as when serving tokenizes the rendering, and are not taken for turns."""
    asked = "no<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
    tokenizer, tokens = encode([user(asked), assistant("yes"), user(asked), assistant("no")])
    text = tokenizer.decode(tokens.token_ids)
    assert tokens.token_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert (tokens.token_ids == tokenizer.convert_tokens_to_ids("<|im_end|>")).sum() == 8
    assert taught(tokenizer, tokens) == "yes<|im_end|>no<|im_end|>"


def test_special_tokens_in_the_models_text(encode):
    """A turn that quotes a terminator goes on to its own."""
    tokenizer, tokens = encode([user("hi"), assistant("no<|im_end|>\n<|im_start|>user\nyes"), user("hi")])
    assert taught(tokenizer, tokens) == "no<|im_end|>\n<|im_start|>user\nyes<|im_end|>"


def test_emoji(encode):
    """Several tokens of one character are inside, or outside, together."""
    tokenizer, tokens = encode([user("🙂"), assistant("🙂👨‍👩‍👧é")])
    assert taught(tokenizer, tokens) == "🙂👨‍👩‍👧é<|im_end|>"


def test_half_a_surrogate(make_tokenizer):
    """No tokenizer can encode it, so records with one are rejected when they are read: here it is an error."""
    with pytest.raises((UnicodeEncodeError, TypeError)):
        ConversationEncoder(make_tokenizer(CHATML), 100).encode([record([user("\ud83d"), assistant("yes")])])


def test_megabyte(encode):
    """One message of a megabyte, of the user's or the model's, is tokenized and cut within seconds."""
    start = time.perf_counter()
    long = "yes no " * 150_000
    tokenizer, tokens = encode([user(long), assistant(long), user("hi"), assistant("no")])
    assert taught(tokenizer, tokens) == long + "<|im_end|>no<|im_end|>"
    assert len(encode([user("hi"), assistant(long)], 100)[1].token_ids) == 100
    assert time.perf_counter() - start < 20


def test_thousand_turns(encode):
    """Equal ones too are found without a rendering for each."""
    start = time.perf_counter()
    messages = [user("yes"), assistant("no")] * 1000
    tokenizer, tokens = encode(messages)
    assert taught(tokenizer, tokens) == "no<|im_end|>" * 1000
    assert time.perf_counter() - start < 10


# ---- masks


def mask_of_all_offsets(encoding: tokenizers.Encoding, spans: list[tuple[int, int]], length: int) -> np.ndarray:
    """`span_mask` by its definition, token by token."""
    mask = np.zeros(min(len(encoding), length), bool)
    for token, (first, last) in enumerate(encoding.offsets[:length]):
        for start, end in spans:
            empty_at_edge = first == last and first in (start, end)
            mask[token] |= start <= first and last <= end and not empty_at_edge
    return mask


SPLITS = {
    "bytes": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "prefix": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "words": pre_tokenizers.Metaspace(),
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
}
FORMS = {
    "plain": normalizers.Sequence([]),
    "nfc": normalizers.NFC(),
    "nfkd": normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents()]),
    "prepend": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
}
PIECES = [*"ab c\n ▁é日🙂.1", "e\u0301", "a\u0301\u0323", "\u1112\u1161\u11ab", "ﬁ", "½", "İ", "👨‍👩‍👧", "<s>", "</s>"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("split", SPLITS)
def test_mask(split, form):
    """The tokens found from the spans' edges are those whose offsets lie inside, for all sorts of tokenizers."""
    rng = random.Random(f"{split} {form}")
    text = lambda: "".join(rng.choices(PIECES, k=rng.randrange(30)))
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.normalizer = SPLITS[split], FORMS[form]
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([text() for _ in range(100)], trainer)
    for _ in range(60):
        encoding = tokenizer.encode(whole := text(), add_special_tokens=False)
        edges = sorted(rng.choices(range(len(whole) + 1), k=4))
        spans, length = [(edges[0], edges[1]), (edges[2], edges[3])], rng.choice([5, 1000])
        expected = mask_of_all_offsets(encoding, spans, length)
        assert span_mask(encoding, spans, length).tolist() == expected.tolist(), (whole, spans)


def test_tokens_without_characters(make_tokenizer):
    """At a span's edge they belong to what lies outside, inside they are the model's."""
    encoding = make_tokenizer().backend_tokenizer.encode("no  yes  no")  # the offsets leave spaces out
    assert encoding.offsets == [(0, 2), (3, 3), (4, 7), (8, 8), (9, 11)]
    assert span_mask(encoding, [(3, 11)], 100).tolist() == [False, False, True, True, True]
    assert span_mask(encoding, [(0, 8)], 100).tolist() == [True, True, True, False, False]


def test_tokenizer_that_truncates(make_tokenizer):
    """A limit or padding of the tokenizer's own has no effect, in the tokenizer given either."""
    tokenizer = make_tokenizer(CHATML)
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=500)
    [tokens] = ConversationEncoder(tokenizer, 1000).encode([record(PAIR)])
    assert tokenizer.decode(tokens.token_ids).endswith("yes no yes no<|im_end|>\n")
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 5


def test_tokenizer_without_offsets():
    """It cannot be masked."""

    class Slow(transformers.PreTrainedTokenizer):
        vocab_size = 0
        get_vocab = dict

    slow = Slow()
    slow.chat_template = CHATML
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        ConversationEncoder(slow, 100)
