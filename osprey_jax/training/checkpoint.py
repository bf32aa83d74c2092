"""Checkpoints of a run: saved in the background, complete or absent, checked leaf by leaf before anything is restored.

Layout: `<directory>/<step>/state` holds the arrays (Orbax, OCDBT) as one flat dict whose keys are readable names, such
as `params/layers/self_attn/q_proj/weight` or `opt_state/0/mu/norm/weight`, whatever classes the state is made of.
`<directory>/<step>/about` is JSON: the caller's facts and a checksum of each array. Orbax writes a step under a
temporary name and renames it. A step that turns out to be damaged is renamed to `<step>.damaged`, never deleted.
"""

import contextlib
import gc
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils

from osprey_jax.command import UserError

T = TypeVar("T")

logger = logging.getLogger(__name__)

Check = Callable[[dict], None]
"""Looks at a checkpoint's facts; raises `UserError` where this run must not go on from it."""


class Checkpoints:
    """The checkpoints of one run, the newest `keep` of them. Every process of the run calls the same methods.

    Opening clears what an interrupted save left behind.
    """

    def __init__(self, directory: Path, *, keep: int):
        self._directory = Path(directory).absolute()
        _silence_orbax()
        names = _step_names(self._directory)
        _set_aside(self._directory, [step for step in names if not _is_complete(self._directory / str(step))])
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(keep),
            cleanup_tmp_directories=True,
            lightweight_initialize=True,  # the alternative reads metrics, and we store none
        )
        with self._writing():
            self._manager = ocp.CheckpointManager(self._directory, options=options)

    def save(self, step: int, state: Any, facts: dict) -> None:
        """Start to save; the arrays may be donated as soon as this returns. A step saved twice is saved once.

        Args:
          step: greater than any saved one.
          state: a pytree of `jax.Array`s, sharded in any way (random keys as their `jax.random.key_data`).
          facts: a small JSON object; tuples come back as lists.

        Raises:
          UserError: this save cannot start, or an earlier one failed: the disk is full or not writable.
        """
        arrays = _named(state)
        about = {"facts": json.loads(json.dumps(facts)), "checksums": _checksums(arrays)}
        newest = self._manager.latest_step()  # with the one being written
        if newest is not None and step <= newest:
            if step < newest:
                raise ValueError(f"step {step} is saved after step {newest}")
            return
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), about=ocp.args.JsonSave(about))
        with self._writing():
            self._manager.save(step, args=items)

    def wait(self) -> None:
        """Until what was saved is on disk under its final name. `UserError` where it could not be written."""
        with self._writing():
            self._manager.wait_until_finished()

    def restore(self, abstract_state: Any, check: Check | None = None) -> tuple[Any, dict, int] | None:
        """The newest intact step as (state, facts, step), or None where nothing was saved yet.

        A damaged step is passed over with a warning, and set aside once an older one is restored.

        Args:
          abstract_state: `jax.ShapeDtypeStruct`s in place of the arrays that were saved, with the shardings wanted,
            on any number of devices. A leaf without a sharding goes to the default device.
          check: called with the facts before any array is read.

        Raises:
          UserError: every step is damaged, `check` refuses, or a leaf is missing, unexpected or of another shape or
            dtype.
        """
        self.wait()
        found = _newest_intact(self._directory, _named(abstract_state), ("",), check)
        if found is None:
            return None
        arrays, facts, step = found
        _set_aside(self._directory, [later for later in saved_steps(self._directory) if later > step])
        self._manager.reload()
        return _rebuilt(abstract_state, arrays), facts, step

    def close(self) -> None:
        """Finish the running save and end the background threads."""
        with self._writing():
            self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Whatever Orbax raises while it writes, as one line: its types range from OSError to bare Exception."""
        try:
            yield
        except Exception as error:
            raise UserError(f"{self._directory}: a checkpoint could not be written ({_reason(error)})") from error


def read_fields(directory: Path, abstract_fields: dict[str, Any], step: int | None = None) -> tuple[dict, dict, int]:
    """Only some fields of the state in a run's checkpoint, as (fields, facts, step); the rest is never read.

    Args:
      abstract_fields: name of a field of the saved state -> its abstract value, as in `Checkpoints.restore`.
      step: None for the newest intact one.

    Raises:
      UserError: no such step, no intact step, or a leaf that is missing, unexpected, or of another shape or dtype.
    """
    _silence_orbax()
    directory = Path(directory).absolute()
    steps = saved_steps(directory)
    if not steps:
        raise UserError(f"{directory}: no complete checkpoint; train first")
    if step is not None and step not in steps:
        raise UserError(f"{directory}: no complete checkpoint of step {step}; there are {_listed(steps)}")
    prefixes = tuple(f"{name}/" for name in abstract_fields)
    found = _newest_intact(directory, _named(abstract_fields), prefixes, None, step)
    assert found is not None
    arrays, facts, step = found
    return _rebuilt(abstract_fields, arrays), facts, step


# ---- state <-> flat dict


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by name, in the order of `jax.tree.leaves`. An `nnx.Variable` is one leaf: its inside is Flax's."""
    paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, nnx.Variable))
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
    named = dict(zip(names, jax.tree.leaves(tree), strict=True))
    if len(named) != len(names):
        raise ValueError("two leaves of the state have one name")
    return named


