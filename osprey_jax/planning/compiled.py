"""The training step of a config, compiled for GPUs that this machine does not have."""

import dataclasses
import importlib.metadata
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from osprey_jax.command import UserError
from osprey_jax.config import DistillConfig, PretrainConfig
from osprey_jax.data.rows import FIELDS
from osprey_jax.kernels import mosaic
from osprey_jax.kernels.precision import exact_products
from osprey_jax.planning import hlo
from osprey_jax.planning.hardware import Cluster
from osprey_jax.planning.memory import Buffer, alive_at_peak
from osprey_jax.training import stages
from osprey_jax.training.mesh import make_mesh, rows_over
from osprey_jax.training.optimizer import make_optimizer
from osprey_jax.training.state import TrainState, abstract_state, make_train_step


@dataclasses.dataclass(frozen=True)
class Step:
    """The step that `train` runs, and its arguments as shapes with their shardings."""

    design: stages.Design
    mesh: jax.sharding.Mesh
    state: TrainState
    batch: dict[str, jax.ShapeDtypeStruct]
    update: Any  # the jitted function

    def trace(self) -> jax.stages.Traced:
        return self.update.trace(self.state, self.design.frozen, self.batch)


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """What is known of a step without running it."""

    step: Step
    jaxpr: Any
    module: hlo.Module
    stats: Any  # of `Compiled.memory_analysis()`
    alive: list[Buffer]  # at the peak; empty where XLA did not say
    trace_seconds: float
    compile_seconds: float


def check_plugin() -> None:
    """`UserError` where nothing here can compile for GPUs."""
    wanted = _version("jaxlib")
    found = [_version("jax-cuda12-plugin"), _version("jax-cuda13-plugin")]
    if wanted not in found:
        others = ", ".join(filter(None, found))
        what = f"found is {others}" if others else "it is not installed"
        raise UserError(
            f"compiling for GPUs needs JAX's CUDA plugin {wanted}, {what}; pip install '.[plan]' installs it"
        )


def step_of(config: PretrainConfig | DistillConfig, devices: Sequence[jax.Device]) -> Step:
    """The step of `config` on `devices`. Of the checkpoints only each `config.json` is read.

    Raises:
      UserError: a missing `config.json`, models that do not fit each other, the mesh or the kernel.
    """
    _check_models(config)
    rows = config.batch_size // config.accumulation
    mesh = make_mesh(config.mesh, rows, devices=devices)
    design = stages.design(config, mesh)
    optimizer = make_optimizer(config.optimizer, config.steps or 10**5)  # only constants depend on the steps
    state = abstract_state(*design.abstract, optimizer)
    shape, sharding = (config.accumulation, rows, config.data.length), rows_over(mesh, leading=1)
    return Step(
        design=design,
        mesh=mesh,
        state=state,
        batch={name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for name in FIELDS},
        update=make_train_step(design.objective, optimizer, mesh, state, design.frozen),
    )


def compile_step(config: PretrainConfig | DistillConfig, cluster: Cluster) -> CompiledStep:
    """Compile what `train` runs for `config` on `cluster`. Raises `UserError` as `step_of`."""
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology=f"{cluster.hosts}x{cluster.gpus_a_host}x1",
        target_config=cluster.gpu.target_config,
    )
    step = step_of(config, topology.devices)
    where = jax.default_device(topology.devices[0])
    with mosaic.without_gpu(), where, exact_products(jnp.dtype(config.compute_dtype)):
        began = time.perf_counter()
        traced = step.trace()
        lowered = traced.lower()
        lowered_at = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            options = {"xla_dump_to": directory, "xla_dump_hlo_as_text": True}
            try:
                compiled = lowered.compile(compiler_options=options)
            except jax.errors.JaxRuntimeError as error:
                reason = (str(error).splitlines() or [""])[0][:300]
                raise UserError(
                    f"XLA cannot compile this step for {cluster.gpu.kind} ({reason}); pip install '.[plan]' installs "
                    "all that it needs"
                ) from error
            finished = time.perf_counter()
            dumps = [_dumped(Path(directory), name) for name in ("live-range", "buffer-assignment")]
    module = hlo.Module(compiled.as_text())
    return CompiledStep(
        step=step,
        jaxpr=traced.jaxpr.jaxpr,
        module=module,
        stats=compiled.memory_analysis(),
        alive=alive_at_peak(*dumps, module),
        trace_seconds=lowered_at - began,
        compile_seconds=finished - lowered_at,
    )


def _check_models(config: PretrainConfig | DistillConfig) -> None:
    if isinstance(config, PretrainConfig):
        named = [config.model.numbers_from]
    else:
        named = [path for path in (config.target, config.drafter.checkpoint) if path is not None]
    for path in named:
        file = path if path.suffix == ".json" else path / "config.json"
        if not file.is_file():
            raise UserError(f"{file}: no such file; of a checkpoint only its config.json is needed here, no weights")


def _dumped(directory: Path, name: str) -> str:
    """The dump of the step among those of its helpers; empty where this version of XLA writes none."""
    found = sorted(directory.glob(f"*after_optimizations-{name}.txt"), key=lambda path: path.stat().st_size)
    return found[-1].read_text() if found else ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
