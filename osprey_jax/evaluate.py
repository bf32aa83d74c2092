"""Accepted length of drafters on prompt sets, under greedy chain speculation in this process.

python -m osprey_jax.evaluate --config X.yaml [key=value ...]

Writes to `out`: `results.json` (everything), `requests.csv`, `summary.csv`, `accepted_length.png` for several drafters
on several sets, and `parts/`, one file for each drafter on each set: a second run keeps those whose inputs and
settings are the same, and does the rest.

Accepted length of a request is its completion tokens / its verifications; of a set, the mean over its requests. The
ratio of the sums is given too, under its own name. Every text is compared with what the target writes alone.
"""

import functools
import hashlib
import importlib.metadata
import json
import platform
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from tqdm import tqdm

from osprey_jax import __version__
from osprey_jax.command import UserError, run
from osprey_jax.config import EvaluateConfig, parse_arguments
from osprey_jax.data.conversations import Record, Rejection, prompt_messages, read_records
from osprey_jax.data.rendering import RecordRefused
from osprey_jax.decoding.generate import generate
from osprey_jax.decoding.requests import Request, by_length
from osprey_jax.decoding.speculate import Speculation, speculate
from osprey_jax.decoding.target import Target, open_target
from osprey_jax.files import fingerprint, read_json, write_json, write_text
from osprey_jax.models.drafter import Drafter
from osprey_jax.models.hf import load_drafter
from osprey_jax.models.hf_config import check_fits_target, check_tap_layers, drafter_config
from osprey_jax.reports.plots import heat_map
from osprey_jax.reports.tables import console_table, csv_text

Result = TypeVar("Result")


class PromptSet(NamedTuple):
    """Prompts in file order, and what is not asked, with the reason."""

    name: str
    ids: list[str]
    requests: list[Request]
    skipped: list[Rejection]
    fingerprint: dict[str, Any]


def evaluate(config: EvaluateConfig) -> list[dict[str, Any]]:
    """Measure every drafter on every set, write `config.out`, return the summaries.

    Raises:
      UserError: unusable input; a drafter made for another target; an `out` that holds something else.
    """
    if not config.drafters or not config.prompts:
        raise UserError(f"{'drafters' if config.prompts else 'prompts'}: names nothing to evaluate")
    for name in (*config.drafters, *config.prompts):
        if not re.fullmatch(r"[\w.+-]+", name):
            raise UserError(f"{name!r}: a drafter or prompt set is named with letters, digits and . _ + - alone")
    target = open_target(config.target, config.template_options)
    taps = {name: _check_drafter(path, target) for name, path in config.drafters.items()}
    parts = config.out / "parts"
    if config.out.exists() and not parts.is_dir() and (not config.out.is_dir() or any(config.out.iterdir())):
        raise UserError(f"{config.out}: already exists and is no evaluation; choose another out or remove it first")
    target_hash = fingerprint(config.target)
    sets = [_read_prompts(name, path, config, target, target_hash) for name, path in config.prompts.items()]
    parts.mkdir(parents=True, exist_ok=True)
    results = _measure(config, target, taps, sets, parts)
    summaries = [_summary(result) for result in results]
    _write(config, sets, results, summaries)
    _show(config, sets, summaries)
    return summaries


def _check_drafter(path: Path, target: Target) -> tuple[int, int, int]:
    """The drafter's tap layers, if it fits the target."""
    drafter = drafter_config(path)
    check_fits_target(drafter, target.config, str(path))
    try:
        return check_tap_layers(drafter.tap_layers, target.config.num_layers)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


# ---- prompts


def _read_prompts(name: str, path: Path, config: EvaluateConfig, target: Target, target_hash: str) -> PromptSet:
    ids, requests, skipped = [], [], []
    for record in read_records([str(path)]):
        request = record if isinstance(record, Rejection) else _request(record, config, target)
        if isinstance(request, Rejection):
            skipped.append(request)
        else:
            ids.append(record.id)
            requests.append(request)
    if not requests:
        reasons = ", ".join(sorted({rejection.reason for rejection in skipped})) or "the file is empty"
        raise UserError(f"{path}: no usable prompt ({reasons})")
    if config.sample is not None and config.sample < len(requests):
        chosen = sorted(random.Random(config.seed).sample(range(len(requests)), config.sample))
        ids, requests = [ids[i] for i in chosen], [requests[i] for i in chosen]
    settings = config.model_dump(mode="json", include={"max_new_tokens", "template_options", "compute_dtype"})
    asked = hashlib.sha256(json.dumps([ids, [vars(request) for request in requests]]).encode()).hexdigest()
    fingerprint = settings | {"target": target_hash, "prompts": asked, "stop_ids": list(target.stop_ids)}
    return PromptSet(name, ids, requests, skipped, fingerprint)