def _rebuilt(abstract: Any, arrays: dict[str, jax.Array]) -> Any:
    """`abstract` with `arrays` in place of its leaves; its classes and its variables' metadata stay."""
    return jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in _named(abstract)])


# ---- directories


def _step_names(directory: Path) -> list[int]:
    """Whatever Orbax would take for a step, newest first."""
    if not directory.is_dir():
        return []
    names = [path.name for path in directory.iterdir()]
    return sorted((int(name) for name in names if name.isdecimal() and str(int(name)) == name), reverse=True)


def _is_complete(path: Path) -> bool:
    """Renamed from its temporary name by Orbax, and not, say, an empty directory with a number for a name."""
    return (path / "_CHECKPOINT_METADATA").is_file() and (path / "state" / "_METADATA").is_file()


def saved_steps(directory: Path) -> list[int]:
    """Complete steps on disk, newest first; one that is still being written does not count."""
    return [step for step in _step_names(directory) if _is_complete(directory / str(step))]


def _set_aside(directory: Path, steps: list[int]) -> None:
    """Rename steps that cannot be used, so that training may save them again."""
    if jax.process_index() == 0:
        for step in steps:
            names = (f"{step}.damaged" + (f".{i}" if i else "") for i in range(10**6))
            name = next(name for name in names if not (directory / name).exists())
            (directory / str(step)).rename(directory / name)
            logger.warning("%s: checkpoint %d is not usable; renamed to %s", directory, step, name)
    multihost_utils.sync_global_devices("osprey_jax set aside checkpoints")


# ---- reading


class _Damaged(Exception):
    """A step's files are missing, cut short or changed."""


def _newest_intact(
    directory: Path, abstract: dict[str, Any], prefixes: tuple[str, ...], check: Check | None, only: int | None = None
) -> tuple[dict[str, jax.Array], dict, int] | None:
    """(arrays, facts, step) of the newest step that can be read, or of step `only`; None where there is none at all."""
    steps = saved_steps(directory) if only is None else [only]
    first_reason = None
    for step in steps:
        try:
            arrays, facts = _read(directory / str(step), abstract, prefixes, check)
        except _Damaged as error:
            logger.warning("%s: checkpoint %d is damaged (%s)", directory, step, error)
            first_reason = first_reason or error
        else:
            return arrays, facts, step
    if not steps:
        return None
    raise UserError(
        f"{directory}: no intact checkpoint among {_listed(steps)} ({first_reason}); "
        "choose another step or run directory"
    )


def _read(
    path: Path, abstract: dict[str, Any], prefixes: tuple[str, ...], check: Check | None
) -> tuple[dict[str, jax.Array], dict]:
    """(arrays, facts) of one step: the leaves under `prefixes`, which must be those of `abstract`."""
    handler = ocp.PyTreeCheckpointHandler()

    def read_about():
        about = ocp.JsonCheckpointHandler().restore(path / "about")
        saved = handler.metadata(path / "state").tree
        saved = {name: (leaf.shape, leaf.dtype) for name, leaf in saved.items() if name.startswith(prefixes)}
        return about["facts"], {name: about["checksums"][name] for name in saved}, saved

    facts, checksums, saved = _reading(read_about)
    if check is not None:
        check(facts)
    _compare(path, saved, abstract)

    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    restore_args = {
        name: ocp.ArrayRestoreArgs(sharding=leaf.sharding or default, global_shape=leaf.shape, dtype=leaf.dtype)
        for name, leaf in abstract.items()
    }
    args = ocp.args.PyTreeRestore(dict(abstract), restore_args=restore_args, partial_restore=True)
    arrays = _reading(lambda: handler.restore(path / "state", args=args))
    for name, checksum in _checksums(arrays).items():  # over all processes, so all must have got this far
        if checksum != checksums[name]:
            raise _Damaged(f"the bytes of {name} have changed since they were saved")
    return arrays, facts


