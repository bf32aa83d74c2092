"""Checkpoints: exact, complete or absent, refused or passed over for the right reason."""

import dataclasses
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from osprey_jax.command import UserError
from osprey_jax.training.checkpoint import Checkpoints, read_fields, saved_steps

FACTS = {"config": {"learning_rate": 1e-4}, "position": 12}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    step: jax.Array
    params: nnx.State
    opt_state: Any


class Model(nnx.Module):
    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)  # NumPy's bits are the same in every process, whatever XLA's options
        self.embed = nnx.Param(jnp.asarray(rng.normal(size=(64, 24)), jnp.float32), axes=("vocab", "embed"))
        self.norm = nnx.Param(jnp.asarray(np.geomspace(0.1, 9.0, 24), jnp.float32), axes=("norm",))
        self.target_ids = nnx.Variable(jnp.arange(64, dtype=jnp.int32) * 3)
        self.head = nnx.Param(jnp.asarray(rng.normal(size=(8, 24)), jnp.bfloat16), axes=("vocab", "embed"))


def make_state(step: int) -> State:
    params = nnx.state(Model(step))
    opt_state = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init(nnx.filter_state(params, nnx.Param))
    opt_state = jax.tree.map(lambda x: x + jnp.asarray(step / 3, x.dtype), opt_state)
    return State(step=jnp.int32(step), params=params, opt_state=opt_state)


def abstract(tree: Any) -> Any:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), tree)


def assert_same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and np.asarray(x).tobytes() == np.asarray(y).tobytes()


def save_steps(directory: Path, *steps: int, keep: int = 10) -> None:
    with Checkpoints(directory, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), FACTS | {"position": step})


def restore(directory: Path, target: Any = None, check=None):
    with Checkpoints(directory, keep=10) as checkpoints:
        return checkpoints.restore(abstract(make_state(0)) if target is None else target, check)


def largest_file(step: Path) -> Path:
    """The file that holds the arrays."""
    return max((p for p in step.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


# ---- round trip


def test_round_trip_is_exact(tmp_path):
    """A resumed run must start from the very bits that were saved, in the same classes and with the params' axes."""
    save_steps(tmp_path, 7)
    state, facts, step = restore(tmp_path)
    assert_same(state, make_state(7))
    assert step == 7 and facts == FACTS | {"position": 7}
    assert state.params["embed"].get_metadata("axes") == ("vocab", "embed")


def test_state_may_be_donated_after_save(tmp_path):
    """The loop donates its state to the next step while the save is still running."""
    state = make_state(1)
    update = jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)
    with Checkpoints(tmp_path, keep=1) as checkpoints, jax.transfer_guard("disallow"):
        checkpoints.save(1, state, {})
        for _ in range(3):
            state = update(state)
    assert_same(restore(tmp_path)[0], make_state(1))


def test_empty_directory_gives_none(tmp_path):
    """The first start of a run has nothing to resume."""
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        assert not saved_steps(tmp_path) and checkpoints.restore(abstract(make_state(0))) is None


def test_check_sees_facts_and_may_refuse(tmp_path):
    """A run with other data must not go on from this one; the caller knows which facts matter."""
    save_steps(tmp_path, 1)

    def refuse(facts):
        raise UserError(f"position {facts['position']} is another run's")

    with pytest.raises(UserError, match="position 1 is another"):
        restore(tmp_path, check=refuse)
    assert (tmp_path / "1").is_dir()


# ---- which steps there are


def test_keeps_the_newest(tmp_path):
    """A long run must not fill the disk."""
    save_steps(tmp_path, 1, 2, 3, 4, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "4"]


def test_saving_a_step_twice_saves_once(tmp_path):
    """A signal may ask for a save at the step that was just saved."""
    save_steps(tmp_path, 3, 3)
    assert restore(tmp_path)[2] == 3
    with Checkpoints(tmp_path, keep=2) as checkpoints, pytest.raises(ValueError, match="after step 3"):
        checkpoints.save(2, make_state(2), {})


@pytest.mark.parametrize("content", [[], ["state/_METADATA"], ["_CHECKPOINT_METADATA"]])
def test_incomplete_directory_is_no_checkpoint(tmp_path, content):
    """Orbax takes any directory named by a number for a step: it would restore it and refuse to save below it."""
    save_steps(tmp_path, 2)
    for name in content:
        (tmp_path / "5" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "5" / name).write_text("{}")
    (tmp_path / "5").mkdir(exist_ok=True)
    with Checkpoints(tmp_path, keep=10) as checkpoints:
        assert saved_steps(tmp_path)[0] == 2
        checkpoints.save(4, make_state(4), {})
        checkpoints.save(5, make_state(5), {})
        checkpoints.wait()
        assert saved_steps(tmp_path)[0] == 5
    assert_same(restore(tmp_path)[0], make_state(5))


# ---- damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda step: cut(largest_file(step)),
        lambda step: largest_file(step).unlink(),
        lambda step: flip(largest_file(step)),
        lambda step: cut(step / "state" / "_METADATA"),
        lambda step: (step / "state" / "manifest.ocdbt").unlink(),
        lambda step: (step / "about" / "metadata").unlink(),
    ],
    ids=["cut", "missing", "flipped", "metadata", "manifest", "facts"],
)
def test_damaged_newest_falls_back(tmp_path, caplog, capfd, damage):
    """A disk that lost or changed bytes costs one interval, is reported in one line, and blocks no later save."""
    save_steps(tmp_path, 1, 2)
    damage(tmp_path / "2")
    with Checkpoints(tmp_path, keep=10) as checkpoints, caplog.at_level(logging.WARNING):
        state, _, step = checkpoints.restore(abstract(make_state(0)))
        assert step == 1
        assert_same(state, make_state(1))
        warning = next(r.getMessage() for r in caplog.records if "is damaged" in r.getMessage())
        assert "checkpoint 2 is damaged (" in warning and len(warning) < 400
        checkpoints.save(2, make_state(2), {})
    assert_same(restore(tmp_path)[0], make_state(2))
    assert (tmp_path / "2.damaged").is_dir()
    assert "Traceback" not in capfd.readouterr().err