def _request(record: Record, config: EvaluateConfig, target: Target) -> Request | Rejection:
    messages = prompt_messages(record.messages)
    if not any(message["role"] == "user" for message in messages):
        return Rejection(record.where, record.id, "no user turn")
    try:
        prompt = target.prompt_ids(messages, record.tools)
    except RecordRefused as error:
        return Rejection(record.where, record.id, f"refused by the chat template: {error}")
    limit = target.limit(prompt, config.max_new_tokens)
    if limit is None:
        return Rejection(record.where, record.id, "the prompt exceeds the target's context")
    return Request(prompt, limit)


# ---- measuring


def _measure(
    config: EvaluateConfig, target: Target, taps: dict[str, tuple[int, int, int]], sets: list[PromptSet], parts: Path
) -> list[dict[str, Any]]:
    """One result for each drafter on each set, from `parts` or made now."""
    dtype = jnp.dtype(config.compute_dtype)
    options = {"stop_ids": target.stop_ids, "rows": config.batch_size, "dtype": dtype}
    load_target = functools.cache(lambda: target.load(dtype))  # when first needed: all parts may be there already

    def write_alone(prompts: PromptSet) -> list[list[int]]:
        complete = functools.partial(generate, load_target(), **options)
        completions = _batched(prompts.requests, complete, config.batch_size, f"target alone: {prompts.name}")
        return [completion.token_ids for completion in completions]

    def speak(prompts: PromptSet, drafter_name: str, load: Callable[[], Drafter]) -> list[dict[str, Any]]:
        complete = functools.partial(
            speculate,
            load_target(),
            load(),
            tap_layers=taps[drafter_name],
            draft_steps=config.draft_steps,
            **options,
        )
        found = _batched(prompts.requests, complete, config.batch_size, f"{drafter_name}: {prompts.name}")
        facts = zip(prompts.ids, prompts.requests, found, own[prompts.name], strict=True)
        return [_facts(*of_one, target) for of_one in facts]

    own = {
        prompts.name: _part(
            parts / f"{prompts.name}.json", prompts.fingerprint, functools.partial(write_alone, prompts)
        )
        for prompts in sets
    }
    results = []
    for name, path in config.drafters.items():
        load = functools.cache(functools.partial(load_drafter, path, dtype=dtype))
        settings = {"drafter": fingerprint(path), "taps": list(taps[name]), "draft_steps": config.draft_steps}
        for prompts in sets:
            made = _part(
                parts / f"{name}@{prompts.name}.json",
                prompts.fingerprint | settings,
                functools.partial(speak, prompts, name, load),
            )
            results.append({"drafter": name, "prompts": prompts.name, "requests": made})
    return results


def _part(path: Path, fingerprint: dict[str, Any], make: Callable[[], list]) -> list:
    """What `make` gives, kept in `path` for later runs with the same fingerprint."""
    if path.is_file():
        kept = read_json(path)
        if kept.get("fingerprint") == fingerprint:
            return kept["values"]
    values = make()
    write_text(path, json.dumps({"fingerprint": fingerprint, "values": values}, ensure_ascii=False) + "\n")
    return values


def _batched(
    requests: Sequence[Request], complete: Callable[[list[Request]], list[Result]], batch_size: int, title: str
) -> list[Result]:
    """`complete` on batches alike in length; results in the order of `requests`."""
    results: dict[int, Result] = {}
    with tqdm(total=len(requests), desc=title, unit=" prompts", disable=None) as bar:
        for group in by_length([len(request.prompt) for request in requests], batch_size):
            results |= zip(group, complete([requests[i] for i in group]), strict=True)
            bar.update(len(group))
    return [results[i] for i in range(len(requests))]


