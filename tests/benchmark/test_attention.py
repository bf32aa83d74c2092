"""The table of attention kernels."""

import pytest

from osprey_jax.benchmark import attention
from osprey_jax.command import UserError


def test_one_row_a_length(capsys):
    """Ratio and temporaries of both sides at each length; no absolute time on a CPU."""
    attention.main(["--lengths", "32", "40", "--segments", "3", "--repeats", "2"])
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert all(name in header for name in attention.HEADER)
    assert [row.split()[:2] for row in rows] == [["32", "xla"], ["40", "xla"]]
    for row in rows:
        by_clock, _, ours_size, dense_size, ours_ms, dense_ms = row.split()[2:]
        assert min(map(float, (by_clock, ours_size, dense_size))) > 0
        assert ours_ms == dense_ms == "–"


@pytest.mark.parametrize("options", [["--lengths", "0"], ["--repeats", "0"], ["--segments", "-1"], ["--lengths", "x"]])
def test_bad_numbers(options):
    """One line, no traceback."""
    with pytest.raises(UserError, match="--help"):
        attention.main(options)
