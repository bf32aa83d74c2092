"""A training step, as `train` compiles it, on random weights that are made on the devices.

Axes: A accumulated parts, B rows, S sequence.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from osprey_jax.config import Run
from osprey_jax.kernels.precision import exact_products
from osprey_jax.objectives.objective import Objective
from osprey_jax.training.compilation import compiled
from osprey_jax.training.mesh import rows_over
from osprey_jax.training.optimizer import make_optimizer
from osprey_jax.training.stages import Design
from osprey_jax.training.state import abstract_state, make_train_step, new_state


def random_values(abstract: nnx.State, seed: int) -> nnx.State:
    """Values for an abstract state, each in its own dtype and sharding: norms near one, the rest normal x 0.02."""

    def value(path: tuple, number: int, like: jax.ShapeDtypeStruct) -> jax.Array:
        is_norm = "norm" in str(path[-2])
        make = jax.jit(_values, static_argnums=(1, 2, 3), out_shardings=like.sharding)
        return make(jax.random.fold_in(jax.random.key(seed, impl="rbg"), number), like.shape, like.dtype, is_norm)

    flat = nnx.to_flat_state(abstract)
    return nnx.from_flat_state(
        [(path, leaf.replace(value(path, i, leaf.get_value()))) for i, (path, leaf) in enumerate(flat)]
    )


def _values(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype, is_norm: bool) -> jax.Array:
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.arange(shape[0], dtype=dtype)  # a vocabulary map
    if is_norm:
        return jax.random.uniform(key, shape, dtype, 0.5, 2.0)
    draw = lambda key, shape: (0.02 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
    if len(shape) < 3:
        return draw(key, shape)
    # A layer at a time: the bits for all of a stacked weight would take twice its size.
    return jax.lax.map(lambda key: draw(key, shape[1:]), jax.random.split(key, shape[0]))


class RandomRun:
    """A design's compiled step and its state, for batches in one part."""

    def __init__(
        self, config: Run, design: Design, mesh: Mesh, *, objective: Objective | None = None, frozen: Any = None
    ):
        """`objective`: in place of the design's own. `frozen`: values of another run; None: new ones."""
        self._mesh, self._dtype = mesh, jnp.dtype(config.compute_dtype)
        optimizer = make_optimizer(config.optimizer, config.steps)
        self.frozen = random_values(design.frozen, 1) if frozen is None and design.frozen is not None else frozen
        params, constants = (random_values(part, i) for i, part in enumerate(design.abstract))
        self._state = new_state(params, constants, optimizer)
        shapes = abstract_state(*design.abstract, optimizer)
        train_step = make_train_step(objective or design.objective, optimizer, mesh, shapes, design.frozen)
        rows = {"rows": config.batch_size, "length": config.data.length}
        batch = {name: x[None] for name, x in random_batch(**rows, vocab=1, segment=1).items()}
        like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._rows) for name, x in batch.items()}
        with exact_products(self._dtype):
            self._step = compiled(train_step, self._state, self.frozen, like)

    @property
    def _rows(self):
        return rows_over(self._mesh, leading=1)

    @property
    def temporary_bytes(self) -> int:
        """What the compiled step needs beside its arguments and results, a device."""
        return self._step.memory_analysis().temp_size_in_bytes

    def place(self, batch_BxS: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return {name: jax.device_put(x[None], self._rows) for name, x in batch_BxS.items()}

    def step(self, batch_AxBxS: dict[str, jax.Array]) -> float:
        """An update; returns the loss, and so waits for it."""
        self._state, metrics = self._step(self._state, self.frozen, batch_AxBxS)
        return float(jax.block_until_ready((self._state, metrics))[1]["loss"])


def random_batch(
    *, rows: int, length: int, vocab: int, segment: int, supervised: float = 0.75, seed: int = 0
) -> dict[str, np.ndarray]:
    """Full rows of segments of about `segment` tokens, of each of which the last part is supervised. int32 (B, S)."""
    random = np.random.default_rng(seed)
    fields: dict[str, list[np.ndarray]] = {"loss_mask": [], "segment_ids": [], "positions": []}
    for _ in range(rows):
        sizes: list[int] = []
        while (left := length - sum(sizes)) > 0:
            sizes.append(min(left, int(random.integers(segment // 2 + 1, segment + segment // 2 + 1))))
        fields["segment_ids"].append(np.repeat(np.arange(1, len(sizes) + 1), sizes))
        fields["positions"].append(np.concatenate([np.arange(size) for size in sizes]))
        taught = [np.arange(size) >= size - round(supervised * size) for size in sizes]
        fields["loss_mask"].append(np.concatenate(taught))
    token_ids = random.integers(vocab, size=(rows, length))
    arrays = {"token_ids": token_ids} | {name: np.stack(parts) for name, parts in fields.items()}
    return {name: x.astype(np.int32) for name, x in arrays.items()}
