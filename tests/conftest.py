"""Fixtures shared by all tests."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from osprey_jax.command import run

GOLDEN = Path(__file__).parent / "golden"

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


def pytest_collection_modifyitems(items):
    """Tests of several devices need a process that was started with them."""
    if jax.device_count() < 8:
        flag = "XLA_FLAGS=--xla_force_host_platform_device_count=8"
        for item in items:
            if "multidevice" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=f"needs 8 devices: {flag} pytest -m multidevice"))
