"""What blocks become: rows of conversations and of text, checked against their records' own tokens."""

import json

import numpy as np
import pytest

from osprey_jax.command import UserError
from osprey_jax.data.recipes import ConversationRecipe, TextRecipe
from osprey_jax.data.records import Block
from osprey_jax.data.tokenizer import load_tokenizer
from tests.conftest import GOLDEN

TARGET = GOLDEN / "qwen3/target"
RECORDS = [json.loads(line) for line in (GOLDEN / "qwen3/train.jsonl").read_text().splitlines()]


def block(records, first=1, path="a.jsonl"):
    return Block(path, first, [json.dumps(record).encode() + b"\n" for record in records])


def conversations(*blocks, length=400, packing=True, only_last_turn=False):
    make_rows, _ = ConversationRecipe(TARGET, length, {}, only_last_turn, packing).open()
    return make_rows(list(blocks))


def segments(rows):
    """{record id: (its tokens, its mask)} of all rows."""
    found = {}
    for row in rows:
        edges = np.cumsum(row.segment_lengths)[:-1]
        parts = zip(row.ids, np.split(row.token_ids, edges), np.split(row.loss_mask, edges), strict=True)
        for name, tokens, mask in parts:
            assert name not in found
            found[name] = (tokens.tolist(), mask.tolist())
    return found


def test_golden_conversations():
    """One a row, in order: the rendering's tokens, the answers under the mask."""
    made = conversations(block(RECORDS), packing=False)
    tokenizer = load_tokenizer(TARGET)
    assert [row.ids for row in made.rows] == [[record["id"]] for record in RECORDS]
    for row, record in zip(made.rows, RECORDS, strict=True):
        turns = record["conversations"]
        text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
        answers = "".join(turn["content"] + "<|im_end|>" for turn in turns if turn["role"] == "assistant")
        assert tokenizer.decode(row.token_ids) == text
        assert tokenizer.decode(row.token_ids[row.loss_mask]) == answers
        assert row.segment_lengths == [len(row.token_ids)]
    assert made.lengths == [len(row.token_ids) for row in made.rows] and not made.rejections and not made.cut


def test_packing_keeps_every_record():
    """The same tokens and masks as one a row, fewer rows, none longer than a row."""
    alone, packed = conversations(block(RECORDS), packing=False), conversations(block(RECORDS))
    assert segments(packed.rows) == segments(alone.rows)
    assert len(packed.rows) < len(alone.rows) and max(len(row.token_ids) for row in packed.rows) <= 400
    assert packed.lengths == alone.lengths


def test_more_records_than_any_batch():
    """1024 records and one more in one block: each is there once, with its own tokens, none at a batch's edge lost."""
    turns = lambda i: [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"GNU {i}"}]
    made = conversations(block([{"id": f"r{i}", "conversations": turns(i)} for i in range(1025)]))
    found, decode = segments(made.rows), load_tokenizer(TARGET).decode
    assert list(sorted(found, key=lambda name: int(name[1:]))) == [f"r{i}" for i in range(1025)]
    for i in range(1025):
        tokens, mask = map(np.array, found[f"r{i}"])
        assert decode(tokens[mask]) == f"GNU {i}<|im_end|>"


def test_only_last_turn():
    """Of a conversation's turns the last alone is supervised; the tokens stay."""
    asked = {"role": "user", "content": "a"}
    turns = [asked, {"role": "assistant", "content": "GNU"}, asked, {"role": "assistant", "content": "License"}]
    whole, last = (
        conversations(block([{"id": "x", "conversations": turns}]), only_last_turn=only).rows[0]
        for only in (False, True)
    )
    assert last.token_ids.tolist() == whole.token_ids.tolist()
    decode = load_tokenizer(TARGET).decode
    assert decode(whole.token_ids[whole.loss_mask]) == "GNU<|im_end|>License<|im_end|>"
    assert decode(last.token_ids[last.loss_mask]) == "License<|im_end|>"


def test_every_record_is_accounted_for():
    """Used, cut or rejected, in the order of the lines, across blocks."""
    long = {"id": "long", "conversations": RECORDS[0]["conversations"] * 9}
    unanswered = {"id": "u", "conversations": RECORDS[0]["conversations"][:1]}
    first = Block("a.jsonl", 7, [b"{\n", b"\n", *block([RECORDS[0], unanswered]).items])
    made = conversations(first, block([long], path="b.jsonl"), packing=False)
    assert [(line.where, line.id, line.reason) for line in made.rejections] == [
        ("a.jsonl:7", "a.jsonl:7", "malformed JSON"),
        ("a.jsonl:10", "u", "no assistant turn"),
    ]
    (cut,) = made.cut
    assert (cut.where, cut.id, cut.reason) == ("b.jsonl:1", "long", f"cut at 400 of {made.lengths[1]} tokens")
    assert [row.ids for row in made.rows] == [[RECORDS[0]["id"]], ["long"]] and len(made.rows[1].token_ids) == 400


