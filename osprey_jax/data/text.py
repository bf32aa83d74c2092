"""Plain text for pretraining: the documents in a block of a data file."""

import dataclasses
from collections.abc import Iterator

from osprey_jax.data.records import Block, Rejection, kind_of, parse_line, record_name


@dataclasses.dataclass(frozen=True)
class Document:
    """A text. `where`: "file:line" (or row), or the file of a .txt.

    `ends` is False where the text goes on in the next block's first document, so that no EOS may follow.
    """

    where: str
    text: str
    ends: bool = True


def block_documents(block: Block) -> Iterator[Document | Rejection]:
    """The documents in a block, in order; an empty one is none.

    Of JSONL the `text` of each line, of Parquet the column `text`, a .txt file (or a piece of one) whole, its line ends
    as \\n. Reasons for none: malformed JSON; no text; not UTF-8.
    """
    kind = kind_of(block.path)
    for number, item in enumerate(block.items, start=block.first):
        where = f"{block.path}:{number}"
        if kind == "jsonl":
            found = _text_of_line(where, item) if item.strip() else ""
        else:
            if kind == "txt":
                where = block.path if number == 1 else f"{block.path}, part {number}"
                item = item.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            found = _decode(where, item)
        if isinstance(found, Rejection):
            yield found
        elif found:
            yield Document(where, found, block.ends)


def _text_of_line(where: str, line: bytes) -> str | Rejection:
    value = parse_line(line)
    if isinstance(value, ValueError):
        return Rejection(where, where, "malformed JSON")
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        return Rejection(where, record_name(where, value), "no text")
    return value["text"]


def _decode(where: str, item: bytes) -> str | Rejection:
    try:
        return item.decode("utf-8")
    except UnicodeDecodeError:
        return Rejection(where, where, "not UTF-8")
