"""The step beside PyTorch: the same work on both sides, or no table. None of this needs PyTorch."""

import importlib.util
import re

import numpy as np
import pytest

from osprey_jax.benchmark import step, step_inputs
from osprey_jax.benchmark.__main__ import main
from osprey_jax.benchmark.step_inputs import StepShape
from osprey_jax.benchmark.timing import Seconds

TINY = StepShape(24, 40, rows=2, width=16, target_width=24, heads=2, kv_heads=1, head_dim=8, inner=32, steps=3)


def test_three_quarters_are_supervised():
    batch = step_inputs.batch(TINY)
    assert batch["loss_mask"].sum(axis=1).tolist() == [18, 18]


def test_our_step_is_the_formula():
    """The first loss is that of the unroll written down in NumPy, which is what the peer writes down in PyTorch."""
    assert step.our_step(TINY, chunk=8)() == pytest.approx(_loss_by_formula(TINY), rel=1e-5)


def test_our_step_learns():
    """It updates its state: on one batch, at a rate that shows, the loss falls."""
    learn = step.our_step(StepShape(**vars(TINY) | {"learning_rate": 1e-2}), chunk=8)
    losses = [learn() for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and losses[0] - losses[-1] > 0.05


class _Side:
    """In place of a process: steps of constant length and a given loss."""

    losses = (2.0, 2.0)
    made = 0

    def __init__(self, python, module, arguments, threads):
        self._ours = module.endswith(".step")
        self.loss = _Side.losses[not self._ours]

    def step(self):
        return Seconds(2.0, 3.0) if self._ours else Seconds(5.0, 12.0)

    def peak_bytes(self):
        return 2**30 if self._ours else 2**31

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_table(monkeypatch, run_command):
    """Ratios are peer's time over ours, and our memory over the peer's."""
    monkeypatch.setattr(step, "Child", _Side)
    status, out, err = run_command(main, "step", "--torch-python", "python", "--shapes", "512x64", "64x32")
    assert status == 0, err
    header, _, *rows = out.splitlines()
    assert re.split(r"\s{2,}", header.strip()) == list(step.HEADER)
    assert [row.split() for row in rows] == [
        ["512", "64", "2.500", "4.000", "0.500", "1.000", "2.000"],
        ["64", "32", "2.500", "4.000", "0.500", "1.000", "2.000"],
    ]


def test_sides_that_disagree_give_no_table(monkeypatch, run_command):
    monkeypatch.setattr(step, "Child", _Side)
    monkeypatch.setattr(_Side, "losses", (2.0, 2.01))
    status, out, err = run_command(main, "step", "--torch-python", "python", "--shapes", "512x64")
    assert (status, out) == (2, "") and "our loss is 2.0, the peer's 2.01" in err


def test_without_pytorch_the_command_says_how_to_get_it(monkeypatch, run_command):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    status, _, err = run_command(main, "step")
    assert status == 2 and "pip install torch==2.13.0 numpy" in err and err.count("\n") == 1


@pytest.mark.parametrize("text", ["512", "512x", "ax5", "4x100", "512x64x2"])
def test_bad_shapes_are_refused(run_command, text):
    status, _, err = run_command(main, "step", "--torch-python", "python", "--shapes", text)
    assert status == 2 and f"--shapes {text}: give" in err


def _loss_by_formula(shape: StepShape) -> float:
    """Step after step, position after position, in float64."""
    weights = {name: x.astype(np.float64) for name, x in step_inputs.drafter_weights(shape).items()}
    batch, head, S = step_inputs.batch(shape), step_inputs.target_head(shape).astype(np.float64), shape.sequence
    softmax = lambda x: (
        np.exp(x - x.max(-1, keepdims=True)) / np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)
    )
    norm = lambda x, name: x / np.sqrt((x * x).mean(-1, keepdims=True) + shape.eps) * weights[f"{name}.weight"]
    linear = lambda x, name: x @ weights[f"{name}.weight"].T
    frequency = shape.rope_theta ** (-np.arange(0, shape.head_dim, 2) / shape.head_dim)

    def rotate(x_Nxh, position):
        cos, sin = np.cos(position * frequency), np.sin(position * frequency)
        a, b = np.split(x_Nxh, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    total = 0.0
    for row in range(shape.rows):
        ids, mask = batch["token_ids"][row], batch["loss_mask"][row]
        target = softmax(np.append(batch["hidden"][row][1:], np.zeros((1, shape.target_width)), axis=0) @ head.T)
        features = batch["taps"][row].astype(np.float64) @ weights["fc.weight"].T
        seen = [[[] for _ in range(S)] for _ in range(shape.layers)]  # layer, position -> keys and values of each step
        for k in range(shape.steps):
            streams = []
            for p in range(S):
                stream = weights["embed_tokens.weight"][ids[p + 1 + k] if p + 1 + k < S else 0]
                for i in range(shape.layers):
                    name = f"layers.{i}"
                    x = np.concatenate(
                        [norm(features[p], f"{name}.input_layernorm"), norm(stream, f"{name}.hidden_norm")]
                    )
                    heads = lambda part, name=name, x=x: linear(x, f"{name}.self_attn.{part}_proj").reshape(
                        -1, shape.head_dim
                    )
                    q = rotate(norm(heads("q"), f"{name}.self_attn.q_norm"), p + k)
                    key = rotate(norm(heads("k"), f"{name}.self_attn.k_norm"), p + k)
                    group = shape.heads // shape.kv_heads
                    seen[i][p].append((np.repeat(key, group, axis=0), np.repeat(heads("v"), group, axis=0)))
                    visible = [seen[i][j][0] for j in range(p + 1)] + seen[i][p][1:]
                    scores = np.stack([(q * a).sum(-1) for a, _ in visible], axis=-1) * shape.head_dim**-0.5
                    out = np.einsum("ns,snh->nh", softmax(scores), np.stack([b for _, b in visible]))
                    stream = stream + linear(out.ravel(), f"{name}.self_attn.o_proj")
                    y = norm(stream, f"{name}.post_attention_layernorm")
                    gate = linear(y, f"{name}.mlp.gate_proj")
                    inner = gate / (1 + np.exp(-gate)) * linear(y, f"{name}.mlp.up_proj")
                    stream = stream + linear(inner, f"{name}.mlp.down_proj")
                streams.append(stream)
                if p + k < S and mask[p + k]:
                    logits = linear(norm(stream, "norm"), "lm_head")
                    log = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
                    total -= shape.decay**k * (target[p + k] * log).sum() / S / shape.rows
            features = np.stack(streams)
    return total
