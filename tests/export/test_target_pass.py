"""The target, one block at a time, is the target."""

import jax.numpy as jnp
import numpy as np

from export import target_pass
from export.target_pass import run_target
from osprey_jax.kernels.attention import attend_rows
from osprey_jax.models.hf import load_causal_lm
from tests.checkpoints import write_backbone
from tests.conftest import GOLDEN


def test_golden_states_and_choices(golden, golden_batch):
    """Taps and most likely tokens of an independent implementation, in both architectures, on padded rows."""
    want = np.load(golden / "expected" / "target.npz")
    layers = tuple(want["tap_layers"].tolist())
    passed = run_target(golden / "target", golden_batch, layers)
    real = golden_batch["segment_ids"] > 0
    taps, states = passed.taps(layers)[real], want["aux_hidden_states"][real]
    assert np.abs(taps - states).max() < 1e-5 * np.abs(states).max()
    assert np.array_equal(passed.choice_RxS[real], want["logits"].argmax(-1)[real])
    assert set(passed.states) == set(layers)


def test_tied_head_in_parts(tmp_path, golden_batch, monkeypatch):
    """A head without a tensor of its own, sharded files, bfloat16, and a vocabulary that no part divides."""
    import ml_dtypes

    write_backbone(GOLDEN / "llama" / "source", tmp_path / "tied", dtype=ml_dtypes.bfloat16, shards=3)
    batch = golden_batch | {"token_ids": golden_batch["token_ids"] % 64}
    whole = load_causal_lm(tmp_path / "tied")
    hidden, taps, _ = whole(
        jnp.asarray(batch["token_ids"]),
        jnp.asarray(batch["positions"]),
        attend_rows(jnp.asarray(batch["segment_ids"])),
        tap_layers=(0, 2, 4),
    )
    monkeypatch.setattr(target_pass, "_HEAD_ROWS", 100)
    passed = run_target(tmp_path / "tied", batch, {0, 2, 4})
    real = batch["segment_ids"] > 0
    assert np.array_equal(passed.choice_RxS[real], np.asarray(whole.logits(hidden)).argmax(-1)[real])
    assert len(set(passed.choice_RxS[real].tolist())) > 5 and passed.choice_RxS.max() >= 100
    np.testing.assert_allclose(passed.taps((0, 2, 4))[real], np.asarray(taps)[real], rtol=1e-4, atol=1e-3)
