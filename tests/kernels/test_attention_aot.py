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

pytestmark = pytest.mark.aot

# An H100 as XLA describes it, as far as the compiler asks.
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@pytest.fixture(scope="module", params=["xla", "mosaic"])
def kernel(request):
    if request.param == "mosaic" and mosaic._installed() != mosaic.VERSION:
        pytest.skip(f"needs tokamax {mosaic.VERSION}")
    return request.param


@pytest.fixture(scope="module")
def topology():
    pytest.importorskip("jax_plugins.xla_cuda12", reason="needs the CUDA plugin: pip install '.[plan]'")
    return topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=TARGET)


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
