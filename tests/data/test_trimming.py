"""The draft vocabulary that data asks for."""

import numpy as np
import pytest

from osprey_jax.data.trimming import coverage, most_frequent_tokens


def test_most_frequent_tokens():
    """The largest counts whatever their place, as ascending ids, and how much of the data they cover."""
    target_ids, covered = most_frequent_tokens(np.array([0, 5, 1, 9, 0, 5]), 3)
    assert (target_ids.tolist(), target_ids.dtype, covered) == ([1, 3, 5], np.int32, 19 / 20)


@pytest.mark.parametrize(("size", "ids"), [(1, [2]), (2, [1, 2]), (4, [0, 1, 2, 4])])
def test_ties_go_to_the_smaller_id(size, ids):
    """Among equals, and among tokens that never occur: the choice must not depend on the sort."""
    assert most_frequent_tokens(np.array([0, 7, 8, 0, 7, 0]), size)[0].tolist() == ids


def test_ties_in_a_large_vocabulary():
    """An unstable sort keeps the order of short arrays by accident."""
    count = np.arange(5000) % 2
    expected = [i for i in range(5000) if i % 2 or i < 1000]
    assert most_frequent_tokens(count, 3000)[0].tolist() == expected


def test_whole_vocabulary():
    """All of it covers everything; none supervised is no division by zero."""
    assert most_frequent_tokens(np.array([2, 0, 3]), 3)[1] == 1
    assert most_frequent_tokens(np.zeros(3, np.int64), 2)[1] == 0


def test_coverage_of_a_given_map():
    assert coverage(np.array([2, 0, 3, 5]), np.array([0, 3])) == 0.7


@pytest.mark.parametrize("size", [0, 4])
def test_sizes_that_the_target_does_not_have(size):
    with pytest.raises(ValueError, match=f"size {size} is not within 1..3"):
        most_frequent_tokens(np.array([2, 0, 3]), size)
