"""The fused loss compiled for an H100 on a machine that needs none."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from osprey_jax.benchmark import loss
from osprey_jax.planning.hardware import load_gpu

pytestmark = pytest.mark.aot
GIB = 2**30
V, H, T = 151936, 2560, 4096  # a drafter from Qwen3-4B for Qwen3-8B


@pytest.fixture(scope="module")
def temporaries():
    """Bytes beside inputs and gradients of the loss with N positions in chunks of 512."""
    pytest.importorskip("jax_plugins.xla_cuda12", reason="needs the CUDA plugin: pip install '.[plan]'")
    target = load_gpu("h100").target_config
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=target)
    sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("data",)), PartitionSpec())

    @functools.cache
    def compiled(N):
        make = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        with jax.default_device(topology.devices[0]):
            step = loss.gradients(loss.fused(512)).lower(*loss.shapes(make, N, V, H, T, jnp.bfloat16)).compile()
        return step.memory_analysis().temp_size_in_bytes

    return compiled


@pytest.mark.parametrize("N", [4096, 8192, 16384])
def test_temporaries_do_not_grow_with_the_row(temporaries, N):
    """At most 3.2 GiB, and the same at any length."""
    assert temporaries(N) < 3.2 * GIB
    assert abs(temporaries(N) - temporaries(4096)) < 0.05 * GIB
