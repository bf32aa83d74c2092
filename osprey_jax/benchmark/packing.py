"""Packed rows beside one conversation a row, in the same compiled step of distillation.

The conversations are pieces of the standard library's text, as the quickstart makes them, and so are tokenizer, target
and drafter (EAGLE-3 of two layers, random weights: a step's time does not depend on their values). What is compared is
tokens a second that are not padding; were padding as dear as a token, their ratio would be that of the fills.
"""

import functools
import importlib.util
import itertools
import json
import random
import statistics
import tempfile
from pathlib import Path

import jax
import numpy as np

from osprey_jax import config
from osprey_jax.benchmark.random_run import RandomRun
from osprey_jax.benchmark.timing import PACKAGE_PARENT, benchmark_parser, positive, timed
from osprey_jax.command import UserError
from osprey_jax.data.pipeline import batches
from osprey_jax.data.rows import Rows
from osprey_jax.files import write_text
from osprey_jax.reports.tables import console_table
from osprey_jax.training.mesh import make_mesh
from osprey_jax.training.stages import design, prepared

QUICKSTART = PACKAGE_PARENT / "configs" / "quickstart"
HEADER = (
    "length",
    "fill, one a row",
    "fill, packed",
    "ratio of fills",
    "real tokens/s, packed / one a row",
    "part of the fills' ratio",
)


def write_inputs(inputs: Path, conversations: int) -> None:
    """To `inputs`: `target/`, a tokenizer and a `config.json`, and `conversations.jsonl`, answered questions on code.

    Raises:
      UserError: the quickstart's files are not there.
    """
    path = QUICKSTART / "texts.py"
    if not path.is_file():
        raise UserError(f"{path}: not found; run this from a checkout of the project")
    spec = importlib.util.spec_from_file_location("quickstart_texts", path)
    texts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(texts)
    texts.write_inputs(inputs)
    (inputs / "tokenizers" / "target").rename(inputs / "target")
    (inputs / "target" / "config.json").write_bytes((QUICKSTART / "target" / "config.json").read_bytes())
    windows = texts.draw_windows(texts.read_texts()["code"]["train"], conversations, random.Random(0))
    lines = []
    for i, (question, answer) in enumerate(windows):
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"id": str(i), "conversations": turns}) + "\n")
    write_text(inputs / "conversations.jsonl", "".join(lines))


def quickstart_config(inputs: Path, length: int, packing: bool) -> config.DistillConfig:
    """The quickstart's 2-layer EAGLE-3 run on these conversations."""
    overrides = {
        "target": inputs / "target",
        "run_dir": inputs / "run",
        "data.train": [str(inputs / "conversations.jsonl")],
        "data.cache_dir": inputs / "prepared",
        "data.length": length,
        "data.packing": packing,
    }
    pairs = [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]
    return config.load_config(QUICKSTART / "eagle3_2.yaml", pairs, config.DistillConfig)


def measure(inputs: Path, length: int, repeats: int) -> tuple:
    """A row of `HEADER`: with the median ratio of `repeats` pairs of steps."""
    runs = [quickstart_config(inputs, length, packing) for packing in (False, True)]
    mesh = make_mesh(config.Mesh(), runs[0].batch_size, jax.devices()[:1])
    trained = RandomRun(runs[0], design(runs[0], mesh), mesh)  # one compiled step for both
    kinds = [_Batches(prepared(run)[0], run, trained) for run in runs]
    for kind in kinds:
        kind.speed()
    ratios = []
    for i in range(repeats):
        speeds = [kind.speed() for kind in (kinds if i % 2 else reversed(kinds))]
        ratios.append(speeds[1] / speeds[0] if i % 2 else speeds[0] / speeds[1])
    fills = [kind.rows.report.fill for kind in kinds]
    ratio, of_fills = statistics.median(ratios), fills[1] / fills[0]
    return (length, *fills, of_fills, ratio, ratio / of_fills)


class _Batches:
    """Batches of one kind of rows, one after another."""

    def __init__(self, rows: Rows, run: config.DistillConfig, trained: RandomRun):
        self.rows, self._trained = rows, trained
        source = batches(rows, batch_size=run.batch_size, seed=0)
        # All there are, made once: what is measured is the step.
        self._batches = itertools.cycle(list(itertools.islice(source, max(len(rows) // run.batch_size, 1))))

    def speed(self) -> float:
        """Real tokens a second of a step on the next batch."""
        batch = dict(next(self._batches))
        batch.pop("row")
        placed = self._trained.place(batch)
        return np.count_nonzero(batch["segment_ids"]) / timed(functools.partial(self._trained.step, placed)).wall


def main(argv: list[str]) -> None:
    parser = benchmark_parser("packing", __doc__)
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=positive,
        default=[144, 512],
        metavar="S",
        help="tokens a row (default: 144, as in the quickstart, and 512)",
    )
    parser.add_argument("--conversations", type=positive, default=768, help="how many (default: 768)")
    parser.add_argument("--repeats", type=positive, default=41, help="pairs of steps (default: 41)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        inputs = Path(directory) / "inputs"
        write_inputs(inputs, arguments.conversations)
        rows = [measure(inputs, length, arguments.repeats) for length in arguments.lengths]
    print(console_table(HEADER, rows))
