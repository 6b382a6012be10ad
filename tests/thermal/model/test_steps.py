"""Piecewise constant functions of time against a scan of their entries."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.thermal.model.background_load import Steps, always, changes

FEW = settings(max_examples=40)
TIMES = st.integers(0, 60).map(lambda quarters: quarters / 4)


@st.composite
def steps(draw: st.DrawFn) -> Steps[int]:
    times = sorted(draw(st.sets(st.integers(1, 60), max_size=8)))
    return Steps(
        (0.0, *(quarter / 4 for quarter in times)),
        tuple(draw(st.lists(st.integers(), min_size=len(times) + 1, max_size=len(times) + 1))),
    )


@FEW
@given(function=steps(), time_s=TIMES)
def test_the_value_is_that_of_the_last_time_not_after_it(function, time_s):
    expected = [
        value
        for begin_s, value in zip(function.times_s, function.values, strict=True)
        if begin_s <= time_s
    ]
    assert function.at(time_s) == expected[-1]


@FEW
@given(function=steps(), time_s=TIMES)
def test_the_next_change_is_the_first_time_after_it(function, time_s):
    assert function.next_change_s(time_s) == min(
        (at_s for at_s in function.times_s if at_s > time_s), default=math.inf
    )


@FEW
@given(
    first=st.integers(),
    later=st.lists(
        st.tuples(st.integers(1, 60), st.integers()), max_size=8, unique_by=lambda entry: entry[0]
    ),
    time_s=TIMES,
)
def test_changes_are_the_first_until_the_last_of_the_later_that_has_begun(
    first,
    later,
    time_s,
):
    """In whatever order they are given."""
    entries = [(quarter / 4, value) for quarter, value in later]
    begun = sorted(entry for entry in entries if entry[0] <= time_s)
    assert changes(first, entries).at(time_s) == (begun[-1][1] if begun else first)


@FEW
@given(value=st.integers(), time_s=TIMES)
def test_always_never_changes(value, time_s):
    assert always(value).at(time_s) == value
    assert always(value).next_change_s(time_s) == math.inf


def test_what_is_there_at_the_beginning_replaces_the_first():
    assert changes("first", [(0.0, "now"), (3.0, "then")]) == Steps((0.0, 3.0), ("now", "then"))
    assert changes("first", [(-2.0, "now")]) == always("now")


@pytest.mark.parametrize(
    ("times_s", "values", "text"),
    [
        ((), (), "as many values as times"),
        ((0.0, 1.0), (1,), "as many values as times"),
        ((1.0,), (1,), "the first at 0 s"),
        ((math.nan,), (1,), "the first at 0 s"),
        ((0.0, 2.0, 2.0), (1, 2, 3), "times must rise"),
        ((0.0, 2.0, 1.0), (1, 2, 3), "times must rise"),
    ],
)
def test_functions_that_cannot_be_are_refused_in_one_line(
    times_s,
    values,
    text,
):
    with pytest.raises(ConfigError, match=text) as error:
        Steps(times_s, values)
    assert "\n" not in str(error.value)
