"""What two sides take that do the same work by turns, in this process or each in one of its own.

A machine's speed changes while one measures: only the ratio of two measurements that follow one another means
something, and the ratio of their CPU times hardly feels other work. Only the standard library is needed here, since
the interpreter of a peer reads this module too.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from osprey_jax.command import ArgumentParser, UserError

PACKAGE_PARENT = Path(__file__).resolve().parents[2]


class Seconds(NamedTuple):
    wall: float
    cpu: float  # of all threads and finished children

    @classmethod
    def now(cls) -> "Seconds":
        return cls(time.perf_counter(), sum(os.times()[:4]))

    def __sub__(self, start: "Seconds") -> "Seconds":
        return Seconds(self.wall - start.wall, self.cpu - start.cpu)


def timed(function: Callable[[], Any]) -> Seconds:
    """What one call takes; the function must wait for its own result."""
    start = Seconds.now()
    function()
    return Seconds.now() - start


def alternate(ours: Callable[[], Seconds], peer: Callable[[], Seconds], repeats: int) -> list[tuple[Seconds, Seconds]]:
    """`repeats` pairs of what each side took, now one first and now the other."""
    pairs = []
    for i in range(repeats):
        if i % 2:
            of_peer = peer()
            pairs.append((ours(), of_peer))
        else:
            of_us = ours()
            pairs.append((of_us, peer()))
    return pairs


def speedup(pairs: Sequence[tuple[Seconds, Seconds]]) -> tuple[float, float]:
    """How often faster we are than the peer, (by the clock, by CPU time): medians over the pairs."""
    return (
        statistics.median(peer.wall / ours.wall for ours, peer in pairs),
        statistics.median(peer.cpu / max(ours.cpu, 1e-9) for ours, peer in pairs),
    )


def benchmark_parser(name: str, description: str) -> ArgumentParser:
    """A parser of the options of `python -m osprey_jax.benchmark NAME`."""
    return ArgumentParser(prog=f"python -m osprey_jax.benchmark {name}", description=description)


def positive(text: str) -> int:
    """The type of an option that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return int(text)


# ---- cores


def cores() -> list[int]:
    """Those that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def confine(to: list[int]) -> None:
    """This process and its threads run on these cores alone, where the system can do that."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, to)


# ---- a side in a process of its own


class Child:
    """A process that takes a step whenever it is asked to: see `serve`. A context manager."""

    def __init__(self, python: str, module: str, arguments: dict[str, Any], threads: int):
        """Runs `python -m module JSON` on the first `threads` cores, which it is also told in the environment.

        Raises:
          UserError: fewer cores.
        """
        if len(cores()) < threads:
            raise UserError(f"--threads {threads}: this process may use only {len(cores())} core(s)")
        counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC"), str(threads))
        paths = [str(PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | counts | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._name = f"{python} -m {module}"
        self._process = subprocess.Popen(
            [python, "-m", module, json.dumps(arguments | {"cores": cores()[:threads]})],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def step(self) -> Seconds:
        """What a step took."""
        answer = self._ask("step")
        self.loss: float = answer["loss"]
        return Seconds(answer["wall"], answer["cpu"])

    def peak_bytes(self) -> int:
        """The most memory that was resident in the process so far."""
        return self._ask("memory")["peak_bytes"]

    def _ask(self, command: str) -> dict[str, Any]:
        try:
            print(command, file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError) as error:
            raise UserError(f"{self._name} ended (status {self._process.wait()}); its own message is above") from error

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=10)  # its input ends, and so does it
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def arguments_of_child() -> dict[str, Any]:
    """In a child: what it was given, after it has confined itself to its cores."""
    arguments = json.loads(sys.argv[1])
    confine(arguments.pop("cores"))
    return arguments


def serve(step: Callable[[], float]) -> None:
    """In a child: call `step`, which returns its loss, for each line that says so, until the input ends."""
    for line in sys.stdin:
        if line.strip() == "step":
            start = Seconds.now()
            loss = step()
            answer = (Seconds.now() - start)._asdict() | {"loss": loss}
        else:
            answer = {"peak_bytes": peak_resident_bytes()}
        print(json.dumps(answer), flush=True)


def peak_resident_bytes() -> int:
    """Of this process since it began to run its program: `getrusage` would also count the parent it came from."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise UserError("/proc/self/status has no VmHWM; peak memory is only measured on Linux")
