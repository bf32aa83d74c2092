"""Figures as PNG files, without a display."""

import os
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle


def heat_map(
    path: Path,
    values: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    gap_before: int | None = None,
    framed: Collection[tuple[int, int]] = (),
) -> None:
    """Write `values` (rows x columns) as coloured, labelled cells to `path`; None is an empty cell.

    A gap before a column sets it and the later ones apart; cells of `framed` (row, column) have a frame.
    """
    grid = np.array([[np.nan if value is None else value for value in row] for row in values], np.float64)
    longest = max(map(len, rows))
    figure = new_figure(2.2 + 0.09 * longest + 1.1 * len(columns), 1.6 + 0.5 * len(rows))
    axes = figure.subplots()
    shown = np.isfinite(grid)
    image = axes.imshow(np.ma.masked_invalid(grid), cmap="viridis", aspect="auto")
    middle = (np.min(grid[shown]) + np.max(grid[shown])) / 2 if shown.any() else 0.0
    for (i, j), value in np.ndenumerate(grid):
        if shown[i, j]:
            axes.text(j, i, f"{value:.2f}", ha="center", va="center", color="black" if value > middle else "white")
    for i, j in framed:
        axes.add_patch(Rectangle((j - 0.46, i - 0.44), 0.92, 0.88, fill=False, edgecolor="#c44e52", linewidth=2.5))
    if gap_before is not None:
        axes.axvline(gap_before - 0.5, color="white", linewidth=10)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_title(title)
    figure.colorbar(image)
    save(figure, path)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that many inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write `figure` to `path` as PNG, in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    figure.savefig(temporary, format="png", dpi=150)
    os.replace(temporary, path)
