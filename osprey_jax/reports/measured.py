"""What `evaluate` measured: tables for the console, CSV files, heat maps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from osprey_jax.config import OFF, EvaluateConfig
from osprey_jax.files import write_text
from osprey_jax.reports import comparison, matrix
from osprey_jax.reports.tables import console_table, csv_text

_HEAT_MAPS = {"accepted length": "accepted_length", "throughput, times off": "throughput"}


def write_tables(
    config: EvaluateConfig,
    results: Sequence[dict[str, Any]],
    summaries: Sequence[dict[str, Any]],
    compared: Sequence[dict[str, Any]],
) -> None:
    """CSV files into `config.out`, and a heat map of each matrix that has more than one row and column."""
    rows = [
        {"arm": result["arm"], "prompts": result["prompts"], "concurrency": result["concurrency"]}
        | {key: value for key, value in request.items() if key not in ("text", "first_difference")}
        for result in results
        for request in result["requests"]
    ]
    found = matrix.matrices(summaries, config.trained_on)
    flat = [{key: value for key, value in row.items() if key != "example_difference"} for row in summaries]
    tables = {"requests.csv": rows, "summary.csv": flat, "comparisons.csv": compared}
    tables["matrix.csv"] = [row for one in found for row in matrix.csv_rows(one)]
    for name, lines in tables.items():
        if lines:
            write_text(config.out / name, csv_text(lines))
        else:
            (config.out / name).unlink(missing_ok=True)  # of an earlier run with more
    for name in _HEAT_MAPS.values():
        for figure in config.out.glob(f"{name}*.png"):
            figure.unlink()
    for one in found:
        if len(one.drafters) > 1 and len(one.sets) > 1:
            matrix.draw(_figure(config.out, one, several=len(config.concurrency) > 1), one)


def _figure(out: Path, one: matrix.Matrix, *, several: bool) -> Path:
    level = f"_at_{one.concurrency}" if several else ""
    return out / f"{_HEAT_MAPS[one.measure]}{level}.png"


def show(
    config: EvaluateConfig, sets: Sequence[Any], summaries: Sequence[dict[str, Any]], compared: list[dict]
) -> None:
    """Everything on the console; `sets` are the `PromptSet`s."""
    if config.drafters:
        print(_lengths([summary for summary in summaries if summary["arm"] != OFF]))
    if config.engine == "sglang":
        print(f"\n{_times(summaries)}")
    for one in matrix.matrices(summaries, config.trained_on):
        print(f"\n{matrix.table(one)}")
    if compared:
        print(f"\n{comparison.table(compared)}")
    for line in _notes(config, sets, summaries):
        print(line)
    print(f"written to {config.out}")


def _lengths(summaries: Sequence[dict[str, Any]]) -> str:
    header = ("drafter", "prompts", "level", "requests", "accepted length", "95% interval", "tokens / verifications")
    rows = []
    for summary in summaries:
        low, high = summary["accepted_length_interval"] or (None, None)
        rows.append(
            (
                *(summary[key] for key in ("arm", "prompts", "concurrency", "requests", "accepted_length")),
                "none" if low is None else f"[{low:.3f}, {high:.3f}]",
                summary["tokens_per_verification"],
                summary["differing"],
            )
        )
    return "\n".join(
        [
            console_table([*header, "differing from target"], rows),
            "accepted length: mean over requests of completion tokens / verifications",
        ]
    )


def _times(summaries: Sequence[dict[str, Any]]) -> str:
    columns = {
        "arm": "arm",
        "prompts": "prompts",
        "concurrency": "level",
        "failed": "failed",
        "throughput": "tokens/s",
        "milliseconds_per_token_mean": "ms a token",
        "time_to_first_token_p50": "first token s, p50",
        "time_to_first_token_p95": "p95",
        "seconds_p50": "whole s, p50",
        "seconds_p95": "p95 ",
    }
    rows = [[summary[key] for key in columns] for summary in summaries]
    return "\n".join(
        [
            console_table(list(columns.values()), rows),
            "tokens/s: completion tokens / the time in which any request ran; ms a token: after a request's first",
        ]
    )


def _notes(config: EvaluateConfig, sets: Sequence[Any], summaries: Sequence[dict[str, Any]]) -> list[str]:
    """What a reader of the tables must know."""
    lines = []
    for summary in summaries:
        where = f"{summary['arm']}, {summary['prompts']}"
        where += "" if summary["concurrency"] is None else f", {summary['concurrency']} at a time"
        if count := summary["without_verification"]:
            lines.append(
                f"{where}: {count} requests ended by their first token, without a verification; they are in no mean"
            )
        if count := summary["failed"] - summary["refused"]:
            lines.append(f"{where}: {count} requests failed; the same command asks them again")
        if count := summary["refused"]:
            lines.append(f"{where}: {count} requests were refused by the server, and are not asked again")
        if (count := summary["not_compared"]) and summary["arm"] != OFF:
            lines.append(f"{where}: {count} texts have none of {OFF} to be compared with")
        if difference := summary["example_difference"]:
            lines.append(
                f"{where}: {summary['differing']} texts differ from {OFF}; {difference['id']} from token "
                f"{difference['token']}: {difference['off']!r} became {difference['this']!r}"
            )
    for prompts in sets:
        for reason in sorted({rejection.reason for rejection in prompts.skipped}):
            count = sum(rejection.reason == reason for rejection in prompts.skipped)
            lines.append(f"{prompts.name}: {count} records skipped: {reason}")
        if config.sample is not None and config.sample > len(prompts.items):
            lines.append(f"{prompts.name}: has only {len(prompts.items)} prompts, all of them asked")
    if config.sample is not None:
        lines.append(f"prompts: a random sample of {config.sample} a set, seed {config.seed}")
    return lines
