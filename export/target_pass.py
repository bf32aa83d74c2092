"""What a target says about a few rows, one block in memory at a time: a target of any size fits on one device.

Axes: R rows, S sequence, T target width, V vocabulary.
"""

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from flax import nnx

from osprey_jax.kernels.attention import attend_rows
from osprey_jax.kernels.precision import exact_products
from osprey_jax.models import hf, hf_config
from osprey_jax.models.causal_lm import Block
from osprey_jax.models.transformer import RMSNorm

_HEAD_ROWS = 1 << 14  # of the head, in memory at one time


class TargetPass(NamedTuple):
    states: dict[int, np.ndarray]  # block -> its output_RxSxT, float32
    choice_RxS: np.ndarray  # the most likely token after each

    def taps(self, layers: tuple[int, ...]) -> np.ndarray:
        """(R, S, 3T)"""
        return np.concatenate([self.states[i] for i in layers], axis=-1)


def run_target(directory: Path, batch: dict[str, np.ndarray], layers: Collection[int]) -> TargetPass:
    """The outputs of some blocks and the choices of the target at `directory` on a batch, in float32.

    Raises:
      UserError: not a checkpoint that this project reads.
    """
    config = hf_config.transformer_config(directory)
    files, whole = hf.TensorFiles(directory), hf.abstract_causal_lm(config)
    hf.check_tensors(files, whole)
    block_def, abstract = nnx.split(nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0))))

    def weights(i: int) -> nnx.State:
        def read(path, variable):
            name = hf.hf_names(("layers", *path), num_layers=config.num_layers, drafter=False)[i]
            return variable.replace(jnp.asarray(files.read(name, dtype=np.float32)))

        return nnx.from_flat_state([(path, read(path, variable)) for path, variable in nnx.to_flat_state(abstract)])

    segments_RxS, positions_RxS = jnp.asarray(batch["segment_ids"]), jnp.asarray(batch["positions"])

    @jax.jit
    def run(weights, x_RxSxT):
        return nnx.merge(block_def, weights)(x_RxSxT, positions_RxS, attend_rows(segments_RxS), None)[0]

    norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
    norm.weight[...] = jnp.asarray(files.read("model.norm.weight", dtype=np.float32))
    with exact_products(jnp.float32):
        x_RxSxT = jnp.asarray(files.read("model.embed_tokens.weight")[batch["token_ids"]].astype(np.float32))
        states = {}
        for i in tqdm.trange(config.num_layers, desc="target", unit="layer", disable=None):
            x_RxSxT = run(weights(i), x_RxSxT)
            if i in layers:
                states[i] = np.asarray(x_RxSxT)
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        return TargetPass(states, _choices(norm(x_RxSxT), files, head))


def _choices(hidden_RxSxT: jax.Array, files: hf.TensorFiles, head: str) -> np.ndarray:
    """The largest logit's token, int32 (R, S), by parts of the head."""
    best_RxS, choice_RxS = jnp.full(hidden_RxSxT.shape[:2], -jnp.inf), jnp.zeros(hidden_RxSxT.shape[:2], jnp.int32)
    size = files.shape(head)[0]
    for first in range(0, size, _HEAD_ROWS):
        part_VxT = files.read(head, (slice(first, min(first + _HEAD_ROWS, size)),), np.float32)
        logits_RxSxV = jnp.einsum("rst,vt->rsv", hidden_RxSxT, part_VxT)
        better_RxS = logits_RxSxV.max(axis=-1) > best_RxS
        choice_RxS = jnp.where(better_RxS, first + jnp.argmax(logits_RxSxV, axis=-1), choice_RxS).astype(jnp.int32)
        best_RxS = jnp.maximum(best_RxS, logits_RxSxV.max(axis=-1))
    return np.asarray(choice_RxS)
