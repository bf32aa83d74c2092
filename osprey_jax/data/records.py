"""Data files: finding them, reading them in blocks, parsing their lines.

Files are read by one process, in order, and worked on by many: a block holds undecoded bytes, about as many as asked
for, and where it begins depends on nothing but the file and that number.
"""

import codecs
import concurrent.futures
import dataclasses
import glob
import gzip
import hashlib
import io
import json
import os
import re
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import pyarrow
import pyarrow.parquet
import tqdm

from osprey_jax.command import UserError

_SUFFIXES = {".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".txt": "txt", ".txt.gz": "txt", ".parquet": "parquet"}
_BYTE_ORDER_MARK = codecs.BOM_UTF8
_BUFFER = 2**20
_PIECE = 2**20  # of a .txt file at most: tokenizers take some hundred times the memory of one text
_PARQUET_ROWS = 256  # taken out of a Parquet file at one time: memory for books, speed for web pages
_CUT_WINDOW = 2**16  # bytes at the end of a piece of a .txt file where a place to cut it is looked for

# Where a long text is cut: at the end of the last match of the first pattern that matches. Pre-tokenizers of byte-level
# BPE split at the first two, whatever follows: behind a single newline (GPT-2 splits a longer run in two, others do
# not) before a letter or digit; before white space, but not between punctuation and the newline that Llama joins to it.
_CUTS = (
    re.compile(r"(?s:.*)\S\r?\n(?=[^\W_])"),
    re.compile(r"(?s:.*)(?:[^\W_](?=\s)|\S(?=[^\S\r\n]))"),
    re.compile(r"(?s:.*)\n"),
)


@dataclasses.dataclass(frozen=True)
class Block:
    """A part of a file, still bytes.

    Attributes:
      path: the file.
      first: number, from 1, of the first item in the file.
      items: lines of JSONL (blank ones too), the `text` of Parquet rows, or one piece of a .txt file.
      ends: False where the piece of a .txt file goes on in the next block.
    """

    path: str
    first: int
    items: list[bytes]
    ends: bool = True


@dataclasses.dataclass(frozen=True)
class Rejection:
    """A record that is not used, or not all of it, and why. `where` is "file:line"."""

    where: str
    id: str
    reason: str


# ---- files


def find_files(patterns: list[str]) -> list[Path]:
    """The files that names or globs (`**` goes down) match: pattern by pattern, sorted within one, none twice.

    Raises:
      UserError: no pattern, or one that matches no file.
    """
    if not patterns:
        raise UserError("no data files are named")
    found: dict[Path, Path] = {}  # by what they are, under whichever name came first
    for pattern in map(os.path.expanduser, patterns):
        paths = [Path(pattern)] if Path(pattern).is_file() else map(Path, sorted(glob.glob(pattern, recursive=True)))
        files = [path for path in paths if path.is_file()]
        if not files:
            raise UserError(f"{pattern}: matches no file")
        for path in files:
            if not _is_utf8(path):
                raise UserError(f"{str(path)!a}: the name is not UTF-8; rename it")
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _is_utf8(path: Path) -> bool:
    try:
        return bool(str(path).encode())
    except UnicodeEncodeError:
        return False


def kind_of(path: str | Path) -> Literal["jsonl", "txt", "parquet"]:
    """What a data file holds, by its name.

    Raises:
      UserError: a name that says nothing of the kind.
    """
    name = Path(path).name
    for suffix, kind in _SUFFIXES.items():
        if name.endswith(suffix):
            return kind
    if name.endswith(".json"):
        hint = "for a JSON array: jq -c '.[]' data.json > data.jsonl; where each line is an object already, rename it"
        raise UserError(f"{path}: one JSON object a line is expected, in a .jsonl file ({hint})")
    raise UserError(f"{path}: data is read from {', '.join(_SUFFIXES)} files")


def content_fingerprint(paths: Sequence[Path]) -> str:
    """sha256 over the kinds and contents of files in order; their names and places do not matter.

    Raises:
      UserError: as `kind_of`.
      OSError: a file cannot be read.
    """
    kinds = [kind_of(path) for path in paths]
    digest, stopped = hashlib.sha256(), threading.Event()
    total = sum(path.stat().st_size for path in paths)
    bar = tqdm.tqdm(total=total, desc="fingerprint", unit="B", unit_scale=True, disable=None, leave=False, delay=2)
    with bar, concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        try:
            contents = pool.map(lambda path: _file_digest(path, bar, stopped), paths)
            for kind, content in zip(kinds, contents, strict=True):
                digest.update(kind.encode() + b"\n" + content)
        except BaseException:  # a signal: the threads would read their files to the end
            stopped.set()
            raise
    return digest.hexdigest()


def _file_digest(path: Path, bar: tqdm.tqdm, stopped: threading.Event) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while not stopped.is_set() and (data := stream.read(_BUFFER)):
            digest.update(data)
            bar.update(len(data))
    return digest.digest()


# ---- blocks


def read_blocks(paths: Iterable[Path], block_bytes: int) -> Iterator[Block]:
    """The content of files in order, in blocks of one file each.

    JSONL and Parquet: items until they are `block_bytes` together, the one that exceeds it included. A .txt file:
    pieces of at most a MiB, cut where a tokenizer would split it anyway. An empty file has no block.

    Raises:
      UserError: a file of an unknown kind (before anything is read), one that cannot be read, Parquet without `text`.
    """
    readers = {"jsonl": _line_blocks, "txt": _text_blocks, "parquet": _parquet_blocks}
    chosen = [(path, readers[kind_of(path)]) for path in paths]
    for path, reader in chosen:
        try:
            yield from reader(path, block_bytes)
        except (OSError, EOFError, zlib.error, pyarrow.ArrowException) as error:
            raise UserError(f"{path}: cannot be read ({error})") from error


def group_blocks(blocks: Iterable[Block], block_bytes: int) -> Iterator[list[Block]]:
    """Blocks in order, small ones together up to `block_bytes`: ten thousand small files make few groups."""
    group: list[Block] = []
    total = 0
    for block in blocks:
        size = sum(map(len, block.items))
        if group and total + size > block_bytes:
            yield group
            group, total = [], 0
        group.append(block)
        total += size
    if group:
        yield group


def _line_blocks(path: Path, block_bytes: int) -> Iterator[Block]:
    first = 1
    with _open(path) as stream:
        while lines := stream.readlines(block_bytes):
            if first == 1:
                lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
            yield Block(str(path), first, lines)
            first += len(lines)


def _parquet_blocks(path: Path, block_bytes: int) -> Iterator[Block]:
    first, items, size = 1, [], 0
    # Pages are read as they are needed, for a row group may be the whole file.
    with pyarrow.parquet.ParquetFile(
        path, buffer_size=_BUFFER, pre_buffer=False, page_checksum_verification=True
    ) as file:
        _check_text_column(path, file.schema_arrow)
        for batch in file.iter_batches(_PARQUET_ROWS, columns=["text"]):
            column = batch.column(0).cast(pyarrow.large_binary())
            for text in column.fill_null(b"").to_pylist():  # nothing is an empty text
                items.append(text)
                size += len(text)
                if size > block_bytes:
                    yield Block(str(path), first, items)
                    first, items, size = first + len(items), [], 0
    if items:
        yield Block(str(path), first, items)


def _check_text_column(path: Path, schema: pyarrow.Schema) -> None:
    found = [field.type for field in schema if field.name == "text"]
    texts = [kind.value_type if pyarrow.types.is_dictionary(kind) else kind for kind in found]
    if not texts:
        columns = ", ".join(schema.names)
        raise UserError(f'{path}: no column "text", only {columns} (conversations are read from .jsonl files)')
    if not (pyarrow.types.is_string(texts[0]) or pyarrow.types.is_large_string(texts[0])):
        raise UserError(f'{path}: the column "text" holds {found[0]}, not strings')


def _text_blocks(path: Path, block_bytes: int) -> Iterator[Block]:
    block_bytes = min(block_bytes, _PIECE)
    with _open(path) as stream:
        number, rest = 1, stream.read(len(_BYTE_ORDER_MARK)).removeprefix(_BYTE_ORDER_MARK)
        while True:
            # A byte more than a piece tells whether the file goes on.
            rest += stream.read(block_bytes + 1 - len(rest))
            ends = len(rest) <= block_bytes
            cut = len(rest) if ends else _place_to_cut(rest[:block_bytes])
            if cut:
                yield Block(str(path), number, [rest[:cut]], ends)
            if ends:
                return
            number, rest = number + 1, rest[cut:]


def _place_to_cut(data: bytes) -> int:
    """Bytes of `data`, which is not the end of a text, that come before the cut; at least 1."""
    start = max(0, len(data) - _CUT_WINDOW)
    while start < len(data) and data[start] & 0xC0 == 0x80:  # within a character
        start += 1
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data[start:])  # without a last character in part
    except UnicodeDecodeError:
        return len(data)
    for pattern in _CUTS:
        if found := pattern.match(text):
            return start + len(text[: found.end()].encode())
    return start + len(text.removesuffix("\r").encode()) or len(data)


