"""Data files in blocks: nothing lost, nothing moved, memory bounded."""

import gzip
import itertools
import os
import pickle
import random
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import tokenizers

from osprey_jax.command import UserError
from osprey_jax.data.records import (
    Block,
    content_fingerprint,
    find_files,
    group_blocks,
    kind_of,
    parse_line,
    read_blocks,
    read_json_lines,
)
from osprey_jax.data.text import block_documents

MARK = b"\xef\xbb\xbf"


@pytest.fixture
def blocks(tmp_path):
    """`blocks(content, size, name)`: those of a file with that content."""

    def blocks(content: bytes, size: int, name: str = "a.jsonl") -> list[Block]:
        path = tmp_path / name
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        found = list(read_blocks([path], size))
        assert all(block.path == str(path) for block in found)
        return found

    return blocks


def items(blocks) -> list[bytes]:
    return [item for block in blocks for item in block.items]


# ---- lines


def test_lines_by_hand(blocks):
    """A block ends with the line that fills it; blank lines count; the last line needs no end."""
    made = blocks(b"{1}\n\n{2}\r\n{3}\n{4", 6)
    assert [(block.first, block.items) for block in made] == [
        (1, [b"{1}\n", b"\n", b"{2}\r\n"]),
        (4, [b"{3}\n", b"{4"]),
    ]
    assert all(block.ends for block in made)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("size", [1, 100, 5000, 10**6])
def test_no_line_is_lost(blocks, name, size):
    """Blocks together are the file, numbered on, each no more than a line above the size, whatever the lines."""
    generator = random.Random(size)
    lines = [generator.randbytes(generator.choice([0, 5, 3000])).replace(b"\n", b"") + b"\n" for _ in range(200)]
    made = blocks(b"".join(lines), size, name)
    assert items(made) == lines
    assert [block.first for block in made] == [1, *itertools.accumulate((len(b.items) for b in made), initial=1)][1:-1]
    for block in made:
        assert sum(map(len, block.items[:-1])) <= size
    assert all(sum(map(len, block.items)) > size for block in made[:-1])


def test_byte_order_mark(blocks):
    """It is no part of the first line or of a text; elsewhere it is content."""
    assert items(blocks(MARK + b"{}\n" + MARK + b"\n", 1)) == [b"{}\n", MARK + b"\n"]
    assert items(blocks(MARK + b"a" + MARK, 100, "a.txt")) == [b"a" + MARK]


def test_gzip_of_several_members(tmp_path):
    """Files that were joined by `cat`."""
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"1\n2\n") + gzip.compress(b"3\n"))
    assert items(read_blocks([tmp_path / "a.jsonl.gz"], 100)) == [b"1\n", b"2\n", b"3\n"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz"])
@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b"{}\n" * 10**4)[:-9], gzip.compress(b"{}\n" * 99)[:20] + b"\xff" * 20],
    ids=["no gzip", "cut short", "corrupt"],
)
def test_broken_gzip(tmp_path, name, content):
    """It is named, by each way of reading."""
    path = tmp_path / name
    path.write_bytes(content)
    for read in (lambda: read_blocks([path], 100), lambda: read_json_lines(path)):
        with pytest.raises(UserError, match=rf"{name}: cannot be read"):
            list(read())


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt"])
def test_empty_file(blocks, name):
    """It has no block."""
    assert blocks(b"", 10, name) == []


def test_file_of_no_text(blocks, tmp_path):
    """A byte-order mark alone, or a table without rows, has no block either."""
    assert blocks(MARK, 10, "a.txt") == []
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "a.parquet")
    assert list(read_blocks([tmp_path / "a.parquet"], 10)) == []


# ---- files


def test_files_in_order(tmp_path):
    """One after another, each numbered from 1, no block of two files; a block travels to another process."""
    for name, content in (("b.jsonl", b"1\n2\n"), ("a.txt", b"hello"), ("c.jsonl", b"3")):
        (tmp_path / name).write_bytes(content)
    made = list(read_blocks([tmp_path / "b.jsonl", tmp_path / "a.txt", tmp_path / "c.jsonl"], 100))
    assert [(block.path[-7:], block.first, block.items) for block in made] == [
        ("b.jsonl", 1, [b"1\n", b"2\n"]),
        ("0/a.txt", 1, [b"hello"]),
        ("c.jsonl", 1, [b"3"]),
    ]
    assert pickle.loads(pickle.dumps(made)) == made


