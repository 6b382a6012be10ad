"""Exceptions for user errors; each text is one line that names the error, its place and the remedy."""

import math
import reprlib
from collections.abc import Collection
from difflib import get_close_matches
from numbers import Real


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


def require_known(where: str, name: object, known: Collection[str]) -> None:
    """Raise `ConfigError` for a name that is not among `known`; the text lists those, and the closest one."""
    if name in known:
        return
    close = get_close_matches(str(name), known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"{where} {name!r} is unknown, known are {', '.join(known)}{hint}")


def require_type(where: str, kinds: tuple[type, ...], expected: str, /, **values: object) -> None:
    """Raise `ConfigError` for the first of `values` that is of none of `kinds`; True and False are no numbers.

    The text is like "SoCFlow: costs = None must be Costs(…)", with `expected` at its end.
    """
    for key, value in values.items():
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(
                f"{where}: {key} = {' '.join(reprlib.repr(value).split())} must be {expected}"
            )


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
    """Raise `ConfigError` for the first of `values` that is no number, outside the range, infinite or NaN.

    The range begins at `least`, or after `above`, and ends at `most`, or before `below`. The text is like
    "fan control: period_s = 0 must be above 0 and finite", with `advice` at its end.
    """
    for key, value in values.items():
        if not isinstance(value, Real):
            raise ConfigError(
                f"{where}: {key} = {' '.join(reprlib.repr(value).split())} must be a number"
                f"{advice and f'; {advice}'}"
            )
        inside = value > above if above is not None else least is None or value >= least
        if inside and value <= most and value < below and abs(value) < math.inf:
            continue
        bounds = (
            [f"above {above:g}"]
            if above is not None
            else []
            if least is None
            else [f"{least:g} or more"]
        )
        if most < math.inf or below < math.inf:
            bounds.append(f"at most {most:g}" if most <= below else f"below {below:g}")
        elif not isinstance(value, int):
            bounds.append("finite")
        raise ConfigError(
            f"{where}: {key} = {value} must be {' and '.join(bounds)}{advice and f'; {advice}'}"
        )
