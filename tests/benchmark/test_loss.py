"""The table of the fused loss."""

import jax
import numpy as np
import pytest

from osprey_jax.benchmark import loss
from osprey_jax.command import UserError


def test_one_row_a_size(capsys):
    """Ratio and temporaries of both sides at each size; no absolute time on a CPU."""
    loss.main(["--positions", "16", "24", "--vocabularies", "40", "--chunk", "8", "--repeats", "2"])
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert all(name in header for name in loss.HEADER)
    assert [row.split()[:2] for row in rows] == [["16", "40"], ["24", "40"]]
    for row in rows:
        by_clock, _, ours_size, dense_size, ours_ms, dense_ms = row.split()[2:]
        assert min(map(float, (by_clock, ours_size, dense_size))) > 0
        assert ours_ms == dense_ms == "–"


def test_both_sides_compute_the_same():
    """Otherwise the ratio says nothing."""
    rng = np.random.default_rng(0)
    arrays = loss.shapes(lambda shape, dtype: rng.normal(size=shape).astype(dtype), 12, 30, 6, 5, np.float32)
    arrays = (*arrays[:-1], np.abs(arrays[-1]))
    ours, dense = (loss.gradients(side)(*arrays) for side in (loss.fused(4), loss.dense_cross_entropy))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(dense), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [["--positions", "0"], ["--chunk", "0"], ["--vocabularies", "x"]])
def test_bad_numbers(options):
    """One line, no traceback."""
    with pytest.raises(UserError, match="--help"):
        loss.main(options)
