"""Numbers as a reader wants them: four digits, money, shares and changes in percent."""

from collections.abc import Callable, Sequence

Show = Callable[[float], str]


def number(value: float) -> str:
    """A count in full, any other number with four digits: 1,234,567; 12.35; 0.01235."""
    if isinstance(value, int) or abs(value) >= 1000:
        return _signed(f"{value:,.0f}")
    return _signed(f"{value:.4g}" if value == 0 or abs(value) >= 1e-4 else f"{value:.3e}")


def amount(value: float) -> str:
    """Of money: hundredths where it is one, more digits where it is small."""
    return _signed(f"{value:,.2f}") if 1 <= abs(value) < 1000 else number(value)


def money(currency: str, value: float) -> str:
    return f"{currency} {amount(value)}"


def digits(value: float) -> str:
    """Three, and no fewer than stand before the point: 0.0939; 9.50; 1,234."""
    return f"{value:#.3g}".rstrip(".") if 1e-4 <= abs(value) < 999.5 else f"{value:,.0f}"


def seconds(value: float) -> str:
    return f"{digits(value)} s"


def share(value: float) -> str:
    """0.9608 is 96.1%."""
    return f"{100 * value:.1f}%"


def change(ratio: float) -> str:
    """0.77 is −23.0%."""
    percent = round(100 * (ratio - 1), 1)
    return "±0.0%" if percent == 0 else _signed(f"{percent:+,.1f}%")


def months(value: float) -> str:
    return (
        "1 month" if value == 1 else f"{number(round(value, 1)) if value >= 0.1 or value == 0 else 'under 0.1'} months"
    )


def between(interval: Sequence[float | None] | None, show: Show, nothing: str = "none") -> str:
    """ "a to b"; an end that is None is called `nothing`, and so is no interval at all, in other words."""
    if interval is None:
        return "no interval"
    low, high = (nothing if end is None else show(end) for end in interval)
    return low if low == high else f"{low} to {high}"


def excludes(interval: Sequence[float] | None, value: float) -> bool:
    """Whether the sample tells a figure from `value`."""
    return interval is not None and not interval[0] <= value <= interval[1]


def _signed(text: str) -> str:
    return text.replace("-", "\u2212", 1) if text.startswith("-") else text
