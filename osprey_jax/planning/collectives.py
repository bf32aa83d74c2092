"""What a compiled step sends between GPUs: kinds, counts and bytes, and how long the links need at least.

Bytes on a link are those of the best algorithm: of what is gathered or reduced over g GPUs, (g - 1) / g must enter
(leave) each of them. Over several hosts each host needs the others' part once, over the network of all its GPUs
together; the rest goes over NVLink.
"""

import dataclasses
import functools
import itertools
import math
import re

from osprey_jax.planning import hlo

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
LARGE = 2**20  # bytes: an all-reduce of this size sums weights' gradients; statistics and vectors are smaller


@dataclasses.dataclass(frozen=True)
class Collective:
    """All of one kind and size in a step, of one GPU."""

    kind: str
    count: int  # calls a step, loops counted
    bytes: int  # of one call, whole: what is gathered, or what is reduced before it is scattered
    gpus: int  # that take part
    nvlink: float  # bytes of one call that must cross a GPU's NVLink, in the busier direction
    network: float  # the same of a GPU's network adapter
    what: str


def collectives(module: hlo.Module, *, trips: int, gpus_a_host: int) -> list[Collective]:
    """Of a step; equal ones together, those that move most first.

    Args:
      trips: rounds of a loop whose length depends on the data.
      gpus_a_host: partitions 0..gpus_a_host-1 are on the first host, and so on.
    """
    found: dict[Collective, int] = {}
    for instruction, count in _executed(module, trips):
        one = _collective(module, instruction, gpus_a_host)
        found[one] = found.get(one, 0) + count
    merged = [dataclasses.replace(one, count=count) for one, count in found.items()]
    return sorted(merged, key=lambda one: one.bytes * one.count, reverse=True)


def large_all_reduces(found: list[Collective]) -> list[Collective]:
    """Those that may be an all-reduce of weights' gradients, where a reduce-scatter would do with half the bytes."""
    return [one for one in found if one.kind == "all-reduce" and one.bytes >= LARGE and one.gpus > 1]


def _executed(module: hlo.Module, trips: int) -> list[tuple[hlo.Instruction, int]]:
    """(collective, how often a step runs it)."""

    @functools.cache
    def of(computation: str) -> tuple[tuple[hlo.Instruction, int], ...]:
        inside = []
        for instruction in module.computations.get(computation, ()):
            if _kind(instruction) is not None:
                inside.append((instruction, 1))
            rounds = 1
            if instruction.opcode == "while":
                rounds = trips if instruction.trip_count is None else instruction.trip_count
            for called in instruction.called:
                inside += [(one, count * rounds) for one, count in of(called)]
        return tuple(inside)

    return list(of(module.entry))


def _kind(instruction: hlo.Instruction) -> str | None:
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def _collective(module: hlo.Module, instruction: hlo.Instruction, gpus_a_host: int) -> Collective:
    kind = _kind(instruction)
    groups = _groups(instruction.rest)
    members = max(len(group) for group in groups)
    hosts = max(len({gpu // gpus_a_host for gpu in group}) for group in groups)
    result = instruction.type
    if instruction.opcode.endswith("-start"):  # (operands, results, ...), but for an all-reduce, which may have results
        halves = hlo.parts(result)  # alone, several where some were combined
        both = len(halves) > 1 and (kind != "all-reduce" or halves[0].startswith("("))
        result = halves[1] if both else result
    whole = hlo.size(result) * (members if kind == "reduce-scatter" else 1)
    twice = 2 if kind == "all-reduce" else 1
    if kind == "collective-permute":
        nvlink, network = (whole, 0.0) if hosts == 1 else (0.0, whole)
    else:
        network = twice * whole * (hosts - 1) / hosts / (members / hosts)
        nvlink = twice * whole * (members - 1) / members - network
        if kind == "all-to-all":  # every pair of GPUs exchanges bytes of its own
            network = whole * (members - members / hosts) / members
            nvlink = whole * (members / hosts - 1) / members
    shapes = " ".join(hlo.shape(part) for part in hlo.parts(result))
    what = " ".join(part for part in (shapes, module.source(instruction)) if part)
    return Collective(kind, 0, whole, members, nvlink, network, what)


def _groups(attributes: str) -> list[list[int]]:
    """Partitions that take part together, from any of the forms that XLA prints."""
    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,]*\}(?:,\{[\d,]*\})*)\}", attributes):
        return [[int(i) for i in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", match[1])]
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes):
        sizes = {name: int(count) for name, count in re.findall(r"'(\w+)'=(\d+)", match[1])}
        return _along(list(sizes.values()), [list(sizes).index(name) for name in re.findall(r"'(\w+)'", match[2])])
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        dimensions = [int(d) for d in match[3].split(",")]
        order = [int(d) for d in match[4].split(",")] if match[4] else list(range(len(dimensions)))
        strides = [math.prod(dimensions[i + 1 :]) for i in range(len(dimensions))]
        index = itertools.product(*(range(dimensions[d]) for d in order))
        flat = [sum(i * strides[d] for i, d in zip(point, order, strict=True)) for point in index]
        return [flat[i : i + int(match[2])] for i in range(0, len(flat), int(match[2]))]
    raise ValueError(f"no group of partitions is read from {attributes[:200]!r}")


def _along(sizes: list[int], axes: list[int]) -> list[list[int]]:
    """Groups along some axes of a mesh whose partitions are numbered row by row."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, point in enumerate(itertools.product(*map(range, sizes))):
        groups.setdefault(tuple(i for axis, i in enumerate(point) if axis not in axes), []).append(number)
    return list(groups.values())
