"""Collectives of compiled HLO: kinds, counts through loops, and what must cross a link."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from osprey_jax.planning import hlo
from osprey_jax.planning.collectives import collectives, large_all_reduces

MESH = "replica_groups=mesh['data'=2,'tensor'=4] "
ALL = "replica_groups={{0,1,2,3,4,5,6,7}}"


def one(line: str, *, gpus_a_host: int = 8, trips: int = 1):
    """The collective of a module of one line."""
    text = f"ENTRY %main (x: f32[]) -> f32[] {{\n  {line}\n}}\n"
    (found,) = collectives(hlo.Module(text), trips=trips, gpus_a_host=gpus_a_host)
    return found


@pytest.mark.parametrize(
    "line, kind, whole",
    [
        (
            f"%a = ((bf16[2,4]{{1,0}}), bf16[16,4]{{1,0}}) all-gather-start(%x), {ALL}, dimensions={{0}}",
            "all-gather",
            128,
        ),
        (f"%a = (bf16[2,4]{{1,0}}, bf16[16,4]{{1,0}}) all-gather-start(%x), {ALL}", "all-gather", 128),
        (f"%a = bf16[16,4]{{1,0}} all-gather(%x), {ALL}, dimensions={{0}}", "all-gather", 128),
        (
            f"%a = ((f32[8]{{0}}, f32[16]{{0}}), (f32[1]{{0}}, f32[2]{{0}})) reduce-scatter-start(%x, %y), {ALL}",
            "reduce-scatter",
            96,
        ),
        (f"%a = f32[2]{{0}} reduce-scatter(%x), {ALL}, to_apply=%add", "reduce-scatter", 64),
        (f"%a = f32[5]{{0}} all-reduce-start(%x), {ALL}, to_apply=%add", "all-reduce", 20),
        (f"%a = (f32[5]{{0}}, f32[7]{{0}}) all-reduce-start(%x, %y), {ALL}, to_apply=%add", "all-reduce", 48),
        (f"%a = ((f32[5]{{0}}), f32[5]{{0}}) all-reduce-start(%x), {ALL}, to_apply=%add", "all-reduce", 20),
    ],
)
def test_bytes_are_of_the_whole_array_in_every_form(line, kind, whole):
    """Versions of XLA print operands beside results or not; the size of what is moved is the same."""
    found = one(line)
    assert (found.kind, found.bytes, found.gpus, found.count) == (kind, whole, 8, 1)


@pytest.mark.parametrize(
    "groups, members, hosts_of_4",
    [
        (MESH + "{'tensor','data'}", 8, 2),
        (MESH + "{'tensor'}", 4, 1),
        (MESH + "{'data'}", 2, 2),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", 2, 2),
        ("replica_groups=[2,4]<=[8]", 4, 1),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2, 2),
    ],
)
def test_groups_in_every_form(groups, members, hosts_of_4):
    """Who takes part decides which links are used."""
    found = one(f"%a = f32[64]{{0}} all-gather(%x), {groups}", gpus_a_host=4)
    assert found.gpus == members
    assert (found.network > 0) == (hosts_of_4 == 2)


def test_within_a_host_all_but_the_own_part_enters():
    """Of an array gathered over 8 GPUs, 7/8 come from others; a reduction sends and receives it."""
    assert one(f"%a = f32[64]{{0}} all-gather(%x), {ALL}").nvlink == 256 * 7 / 8
    assert one(f"%a = f32[64]{{0}} all-reduce(%x), {ALL}").nvlink == 2 * 256 * 7 / 8


def test_between_hosts_each_part_crosses_once():
    """Two hosts of 4: each must receive the other's half, over 4 network adapters; the rest goes over NVLink."""
    found = one(f"%a = f32[64]{{0}} all-gather(%x), {ALL}", gpus_a_host=4)
    assert found.network == 256 / 2 / 4
    assert found.network + found.nvlink == 256 * 7 / 8


def test_loops_count():
    """Known trips multiply, and where the compiler does not know them the caller does."""
    text = f"""\
%inner (p: f32[]) -> f32[] {{
  %a = f32[64]{{0}} all-gather(%p), {ALL}
}}

%body (p: f32[]) -> f32[] {{
  %w = f32[] while(%p), condition=%c, body=%inner, backend_config={{"known_trip_count":{{"n":"5"}}}}
}}

ENTRY %main (x: f32[]) -> f32[] {{
  %w2 = f32[] while(%x), condition=%c, body=%body
  %f = f32[] call(%x), to_apply=%inner
}}
"""
    (found,) = collectives(hlo.Module(text), trips=7, gpus_a_host=8)
    assert found.count == 7 * 5 + 1


def test_a_large_all_reduce_is_named():
    """One of weights' gradients moves twice what a reduce-scatter would."""
    large = one(f"%a = f32[1024,512]{{1,0}} all-reduce(%x), {ALL}")
    assert large_all_reduces([large, one(f"%a = f32[512]{{0}} all-reduce(%x), {ALL}")]) == [large]


@pytest.mark.multidevice
def test_of_a_compiled_function():
    """What this machine's XLA prints is read: a weight gathered in a loop of 3, its gradient reduced once."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def step(w, x):
        whole = lambda: lax.all_gather(w, ("tensor", "data"), axis=0, tiled=True)
        x = lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ whole() * i), x)
        return lax.psum_scatter(x.T @ x, ("tensor", "data"), scatter_dimension=0, tiled=True)

    specs = P(("tensor", "data")), P(("data", "tensor"))
    sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False))
    text = sharded.lower(jnp.ones((64, 64)), jnp.ones((16, 64))).compile().as_text()
    found = {call.kind: call for call in collectives(hlo.Module(text), trips=99, gpus_a_host=8)}
    assert found["all-gather"].count in (1, 3)  # moved out of the loop, where the compiler sees that it may
    assert found["reduce-scatter"].count == 1
    assert {call.bytes for call in found.values()} == {64 * 64 * 4}
