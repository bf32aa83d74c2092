"""Measure one part of the project beside a peer and print one table.

Ratios on CPUs, measured side by side; absolute times only on a GPU.
"""

import argparse
import importlib
import sys

from osprey_jax.command import ArgumentParser, run

BENCHMARKS = {
    "step": "the distillation step beside a PyTorch step of the released trainer's structure",
    "pretrain": "the pretraining step beside its dense form",
    "attention": "the attention kernels: memory and time as rows grow",
    "loss": "the fused loss: memory and time as rows and vocabularies grow",
    "packing": "packed rows beside one conversation a row",
    "preparation": "preparation of data beside the tokenizer alone",
}


def main() -> None:
    names = "\n".join(f"  {name:13}{what}" for name, what in BENCHMARKS.items())
    parser = ArgumentParser(
        prog="python -m osprey_jax.benchmark",
        description=f"{__doc__}\nbenchmarks:\n{names}",
        epilog="`python -m osprey_jax.benchmark NAME --help` lists a benchmark's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=BENCHMARKS, metavar="NAME", help="of the benchmark")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of the benchmark")
    arguments = parser.parse_args(sys.argv[1:2])
    importlib.import_module(f"osprey_jax.benchmark.{arguments.name}").main(sys.argv[2:])


if __name__ == "__main__":
    run(main)
