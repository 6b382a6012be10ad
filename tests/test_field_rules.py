"""Types that check themselves: every rule of an annotation holds in a program and in a file."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import Enum
from typing import Annotated, Protocol

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from socflower.errors import ConfigError
from socflower.field_rules import OneOf, checked
from socflower.toml_file import Table, read_table


class Clock(Protocol):
    def now(self) -> float: ...


class Drive(Enum):
    BELT = 1


@checked
class Fan:
    kind: Annotated[str, OneOf(("axial", "blower"))] = "axial"
    period_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    low_c: Annotated[float, Field(ge=-40)] = 20.0
    high_c: float = 80.0
    num_blades: Annotated[int, Field(ge=2)] | None = None
    points: tuple[tuple[float, float], ...] = ()
    names: Sequence[str] = ()
    drive: Drive = Drive.BELT
    rpm_by_mode: dict[str, Annotated[float, Field(gt=0)]] = field(default_factory=dict)
    rpm_by_level: Mapping[int, Annotated[float, Field(gt=0)]] = field(default_factory=dict)

    def check(self) -> None:
        if self.low_c >= self.high_c:
            raise ConfigError(f"low_c = {self.low_c} must be below high_c = {self.high_c}")


@checked
class Controller:
    clock: Clock
    period_s: Annotated[float, Field(gt=0)] = 1.0


class RackFile(Table):
    fan: Fan = Fan()


@given(
    period_s=st.floats(0, 60, exclude_min=True),
    low_c=st.floats(-40, 79),
    num_blades=st.none() | st.integers(2),
)
def test_what_the_rules_allow_is_kept(
    period_s: float, low_c: float, num_blades: int | None
) -> None:
    fan = Fan(period_s=period_s, low_c=low_c, num_blades=num_blades)
    assert (fan.period_s, fan.low_c, fan.num_blades) == (period_s, low_c, num_blades)


REFUSED = [
    ("kind", "square", "'square' is unknown; use one of axial, blower"),
    ("kind", 3, "3 must be one of axial, blower"),
    ("period_s", 0, "0 must be a number above 0 and at most 60"),
    ("period_s", 60.5, "60.5 must be a number above 0 and at most 60"),
    ("period_s", True, "True must be a number above 0 and at most 60"),
    ("high_c", "hot", "'hot' must be a number"),
    ("num_blades", 1, "1 must be a whole number of 2 or more"),
    ("num_blades", 2.5, "2.5 must be a whole number of 2 or more"),
]


@pytest.mark.parametrize(("key", "value", "line"), REFUSED)
def test_a_broken_rule_is_one_line_in_a_program_and_in_a_file(
    key: str, value: object, line: str
) -> None:
    with pytest.raises(ConfigError) as in_program:
        Fan(**{key: value})  # type: ignore[arg-type]
    assert str(in_program.value) == f"Fan: {key} = {line}"
    with pytest.raises(ConfigError) as in_file:
        read_table(RackFile, {"fan": {key: value}}, "rack.toml")
    assert str(in_file.value) == f"rack.toml [fan] {key} = {line}"


def test_fields_that_do_not_fit_each_other_are_refused_with_their_place() -> None:
    line = "low_c = 90 must be below high_c = 80.0"
    with pytest.raises(ConfigError) as in_program:
        Fan(low_c=90)
    assert str(in_program.value) == f"Fan: {line}"
    with pytest.raises(ConfigError) as in_file:
        read_table(RackFile, {"fan": {"low_c": 90}}, "rack.toml")
    assert str(in_file.value).replace("90.0", "90") == f"rack.toml [fan] {line}"


@pytest.mark.parametrize(
    ("key", "values", "line"),
    [
        ("rpm_by_mode", {"quiet": -1.0}, "[rpm_by_mode] quiet = -1.0 must be a number above 0"),
        ("rpm_by_mode", {3: 900.0}, "[rpm_by_mode] 3 must be a text"),
        ("rpm_by_mode", {None: 900.0}, "[rpm_by_mode] None must be a text"),
        ("rpm_by_level", {2: 0.0}, "[rpm_by_level] 2 = 0.0 must be a number above 0"),
        ("rpm_by_level", {"high": 900.0}, "[rpm_by_level] high must be a whole number"),
    ],
)
def test_values_by_name_are_refused_with_the_name(key: str, values: object, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Fan(**{key: values})  # type: ignore[arg-type]
    assert str(caught.value) == f"Fan {line}"


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("drive", 1, "drive = 1 must be of type Drive"),
        ("names", 3, "names = 3 must be a list of names"),
        ("drive", np.zeros((2, 1)), "drive = array([[0.], [0.]]) must be of type Drive"),
    ],
)
def test_values_of_other_types_are_refused_in_one_line(key: str, value: object, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Fan(**{key: value})  # type: ignore[arg-type]
    assert str(caught.value) == f"Fan: {line}"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(value: float) -> None:
    with pytest.raises(ConfigError, match=r"high_c = .* must be a number and finite"):
        Fan(high_c=value)


def test_numbers_of_numpy_become_pythons() -> None:
    fan = Fan(period_s=np.float32(0.5), points=((np.float64(1), np.int64(2)),))
    assert type(fan.period_s) is float
    assert [type(number) for number in fan.points[0]] == [float, int]


@pytest.mark.parametrize(
    "points", [[[0.0, 900.0], [80.0, 3000.0]], np.array([[0, 900], [80, 3e3]])]
)
def test_lists_and_arrays_become_tuples(points: object) -> None:
    assert Fan(points=points).points == ((0.0, 900.0), (80.0, 3000.0))  # type: ignore[arg-type]


def test_fields_of_types_without_a_rule_take_any_value() -> None:
    clock = object()
    assert Controller(clock=clock).clock is clock  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Controller: period_s = 0 must be a number above 0"):
        Controller(clock=clock, period_s=0)  # type: ignore[arg-type]
