"""The bandwidth meter: right on constant links, quick to notice that one carries nothing any more."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.edgecloud.links.bandwidth_estimate import BandwidthMeter
from tests.edgecloud.plan.tables import link

FIRST = link(1e6, 2e6, 0.05)


def up(meter: BandwidthMeter, now_s: float) -> float:
    return meter.rates(now_s).up_bytes_per_s


@given(
    rate=st.floats(1e3, 1e9),
    latency_s=st.floats(0, 0.2),
    transfers=st.lists(st.tuples(st.floats(1e4, 1e7), st.floats(0, 30)), min_size=1, max_size=20),
)
def test_a_constant_link_is_measured_exactly(
    rate: float, latency_s: float, transfers: list[tuple[float, float]]
) -> None:
    meter = BandwidthMeter(first=link(1.0, 7.0, latency_s))
    now_s = 0.0
    for num_bytes, pause_s in transfers:
        seconds = latency_s + num_bytes / rate
        now_s += seconds + pause_s
        meter.add_transfer("up", num_bytes, seconds, now_s)
    assert up(meter, now_s) == pytest.approx(rate, rel=1e-6)
    assert meter.rates(now_s) == link(up(meter, now_s), 7.0, latency_s)


@settings(max_examples=40)
@given(
    transfers=st.lists(
        st.tuples(st.floats(1e4, 1e7), st.floats(0.01, 60), st.floats(0, 30)), min_size=1
    )
)
def test_an_estimate_lies_between_what_was_measured(
    transfers: list[tuple[float, float, float]],
) -> None:
    meter = BandwidthMeter(first=link(1.0))
    now_s = 0.0
    for num_bytes, seconds, pause_s in transfers:
        now_s += seconds + pause_s
        meter.add_transfer("up", num_bytes, seconds, now_s)
    measured = [num_bytes / seconds for num_bytes, seconds, _ in transfers]
    assert min(measured) * (1 - 1e-9) <= up(meter, now_s) <= max(measured) * (1 + 1e-9)


@given(old=st.floats(1e4, 1e8), new=st.floats(1e4, 1e8), piece_s=st.floats(0.1, 2.0))
def test_the_past_is_forgotten(old: float, new: float, piece_s: float) -> None:
    """Back to back: after five memories, e^-5 of the weight is left to the old rate."""
    meter = BandwidthMeter(first=link(1.0), memory_s=2.0, min_bytes=0.0)
    now_s = 0.0
    for rate, until_s in ((old, 30.0), (new, 42.0)):
        while now_s < until_s:
            now_s += piece_s
            meter.add_transfer("up", rate * piece_s, piece_s, now_s)
    assert abs(up(meter, now_s) - new) <= 0.03 * max(old, new)


@given(rate=st.floats(1e4, 1e9), num_bytes=st.floats(1, 1e8), since_s=st.floats(0, 1e4))
def test_silence_shows_as_a_loss_two_seconds_after_something_was_due(
    rate: float, num_bytes: float, since_s: float
) -> None:
    meter = BandwidthMeter(first=link(rate, 1.0, 0.1))
    meter.set_in_flight("up", since_s, num_bytes)
    due_s = since_s + 0.1 + num_bytes / rate
    assert up(meter, due_s - 1e-3) == rate
    halfway = up(meter, due_s + 1.0)
    assert halfway < rate
    assert halfway == pytest.approx(num_bytes / (due_s + 0.9 - since_s), rel=1e-6)
    assert up(meter, due_s + 1.99) > 0.0
    assert up(meter, due_s + 2.01) == 0.0
    # Too small to be measured by, but the link works.
    meter.add_transfer("up", 1.0, 5.0, due_s + 3.0)
    assert up(meter, due_s + 3.0) == rate


def test_directions_are_apart_and_silence_with_nothing_under_way_means_nothing() -> None:
    meter = BandwidthMeter(first=FIRST)
    meter.set_in_flight("down", 0.0, 100.0)
    meter.add_transfer("up", 3e6, 1.05, 1.05)
    assert meter.rates(10.0) == link(3e6, 0.0, 0.05)
    meter.clear_in_flight("down")
    assert meter.rates(1000.0) == link(3e6, 2e6, 0.05)


@pytest.mark.parametrize(
    ("num_bytes", "seconds"), [(100.0, 1.0), (1e6, 0.05), (1e6, 0.01), (0.0, 0.0)]
)
def test_what_is_mostly_latency_is_not_counted(num_bytes: float, seconds: float) -> None:
    meter = BandwidthMeter(first=FIRST)
    meter.add_transfer("up", num_bytes, seconds, 5.0)
    assert meter.rates(5.0) == FIRST


def test_an_outage_is_not_believed_longer_than_the_memory() -> None:
    """A piece that took ten minutes of outage is outvoted by five seconds of a good link."""
    meter = BandwidthMeter(first=FIRST)
    meter.add_transfer("up", 1e6, 600.0, 600.0)
    assert up(meter, 600.0) == pytest.approx(1e6 / 599.95)
    for step in range(1, 51):
        meter.add_transfer("up", 1e5, 0.1 + 0.05, 600.0 + 0.15 * step)
    assert up(meter, 608.0) > 0.6e6


@pytest.mark.parametrize("factor", [0.01, 0.3, 3.0, 100.0])
def test_two_successive_transfers_at_another_rate_are_a_change(factor: float) -> None:
    meter = BandwidthMeter(first=link(1e6))
    now_s = 0.0
    for rate in (*[1e6] * 20, *[factor * 1e6] * 2):
        now_s += 1e5 / rate
        meter.add_transfer("up", 1e5, 1e5 / rate, now_s)
    assert meter.rates(now_s).up_bytes_per_s == pytest.approx(factor * 1e6)
    assert meter.rates(now_s).down_bytes_per_s == 1e6
