"""What a run's own forward pass says on a few rows: kept beside an export, so that its files can be checked anywhere.

Axes: R rows, S sequence, P points of all rows, K steps, C largest logits, T target width, H drafter width, V draft
vocabulary.
"""

import dataclasses
import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from export.rows import Row, batch_of, points_of
from osprey_jax.command import UserError
from osprey_jax.kernels.precision import exact_products
from osprey_jax.kernels.ttt_attention import attend_unroll
from osprey_jax.models import hf
from osprey_jax.models.drafter import Drafter, DrafterConfig
from osprey_jax.objectives.ttt import unroll

FILE = "check.npz"
_FORMAT = 1
_KEPT = 16  # largest logits of a position
_AT_ONCE = 128  # positions whose logits exist at one time


class Seen(NamedTuple):
    """The trainer's logits at every point and step, by what is kept of them."""

    best_KxP: np.ndarray  # most likely token, the target's id
    top_ids_KxPxC: np.ndarray  # largest logits, ids of the draft vocabulary
    top_logits_KxPxC: np.ndarray
    logsumexp_KxP: np.ndarray
    spread_KxP: np.ndarray  # standard deviation over the vocabulary


@dataclasses.dataclass(frozen=True)
class Reference:
    rows: list[Row]
    seen: Seen
    facts: dict[str, Any]  # what was trained, from `trained_facts`
    digests: dict[str, str]  # sha256 of each tensor that was trained, float32

    @property
    def steps(self) -> int:
        return len(self.seen.best_KxP)

    def save(self, directory: Path) -> None:
        turns = [(r, *turn) for r, row in enumerate(self.rows) for turn in row.turns]
        np.savez(
            directory / FILE,
            format=np.int32(_FORMAT),
            facts=np.array(json.dumps(self.facts)),
            tensor_names=np.array(list(self.digests)),
            tensor_digests=np.array(list(self.digests.values())),
            token_ids=np.concatenate([row.token_ids_S for row in self.rows]).astype(np.int32),
            lengths=np.array([len(row.token_ids_S) for row in self.rows], np.int32),
            turns=np.array(turns, np.int32),
            **self.seen._asdict(),
        )

    @classmethod
    def load(cls, directory: Path) -> "Reference":
        """Raises `UserError` where the file is damaged or of a later format."""
        path = directory / FILE
        try:
            with np.load(path, allow_pickle=False) as saved:
                if int(saved["format"]) != _FORMAT:
                    raise UserError(f"{path}: of format {int(saved['format'])}, this reads {_FORMAT}; export again")
                token_ids = np.split(saved["token_ids"], np.cumsum(saved["lengths"])[:-1])
                turns = saved["turns"].tolist()
                rows = [Row(ids, tuple((s, e) for row, s, e in turns if row == r)) for r, ids in enumerate(token_ids)]
                digests = dict(zip(saved["tensor_names"].tolist(), saved["tensor_digests"].tolist(), strict=True))
                seen = Seen(*(saved[name] for name in Seen._fields))
                return cls(rows, seen, json.loads(str(saved["facts"])), digests)
        except (EOFError, KeyError, OSError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise UserError(f"{path}: damaged ({error}); export the drafter again") from error


def trained_facts(config: DrafterConfig, target: str) -> dict[str, Any]:
    """What a reference keeps of a run beside tensors and logits, as JSON. `target` is its fingerprint."""
    scaling = config.transformer.rope_scaling
    return {
        "tap_layers": list(config.tap_layers),
        "swap_h_and_emb": config.swap_h_and_emb,
        "rope_theta": config.transformer.rope_theta,
        "rope_scaling": None if scaling is None else {name: float(value) for name, value in vars(scaling).items()},
        "target": target,
    }


def digest(tensor: np.ndarray) -> str:
    """sha256 of a tensor's bytes."""
    return hashlib.sha256(np.ascontiguousarray(tensor).view(np.uint8).data).hexdigest()


def digests(drafter: Drafter) -> dict[str, str]:
    return {name: digest(value) for name, value in hf.model_tensors(drafter).items()}


def trainer_forward(drafter: Drafter, rows: list[Row], taps_RxSx3T: np.ndarray, steps: int) -> Seen:
    """The unroll that training differentiates, in float32, and what is kept of its logits."""
    batch = {name: jnp.asarray(value) for name, value in batch_of(rows).items()}
    row_P, point_P = points_of(rows)
    graph, weights = nnx.split(drafter)

    @jax.jit
    def streams(weights, taps_RxSx3T):
        drafter = nnx.merge(graph, weights)
        embedding_RxSxH = drafter.embed_tokens(batch["token_ids"], jnp.float32)
        beyond_H = drafter.embed_tokens(jnp.int32(0), jnp.float32)
        attend = attend_unroll(batch["segment_ids"])
        out = unroll(drafter, batch, taps_RxSx3T, embedding_RxSxH, beyond_H, steps=steps, attend=attend)
        return jnp.stack([stream_RxSxH[row_P, point_P] for stream_RxSxH in out])

    logits = jax.jit(lambda weights, stream_PxH: nnx.merge(graph, weights).logits(stream_PxH))
    target_ids = None if drafter.target_ids is None else np.asarray(drafter.target_ids[...])
    with exact_products(jnp.float32):
        stream_KxPxH = streams(weights, jnp.asarray(taps_RxSx3T))
        flat = stream_KxPxH.reshape(-1, stream_KxPxH.shape[-1])
        parts = [
            _kept(np.asarray(logits(weights, flat[i : i + _AT_ONCE])), target_ids)
            for i in range(0, len(flat), _AT_ONCE)
        ]
    whole = (np.concatenate(fields) for fields in zip(*parts, strict=True))
    return Seen(*(field.reshape(steps, len(point_P), *field.shape[1:]) for field in whole))


def _kept(logits_PxV: np.ndarray, target_ids: np.ndarray | None) -> Seen:
    """On the host: XLA's `top_k` takes a minute for a large vocabulary on a CPU."""
    count = min(_KEPT, logits_PxV.shape[-1])
    ids_PxC = np.sort(np.argpartition(-logits_PxV, count - 1, axis=-1)[:, :count], axis=-1)
    order_PxC = np.argsort(-np.take_along_axis(logits_PxV, ids_PxC, axis=-1), axis=-1, kind="stable")
    top_ids_PxC = np.take_along_axis(ids_PxC, order_PxC, axis=-1).astype(np.int32)  # the lower id first, of equal ones
    top_logits_PxC = np.take_along_axis(logits_PxV, top_ids_PxC, axis=-1)
    best_P = top_ids_PxC[:, 0] if target_ids is None else target_ids[top_ids_PxC[:, 0]]
    sum_P = np.exp(logits_PxV - top_logits_PxC[:, :1]).sum(axis=-1)
    return Seen(best_P, top_ids_PxC, top_logits_PxC, top_logits_PxC[:, 0] + np.log(sum_P), logits_PxV.std(axis=-1))
