"""Arms against each other on the same prompts: what one gains over the other, and whether the sample can tell."""

import itertools
from collections.abc import Sequence
from typing import Any

from osprey_jax.config import OFF
from osprey_jax.reports.statistics import paired
from osprey_jax.reports.tables import console_table

_NAMES = {
    "accepted_length": "accepted length",
    "seconds": "seconds",
    "time_to_first_token": "seconds to first token",
    "milliseconds_per_token": "ms a token",
}


def compare(results: Sequence[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Every drafter against every later one, and each against speculation off, on each prompt set and level.

    `results` are those of `results.json`. A row says `arm`, `against`, `prompts`, `concurrency`, `measure`, then what
    `statistics.paired` says of it: the difference is arm - against. A measure that no request of both has is left out,
    as accepted length is against off.
    """
    groups: dict[tuple[str, int | None], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["prompts"], result["concurrency"]), []).append(result)
    rows = []
    for (prompts, concurrency), group in groups.items():
        drafters = [result for result in group if result["arm"] != OFF]
        off = [result for result in group if result["arm"] == OFF]
        for arm, against in [*itertools.combinations(drafters, 2), *itertools.product(drafters, off)]:
            for measure in _NAMES:
                found = paired(arm["requests"], against["requests"], measure, seed)
                if found["requests"]:
                    names = {"arm": arm["arm"], "against": against["arm"], "prompts": prompts}
                    rows.append(names | {"concurrency": concurrency, "measure": measure} | found)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """`compare`'s rows for the console, and what to keep in mind when reading them."""
    header = (
        "arm - against",
        "prompts",
        "level",
        "measure",
        "requests",
        "arm",
        "against",
        "difference",
        "95% interval",
    )
    cells = [
        (
            f"{row['arm']} - {row['against']}",
            row["prompts"],
            row["concurrency"],
            _NAMES[row["measure"]],
            row["requests"],
            row["arm_mean"],
            row["against_mean"],
            row["difference"],
            _interval(row),
        )
        for row in rows
    ]
    lines = [
        console_table(header, cells),
        "differences of means over the requests that both have; * where the 95% interval excludes 0",
    ]
    if len(rows) > 1:
        lines.append(f"of {len(rows)} intervals, about {max(round(len(rows) / 20), 1)} would exclude 0 by chance alone")
    for row in rows:
        if left := [
            f"{row[key]} {words}"
            for key, words in (
                ("only_arm", f"that only {row['arm']} has"),
                ("only_against", f"that only {row['against']} has"),
                ("without_value", "of which one has no such measure"),
            )
            if row[key]
        ]:
            where = f"{row['arm']} - {row['against']}, {row['prompts']}, {_NAMES[row['measure']]}"
            lines.append(f"{where}: left out are requests, {', '.join(left)}")
    return "\n".join(lines)


def _interval(row: dict[str, Any]) -> str:
    if row["low"] is None:
        return "none: too few requests"
    return f"[{row['low']:+.3f}, {row['high']:+.3f}]{'' if row['low'] <= 0 <= row['high'] else ' *'}"
