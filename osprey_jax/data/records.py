"""Finding data files and reading their lines."""

import glob
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from osprey_jax.command import UserError


def find_files(patterns: list[str]) -> list[Path]:
    """The files that names or globs (`**` goes down) match: pattern by pattern, sorted within one, none twice.

    Raises:
      UserError: no pattern, or one that matches no file.
    """
    if not patterns:
        raise UserError("no data files are named")
    found: dict[Path, None] = {}
    for pattern in patterns:
        paths = [Path(pattern)] if Path(pattern).is_file() else map(Path, sorted(glob.glob(pattern, recursive=True)))
        files = [path for path in paths if path.is_file()]
        if not files:
            raise UserError(f"{pattern}: matches no file")
        found.update(dict.fromkeys(files))
    return list(found)


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """`("file:line", value)` of each line that is not blank; the value is a `ValueError` where it is not valid JSON.

    Valid means UTF-8 (a byte-order mark is skipped) without half a surrogate pair, which no tokenizer can encode.

    Raises:
      UserError: the file cannot be read, or is not gzip although it is named so.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if line.strip():
                    yield f"{path}:{number}", _parse(line)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error


def _parse(line: bytes) -> Any:
    try:
        value = json.loads(line.decode("utf-8"))
        if b"\\u" in line:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except RecursionError:
        return ValueError("nested too deep")
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, UnicodeEncodeError
        return error