def test_group_blocks():
    """Small ones go together as long as they fit, in order; a large one is alone."""
    made = [Block("a", number, [b"x" * size]) for number, size in enumerate([25, 3, 4, 3, 1, 2, 10, 1])]
    grouped = list(group_blocks(made, 10))
    assert [[len(block.items[0]) for block in group] for group in grouped] == [[25], [3, 4, 3], [1, 2], [10], [1]]
    assert [block for group in grouped for block in group] == made


def test_kinds():
    """By the name alone."""
    names = ["a.jsonl", "a.jsonl.gz", "a.txt", "a.txt.gz", "a.b.parquet"]
    assert [kind_of(name) for name in names] == ["jsonl", "jsonl", "txt", "txt", "parquet"]


@pytest.mark.parametrize(
    ("name", "message"), [("a.csv", "data is read from .jsonl"), ("a.json", "jq"), ("parquet", "data is read from")]
)
def test_other_kinds(tmp_path, name, message):
    """They are refused before anything is read; a JSON array is told from JSONL by name, with what to do."""
    (tmp_path / "a.jsonl").write_bytes(b"{}\n")
    (tmp_path / name).write_bytes(b"[]")
    with pytest.raises(UserError, match=f"{name}: .*{message}"):
        next(read_blocks([tmp_path / "a.jsonl", tmp_path / name], 10))


def test_fingerprint(tmp_path):
    """It knows content, order, where one file ends, and what a file is read as; not names and places."""

    def made(*files: tuple[str, bytes], place: str) -> str:
        (tmp_path / place).mkdir()
        for name, content in files:
            (tmp_path / place / name).write_bytes(content)
        return content_fingerprint([tmp_path / place / name for name, _ in files])

    base = made(("a.jsonl", b"1\n2\n"), ("b.jsonl", b"3\n"), place="base")
    assert made(("x.jsonl", b"1\n2\n"), ("c.jsonl", b"3\n"), place="names") == base
    others = [
        made(("a.jsonl", b"1\n2\n"), ("b.jsonl", b"4\n"), place="content"),
        made(("b.jsonl", b"3\n"), ("a.jsonl", b"1\n2\n"), place="order"),
        made(("a.jsonl", b"1\n"), ("b.jsonl", b"2\n3\n"), place="boundary"),
        made(("a.jsonl", b"1\n2\n3\n"), place="joined"),
        made(("a.jsonl", b"1\n2\n"), ("b.txt", b"3\n"), place="kind"),
    ]
    assert len({base, *others}) == 6


# ---- Parquet

FINEWEB = [
    ("text", pyarrow.string()),
    ("id", pyarrow.string()),
    ("dump", pyarrow.string()),
    ("url", pyarrow.string()),
    ("date", pyarrow.string()),
    ("file_path", pyarrow.string()),
    ("language", pyarrow.string()),
    ("language_score", pyarrow.float64()),
    ("token_count", pyarrow.int64()),
]


@pytest.mark.parametrize("group", [7, 1000])
def test_fineweb(tmp_path, group):
    """The column `text` of its layout, in order; blocks do not depend on the file's row groups."""
    texts = [f"page {number} é🙂 " * (number % 9) for number in range(700)]
    values = {"text": texts, "language_score": [0.9] * 700, "token_count": [*range(700)]}
    columns = {name: pyarrow.array(values.get(name, ["x"] * 700), kind) for name, kind in FINEWEB}
    path = tmp_path / "000_00000.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path, compression="zstd", row_group_size=group)
    made = list(read_blocks([path], 1000))
    assert items(made) == [text.encode() for text in texts]
    firsts = [block.first for block in made]
    assert firsts == [1, *itertools.accumulate((len(block.items) for block in made), initial=1)][1:-1]
    assert all(sum(map(len, block.items[:-1])) <= 1000 < sum(map(len, block.items)) for block in made[:-1])


def test_blocks_of_parquet(tmp_path):
    """A block ends with the text that exceeds its size, as with lines."""
    pyarrow.parquet.write_table(pyarrow.table({"text": ["12345"] * 7}), tmp_path / "a.parquet")
    made = list(read_blocks([tmp_path / "a.parquet"], 10))
    assert [(block.first, len(block.items)) for block in made] == [(1, 3), (4, 3), (7, 1)]


