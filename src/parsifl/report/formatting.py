"""Format numbers for display: bytes, seconds, counts and scores."""

from __future__ import annotations

import math

PERCENT = frozenset({"accuracy"})  # scores that are fractions, shown in per cent
MISSING = "\N{EN DASH}"


def size(count: float | None) -> str:
    """Return bytes with a decimal unit.

    >>> size(1_234_567), size(999), size(0)
    ('1.23 MB', '999 B', '0 B')
    """
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def operations(count: float | None) -> str:
    """Return floating-point operations with a decimal unit.

    >>> operations(80_896_000)
    '80.9 M'
    """
    return _scaled(count, ("", "k", "M", "G", "T", "P", "E")).rstrip()


def seconds(value: float | None) -> str:
    """Return a duration.

    >>> seconds(0.0123), seconds(75.0), seconds(4000.0)
    ('12.3 ms', '1 min 15 s', '1 h 6 min')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    if value < 1:
        return f"{significant(value * 1e3)} ms"
    if value < 60:
        return f"{significant(value)} s"
    if value < 3600:
        return f"{int(value // 60)} min {int(value % 60)} s"
    return f"{int(value // 3600)} h {int(value % 3600 // 60)} min"


def score(value: float | None, name: str, *, unit: bool = True) -> str:
    """Return a score: an accuracy in per cent, anything else with four digits.

    >>> score(0.97123, "accuracy"), score(0.97123, "mse")
    ('97.1 %', '0.9712')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    if name in PERCENT:
        return f"{100 * value:.1f}" + (" %" if unit else "")
    return significant(value, 4)


def share(part: float, total: float) -> str:
    """Return a fraction in per cent.

    >>> share(1, 3), share(0, 0)
    ('33.3 %', '–')
    """
    return f"{100 * part / total:.1f} %" if total else MISSING


def significant(value: float, digits: int = 3) -> str:
    """Return a number with this many digits, without an exponent where that is readable.

    >>> significant(0.0), significant(1234.5), significant(0.0204)
    ('0', '1234', '0.0204')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])  # of the rounded number
    decimals = max(0, digits - 1 - exponent)
    return f"{value:.{decimals}f}"


def _scaled(count: float | None, units: tuple[str, ...]) -> str:
    if count is None or not math.isfinite(count):
        return MISSING
    at = 0
    while abs(count) >= 999.5 and at + 1 < len(units):
        count, at = count / 1000, at + 1
    return f"{significant(count) if at else round(count)} {units[at]}"
