"""Numerics, then step time, tokens/s, model FLOPs utilisation and peak memory of the released shapes on one GPU.

python tests/gpu/measure.py OUT.json

Weights are random and made on the GPU. Every part runs in a process of its own, whose peak memory is that of the part,
and a part that fails leaves the others. `--tiny` runs the same on any machine in shapes that say nothing of speed.
"""

import dataclasses
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from osprey_jax.command import ArgumentParser, UserError, run
from osprey_jax.files import read_json, write_json
from osprey_jax.reports.tables import console_table

WARM_UP, STEPS = 2, 8
PARTS = {  # name -> (stage, rows, tokens a row)
    "numerics": None,
    "Qwen3-8B distillation, 1 x 4096": ("distill", 1, 4096),
    "Qwen3-8B distillation, 1 x 16384": ("distill", 1, 16384),
    "Qwen3-4B, 2 layers, pretraining, 8 x 8192": ("pretrain", 8, 8192),
}


def measure_step(stage: str, rows: int, length: int, tiny: bool) -> dict:
    """What a training step takes on the first device, on full rows of one segment, supervised everywhere.

    Then nothing of the FLOPs that the model needs on paper can be skipped, and utilisation is not flattered.
    """
    import jax

    from osprey_jax import config
    from osprey_jax.benchmark import shapes
    from osprey_jax.benchmark.random_run import RandomRun, random_batch
    from osprey_jax.planning import flops, hardware
    from osprey_jax.training.mesh import make_mesh
    from osprey_jax.training.stages import design

    device, backbone, target = jax.devices()[0], shapes.QWEN3_4B_2LAYER, shapes.QWEN3_8B
    if tiny:
        sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "num_kv_heads": 2}
        backbone = dataclasses.replace(backbone, **sizes, head_dim=16)
        target = dataclasses.replace(target, **sizes | {"hidden_size": 96}, head_dim=16, num_layers=7)
        length //= 64
    mesh = make_mesh(config.Mesh(data=1, tensor=1), rows, [device])
    options = {"rows": rows, "length": length, "compute_dtype": "bfloat16"}
    with tempfile.TemporaryDirectory() as folder:
        if stage == "distill":
            drafter = shapes.converted(backbone, target)
            asked = shapes.distill_config(Path(folder), target, drafter, **options)
        else:
            asked = shapes.pretrain_config(Path(folder), backbone, loss_chunk=2048, **options)
        planned = design(asked, mesh)
        began = time.perf_counter()
        trained = RandomRun(asked, planned, mesh)
        ready = time.perf_counter() - began
    batch = random_batch(rows=rows, length=length, vocab=backbone.vocab_size, segment=4 * length, supervised=1.0)
    placed = trained.place(batch)
    for _ in range(WARM_UP):
        trained.step(placed)
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        loss = trained.step(placed)
        seconds.append(time.perf_counter() - began)
    step = statistics.median(seconds)
    steps = asked.ttt.length if stage == "distill" else 1
    needed = flops.needed(planned.trained, planned.target, rows=rows, length=length, steps=steps).total
    known = {gpu.name: gpu for gpu in map(hardware.load_gpu, hardware.kinds())}  # an H100 PCIe has another peak
    gpu = known.get(device.device_kind)
    peak = None if gpu is None else gpu.flops[asked.compute_dtype]
    memory = device.memory_stats() or {}  # a CPU has none
    return {
        "seconds": step,
        "tokens_per_second": rows * length / step,
        "model_flops": needed,
        "peak_flops_per_second": peak,
        "utilisation": None if peak is None else needed / step / peak,
        "peak_bytes": memory.get("peak_bytes_in_use"),
        "temporary_bytes": trained.temporary_bytes,
        "loss": loss,
        "seconds_to_make_and_compile": ready,
        "notes": planned.notes,
    }


def run_part(name: str, tiny: bool) -> dict:
    """In a process of its own."""
    import jax
    from numerics import TOLERANCE, check

    device = jax.devices()[0]
    if not tiny and device.platform != "gpu":
        raise UserError(f"no GPU: JAX sees {device.device_kind}; install the extra cuda12 or cuda13, or give --tiny")
    about = {"device": device.device_kind, "jax": jax.__version__, "python": sys.version.split()[0]}
    part = PARTS[name]
    result = {"tolerance": TOLERANCE, "checks": check(tiny)} if part is None else measure_step(*part, tiny)
    return {"name": name} | about | result


def table(results: list[dict]) -> str:
    rows = []
    for check in results[0].get("checks", []):
        errors = ", ".join(f"{name} {value:.5f}" for name, value in check.get("errors", {}).items())
        verdict = "ok" if check.get("ok") else f"skipped: {check['skipped']}" if "skipped" in check else "WRONG"
        rows.append((check["name"], errors, verdict))
    limits = ", ".join(f"{name} {value}" for name, value in results[0].get("tolerance", {}).items())
    numbers = []
    for result in results[1:]:
        peak, used = result.get("peak_bytes"), result.get("utilisation")
        speed = result.get("tokens_per_second")
        numbers.append(
            (
                result["name"],
                result.get("seconds"),
                None if speed is None else round(speed),
                None if used is None else f"{used:.1%}",
                None if peak is None else peak / 2**30,
                result.get("error", ""),
            )
        )
    header = ("shape", "step, s", "tokens/s", "model FLOPs utilisation", "peak memory, GiB", "")
    numerics = console_table(("numerics", f"relative errors (tolerance: {limits})", ""), rows)
    return f"{results[0].get('device')}\n\n{numerics}\n\n{console_table(header, numbers)}"


def main() -> None:
    parser = ArgumentParser(prog="python tests/gpu/measure.py", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT.json", help="where the results go")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on any device")
    parser.add_argument("--part", choices=PARTS, metavar="NAME", help="only this part, in this process")
    arguments = parser.parse_args()
    if arguments.part is not None:
        write_json(arguments.out, run_part(arguments.part, arguments.tiny))
        return
    results = []
    for name in PARTS:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "part.json"
            options = ["--part", name, *(["--tiny"] if arguments.tiny else [])]
            process = subprocess.run([sys.executable, __file__, str(out), *options], check=False)
            failed = {"name": name, "error": f"exit status {process.returncode}, see above"}
            results.append(read_json(out) if process.returncode == 0 else failed)
        write_json(arguments.out, {"parts": results})
    print(table(results))
    wrong = [check["name"] for check in results[0].get("checks", []) if not check.get("ok", True)]
    failed = [result["name"] for result in results if "error" in result]
    if wrong or failed:
        raise UserError(f"outside their tolerance: {wrong}; failed: {failed}")


if __name__ == "__main__":
    run(main)