@pytest.mark.parametrize(
    "kind", [pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())], ids=str
)
def test_kinds_of_strings(tmp_path, kind):
    """Strings as other writers store them; a missing text is an empty one."""
    table = pyarrow.table({"text": pyarrow.array(["a", None, "b", "a"]).cast(kind)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert items(read_blocks([tmp_path / "a.parquet"], 100)) == [b"a", b"", b"b", b"a"]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"messages": [["a"]], "id": ["b"]}, 'no column "text", only messages, id '),
        ({"text": [1]}, 'the column "text" holds int64, not strings'),
        ({"text": [["a"]]}, 'the column "text" holds list<.*>, not strings'),
    ],
)
def test_other_columns(tmp_path, table, message):
    """A file without texts is named with what it has."""
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=rf"a\.parquet: {message}"):
        list(read_blocks([tmp_path / "a.parquet"], 100))


def test_broken_parquet(tmp_path):
    """A file that is not Parquet, or was cut short, is named."""
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a" * 100]}), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    for content in (b"", b"no parquet at all", whole[:-9], whole[:20] + b"\xff" * 20 + whole[40:]):
        (tmp_path / "a.parquet").write_bytes(content)
        with pytest.raises(UserError, match=r"a\.parquet: cannot be read"):
            list(read_blocks([tmp_path / "a.parquet"], 100))


# ---- text in pieces

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = {
    "lines": "It's the line of a text; there are 12345 more.\nAnd another!\n",
    "paragraphs": "One (long) paragraph.\n\nAnother, he said...\n\n\n",
    "windows": "A line.\r\nAnother line\r\n\r\n",
    "code": "def f(x):\n    return {'a': x}  # why\n\n\n@g\n/path/to\n// comment\n",
    "paths": "a;\n/b;\n/c;\nthe end;\n/d;\n//e;\n",
    "one line": "words and, more words; no line ends here ",
    "chinese": "他们说:这是一个很长的段落。\n　　另一个段落,没有空格。\n\n　　第三。\n",
    "only wide space": "他们说　　这是一个　很长的段落　　　",
    "marks": "e\u0301a\u0308 \n\u200d\n नमस्ते दुनिया\n",
    "tabs": "a\tb\t\tc \t\n \t12\t\n",
}


@pytest.mark.parametrize("pattern", [GPT2, LLAMA3, O200K], ids=["gpt2", "llama3", "o200k"])
@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("size", [97, 128, 200])
def test_pieces_tokenize_as_the_whole(blocks, pattern, kind, size):
    """A long text is cut only where the pre-tokenizers split, so that its tokens are those of the uncut text."""
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    text = TEXTS[kind] * 30
    made = blocks(text.encode(), size, "a.txt")
    assert b"".join(items(made)).decode() == text and len(made) > 2
    assert all(len(item) <= size for item in items(made))
    assert [block.first for block in made] == [*range(1, len(made) + 1)]
    assert [block.ends for block in made] == [False] * (len(made) - 1) + [True]
    pieces = [document.text for block in made for document in block_documents(block)]
    whole = [word for word, _ in split.pre_tokenize_str(text.replace("\r\n", "\n"))]
    assert [word for piece in pieces for word, _ in split.pre_tokenize_str(piece)] == whole


def test_where_a_text_is_cut(blocks):
    """Behind the last line in the piece, else before the last white space, behind a newline, between characters."""
    assert items(blocks(b"one\ntwo\nthree four", 12, "a.txt"))[0] == b"one\ntwo\n"
    assert items(blocks(b"one\r\ntwo\r\nthree four", 14, "a.txt"))[0] == b"one\r\ntwo\r\n"
    assert items(blocks(b"one two three", 12, "a.txt"))[0] == b"one two"
    assert items(blocks(b"one, two, three", 11, "a.txt"))[0] == b"one, two,"
    assert items(blocks(b"one\n\ntwo\n\nthree", 12, "a.txt"))[0] == b"one\n\ntwo"
    assert items(blocks("。\n　　。。".encode(), 12, "a.txt"))[0] == "。\n".encode()
    assert items(blocks("ééééé".encode(), 5, "a.txt")) == ["éé".encode(), "éé".encode(), "é".encode()]
    assert items(blocks(b"--\r\n--\r\n", 3, "a.txt"))[:2] == [b"--", b"\r\n"]
    assert len(items(blocks("🙂".encode(), 1, "a.txt"))) == 4


def test_cut_of_a_large_piece(blocks):
    """Only its end is searched, wherever a character lies across the place where that begins."""
    for start in ("", "a"):
        first = start + "é" * 39_000
        assert items(blocks(f"{first} {first}".encode(), 10**5, "a.txt"))[0] == first.encode()


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_last_piece(blocks, extra):
    """The last one ends the text, also where it is exactly full."""
    made = blocks(b"x" * (20 + extra), 10, "a.txt.gz")
    assert [len(block.items[0]) for block in made] == [10, 9] if extra < 0 else [10, 10] + [1] * extra
    assert [block.ends for block in made] == [False] * (len(made) - 1) + [True]


