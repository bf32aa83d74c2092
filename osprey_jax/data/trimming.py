"""A draft vocabulary smaller than the target's: the tokens that the data supervises most. V: target vocabulary."""

import numpy as np


def most_frequent_tokens(count_V: np.ndarray, size: int) -> tuple[np.ndarray, float]:
    """(target ids of the `size` most frequent tokens, ascending int32; their share of all that is counted).

    Ties go to the smaller id.

    Args:
      count_V: how often the data supervises each target token, integers.

    Raises:
      ValueError: `size` is not within 1..V.
    """
    if not 1 <= size <= len(count_V):
        raise ValueError(f"size {size} is not within 1..{len(count_V)}")
    target_ids = np.sort(np.argsort(-count_V, kind="stable")[:size]).astype(np.int32)
    return target_ids, coverage(count_V, target_ids)


def coverage(count_V: np.ndarray, target_ids: np.ndarray) -> float:
    """Share of the supervised tokens that are among `target_ids`; 0 where none is supervised."""
    return float(count_V[target_ids].sum() / max(count_V.sum(), 1))
