"""How fast data is prepared, beside the tokenizer's own batch encode alone on the same rendered texts.

Both get the same cores, 1, 2, 4 .. up to all of them: the preparation as processes, the tokenizer as threads. Each
measurement is a process of its own, and the two of a pair follow one another, so that their ratio means something on a
busy machine; the ratio of their CPU times hardly feels other work. What the preparation does once counts too: hashing
the data, starting its processes. It takes some minutes; data of few, very long texts says little, since the
tokenizer's threads cannot share one.
"""

import argparse
import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import tqdm

from osprey_jax.benchmark.timing import Seconds, alternate, confine, cores, speedup
from osprey_jax.command import UserError
from osprey_jax.config import TrainConfig, config_parser, load_config
from osprey_jax.data.conversations import block_records
from osprey_jax.data.preparation import BLOCK_BYTES, prepare
from osprey_jax.data.recipes import ConversationRecipe, Recipe
from osprey_jax.data.records import Rejection, find_files, kind_of, read_blocks
from osprey_jax.data.rendering import ChatTemplate, RecordRefused
from osprey_jax.data.text import block_documents
from osprey_jax.data.tokenizer import load_tokenizer
from osprey_jax.reports.tables import console_table

_BATCH = 1024  # texts that the tokenizer gets at one time
HEADER = ("processes", "tokens/s, prepared / tokenizer alone", "by CPU time")


def measure(
    patterns: list[str], recipe: Recipe, sample_bytes: int, repeats: int, counts: list[int] | None = None
) -> list[tuple[int, float, float]]:
    """A row of `HEADER` for each number of processes, from `repeats` pairs.

    Args:
      sample_bytes: of the data, for each process; data that has less is repeated.
      counts: numbers of processes; None: 1, 2, 4 .. and all cores.

    Raises:
      UserError: as `prepare`.
    """
    paths, usable = find_files(patterns), cores()
    counts = counts or [*itertools.takewhile(lambda n: n < len(usable), (2**i for i in itertools.count())), len(usable)]
    rows = []
    with (
        tempfile.TemporaryDirectory() as directory,
        tqdm.tqdm(total=len(counts) * repeats, desc="measure", unit=" pairs", disable=None) as bar,
    ):
        for count in counts:
            sample = Path(directory) / "sample.jsonl"
            _write_sample(paths, sample, sample_bytes * count)

            def prepared(count=count, sample=sample) -> Seconds:
                return _apart(usable[:count], 1, _prepare, recipe, sample, count)

            def alone(count=count, sample=sample) -> Seconds:
                return _apart(usable[:count], count, _encode, recipe, sample)[1]

            pairs = []
            for _ in range(repeats):
                pairs += alternate(prepared, alone, 1)
                bar.update()
            rows.append((count, *speedup(pairs)))
    return rows


def _write_sample(paths: list[Path], sample: Path, size: int) -> None:
    """`size` bytes of the data, or a little more, as JSONL."""
    with sample.open("wb") as out:
        while out.tell() < size:
            start = out.tell()
            for block in read_blocks(paths, BLOCK_BYTES):
                for item in block.items:
                    if kind_of(block.path) != "jsonl":
                        item = json.dumps({"text": item.decode("utf-8", "replace")}).encode()
                    out.write(item.strip() + b"\n")
                    if out.tell() >= size:
                        return
            if out.tell() == start:
                raise UserError(f"{', '.join(map(str, paths))}: nothing in these files")


# ---- in a process of its own


def _apart(to: list[int], threads: int, function: Callable, *arguments: Any) -> Any:
    """`function(*arguments)` in a new process on the cores `to`, its tokenizer with that many threads."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_confine, initargs=(to, threads)) as pool:
        return pool.submit(function, *arguments).result()


def _confine(to: list[int], threads: int) -> None:
    confine(to)
    os.environ |= {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": str(threads > 1).lower()}


def _encode(recipe: Recipe, sample: Path) -> tuple[int, Seconds]:
    """(tokens of all texts, what the tokenizer took for them)."""
    tokenizer = load_tokenizer(recipe.tokenizer)
    tokens, wall, cpu, texts = 0, 0.0, 0.0, _texts(recipe, sample, tokenizer)
    while batch := list(itertools.islice(texts, _BATCH)):
        start = Seconds.now()
        encodings = tokenizer.backend_tokenizer.encode_batch(batch, add_special_tokens=False)
        taken = Seconds.now() - start
        wall, cpu, tokens = wall + taken.wall, cpu + taken.cpu, tokens + sum(map(len, encodings))
    if not tokens:
        raise UserError("data.train: no usable record")
    return tokens, Seconds(wall, cpu)


def _texts(recipe: Recipe, sample: Path, tokenizer) -> Iterator[str]:
    """What the preparation tokenizes: conversations as the template renders them, or documents."""
    blocks = read_blocks([sample], BLOCK_BYTES)
    if not isinstance(recipe, ConversationRecipe):
        documents = itertools.chain.from_iterable(map(block_documents, blocks))
        yield from (item.text for item in documents if not isinstance(item, Rejection))
        return
    template = ChatTemplate(tokenizer, recipe.template_options)
    for record in itertools.chain.from_iterable(map(block_records, blocks)):
        if not isinstance(record, Rejection) and any(message["role"] == "assistant" for message in record.messages):
            with contextlib.suppress(RecordRefused):
                yield template.render(record.messages, tools=record.tools)


def _prepare(recipe: Recipe, sample: Path, processes: int) -> Seconds:
    with tempfile.TemporaryDirectory(dir=sample.parent) as cache:
        start = Seconds.now()
        prepare([str(sample)], recipe, Path(cache), processes)
        return Seconds.now() - start


def _positive(text: str) -> float:
    if not 0 < (number := float(text)) < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def main(argv: list[str]) -> None:
    parser = config_parser("osprey_jax.benchmark preparation", __doc__)
    parser.add_argument(
        "--megabytes", type=_positive, default=64, help="of data for each process, repeated if need be (default: 64)"
    )
    parser.add_argument("--repeats", type=int, choices=range(1, 100), default=1, metavar="N", help="pairs (default: 1)")
    arguments = parser.parse_args(argv)
    config = load_config(arguments.config, arguments.overrides, TrainConfig)
    # Here, since the processes import this module too, and have no need of JAX.
    from osprey_jax.training.stages import recipe

    sample_bytes = int(arguments.megabytes * 2**20)
    print(console_table(HEADER, measure(config.data.train, recipe(config), sample_bytes, arguments.repeats)))
