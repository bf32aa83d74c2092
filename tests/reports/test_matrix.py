import csv
import io

from osprey_jax.reports.matrix import csv_rows, draw, matrices, table
from osprey_jax.reports.tables import csv_text

SETS = ("code", "math", "prose")


def summaries(arm, lengths, rates=(None, None, None), concurrency=1):
    return [
        {"arm": arm, "prompts": name, "concurrency": concurrency, "accepted_length": length, "throughput": rate}
        for name, length, rate in zip(SETS, lengths, rates, strict=True)
    ]


def test_means_are_of_sets_by_domain():
    """Each set counts once, whatever its size; its drafter's own sets and the others apart."""
    [matrix] = matrices(summaries("osprey", [4.0, 3.0, 2.0]), {"osprey": ["code", "math"]})
    assert (matrix.measure, matrix.drafters, matrix.sets) == ("accepted length", ["osprey"], list(SETS))
    assert matrix.means == {"in-domain": [3.5], "out-of-domain": [2.0], "overall": [3.0]}
    assert matrix.own == {(0, 0), (0, 1)}


def test_throughput_is_a_ratio_to_off_at_the_same_level():
    """Tokens a second mean nothing without what the same machine gives at the same load without a drafter."""
    found = matrices(
        [
            *summaries("off", [None] * 3, [10.0, 20.0, 10.0]),
            *summaries("a", [2.0] * 3, [20.0, 30.0, 5.0]),
            *summaries("off", [None] * 3, [100.0] * 3, concurrency=8),
            *summaries("a", [2.0] * 3, [110.0] * 3, concurrency=8),
        ],
        {},
    )
    assert [(matrix.measure, matrix.concurrency) for matrix in found] == [
        ("accepted length", 1),
        ("throughput, times off", 1),
        ("accepted length", 8),
        ("throughput, times off", 8),
    ]
    assert found[1].values == [[2.0, 1.5, 0.5]]
    assert found[3].values == [[1.1, 1.1, 1.1]]
    assert found[1].drafters == ["a"], "off has no row: it is 1 by definition"


def test_no_throughput_without_off():
    """In this process, or without the arm off, accepted length alone is shown."""
    assert [m.measure for m in matrices(summaries("a", [2.0] * 3, [5.0] * 3), {})] == ["accepted length"]


def test_unknown_domains_have_no_means():
    """A drafter of which nobody said what it learnt is neither inside nor outside its domain."""
    [matrix] = matrices([*summaries("a", [1.0, 2.0, 3.0]), *summaries("b", [1.0, 2.0, 3.0])], {"a": ["code"]})
    assert matrix.means == {"in-domain": [1.0, None], "out-of-domain": [2.5, None], "overall": [2.0, 2.0]}
    [matrix] = matrices(summaries("a", [1.0, 2.0, 3.0]), {})
    assert matrix.means == {"overall": [2.0]}


def test_no_mean_over_other_sets():
    """Where a set has no value, a mean of the rest would be compared with means of all."""
    [matrix] = matrices([*summaries("a", [9.0, None, 9.0]), *summaries("b", [1.0, 2.0, 3.0])], {"a": ["code"]})
    assert matrix.means["overall"] == [None, 2.0]
    assert matrix.means["in-domain"] == [9.0, None]
    assert matrix.means["out-of-domain"] == [None, None]


def test_a_domain_without_a_set():
    """A drafter trained on none of the sets has an out-of-domain mean and no other."""
    [matrix] = matrices(summaries("a", [1.0, 2.0, 3.0]), {"a": []})
    assert matrix.means == {"in-domain": [None], "out-of-domain": [2.0], "overall": [2.0]}


def test_table_and_csv():
    """The console marks a drafter's own sets; the file has numbers that a program can read."""
    [matrix] = matrices(summaries("osprey", [4.0, 3.0, 2.0]), {"osprey": ["code"]})
    assert table(matrix).splitlines()[0] == "accepted length, 1 at one time"
    assert table(matrix).splitlines()[-1].split() == [
        "osprey",
        "4.000",
        "*",
        "3.000",
        "2.000",
        "4.000",
        "2.500",
        "3.000",
    ]
    [row] = csv.DictReader(io.StringIO(csv_text(csv_rows(matrix))))
    assert (row["drafter"], row["code"], row["out-of-domain"]) == ("osprey", "4.0", "2.5")


def test_drawing(tmp_path):
    """A heat map with an empty cell and a frame around one."""
    [matrix] = matrices([*summaries("a", [9.0, None, 9.0]), *summaries("b", [1.0, 2.0, 3.0])], {"a": ["code"]})
    draw(tmp_path / "map.png", matrix)
    assert (tmp_path / "map.png").stat().st_size > 0


def test_levels_have_the_same_columns():
    """One CSV file holds all of them, a set that a level lacks left empty."""
    found = matrices([*summaries("a", [1.0, 2.0, 3.0]), *summaries("a", [1.0, 2.0, 3.0], concurrency=8)[:2]], {})
    rows = [row for matrix in found for row in csv_rows(matrix)]
    assert [row["prose"] for row in rows] == [3.0, None]
    assert csv_text(rows).count("\n") == 3
