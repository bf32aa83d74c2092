"""`train` in two processes, as on two hosts, with four virtual devices each."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from export.to_sglang import to_sglang
from osprey_jax import train
from tests.conftest import GOLDEN

CASE = GOLDEN / "qwen3"
STARTED: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def _none_left():
    """A test that fails leaves no process behind."""
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait()


@pytest.fixture
def config(tmp_path):
    """A distillation of a few steps, over the devices of two hosts."""
    values = {
        "stage": "distill",
        "run_dir": str(tmp_path / "run"),
        "target": str(CASE / "target"),
        "drafter": {"checkpoint": str(CASE / "expected" / "converted")},
        "data": {
            "train": [str(CASE / "train.jsonl")],
            "eval": [str(CASE / "train.jsonl")],
            "length": 64,
            "cache_dir": str(tmp_path / "prepared"),
            "processes": 1,
        },
        "optimizer": {"learning_rate": 1e-3, "epsilon": 1e-2},
        "ttt": {"length": 2},
        "batch_size": 8,
        "steps": 6,
        "log_every": 1,
        "checkpoints": {"every": 2, "keep": 10},
        "mesh": {"tensor": 2},
    }
    path = tmp_path / "distill.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def start(config, *overrides, devices: int, process: int | None = None, processes: int = 2, port: int = 0):
    """The command in a process of its own; `process` of `processes`, or alone."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    command = [sys.executable, "-m", "osprey_jax.train", "--config", str(config), *map(str, overrides)]
    if process is not None:
        command.insert(3, "--distributed")
        environment |= {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_PROCESS_ID": str(process),
        }
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    STARTED.append(subprocess.Popen(command, env=environment, **streams))
    return STARTED[-1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_both(config, *overrides):
    port = free_port()
    return [start(config, *overrides, devices=4, process=i, port=port) for i in range(2)]


def finish(processes) -> list[str]:
    """What each printed; fails where one did."""
    outputs = [process.communicate(timeout=300) for process in processes]
    for process, (out, error) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, out + error
    return [out for out, _ in outputs]


def losses(run) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["split"] == "train"}


def weights(run, out):
    to_sglang(run, out)
    return load_file(out / "model.safetensors")


@pytest.mark.slow
def test_two_processes_train_as_one(config, tmp_path):
    """The same losses and weights, written once. One process finds the run finished, and goes on, on one device, from
    what two have saved."""
    outputs = finish(start_both(config))
    assert "done: step 6" in outputs[0] and "train 6/6" in outputs[0]
    assert not any(said in outputs[1] for said in ("done: step", "train 1/6", "trained parameters"))
    alone = f"run_dir={tmp_path / 'alone'}"
    finish([start(config, alone, devices=8)])
    expected, found = losses(tmp_path / "alone"), losses(tmp_path / "run")
    assert found.keys() == expected.keys() == set(range(1, 7))
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)
    two, one = weights(tmp_path / "run", tmp_path / "a"), weights(tmp_path / "alone", tmp_path / "b")
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert "already at step 6" in finish([start(config, devices=8)])[0]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    assert "steps 4..6" in finish([start(config, "mesh.tensor=1", devices=1)])[0]
    went_on = losses(tmp_path / "run")
    np.testing.assert_allclose([went_on[step] for step in expected], list(expected.values()), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 100000])
def test_a_signal_to_one_stops_both(config, tmp_path, every):
    """At the same step, with one checkpoint, from which both go on; also where each step is saved anyway."""
    processes = start_both(config, "steps=5000", f"checkpoints.every={every}")
    metrics = tmp_path / "run" / "metrics.jsonl"
    until = time.monotonic() + 240
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 2):
        assert all(process.poll() is None for process in processes)
        assert time.monotonic() < until
        time.sleep(0.1)
    processes[1].send_signal(signal.SIGTERM)
    out, _ = finish(processes)
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdecimal()]
    assert every == 1 or len(names) == 1
    saved = max(map(int, names))
    assert f"stopped at step {saved} of 5000" in out
    processes = start_both(config, "steps=5000", f"checkpoints.every={every}")
    while losses(tmp_path / "run").keys() <= set(range(saved + 2)):
        assert all(process.poll() is None for process in processes)
        assert time.monotonic() < until
        time.sleep(0.1)
    processes[0].send_signal(signal.SIGTERM)
    assert f"steps {saved}..5000" in finish(processes)[0]
    steps = list(losses(tmp_path / "run"))
    assert steps == list(range(1, len(steps) + 1))


def test_processes_that_disagree(config, tmp_path):
    """Each would train on its own terms and the run would end well: both refuse, before anything is written."""
    port = free_port()
    rates = enumerate(["1e-3", "2e-3"])
    both = [start(config, f"optimizer.learning_rate={rate}", devices=4, process=i, port=port) for i, rate in rates]
    for process in both:
        _, error = process.communicate(timeout=300)
        assert process.returncode == 2
        assert "process 1 has config.optimizer.learning_rate 0.002, the first one 0.001" in error
    assert not (tmp_path / "run").exists()


def test_no_other_process(config):
    """Without a launcher and its variables: one line."""
    variables = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "SLURM_JOB_ID")
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    command = [sys.executable, "-m", "osprey_jax.train", "--distributed", "--config", str(config)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1 and "JAX_COORDINATOR_ADDRESS" in done.stderr


def test_no_first_process(config, monkeypatch, run_command):
    """At the address that was given: one line, where JAX alone would abort in native code."""
    monkeypatch.setattr(train, "PATIENCE", 0.0)
    address = f"127.0.0.1:{free_port()}"
    for name, value in {"COORDINATOR_ADDRESS": address, "NUM_PROCESSES": "2", "PROCESS_ID": "1"}.items():
        monkeypatch.setenv(f"JAX_{name}", value)
    status, _, error = run_command(train.main, "--distributed", "--config", config)
    assert status == 2 and error.count("\n") == 1 and address in error
