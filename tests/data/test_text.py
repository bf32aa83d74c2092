"""Documents in data files, and a reason for each line that holds none."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from osprey_jax.data.records import Rejection, read_blocks
from osprey_jax.data.text import Document, block_documents


@pytest.fixture
def read(tmp_path):
    """`read(name, bytes, block_bytes)`: what a file of that content holds, its path left out of the places."""

    def read(name: str, content: bytes, size: int = 1000) -> list[Document | Rejection]:
        path = tmp_path / name
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return list(documents(path, size))

    return read


def documents(path, size):
    for block in read_blocks([path], size):
        for found in block_documents(block):
            where = found.where.replace(str(path), "")
            if isinstance(found, Document):
                yield Document(where, found.text, found.ends)
            else:
                yield Rejection(where, found.id.replace(str(path), ""), found.reason)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("size", [1, 1000])
def test_jsonl(read, name, size):
    """A document a line, named by its place whatever the blocks; fields beside `text` pass, an empty text is none."""
    content = b'\xef\xbb\xbf{"text": "ab\\r\\n\xc3\xa9", "url": "u"}\r\n\n{"text": ""}\n \r\n{"text": "cd"}'
    assert read(name, content, size) == [Document(":1", "ab\r\né"), Document(":5", "cd")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "tr', "malformed JSON"),
        (b'{"text": "\xff"}', "malformed JSON"),
        (b'{"text": "\\ud83d"}', "malformed JSON"),
        (b'{"content": "a"}', "no text"),
        (b'{"text": 1}', "no text"),
        (b'{"text": null}', "no text"),
        (b'["text"]', "no text"),
        (b'"text"', "no text"),
    ],
)
def test_lines_without_text(read, line, reason):
    """Each has a reason, and the lines around it are read all the same."""
    found = read("a.jsonl", b'{"text": "a"}\n' + line + b'\n{"text": "b"}')
    assert found == [Document(":1", "a"), Rejection(":2", ":2", reason), Document(":3", "b")]


def test_names_of_rejected_lines(read):
    """A line that has an id is listed under it."""
    lines = [b'{"id": "x"}', b'{"uuid": 7, "text": 1}', b'{"id": "", "uuid": "u"}']
    assert [rejection.id for rejection in read("a.jsonl", b"\n".join(lines))] == ["x", "7", "u"]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_txt(read, name):
    """A file is one document, its line ends those of Unix."""
    assert read(name, b"\xef\xbb\xbfone\r\n\r\ntwo\rthree\n") == [Document("", "one\n\ntwo\nthree\n")]
    assert read(name, b"") == []


def test_txt_larger_than_a_block(read):
    """Its pieces are documents that go on, up to the last."""
    text = "".join(f"line {number} of é\n" for number in range(30))
    found = read("a.txt", text.encode(), 100)
    assert "".join(document.text for document in found) == text
    assert [document.ends for document in found] == [False] * (len(found) - 1) + [True]
    assert [document.where for document in found[:3]] == ["", ", part 2", ", part 3"]


def test_txt_that_is_no_text(read):
    """What is not UTF-8 has a reason."""
    assert read("a.txt", "é".encode("utf-16")) == [Rejection("", "", "not UTF-8")]


def test_parquet(tmp_path):
    """A document a row, numbered across row groups; an empty or missing text is none; bad bytes are listed."""
    texts = pyarrow.array([b"a\r\n", b"", None, b"\xff", "é".encode()], pyarrow.binary())
    texts = pyarrow.StringArray.from_buffers(5, *texts.buffers()[1:], texts.buffers()[0])  # as a careless writer does
    pyarrow.parquet.write_table(
        pyarrow.table({"id": [*"abcde"], "text": texts}), tmp_path / "a.parquet", row_group_size=2
    )
    expected = [Document(":1", "a\r\n"), Rejection(":4", ":4", "not UTF-8"), Document(":5", "é")]
    assert list(documents(tmp_path / "a.parquet", 1)) == expected
    assert list(documents(tmp_path / "a.parquet", 1000)) == expected


def test_a_document_larger_than_a_block(read):
    """Of JSONL it stays whole, in a block with what precedes it."""
    text = "long " * 1000
    lines = b"".join(json.dumps({"text": t}).encode() + b"\n" for t in ("a", text, "b"))
    assert read("a.jsonl", lines, 100) == [Document(":1", "a"), Document(":2", text), Document(":3", "b")]
