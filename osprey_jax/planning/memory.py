"""Memory of a compiled step on one GPU: what lies there all the time, and what the step needs beside it."""

import dataclasses
import math
import os
import re
from typing import Any

import jax

from osprey_jax.command import UserError
from osprey_jax.planning import hlo

JAX_FRACTION = 0.75  # of a GPU's memory that JAX takes, unless told otherwise
_FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array that lives at the moment of the step's largest demand."""

    bytes: int
    name: str  # of an argument its path; of anything else shape, operation and source line
    kind: str  # "argument", "gathered weight" or "other"


@dataclasses.dataclass(frozen=True)
class Temporaries:
    """The block of memory that a step needs beside its arguments, in bytes, and what lies in it when it is fullest.

    The division is the compiler's own account of one moment. What is left are places that are taken at other moments,
    and what aligning and fitting together costs.
    """

    total: int
    gathered_weights: int  # compute-dtype copies of sharded weights
    activations_and_gradients: int
    rest: int


def device_bytes(tree: Any) -> int:
    """Bytes on one device of abstract arrays with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def needed(stats: Any) -> int:
    """What must be free on a GPU at once: arguments, the one block of temporaries, and results that reuse no argument.

    More than XLA's `peak_memory_in_bytes`, which takes the block to be no larger than what lives in it.
    """
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + stats.temp_size_in_bytes + results


def fraction() -> float:
    """The part of a GPU's memory that `train` would have, with the environment variables of this process."""
    for variable in _FRACTION_VARIABLES:
        if text := os.environ.get(variable):
            try:
                value = float(text)
            except ValueError:
                value = 0.0
            if not 0 < value <= 1:
                raise UserError(f"{variable} is {text!r}, no part of a GPU's memory (0.9)")
            return value
    return JAX_FRACTION


def alive_at_peak(live_ranges: str, assignment: str, module: hlo.Module) -> list[Buffer]:
    """What lives when the step needs most, largest first; empty where XLA does not say.

    Args:
      live_ranges, assignment: XLA's dumps of live ranges and of the buffer assignment.
    """
    section = re.search(r"^  Live ranges at \d+ \(peak\):\n((?:    .*\n)*)", live_ranges, re.MULTILINE)
    lines = re.findall(r"^    (.+?)\{([\d,]*)\}: (\d+) bytes", section[1], re.MULTILINE) if section else []
    # The shape of each value: those inside an asynchronous operation are not in the module's text.
    values = re.findall(
        r"value: <\d+ (\S+?)(?:\{([\d,]*)\})? (?:\(phi\) )?@\d+> \(size=\d+,offset=\d+\): (\S+)", assignment
    )
    shapes = {(name, index): hlo.shape(type_) for name, index, type_ in values}
    buffers = [
        _buffer(module.by_name.get(name), module, name, shapes.get((name, index), ""), int(count))
        for name, index, count in lines
    ]
    return sorted(buffers, key=lambda buffer: buffer.bytes, reverse=True)


def temporaries(stats: Any, alive: list[Buffer]) -> Temporaries:
    """`stats.temp_size_in_bytes`, divided by what lives at the peak."""
    gathered = sum(buffer.bytes for buffer in alive if buffer.kind == "gathered weight")
    other = sum(buffer.bytes for buffer in alive if buffer.kind == "other")
    return Temporaries(
        total=stats.temp_size_in_bytes,
        gathered_weights=gathered,
        activations_and_gradients=other,
        rest=stats.temp_size_in_bytes - gathered - other,
    )


def _buffer(instruction: hlo.Instruction | None, module: hlo.Module, name: str, shape: str, count: int) -> Buffer:
    if instruction is not None and instruction.opcode == "parameter":
        return Buffer(count, instruction.op_name or name, "argument")
    source = "" if instruction is None else module.source(instruction)
    operation = "" if instruction is None else re.sub(r"\{\d+\}$", "", instruction.op_name.rsplit("/", 1)[-1])
    operation = re.sub(r"[.\d]+$", "", operation or name)
    gathered = operation.replace("_", "-").startswith("all-gather")
    return Buffer(count, " ".join(filter(None, (shape, operation, source))), "gathered weight" if gathered else "other")