@pytest.mark.parametrize("content", [b"\xff" * 50, b"\x80" * 50, b"word \xe9t\xe9 " * 5], ids=["ff", "80", "latin1"])
def test_pieces_of_what_is_no_text(blocks, content):
    """Bytes that are not UTF-8 come through as they are."""
    assert b"".join(items(blocks(content, 12, "a.txt"))) == content


# ---- memory


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt", "a.txt.gz"])
def test_memory(tmp_path, name):
    """A file of 20 MB is read within a few times the size of a block."""
    content = b"".join(b"%d words in a line\n" % number for number in range(10**6))
    (tmp_path / name).write_bytes(gzip.compress(content, 1) if name.endswith(".gz") else content)
    size = len(content)
    del content
    tracemalloc.start()
    try:
        read = sum(sum(map(len, block.items)) for block in read_blocks([tmp_path / name], 2**17))
        assert read == size
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20  # with buffers of 1 MB
    finally:
        tracemalloc.stop()


def test_memory_of_parquet(tmp_path):
    """A row group that is the whole file is not read whole."""
    generator = random.Random(0)
    texts = pyarrow.array([generator.randbytes(500).hex() for _ in range(30_000)])
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", use_dictionary=False)
    del texts
    before, most, read = pyarrow.total_allocated_bytes(), 0, 0
    for block in read_blocks([tmp_path / "a.parquet"], 2**17):
        most, read = max(most, pyarrow.total_allocated_bytes()), read + sum(map(len, block.items))
    assert read == 30_000_000
    assert most - before < 8 * 2**20


# ---- JSON


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b'{"a": 1}\r\n', {"a": 1}),
        ('"é🙂"'.encode(), "é🙂"),
        (b'"\\ud83d\\ude42 \\u00e9"', "🙂 é"),
        (b'"\\\\ud83d"', "\\ud83d"),
    ],
)
def test_valid_lines(line, value):
    """Valid JSON is read as it is, pairs of surrogates too."""
    assert parse_line(line) == value


@pytest.mark.parametrize(
    "line",
    [b"{", b'"\xff"', b'"\\ud83d"', b'"\\uDE42\\uD83D"', b'{"\\udc00": 1}', b"[" * 10**5, b"1" * 10**4, b"{} {}", b" "],
)
def test_lines_that_are_not_valid(line):
    """They are a `ValueError`, half a surrogate pair included, and nothing is raised."""
    assert isinstance(parse_line(line), ValueError)


def test_json_lines(tmp_path):
    """Values with their places; blank lines are none but count; the name does not matter."""
    (tmp_path / "a.partial").write_bytes(MARK + b"1\r\n\r\n \n{\n2")
    (one, first), (two, second), (three, third) = read_json_lines(tmp_path / "a.partial")
    assert [place.rpartition(":")[2] for place in (one, two, three)] == ["1", "4", "5"]
    assert (first, third) == (1, 2) and isinstance(second, ValueError)


def test_one_file_under_two_names(tmp_path, monkeypatch):
    """A record must not be read twice because its file was named twice."""
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("{}")
    Path("link.jsonl").symlink_to("a.jsonl")
    assert find_files(["a.jsonl", str(tmp_path / "a.jsonl"), "./a.jsonl", "*.jsonl"]) == [Path("a.jsonl")]


def test_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.jsonl").write_text("{}")
    assert find_files(["~/a.jsonl"]) == [tmp_path / "a.jsonl"]


def test_name_that_is_not_utf8(tmp_path):
    """Its records could not be named in a report."""
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl")).write_text("{}")
    with pytest.raises(UserError, match="not UTF-8; rename it"):
        find_files([str(tmp_path / "*.jsonl")])


def test_find_files(tmp_path):
    """Globs are sorted, a file that two patterns match is found once, a name is taken before a glob."""
    for name in ("b.txt", "a.txt", "c[1].txt", "d/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = find_files([str(tmp_path / "c[1].txt"), str(tmp_path / "**/*.txt")])
    assert [path.name for path in found] == ["c[1].txt", "a.txt", "b.txt", "e.txt"]
    with pytest.raises(UserError, match=r"x\*: matches no file"):
        find_files([str(tmp_path / "a.txt"), str(tmp_path / "x*")])
    with pytest.raises(UserError, match="no data files"):
        find_files([])
