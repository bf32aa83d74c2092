"""The trainer's word, kept in the export."""

import numpy as np
import pytest

from export.reference import FILE, Reference
from osprey_jax.command import UserError
from tests.export.exports import qwen3_trimmed


def test_saved_and_loaded(good, tmp_path):
    """Nothing is lost, and the same reference is the same bytes."""
    reference = Reference.load(good(qwen3_trimmed).directory)
    reference.save(tmp_path)
    again = Reference.load(tmp_path)
    assert (tmp_path / FILE).read_bytes() == (good(qwen3_trimmed).directory / FILE).read_bytes()
    assert (again.facts, again.digests, again.steps) == (reference.facts, reference.digests, 5)
    for row, want in zip(again.rows, good(qwen3_trimmed).rows, strict=True):
        assert np.array_equal(row.token_ids_S, want.token_ids_S) and row.turns == want.turns
    for value, want in zip(again.seen, reference.seen, strict=True):
        assert np.array_equal(value, want)


def test_small_and_without_pickle(good):
    """Whoever downloads a drafter downloads this too."""
    path = good(qwen3_trimmed).directory / FILE
    assert path.stat().st_size < 2**19
    with np.load(path, allow_pickle=False) as saved:
        assert all(saved[name].dtype != object for name in saved)


@pytest.mark.parametrize("damage", [lambda data: data[:1000], lambda data: b"", lambda data: b"no archive" * 9])
def test_damaged(good, tmp_path, damage):
    """One line, not a traceback."""
    (tmp_path / FILE).write_bytes(damage((good(qwen3_trimmed).directory / FILE).read_bytes()))
    with pytest.raises(UserError, match=r"check\.npz: damaged"):
        Reference.load(tmp_path)
