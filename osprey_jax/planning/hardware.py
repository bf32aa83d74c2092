"""What `--devices` names: how many GPUs of which kind on how many hosts. The kinds' numbers are in `gpus/`."""

import dataclasses
import json
import re
from importlib import resources

from osprey_jax.command import UserError

_GPUS = resources.files("osprey_jax.planning") / "gpus"


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Sizes and stated peaks of one GPU: bytes, FLOP/s, bytes/s."""

    kind: str
    name: str
    target_config: str  # what XLA compiles for: a GpuTargetConfigProto as text
    memory: int
    memory_speed: float
    flops: dict[str, float]  # of matrix products, by dtype
    nvlink: float  # each way, between the GPUs of a host
    network: float  # each way, of a GPU's share of its host's network
    gpus_a_host: int  # at most
    sources: list[str]


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Equal hosts with equal GPUs."""

    hosts: int
    gpus_a_host: int
    gpu: Gpu

    @property
    def gpus(self) -> int:
        return self.hosts * self.gpus_a_host


def kinds() -> list[str]:
    """Kinds of GPUs that are known."""
    return sorted(path.name.removesuffix(".json") for path in _GPUS.iterdir() if path.name.endswith(".json"))


def parse_devices(text: str) -> Cluster:
    """`2xh100` (one host) or `2x8xh100` (hosts x GPUs a host x kind).

    Raises:
      UserError: another form, an unknown kind, more GPUs than a host has.
    """
    known = ", ".join(kinds())
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)x([a-z]\w*)", text.strip().lower())
    if match is None or not int(match[1] or 1) * int(match[2]):
        raise UserError(f"--devices {text!r}: give GPUs x kind, 2xh100, or hosts x GPUs x kind, 2x8xh100 ({known})")
    if match[3] not in kinds():
        raise UserError(f"--devices {text!r}: unknown GPU {match[3]!r}; known are {known}")
    gpu, hosts, gpus = load_gpu(match[3]), int(match[1] or 1), int(match[2])
    if gpus > gpu.gpus_a_host:
        raise UserError(
            f"--devices {text!r}: a host has at most {gpu.gpus_a_host} of these GPUs; "
            f"give hosts x GPUs x kind, 2x{gpu.gpus_a_host}x{gpu.kind}"
        )
    return Cluster(hosts, gpus, gpu)


def load_gpu(kind: str) -> Gpu:
    """The numbers of a kind in `kinds()`."""
    data = json.loads((_GPUS / f"{kind}.json").read_text(encoding="utf-8"))
    target, peaks = data["target"], data["peaks"]
    # One multiplication and one addition a clock tick: products of exact float32 run outside the tensor cores.
    float32 = target["core_count"] * target["fpus_per_core"] * 2 * target["clock_rate_ghz"] * 1e9
    return Gpu(
        kind=kind,
        name=data["name"],
        target_config=_target_config(data["name"], target),
        memory=target["device_memory_size"],
        memory_speed=peaks["memory_bytes_per_second"],
        flops={"bfloat16": peaks["bfloat16_flops"], "float32": float32},
        nvlink=peaks["nvlink_bytes_per_second_each_way"],
        network=peaks["network_bytes_per_second_each_way"],
        gpus_a_host=peaks["gpus_a_host"],
        sources=[target["source"], peaks["source"]],
    )


def _target_config(name: str, target: dict) -> str:
    major, minor = target["compute_capability"]
    sizes = [f"  {key}: {value}" for key, value in target.items() if isinstance(value, int | float)]
    return "\n".join(
        [
            "gpu_device_info {",
            *sizes,
            f"  cuda_compute_capability {{ major: {major} minor: {minor} }}",
            "}",
            'platform_name: "CUDA"',
            "dnn_version_info { major: 9 minor: 12 }",
            "runtime_version { major: 12 minor: 9 patch: 0 }",
            f'device_description_str: "{name}"',
        ]
    )
