"""Fan curves: monotone in speed, and inverted exactly."""

from dataclasses import replace
from functools import partial
from math import inf, nan

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from socflower.thermal.fans.fan_curve import FanCurve, rack_fans
from tests.thermal.refusals import refused_each

FEW = settings(max_examples=40)
RPM = st.floats(0.0, 30000.0)
WORKING = st.floats(0.0, 1.0)
CURVES = st.builds(
    FanCurve,
    still_w_per_k=st.floats(0.1, 100.0),
    threshold_rpm=st.just(0.0) | st.floats(0.0, 2e4),
    flow_w_per_k_rpm=st.just(0.0) | st.floats(1e-5, 1e-1),
    drag_w_per_rpm=st.floats(0.0, 0.1),
    air_w_per_rpm3=st.floats(0.0, 1e-9),
    min_rpm=st.floats(100.0, 5000.0),
    max_rpm=st.floats(5001.0, 2.5e4),
)


@FEW
@given(fans=CURVES, rpm=RPM, faster=RPM, working=WORKING)
def test_faster_fans_cool_no_less_and_draw_no_less(fans, rpm, faster, working):
    assert fans.conductance_w_per_k(rpm + faster, working) >= fans.conductance_w_per_k(rpm, working)
    assert fans.power_w(rpm + faster, working) >= fans.power_w(rpm, working)


@FEW
@given(fans=CURVES, rpm=RPM, working=WORKING)
def test_flow_and_watts_are_proportional_to_the_fans_that_turn(fans, rpm, working):
    still = fans.still_w_per_k
    assert fans.conductance_w_per_k(rpm, 0.0) == fans.conductance_w_per_k(0.0) == still
    flow = fans.conductance_w_per_k(rpm) - still
    assert fans.conductance_w_per_k(rpm, working) == pytest.approx(still + working * flow)
    assert fans.power_w(rpm, 0.0) == fans.power_w(0.0) == 0.0
    assert fans.power_w(rpm, working) == pytest.approx(working * fans.power_w(rpm))


@FEW
@given(fans=CURVES, part=st.floats(0.0, 1.0))
def test_rpm_for_inverts_the_conductance(fans, part):
    rpm = fans.min_rpm + part * (fans.max_rpm - fans.min_rpm)
    wanted = fans.conductance_w_per_k(rpm)
    found = fans.rpm_for(wanted)
    assert fans.min_rpm <= found <= fans.max_rpm
    assert fans.conductance_w_per_k(found) == pytest.approx(wanted, rel=1e-7)
    # Above the threshold the speed is unique.
    if rpm > 1.001 * fans.threshold_rpm and wanted > 1.001 * fans.still_w_per_k:
        assert found == pytest.approx(rpm, rel=1e-4)


@FEW
@given(fans=CURVES, wanted=st.floats(0.0, 500.0), grid=st.integers(2, 60))
def test_rpm_for_is_the_lowest_speed_that_is_enough(fans, wanted, grid):
    """Against a grid of speeds; if none is enough, the highest."""
    found = fans.rpm_for(wanted)
    step = (fans.max_rpm - fans.min_rpm) / (grid - 1)
    speeds = [fans.min_rpm + index * step for index in range(grid)]
    enough = [rpm for rpm in speeds if fans.conductance_w_per_k(rpm) >= wanted]
    assume(all(abs(fans.conductance_w_per_k(rpm) - wanted) > 1e-9 * wanted for rpm in speeds))
    assert found <= min(enough, default=fans.max_rpm) * (1.0 + 1e-9)
    if not enough:
        assert found == fans.max_rpm
    else:  # nothing flows within rounding of the threshold
        assert fans.conductance_w_per_k(found * (1.0 + 1e-6)) >= wanted * (1.0 - 1e-9)


def test_nothing_flows_below_the_threshold():
    fans = rack_fans()
    for rpm in (1100.0, 5700.0, fans.threshold_rpm):
        assert fans.conductance_w_per_k(rpm) == fans.still_w_per_k
    assert fans.conductance_w_per_k(1.01 * fans.threshold_rpm) > 1.2 * fans.still_w_per_k
    assert fans.power_w(fans.max_rpm) == pytest.approx(107.0, rel=1e-3)


def test_invalid_fans_are_refused():
    refused_each(
        partial(replace, rack_fans()),
        still_w_per_k=(0.0, nan),
        threshold_rpm=(-1.0,),
        flow_w_per_k_rpm=(nan,),
        drag_w_per_rpm=(-1e-9,),
        air_w_per_rpm3=(inf,),
        min_rpm=(0.0, 14000.0),
        max_rpm=(inf,),
    )