def _compare(path: Path, saved: dict[str, tuple], abstract: dict[str, Any]) -> None:
    """`UserError` where names, shapes or dtypes differ: Orbax would cast the one and mislead about the other."""
    advice = "go on with the config that saved it, or choose another run directory"
    missing = [name for name in abstract if name not in saved]
    extra = [name for name in saved if name not in abstract]
    if missing:
        raise UserError(f"{path}: holds no {missing[0]} ({len(missing)} leaves missing in all); {advice}")
    if extra:
        raise UserError(f"{path}: holds {extra[0]}, unknown to this run ({len(extra)} leaves in all); {advice}")
    for name, leaf in abstract.items():
        shape, dtype = saved[name]
        if tuple(shape) != tuple(leaf.shape) or dtype != leaf.dtype:
            raise UserError(
                f"{path}: {name} is {dtype} {tuple(shape)}, but {leaf.dtype} {tuple(leaf.shape)} in this run; {advice}"
            )


def _reading(read: Callable[[], T]) -> T:
    """`read()`, or `_Damaged` on every process where Orbax raised anything on one of them over missing or broken files.

    Running out of memory says nothing about the files and passes through. The reads that Orbax abandons after an error
    complain about it through the interpreter's hooks, in pages of tracebacks: these are kept quiet.
    """
    hooks = sys.unraisablehook, sys.excepthook
    result, reason = None, ""
    try:
        sys.unraisablehook = sys.excepthook = lambda *_: None
        try:
            result = read()
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:
            if isinstance(error.__cause__, MemoryError):
                raise
            reason = _reason(error.__cause__ or error)
        if reason:
            time.sleep(0.2)  # reads of other arrays may still be running
            gc.collect()  # here, where nothing holds the error any more, so that the abandoned reads end now
    finally:
        sys.unraisablehook, sys.excepthook = hooks
    # One process may read bytes that another does not: all go on from the same step.
    if jax.process_count() > 1 and multihost_utils.process_allgather(np.array(bool(reason))).any():
        reason = reason or "another process cannot read it"
    if reason:
        raise _Damaged(reason)
    return result


# ---- checksums: the storage format has none for array data, and a changed byte would come back as a weight


def _checksums(arrays: dict[str, jax.Array]) -> dict[str, int]:
    """A 32-bit checksum of each array; sharding does not change it, a change of one element always does."""
    with jax.transfer_guard("allow"):
        return {name: int(value) for name, value in jax.device_get(_checksum_all(arrays)).items()}


@jax.jit
def _checksum_all(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """In one program. One for each array, none waited for, are more collectives at a time than the CPU devices of
    several processes can run (jax 0.10), which then wait for each other for ever."""
    return jax.tree.map(_checksum, arrays)


def _checksum(x: jax.Array) -> jax.Array:
    """Sum mod 2^32 over the elements of MurmurHash3's finalizer (a bijection) of bits xor position."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = x.astype(unsigned) if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, unsigned)
    position, stride = jnp.uint32(0), 1
    for axis in reversed(range(x.ndim)):
        position = position + jnp.uint32(stride % 2**32) * jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        stride *= x.shape[axis]
    h = bits.astype(jnp.uint32) ^ (position * jnp.uint32(0x9E3779B1))
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(h ^ (h >> 16), dtype=jnp.uint32)


# ---- small things


def _listed(steps: list[int]) -> str:
    return ", ".join(str(step) for step in steps)


def _reason(error: BaseException) -> str:
    """The first line of an error, cut where TensorStore goes on for pages."""
    line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {line[:200]}"


def _silence_orbax() -> None:
    """Keep Orbax's records (retries, hints, tracebacks of errors that it raises as well) off the console."""
    logging.getLogger("absl").addFilter(_not_orbax)


def _not_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in Path(record.pathname).parts
