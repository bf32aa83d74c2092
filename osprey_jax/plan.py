"""Compile the training step of a config for GPUs that this machine does not have, and print what it needs.

python -m osprey_jax.plan --config configs/qwen3-8b/osprey.yaml --devices 2xh100

Memory of a GPU by part and whether it fits, FLOPs, collectives, the floor of the step's time and the run's GPU-hours
at that floor. No GPU, no data and no weights: of a checkpoint only its `config.json` is read.
"""

import argparse
import os
from pathlib import Path

from osprey_jax.command import UserError, run
from osprey_jax.config import TrainConfig, config_parser, load_config

# Products as cuBLAS calls: XLA would choose between its own kernels and those by timing them on a GPU.
_XLA_FLAG = "--xla_gpu_enable_triton_gemm"


def main() -> None:
    parser = config_parser("osprey_jax.plan", __doc__)
    parser.add_argument(
        "--devices", required=True, metavar="N", help="2xh100 (one host) or 2x8xh100 (hosts x GPUs); h100, h200, b200"
    )
    parser.add_argument(
        "--supervised",
        type=_share,
        default=1.0,
        metavar="SHARE",
        help="of the positions, that the loss supervises (default 1.0)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all of it there")
    parser.add_argument(
        "--max-batch", action="store_true", help="find the largest number of rows a GPU that fits, and plan for it"
    )
    arguments = parser.parse_intermixed_args()  # overrides may stand between options
    config = load_config(arguments.config, arguments.overrides, TrainConfig)
    if arguments.json is not None and not arguments.json.resolve().parent.is_dir():
        raise UserError(f"--json {arguments.json}: no such directory {arguments.json.resolve().parent}")
    if arguments.json is not None and arguments.json.is_dir():
        raise UserError(f"--json {arguments.json} is a directory; name a file")
    _before_jax()
    from osprey_jax.files import write_json
    from osprey_jax.planning.compiled import check_plugin, compile_step
    from osprey_jax.planning.hardware import parse_devices
    from osprey_jax.planning.preflight import largest_rows, preflight
    from osprey_jax.reports.plan import describe, tried

    cluster = parse_devices(arguments.devices)
    check_plugin()
    if arguments.max_batch:
        found = largest_rows(config, cluster, lambda *numbers: print(tried(*numbers), flush=True))
        if found is None:
            raise UserError(f"not even one row a GPU fits {arguments.devices}; use more GPUs, mesh.tensor or remat")
        config, compiled = found
        print(f"the largest batch has batch_size={config.batch_size}\n", flush=True)
    else:
        compiled = compile_step(config, cluster)
    plan = preflight(config, cluster, compiled, arguments.supervised)
    print(describe(plan))
    if arguments.json is not None:
        write_json(arguments.json, plan)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share above 0 and up to 1")
    return value


def _before_jax() -> None:
    """What JAX and XLA read when they start. Flags and levels that the user has set stay."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # a GPU of this machine would be taken for the compilation's
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    flags = os.environ.get("XLA_FLAGS", "")
    if _XLA_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_XLA_FLAG}=false".strip()


if __name__ == "__main__":
    run(main)
