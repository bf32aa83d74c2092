"""What a rented GPU will run works here, in small: only the platform differs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from tests.gpu import numerics

SCRIPT = Path(__file__).with_name("run.sh")


def test_script_end_to_end(tmp_path):
    """Every part gives its numbers in the JSON and a line of the table; on a CPU nothing is said of a GPU's use."""
    out = tmp_path / "results.json"
    environment = {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [str(SCRIPT), "--tiny", str(out)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *steps = json.loads(out.read_text())["parts"]
    assert {check["name"] for check in first["checks"] if check.get("ok")} == {
        "attention of the target, xla",
        "attention of the unroll, xla",
        "soft cross-entropy",
    }
    assert len(steps) == 3
    for step in steps:
        assert step["name"] in done.stdout
        assert step["seconds"] > 0 and step["model_flops"] > 0 and step["loss"] > 0
        assert step["utilisation"] is None and step["peak_bytes"] is None


def test_refuses_a_machine_without_gpu(tmp_path):
    """Real shapes on a CPU would run for hours."""
    command = [sys.executable, str(SCRIPT.with_name("measure.py")), str(tmp_path / "x.json"), "--part", "numerics"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(SCRIPT.parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: no GPU") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("steps", [0, 3])
def test_attention_that_is_wrong_is_found(monkeypatch, steps):
    """A key too few for each query is far outside the tolerance."""
    right = numerics.dense
    monkeypatch.setattr(
        numerics, "dense", lambda segments, q, k, v, memory: right(segments, q, jnp.roll(k, 1, axis=1), v, memory)
    )
    errors = numerics.attention_errors("xla", steps=steps, length=64, heads=2, kv_heads=1, head_dim=16)
    assert errors["out"] > 5 * numerics.TOLERANCE["out"]
    assert errors["gradient"] > 5 * numerics.TOLERANCE["gradient"]


def test_loss_that_is_wrong_is_found(monkeypatch):
    """A teacher that is off by a position is far outside the tolerance."""
    right = numerics.soft_cross_entropy
    shifted = lambda hidden, head, teacher, *rest, **options: right(
        hidden, head, jnp.roll(teacher, 1, axis=0), *rest, **options
    )
    sizes = {"steps": 2, "positions": 24, "width": 16, "teacher_width": 32, "vocab": 50, "chunk": 16}
    assert numerics.loss_errors(**sizes)["gradient"] < numerics.TOLERANCE["gradient"]
    monkeypatch.setattr(numerics, "soft_cross_entropy", shifted)
    errors = numerics.loss_errors(**sizes)
    assert errors["gradient"] > 5 * numerics.TOLERANCE["gradient"]
