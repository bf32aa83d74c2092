"""The order of rows, its resumption, and its parts."""

import itertools

import numpy as np
import pytest

from osprey_jax.command import UserError
from osprey_jax.data.pipeline import batches, eval_batches
from osprey_jax.data.rows import FIELDS


class Source:
    """Rows in memory, which count how often they are read."""

    def __init__(self, count: int, length: int):
        generator = np.random.default_rng(count)
        self.arrays = {name: generator.integers(1, 1000, (count, length)).astype(np.int32) for name in FIELDS}
        self.count, self.length, self.read = count, length, 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.read += 1
        return {name: array[index] for name, array in self.arrays.items()} | {"row": np.int32(index)}


def make_rows(count: int, length: int = 5) -> Source:
    return Source(count, length)


def take(iterator, count: int) -> list[dict[str, np.ndarray]]:
    return list(itertools.islice(iterator, count))


def order(rows: Source, count: int, **arguments) -> list[int]:
    return np.concatenate([batch["row"] for batch in take(batches(rows, **arguments), count)]).tolist()


def test_content():
    """A batch holds the rows it names, as int32."""
    rows = make_rows(7)
    for batch in take(batches(rows, batch_size=3, seed=0), 5):
        assert batch["row"].shape == (3,) and batch["row"].dtype == np.int32
        for name in FIELDS:
            assert batch[name].dtype == np.int32
            np.testing.assert_array_equal(batch[name], rows.arrays[name][batch["row"]])


@pytest.mark.parametrize(("count", "batch_size"), [(7, 3), (8, 4), (2, 5), (1, 3), (1024, 100), (1500, 1024)])
def test_epochs(count, batch_size):
    """Every epoch has each row once, also where batches run across its end or hold several epochs."""
    drawn = order(make_rows(count), -(-4 * count // batch_size), batch_size=batch_size, seed=3)
    for epoch in range(4):
        assert sorted(drawn[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_reshuffled():
    """Epochs differ from one another and from the file; another seed is another order, not the next epoch of it."""
    drawn = order(make_rows(50), 3, batch_size=50, seed=0)
    first, second, third = drawn[:50], drawn[50:100], drawn[100:]
    other = order(make_rows(50), 1, batch_size=50, seed=1)
    orders = [first, second, third, other, list(range(50))]
    assert all(a != b for a, b in itertools.combinations(orders, 2))


@pytest.mark.parametrize("step", [0, 1, 2, 3, 8, 25])
def test_resumption(step):
    """From the global position alone, in any epoch, the rest of the run is what it would have been."""
    rows = make_rows(10)
    whole = take(batches(rows, batch_size=4, seed=5), 30)
    rest = take(batches(rows, batch_size=4, seed=5, start=step * 4), 30 - step)
    for expected, batch in zip(whole[step:], rest, strict=True):
        for name in expected:
            np.testing.assert_array_equal(batch[name], expected[name])


def test_resumption_at_another_batch_size():
    """The order is one of rows: a run that goes on with another batch size repeats and skips none."""
    rows = make_rows(10)
    whole = order(rows, 10, batch_size=6, seed=5)
    assert order(rows, 12, batch_size=4, seed=5, start=12) == whole[12:]


@pytest.mark.parametrize("processes", [2, 4])
def test_processes(processes):
    """The processes' parts, one after another, are one process's batch, also after resumption in a later epoch."""
    rows = make_rows(10)
    for start in (0, 24):
        one = take(batches(rows, batch_size=8, seed=1, start=start), 6)
        parts = [
            take(batches(rows, batch_size=8, seed=1, start=start, process_index=p, process_count=processes), 6)
            for p in range(processes)
        ]
        for step, expected in enumerate(one):
            for name in expected:
                joined = np.concatenate([part[step][name] for part in parts])
                np.testing.assert_array_equal(joined, expected[name])


def test_order_is_not_stored():
    """A position far into a large data set is reached at once: only the rows asked for are read."""
    rows = make_rows(5000, length=1)
    next(batches(rows, batch_size=2, seed=0, start=10**12))
    assert 2 <= rows.read <= 40  # with those read ahead


# ---- evaluation


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8])
def test_eval(count):
    """Each row once and in order; the last batch is filled with zeros that belong to no segment and no row."""
    rows = make_rows(count)
    got = list(eval_batches(rows, 4))
    assert all(batch["row"].shape == (4,) and batch["row"].dtype == np.int32 for batch in got)
    missing = -count % 4
    assert np.concatenate([batch["row"] for batch in got]).tolist() == [*range(count), *[-1] * missing]
    for name in FIELDS:
        together = np.concatenate([batch[name] for batch in got])
        assert together.dtype == np.int32
        np.testing.assert_array_equal(together[:count], rows.arrays[name])
        assert not together[count:].any()


@pytest.mark.parametrize("count", [1, 5, 8, 11])
def test_eval_processes(count):
    """Every process has the same number of batches, and their parts join to one process's."""
    rows = make_rows(count)
    parts = [list(eval_batches(rows, 4, process_index=p, process_count=2)) for p in range(2)]
    for expected, *own in zip(eval_batches(rows, 4), *parts, strict=True):
        for name in expected:
            np.testing.assert_array_equal(np.concatenate([part[name] for part in own]), expected[name])


# ---- bad input


@pytest.mark.parametrize("function", [lambda rows, **k: batches(rows, seed=0, **k), eval_batches])
def test_bad_input(function):
    """No rows, or a batch that the processes cannot share."""
    with pytest.raises(UserError, match="no rows"):
        next(iter(function(make_rows(0), batch_size=2)))
    with pytest.raises(UserError, match="3 does not divide among 2"):
        next(iter(function(make_rows(4), batch_size=3, process_count=2)))
