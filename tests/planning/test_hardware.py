"""What `--devices` means, and that the sizes behind it are ones that XLA and NVIDIA state."""

import pytest

from osprey_jax.command import UserError
from osprey_jax.planning.hardware import kinds, load_gpu, parse_devices


@pytest.mark.parametrize(
    "text, hosts, gpus_a_host, kind",
    [("2xh100", 1, 2, "h100"), ("2x8xH200", 2, 8, "h200"), ("1x1xb200", 1, 1, "b200")],
)
def test_devices_are_gpus_of_a_kind_on_hosts(text, hosts, gpus_a_host, kind):
    """Two numbers are hosts and GPUs a host, one is GPUs of one host."""
    cluster = parse_devices(text)
    assert (cluster.hosts, cluster.gpus_a_host, cluster.gpu.kind) == (hosts, gpus_a_host, kind)
    assert cluster.gpus == hosts * gpus_a_host


@pytest.mark.parametrize(
    "text, names",
    [("h100", "2x8xh100"), ("0xh100", "2xh100"), ("2x0xh100", "2xh100"), ("2xa100", "h200"), ("16xh100", "2x8xh100")],
)
def test_other_devices_are_refused_with_an_example(text, names):
    """A reader of the message sees what to write instead."""
    with pytest.raises(UserError, match=names):
        parse_devices(text)


@pytest.mark.parametrize("kind", ["b200", "h100", "h200"])
def test_stated_peaks_agree_with_the_device_description(kind):
    """Two sources of one speed: a slip of a power of ten in either would show."""
    gpu = load_gpu(kind)
    stated = int(gpu.target_config.split("memory_bandwidth: ")[1].split()[0])
    assert gpu.memory_speed == pytest.approx(stated, rel=0.05)
    assert 35 > gpu.flops["bfloat16"] / gpu.flops["float32"] > 14  # tensor cores beside the others
    assert all(gpu.sources)


def test_all_kinds_are_read():
    """A kind is a file of data and nothing else."""
    assert kinds() == ["b200", "h100", "h200"]
