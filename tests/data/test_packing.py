"""Best-fit packing: every conversation once, no row over its length, little padding."""

import time

import numpy as np
import pytest

from osprey_jax.data.packing import best_fit


@pytest.mark.parametrize(
    ("lengths", "capacity", "rows"),
    [
        ([], 8, []),
        ([8], 8, [[0]]),
        ([1, 1, 1], 3, [[0, 1, 2]]),
        ([5, 5, 5], 8, [[0], [1], [2]]),
        ([2, 3, 6, 5], 8, [[0, 2], [1, 3]]),  # longest first: taken as they come, 2 and 3 would share a row
        ([4, 4, 5, 3], 9, [[0, 2], [1, 3]]),  # of equal lengths the first is placed first
        ([3, 5, 5, 3], 8, [[0, 1], [2, 3]]),  # of equally full rows the older one is filled first
        ([70, 60, 25], 100, [[0, 2], [1]]),  # the fullest row, not the emptiest
        ([60, 50, 45, 4], 100, [[0], [1, 2, 3]]),  # nor the first that has room
        ([70, 60, 35, 20], 100, [[0, 3], [1, 2]]),  # a row passed over stays open
    ],
)
def test_by_hand(lengths, capacity, rows):
    """Longest first into the fullest row with room, ties by index; rows and indices in the order of the input."""
    assert best_fit(lengths, capacity) == rows


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_or_doubled(seed):
    """Every index is in one row, no row is over the capacity, the order is the promised one, twice the same."""
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(1, 60))
    lengths = rng.integers(1, capacity + 1, size=rng.integers(0, 300)).tolist()
    rows = best_fit(lengths, capacity)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= capacity for row in rows)
    assert rows == sorted(sorted(row) for row in rows)
    assert best_fit(np.array(lengths, np.int32), capacity) == rows


@pytest.mark.parametrize(("count", "capacity"), [(1000, 4096), (5000, 4096), (5000, 8192), (50_000, 32_768)])
def test_rows_are_full(count, capacity):
    """Lengths as conversations have them (log-normal, the longest cut): one row above the lower bound at most."""
    lengths = np.random.default_rng(0).lognormal(mean=6.5, sigma=1.0, size=count).astype(int).clip(1, capacity)
    assert len(best_fit(lengths.tolist(), capacity)) <= -(-int(lengths.sum()) // capacity) + 1


def test_cost_grows_with_the_number_of_items():
    """Every row stays open until the second half of the items comes: a scan over open rows would take 64 times."""
    capacity = 131_072

    def seconds(count):
        rng = np.random.default_rng(0)
        long, short = (rng.integers(*bounds, count) for bounds in ((capacity // 2 + 1, capacity), (1, capacity // 2)))
        lengths = np.concatenate([long, short]).tolist()
        taken = []
        for _ in range(3):
            start = time.process_time()
            best_fit(lengths, capacity)
            taken.append(time.process_time() - start)
        return min(taken)

    assert seconds(24_000) < 32 * seconds(3_000)


@pytest.mark.parametrize("length", [0, -1, 9])
def test_lengths_that_fit_no_row(length):
    with pytest.raises(ValueError, match=f"length {length} of item 1 is not within 1..8"):
        best_fit([3, length], 8)