def test_a_record_that_fills_a_row_is_not_cut():
    """One token less is a cut."""
    (whole,) = conversations(block(RECORDS[:1])).lengths
    assert not conversations(block(RECORDS[:1]), length=whole).cut
    (cut,) = conversations(block(RECORDS[:1]), length=whole - 1).cut
    assert cut.reason == f"cut at {whole - 1} of {whole} tokens"


# ---- text


@pytest.fixture
def text(make_tokenizer, tmp_path):
    """`text(documents or blocks, length)`: their rows, by a byte-level tokenizer."""
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")

    def text(documents, length):
        if not isinstance(documents[0], Block):
            documents = [block([{"text": document} for document in documents])]
        return TextRecipe(tmp_path / "tokenizer", length).open()[0](documents)

    return text


def test_packing_of_text_by_hand(text, make_tokenizer):
    """Documents of 3, 7 and 1 tokens with their EOS in rows of 6."""
    tokenizer = make_tokenizer()
    a, b, c, d, e, f, g, k, x, y, z = tokenizer("abcdefgkxyz", add_special_tokens=False)["input_ids"]
    eos = tokenizer.eos_token_id
    made = text(["abc", "defgkxy", "z"], 6)
    assert [row.token_ids.tolist() for row in made.rows] == [[a, b, c, eos, d, e], [f, g, k, x, y, eos], [z, eos]]
    assert [row.segment_lengths for row in made.rows] == [[4, 2], [6], [2]]
    assert [row.ids for row in made.rows] == [["a.jsonl:1", "a.jsonl:2"], ["a.jsonl:2"], ["a.jsonl:3"]]
    assert all(row.loss_mask.all() and row.loss_mask.dtype == bool for row in made.rows)


def test_no_text_is_lost(text, make_tokenizer):
    """The rows hold all documents in order, whatever their number and lengths; every row but the last is full."""
    tokenizer, generator = make_tokenizer(), np.random.default_rng(0)
    documents = ["yes hello é🙂" * int(n) + str(i) for i, n in enumerate(generator.integers(0, 9, 600))]
    made = text(documents, 64)
    expected = [
        token
        for document in documents
        for token in [*tokenizer(document, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    ]
    assert np.concatenate([row.token_ids for row in made.rows]).tolist() == expected
    assert {len(row.token_ids) for row in made.rows[:-1]} == {64}
    assert sum(made.lengths) == len(expected) and len(made.lengths) == 600
    for row in made.rows:
        ends = np.cumsum(row.segment_lengths)
        inner = np.flatnonzero(row.token_ids == tokenizer.eos_token_id) + 1
        assert set(inner) - {len(row.token_ids)} == set(ends) - {len(row.token_ids)}


def test_a_full_row_has_none_after_it(text):
    assert [row.segment_lengths for row in text(["abc", "def"], 4).rows] == [[4], [4]]


def test_a_document_in_two_blocks_has_one_end(text, make_tokenizer):
    """Only the last piece of a .txt file is followed by EOS."""
    pieces = [Block("a.txt", 1, [b"ab\n"], ends=False), Block("a.txt", 2, [b"cd"], ends=True)]
    made = text(pieces, 100)
    assert make_tokenizer().decode(made.rows[0].token_ids) == "ab\ncd</s>"
    assert len(made.lengths) == 1 and made.rows[0].segment_lengths == [len(made.rows[0].token_ids)]


def test_rejected_text(text):
    """Lines without text are listed; an empty document is none."""
    lines = [b"{\n", b'{"text": 1}\n', b'{"text": ""}\n', b"\n", b'{"text": "a"}\n']
    made = text([Block("a.jsonl", 1, lines)], 8)
    assert [(line.where, line.reason) for line in made.rejections] == [
        ("a.jsonl:1", "malformed JSON"),
        ("a.jsonl:2", "no text"),
    ]
    assert len(made.lengths) == 1


def test_text_needs_an_end_of_document(make_tokenizer, tmp_path):
    """Documents cannot be told apart without EOS."""
    make_tokenizer(eos_token=None).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="eos_token"):
        TextRecipe(tmp_path, 8).open()
