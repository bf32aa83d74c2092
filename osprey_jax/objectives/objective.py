"""What the training loop asks of an objective. A batch is a dict of arrays (B, S): see `data/pipeline.py`.

Everything here runs on each device's own rows and its own shards of the weights (see `parallel.py`); where an objective
needs a sum over all devices it takes one.

Three calls, because how a position is scaled must be known for the whole global batch before its first part is
differentiated: then accumulation, padding and the number of devices change no number.
"""

from typing import Any, Protocol

import jax
from flax import nnx

from osprey_jax.parallel import Layout

Batch = dict[str, jax.Array]


class Objective(Protocol):
    """Loss of a batch under parameters, of which `frozen` ones get no gradient."""

    layout: Layout

    @property
    def weights_need_lessons(self) -> bool:
        """Whether `weights` reads `lessons`; where not, they may be None."""

    def teach(self, constants: nnx.State, frozen: Any, batch: Batch) -> Any:
        """What the frozen side contributes to a part of the batch, a pytree; leaves have a leading axis B."""

    def weights(self, batch: Batch, lessons: Any) -> jax.Array:
        """Scaling of each supervised position, float32 (..., B, S), from the whole global batch and its lessons."""

    def loss(
        self, params: nnx.State, constants: nnx.State, frozen: Any, batch: Batch, lessons: Any, weights: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(loss, metrics) of a part; both are sums, so parts and devices add up to the batch."""

    def report(self, metrics: dict[str, jax.Array]) -> dict[str, float]:
        """Summed metrics as what is logged: `loss` as optimised, where given, and means over supervised positions."""
