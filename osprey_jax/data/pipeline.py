"""Rows to batches: Grain for training (shuffled, endless, resumable from one number), a plain walk for evaluation.

A batch is a dict of int32 arrays: the rows' fields, (rows, length) each, and `row`, (rows,), the numbers of the rows.
Of a batch of `batch_size` rows each process gets its contiguous part, so that the parts in the order of the processes
are the batch that one process would get.
"""

from collections.abc import Iterator

import grain
import numpy as np

from osprey_jax.command import UserError
from osprey_jax.data.rows import FIELDS, Rows

# Threads have the next batches read, unpacked and stacked while a step runs.
_PREFETCH = grain.ReadOptions(num_threads=4, prefetch_buffer_size=8)


def batches(
    rows: Rows,
    *,
    batch_size: int,
    seed: int,
    start: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches; every epoch has each row once, in an order of its own, and batches run across its end.

    The order depends on `seed` and the number of rows alone. It is a function of the position and never stored, so
    that `start`, the rows that all processes together have consumed, is all the state there is, at any batch size.

    Args:
      batch_size: rows of a batch over all processes.
      start: rows consumed before; 0 for a new run.

    Raises:
      UserError: no rows, or a batch that does not divide among the processes.
    """
    own = _own_rows(rows, batch_size, process_count)
    dataset = grain.MapDataset.source(rows).seed(seed)
    dataset = dataset.shuffle()  # before repeat: Grain then reseeds it with the epoch
    dataset = dataset.repeat()[start:].batch(own, drop_remainder=True)[process_index::process_count]
    return iter(dataset.to_iter_dataset(_PREFETCH))


def eval_batches(
    rows: Rows, batch_size: int, *, process_index: int = 0, process_count: int = 1
) -> Iterator[dict[str, np.ndarray]]:
    """Each row once, in order. The last batch is filled up with rows of zeros (segment 0), whose `row` is -1.

    Raises:
      UserError: no rows, or a batch that does not divide among the processes.
    """
    own = _own_rows(rows, batch_size, process_count)
    for first in range(process_index * own, len(rows) + process_index * own, batch_size):
        read = [rows[row] for row in range(first, min(first + own, len(rows)))]
        empty = {name: np.zeros(rows.length, np.int32) for name in FIELDS} | {"row": np.int32(-1)}
        read += [empty] * (own - len(read))
        yield {name: np.stack([row[name] for row in read]) for name in empty}


def _own_rows(rows: Rows, batch_size: int, process_count: int) -> int:
    """Rows of one process in a batch."""
    if not len(rows):
        raise UserError("there are no rows to make batches of")
    if batch_size % process_count:
        raise UserError(f"batch_size {batch_size} does not divide among {process_count} processes")
    return batch_size // process_count
