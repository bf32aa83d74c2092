"""Token rows: what every kind of data becomes before it reaches a model."""

import dataclasses
import functools
import hashlib

import numpy as np

FIELDS = ("token_ids", "loss_mask", "segment_ids", "positions")


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of one length, right-padded with zeros. A Grain source: `len(rows)`, `rows[i]`.

    Attributes:
      arrays: int32 (rows, length) each: `token_ids`; `loss_mask`, 1 where a token is taught; `segment_ids`, 0 in
        padding, else 1.. for the document or conversation within the row; `positions`, from 0 in every segment.
      ids: what each row came from: a record's id, or file and document.
    """

    arrays: dict[str, np.ndarray]
    ids: list[str]

    def __post_init__(self):
        shapes = {name: array.shape for name, array in self.arrays.items()}
        if (
            set(shapes) != set(FIELDS)
            or len(set(shapes.values())) != 1
            or len(self.arrays["token_ids"]) != len(self.ids)
        ):
            raise ValueError(f"rows need {FIELDS} of one shape and an id a row, got {shapes} and {len(self.ids)} ids")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Row `index`: a copy of its arrays, (length,) each, and its number as `row`."""
        return {name: array[index].copy() for name, array in self.arrays.items()} | {"row": np.int32(index)}

    @property
    def length(self) -> int:
        """Tokens a row, padding included."""
        return self.arrays["token_ids"].shape[1]

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 over names, types, shapes and values of the arrays."""
        digest = hashlib.sha256()
        for name, array in sorted(self.arrays.items()):
            digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array))
        return digest.hexdigest()
