"""Rows that an export is checked on: a few conversations and the points in them at which a drafter is asked.

Axes: R rows, S sequence, P points, K steps.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from osprey_jax.command import UserError
from osprey_jax.config import DistillConfig
from osprey_jax.data.conversations import Record, read_records
from osprey_jax.data.encoding import ConversationEncoder, Tokens
from osprey_jax.data.records import Rejection
from osprey_jax.data.tokenizer import load_tokenizer
from osprey_jax.models.hf_config import transformer_config

STEPS = 5  # tokens drafted before each verification, as it is served by default

_ROWS = 8
_POINTS = 64  # of a row
_EARLY = 512  # a row whose first point comes later costs much and shows no more
_LOOKED_AT = 256  # records


@dataclasses.dataclass(frozen=True)
class Row:
    """A conversation's first tokens and its supervised turns in them, each from `start` up to `end`."""

    token_ids_S: np.ndarray
    turns: tuple[tuple[int, int], ...]

    @property
    def points_P(self) -> np.ndarray:
        """Where a chain may start: p, when x[p+1] is known to be in a turn and x[p+2] is to be drafted."""
        return np.concatenate([np.arange(max(start, 1) - 1, end - 2) for start, end in self.turns])


def choose_rows(tokens: Iterable[Tokens], steps: int) -> list[Row]:
    """The first rows that ask early, each cut after its first points and the tokens that their chains read.

    Where none does, the one that asks first. May be empty: no turn has two tokens.
    """
    rows, late = [], None
    for item in tokens:
        row = _cut(item, steps)
        if row is None:
            continue
        if row.points_P[0] < _EARLY:
            rows.append(row)
        elif late is None or row.points_P[0] < late.points_P[0]:
            late = row
        if len(rows) == _ROWS:
            break
    return rows or [row for row in [late] if row is not None]


def _cut(tokens: Tokens, steps: int) -> Row | None:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], tokens.loss_mask, [False]])))
    turns, room = [], _POINTS
    for start, end in edges.reshape(-1, 2).tolist():
        end = min(end, max(start, 1) + 1 + room)
        if end - max(start, 1) >= 2 and room:
            turns.append((start, end))
            room -= end - max(start, 1) - 1
    if not turns:
        return None
    return Row(tokens.token_ids[: turns[-1][1] + steps], tuple(turns))


def points_of(rows: list[Row]) -> tuple[np.ndarray, np.ndarray]:
    """(row, position) of every point, in order, (P,) each."""
    points = [row.points_P for row in rows]
    return np.repeat(np.arange(len(rows)), [len(part) for part in points]), np.concatenate(points)


def read_tokens(rows: list[Row], steps: int) -> np.ndarray:
    """Whether the token that step k reads at a point is in the row, bool (K, P)."""
    row_P, point_P = points_of(rows)
    length_P = np.array([len(row.token_ids_S) for row in rows])[row_P]
    return point_P + 1 + np.arange(steps)[:, None] < length_P


def batch_of(rows: list[Row]) -> dict[str, np.ndarray]:
    """The rows as a model reads them, padded on the right: int32 (R, S)."""
    S = max(len(row.token_ids_S) for row in rows)
    real_RxS = np.array([np.arange(S) < len(row.token_ids_S) for row in rows], np.int32)
    token_ids_RxS = np.array([np.pad(row.token_ids_S, (0, S - len(row.token_ids_S))) for row in rows], np.int32)
    return {
        "token_ids": token_ids_RxS,
        "segment_ids": real_RxS,
        "positions": np.arange(S, dtype=np.int32) * real_RxS,
    }


# ---- where they come from


def rows_of_run(config: DistillConfig, target: Path, steps: int, records: Path | None) -> tuple[list[Row], str]:
    """Rows of `records`, else of a run's held-out data, else of what it was trained on; and which.

    Raises:
      UserError: the files are not there, or hold no usable conversation.
    """
    data = config.data
    if records is not None:
        patterns, name = [str(records)], str(records)
    elif data.eval:
        patterns, name = data.eval, "data.eval"
    else:
        patterns, name = data.train, "data.train, since data.eval names none"
    return _rows(patterns, target, data.length, data.template_options, data.only_last_turn, steps), name


def rows_of_records(path: Path, target: Path, steps: int) -> list[Row]:
    """Rows of a file of conversations. Raises `UserError` where it holds no usable one."""
    length = transformer_config(target).max_position_embeddings
    return _rows([str(path)], target, length, {}, False, steps)


def _rows(
    patterns: list[str], target: Path, length: int, options: dict[str, Any], only_last_turn: bool, steps: int
) -> list[Row]:
    encoder = ConversationEncoder(load_tokenizer(target), length, options, only_last_turn)
    records = itertools.islice(read_records(patterns), _LOOKED_AT)
    rows = choose_rows(_encoded(encoder, records), steps)
    if not rows:
        raise UserError(
            f"{', '.join(patterns)}: no conversation with an answer to check a drafter on among the first {_LOOKED_AT}"
        )
    return rows


def _encoded(encoder: ConversationEncoder, records: Iterable[Record | Rejection]) -> Iterator[Tokens]:
    usable = (record for record in records if not isinstance(record, Rejection))
    while batch := list(itertools.islice(usable, _ROWS)):
        yield from (item for item in encoder.encode(batch) if not isinstance(item, Rejection))
