import csv
import io

from osprey_jax.reports.tables import console_table, csv_text


def test_columns_line_up():
    """Numbers to the right with three decimals, text to the left, nothing known as a dash."""
    table = console_table(("name", "n", "length"), [("a", 12, 1.23456), ("longer", 3, None)])
    assert table.split("\n") == [
        "name     n  length",
        "------  --  ------",
        "a       12   1.235",
        "longer   3       –",
    ]


def test_csv_reads_back():
    """Values keep their digits, a list is one cell, and a comma in text does not split it."""
    text = csv_text([{"id": "x,y", "length": 1.23456789, "histogram": [1, 0, 2]}])
    assert list(csv.DictReader(io.StringIO(text))) == [{"id": "x,y", "length": "1.23456789", "histogram": "1 0 2"}]
