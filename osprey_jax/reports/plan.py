"""A plan (`planning/preflight.py`) as text. Each number says what it is of."""

import textwrap
from typing import Any

from osprey_jax.reports.tables import console_table

GIB = 2**30


def describe(plan: dict[str, Any]) -> str:
    """All of it but the single collectives, which the JSON has."""
    devices, batch, mesh = plan["devices"], plan["batch"], plan["mesh"]
    hosts = "" if devices["hosts"] == 1 else f" on {devices['hosts']} hosts"
    parts = "" if batch["accumulation"] == 1 else f", {batch['accumulation']} times a step"
    lines = [
        f"{devices['gpus']} x {devices['name']}{hosts}, data {mesh['data']} x tensor {mesh['tensor']}: "
        f"{batch['rows_a_gpu']} x {batch['length']:,} positions a GPU{parts}, {batch['supervised']:.0%} supervised",
        f"{'; '.join(plan['design'])}; {plan['compute_dtype']}",
        f"compiled in {plan['seconds']['compile']:.0f} s (and traced in {plan['seconds']['trace']:.0f} s), "
        f"jax {plan['jax']}, XLA_FLAGS={plan['xla_flags']}",
        *([f"attention kernel xla, since mosaic needs {plan['mosaic_needs']}"] if plan["mosaic_needs"] else []),
        "",
        *_memory(plan["memory"]),
        "",
        "largest buffers beside the arguments, when the step needs most:",
        *([f"  {_gib(buffer['bytes'])}  {buffer['name']}" for buffer in plan["largest_buffers"]] or ["  unknown"]),
        "",
        *_flops(plan["flops_a_position"]),
        "",
        *_collectives(plan),
        "",
        *_floor(plan["floor"]),
        *_run(plan["run"]),
    ]
    return "\n".join(_wrapped(line) for line in lines)


def _wrapped(line: str) -> str:
    return (
        "\n  ".join(textwrap.wrap(line, 118, break_long_words=False, break_on_hyphens=False))
        if len(line) > 120
        else line
    )


def tried(rows: int, needed: int, available: int) -> str:
    """A line on one try of `--max-batch`."""
    verdict = "fits" if needed <= available else "does not fit"
    return f"{rows} row(s) a GPU: {needed / GIB:.1f} of {available / GIB:.1f} GiB, {verdict}"


def _memory(memory: dict[str, Any]) -> list[str]:
    arguments, temporaries = memory["arguments"], memory["temporaries"]
    rows = [
        ("target's weights, frozen", arguments["target"]),
        ("weights, float32 masters", arguments["masters"]),
        ("Adam's moments", arguments["moments"]),
        ("constants and batch", arguments["constants"] + arguments["batch"]),
        ("temporaries: gathered weights *", temporaries["gathered_weights"]),
        ("temporaries: activations and gradients *", temporaries["activations_and_gradients"]),
        ("temporaries: the rest of their block *", temporaries["rest"]),
        ("needed at once", memory["needed"]),
        ("there is for train", memory["available"]),
    ]
    table = console_table(["memory of a GPU", "GiB"], [(name, count / GIB) for name, count in rows if count])
    return [
        *table.splitlines(),
        f"{'fits' if memory['fits'] else 'DOES NOT FIT'}: JAX takes {memory['fraction']:.0%} of the "
        f"{memory['device'] / GIB:.1f} GiB of a GPU, and the rest is for NCCL, cuBLAS and CUDA.",
        *_advice(memory),
        "* what lives when the step needs most, by XLA's account of that moment; the block is one allocation, and its "
        f"rest serves other moments. XLA's own peak, which counts no such rest: {memory['peak'] / GIB:.2f} GiB.",
    ]


def _advice(memory: dict[str, Any]) -> list[str]:
    """How much of the GPU would do, where what JAX takes is too little."""
    wanted = memory["needed"] / memory["device"]
    if memory["fits"] or wanted > 0.94:
        return []
    return [f"With XLA_CLIENT_MEM_FRACTION={wanted + 0.01:.2f} in its environment it would fit."]


