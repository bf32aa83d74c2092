"""Floating-point operations of a training step on one device: executed, and what the model needs.

Axes in formulas: N positions of a device, K steps of the unroll; names of sizes as in `TransformerConfig`.
"""

import dataclasses
from math import prod
from typing import Any

from osprey_jax.models.drafter import DrafterConfig
from osprey_jax.models.transformer import TransformerConfig

# Products of (S, h) by (S, h) matrices that causal attention needs: query with key and weight with value; backward
# the weights again, and the gradients of value, weight, query and key.
_ATTENTION = {"flash_forward": 2, "flash_backward": 5}


@dataclasses.dataclass(frozen=True)
class Flops:
    """Of matrix products, and of attention: half of a full square, as causal kernels leave out the other half."""

    products: float
    attention: float

    @property
    def total(self) -> float:
        return self.products + self.attention

    def times(self, factor: float) -> "Flops":
        return Flops(self.products * factor, self.attention * factor)


def executed(jaxpr: Any, *, trips: int) -> Flops:
    """What a jaxpr computes: its `dot_general`s, scans counted by their length, and the attention kernels.

    Sizes inside `shard_map` are one device's, and so is the result. Elementwise work is left out, as is usual.

    Args:
      trips: rounds of a loop whose length depends on the data.
    """
    products = attention = 0.0
    for equation in jaxpr.eqns:
        params, name = equation.params, equation.primitive.name
        if params.get("name") in _ATTENTION:
            B, S, heads, h = equation.invars[0].aval.shape  # the queries, in both
            attention += _ATTENTION[params["name"]] * B * S * S * heads * h
            continue
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            products += 2 * prod(equation.outvars[0].aval.shape) * prod(left[i] for i in contracted)
        rounds = params["length"] if name == "scan" else trips if name == "while" else 1
        inner = [executed(sub, trips=trips) for key, value in params.items() for sub in _jaxprs(key, value)]
        if name == "cond":  # one of its branches runs
            inner = [max(inner, key=lambda flops: flops.total)] if inner else []
        products += rounds * sum(flops.products for flops in inner)
        attention += rounds * sum(flops.attention for flops in inner)
    return Flops(products, attention)


def _jaxprs(key: str, value: Any) -> list[Any]:
    """Jaxprs in a parameter of an equation; a loop's condition is left out."""
    if key == "cond_jaxpr":
        return []
    values = value if isinstance(value, tuple | list) else (value,)
    opened = [getattr(v, "jaxpr", v) for v in values]
    return [v for v in opened if hasattr(v, "eqns")]


def needed(
    trained: TransformerConfig | DrafterConfig, target: TransformerConfig | None, *, rows: int, length: int, steps: int
) -> Flops:
    """What one device's share of a step needs on paper, with every position supervised.

    Twice a weight and position forward, twice more for each gradient. The target runs forward alone and its head once,
    whatever the number of steps; `fc` needs no gradient of its input.

    Args:
      rows: of one device, in the whole step. With a tensor-parallel target, too, a device does one row's share for
        each of its rows.
      steps: K of the unroll; ignored in pretraining.
    """
    N, square = rows * length, rows * length * length
    if target is None:
        head = trained.vocab_size * trained.hidden_size
        weights = trained.num_layers * _block(trained, trained.hidden_size) + head
        return Flops(6 * N * weights, 6 * square * trained.num_layers * _width(trained))
    drafter = trained.transformer
    fc = 3 * target.hidden_size * drafter.hidden_size
    step = (
        drafter.num_layers * _block(drafter, 2 * drafter.hidden_size) + trained.draft_vocab_size * drafter.hidden_size
    )
    teacher = target.num_layers * _block(target, target.hidden_size) + target.vocab_size * target.hidden_size
    return Flops(
        N * (2 * teacher + 4 * fc + 6 * steps * step),
        2 * square * target.num_layers * _width(target) + 6 * steps * square * drafter.num_layers * _width(drafter),
    )


def _width(config: TransformerConfig) -> int:
    return config.num_heads * config.head_dim


def _block(config: TransformerConfig, input_size: int) -> int:
    """Weights of a block's matrices."""
    keys_and_values = 2 * config.num_kv_heads * config.head_dim
    mlp = 3 * config.hidden_size * config.intermediate_size
    return input_size * (_width(config) + keys_and_values) + _width(config) * config.hidden_size + mlp
