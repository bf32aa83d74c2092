"""The replay of serving against the trainer, the in-process engine and golden values."""

import numpy as np
import pytest

from export.exported import read_exported
from export.replay import Replay, Serving
from osprey_jax.decoding.requests import Request
from osprey_jax.decoding.speculate import speculate
from tests.export.exports import ANSWER, CASES, PROMPTS, change_config, change_tensors, qwen3_equal, to_bfloat16
from tests.sglang.models import TAPS, VOCAB


@pytest.mark.parametrize("case", CASES)
def test_forced_steps_are_the_trainers(good, case):
    """Two implementations that share nothing agree on every step, for every kind of drafter."""
    found = good(case)
    agreement = found.comparison.agreement(found.comparison.replay(found.serving))
    assert agreement.points_K[0] > 100 and agreement.holds
    assert (agreement.relative_K < 1e-4).all()


@pytest.mark.parametrize("case", CASES)
def test_accepted_length_is_that_of_drafting(good, case):
    """On the target's own greedy text, walking forced steps gives what real draft-and-verify gives, turn by turn."""
    found = good(case)
    requests = [Request(prompt, ANSWER) for prompt in PROMPTS]
    engine = speculate(found.target, found.drafter, requests, tap_layers=TAPS, draft_steps=5, stop_ids=(VOCAB,))
    lengths = found.comparison.accepted_lengths(found.comparison.replay(found.serving))
    assert lengths == [result.accepted_length for result in engine]
    assert np.mean(lengths) > 1.5, "a drafter this bad shows nothing"


def test_golden_streams(golden, tmp_path):
    """Every step's un-normed stream is that of an independent implementation, from true features on."""
    expected = golden / "expected"
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((expected / "converted" / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes((expected / "ttt" / "perturbed.safetensors").read_bytes())
    exported, target = read_exported(tmp_path), np.load(expected / "target.npz")
    replay = Replay(exported, Serving(tuple(target["tap_layers"]), exported.rope, True, False))
    batch, hidden = np.load(golden / "batch.npz"), np.load(expected / "ttt" / "perturbed.npz")
    table = exported.tensors["embed_tokens.weight"]
    for row, (token_ids, real) in enumerate(zip(batch["input_ids"], batch["attention_mask"] > 0, strict=True)):
        points, n = np.arange(real.sum() - 6), int(real.sum())  # all five steps read tokens of the row
        streams = replay.streams(table[token_ids[:n]], target["aux_hidden_states"][row, :n], points, 5)
        for k, stream in enumerate(streams):
            want = hidden[f"hidden_{k}_{row}"][points]
            assert np.abs(stream - want).max() < 1e-5 * np.abs(want).max()


def test_lower_precision_is_within_its_tolerance(good, tmp_path):
    """An export cast to bfloat16 is the same drafter but for rounding, and no more than that is let through."""
    found = good(qwen3_equal)
    change_tensors(found.copy(tmp_path / "x"), to_bfloat16)
    comparison = found.comparison.__class__(**vars(found.comparison) | {"exported": read_exported(tmp_path / "x")})
    agreement = comparison.agreement(comparison.replay(found.serving))
    assert agreement.holds and agreement.relative_K.max() > 1e-3


def test_older_rope_keys_alone(good, tmp_path):
    """What SGLang 0.5.9 reads is understood where transformers 5's key is absent."""
    found = good(CASES[3])
    directory = found.copy(tmp_path / "x")
    change_config(directory, rope_parameters=None)
    assert read_exported(directory).rope == found.comparison.exported.rope
    assert found.comparison.exported.rope.scaling is not None
