"""Drafters by prompt sets: how each does on the domain that it learnt, and on the others."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from osprey_jax.config import OFF
from osprey_jax.reports.plots import heat_map
from osprey_jax.reports.tables import console_table


class Matrix(NamedTuple):
    """One measure of all drafters on all sets at one level.

    Attributes:
      measure: "accepted length", or "throughput, times off".
      concurrency: requests at one time; None in process.
      drafters, sets: the names of rows and columns.
      values: drafters x sets; None where nothing was measured.
      means: name -> one for each drafter; None where there is no such set, or where one of them has no value.
      own: (row, column) of the cells whose set is of the drafter's own domain.
    """

    measure: str
    concurrency: int | None
    drafters: list[str]
    sets: list[str]
    values: list[list[float | None]]
    means: dict[str, list[float | None]]
    own: set[tuple[int, int]]


def matrices(summaries: Sequence[dict[str, Any]], trained_on: Mapping[str, Sequence[str]]) -> list[Matrix]:
    """For each level the accepted lengths, and, where speculation off was measured, how many times its throughput.

    `summaries` are results as in `results.json`. A mean is one of sets, each counting once; a drafter that
    `trained_on` does not name has an overall mean alone.
    """
    drafters = list(dict.fromkeys(summary["arm"] for summary in summaries if summary["arm"] != OFF))
    sets = list(dict.fromkeys(summary["prompts"] for summary in summaries))
    found = []
    for level in dict.fromkeys(summary["concurrency"] for summary in summaries):
        cells = {(s["arm"], s["prompts"]): s for s in summaries if s["concurrency"] == level}
        lengths = {place: cell["accepted_length"] for place, cell in cells.items()}
        rates = {(arm, name): _times_off(cells, arm, name) for arm, name in cells}
        for measure, values in (("accepted length", lengths), ("throughput, times off", rates)):
            if any(value is not None for (arm, _), value in values.items() if arm != OFF):
                rows = [[values.get((drafter, name)) for name in sets] for drafter in drafters]
                found.append(_matrix(measure, level, drafters, sets, rows, trained_on))
    return found


def table(matrix: Matrix) -> str:
    """For the console; a star marks a set of the drafter's own domain."""
    header = ["drafter", *matrix.sets, *matrix.means]
    rows = [[row["drafter"], *(row[name] for name in header[1:])] for row in csv_rows(matrix)]
    for i, j in matrix.own:
        value = matrix.values[i][j]
        rows[i][1 + j] = "–" if value is None else f"{value:.3f} *"
    level = "" if matrix.concurrency is None else f", {matrix.concurrency} at one time"
    return f"{matrix.measure}{level}\n{console_table(header, rows)}"


def csv_rows(matrix: Matrix) -> list[dict[str, Any]]:
    """One for each drafter, with the same keys for each matrix of an evaluation."""
    names = {"measure": matrix.measure, "concurrency": matrix.concurrency}
    return [
        names
        | {"drafter": drafter}
        | dict(zip(matrix.sets, matrix.values[i], strict=True))
        | {name: means[i] for name, means in matrix.means.items()}
        for i, drafter in enumerate(matrix.drafters)
    ]


def draw(path: Path, matrix: Matrix) -> None:
    """Write a heat map of it to `path`, a drafter's own sets framed, the means set apart."""
    values = [[*row, *(means[i] for means in matrix.means.values())] for i, row in enumerate(matrix.values)]
    level = "" if matrix.concurrency is None else f", {matrix.concurrency} at one time"
    title = f"{matrix.measure}{level}" + (" (framed: the drafter's own domain)" if matrix.own else "")
    columns = [*matrix.sets, *matrix.means]
    heat_map(path, values, matrix.drafters, columns, title, gap_before=len(matrix.sets), framed=matrix.own)


def _times_off(cells: Mapping[tuple[str, str], dict[str, Any]], arm: str, prompts: str) -> float | None:
    ours, off = (cells.get((name, prompts), {}).get("throughput") for name in (arm, OFF))
    return ours / off if ours is not None and off else None


def _matrix(
    measure: str,
    level: int | None,
    drafters: list[str],
    sets: list[str],
    values: list[list[float | None]],
    trained_on: Mapping[str, Sequence[str]],
) -> Matrix:
    own = {(i, j) for i, d in enumerate(drafters) for j, name in enumerate(sets) if name in trained_on.get(d, ())}
    known = [drafter in trained_on for drafter in drafters]
    inside, outside, overall = [], [], []
    for i, row in enumerate(values):
        inside.append(_mean([value for j, value in enumerate(row) if (i, j) in own]))
        outside.append(_mean([value for j, value in enumerate(row) if known[i] and (i, j) not in own]))
        overall.append(_mean(row))
    domains = {"in-domain": inside, "out-of-domain": outside} if any(known) else {}
    return Matrix(measure, level, drafters, sets, values, domains | {"overall": overall}, own)


def _mean(values: Sequence[float | None]) -> float | None:
    """None where a value is missing: the mean of what is left would be one of other sets than the next drafter's."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present and len(present) == len(values) else None
