"""Rows on the disk and as a model reads them."""

import numpy as np
import pytest

from osprey_jax.data.rows import FIELDS, Row


@pytest.fixture
def row():
    mask = np.array([0, 1, 1, 0, 0, 0, 0, 0, 1], bool)
    return Row(np.arange(150_000, 150_009, dtype=np.int32), mask, [4, 2, 3], ["a", "é🙂", "file.jsonl:3"])


def test_bytes_and_back(row):
    """Nothing is lost, whatever the number of tokens is modulo 8."""
    for n in (1, 2, 3, 4):
        whole = Row(row.token_ids[:n], row.loss_mask[:n], [n], ["x"] * n)
        for written in (row, whole):
            read = Row.from_bytes(written.to_bytes())
            assert read.token_ids.dtype == np.int32 and read.loss_mask.dtype == bool
            np.testing.assert_array_equal(read.token_ids, written.token_ids)
            np.testing.assert_array_equal(read.loss_mask, written.loss_mask)
            assert read[2:] == written[2:]


def test_padded(row):
    """Segments count from 1, positions from 0 in each; padding is zero everywhere."""
    arrays = row.padded(12)
    assert set(arrays) == set(FIELDS) and {array.dtype for array in arrays.values()} == {np.dtype(np.int32)}
    assert arrays["token_ids"].tolist() == [*range(150_000, 150_009), 0, 0, 0]
    assert arrays["loss_mask"].tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0]
    assert arrays["segment_ids"].tolist() == [1, 1, 1, 1, 2, 2, 3, 3, 3, 0, 0, 0]
    assert arrays["positions"].tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 0, 0, 0]


def test_numbers_leave_the_ids_out(row):
    """The fingerprint of rows does not depend on where their files lay."""
    assert row.numbers() == row._replace(ids=["other"] * 3).numbers()
    for changed in (row._replace(token_ids=row.token_ids[::-1]), row._replace(loss_mask=~row.loss_mask)):
        assert changed.numbers() != row.numbers()
    assert row._replace(segment_lengths=[4, 3, 2]).numbers() != row.numbers()
