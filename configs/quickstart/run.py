"""The whole pipeline in miniature, on two CPU cores and with nothing but what is installed.

python configs/quickstart/run.py [--out DIR]

Text of the standard library becomes a target and a small language model; the small one becomes a drafter for the
target; drafter, control and baselines learn on one domain and are measured on two. Every stage is a public command
with a config of this folder, as in a real run. What is complete is not made again: after an interrupt, run it again.
"""

import dataclasses
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

from osprey_jax.command import ArgumentParser, UserError, run
from osprey_jax.files import read_json, write_json
from osprey_jax.reports.tables import console_table

CONFIGS = Path(__file__).resolve().parent
ROOT = CONFIGS.parent.parent
DEFAULT_OUT = "runs/quickstart"  # where the configs put everything
DRAFTERS = {  # as in evaluate.yaml, and what they are
    "random": "floor: random weights, not distilled",
    "converted": "Osprey as converted, not distilled",
    "eagle3_1": "EAGLE-3 from scratch, 1 layer",
    "eagle3_2": "EAGLE-3 from scratch, 2 layers",
    "control": "control: Osprey's architecture, random weights",
    "osprey": "Osprey: from the small language model",
}
# glibc would give a step's memory back to the kernel and ask for it again, every step: a fifth of the CPU time.
KEEP_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4000000000"}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass(frozen=True)
class Stage:
    """Commands that run one after another until `output` is there, which appears complete or not at all."""

    title: str
    output: Path
    commands: list[list[str]]  # arguments of the Python interpreter


def stages(out: str) -> list[Stage]:
    """The pipeline in order. `out` replaces the configs' output directory."""

    def at(name: str) -> Path:
        return Path(out) / name

    def command(module: str, config: str) -> list[str]:
        return ["-m", module, "--config", _shown(CONFIGS / f"{config}.yaml"), *overrides(_read(config), out)]

    def trained(title: str, config: str, exporter: str, output: str) -> Stage:
        values = _read(config)
        run_dir, step = _moved(values["run_dir"], out), str(values["steps"])
        export = ["-m", exporter, "--run", run_dir, "--step", step, "--out", str(at(output))]
        return Stage(title, at(output), [command("osprey_jax.train", config), export])

    def converted(title: str, name: str, *extra: str) -> Stage:
        paths = ["--source", at("backbone-hf"), "--target", at("target-hf"), "--out", at(f"converted/{name}")]
        arguments = ["-m", "osprey_jax.convert", *map(str, paths), *extra]
        return Stage(title, at(f"converted/{name}"), [arguments])

    small_lm, pruned = at("small_lm-hf"), at("small_lm-pruned")
    prune = ["-m", "osprey_jax.prune", "--source", str(small_lm), "--layers", "2", "--out", str(pruned)]
    return [
        Stage("texts and tokenizers", at("inputs"), [[_shown(CONFIGS / "texts.py"), str(at("inputs"))]]),
        trained("target: train", "target", "export.to_hf", "target-hf"),
        trained("small language model: train", "small_lm", "export.to_hf", "small_lm-hf"),
        Stage("small language model: prune to 2 layers", pruned, [prune]),
        trained("backbone: train on", "backbone", "export.to_hf", "backbone-hf"),
        Stage(
            "conversations that the target writes",
            at("conversations/code.jsonl"),
            [command("osprey_jax.regenerate", "regenerate")],
        ),
        converted("Osprey: convert", "osprey"),
        converted("control: convert", "control", "--random-weights", "0"),
        trained("Osprey: distill", "osprey", "export.to_sglang", "drafters/osprey"),
        trained("control: distill", "control", "export.to_sglang", "drafters/control"),
        trained("EAGLE-3, 1 layer: distill", "eagle3_1", "export.to_sglang", "drafters/eagle3_1"),
        trained("EAGLE-3, 2 layers: distill", "eagle3_2", "export.to_sglang", "drafters/eagle3_2"),
        Stage(
            "accepted length, on both domains",
            at("evaluation/results.json"),
            [command("osprey_jax.evaluate", "evaluate")],
        ),
    ]


def overrides(values: dict, out: str, parents: str = "") -> list[str]:
    """`key=value` for every path of a config that lies in the default output directory, moved to `out`."""
    found = []
    for key, value in values.items():
        if isinstance(value, dict):
            found += overrides(value, out, f"{parents}{key}.")
        elif (moved := _moved(value, out)) != value:
            found.append(f"{parents}{key}={json.dumps(moved)}")
    return found


def _moved(value: object, out: str) -> object:
    if isinstance(value, list):
        return [_moved(item, out) for item in value]
    inside = isinstance(value, str) and value.startswith(f"{DEFAULT_OUT}/")
    return out + value.removeprefix(DEFAULT_OUT) if inside else value


def _read(config: str) -> dict:
    return yaml.safe_load((CONFIGS / f"{config}.yaml").read_text(encoding="utf-8"))


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT))  # commands run there


# ---- running


