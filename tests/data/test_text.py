"""Documents to full rows."""

import gzip
import json

import numpy as np
import pytest

from osprey_jax.command import UserError
from osprey_jax.data.text import text_rows


@pytest.fixture
def texts(tmp_path):
    """`texts(documents)`: the pattern of a JSONL file that holds them."""

    def texts(documents):
        path = tmp_path / "t.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
        return [str(path)]

    return texts


def unpack(rows):
    """The tokens of each segment, in order, and its positions."""
    segments = []
    for index in range(len(rows)):
        row = rows[index]
        for segment in range(1, row["segment_ids"].max() + 1):
            inside = row["segment_ids"] == segment
            segments.append((row["token_ids"][inside].tolist(), row["positions"][inside].tolist()))
    return segments


def test_packing_by_hand(texts, make_tokenizer):
    """Documents of 3, 7 and 1 tokens with their EOS in rows of 6."""
    tokenizer = make_tokenizer()
    a, b, c, d, e, f, g, k, x, y, z = tokenizer("abcdefgkxyz", add_special_tokens=False)["input_ids"]
    eos = tokenizer.eos_token_id
    rows = text_rows(texts(["abc", "defgkxy", "z"]), tokenizer, 6)
    assert rows.arrays["token_ids"].tolist() == [
        [a, b, c, eos, d, e],
        [f, g, k, x, y, eos],
        [z, eos, 0, 0, 0, 0],
    ]
    assert rows.arrays["segment_ids"].tolist() == [[1, 1, 1, 1, 2, 2], [1] * 6, [1, 1, 0, 0, 0, 0]]
    assert rows.arrays["positions"].tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5], [0, 1, 0, 0, 0, 0]]
    assert rows.arrays["loss_mask"].tolist() == [[1] * 6, [1] * 6, [1, 1, 0, 0, 0, 0]]
    where = [f"{texts(['abc', 'defgkxy', 'z'])[0]}:{number}" for number in (1, 2, 3)]
    assert rows.ids == [f"{where[0]} .. {where[1]}", where[1], where[2]]


def test_nothing_lost(texts, make_tokenizer):
    """The rows hold all documents in order, whatever their number and lengths; every row but the last is full."""
    tokenizer, generator = make_tokenizer(), np.random.default_rng(0)
    documents = ["yes hello é🙂" * int(n) + str(i) for i, n in enumerate(generator.integers(0, 9, 600))]
    rows = text_rows(texts(documents), tokenizer, 64)
    eos = tokenizer.eos_token_id
    expected = [t for d in documents for t in [*tokenizer(d, add_special_tokens=False)["input_ids"], eos]]
    real = rows.arrays["segment_ids"] > 0
    assert rows.arrays["token_ids"][real].tolist() == expected
    assert real[:-1].all()
    assert (rows.arrays["loss_mask"] == real).all()
    for tokens, positions in unpack(rows):
        assert positions == list(range(len(tokens)))
        assert eos not in tokens[:-1]
    assert all(array.dtype == np.int32 and array.shape[1] == 64 for array in rows.arrays.values())


def test_exactly_full(texts, make_tokenizer):
    """A last row that is full gets no empty one after it."""
    assert text_rows(texts(["abc", "def"]), make_tokenizer(), 4).arrays["segment_ids"].tolist() == [[1] * 4] * 2


def test_kinds_of_files(tmp_path, make_tokenizer):
    """`.txt` is one document; `.jsonl.gz` one a line; an empty document is none; fields beside `text` pass."""
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfab\n")
    (tmp_path / "b.txt").write_text("")
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as packed:
        packed.write('{"text": "cd", "url": "u"}\n\n{"text": ""}\n{"text": "ef"}\n')
    tokenizer = make_tokenizer()
    rows = text_rows([str(tmp_path / "*.txt"), str(tmp_path / "*.gz")], tokenizer, 100)
    decoded = [tokenizer.decode(tokens) for tokens, _ in unpack(rows)]
    assert decoded == ["ab\n</s>", "cd</s>", "ef</s>"]
    assert rows.ids == [f"{tmp_path / 'a.txt'} .. {tmp_path / 'c.jsonl.gz'}:4"]


@pytest.mark.parametrize("content", ["", "\n", '{"text": ""}\n'])
def test_no_text(tmp_path, make_tokenizer, content):
    """No document is an error."""
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match="no text"):
        text_rows([str(tmp_path / "a.jsonl")], make_tokenizer(), 8)


def test_no_match(tmp_path, make_tokenizer):
    """A pattern that matches nothing is named."""
    with pytest.raises(UserError, match=r"\*\.txt: matches no file"):
        text_rows([str(tmp_path / "*.txt")], make_tokenizer(), 8)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": 1}\n', r"a\.jsonl:2: expected"),
        ("a.jsonl", b'{"text": "a"}\n{"te', r"a\.jsonl:2: not valid JSON"),
        ("a.txt", b"\xff", r"a\.txt: cannot be read as UTF-8"),
        ("a.csv", b"a", r"a\.csv: text is read from"),
    ],
)
def test_bad_files(tmp_path, make_tokenizer, name, content, message):
    """What cannot be read is named with its line."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        text_rows([str(tmp_path / name)], make_tokenizer(), 8)


def test_no_eos(texts, make_tokenizer):
    """Documents cannot be told apart without EOS."""
    with pytest.raises(UserError, match="eos_token"):
        text_rows(texts(["abc"]), make_tokenizer(eos_token=None), 8)
