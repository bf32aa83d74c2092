"""A replay of serving beside the trainer's forward pass: where they agree, and how far a draft would get.

Axes: R rows, S sequence, P points of all rows, K steps, C largest logits.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np

from export.exported import Exported
from export.reference import Seen
from export.replay import Replay, Serving
from export.rows import Row, points_of, read_tokens
from export.target_pass import TargetPass
from osprey_jax.models import hf

# Largest difference of two logits, in standard deviations of the logits of that position, by the files' coarsest dtype.
# At step 0; each later step of a chain adds as much, since it reads what the one before has rounded.
TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}

_AT_ONCE = 256  # positions whose logits exist at one time


class Replayed(NamedTuple):
    """The replay's logits at every point and step, by what the trainer's are compared with."""

    best_KxP: np.ndarray  # most likely token, the target's id
    best_logit_KxP: np.ndarray
    trainers_KxP: np.ndarray  # the trainer's most likely token, by the offsets of the files
    at_top_KxPxC: np.ndarray  # logits of the trainer's largest
    logsumexp_KxP: np.ndarray


@dataclasses.dataclass(frozen=True)
class Agreement:
    """By step: points compared, share of them with the same best token, largest difference of logits."""

    points_K: np.ndarray
    share_K: np.ndarray
    difference_K: np.ndarray
    relative_K: np.ndarray  # in standard deviations of the position's logits
    tolerance_K: np.ndarray

    @property
    def holds(self) -> bool:
        return bool((self.share_K == 1).all() and (self.relative_K <= self.tolerance_K).all())


@dataclasses.dataclass(frozen=True)
class Comparison:
    """An export, and what the trainer and the target say on the same rows."""

    exported: Exported
    target_dir: Path
    rows: list[Row]
    passed: TargetPass
    seen: Seen

    @property
    def steps(self) -> int:
        return len(self.seen.best_KxP)

    def replay(self, serving: Serving) -> Replayed:
        replay, taps_RxSx3T = Replay(self.exported, serving), self.passed.taps(serving.tap_layers)
        files = hf.TensorFiles(self.target_dir)
        table = files.read("model.embed_tokens.weight") if serving.target_embedding else None
        streams = []
        for row, taps_Sx3T in zip(self.rows, taps_RxSx3T, strict=True):
            rows_SxH = (self.exported.tensors["embed_tokens.weight"] if table is None else table)[row.token_ids_S]
            taps_Sx3T = taps_Sx3T[: len(row.token_ids_S)]
            streams.append(replay.streams(rows_SxH.astype(np.float32), taps_Sx3T, row.points_P, self.steps))
        stream_KxPxH = np.concatenate([np.stack(part) for part in streams], axis=1)
        flat, top = stream_KxPxH.reshape(-1, stream_KxPxH.shape[-1]), self.seen.top_ids_KxPxC
        flat_top = top.reshape(-1, top.shape[-1])
        parts = [
            _summary(replay, flat[i : i + _AT_ONCE], flat_top[i : i + _AT_ONCE]) for i in range(0, len(flat), _AT_ONCE)
        ]
        whole = (np.concatenate(fields) for fields in zip(*parts, strict=True))
        return Replayed(*(field.reshape(*top.shape[:2], *field.shape[1:]) for field in whole))

    def agreement(self, replayed: Replayed) -> Agreement:
        """The same token: the trainer's best has the largest logit here too, but for rounding, and the same id."""
        coarsest = max((t.dtype.name for t in self.exported.tensors.values()), key=lambda d: TOLERANCE.get(d, 0))
        seen, read_KxP = self.seen, read_tokens(self.rows, self.steps)
        tolerance_Kx1 = TOLERANCE[coarsest] * np.arange(1, self.steps + 1)[:, None]
        spread_KxP = np.maximum(seen.spread_KxP, 1e-6)
        short_KxP = replayed.best_logit_KxP - replayed.at_top_KxPxC[..., 0]
        same_KxP = (replayed.trainers_KxP == seen.best_KxP) & (short_KxP <= 2 * tolerance_Kx1 * spread_KxP)
        difference_KxP = np.maximum(
            np.abs(replayed.at_top_KxPxC - seen.top_logits_KxPxC).max(axis=-1),
            np.abs(replayed.logsumexp_KxP - seen.logsumexp_KxP),
        )
        difference_KxP = np.where(read_KxP, difference_KxP, 0)
        points_K = read_KxP.sum(axis=1)
        return Agreement(
            points_K,
            np.where(points_K > 0, (same_KxP & read_KxP).sum(axis=1) / np.maximum(points_K, 1), 1),
            difference_KxP.max(axis=1),
            (difference_KxP / spread_KxP).max(axis=1),
            tolerance_Kx1[:, 0],
        )

    def right(self, replayed: Replayed) -> np.ndarray:
        """Share of the points at which the best token is the target's choice, by step (K,)."""
        row_P, point_P = points_of(self.rows)
        read_KxP = read_tokens(self.rows, self.steps)
        at_KxP = np.minimum(point_P + 1 + np.arange(self.steps)[:, None], self.passed.choice_RxS.shape[1] - 1)
        right_KxP = (replayed.best_KxP == self.passed.choice_RxS[row_P, at_KxP]) & read_KxP
        return right_KxP.sum(axis=1) / np.maximum(read_KxP.sum(axis=1), 1)

    def accepted_lengths(self, replayed: Replayed) -> list[float]:
        """Tokens a verification yields in each turn, if the target's choices were the turn's tokens.

        As SGLang counts: a turn's first token comes without a verification, and counts.
        """
        lengths, first = [], 0
        for row in self.rows:
            best_KxP = replayed.best_KxP[:, first : first + len(row.points_P)]
            first += len(row.points_P)
            lengths += _of_row(row, best_KxP)
        return lengths


def _summary(replay: Replay, stream_PxH: np.ndarray, top_ids_PxC: np.ndarray) -> Replayed:
    logits_PxV = replay.logits(stream_PxH)
    best_P = logits_PxV.argmax(axis=-1)
    best_logit_P = logits_PxV.max(axis=-1)
    total_P = np.exp(logits_PxV - best_logit_P[:, None]).sum(axis=-1)
    return Replayed(
        replay.target_ids(best_P),
        best_logit_P,
        replay.target_ids(top_ids_PxC[:, 0]),
        np.take_along_axis(logits_PxV, top_ids_PxC, axis=-1),
        best_logit_P + np.log(total_P),
    )


def _of_row(row: Row, best_KxP: np.ndarray) -> list[float]:
    column = {int(p): i for i, p in enumerate(row.points_P)}
    lengths = []
    for start, end in row.turns:
        start = max(start, 1)
        newest, verifications = start, 0  # x[newest] is the last token known
        while newest < end - 1:
            drafted_K, true = best_KxP[:, column[newest - 1]], row.token_ids_S[newest + 1 : end]
            n = min(len(drafted_K), len(true))
            wrong = np.flatnonzero(drafted_K[:n] != true[:n])
            accepted = int(wrong[0]) if len(wrong) else n
            newest += accepted + 1
            verifications += 1
        lengths.append((end - start) / verifications)
    return lengths
