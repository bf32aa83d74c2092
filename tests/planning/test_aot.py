"""The released runs, compiled for H100s by the command itself: memory, collectives and FLOPs may not get worse.

`recorded.json` holds the bytes a GPU needs, as the command printed them when they were recorded.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.aot

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORDED = json.loads((HERE / "recorded.json").read_text())
CASES = [
    "qwen3-8b/osprey.yaml 2xh100",
    pytest.param("llama-3.3-70b/osprey.yaml 8xh100", marks=pytest.mark.slow),
    pytest.param("qwen3-4b/pretrain.yaml 8xh100", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=CASES)
def case(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def plan(case, tmp_path_factory) -> dict:
    """What `plan --json` writes, where of the checkpoints only their `config.json` exists (`models/` here)."""
    config, devices = case.split()
    out = tmp_path_factory.mktemp("plan") / "plan.json"
    command = [sys.executable, "-m", "osprey_jax.plan", "--config", ROOT / "configs" / config]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [*command, "--devices", devices, "--json", out],
        cwd=HERE,
        env={key: value for key, value in os.environ.items() if "MEM_FRACTION" not in key} | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def test_memory_rises_by_no_more_than_a_twentieth(plan, case):
    """And it fits what JAX takes of an H100."""
    assert plan["memory"]["needed"] <= 1.05 * RECORDED[case]
    assert plan["memory"]["fits"]


def test_no_gradient_is_all_reduced(plan):
    """Each is reduced to the shards that are updated, which moves half as much."""
    assert plan["large_all_reduces"] == []
    assert any(call["kind"] == "reduce-scatter" for call in plan["collectives"])


def test_no_product_is_computed_twice(plan):
    """With every position supervised and nothing computed again."""
    assert 0.99 <= plan["flops_a_position"]["ratio"]["products"] <= 1.01


def test_the_arguments_are_what_the_parts_say(plan):
    """Weights, masters, moments and batch, as shapes and shardings have them, are what XLA counts as arguments."""
    parts = dict(plan["memory"]["arguments"])
    assert parts.pop("total") == pytest.approx(sum(parts.values()), rel=1e-3)


def test_the_largest_buffers_have_names(plan):
    """A shape and what made it, largest first; together they are no more than the block."""
    buffers = plan["largest_buffers"]
    assert len(buffers) == 3 and all("[" in buffer["name"] for buffer in buffers)
    assert buffers == sorted(buffers, key=lambda buffer: -buffer["bytes"])
    assert sum(buffer["bytes"] for buffer in buffers) <= plan["memory"]["temporaries"]["total"]
    assert plan["memory"]["temporaries"]["gathered_weights"] > 0
