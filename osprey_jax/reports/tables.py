"""Tables for the console, and the same rows as CSV."""

import csv
import io
from collections.abc import Sequence


def console_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns aligned: text to the left, numbers to the right with three decimals, None as a dash."""
    cells = [[_shown(value) for value in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(header), *cells]) for i in range(len(header))]
    right = [all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(header))]

    def line(values: Sequence[str]) -> str:
        padded = (v.rjust(w) if r else v.ljust(w) for v, w, r in zip(values, widths, right, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, cells)])


def csv_text(rows: Sequence[dict[str, object]]) -> str:
    """Rows with the same keys as CSV; a list becomes its values with spaces between."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()})
    return stream.getvalue()


def _shown(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
