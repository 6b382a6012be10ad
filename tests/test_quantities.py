"""Formatting helpers: units, carries at their edges, and values that are no numbers."""

import math

import pytest

from socflower.quantities import (
    MISSING,
    finite,
    human_bytes,
    human_joules,
    human_ratio,
    human_seconds,
    number,
    percent,
    plain_number,
    significant,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (3.2e-7, "0.320 µs"),
        (12.3e-6, "12.3 µs"),
        (0.82, "820 ms"),
        (0.0009999, "1.00 ms"),
        (0.9999, "1.00 s"),
        (1, "1.00 s"),
        (45.2, "45.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (90, "1 min 30 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (11_100, "3 h 05 min"),
        (86_399, "1 d 00 h"),
        (187_200, "2 d 04 h"),
        (-90, "-1 min 30 s"),
        (math.inf, "∞ s"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


@pytest.mark.parametrize(
    ("joules", "text"),
    [
        (0, "0 J"),
        (0.5, "0.500 J"),
        (532, "532 J"),
        (999.7, "1.00 kJ"),
        (3599, "3.60 kJ"),
        (3600, "3.60 kJ (1 Wh)"),
        (1.25e6, "1.25 MJ (347 Wh)"),
        (7.2e9, "7.20 GJ (2.00 MWh)"),
    ],
)
def test_joules(joules: float, text: str) -> None:
    assert human_joules(joules) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (14_900_000, "14.9 MB"),
        (999_999, "1.00 MB"),
        (3.2e12, "3.20 TB"),
        (-2048, "-2.05 kB"),
        (5e21, "5000 EB"),
        (math.inf, "∞ B"),
    ],
)
def test_bytes(num_bytes: float, text: str) -> None:
    assert human_bytes(num_bytes) == text


def test_percent_and_ratio() -> None:
    assert [percent(0.8123), percent(1), percent(0.8123, 0), percent(math.inf)] == [
        "81.2%",
        "100.0%",
        "81%",
        "∞%",
    ]
    assert [human_ratio(3.4), human_ratio(125.2), human_ratio(0.05)] == ["3.40×", "125×", "0.0500×"]


@pytest.mark.parametrize("helper", [human_seconds, human_joules, human_bytes, percent, human_ratio])
@pytest.mark.parametrize("value", [None, math.nan, "12", True, [1.0], 10**400])
def test_what_is_no_number_is_missing(helper: object, value: object) -> None:
    assert callable(helper) and helper(value) == MISSING


def test_number_keeps_infinity_and_finite_does_not() -> None:
    assert number(math.inf) == math.inf and finite(math.inf) is None
    assert number(3) == 3.0 and finite(math.nan) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (9.996, "10.0"),
        (99.96, "100"),
        (0.001234, "0.00123"),
        (123456.0, "123456"),
        (-9.996, "-10.0"),
        (0.0, "0"),
    ],
)
def test_significant_digits_survive_the_carry(value: float, text: str) -> None:
    assert significant(value) == text


def test_plain_number() -> None:
    assert [plain_number(v) for v in (None, 0.8, 3, "on", 1 / 3)] == [
        MISSING,
        "0.8",
        "3",
        "on",
        "0.333333",
    ]
