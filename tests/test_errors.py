"""Range checks: what they accept, and the one line that they raise."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.errors import ConfigError, require_range

NUMBERS = st.one_of(
    st.integers(-5, 5), st.floats(-5.0, 5.0), st.sampled_from([math.inf, -math.inf, math.nan])
)


@given(
    value=NUMBERS,
    least=st.one_of(st.none(), st.integers(-3, 3)),
    above=st.one_of(st.none(), st.integers(-3, 3)),
    most=st.sampled_from([math.inf, 2, 4]),
    below=st.sampled_from([math.inf, 3, 5]),
)
def test_a_range_holds_the_finite_numbers_between_its_bounds(
    value: float,
    least: int | None,
    above: int | None,
    most: float,
    below: float,
) -> None:
    if least is not None and above is not None:
        least = None
    lower = (least is None or value >= least) and (above is None or value > above)
    try:
        require_range("here", least=least, above=above, most=most, below=below, key=value)
        accepted = True
    except ConfigError as error:
        accepted = False
        assert str(error).startswith(f"here: key = {value} must be ") and "\n" not in str(error)
    assert accepted == (lower and value <= most and value < below and math.isfinite(value))


@pytest.mark.parametrize(
    ("bounds", "value", "text"),
    [
        ({"above": 0}, 0.0, "fan: rpm = 0.0 must be above 0 and finite"),
        ({"least": 1}, 0, "fan: rpm = 0 must be 1 or more"),
        ({"least": 0, "most": 1}, math.nan, "fan: rpm = nan must be 0 or more and at most 1"),
        ({"least": 0}, "3", "fan: rpm = '3' must be a number"),
        ({"least": 0, "advice": "try 9"}, None, "fan: rpm = None must be a number; try 9"),
        (
            {"least": 0, "below": 1, "advice": "try 0.9"},
            1.0,
            "fan: rpm = 1.0 must be 0 or more and below 1; try 0.9",
        ),
    ],
)
def test_the_text_names_the_range(bounds: dict[str, Any], value: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_range("fan", rpm=value, **bounds)
    assert str(caught.value) == text
