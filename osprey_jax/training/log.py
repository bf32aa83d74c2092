"""What a run says of itself: the console, `metrics.jsonl`, TensorBoard."""

import json
import sys
import time
from pathlib import Path

import jax
from tensorboardX import SummaryWriter
from tqdm import tqdm

from osprey_jax.files import write_text


class Log:
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

    def waited(self, seconds: float) -> None:
        """For data, just now: it counts where it was spent, which is before the batch's own step."""
        self._waited += seconds

    def update(self, step: int, values: dict[str, float], tokens: int) -> None:
        self._tokens += tokens
        self._bar.set_postfix_str(f"loss {values['loss']:.3f}", refresh=False)
        self._bar.update(step - self._bar.n)
        # The first interval holds the compilation: it says nothing of the speed.
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

    def __enter__(self) -> "Log":
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
