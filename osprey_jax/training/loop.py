"""The training loop, one for both stages. Knows nothing of the objective.

Metrics of a step are read while the next one runs, so that the devices never wait for the console.
"""

import contextlib
import dataclasses
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml
from tensorboardX import SummaryWriter
from tqdm import tqdm

from osprey_jax.command import UserError
from osprey_jax.config import Run
from osprey_jax.data.pipeline import batches, eval_batches
from osprey_jax.data.rows import REJECTED
from osprey_jax.data.tokenizer import copy_tokenizer
from osprey_jax.files import new_file, write_json, write_text
from osprey_jax.kernels.precision import exact_products
from osprey_jax.reports.data import describe
from osprey_jax.training.checkpoint import Checkpoints, saved_steps
from osprey_jax.training.mesh import rows_over
from osprey_jax.training.optimizer import learning_rate, make_optimizer
from osprey_jax.training.stages import Stage
from osprey_jax.training.state import abstract_state, make_eval_step, make_train_step, new_state

# What may differ between a run and its continuation: where and how often, not what is computed.
FREE_KEYS = {
    **dict.fromkeys(("run_dir", "log_every", "eval_every", "checkpoints"), True),
    **dict.fromkeys(("mesh", "accumulation", "loss_chunk", "attention", "remat"), True),
    "ttt": {"loss_chunk"},
    "data": {"train", "eval", "cache_dir", "processes"},  # the rows have a fingerprint
}


