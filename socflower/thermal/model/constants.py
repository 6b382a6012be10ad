"""The constants of the thermal model: `constants.toml`, read once."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class FanTableRow:
    """A row of SoCFlow+ Table 2: the effects of a fan speed."""

    rpm: float
    fan_w: float
    soc_c: float
    # Of performance, 0 to 1.
    decline: float


@cache
def document() -> dict[str, Any]:
    """Return the whole file, sources included."""
    file = resources.files("socflower.thermal.model").joinpath("constants.toml")
    return tomllib.loads(file.read_text("utf-8"))


def constant(table: str, key: str) -> float:
    """Return one constant."""
    return float(document()[table][key]["value"])


def constants(table: str, key: str) -> tuple[float, ...]:
    """Return a list of constants."""
    values = document()[table][key]["value"]
    return tuple(map(float, values))


@cache
def fan_table() -> tuple[FanTableRow, ...]:
    """Return SoCFlow+ Table 2, slow fans first."""
    rows: list[FanTableRow] = []
    for row in document()["fan_table"]:
        values = {key: float(value) for key, value in row.items()}
        rows.append(FanTableRow(**values))
    return tuple(rows)
