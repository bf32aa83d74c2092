"""One command for all benchmarks, and what they share."""

import importlib
import inspect
import sys
from pathlib import Path

import pytest

from osprey_jax.benchmark import timing
from osprey_jax.benchmark.__main__ import BENCHMARKS, main
from osprey_jax.benchmark.timing import Child, Seconds
from osprey_jax.command import UserError


def test_help_names_every_benchmark(run_command):
    status, out, _ = run_command(main, "--help")
    assert status == 0
    assert all(f"  {name} " in out and what in out for name, what in BENCHMARKS.items())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_options_reach_the_benchmark(run_command, name):
    """Each is a module whose `main` takes the options after its name."""
    module = importlib.import_module(f"osprey_jax.benchmark.{name}")
    assert list(inspect.signature(module.main).parameters) == ["argv"]
    status, out, _ = run_command(main, name, "--help")
    assert status == 0 and f"usage: python -m osprey_jax.benchmark {name} " in out


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["packing", "--unknown"], ["step", "--repeats", "0"]])
def test_bad_arguments_are_one_line(run_command, arguments):
    status, out, err = run_command(main, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1


def test_sides_take_turns():
    """Neither is always the first of its pair, and each pair has ours in front."""
    order, walls = [], iter(range(1, 9))

    def side(name):
        return lambda: order.append(name) or Seconds(next(walls), 1.0)

    pairs = timing.alternate(side("ours"), side("peer"), 4)
    assert "".join(name[0] for name in order) == "oppooppo"
    assert [(ours.wall, peer.wall) for ours, peer in pairs] == [(1, 2), (4, 3), (5, 6), (8, 7)]


def test_speedup_is_the_median_of_the_pairs():
    """A pair that a busy machine spoiled counts no more than another; clock and CPU time are apart."""
    pairs = [(Seconds(1, 2), Seconds(2, 6)), (Seconds(1, 2), Seconds(3, 8)), (Seconds(1, 2), Seconds(90, 400))]
    assert timing.speedup(pairs) == (3, 4)


CHILD = """
import sys
from osprey_jax.benchmark.timing import arguments_of_child, serve

arguments, kept = arguments_of_child(), []

def step():
    if len(kept) == arguments["steps"]:
        sys.exit("enough")
    kept.append(b"x" * arguments["bytes"])
    return len(kept)

serve(step)
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    """A process that keeps 64 MiB more after each of two steps, and then ends."""
    (tmp_path / "module_of_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Child(sys.executable, "module_of_child", {"steps": 2, "bytes": 2**26}, 1) as child:
        yield child


def test_a_child_steps_when_asked(child):
    """Its peak is that of its own memory, which grows with its steps alone, whatever this process has."""
    before = child.peak_bytes()
    assert before < 2**26
    for number in (1, 2):
        assert child.step().wall > 0
        assert child.loss == number
    assert 2 * 2**26 <= child.peak_bytes() - before < 3 * 2**26


def test_a_child_that_ends_is_an_error(child):
    child.step(), child.step()
    with pytest.raises(UserError, match=r"module_of_child ended \(status 1\)"):
        child.step()


def test_a_child_knows_its_cores(child):
    """Both sides of a comparison get the same ones, by affinity and in the environment."""
    child.step()
    process = Path(f"/proc/{child._process.pid}")
    status = (process / "status").read_text()
    allowed = next(line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list"))
    assert allowed == str(timing.cores()[0])
    environment = (process / "environ").read_text().split("\0")
    assert {"OMP_NUM_THREADS=1", "NPROC=1", "JAX_PLATFORMS=cpu"} <= set(environment)


def test_more_threads_than_cores_are_refused():
    with pytest.raises(UserError, match="--threads 4096"):
        Child(sys.executable, "json", {}, 4096)
