"""Exceptions for user errors; each text is one line that names the error, its place and the remedy."""

import math
import reprlib
from collections.abc import Collection
from itertools import pairwise
from numbers import Real

from socflower.did_you_mean import did_you_mean


class SocflowerError(Exception):
    """Base of all errors that a user can fix; the command line prints the text and exits with status 2.

    Status 2 is for mistakes found before training starts; failed training has status 1.
    """


class ConfigError(SocflowerError):
    """An invalid value in a file, argument or option; the text names key, value and remedy."""


class InfeasiblePlan(SocflowerError):
    """A request the cluster cannot meet, such as more groups than SoCs; the text has both numbers."""


class DataUnavailable(SocflowerError):
    """A data set that is neither in the named folder nor reachable; the text lists the places searched."""


class TrainingFailed(SocflowerError):
    """No usable reply remained to aggregate; the text has the first cause and its node.

    The command line exits with status 1.
    """


class NodesLost(TrainingFailed):
    """No usable reply remained because nodes were lost, not because a client raised; a resumed run may succeed."""


def require_known(where: str, name: object, known: Collection[str]) -> None:
    """Raise `ConfigError` for a name that is not among `known`; the text lists those, and the closest one."""
    if name in known:
        return
    names = f"{where} {name!r} is unknown, known are {', '.join(known)}"
    raise ConfigError("; ".join(filter(None, (names, did_you_mean(str(name), known)))))


def require_type(where: str, kinds: tuple[type, ...], expected: str, /, **values: object) -> None:
    """Raise `ConfigError` for the first of `values` whose type is not in `kinds`; a bool is not a number.

    The text is like "SoCFlow: costs = None must be Costs(…)", with `expected` at its end.
    """
    for key, value in values.items():
        is_other_bool = isinstance(value, bool) and bool not in kinds
        if not isinstance(value, kinds) or is_other_bool:
            raise ConfigError(f"{where}: {key} = {_shown(value)} must be {expected}")


def require_range(
    where: str,
    /,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float = math.inf,
    below: float = math.inf,
    advice: str = "",
    **values: float,
) -> None:
    """Raise `ConfigError` for the first of `values` that is outside the range, infinite, NaN or not a number.

    The range begins at `least`, or after `above`, and ends at `most`, or before `below`. The text is like
    "fan control: period_s = 0 must be above 0 and finite", with `advice` at its end.
    """
    for key, value in values.items():
        is_number = isinstance(value, Real)
        if is_number and _is_inside(value, least, above) and value <= most and value < below:
            continue
        wanted = "a number"
        if is_number:
            wanted = _bounds(isinstance(value, int), least, above, most, below)
        remedy = advice and f"; {advice}"
        raise ConfigError(f"{where}: {key} = {_shown(value)} must be {wanted}{remedy}")


def _is_inside(value: float, least: float | None, above: float | None) -> bool:
    """Return whether a number is finite and not too small."""
    if not abs(value) < math.inf:
        return False
    return value > above if above is not None else least is None or value >= least


def _bounds(
    is_whole: bool, least: float | None, above: float | None, most: float, below: float
) -> str:
    bounds = []
    if above is not None:
        bounds.append(f"above {above:g}")
    elif least is not None:
        bounds.append(f"{least:g} or more")
    if most < math.inf or below < math.inf:
        bounds.append(f"at most {most:g}" if most <= below else f"below {below:g}")
    elif not is_whole:
        bounds.append("finite")
    return " and ".join(bounds)


def _shown(value: object) -> str:
    text = str(value) if isinstance(value, Real) else reprlib.repr(value)
    return " ".join(text.split())


def require_order(*, equal: bool = False, **values: float) -> None:
    """Raise `ConfigError` unless each of `values` is below the next; with `equal` it may equal the next.

    The text is like "need min_rpm < max_rpm, got 3.0 and 2.0".
    """
    for low, high in pairwise(values.values()):
        if not (low <= high if equal else low < high):
            order = (" <= " if equal else " < ").join(values)
            raise ConfigError(f"need {order}, got {' and '.join(map(str, values.values()))}")
