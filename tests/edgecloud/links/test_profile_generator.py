"""Generated profiles have the statistics of the table that they are made from."""

import math
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile, constant, segments
from socflower.edgecloud.links.profile_generator import (
    JITTER_CORRELATION_S,
    LinkStatistics,
    add_jitter,
    generate_bandwidth_profile,
    generate_from_statistics,
    link_statistics,
    statistics_table,
)
from tests.one_line import refused

LONG_S = 100_000.0
KINDS = tuple(statistics_table()["kind"])
BUSY = LinkStatistics(
    mean_bytes_per_s=1e6,
    deviation_bytes_per_s=4e5,
    min_bytes_per_s=1e5,
    max_bytes_per_s=3e6,
    correlation_s=5.0,
    outage_share=0.1,
    outage_s=4.0,
    up_down_ratio=0.5,
    up_down_correlation=0.6,
    latency_s=0.01,
)


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("kind", KINDS)
def test_long_traces_have_the_statistics_of_their_kind(kind: str) -> None:
    """Within four standard errors of a correlated mean; share and length of outages likewise."""
    figures = link_statistics(kind)
    profile = generate_bandwidth_profile(kind, 3, LONG_S)
    up, down = np.array(profile.up.bytes_per_s), np.array(profile.down.bytes_per_s)
    assert (
        profile.latency_s == figures.latency_s and profile.up.end_s == profile.down.end_s == LONG_S
    )
    there = down > 0
    assert np.array_equal(there, up > 0)
    spread = figures.deviation_bytes_per_s / figures.mean_bytes_per_s
    error = 4 * spread * math.sqrt(2 * figures.correlation_s / LONG_S)
    assert down[there].mean() == pytest.approx(figures.mean_bytes_per_s, rel=error)
    assert up[there].mean() == pytest.approx(
        figures.up_down_ratio * figures.mean_bytes_per_s, rel=error
    )
    assert down[there].std() == pytest.approx(
        figures.deviation_bytes_per_s, rel=3 * error / spread * 0.5
    )
    assert down[there].min() >= figures.min_bytes_per_s and down.max() <= figures.max_bytes_per_s
    num_outages = sum(1 for lost, _ in groupby(~there) if lost)
    if figures.outage_share == 0:
        assert num_outages == 0
    else:
        share = 1 - there.mean()
        assert share == pytest.approx(figures.outage_share, rel=6 / math.sqrt(num_outages))
        assert share * LONG_S / num_outages == pytest.approx(
            figures.outage_s, rel=5 / math.sqrt(num_outages)
        )


@pytest.mark.parametrize("step_s", [0.5, 2.0])
def test_the_logarithm_of_the_rate_forgets_by_its_time_constant(step_s: float) -> None:
    figures = replace(
        BUSY,
        deviation_bytes_per_s=3e5,
        min_bytes_per_s=1e3,
        max_bytes_per_s=1e9,
        outage_share=0.0,
    )
    profile = generate_from_statistics(figures, 8, LONG_S, step_s)
    logs, ups = (np.log(np.array(each.bytes_per_s)) for each in (profile.down, profile.up))
    for lag_s in (2.0, 4.0, 10.0):
        lag = round(lag_s / step_s)
        found = np.corrcoef(logs[:-lag], logs[lag:])[0, 1]
        assert found == pytest.approx(math.exp(-lag_s / 5.0), abs=0.05)
    assert np.corrcoef(logs, ups)[0, 1] == pytest.approx(0.6, abs=0.05)


@settings(max_examples=20)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**40),
    steps=st.integers(1, 300),
    step_s=st.sampled_from([0.1, 0.5, 1.0]),
)
def test_equal_seeds_give_equal_traces_and_longer_ones_begin_alike(
    kind: str, seed: int, steps: int, step_s: float
) -> None:
    def made(seed: int, steps: int) -> BandwidthProfile:
        return generate_bandwidth_profile(kind, seed, steps * step_s, step_s)

    profile, longer = made(seed, steps), made(seed, 2 * steps)
    assert profile == made(seed, steps) and len(profile.up.times_s) == steps
    assert longer.down.bytes_per_s[:steps] == profile.down.bytes_per_s
    assert longer.up.bytes_per_s[:steps] == profile.up.bytes_per_s
    assert made(seed + 1, 2 * steps).down.bytes_per_s != longer.down.bytes_per_s


def test_outages_have_the_share_and_length_asked_for() -> None:
    there = np.array(generate_from_statistics(BUSY, 1, 100_000.0).down.bytes_per_s) > 0
    runs = [len(list(run)) for lost, run in groupby(~there) if lost]
    assert 1 - there.mean() == pytest.approx(0.1, rel=0.1)
    assert np.mean(runs) == pytest.approx(4.0, rel=0.1)


