"""Memory of a step: what lies on a device, what is needed at once, what lives at the peak and how it is called."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from osprey_jax.command import UserError
from osprey_jax.planning import hlo, memory

MODULE = hlo.Module(
    """\
ENTRY %main (x: f32[4]) -> f32[] {
  %param.1 = f32[64,4]{1,0} parameter(0), metadata={op_name="frozen['norm']"}
  %fusion.2 = (f32[8]{0}, bf16[32,8]{1,0}) fusion(%param.1), metadata={op_name="jit(step)/jvp()/mul{0}"}
  %all-gather-start.1 = (f32[4]{0}, f32[32]{0}) all-gather-start(%param.1)
}
"""
)
LIVE_RANGES = """\
HloLiveRange (max 9):
  BufferLiveRange:
    unrelated{}:1-2
  Live ranges at 5 (peak):
    fusion.2{1}: 512 bytes (cumulative: 512 bytes)
    param.1{}: 1024 bytes (cumulative: 1536 bytes)
    all_gather.68.1{}: 256 bytes (cumulative: 1792 bytes)
    all-gather-start.1{1}: 128 bytes (cumulative: 1920 bytes)
  Stack trace breakdown for peak usage: 1 920 bytes
    after{}: 999 bytes
"""
ASSIGNMENT = """\
allocation 7: size 512, page 0, preallocated-temp:
 value: <11 fusion.2{1} @0> (size=512,offset=0): bf16[32,8]{1,0}
 value: <12 all_gather.68.1 @0> (size=256,offset=512): bf16[128]{0}
 value: <13 all-gather-start.1{1} @0> (size=128,offset=768): f32[32]{0}
"""


def test_what_lives_at_the_peak_has_a_name_and_a_kind():
    """A reader sees an argument's path, and of the rest shape and operation; other moments do not count."""
    alive = memory.alive_at_peak(LIVE_RANGES, ASSIGNMENT, MODULE)
    assert [(b.bytes, b.name, b.kind) for b in alive] == [
        (1024, "frozen['norm']", "argument"),
        (512, "bf16[32,8] mul", "other"),
        (256, "bf16[128] all_gather", "gathered weight"),
        (128, "f32[32] all-gather-start", "gathered weight"),
    ]


def test_a_dump_without_a_peak_gives_nothing():
    """Another version of XLA may not write it: then the plan does without."""
    assert memory.alive_at_peak("", "", MODULE) == []


def test_temporaries_add_up():
    """The parts are the block, whatever of it lives at the peak."""
    alive = memory.alive_at_peak(LIVE_RANGES, ASSIGNMENT, MODULE)
    parts = memory.temporaries(types.SimpleNamespace(temp_size_in_bytes=1000), alive)
    assert (parts.gathered_weights, parts.activations_and_gradients, parts.rest) == (384, 512, 104)


def test_results_that_take_an_arguments_place_are_not_counted_twice():
    """The state is donated: the new one lies where the old one lay."""
    sizes = {"argument_size_in_bytes": 100, "temp_size_in_bytes": 30, "output_size_in_bytes": 60}
    assert memory.needed(types.SimpleNamespace(**sizes, alias_size_in_bytes=58)) == 132


def test_bytes_of_one_device():
    """A sharded array counts with its shard."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    tree = {"a": jax.ShapeDtypeStruct((8, 3), jnp.bfloat16, sharding=sharding), "b": None}
    assert memory.device_bytes(tree) == 48
    if jax.device_count() >= 8:
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        tree = jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
        assert memory.device_bytes(tree) == 12


def test_the_part_of_a_gpu_is_what_jax_would_take(monkeypatch):
    """`train` reads the same variables, of which JAX has an old and a new name."""
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    assert memory.fraction() == 0.75
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert memory.fraction() == 0.5
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", ".9")
    assert memory.fraction() == 0.9
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "90%")
    with pytest.raises(UserError, match="XLA_CLIENT_MEM_FRACTION"):
        memory.fraction()
