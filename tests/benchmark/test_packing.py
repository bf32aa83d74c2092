"""Packed rows are compared with the same conversations one a row."""

import json

import numpy as np
import pytest

from osprey_jax.benchmark import packing
from osprey_jax.benchmark.__main__ import main
from osprey_jax.benchmark.timing import Seconds
from osprey_jax.models.hf_config import transformer_config
from osprey_jax.training.stages import prepared


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("packing") / "inputs"
    packing.write_inputs(directory, 96)
    return directory


def test_the_quickstarts_conversations(inputs):
    """Questions on code with answers, and the quickstart's target without its weights."""
    records = [json.loads(line) for line in (inputs / "conversations.jsonl").read_text().splitlines()]
    assert len(records) == 96
    assert all([turn["role"] for turn in record["conversations"]] == ["user", "assistant"] for record in records)
    assert transformer_config(inputs / "target").num_layers == 7


def test_both_kinds_have_the_same_tokens(inputs):
    one, packed = (prepared(packing.quickstart_config(inputs, 512, kind))[0] for kind in (False, True))
    assert (one.report.tokens, len(one)) == (packed.report.tokens, 96)
    assert packed.report.fill > 0.9 > 2 * one.report.fill


class _Run:
    """In place of a compiled step: it takes a second, whatever is in the batch."""

    def __init__(self, config, design, mesh):
        self.steps = 0

    def place(self, batch):
        assert batch["token_ids"].shape == (4, 512)
        return np.count_nonzero(batch["segment_ids"])

    def step(self, tokens):
        self.steps += 1


def test_padding_as_dear_as_tokens_gives_the_ratio_of_fills(inputs, monkeypatch):
    """Only tokens that are not padding count, so that a step of constant time shows the fills."""
    monkeypatch.setattr(packing, "RandomRun", _Run)
    monkeypatch.setattr(packing, "timed", lambda step: step() or Seconds(1.0, 1.0))
    length, one, packed, of_fills, ratio, part = packing.measure(inputs, 512, repeats=9)
    assert length == 512 and of_fills == packed / one
    assert ratio == pytest.approx(of_fills, rel=0.1) and part == ratio / of_fills


def test_without_the_quickstart_it_says_where_to_run(monkeypatch, tmp_path, run_command):
    monkeypatch.setattr(packing, "QUICKSTART", tmp_path)
    status, _, err = run_command(main, "packing")
    assert status == 2 and "run this from a checkout" in err