class Runner:
    """Runs commands one at a time and interrupts them when a signal comes, so that each can save what it has."""

    def __init__(self, environment: dict[str, str]):
        self._environment = environment

    def __enter__(self) -> "Runner":
        self.stopped = False
        self._process: subprocess.Popen | None = None
        wanted = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # `nohup` ignores one
        self._before = {number: signal.signal(number, self._stop) for number in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: object) -> None:
        self.stopped = True
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)  # which every command cleans up after

    def run(self, arguments: list[str]) -> int:
        """The exit status of the Python interpreter with `arguments`. `KeyboardInterrupt` after a signal."""
        print("$ python " + " ".join(arguments), flush=True)
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=self._environment | os.environ,
            start_new_session=True,  # so that a Ctrl-C comes once, from here
        )
        if self.stopped:  # while the process was being made
            self._process.send_signal(signal.SIGINT)
        status = self._process.wait()
        if self.stopped:
            raise KeyboardInterrupt
        return status


def environment(out: str) -> dict[str, str]:
    """What the commands find in their environment, unless it is set already."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / out / "xla")}  # Osprey and its control compile to the same
    return {"JAX_PLATFORMS": "cpu"} | KEEP_MEMORY | cache  # a CPU is one device, whatever else the machine has


def run_stages(plan: list[Stage], environment: dict[str, str]) -> None:
    """Run what is not complete, with the time of each stage.

    Raises:
      UserError: a command failed; its own message stands above.
      KeyboardInterrupt: a signal came, and the command has saved what it can.
    """
    begin = time.monotonic()
    for number, stage in enumerate(plan, start=1):
        name = f"[{number}/{len(plan)}] {stage.title}"
        if _complete(stage):
            continue
        print(f"\n{name}", flush=True)
        start, cpu = time.monotonic(), _cpu_seconds()
        with Runner(environment) as runner:
            for arguments in stage.commands:
                if runner.run(arguments) != 0:
                    raise UserError(f"stage {number} ({stage.title}) failed; the same command goes on from there")
        if not _complete(stage):
            raise UserError(f"stage {number} ({stage.title}) left no {stage.output}")
        print(f"{name}: {time.monotonic() - start:.1f} s ({_cpu_seconds() - cpu:.1f} CPU-seconds)", flush=True)
    print(f"\nall {len(plan)} stages complete; this call took {time.monotonic() - begin:.0f} s")


def _complete(stage: Stage) -> bool:
    return (ROOT / stage.output).exists()


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def check_same_configs(out: Path) -> None:
    """`UserError` where `out` was made with other configs than those of this folder now."""
    files = [path for path in sorted(CONFIGS.rglob("*")) if path.suffix in (".yaml", ".json", ".jinja")]
    files.append(CONFIGS / "texts.py")
    now = {_shown(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    record = out / "configs.json"
    if not record.exists():
        if out.exists() and any(out.iterdir()):
            raise UserError(f"{out}: holds something that is not a quickstart; choose another --out")
        out.mkdir(parents=True, exist_ok=True)
        write_json(record, now)
    before = read_json(record)
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if changed:
        raise UserError(f"{out}: was made before {', '.join(changed)} changed; remove it or choose another --out")


# ---- reporting


def report(out: str) -> None:
    """The table of accepted lengths, whatever it says, and how to serve a drafter."""
    results = read_json(ROOT / out / "evaluation" / "results.json")["results"]
    found = {(result["arm"], result["prompts"]): result for result in results}
    sets = list(dict.fromkeys(result["prompts"] for result in results))
    rows = [[text, *(found[name, prompts]["accepted_length"] for prompts in sets)] for name, text in DRAFTERS.items()]
    rows.sort(key=lambda row: row[1])
    differing = sum(result["differing"] for result in results)
    asked = sum(len(result["requests"]) for result in results)
    print("\nAccepted length (tokens a verification of the target yields) on held-out prompts;")
    print("what was distilled, was for the same steps and on code alone.\n")
    print(console_table(["drafter", *sets], rows))
    print(f"\n{differing} of {asked} texts differ from what the target writes alone.")
    print(f"heat map: {out}/evaluation/accepted_length.png   every request: {out}/evaluation/requests.csv")
    print("One seed of a miniature: differences of some tenths are noise.")
    print(f"""
To serve the result, with the Python of an environment that has SGLang (sglang_patches/README.md):
python -m export.serve --target {out}/target-hf --draft {out}/drafters/osprey --python PYTHON""")


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"output directory (default: {DEFAULT_OUT})")
    arguments = parser.parse_args()
    out = DEFAULT_OUT if arguments.out is None else str(arguments.out.resolve())
    check_same_configs(ROOT / out)
    plan = stages(out)
    print(f"{len(plan)} stages, in {out}:")
    for number, stage in enumerate(plan, start=1):
        print(f"{number:4} {stage.title}" + (" (complete)" if _complete(stage) else ""))
    run_stages(plan, environment(out))
    report(out)


if __name__ == "__main__":
    run(main)
