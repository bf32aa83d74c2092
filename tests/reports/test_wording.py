import pytest

from osprey_jax.reports.wording import amount, between, change, digits, excludes, money, months, number, share


@pytest.mark.parametrize(
    ("show", "value", "words"),
    [
        (number, 1234567, "1,234,567"),
        (number, 447730.6, "447,731"),
        (number, 12.3456, "12.35"),
        (number, 0.012345, "0.01235"),
        (number, 0.0000012345, "1.234e-06"),
        (number, -3, "−3"),
        (amount, 0.002502, "0.002502"),
        (amount, 120.0, "120.00"),
        (amount, -1472.3, "−1,472"),
        (digits, 9.5, "9.50"),
        (digits, 0.09386, "0.0939"),
        (digits, 123.4, "123"),
        (digits, 999.6, "1,000"),
        (share, 0.9608, "96.1%"),
        (change, 0.77, "−23.0%"),
        (change, 1.5, "+50.0%"),
        (change, 0.9999, "±0.0%"),
        (months, 1.0, "1 month"),
        (months, 2.04, "2 months"),
        (months, 0.01, "under 0.1 months"),
        (months, 0.0, "0 months"),
    ],
)
def test_numbers(show, value, words):
    """As many digits as mean something, and a sign that is a minus."""
    assert show(value) == words


def test_money():
    """The currency stands before the amount."""
    assert money("EUR", 1.5) == "EUR 1.50"


def test_ranges():
    """Two ends, one where they read alike, words for an end that is never and for no range at all."""
    assert between([0.5, 2.0], change) == "−50.0% to +100.0%"
    assert between([2.0, 2.0001], change) == "+100.0%"
    assert between([100, None], number, "never") == "100 to never"
    assert between(None, number) == "no interval"


def test_what_an_interval_excludes():
    """An end that touches the value does not exclude it; no interval excludes nothing."""
    assert excludes([0.5, 0.9], 1) and excludes([1.1, 1.2], 1)
    assert not excludes([0.5, 1.0], 1) and not excludes(None, 1)
