"""Fan curves: monotone in speed, and inverted rightly."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.thermal.fans.fan_curve import FanCurve, rack_fans

FEW = settings(max_examples=40)
RPM = st.floats(0.0, 30000.0)


@st.composite
def curves(draw: st.DrawFn) -> FanCurve:
    low = draw(st.floats(100.0, 5000.0))
    return FanCurve(
        still_w_per_k=draw(st.floats(0.1, 100.0)),
        threshold_rpm=draw(st.one_of(st.just(0.0), st.floats(0.0, 2e4))),
        flow_w_per_k_rpm=draw(st.one_of(st.just(0.0), st.floats(1e-5, 1e-1))),
        drag_w_per_rpm=draw(st.floats(0.0, 0.1)),
        air_w_per_rpm3=draw(st.floats(0.0, 1e-9)),
        min_rpm=low,
        max_rpm=low + draw(st.floats(1.0, 2e4)),
    )


@FEW
@given(fans=curves(), rpm=RPM, faster=st.floats(0.0, 30000.0), working=st.floats(0.0, 1.0))
def test_faster_fans_cool_no_less_and_draw_no_less(fans, rpm, faster, working):
    assert fans.conductance_w_per_k(rpm + faster, working) >= fans.conductance_w_per_k(rpm, working)
    assert fans.power_w(rpm + faster, working) >= fans.power_w(rpm, working)


@FEW
@given(fans=curves(), rpm=RPM, working=st.floats(0.0, 1.0))
def test_fans_that_stand_still_carry_what_no_fans_carry(fans, rpm, working):
    """In between, flow and watts go with the part of the fans that turn."""
    assert fans.conductance_w_per_k(rpm, 0.0) == fans.conductance_w_per_k(0.0) == fans.still_w_per_k
    assert fans.power_w(rpm, 0.0) == fans.power_w(0.0) == 0.0
    flow = fans.conductance_w_per_k(rpm) - fans.still_w_per_k
    assert fans.conductance_w_per_k(rpm, working) == pytest.approx(
        fans.still_w_per_k + working * flow
    )
    assert fans.power_w(rpm, working) == pytest.approx(working * fans.power_w(rpm))


@FEW
@given(fans=curves(), part=st.floats(0.0, 1.0))
def test_rpm_for_inverts_the_conductance(fans, part):
    rpm = fans.min_rpm + part * (fans.max_rpm - fans.min_rpm)
    wanted = fans.conductance_w_per_k(rpm)
    found = fans.rpm_for(wanted)
    assert fans.min_rpm <= found <= fans.max_rpm
    assert fans.conductance_w_per_k(found) == pytest.approx(wanted, rel=1e-7)
    # Above the threshold no other speed has it.
    if (
        fans.flow_w_per_k_rpm
        and rpm > 1.001 * fans.threshold_rpm
        and wanted > 1.001 * fans.still_w_per_k
    ):
        assert found == pytest.approx(rpm, rel=1e-4)


@FEW
@given(fans=curves(), wanted=st.floats(0.0, 500.0), grid=st.integers(2, 60))
def test_rpm_for_is_the_lowest_speed_that_is_enough(fans, wanted, grid):
    """Against a grid of speeds; where none is enough, the highest."""
    found = fans.rpm_for(wanted)
    speeds = [
        fans.min_rpm + index / (grid - 1) * (fans.max_rpm - fans.min_rpm) for index in range(grid)
    ]
    enough = [rpm for rpm in speeds if fans.conductance_w_per_k(rpm) >= wanted]
    assume(all(abs(fans.conductance_w_per_k(rpm) - wanted) > 1e-9 * wanted for rpm in speeds))
    assert found <= min(enough, default=fans.max_rpm) * (1.0 + 1e-9)
    if not enough:
        assert found == fans.max_rpm
    else:
        # Below the threshold's rounding nothing flows: a speed a trifle higher has to be enough.
        assert fans.conductance_w_per_k(found * (1.0 + 1e-6)) >= wanted * (1.0 - 1e-9)


def test_nothing_flows_below_the_threshold():
    fans = rack_fans()
    for rpm in (0.0, 1100.0, 3250.0, 5700.0, fans.threshold_rpm):
        assert fans.conductance_w_per_k(rpm) == fans.still_w_per_k
    assert fans.conductance_w_per_k(1.01 * fans.threshold_rpm) > 1.2 * fans.still_w_per_k
    assert fans.power_w(fans.max_rpm) == pytest.approx(107.0, rel=1e-3)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("still_w_per_k", 0.0, "still_w_per_k = 0.0 must be above 0"),
        ("still_w_per_k", math.nan, "still_w_per_k = nan"),
        ("threshold_rpm", -1.0, "threshold_rpm = -1.0 must be 0 or more and finite"),
        ("flow_w_per_k_rpm", math.nan, "flow_w_per_k_rpm = nan"),
        ("drag_w_per_rpm", -1e-9, "drag_w_per_rpm"),
        ("air_w_per_rpm3", math.inf, "air_w_per_rpm3 = inf"),
        ("min_rpm", 0.0, "need 0 < min_rpm < max_rpm"),
        ("min_rpm", 14000.0, "need 0 < min_rpm < max_rpm"),
        ("max_rpm", math.inf, "need 0 < min_rpm < max_rpm"),
    ],
)
def test_fans_that_cannot_be_are_refused_in_one_line(key, value, text):
    with pytest.raises(ConfigError, match=text) as error:
        replace(rack_fans(), **{key: value})
    assert "\n" not in str(error.value)
