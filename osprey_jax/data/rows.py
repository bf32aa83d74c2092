"""Token rows: what every kind of data becomes before it reaches a model, and the prepared directory that holds them."""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource

from osprey_jax.command import UserError
from osprey_jax.files import read_json

FIELDS = ("token_ids", "loss_mask", "segment_ids", "positions")
MANIFEST = "manifest.json"  # what makes a prepared directory complete
REJECTED = "rejected.jsonl"
SUPERVISED = "supervised.npy"

# Lower edges of the report's bins of record lengths in tokens: four to a doubling.
LENGTH_EDGES = np.unique(np.round(2 ** (np.arange(0, 97) / 4)).astype(np.int64))


class Row(NamedTuple):
    """The tokens of a row, without its padding.

    `token_ids` int32 (n,); `loss_mask` bool (n,), where a token is taught; the lengths of its segments, which add up to
    n; the ids of the records that they came from.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    segment_lengths: list[int]
    ids: list[str]

    def numbers(self) -> bytes:
        """All of it but the ids: counts, segment lengths, tokens (int32, little-endian), mask (a bit a token)."""
        header = np.array([len(self.token_ids), len(self.segment_lengths), *self.segment_lengths], "<i4")
        return header.tobytes() + self.token_ids.astype("<i4").tobytes() + np.packbits(self.loss_mask).tobytes()

    def to_bytes(self) -> bytes:
        return self.numbers() + json.dumps(self.ids, ensure_ascii=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Row":
        tokens, segments = np.frombuffer(data, "<i4", 2)
        start = 8 + 4 * segments
        end = start + 4 * tokens
        mask_end = end + -(-tokens // 8)
        return cls(
            np.frombuffer(data, "<i4", tokens, start).astype(np.int32),
            np.unpackbits(np.frombuffer(data, np.uint8, mask_end - end, end), count=tokens).astype(bool),
            np.frombuffer(data, "<i4", segments, 8).tolist(),
            json.loads(data[mask_end:]),
        )

    def padded(self, length: int) -> dict[str, np.ndarray]:
        """The row as a model reads it: `FIELDS`, int32 (length,) each, zeros on the right."""
        n, lengths = len(self.token_ids), self.segment_lengths
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        arrays = {
            "token_ids": self.token_ids,
            "loss_mask": self.loss_mask,
            "segment_ids": np.repeat(np.arange(1, len(lengths) + 1), lengths),
            "positions": np.arange(n) - starts,
        }
        return {name: np.pad(array.astype(np.int32), (0, length - n)) for name, array in arrays.items()}


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of the records, and the rows made of those used.

    A record is a conversation or a document; a .txt file of more than `BLOCK_BYTES` counts as several.
    """

    read: int
    used: int
    cut: int  # used, but not to their end
    dropped: dict[str, int]  # reason -> records
    rows: int
    length: int  # of a row, in tokens
    tokens: int
    supervised: int
    lengths: list[int]  # records used, by their whole length: how many from each of `LENGTH_EDGES` to the next

    @property
    def fill(self) -> float:
        """Share of the rows that is not padding."""
        return self.tokens / (self.rows * self.length)


@dataclasses.dataclass(frozen=True)
class _Shard:
    """A file of rows, in the form of the file instructions that `ArrayRecordDataSource` takes."""

    filename: str
    take: int
    skip: int = 0

    @property
    def examples_in_shard(self) -> int:
        return self.take


class Rows:
    """The rows of a prepared directory (`data/preparation.py`), read as they are asked for. A source for Grain."""

    def __init__(self, directory: Path):
        """Raises `UserError` where the directory is not a complete preparation, or a file of it changed its size."""
        self.directory = directory
        manifest = read_json(directory / MANIFEST)
        try:
            self.report = Report(**manifest["report"])
            self.fingerprint: str = manifest["fingerprint"]  # of all rows but their ids
            sizes = {directory / shard["name"]: (shard["bytes"], shard["rows"]) for shard in manifest["shards"]}
        except (KeyError, TypeError) as error:
            raise UserError(f"{directory / MANIFEST}: damaged; remove {directory} and run again") from error
        for path, (size, _) in sizes.items():
            if not path.is_file() or path.stat().st_size != size:
                raise UserError(f"{path}: damaged or missing; remove {directory} and run again")
        self._source = ArrayRecordDataSource([_Shard(str(path), count) for path, (_, count) in sizes.items()])
        first = 0
        for _, count in sizes.values():  # all files are open from here on, whatever becomes of the directory
            self._row(first)
            first += count

    @property
    def length(self) -> int:
        """Tokens a row, padding included."""
        return self.report.length

    @functools.cached_property
    def supervised_count_V(self) -> np.ndarray:
        """How often each token of the tokenizer is supervised, int64 (V,)."""
        try:
            return np.load(self.directory / SUPERVISED, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{self.directory / SUPERVISED}: damaged; remove {self.directory} and run again") from error

    def __len__(self) -> int:
        return self.report.rows

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Row `index`: `FIELDS`, int32 (length,) each, and its number as `row`."""
        return self._row(index).padded(self.length) | {"row": np.int32(index)}

    def records(self, index: int) -> list[str]:
        """The ids of the records in row `index`, one a segment."""
        return self._row(index).ids

    def _row(self, index: int) -> Row:
        try:
            return Row.from_bytes(self._source[index])
        except RuntimeError as error:  # a checksum that does not hold
            raise UserError(f"{self.directory}: row {index} is damaged ({error}); remove it and run again") from error


def fingerprint(digests: list[str]) -> str:
    """One fingerprint of several, in order."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()
