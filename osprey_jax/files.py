"""Outputs that appear complete or not at all: write under a temporary name, fsync, rename."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import filelock

from osprey_jax.command import UserError


def require_directory(path: str | Path, what: str) -> Path:
    """`path` as a `Path`, or a `UserError` naming `what` was expected there."""
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such directory ({what})")
    return path


def require_file(path: str | Path, what: str) -> Path:
    """`path` as a `Path`, or a `UserError` naming `what` was expected there."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file ({what})")
    return path


def read_json(path: Path) -> dict:
    """The JSON object in `path`; `UserError` where it is not one."""
    try:
        value = json.loads(require_file(path, "a JSON file").read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step."""
    with new_file(path) as stream:
        stream.write(text)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[TextIO]:
    """A temporary text file that replaces `path` when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            yield stream
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Replace `path` by `value` as indented JSON in one step."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def new_directory(out: str | Path) -> Iterator[Path]:
    """A temporary directory that becomes `out` when the block ends without an error.

    `UserError` where `out` already holds something: an output never overwrites another.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: already exists; choose another output or remove it first")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for path in sorted(temporary.rglob("*")):
            sync(path)
        sync(temporary)
        if out.exists():
            out.rmdir()
        os.replace(temporary, out)
        sync(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def alone(output: Path, lock: Path) -> Iterator[None]:
    """Only one run at a time writes `output`, which the file `lock` stands for. `UserError` for a second one."""
    held = filelock.FileLock(lock)
    try:
        held.acquire(blocking=False)
    except filelock.Timeout as error:
        raise UserError(f"{output}: another run is writing it; wait for that, or choose another output") from error
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)  # while it is held: who waits at it then tries again
        held.release()


def fingerprint(*paths: Path) -> str:
    """sha256 over the contents of files, and over the names and contents of the files in directories.

    Of weights (safetensors) only the size and the first and last MiB count: reading all of a 70B target takes minutes,
    and another model differs in its header or its last tensor.
    """
    digest = hashlib.sha256()
    for path in paths:
        for file in [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file()):
            digest.update(f"{'' if file == path else file.name} {file.stat().st_size}\n".encode())
            with file.open("rb") as stream:
                if file.suffix == ".safetensors":
                    digest.update(stream.read(2**20))
                    stream.seek(max(file.stat().st_size - 2**20, 0))
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Have a file, or the names in a directory, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
