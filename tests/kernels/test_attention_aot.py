"""Both kernels compiled for an H100 on a machine that needs none."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from osprey_jax.benchmark.attention import unroll_gradients, unroll_inputs
from osprey_jax.kernels import mosaic
from osprey_jax.kernels.attention import choose_kernel
from osprey_jax.kernels.ttt_attention import attend_unroll
from osprey_jax.planning.hardware import load_gpu

pytestmark = pytest.mark.aot


@pytest.fixture(scope="module", params=["xla", "mosaic"])
def kernel(request):
    if request.param == "mosaic" and mosaic._installed() != mosaic.VERSION:
        pytest.skip(f"needs tokamax {mosaic.VERSION}")
    return request.param


@pytest.fixture(scope="module")
def topology():
    pytest.importorskip("jax_plugins.xla_cuda12", reason="needs the CUDA plugin: pip install '.[plan]'")
    return topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=load_gpu("h100").target_config)


def compiled(kernel, topology, S, N=32, G=8, h=128, steps=5):
    device = topology.devices[0]
    assert choose_kernel(kernel, device=device, dtype=jnp.bfloat16, head_dim=h) == kernel
    sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("data",)), PartitionSpec())
    with mosaic.without_gpu(), jax.default_device(device):
        shape = lambda shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        inputs = (*unroll_inputs(shape, S, N, G, h, steps), shape((1, S), jnp.int32))
        return unroll_gradients(partial(attend_unroll, kernel=kernel)).lower(*inputs).compile()


def test_memory_is_linear_in_the_sequence(kernel, topology):
    """Temporaries of an unroll of 5 steps of Qwen3-4B's shape at 8192 against 4096: 2 times, not 4."""
    few, many = (compiled(kernel, topology, S).memory_analysis().temp_size_in_bytes for S in (4096, 8192))
    assert many < 2.1 * few
    assert few < 0.5 * 2**30  # a single matrix of scores has 2 GiB


@pytest.mark.parametrize(("S", "N", "G", "h"), [(1001, 8, 1, 64), (100, 9, 3, 80), (64, 4, 4, 256), (40, 8, 4, 32)])
def test_shapes_that_no_block_divides(kernel, topology, S, N, G, h):
    """Any length of a row, number of heads a group, and head size that `choose_kernel` lets through."""
    text = compiled(kernel, topology, S, N, G, h, steps=2).as_text()
    assert ("mosaic_gpu" in text) == (kernel == "mosaic")
