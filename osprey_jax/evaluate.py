"""Measure drafters on prompt sets: accepted length in this process, or also latency and throughput in SGLang.

python -m osprey_jax.evaluate --config X.yaml [key=value ...]
python -m osprey_jax.evaluate --config X.yaml --decide COSTS.yaml

Measured are the drafters and, by SGLang, `off`: the target without speculation. Writes to `out`: `results.json`
(everything), `requests.csv`, `summary.csv`, `comparisons.csv`, `matrix.csv`, heat maps, and `parts/`: a second run
keeps what was measured with the same inputs and settings, and does the rest. With --decide nothing is measured: what
is in `out` is set beside costs and limits, and `decision.html`, `decision.md` and `decision.json` say what to do.

Accepted length of a request is its completion tokens / its verifications; of a set, the mean over its requests. The
ratio of the sums is given too, under its own name. Every text is compared with what the target writes alone.
"""

import datetime
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from osprey_jax import __version__
from osprey_jax.command import UserError, run
from osprey_jax.config import EvaluateConfig, config_parser, load_config
from osprey_jax.evaluation import behind_servers, in_process
from osprey_jax.evaluation.measurement import summary
from osprey_jax.evaluation.prompts import PromptSet, read_prompt_set
from osprey_jax.files import alone, write_json, write_text
from osprey_jax.reports import comparison, decision, decision_page
from osprey_jax.reports.costs import DecisionConfig
from osprey_jax.reports.measured import show, write_tables
from osprey_jax.reports.results import read_results


def evaluate(config: EvaluateConfig) -> list[dict[str, Any]]:
    """Measure every arm on every set, write `config.out`, return the summaries.

    Raises:
      UserError: unusable input; a drafter made for another target; an `out` that holds something else; servers that
        are not what they should be, or do not answer; another run that writes `out`.
    """
    parts = config.out / "parts"
    if config.out.exists() and not parts.is_dir() and (not config.out.is_dir() or any(config.out.iterdir())):
        raise UserError(f"{config.out}: already exists and is no evaluation; choose another out or remove it first")
    engine = (in_process if config.engine == "in_process" else behind_servers).Engine(config)
    sets = [read_prompt_set(name, path, config, engine.chat) for name, path in config.prompts.items()]
    parts.mkdir(parents=True, exist_ok=True)
    with alone(config.out, parts / ".lock"):
        results = engine.measure(sets, parts)
        summaries = [summary(result, config.seed) for result in results]
        compared = comparison.compare(results, config.seed)
        _write(config, sets, results, summaries, compared, engine.facts())
        write_tables(config, results, summaries, compared)
    show(config, sets, summaries, compared)
    return summaries


def decide(config: EvaluateConfig, costs: DecisionConfig) -> dict[str, Any]:
    """The decision sheet for what was measured in `config.out`, written there and returned. Raises `UserError`."""
    if not (config.out / "results.json").is_file():
        raise UserError(f"{config.out}: holds no results.json; measure first, with the same command without --decide")
    made = decision.decide(read_results(config.out / "results.json"), costs)
    write_json(config.out / "decision.json", made)
    write_text(config.out / "decision.md", decision_page.markdown(made))
    write_text(config.out / "decision.html", decision_page.html(made))
    return made


def _write(
    config: EvaluateConfig,
    sets: list[PromptSet],
    results: list[dict[str, Any]],
    summaries: list[dict[str, Any]],
    compared: list[dict[str, Any]],
    hardware: dict[str, Any],
) -> None:
    names = ("jax", "jaxlib", "flax", "transformers", "numpy")
    versions = {name: importlib.metadata.version(name) for name in names}
    servers = {server["version"] for server in hardware.get("servers", {}).values()}
    versions |= {"sglang": ", ".join(sorted(servers))} if servers else {}
    everything = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "engine": config.engine,
        "config": config.model_dump(mode="json"),
        "versions": {"osprey_jax": __version__, "python": platform.python_version()} | versions,
        "hardware": hardware,
        "skipped": {prompts.name: [vars(rejection) for rejection in prompts.skipped] for prompts in sets},
        "results": [  # the requests last, themselves instead of their number
            {key: value for key, value in of_all.items() if key != "requests"} | _rest(result)
            for of_all, result in zip(summaries, results, strict=True)
        ],
        "comparisons": compared,
    }
    write_json(config.out / "results.json", everything)


def _rest(result: dict[str, Any]) -> dict[str, Any]:
    return {"failures": result["failures"], "requests": result["requests"]}


def main() -> None:
    parser = config_parser("osprey_jax.evaluate", __doc__.partition("\n")[0])
    parser.add_argument(
        "--decide", type=Path, metavar="COSTS", help="measure nothing; judge what was measured by a YAML file of costs"
    )
    arguments = parser.parse_intermixed_args()
    config = load_config(arguments.config, arguments.overrides, EvaluateConfig)
    if arguments.decide is None:
        evaluate(config)
    else:
        print(decision_page.markdown(decide(config, load_config(arguments.decide, [], DecisionConfig))))
        print(f"written to {config.out}/decision.html, decision.md and decision.json")


if __name__ == "__main__":
    run(main)
