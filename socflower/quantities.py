"""Formatting of quantities for people, shared by the command line and the report.

Every function accepts any value of a result document; for None and NaN it returns `MISSING`.
"""

import math
import numbers
from typing import Any


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: "1 group", "2 groups", "1 batch", "2 batches" (with a given plural)."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def are_counted(number: int, noun: str) -> str:
    """Return what stands after "there": "is 1 group", "are 2 groups"."""
    return f"{'is' if number == 1 else 'are'} {counted(number, noun)}"


MISSING = "–"
"""Placeholder for a number that was not measured, is unknown or is NaN."""

_TIME_STEPS = ((1e-6, 1e6, "µs"), (1e-3, 1e3, "ms"), (1.0, 1.0, "s"))
_LARGE = ("", "k", "M", "G", "T", "P", "E")
_JOULES_PER_WH = 3600.0


def number(value: Any) -> float | None:
    """Return a number, also NumPy's, as float; None for text, booleans, NaN and numbers beyond a float's range."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return None if math.isnan(result) else result


def finite(value: Any) -> float | None:
    """Return a finite number as float; None for everything else."""
    result = number(value)
    return result if result is not None and math.isfinite(result) else None


def significant(value: float, digits: int = 3) -> str:
    """Return a number rounded to `digits` significant digits, without exponent up to 10**digits."""
    if value == 0.0 or not math.isfinite(value):
        return {math.inf: "∞", -math.inf: "-∞"}.get(value, "0")
    magnitude = math.floor(math.log10(abs(value)))
    # Rounding can carry into the next power of ten (9.996 -> 10.0), which has one decimal fewer.
    magnitude = math.floor(math.log10(abs(round(value, digits - 1 - magnitude)) or abs(value)))
    return f"{value:.{max(0, digits - 1 - magnitude)}f}"


def human_seconds(seconds: Any) -> str:
    """Return a duration in its two largest units: "820 ms", "45.2 s", "12 min 30 s", "3 h 05 min"."""
    value = number(seconds)
    if value is None:
        return MISSING
    if value < 0:
        return f"-{human_seconds(-value)}"
    if value == 0 or math.isinf(value):
        return f"{significant(value)} s"
    if value < 59.95:
        # Below a microsecond, too, the unit is the microsecond.
        fitting = [step for step in _TIME_STEPS if value >= 0.9995 * step[0]]
        _, scale, unit = fitting[-1] if fitting else _TIME_STEPS[0]
        return f"{significant(value * scale)} {unit}"
    if round(value) < 3600:
        return "{} min {:02d} s".format(*divmod(round(value), 60))
    if round(value / 60) < 24 * 60:
        return "{} h {:02d} min".format(*divmod(round(value / 60), 60))
    return "{} d {:02d} h".format(*divmod(round(value / 3600), 24))


def human_joules(joules: Any) -> str:
    """Return an energy in joules and, from one watt-hour on, in watt-hours too: "532 J", "1.25 MJ (347 Wh)"."""
    value = number(joules)
    if value is None:
        return MISSING
    text = _scaled(value, "J")
    if abs(value) < _JOULES_PER_WH:
        return text
    return f"{text} ({_scaled(value / _JOULES_PER_WH, 'Wh')})"


def human_bytes(num_bytes: Any) -> str:
    """Return an amount of bytes in decimal units, as networks count them: "512 B", "14.9 MB"."""
    value = number(num_bytes)
    return MISSING if value is None else _scaled(value, "B")


def percent(fraction: Any, digits: int = 1) -> str:
    """Return a fraction of one as a percentage: 0.8123 -> "81.2%"."""
    value = number(fraction)
    if value is None:
        return MISSING
    return f"{significant(value)}%" if math.isinf(value) else f"{100.0 * value:.{digits}f}%"


def human_ratio(ratio: Any) -> str:
    """Return a ratio with three significant digits: 3.4 -> "3.40×"."""
    value = number(ratio)
    return MISSING if value is None else f"{significant(value)}×"


def plain_number(value: Any) -> str:
    """Return a bare number with up to six significant digits and no trailing zeros; other values as text."""
    if value is None:
        return MISSING
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _scaled(value: float, unit: str) -> str:
    """Return a value with the decimal prefix that leaves one to three digits before the point."""
    prefix = 0
    # 999.5 would print as 1000 with three digits, hence the limit below 1000.
    while math.isfinite(value) and abs(value) >= 999.5 and prefix < len(_LARGE) - 1:
        value /= 1000.0
        prefix += 1
    if prefix == 0 and value.is_integer():
        return f"{round(value)} {unit}"
    return f"{significant(value)} {_LARGE[prefix]}{unit}"