def train(config: Run, stage: Stage, mesh: jax.sharding.Mesh) -> None:
    """Run `stage` to its last step, going on from the newest intact checkpoint of `config.run_dir`.

    SIGTERM and SIGINT save and return. Writes `config.yaml`, `model/`, `checkpoints/`, `metrics.jsonl`,
    `tensorboard/` and `rejected.jsonl`.

    Raises:
      UserError: the run directory belongs to something else, or the loss stopped being finite.
    """
    steps = config.steps if config.steps is not None else config.epochs * len(stage.rows) // config.batch_size
    if config.epochs is not None and steps == 0:
        raise UserError(f"{len(stage.rows)} rows x {config.epochs} epochs make no batch of {config.batch_size} rows")
    optimizer = make_optimizer(config.optimizer, steps)
    rate = learning_rate(config.optimizer, steps)
    shapes = abstract_state(*stage.design.abstract, optimizer)
    train_step = make_train_step(stage.design.objective, optimizer, mesh, shapes, stage.design.frozen)
    eval_step = make_eval_step(stage.design.objective, mesh, shapes, stage.design.frozen)
    facts = {"config": _what_matters(config), "steps": steps, "data": stage.rows.fingerprint, **stage.fingerprints}
    # Nothing is written before the weights have been read and found right.
    fresh = None if saved_steps(config.run_dir / "checkpoints") else new_state(*stage.start(), optimizer)

    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(config.run_dir / "checkpoints", keep=config.checkpoints.keep))
        restored = checkpoints.restore(shapes, lambda saved: _check_same_run(saved, facts, config.run_dir))
        state, _, start = restored or (fresh, facts, 0)
        del fresh
        if restored is None:
            _describe(config, stage)
        _print_plan(config, stage, mesh, steps, start)
        if restored and start >= steps:
            print(f"already at step {start} of {steps}: nothing to do")
            return
        log = stack.enter_context(_Log(config.run_dir, start, steps, config.log_every))
        stopped = stack.enter_context(_stop_signals())
        stack.enter_context(exact_products(jax.numpy.dtype(config.compute_dtype)))
        source = batches(
            stage.rows,
            batch_size=config.batch_size,
            seed=config.seed,
            start=start * config.batch_size,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        unread: _Unread | None = None
        for step in range(start + 1, steps + 1):
            asked = time.perf_counter()
            batch = next(source)
            waited = time.perf_counter() - asked
            row_numbers = batch.pop("row")
            tokens = int(np.count_nonzero(batch["segment_ids"])) * jax.process_count()
            state, metrics = train_step(state, stage.frozen, _place(batch, mesh, config.accumulation))
            if unread is not None:
                unread.read(stage, log)
            unread = _Unread(step, metrics, row_numbers, tokens, waited, float(rate(step - 1)))

            last, stopping = step == steps, stopped()
            evaluates = last or (config.eval_every is not None and step % config.eval_every == 0)
            if last or stopping or evaluates or step % config.checkpoints.every == 0:
                unread.read(stage, log)  # a state is saved only once its metrics are known to be finite
                unread = None
            if evaluates and stage.eval_rows is not None and not stopping:
                rows = config.batch_size // config.accumulation
                began = time.perf_counter()
                values = evaluate(stage, eval_step, state, mesh, rows, stopped)
                stopping = values is None
                if values is not None:
                    log.evaluation(step, values, time.perf_counter() - began)
            if last or stopping or step % config.checkpoints.every == 0:
                checkpoints.save(step, state, facts)
            if stopping and not last:
                checkpoints.wait()
                print(f"stopped at step {step} of {steps}, saved; run the same command to go on")
                return
        if steps == 0:
            checkpoints.save(0, state, facts)
        checkpoints.wait()
    print(f"done: step {steps}, saved in {config.run_dir / 'checkpoints'}")


def evaluate(
    stage: Stage, eval_step: Callable, state: Any, mesh: jax.sharding.Mesh, rows: int, stopped: Callable[[], bool]
) -> dict[str, float] | None:
    """Means over all held-out rows, `rows` of them at a time; None once `stopped`."""
    totals = None
    process = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    for batch in eval_batches(stage.eval_rows, rows, **process):
        batch.pop("row")
        if stopped():
            return None
        metrics = eval_step(state, stage.frozen, jax.tree.map(lambda x: x[0], _place(batch, mesh, 1)))
        totals = metrics if totals is None else jax.tree.map(jax.numpy.add, totals, metrics)
    return stage.design.objective.report(jax.device_get(totals))


@dataclasses.dataclass(frozen=True)
class _Unread:
    """A step whose metrics are still on the devices."""

    step: int
    metrics: dict[str, jax.Array]
    row_numbers: np.ndarray
    tokens: int
    waited: float  # seconds for the batch
    rate: float

    def read(self, stage: Stage, log: "_Log") -> None:
        """Log the step. `UserError` where its loss or gradient is not finite."""
        metrics = jax.device_get(self.metrics)
        if not math.isfinite(metrics["loss"]) or not math.isfinite(metrics["grad_norm"]):
            ids = ", ".join(name for row in self.row_numbers[:16] for name in stage.rows.records(row))
            raise UserError(
                f"step {self.step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}; nothing of it is "
                f"saved. Its rows: {ids}. Lower optimizer.learning_rate, or look at these records"
            )
        values = stage.design.objective.report(metrics) | {"grad_norm": float(metrics["grad_norm"])}
        log.update(self.step, values | {"learning_rate": self.rate}, self.tokens, self.waited)


def _place(batch: dict[str, np.ndarray], mesh: jax.sharding.Mesh, parts: int) -> dict[str, jax.Array]:
    """This process's rows (rows, S) as a global array (parts, rows of a part, S) over all devices."""
    sharding = rows_over(mesh, leading=1)
    parted = {name: array.reshape(parts, -1, array.shape[-1]) for name, array in batch.items()}
    return {name: jax.make_array_from_process_local_data(sharding, array) for name, array in parted.items()}


# ---- the run directory


def _what_matters(config: Run) -> dict:
    return json.loads(config.model_dump_json(exclude=FREE_KEYS))


def check_run_directory(run_dir: Path) -> None:
    """`UserError` where `run_dir` holds anything that a run does not write."""
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"run_dir {run_dir} is not a directory; choose another")
    names = {path.name for path in run_dir.iterdir()} if run_dir.exists() else set()
    ours = {"checkpoints", "config.yaml", "metrics.jsonl", "model", "rejected.jsonl", "tensorboard"}
    if names and ("checkpoints" not in names or not {name for name in names if not name.startswith(".")} <= ours):
        raise UserError(f"run_dir {run_dir} holds something that is not a run; choose another")


def _describe(config: Run, stage: Stage) -> None:
    """What the checkpoints to come are of: written when there is none yet, and not changed after."""
    run_dir: Path = config.run_dir
    if jax.process_index() == 0:
        (run_dir / "model").mkdir(parents=True, exist_ok=True)
        write_text(run_dir / "config.yaml", yaml.safe_dump(json.loads(config.model_dump_json()), sort_keys=False))
        write_json(run_dir / "model" / "config.json", stage.design.hf_config)
        copy_tokenizer(stage.tokenizer, run_dir / "model")
        prepared = dict.fromkeys(rows.directory for rows in (stage.rows, stage.eval_rows) if rows is not None)
        with new_file(run_dir / REJECTED) as rejected:
            for directory in prepared:
                with (directory / REJECTED).open(encoding="utf-8") as lines:
                    rejected.writelines(lines)


