"""The training loop, one for both stages. Knows nothing of the objective.

Metrics of a step are read while the next one runs, so that the devices never wait for the console.
"""

import contextlib
import dataclasses
import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml
from jax.experimental import multihost_utils

from osprey_jax.command import UserError
from osprey_jax.config import Run
from osprey_jax.data.pipeline import batches, eval_batches
from osprey_jax.data.rows import REJECTED
from osprey_jax.data.tokenizer import copy_tokenizer
from osprey_jax.files import new_file, write_json, write_text
from osprey_jax.kernels.precision import exact_products
from osprey_jax.reports.data import describe
from osprey_jax.training.checkpoint import Checkpoints, saved_steps
from osprey_jax.training.compilation import compiled
from osprey_jax.training.log import Log
from osprey_jax.training.mesh import replicated, rows_over
from osprey_jax.training.optimizer import learning_rate, make_optimizer
from osprey_jax.training.stages import Stage
from osprey_jax.training.state import abstract_state, make_eval_step, make_train_step, new_state

# What may differ between a run and its continuation: where and how often, not what is computed.
FREE_KEYS = {
    **dict.fromkeys(("run_dir", "log_every", "eval_every", "checkpoints"), True),
    **dict.fromkeys(("mesh", "accumulation", "loss_chunk", "attention", "remat", "compilation_cache"), True),
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
    rate = learning_rate(config.optimizer, steps, np)
    shapes = abstract_state(*stage.design.abstract, optimizer)
    train_step = make_train_step(stage.design.objective, optimizer, mesh, shapes, stage.design.frozen)
    eval_step = make_eval_step(stage.design.objective, mesh, shapes, stage.design.frozen)
    facts = {"config": _what_matters(config), "steps": steps, "data": stage.rows.fingerprint, **stage.fingerprints}
    _check_all_agree(config, stage, facts)
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
            _say(f"already at step {start} of {steps}: nothing to do")
            return
        log = stack.enter_context(Log(config.run_dir, start, steps, config.log_every))
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
        anyone_stops = _agreement(mesh)
        coming = None
        if start < steps:
            coming = _fetch(source, mesh, config.accumulation)
            train_step = compiled(train_step, state, stage.frozen, coming.arrays)
        unread: _Unread | None = None
        for step in range(start + 1, steps + 1):
            batch, last = coming, step == steps
            state, metrics = train_step(state, stage.frozen, batch.arrays)
            stop = anyone_stops(stopped())
            # While the devices are at it:
            coming = None if last else _fetch(source, mesh, config.accumulation)
            if coming is not None:
                log.waited(coming.waited)
            if unread is not None:
                unread.read(stage, log)
            stopping = stopped() if stop is None else unread is not None and unread.stops()  # alike in all processes
            unread = _Unread(step, metrics, stop, batch, float(rate(step - 1)))

            evaluates = last or (config.eval_every is not None and step % config.eval_every == 0)
            if last or stopping or evaluates or step % config.checkpoints.every == 0:
                unread.read(stage, log)  # a state is saved only once its metrics are known to be finite
                stopping = stopping or unread.stops()
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
                _say(f"stopped at step {step} of {steps}, saved; run the same command to go on")
                return
        if steps == 0:
            checkpoints.save(0, state, facts)
        checkpoints.wait()
    _say(f"done: step {steps}, saved in {config.run_dir / 'checkpoints'}")


def evaluate(
    stage: Stage, eval_step: Callable, state: Any, mesh: jax.sharding.Mesh, rows: int, stopped: Callable[[], bool]
) -> dict[str, float] | None:
    """Means over all held-out rows, `rows` of them at a time; None once `stopped` (where one process runs alone)."""
    totals = None
    process = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    for batch in eval_batches(stage.eval_rows, rows, **process):
        batch.pop("row")
        if jax.process_count() == 1 and stopped():
            return None
        metrics = eval_step(state, stage.frozen, _place(batch, rows_over(mesh)))
        totals = metrics if totals is None else jax.tree.map(jax.numpy.add, totals, metrics)
    return stage.design.objective.report(jax.device_get(totals))


@dataclasses.dataclass(frozen=True)
class _Batch:
    """A batch on its way to the devices."""

    arrays: dict[str, jax.Array]  # (parts, rows of a part, S), over all devices
    row_numbers: np.ndarray  # of this process
    tokens: int  # of all processes, taken to have as many each
    waited: float  # seconds


def _fetch(source: Iterator[dict[str, np.ndarray]], mesh: jax.sharding.Mesh, parts: int) -> _Batch:
    asked = time.perf_counter()
    batch = next(source)
    row_numbers = batch.pop("row")
    tokens = int(np.count_nonzero(batch["segment_ids"])) * jax.process_count()
    parted = {name: array.reshape(parts, -1, array.shape[-1]) for name, array in batch.items()}
    arrays = _place(parted, rows_over(mesh, leading=1))
    return _Batch(arrays, row_numbers, tokens, time.perf_counter() - asked)


@dataclasses.dataclass(frozen=True)
class _Unread:
    """A step whose metrics are still on the devices."""

    step: int
    metrics: dict[str, jax.Array]
    stop: jax.Array | None  # how many devices' processes were told to stop; None: there is one process
    batch: _Batch
    rate: float

    def stops(self) -> bool:
        return self.stop is not None and bool(jax.device_get(self.stop) > 0)

    def read(self, stage: Stage, log: Log) -> None:
        """Log the step. `UserError` where its loss or gradient is not finite."""
        metrics = jax.device_get(self.metrics)
        if not math.isfinite(metrics["loss"]) or not math.isfinite(metrics["grad_norm"]):
            ids = ", ".join(name for row in self.batch.row_numbers[:16] for name in stage.rows.records(row))
            raise UserError(
                f"step {self.step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}; nothing of it is "
                f"saved. Its rows: {ids}. Lower optimizer.learning_rate, or look at these records"
            )
        values = stage.design.objective.report(metrics) | {"grad_norm": float(metrics["grad_norm"])}
        log.update(self.step, values | {"learning_rate": self.rate}, self.batch.tokens)


def _place(batch: dict[str, np.ndarray], sharding: jax.sharding.Sharding) -> dict[str, jax.Array]:
    """This process's rows as global arrays over all devices."""
    return {name: jax.make_array_from_process_local_data(sharding, array) for name, array in batch.items()}


def _agreement(mesh: jax.sharding.Mesh) -> Callable[[bool], jax.Array | None]:
    """A function from what this process was told to what all were, to be read when the step's metrics are.

    A signal reaches one process; all must leave the loop after the same step, and none may wait for the others.
    """
    if jax.process_count() == 1:
        return lambda mine: None
    sharding = rows_over(mesh)
    add = jax.jit(jax.numpy.sum, out_shardings=replicated(mesh))

    def ask(mine: bool) -> jax.Array:
        own = np.full(jax.local_device_count(), mine, np.int32)
        return add(jax.make_array_from_process_local_data(sharding, own))

    return ask


# ---- the run directory


def _what_matters(config: Run) -> dict:
    return json.loads(config.model_dump_json(exclude=FREE_KEYS))


def _check_all_agree(config: Run, stage: Stage, facts: dict) -> None:
    """`UserError`, in all processes, where one has another config, other data or other files than the first.

    It would train another model on its part of the rows, or wait for the others at another step.
    """
    if jax.process_count() == 1:
        return
    own = {"compilation_cache": True, "data": {"train", "eval", "cache_dir", "processes"}}  # a host's own business
    evaluated = None if stage.eval_rows is None else stage.eval_rows.fingerprint
    mine = facts | {"config": json.loads(config.model_dump_json(exclude=own)), "eval": evaluated}
    mine["steps saved in run_dir"] = saved_steps(config.run_dir / "checkpoints")  # one that not all hosts see
    text = json.dumps(mine).encode()
    size = int(np.max(multihost_utils.process_allgather(np.int32(len(text)))))
    texts = multihost_utils.process_allgather(np.frombuffer(text.ljust(size), np.uint8))
    first, *others = [_flat(json.loads(bytes(text))) for text in texts]
    for process, other in enumerate(others, 1):
        for key in sorted(first.keys() | other.keys()):
            if first.get(key) != other.get(key):
                raise UserError(
                    f"process {process} has {key} {other.get(key)!r}, the first one {first.get(key)!r}; start all "
                    "with the same config, data, models and a run_dir that all see"
                )


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
    _say("\n".join(lines))


def _say(text: str) -> None:
    """To the console, once for all processes."""
    if jax.process_index() == 0:
        print(text, flush=True)


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