def test_all_damaged_is_an_error(tmp_path):
    """Starting again from nothing would be a silent loss of the run."""
    save_steps(tmp_path, 1, 2)
    for step in "12":
        cut(largest_file(tmp_path / step))
    with pytest.raises(UserError, match="no intact checkpoint among 2, 1"):
        restore(tmp_path)


# ---- refusal


def with_leaf(change) -> State:
    target = abstract(make_state(0))
    leaf = target.params["embed"].get_value()
    target.params["embed"] = target.params["embed"].replace(change(leaf))
    return target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.update(shape=(64, 25)), r"params/embed is float32 \(64, 24\), but float32 \(64, 25\)"),
        (lambda x: x.update(dtype=jnp.bfloat16), r"params/embed is float32 \(64, 24\), but bfloat16 \(64, 24\)"),
    ],
    ids=["shape", "dtype"],
)
def test_other_shape_or_dtype_is_refused(tmp_path, change, message):
    """Orbax casts a dtype in silence; an older step would be just as wrong, so nothing falls back."""
    save_steps(tmp_path, 1, 2)
    with pytest.raises(UserError, match=f"2: {message}"):
        restore(tmp_path, with_leaf(change))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


def test_missing_and_extra_leaves_are_refused(tmp_path):
    """A state of another structure (another optimizer, a model with biases) belongs to another run."""
    save_steps(tmp_path, 1)
    more = abstract(make_state(0))
    more.params["bias"] = nnx.Param(jax.ShapeDtypeStruct((3,), jnp.float32))
    with pytest.raises(UserError, match="holds no params/bias"):
        restore(tmp_path, more)
    fewer = abstract(make_state(0))
    del fewer.params["norm"]
    with pytest.raises(UserError, match="holds params/norm, unknown"):
        restore(tmp_path, fewer)


# ---- parameters alone


def test_params_alone(tmp_path):
    """Export reads a run without its optimizer state, of the newest intact step or of the one asked for."""
    save_steps(tmp_path, 1, 2, 3)
    cut(largest_file(tmp_path / "3"))
    target = {"params": abstract(make_state(0).params)}
    for wanted, expected in ((None, 2), (1, 1)):
        fields, facts, step = read_fields(tmp_path, target, wanted)
        assert step == expected and facts["position"] == expected
        assert_same(fields["params"], make_state(expected).params)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2", "3"]  # a reader changes nothing


def test_params_alone_are_checked(tmp_path):
    """Exported weights of another shape, or a step that is not there or broken, are one clear line."""
    save_steps(tmp_path, 1, 2)
    cut(largest_file(tmp_path / "2"))
    target = {"params": abstract(make_state(0).params)}
    with pytest.raises(UserError, match="no complete checkpoint of step 3; there are 2, 1"):
        read_fields(tmp_path, target, 3)
    with pytest.raises(UserError, match="no intact checkpoint among 2"):
        read_fields(tmp_path, target, 2)
    with pytest.raises(UserError, match="no complete checkpoint; train first"):
        read_fields(tmp_path / "nothing", target)
    with pytest.raises(UserError, match="params/embed is float32"):
        read_fields(tmp_path, {"params": with_leaf(lambda x: x.update(shape=(1, 24))).params})


