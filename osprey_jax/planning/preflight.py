"""The plan of a run: what its step needs, from the compiled step and stated peaks. All numbers are of one GPU."""

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from osprey_jax.command import UserError
from osprey_jax.config import DistillConfig, PretrainConfig
from osprey_jax.data.preparation import find_prepared
from osprey_jax.kernels import mosaic
from osprey_jax.parallel import DATA, TENSOR
from osprey_jax.planning import flops, memory
from osprey_jax.planning.collectives import Collective, collectives, large_all_reduces
from osprey_jax.planning.compiled import CompiledStep, Step, compile_step
from osprey_jax.planning.hardware import Cluster
from osprey_jax.training.stages import recipe

TrainConfig = PretrainConfig | DistillConfig


def preflight(config: TrainConfig, cluster: Cluster, compiled: CompiledStep, supervised: float) -> dict[str, Any]:
    """The plan as a JSON object, sizes in bytes and times in seconds.

    Args:
      compiled: `compile_step` of the config and cluster.
      supervised: share of the positions that the loss supervises; the others cost no head.
    """
    step, design = compiled.step, compiled.step.design
    positions = config.batch_size * config.data.length // cluster.gpus  # of one GPU in a step
    trips = _loss_rounds(config, positions // config.accumulation, supervised)
    executed = flops.executed(compiled.jaxpr, trips=trips)
    rows, steps = config.batch_size // cluster.gpus, config.ttt.length if isinstance(config, DistillConfig) else 1
    needed = flops.needed(design.trained, design.target, rows=rows, length=config.data.length, steps=steps)
    calls = collectives(compiled.module, trips=trips, gpus_a_host=cluster.gpus_a_host)
    floor = _floor(config, cluster, step, executed, calls)
    return {
        "devices": {
            "gpus": cluster.gpus,
            "hosts": cluster.hosts,
            "kind": cluster.gpu.kind,
            "name": cluster.gpu.name,
            "sources": cluster.gpu.sources,
        },
        "mesh": {axis: step.mesh.shape[axis] for axis in (DATA, TENSOR)},
        "batch": {
            "rows_a_gpu": rows // config.accumulation,
            "accumulation": config.accumulation,
            "length": config.data.length,
            "positions_a_step": config.batch_size * config.data.length,
            "supervised": supervised,
        },
        "design": design.notes,
        "attention": design.objective.attention,
        "mosaic_needs": _mosaic_needs(config, compiled),
        "compute_dtype": config.compute_dtype,
        "memory": _memory(cluster, compiled),
        "largest_buffers": [dataclasses.asdict(buffer) for buffer in compiled.alive if buffer.kind != "argument"][:3],
        "largest_arguments": [dataclasses.asdict(buffer) for buffer in compiled.alive if buffer.kind == "argument"][:3],
        "flops_a_position": {
            "executed": dataclasses.asdict(executed.times(1 / positions)),
            "model": dataclasses.asdict(needed.times(1 / positions)),
            "ratio": {
                "products": executed.products / needed.products,
                "attention": executed.attention / needed.attention,
                "total": executed.total / needed.total,
            },
        },
        "collectives": [dataclasses.asdict(call) for call in calls],
        "large_all_reduces": [dataclasses.asdict(call) for call in large_all_reduces(calls)],
        "floor": floor,
        "run": _run(config, cluster, floor["seconds"]),
        "seconds": {"trace": compiled.trace_seconds, "compile": compiled.compile_seconds},
        "jax": jax.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def largest_rows(
    config: TrainConfig, cluster: Cluster, show: Callable[[int, int, int], None]
) -> tuple[TrainConfig, CompiledStep] | None:
    """The config with the largest number of rows a GPU that fit, and its step; None where not even one does.

    Memory grows nearly by the same with every row: the next try is where the last two say it ends.

    Args:
      show: called after each try with the rows, the bytes they need and the bytes there are.
    """
    available = _available(cluster)
    tried: dict[int, int] = {}
    largest = None
    low, high = 0, None  # low fits, high does not
    rows = max(config.batch_size // config.accumulation // cluster.gpus, 1)
    while high is None or high - low > 1:
        batch_size = rows * cluster.gpus * config.accumulation
        one = config.model_copy(update={"batch_size": batch_size})
        compiled = compile_step(one, cluster)
        tried[rows] = memory.needed(compiled.stats)
        show(rows, tried[rows], available)
        if tried[rows] <= available:
            low, largest = rows, (one, compiled)
        else:
            high = rows
        rows = _next_guess(tried, available, low, high)
    return largest


def _next_guess(tried: dict[int, int], available: int, low: int, high: int | None) -> int:
    """Rows between those that fit and those that do not, by a straight line through the two nearest tries."""
    guess = 2 * low if high is None else (low + high) // 2
    nearest = sorted(tried, key=lambda rows: abs(available - tried[rows]))[:2]
    if len(nearest) == 2 and tried[nearest[0]] != tried[nearest[1]]:
        one, other = nearest
        slope = (tried[other] - tried[one]) / (other - one)
        if slope > 0:
            guess = one + math.floor((available - tried[one]) / slope)
    return max(low + 1, min(guess, 4 * low) if high is None else min(guess, high - 1))


def _mosaic_needs(config: TrainConfig, compiled: CompiledStep) -> str | None:
    """Why the faster kernel is not the one in use, where the config leaves the choice."""
    design, device = compiled.step.design, compiled.step.mesh.devices.flat[0]
    if design.objective.attention == "mosaic" or config.attention == "xla":
        return None
    trained = design.trained if design.target is None else design.trained.transformer
    dtype = jnp.dtype(config.compute_dtype)
    needs = (mosaic.unmet(device, dtype, model.head_dim) for model in (trained, design.target) if model is not None)
    return next(filter(None, needs), None)


def _loss_rounds(config: TrainConfig, positions: int, supervised: float) -> int:
    """Chunks that the loss walks on one device, for `positions` of which a share is supervised."""
    chunk = config.ttt.loss_chunk if isinstance(config, DistillConfig) else config.loss_chunk
    return math.ceil(supervised * positions / chunk)


# ---- memory


def _available(cluster: Cluster) -> int:
    return int(cluster.gpu.memory * memory.fraction())


def _memory(cluster: Cluster, compiled: CompiledStep) -> dict[str, Any]:
    step, stats = compiled.step, compiled.stats
    needed, available = memory.needed(stats), _available(cluster)
    parts = {
        "target": memory.device_bytes(step.design.frozen),
        "masters": memory.device_bytes(step.state.params),
        "moments": memory.device_bytes(step.state.opt_state),
        "constants": memory.device_bytes(step.state.constants),
        "batch": memory.device_bytes(step.batch),
    }
    return {
        "needed": needed,
        "peak": stats.peak_memory_in_bytes,  # XLA's
        "arguments": {**parts, "total": stats.argument_size_in_bytes},
        "temporaries": dataclasses.asdict(memory.temporaries(stats, compiled.alive)),
        "device": cluster.gpu.memory,
        "fraction": memory.fraction(),
        "available": available,
        "fits": needed <= available,
    }


# ---- time


def _floor(
    config: TrainConfig, cluster: Cluster, step: Step, executed: flops.Flops, calls: list[Collective]
) -> dict[str, Any]:
    """The time below which no step comes at the stated peaks, were everything done at once."""
    gpu = cluster.gpu
    moved = _moved(config, step)
    nvlink = sum(call.nvlink * call.count for call in calls)
    network = sum(call.network * call.count for call in calls)
    seconds = {
        "compute": executed.total / gpu.flops[config.compute_dtype],
        "memory": moved / gpu.memory_speed,
        "nvlink": nvlink / gpu.nvlink,
        "network": network / gpu.network,
    }
    return {
        "seconds": max(seconds.values()),
        "bound_by": max(seconds, key=seconds.get),
        "each": seconds,
        "bytes": {"memory": moved, "nvlink": nvlink, "network": network},
        "peaks": {
            "flops": gpu.flops[config.compute_dtype],
            "memory": gpu.memory_speed,
            "nvlink": gpu.nvlink,
            "network": gpu.network,
        },
    }


def _moved(config: TrainConfig, step: Step) -> int:
    """Bytes of memory that a step must read or write: the target's weights, masters and moments; no activations."""
    design, weights = step.design, 0
    if design.frozen is not None:
        weights = memory.device_bytes(design.frozen)
        if not design.target.tie_word_embeddings:
            weights -= memory.device_bytes(design.frozen["embed_tokens"])  # of which only the batch's rows are read
    return config.accumulation * weights + 2 * memory.device_bytes((step.state.params, step.state.opt_state))


def _run(config: TrainConfig, cluster: Cluster, seconds: float) -> dict[str, Any]:
    """GPU-hours at the floor. Steps are unknown where they follow from rows that are not prepared yet."""
    steps = config.steps
    if steps is None and (rows := _prepared_rows(config)) is not None:
        steps = config.epochs * rows // config.batch_size
    hours = seconds * cluster.gpus / 3600  # of all GPUs, a step
    positions = config.batch_size * config.data.length
    return {
        "steps": steps,
        "gpu_hours": None if steps is None else steps * hours,
        "hours": None if steps is None else steps * seconds / 3600,
        "gpu_hours_a_1000_steps": 1000 * hours,
        "gpu_hours_a_billion_positions": 1e9 / positions * hours,
    }


def _prepared_rows(config: TrainConfig) -> int | None:
    try:
        rows = find_prepared(config.data.train, recipe(config), config.data.cache_dir)
    except UserError:  # no data or no tokenizer here
        return None
    return None if rows is None else len(rows)