def _flops(flops: dict[str, Any]) -> list[str]:
    model, executed, ratio = flops["model"], flops["executed"], flops["ratio"]
    rows = [
        ("matrix products", model["products"] / 1e9, executed["products"] / 1e9, ratio["products"]),
        ("attention, causal half", model["attention"] / 1e9, executed["attention"] / 1e9, ratio["attention"]),
        ("both", sum(model.values()) / 1e9, sum(executed.values()) / 1e9, ratio["total"]),
    ]
    table = console_table(["GFLOP a position", "model", "executed", "executed / model"], rows)
    return [
        *table.splitlines(),
        "The model's: every position supervised, nothing computed twice (attention 2 products forward, 4 backward; the "
        "kernel's backward computes 5).",
    ]


def _collectives(plan: dict[str, Any]) -> list[str]:
    kinds: dict[str, list[float]] = {}
    for call in plan["collectives"]:
        row = kinds.setdefault(call["kind"], [0, 0, 0, 0])
        for i, key in enumerate(("bytes", "nvlink", "network")):
            row[i + 1] += call["count"] * call[key]
        row[0] += call["count"]
    header = ["collectives of a step", "calls", "GiB whole", "GiB on NVLink", "GiB on the network"]
    rows = [(kind, row[0], *(n / GIB for n in row[1:])) for kind, row in sorted(kinds.items())]
    if plan["devices"]["hosts"] == 1:
        header, rows = header[:-1], [row[:-1] for row in rows]
    table = console_table(header, rows)
    large = plan["large_all_reduces"]
    found = "; ".join(f"{call['count']} x {call['what']}" for call in large)
    return [
        *table.splitlines(),
        "On a link: what must enter or leave a GPU at least.",
        f"LARGE ALL-REDUCES: {found}" if large else "No all-reduce of gradients: none is of 1 MiB or more.",
    ]


def _floor(floor: dict[str, Any]) -> list[str]:
    each, peaks, moved = floor["each"], floor["peaks"], floor["bytes"]
    rows = [
        ("compute", 1e3 * each["compute"], f"executed FLOPs at {peaks['flops'] / 1e12:,.0f} TFLOP/s"),
        (
            "memory",
            1e3 * each["memory"],
            f"weights and optimizer state alone, {moved['memory'] / GIB:.1f} GiB at {peaks['memory'] / 1e12:.2f} TB/s",
        ),
        (
            "NVLink",
            1e3 * each["nvlink"],
            f"{moved['nvlink'] / GIB:.2f} GiB at {peaks['nvlink'] / 1e9:.0f} GB/s each way",
        ),
        (
            "network",
            1e3 * each["network"],
            f"{moved['network'] / GIB:.2f} GiB at {peaks['network'] / 1e9:.0f} GB/s each way",
        ),
    ]
    table = console_table(["floor of a step", "ms", "at stated peaks"], rows if moved["network"] else rows[:-1])
    return [*table.splitlines(), f"No step is faster than {1e3 * floor['seconds']:.0f} ms ({floor['bound_by']})."]


def _run(run: dict[str, Any]) -> list[str]:
    rates = (
        f"{run['gpu_hours_a_1000_steps']:.2f} GPU-hours a 1,000 steps, "
        f"{run['gpu_hours_a_billion_positions']:.1f} a billion positions"
    )
    if run["steps"] is None:
        return [f"At that floor: {rates}. How many steps the epochs are is known once the data is prepared."]
    total = f"{run['gpu_hours']:,.1f} GPU-hours for {run['steps']:,} steps ({run['hours']:,.1f} hours)"
    return [f"At that floor: {total}; {rates}."]


def _gib(count: int) -> str:
    return f"{count / GIB:6.2f} GiB"