def test_unwritable_directory_is_one_line(tmp_path):
    """A full or read-only disk ends the run with a reason, not a traceback."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="could not be written"):
        Checkpoints(tmp_path / "file" / "checkpoints", keep=1)


# ---- other processes


def run_child(code: str, directory: Path, devices: int = 1) -> subprocess.CompletedProcess:
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    prelude = (
        "import importlib.util, sys, jax, pathlib\n"
        f"spec = importlib.util.spec_from_file_location('helpers', {str(Path(__file__))!r})\n"
        "t = importlib.util.module_from_spec(spec); sys.modules['helpers'] = t; spec.loader.exec_module(t)\n"
        f"directory = pathlib.Path({str(directory)!r})\n"
    )
    return subprocess.run(
        [sys.executable, "-c", prelude + code], env=environment, capture_output=True, text=True, timeout=120
    )


SHARD = """
assert len(jax.devices()) == 8
axis_type = getattr(jax.sharding.AxisType, {kind!r})
mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(axis_type, axis_type))
P = jax.sharding.PartitionSpec
def sharding(x):
    spec = (("data", "tensor"),) if x.ndim and x.shape[0] % 8 == 0 else ()
    return jax.sharding.NamedSharding(mesh, P(*spec))
"""


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_other_number_of_devices(tmp_path, kind):
    """A run goes on where it is given other devices: 1 to 8 and back, to the bit."""
    save_steps(tmp_path / "one", 3)
    code = SHARD.format(kind=kind) + (
        "struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x))\n"
        "target = jax.tree.map(struct, t.make_state(0))\n"
        "with t.Checkpoints(directory / 'one', keep=1) as c:\n"
        "    state, _, step = c.restore(target)\n"
        "t.assert_same(state, t.make_state(3))\n"
        "assert len(state.params['embed'].get_value().addressable_shards) == 8\n"
        "assert state.params['embed'].get_value().addressable_shards[0].data.shape == (8, 24)\n"
        "with jax.set_mesh(mesh), t.Checkpoints(directory / 'eight', keep=1) as c:\n"
        "    c.save(4, jax.tree.map(lambda x: jax.device_put(x, sharding(x)), t.make_state(4)), {})\n"
    )
    child = run_child(code, tmp_path, devices=8)
    assert child.returncode == 0, child.stderr
    assert_same(restore(tmp_path / "eight")[0], make_state(4))
    read, _, _ = read_fields(tmp_path / "eight", {"params": abstract(make_state(0).params)})
    assert_same(read["params"], make_state(4).params)


@pytest.mark.parametrize(
    ("first", "delay"), [("kill", 0.0), ("save", 0.0), ("save", 0.02), ("save", 0.05)], ids=lambda value: str(value)
)
def test_killed_during_a_save(tmp_path, first, delay):
    """A machine may vanish at any moment of a save: the run goes on from a complete step, the rest is swept away."""
    code = (
        "import os, signal, threading, time\n"
        "c = t.Checkpoints(directory, keep=5)\n"
        "c.save(1, t.make_state(1), t.FACTS); c.wait()\n"
        "big = t.make_state(2)\n"
        "big.params['large'] = t.nnx.Param(jax.random.normal(jax.random.key(0), (4000, 1000)))\n"
        "jax.block_until_ready(big)\n"
        f"kill = threading.Thread(target=lambda: (time.sleep({delay}), os.kill(os.getpid(), signal.SIGKILL))).start\n"
        "save = lambda: c.save(2, big, t.FACTS)\n"
        f"{first}(); {'save' if first == 'kill' else 'kill'}(); c.wait(); time.sleep(10)\n"
    )
    child = run_child(code, tmp_path)
    assert child.returncode == -9, child.stderr
    with Checkpoints(tmp_path, keep=5) as checkpoints:
        latest = saved_steps(tmp_path)[0]
        if latest == 1:
            state, _, step = checkpoints.restore(abstract(make_state(0)))
            assert step == 1
            assert_same(state, make_state(1))
        else:
            assert latest == 2
        checkpoints.save(3, make_state(3), {})
    assert all(path.name.isdecimal() for path in tmp_path.iterdir())
    assert_same(restore(tmp_path)[0], make_state(3))
