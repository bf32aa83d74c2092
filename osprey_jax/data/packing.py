"""Which conversations share a row: best-fit decreasing, so that little of a row is padding."""

import bisect
from collections.abc import Sequence


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths`, in rows whose sum is at most `capacity`.

    The longest first (of equal ones, the smaller index first), each into the fullest row that still has room (of
    equally full ones, the one opened first), else into a new row. What comes out follows the input's order: indices
    ascend within a row, and rows by their first index. Deterministic; O(n log n) in practice.

    Raises:
      ValueError: a length is not within 1..capacity.
    """
    for index, length in enumerate(lengths):
        if not 1 <= length <= capacity:
            raise ValueError(f"length {length} of item {index} is not within 1..{capacity}")
    rows: list[list[int]] = []
    stride = len(lengths) + 1
    open_rows: list[int] = []  # room * stride + row, ascending: one number sorts by room, then by age
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):  # stable: ties by index
        length = int(lengths[index])
        place = bisect.bisect_left(open_rows, length * stride)
        if place < len(open_rows):
            room, row = divmod(open_rows.pop(place), stride)
            rows[row].append(index)
        else:
            room, row = capacity, len(rows)
            rows.append([index])
        if room > length:
            bisect.insort(open_rows, (room - length) * stride + row)
    return sorted(sorted(row) for row in rows)