def test_every_figure_has_a_source() -> None:
    for kind in KINDS:
        for name, figure in statistics_table()["kind"][kind].items():
            assert set(figure) == {"value", "source"} and len(figure["source"]) > 10, (kind, name)
        link_statistics(kind)
    mobile = {f"4g-{way}" for way in ("foot", "bicycle", "bus", "car", "tram", "train")}
    assert set(KINDS) == mobile | {"wifi", "one-hop", "5g"}


@pytest.mark.parametrize("kind", ["4g-fooot", "wlan-of-the-neighbours"])
def test_an_unknown_kind_names_the_closest(kind: str) -> None:
    refused(lambda: generate_bandwidth_profile(kind, 0, 10.0), kind, "4g-foot")


@pytest.mark.parametrize(
    ("seed", "duration_s", "step_s", "named"),
    [
        (0, 10.5, 1.0, ["10.5", "steps"]),
        (0, 0.5, 1.0, ["0.5", "1"]),
        (0, 10.0, 0.0, ["0.0"]),
        (0, math.inf, 1.0, ["inf"]),
        (-1, 10.0, 1.0, ["seed", "-1"]),
    ],
)
def test_a_trace_that_cannot_be_is_refused(
    seed: int, duration_s: float, step_s: float, named: list[str]
) -> None:
    refused(lambda: generate_bandwidth_profile("wifi", seed, duration_s, step_s), *named)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("mean_bytes_per_s", 5e6, "mean"),
        ("min_bytes_per_s", 0.0, "min"),
        ("deviation_bytes_per_s", 2e6, "deviation"),
        ("deviation_bytes_per_s", 0.0, "deviation"),
        ("outage_share", 0.6, "outage_share"),
        ("correlation_s", 0.0, "correlation_s"),
        ("up_down_correlation", 1.5, "up_down_correlation"),
    ],
)
def test_figures_that_cannot_be_are_refused(key: str, value: float, named: str) -> None:
    refused(lambda: replace(BUSY, **{key: value}), named)


# ------------------------------------------------------------------------------------------------------- jitter
@pytest.mark.parametrize("deviation", [0.05, 0.3])
def test_jitter_keeps_the_mean_and_has_its_deviation(deviation: float) -> None:
    link = add_jitter(constant(4e5, 1e6, 0.01), deviation, 5, duration_s=LONG_S)
    error = 4 * deviation * math.sqrt(2 * JITTER_CORRELATION_S / LONG_S)
    for steps, mean in ((link.up, 4e5), (link.down, 1e6)):
        rates = np.array(steps.bytes_per_s[:-1])  # the last is the one that holds for good
        assert rates.mean() == pytest.approx(mean, rel=error)
        assert rates.std() / mean == pytest.approx(deviation, rel=0.1)
    assert abs(np.corrcoef(link.up.bytes_per_s[:-1], link.down.bytes_per_s[:-1])[0, 1]) < 0.1
    assert link.latency_s == 0.01 and link.rates(2 * LONG_S) == constant(4e5, 1e6, 0.01).rates(0.0)


SCARCE = st.sampled_from([0.0, 1e4, 2e5])


@given(
    seed=st.integers(0, 1000),
    repeats=st.booleans(),
    parts=st.lists(st.tuples(st.floats(0.3, 40.0), SCARCE, SCARCE), min_size=1, max_size=5),
)
def test_a_jittered_link_is_lost_and_changes_when_the_link_itself_does(
    seed: int, repeats: bool, parts: list[tuple[float, float, float]]
) -> None:
    link = segments(parts, repeats=repeats)
    scattered = add_jitter(link, 0.2, seed, duration_s=60.0)
    assert scattered == add_jitter(link, 0.2, seed, duration_s=60.0)
    assert (scattered.up.end_s, scattered.down.end_s) == (link.up.end_s, link.down.end_s)
    for ours, theirs in ((scattered.up, link.up), (scattered.down, link.down)):
        assert set(theirs.times_s) <= set(ours.times_s)
        for time_s, rate in zip(ours.times_s, ours.bytes_per_s, strict=True):
            wanted = theirs.rate(time_s)
            assert rate == wanted == 0.0 or 0.3 < rate / wanted < 3.0


def test_jitter_follows_its_seed_and_none_changes_nothing() -> None:
    link = constant(1e6, 1e6)
    assert add_jitter(link, 0.0, 1, duration_s=10.0) is link
    assert add_jitter(link, 0.1, 1, duration_s=10.0) != add_jitter(link, 0.1, 2, duration_s=10.0)
    refused(lambda: add_jitter(link, -0.1, 1, duration_s=10.0), "jitter", "-0.1")