def _open(path: Path) -> BinaryIO:
    if path.name.endswith(".gz"):
        return io.BufferedReader(gzip.open(path), _BUFFER)
    return path.open("rb", buffering=_BUFFER)


# ---- lines


def parse_line(line: bytes) -> Any:
    """The value in a line of JSON; a `ValueError` (returned) where it is not valid.

    Valid means UTF-8 without half a surrogate pair, which no tokenizer can encode.
    """
    try:
        value = json.loads(line.decode("utf-8"))
        if b"\\ud" in line or b"\\uD" in line:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except RecursionError:
        return ValueError("nested too deep")
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, UnicodeEncodeError
        return error


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """`("file:line", value)` of each line of JSONL that is not blank, whatever the file's name; as `parse_line`.

    Raises:
      UserError: the file cannot be read, or is not gzip although it is named so.
    """
    try:
        with _open(path) as stream:
            for number, line in enumerate(stream, start=1):
                line = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
                if line.strip():
                    yield f"{path}:{number}", parse_line(line)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error


def record_name(where: str, value: Any) -> str:
    """A record's `id`, else its `uuid`, else its place."""
    if not isinstance(value, dict):
        return where
    return next((str(value[key]) for key in ("id", "uuid") if value.get(key) not in (None, "")), where)
