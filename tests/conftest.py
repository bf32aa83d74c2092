"""Fixtures shared by all tests."""

import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from osprey_jax import train
from osprey_jax.command import run

GOLDEN = Path(__file__).parent / "golden"
QWEN3 = GOLDEN / "qwen3"

# The tests compile far more than they compute.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled():
    """What the tests of one file compiled goes before the next.

    A training step takes a thousand memory mappings, of which Linux gives a process 65530.
    """
    yield
    jax.clear_caches()


@pytest.fixture(params=["qwen3", "llama"])
def golden(request) -> Path:
    """The directory of one of the two golden cases."""
    return GOLDEN / request.param


@pytest.fixture
def golden_batch(golden) -> dict[str, np.ndarray]:
    """The golden case's three rows as a batch."""
    return load_batch(golden)


def load_batch(golden: Path) -> dict[str, np.ndarray]:
    saved = np.load(golden / "batch.npz")
    segment_ids = saved["attention_mask"].astype(np.int32)
    return {
        "token_ids": saved["input_ids"].astype(np.int32),
        "loss_mask": saved["loss_mask"].astype(np.int32),
        "segment_ids": segment_ids,
        "positions": np.arange(segment_ids.shape[1], dtype=np.int32) * segment_ids,
    }


@pytest.fixture
def run_command(monkeypatch, capsys):
    """`run_command(main, *arguments) -> (exit status, stdout, stderr)`: a command, in this process."""

    def call(main, *arguments):
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        status = 0
        try:
            run(main)
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def distill(tmp_path, run_command):
    """`distill(*overrides) -> (status, stdout, stderr)`: a few steps from the golden converted drafter."""
    cache = {"cache_dir": str(tmp_path / "prepared"), "processes": 1}
    config = {
        "stage": "distill",
        "run_dir": str(tmp_path / "run"),
        "target": str(QWEN3 / "target"),
        "drafter": {"checkpoint": str(QWEN3 / "expected" / "converted")},
        "data": {"train": [str(QWEN3 / "train.jsonl")], "eval": [str(QWEN3 / "train.jsonl")], "length": 128} | cache,
        "optimizer": {"learning_rate": 1e-3},
        "ttt": {"length": 2},
        "batch_size": 4,
        "steps": 6,
        "log_every": 1,
        "checkpoints": {"every": 2, "keep": 10},
    }
    (tmp_path / "distill.yaml").write_text(yaml.safe_dump(config))
    return lambda *overrides: run_command(train.main, "--config", tmp_path / "distill.yaml", *overrides)


@pytest.fixture
def pretrain(tmp_path, run_command):
    """The same for the golden pruned backbone, on text."""
    shutil.copytree(QWEN3 / "expected" / "pruned", tmp_path / "backbone")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(QWEN3 / "source" / name, tmp_path / "backbone" / name)
    (tmp_path / "text.txt").write_text("It is the text of a free program, and you can change it. " * 200)
    config = {
        "stage": "pretrain",
        "run_dir": str(tmp_path / "run"),
        "model": {"checkpoint": str(tmp_path / "backbone")},
        "data": {"train": [str(tmp_path / "*.txt")], "length": 64, "cache_dir": str(tmp_path / "prepared")},
        "optimizer": {"learning_rate": 1e-3},
        "batch_size": 4,
        "steps": 6,
        "log_every": 1,
    }
    (tmp_path / "pretrain.yaml").write_text(yaml.safe_dump(config))
    return lambda *overrides: run_command(train.main, "--config", tmp_path / "pretrain.yaml", *overrides)


def pytest_collection_modifyitems(items):
    """Tests of several devices need a process that was started with them."""
    if jax.device_count() < 8:
        flag = "XLA_FLAGS=--xla_force_host_platform_device_count=8"
        for item in items:
            if "multidevice" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=f"needs 8 devices: {flag} pytest -m multidevice"))