def _check_same_run(saved: dict, now: dict, run_dir: Path) -> None:
    """`UserError` naming the first difference that would make this another run."""
    before, after = _flat(saved), _flat(now)
    for key in sorted(before.keys() | after.keys(), key=lambda key: (key != "config.stage", key)):
        if before.get(key) != after.get(key) and key in _FINGERPRINTS:
            raise UserError(
                f"{run_dir}: {_FINGERPRINTS[key]} changed since its checkpoints were made; bring them back or choose "
                "another run_dir"
            )
        if before.get(key) != after.get(key):
            raise UserError(
                f"{run_dir}: its checkpoints were made with {key} {before.get(key)!r}, now it is {after.get(key)!r}; "
                "go on with the old value or choose another run_dir"
            )


_FINGERPRINTS = {
    "data": "the rows of data.train",
    "start": "the files that training started from",
    "target": "the target's files",
    "tokenizer": "the tokenizer's files",
}


def _flat(tree: dict, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


def _print_plan(config: Run, stage: Stage, mesh: jax.sharding.Mesh, steps: int, start: int) -> None:
    sizes = [math.prod(x.shape) for x in jax.tree.leaves(stage.design.abstract[0])]
    lines = [
        f"{sum(sizes):,} trained parameters on {mesh.devices.size} device(s), data {mesh.shape['data']} x tensor "
        f"{mesh.shape['tensor']}, {config.compute_dtype}",
        f"data.train: {describe(stage.rows.report)}\n  in {stage.rows.directory}",
        *([] if stage.eval_rows is None else [f"data.eval: {describe(stage.eval_rows.report)}"]),
        *stage.notes,
        f"steps {start}..{steps}, {config.batch_size} rows each in {config.accumulation} part(s)",
    ]
    print("\n".join(lines), flush=True)


@contextlib.contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM or SIGINT has come. A second one acts as without this."""
    received = []

    def note(number, frame):
        received.append(number)
        for name, handler in before.items():
            signal.signal(name, handler)

    before = {name: signal.signal(name, note) for name in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(received)
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


class _Log:
    """Progress on the console, `metrics.jsonl` and TensorBoard. The first process writes, the others are silent."""

    def __init__(self, run_dir: Path, start: int, steps: int, every: int):
        self._every, self._steps, self._start = every, steps, start
        self._tokens, self._waited, self._since = 0, 0.0, time.perf_counter()
        self._active = jax.process_index() == 0
        if self._active:
            path = run_dir / "metrics.jsonl"
            kept = [line for line in path.read_text().splitlines() if _step_of(line) <= start] if path.exists() else []
            write_text(path, "".join(f"{line}\n" for line in kept))  # without what a lost part of the run wrote
            self._file = path.open("a")
            self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=start)
        self._bar = tqdm(total=steps, initial=start, unit="step", disable=not self._active or not sys.stderr.isatty())

    def update(self, step: int, values: dict[str, float], tokens: int, waited: float) -> None:
        self._tokens, self._waited = self._tokens + tokens, self._waited + waited
        self._bar.set_postfix_str(f"loss {values['loss']:.3f}", refresh=False)
        self._bar.update(step - self._bar.n)
        # The first step compiles: it says nothing of the speed.
        first = step == self._start + 1
        if step % self._every == 0 or first or step == self._steps:
            now = time.perf_counter()
            passed = now - self._since
            speed = {"tokens_per_second": self._tokens / passed, "data_wait": self._waited / passed}
            speed = {} if first else speed
            self._tokens, self._waited, self._since = 0, 0.0, now
            self._write("train", step, values | speed)

    def evaluation(self, step: int, values: dict[str, float], took: float) -> None:
        self._write("eval", step, values)
        self._since += took

    def _write(self, split: str, step: int, values: dict[str, float]) -> None:
        if not self._active:
            return
        self._file.write(json.dumps({"step": step, "split": split} | values) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(f"{split}/{name}", value, step)
        tqdm.write(f"{split} {step}/{self._steps}  {_shown(values)}", file=sys.stdout)
        sys.stdout.flush()

    def __enter__(self) -> "_Log":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        if self._active:
            self._file.close()
            self._board.close()


def _shown(values: dict[str, float]) -> str:
    """`loss 2.31  accuracy 0.42 0.35 0.31  1,234 tokens/s`: what belongs to the steps of an unroll in one place."""
    series: dict[str, list[str]] = {}
    for name, value in values.items():
        if name not in ("learning_rate", "grad_norm", "tokens_per_second", "data_wait"):
            series.setdefault(name.rstrip("0123456789").rstrip("_"), []).append(f"{value:.3f}")
    parts = [f"{name} {' '.join(numbers)}" for name, numbers in series.items()]
    if "tokens_per_second" in values:
        parts.append(f"{values['tokens_per_second']:,.0f} tokens/s, {values['data_wait']:.1%} waiting for data")
    return "  ".join(parts)


def _step_of(line: str) -> int:
    """The step of a line of metrics; a torn last line belongs to none."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return sys.maxsize
