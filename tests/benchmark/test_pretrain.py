"""The dense form computes what our pretraining step computes, with more memory."""

import pytest

from osprey_jax.benchmark import pretrain
from osprey_jax.benchmark.__main__ import main
from osprey_jax.benchmark.random_run import random_batch
from osprey_jax.benchmark.timing import Seconds
from osprey_jax.command import UserError


def test_table(monkeypatch, run_command):
    """Both sides train for real and agree; the table has their ratio and temporaries."""
    walls = iter([Seconds(1, 1), Seconds(3, 2)] * 5)
    monkeypatch.setattr(pretrain, "timed", lambda function: function() and next(walls))
    status, out, err = run_command(main, "pretrain", "--shapes", "1x64x512", "--repeats", "1", "--chunk", "16")
    assert status == 0, err
    rows, length, vocab, by_clock, by_cpu, temporaries, ours, dense = map(float, out.splitlines()[-1].split())
    assert (rows, length, vocab, by_clock, by_cpu) == (1, 64, 512, 3, 2)
    assert ours > 0 and dense > 0 and temporaries > 0


def test_sides_that_disagree_give_no_table(monkeypatch):
    """Here the dense side sees every key, also those of other segments and of the future."""
    monkeypatch.setattr(pretrain.jnp, "tril", lambda x: x)
    with pytest.raises(UserError, match="the two sides disagree"):
        pretrain.measure(pretrain.miniature(64), rows=1, length=32, chunk=16, repeats=1)


def test_rows_are_packed():
    """Several segments fill each row, positions start again, and a third of each segment is not supervised."""
    batch = random_batch(rows=3, length=300, vocab=7, segment=60, supervised=2 / 3)
    assert batch["segment_ids"].min() == 1 and batch["segment_ids"].max() > 3
    starts = batch["positions"] == 0
    assert (starts.sum(axis=1) == batch["segment_ids"].max(axis=1)).all()
    assert batch["loss_mask"].mean() == pytest.approx(2 / 3, abs=0.02)


@pytest.mark.parametrize("text", ["512", "1x4x9", "1x64", "axbxc", "0x64x64"])
def test_bad_shapes_are_refused(run_command, text):
    status, _, err = run_command(main, "pretrain", "--shapes", text)
    assert status == 2 and f"--shapes {text}: give" in err