def _facts(name: str, request: Request, speculation: Speculation, own_ids: list[int], target: Target) -> dict[str, Any]:
    completion = speculation.completion
    return {
        "id": name,
        "prompt_tokens": len(request.prompt),
        "completion_tokens": len(completion.token_ids),
        "verifications": speculation.verifications,
        "accepted_length": speculation.accepted_length,
        "histogram": list(speculation.histogram),
        "finish_reason": completion.finish_reason,
        "equals_target": completion.token_ids == own_ids,
        "text": target.text(completion.token_ids),
    }


# ---- reporting


def _summary(result: dict[str, Any]) -> dict[str, Any]:
    requests = result["requests"]
    lengths = [r["accepted_length"] for r in requests if r["accepted_length"] is not None]
    tokens, verifications = (sum(r[key] for r in requests) for key in ("completion_tokens", "verifications"))
    verified = sum(r["completion_tokens"] for r in requests if r["verifications"])
    return {
        "drafter": result["drafter"],
        "prompts": result["prompts"],
        "requests": len(requests),
        "without_verification": len(requests) - len(lengths),  # ended by their first token: not in the mean
        "accepted_length": sum(lengths) / len(lengths) if lengths else None,
        "tokens_per_verification": verified / verifications if verifications else None,
        "differing": sum(not r["equals_target"] for r in requests),
        "ended_by_limit": sum(r["finish_reason"] == "length" for r in requests),
        "completion_tokens": tokens,
        "verifications": verifications,
        "histogram": [sum(counts) for counts in zip(*(r["histogram"] for r in requests), strict=True)],
    }


def _write(config: EvaluateConfig, sets: list[PromptSet], results: list[dict], summaries: list[dict]) -> None:
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "transformers", "numpy")}
    everything = {
        "config": config.model_dump(mode="json"),
        "versions": {"osprey_jax": __version__, "python": platform.python_version()} | versions,
        "device": jax.devices()[0].device_kind,
        "skipped": {prompts.name: [vars(rejection) for rejection in prompts.skipped] for prompts in sets},
        "results": [  # the requests last, themselves instead of their number
            {key: value for key, value in summary.items() if key != "requests"} | {"requests": result["requests"]}
            for summary, result in zip(summaries, results, strict=True)
        ],
    }
    write_json(config.out / "results.json", everything)
    rows = [
        {"drafter": result["drafter"], "prompts": result["prompts"]} | {k: v for k, v in r.items() if k != "text"}
        for result in results
        for r in result["requests"]
    ]
    write_text(config.out / "requests.csv", csv_text(rows))
    write_text(config.out / "summary.csv", csv_text(summaries))
    figure = config.out / "accepted_length.png"
    if len(config.drafters) > 1 and len(sets) > 1:
        found = {(s["drafter"], s["prompts"]): s["accepted_length"] for s in summaries}
        values = [[found[drafter, prompts.name] for prompts in sets] for drafter in config.drafters]
        heat_map(figure, values, list(config.drafters), [prompts.name for prompts in sets], "accepted length")
    else:
        figure.unlink(missing_ok=True)  # of an earlier run with more of both


def _show(config: EvaluateConfig, sets: list[PromptSet], summaries: list[dict]) -> None:
    header = ("drafter", "prompts", "requests", "accepted length", "tokens / verifications", "differing from target")
    keys = ("drafter", "prompts", "requests", "accepted_length", "tokens_per_verification", "differing")
    print(console_table(header, [[summary[key] for key in keys] for summary in summaries]))
    print("accepted length: mean over requests of completion tokens / verifications")
    for summary in summaries:
        if summary["without_verification"]:
            print(
                f"{summary['drafter']}, {summary['prompts']}: {summary['without_verification']} requests ended by "
                "their first token, without a verification; they are in no mean"
            )
    for prompts in sets:
        for reason in sorted({rejection.reason for rejection in prompts.skipped}):
            count = sum(rejection.reason == reason for rejection in prompts.skipped)
            print(f"{prompts.name}: {count} records skipped: {reason}")
        if config.sample is not None and config.sample > len(prompts.requests):
            print(f"{prompts.name}: has only {len(prompts.requests)} prompts, all of them asked")
    print(f"written to {config.out}")


def main() -> None:
    evaluate(parse_arguments("osprey_jax.evaluate", __doc__.splitlines()[0], EvaluateConfig))


if __name__ == "__main__":
    run(main)
