"""Preparation: data files to a directory of token rows, once for all runs that need the same.

The directory's name is a key over the content of the files and everything else that the rows depend on. Files are read
in blocks; each block is turned into a part by whichever process is free, and parts are joined to shards in order, so
that the result depends neither on the number of processes nor on how often the work was interrupted: what is finished
stays, under `<key>.work`, until the directory appears whole.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import connection
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import tqdm
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from osprey_jax.command import UserError
from osprey_jax.data.recipes import Opened, Recipe
from osprey_jax.data.records import Block, content_fingerprint, find_files, group_blocks, read_blocks
from osprey_jax.data.rows import LENGTH_EDGES, MANIFEST, REJECTED, SUPERVISED, Report, Rows, fingerprint
from osprey_jax.files import read_json, sync, write_json

FORMAT = 1  # raise it when the same data and recipe give other rows, or the directory has another layout
BLOCK_BYTES = 16 * 2**20  # of input: a few thousand conversations, enough to fill rows well
BLOCKS_A_SHARD = 256  # few files, whatever the size of the data

# One row can be read alone (Grain's demand), and most token ids have a byte of zeros.
_WRITER_OPTIONS = "group_size:1,zstd:1"


def prepare(patterns: list[str], recipe: Recipe, cache_dir: Path, processes: int | None = None) -> Rows:
    """The rows of the files that `patterns` match: from `cache_dir`, or made there by `processes` (None: all cores).

    Raises:
      UserError: a pattern without a file, an unreadable file, one that changes meanwhile, a tokenizer or template that
        cannot be used, no usable record.
    """
    paths = find_files(patterns)
    for path in paths:
        recipe.check(path)
    stamps = _stamps(paths)
    facts = _facts(paths, recipe)
    directory = _directory(facts, cache_dir)
    key = directory.name
    if not (directory / MANIFEST).is_file():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(directory.with_name(f".{key}.lock")):
            if not (directory / MANIFEST).is_file():
                if directory.exists():
                    raise UserError(f"{directory}: not a complete preparation; remove it and run again")
                work = directory.with_name(f"{key}.work")
                _start_work(work, stamps)
                _make(paths, recipe, work, processes or _cores())
                if _stamps(paths) != stamps or recipe.facts() != {name: facts[name] for name in recipe.facts()}:
                    shutil.rmtree(work)
                    raise UserError(f"{', '.join(patterns)}: the files changed while they were read; run again")
                _finish(work, directory, facts, patterns)
    return Rows(directory)


def find_prepared(patterns: list[str], recipe: Recipe, cache_dir: Path) -> Rows | None:
    """What `prepare` would give if it had nothing to do, else None. Raises `UserError` as it does, writes nothing."""
    if not cache_dir.expanduser().is_dir():
        return None
    directory = _directory(_facts(find_files(patterns), recipe), cache_dir)
    return Rows(directory) if (directory / MANIFEST).is_file() else None


def _directory(facts: dict[str, Any], cache_dir: Path) -> Path:
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return cache_dir.expanduser() / key


def _stamps(paths: list[Path]) -> list[list[int]]:
    """What tells that files are those that they were: size, time of change, inode."""
    return [[stat.st_size, stat.st_mtime_ns, stat.st_ino] for stat in map(Path.stat, paths)]


def _start_work(work: Path, stamps: list[list[int]]) -> None:
    """The directory of the work, with what was done before, if that was on the very same files."""
    stamp_file = work / _STAMPS
    if work.exists() and not (stamp_file.is_file() and read_json(stamp_file) == {"stamps": stamps}):
        shutil.rmtree(work)
    work.mkdir(exist_ok=True)
    write_json(stamp_file, {"stamps": stamps})
    for abandoned in work.glob(".*.tmp"):
        abandoned.unlink(missing_ok=True)


def _facts(paths: list[Path], recipe: Recipe) -> dict[str, Any]:
    """All that the rows depend on."""
    sizes = {"format": FORMAT, "block_bytes": BLOCK_BYTES, "blocks_a_shard": BLOCKS_A_SHARD}
    return recipe.facts() | sizes | {"content": content_fingerprint(paths)}


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One preparation of a key at a time; a lock ends with its process, however that ends."""
    lock = filelock.FileLock(path)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        print(f"waiting for another process that prepares the same data (its lock: {path})", flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


# ---- blocks to parts, parts to shards


@dataclasses.dataclass
class _Summary:
    """What is known of a part or a shard beside its rows."""

    read: int = 0
    used: int = 0
    cut: int = 0
    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    lengths: list[int] = dataclasses.field(default_factory=lambda: [0] * len(LENGTH_EDGES))
    digests: list[str] = dataclasses.field(default_factory=list)  # of the rows of each part, in order

    def add(self, other: "_Summary") -> None:
        for name in ("read", "used", "cut", "rows", "tokens", "supervised", "digests"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.dropped = dict(collections.Counter(self.dropped) + collections.Counter(other.dropped))
        self.lengths = [a + b for a, b in zip(self.lengths, other.lengths, strict=True)]


def _make(paths: list[Path], recipe: Recipe, work: Path, processes: int) -> None:
    """All shards of `paths` in `work`, going on from what is there."""
    compressed = any(path.suffix in (".gz", ".parquet") for path in paths)  # whose sizes are not those of the blocks
    total = None if compressed else sum(path.stat().st_size for path in paths)
    groups = group_blocks(read_blocks(paths, BLOCK_BYTES), BLOCK_BYTES)
    first = list(itertools.islice(groups, 2))
    running: collections.deque[tuple[Future, int]] = collections.deque()
    bar = tqdm.tqdm(total=total, desc="prepare", unit="B", unit_scale=True, disable=None)

    def wait(most: int) -> None:
        while len(running) > most:
            future, size = running.popleft()
            future.result()
            bar.update(size)

    with bar, _workers(recipe, processes if len(first) > 1 else 1) as submit:
        number = -1
        for number, blocks in enumerate(itertools.chain(first, groups)):
            shard, size = number // BLOCKS_A_SHARD, sum(len(item) for block in blocks for item in block.items)
            if _finished(work, _shard(shard)) or _finished(work, _part(number)):
                bar.update(size)
            else:
                running.append((submit(_make_part, work, number, blocks), size))
            wait(2 * processes)
            if (number + 1) % BLOCKS_A_SHARD == 0:
                wait(0)
                running.append((submit(_join, work, shard, number + 1 - BLOCKS_A_SHARD, number + 1), 0))
        if rest := (number + 1) % BLOCKS_A_SHARD:
            wait(0)
            running.append((submit(_join, work, number // BLOCKS_A_SHARD, number + 1 - rest, number + 1), 0))
        wait(0)


def _make_part(opened: Opened, work: Path, number: int, blocks: list[Block]) -> None:
    make_rows, vocab_size = opened
    made = make_rows(blocks)
    supervised_V, digest = np.zeros(vocab_size, np.int64), hashlib.sha256()
    if made.rows:
        supervised = np.concatenate([row.token_ids[row.loss_mask] for row in made.rows])
        supervised_V = np.bincount(supervised, minlength=vocab_size)
    for row in made.rows:
        digest.update(row.numbers())
    summary = _Summary(
        read=len(made.lengths) + len(made.rejections),
        used=len(made.lengths),
        cut=len(made.cut),
        rows=len(made.rows),
        tokens=sum(len(row.token_ids) for row in made.rows),
        supervised=int(supervised_V.sum()),
        dropped=dict(collections.Counter(line.reason.partition(":")[0] for line in made.rejections)),
        lengths=np.histogram(made.lengths, [*LENGTH_EDGES, np.iinfo(np.int64).max])[0].tolist(),
        digests=[digest.hexdigest()],
    )
    rejected = (json.dumps(dataclasses.asdict(line), ensure_ascii=False) + "\n" for line in made.rejections + made.cut)
    _write(work, _part(number), (row.to_bytes() for row in made.rows), rejected, supervised_V, summary)


def _join(opened: Opened, work: Path, shard: int, first: int, end: int) -> None:
    """Make a shard of the parts from `first` up to `end`, and remove them."""
    names = [_part(number) for number in range(first, end)]
    if not _finished(work, _shard(shard)):
        summary, supervised_V = _Summary(), 0
        for name in names:
            summary.add(_read_summary(work, name))
            supervised_V = supervised_V + np.load(work / f"{name}.npy", allow_pickle=False)
        records = itertools.chain.from_iterable(_records(work / f"{name}{_ROWS}") for name in names)
        _write(work, _shard(shard), records, _lines(work, names), supervised_V, summary)
    for name in names:
        for suffix in (".json", ".npy", _REJECTED, _ROWS):  # the first says that the others are there
            (work / f"{name}{suffix}").unlink(missing_ok=True)


def _finish(work: Path, directory: Path, facts: dict[str, Any], patterns: list[str]) -> None:
    """The finished shards become the prepared directory."""
    names = sorted(path.stem for path in work.glob("shard-*.json"))
    summary, supervised_V, shards = _Summary(), 0, []
    for name in names:
        part = _read_summary(work, name)
        summary.add(part)
        supervised_V = supervised_V + np.load(work / f"{name}.npy", allow_pickle=False)
        if part.rows:
            path = work / f"{name}{_ROWS}"
            shards.append({"name": path.name, "rows": part.rows, "bytes": path.stat().st_size})
    if not summary.used:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in summary.dropped.items()) or "the files are empty"
        first = "".join(
            f"; the first: {json.loads(line)['where']}" for line in itertools.islice(_lines(work, names), 1)
        )
        shutil.rmtree(work)
        raise UserError(f"{', '.join(patterns)}: no usable record among {summary.read} ({reasons}{first})")
    with _replaced(work / REJECTED) as path, path.open("w", encoding="utf-8") as stream:
        stream.writelines(_lines(work, names))
    with _replaced(work / SUPERVISED) as path, path.open("wb") as stream:
        np.save(stream, supervised_V)
    counts = dataclasses.asdict(summary)
    digests = counts.pop("digests")
    report = dataclasses.asdict(Report(**counts, length=facts["length"]))
    manifest = {"fingerprint": fingerprint(digests), "report": report, "shards": shards, "made_from": facts}
    write_json(work / MANIFEST, manifest)
    (work / _STAMPS).unlink()
    os.replace(work, directory)
    sync(directory.parent)
    for name in names:
        for suffix in (".json", ".npy", _REJECTED):
            (directory / f"{name}{suffix}").unlink(missing_ok=True)


# ---- files of a part or a shard

_ROWS, _REJECTED = ".array_record", ".rejected"
_STAMPS = "stamps.json"


def _part(number: int) -> str:
    return f"part-{number:08d}"


def _shard(number: int) -> str:
    return f"shard-{number:06d}"


def _finished(work: Path, name: str) -> bool:
    return (work / f"{name}.json").is_file()


def _read_summary(work: Path, name: str) -> _Summary:
    return _Summary(**read_json(work / f"{name}.json"))


def _write(
    work: Path,
    name: str,
    records: Iterable[bytes],
    rejected: Iterable[str],
    supervised_V: np.ndarray,
    summary: _Summary,
) -> None:
    """The files of `name`; the summary last, which says that the others are complete."""
    with _replaced(work / f"{name}{_ROWS}") as path:
        try:
            writer = ArrayRecordWriter(str(path), _WRITER_OPTIONS)
            for record in records:
                writer.write(record)
            writer.close()
        except RuntimeError as error:
            raise UserError(f"{path}: cannot be written ({error})") from error
    with _replaced(work / f"{name}{_REJECTED}") as path, path.open("w", encoding="utf-8") as stream:
        stream.writelines(rejected)
    with _replaced(work / f"{name}.npy") as path, path.open("wb") as stream:
        np.save(stream, supervised_V)
    write_json(work / f"{name}.json", dataclasses.asdict(summary))


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """A temporary path whose file becomes `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _records(path: Path) -> Iterator[bytes]:
    reader = ArrayRecordReader(str(path))
    count = reader.num_records()
    for start in range(0, count, 64):
        yield from reader.read(start, min(start + 64, count))
    reader.close()


def _lines(work: Path, names: list[str]) -> Iterator[str]:
    for name in names:
        with (work / f"{name}{_REJECTED}").open(encoding="utf-8") as lines:
            yield from lines


# ---- processes


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_opened: Opened | UserError  # of a working process: what the recipe gave


@contextlib.contextmanager
def _workers(recipe: Recipe, processes: int) -> Iterator[Callable[..., Future]]:
    """`submit(function, *arguments)` runs `function(recipe.open(), *arguments)`: here if one process is all."""
    if processes == 1:
        opened = recipe.open()
        yield lambda function, *arguments: _done(function(opened, *arguments))
        return
    # Not forked: a process that has threads, as one with JAX has, cannot be copied safely.
    context = multiprocessing.get_context("spawn")
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_start, initargs=(recipe,))

    def submit(function: Callable, *arguments: object) -> Future:
        # This may start a process, which has to leave a Ctrl-C to its parent from its first moment on.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            return pool.submit(_call, function, *arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        yield submit
    except BaseException as error:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - set(others):
            process.terminate()
        if isinstance(error, concurrent.futures.process.BrokenProcessPool):
            raise UserError(
                "a process that prepared data was ended from outside (out of memory?); run again to go on, with fewer "
                "data.processes"
            ) from error
        raise
    pool.shutdown()


def _start(recipe: Recipe) -> None:
    """In a new process: read the tokenizer, and end with the parent, even if that is killed."""
    global _opened
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # every process is one thread
    parent = multiprocessing.parent_process().sentinel
    threading.Thread(target=lambda: connection.wait([parent]) and os._exit(1), daemon=True).start()
    try:
        _opened = recipe.open()
    except UserError as error:  # an initializer that fails would only be called a broken process
        _opened = error


def _call(function: Callable, *arguments: object) -> None:
    if isinstance(_opened, UserError):
        raise _opened
    function(_opened, *arguments)


def _done(result: None) -> Future:
    future: Future = Future()
    future.set_result(result)
    return future
