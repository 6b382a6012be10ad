"""Link profiles against sums over small steps of time, and the files they are kept in."""

import math
from bisect import bisect
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.cluster.link_rate import RateSteps
from socflower.edgecloud.links.bandwidth_profile import (
    HEADER,
    BandwidthProfile,
    constant,
    read_csv,
    segments,
)
from tests.one_line import refused

FEW = settings(max_examples=80)
RATES = st.sampled_from([0.0, 1.0, 1000.0, 64000.0, 1.25e6]) | st.floats(0, 1e7)
TICKS = st.integers(0, 6000)  # of a millisecond


@st.composite
def steps(draw: st.DrawFn, *, lively: bool = False) -> RateSteps:
    """RateSteps that change at whole milliseconds; lively ones carry something in every round, or for good."""
    ticks = sorted(draw(st.sets(st.integers(1, 1500), max_size=6)))
    rates = draw(st.lists(RATES, min_size=len(ticks) + 1, max_size=len(ticks) + 1))
    if lively:
        rates[-1] = draw(st.floats(100.0, 1e7))
    end_s = draw(st.sampled_from([math.inf, 1.501, 2.0]))
    return RateSteps((0.0, *(tick / 1000 for tick in ticks)), tuple(rates), end_s)


def summed(profile: RateSteps, begin_ms: int, end_ms: int) -> float:
    """The integral, a millisecond at a time."""
    total = 0.0
    for tick in range(begin_ms, end_ms):
        middle_s = (tick + 0.5) / 1000
        if math.isfinite(profile.end_s):
            middle_s %= profile.end_s
        total += profile.bytes_per_s[bisect(profile.times_s, middle_s) - 1] / 1000
    return total


def link(direction: RateSteps) -> BandwidthProfile:
    return BandwidthProfile(direction, constant(1.0, 1.0).down)


@settings(max_examples=40)
@given(profile=steps(), ends=st.tuples(TICKS, TICKS))
def test_bytes_between_is_the_sum_over_milliseconds(
    profile: RateSteps, ends: tuple[int, int]
) -> None:
    begin, end = sorted(ends)
    assert link(profile).bytes_between("up", begin / 1000, end / 1000) == pytest.approx(
        summed(profile, begin, end), rel=1e-6, abs=1e-3
    )


@settings(max_examples=40)
@given(profile=steps(lively=True), begin=TICKS, num_bytes=st.integers(1, 10**6))
def test_a_transfer_ends_in_the_millisecond_in_which_the_sum_reaches_it(
    profile: RateSteps,
    begin: int,
    num_bytes: int,
) -> None:
    passed_ms = profile.passed_s(begin / 1000, num_bytes) * 1000
    if passed_ms - begin > 20_000:
        num_bytes = 1 + round(summed(profile, begin, begin + 5000) / 2)
        passed_ms = profile.passed_s(begin / 1000, num_bytes) * 1000
        if passed_ms - begin > 20_000:
            return
    slack = 1e-6 * num_bytes + 1e-3
    assert summed(profile, begin, max(begin, math.floor(passed_ms - 1e-4))) <= num_bytes + slack
    assert summed(profile, begin, math.ceil(passed_ms + 1e-4)) >= num_bytes - slack


@FEW
@given(profile=steps(lively=True), start_s=st.floats(0, 50), num_bytes=st.floats(1, 1e8))
def test_passing_is_the_inverse_of_bytes_between(
    profile: RateSteps, start_s: float, num_bytes: float
) -> None:
    passed_s = profile.passed_s(start_s, num_bytes)
    between = link(profile).bytes_between("up", start_s, passed_s)
    assert between == pytest.approx(
        num_bytes, rel=1e-6, abs=1e-6 * profile.total_bytes(passed_s) + 1e-2
    )


@FEW
@given(
    profile=steps(lively=True),
    start_s=st.floats(0, 50),
    first=st.floats(1, 1e7),
    second=st.floats(1, 1e7),
)
def test_sending_two_things_takes_as_long_as_sending_both_at_once(
    profile: RateSteps,
    start_s: float,
    first: float,
    second: float,
) -> None:
    at_once_s = profile.passed_s(start_s, first + second)
    assert profile.passed_s(profile.passed_s(start_s, first), second) == pytest.approx(
        at_once_s, rel=1e-7, abs=1e-6
    )


@FEW
@given(
    profile=steps(),
    starts=st.tuples(st.floats(0, 50), st.floats(0, 50)),
    sizes=st.tuples(st.floats(0, 1e8), st.floats(0, 1e8)),
)
def test_passing_is_monotone_in_start_and_size(
    profile: RateSteps,
    starts: tuple[float, float],
    sizes: tuple[float, float],
) -> None:
    early_s, late_s = sorted(starts)
    small, large = sorted(sizes)
    slack_s = 1e-6
    assert profile.passed_s(early_s, small) <= profile.passed_s(early_s, large) + slack_s
    assert profile.passed_s(early_s, large) <= profile.passed_s(late_s, large) + slack_s
    assert profile.passed_s(early_s, small) >= early_s


@FEW
@given(profile=steps(), time_s=st.floats(0, 1.4), rounds=st.integers(0, 5))
def test_a_trace_with_an_end_begins_again(profile: RateSteps, time_s: float, rounds: int) -> None:
    if math.isinf(profile.end_s):
        assert profile.rate(profile.times_s[-1] + time_s + rounds) == profile.bytes_per_s[-1]
    else:
        later_s = time_s + rounds * profile.end_s
        assert profile.total_bytes(later_s) == pytest.approx(
            profile.total_bytes(time_s) + rounds * profile.total_bytes(profile.end_s),
            rel=1e-6,
            abs=1e-3,
        )


def test_a_link_with_next_to_no_rate_passes_nothing_in_a_time_that_is_a_number() -> None:
    assert math.isinf(RateSteps((0.0,), (2.225073858507e-311,), end_s=1.501).passed_s(0.0, 1.0))


def test_a_link_that_is_lost_for_good_lets_nothing_pass() -> None:
    lost = segments([(1.0, 10.0, 10.0), (1.0, 0.0, 5.0)])
    assert lost.passed_s("up", 0.5, 5.0) == 1.0
    assert lost.passed_s("up", 0.5, 5.1) == math.inf
    assert lost.passed_s("up", 3.0, 0.0) == 3.0
    assert lost.passed_s("up", math.inf, 5.0) == math.inf
    assert lost.passed_s("down", 3.0, 5.0) == 4.0
    assert segments([(1.0, 0.0, 5.0)], repeats=True).passed_s("up", 0.0, 1.0) == math.inf


def test_an_outage_holds_a_transfer_up_for_just_its_length() -> None:
    profile = segments(
        [(1.0, 10.0, 10.0), (3.0, 0.0, 0.0), (1.0, 10.0, 10.0)], latency_s=0.5, repeats=True
    )
    assert profile.passed_s("up", 0.5, 10.0) == pytest.approx(4.5)
    assert profile.passed_s("up", 4.5, 10.0) == pytest.approx(5.5)
    assert profile.mean("up") == pytest.approx(4.0)
    assert profile.mean("up", 1.0, 4.0) == 0.0
    assert profile.mean("up", 1.0, 1.0) == 0.0
    assert profile.rates(2.0).up_bytes_per_s == 0.0 and profile.rates(2.0).latency_s == 0.5
    assert profile.mean_rates().down_bytes_per_s == pytest.approx(4.0)
    assert constant(3.0, 4.0).mean("down") == 4.0


# ------------------------------------------------------------------------------------------------------ files


def write_csv(profile: BandwidthProfile, path: Path) -> None:
    times_s = sorted({*profile.up.times_s, *profile.down.times_s})
    rows = [(time_s, profile.up.rate(time_s), profile.down.rate(time_s)) for time_s in times_s]
    lines = [",".join(HEADER), *(",".join(map(repr, row)) for row in rows)]
    if math.isfinite(profile.up.end_s):
        lines.append(f"{profile.up.end_s!r},,")
    path.write_text("\n".join(lines))


@settings(max_examples=40)
@given(up=steps(), down=steps())
def test_what_is_written_as_a_table_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    up: RateSteps,
    down: RateSteps,
) -> None:
    profile = BandwidthProfile(up, RateSteps(down.times_s, down.bytes_per_s, up.end_s), 0.02)
    path = tmp_path_factory.mktemp("profile") / "link.csv"
    write_csv(profile, path)
    again = read_csv(path, latency_s=0.02, repeats=math.isfinite(up.end_s))
    assert again.up.end_s == up.end_s
    for time_s in (*up.times_s, *down.times_s, 1.49, 3.1):
        assert again.rates(time_s) == profile.rates(time_s)


def test_the_last_row_lasts_as_long_as_the_one_before_it(tmp_path: Path) -> None:
    path = tmp_path / "link.csv"
    path.write_text(f"{HEAD}0,1,2\n\n3,4,5\n")
    assert read_csv(path).up == RateSteps((0.0, 3.0), (1.0, 4.0), 6.0)
    assert read_csv(path, repeats=False).down == RateSteps((0.0, 3.0), (2.0, 5.0))
    path.write_text(f"{HEAD}0,1,2\n")
    assert read_csv(path).down == RateSteps((0.0,), (2.0,), 1.0)


HEAD = ",".join(HEADER) + "\n"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ["line 1", "time_s"]),
        ("0,1,2\n", ["line 1", "time_s"]),
        (HEAD, ["rows"]),
        (HEAD + "0,1\n", ["line 2", "2"]),
        (HEAD + "0,1,x\n", ["line 2", "down_bytes_per_s", "'x'"]),
        (HEAD + "0,-1,2\n", ["line 2", "up_bytes_per_s", "-1"]),
        (HEAD + "0,nan,2\n", ["line 2", "up_bytes_per_s", "nan"]),
        (HEAD + "1,1,2\n", ["line 2", "1", "0"]),
        (HEAD + "0,1,2\n5,1,2\n5,1,2\n", ["line 4", "5", "5.0"]),
        (HEAD + "0,1,2\n5,,\n6,1,2\n", ["line 4"]),
        (HEAD + "0,,\n", ["line 2", "up_bytes_per_s", "''"]),
        (HEAD + "0,1,2\n5,,3\n", ["line 3", "up_bytes_per_s", "''"]),
        ("\xff", ["UTF-8"]),
    ],
)
def test_a_bad_table_is_refused(tmp_path: Path, text: str, named: list[str]) -> None:
    path = tmp_path / "link.csv"
    path.write_bytes(text.encode("latin-1"))
    refused(lambda: read_csv(path), "link.csv", *named)


def test_a_table_that_is_not_there_is_named(tmp_path: Path) -> None:
    refused(lambda: read_csv(tmp_path / "missing"), "missing", "read")


ONE = ((0.0,), (1.0,))


@pytest.mark.parametrize(
    ("times_s", "rates", "named"),
    [
        ((), (), ["times"]),
        ((0.0,), (1.0, 2.0), ["times"]),
        ((1.0,), (1.0,), ["0 s"]),
        ((0.0, 2.0, 2.0), (1.0,) * 3, ["rise"]),
        ((0.0,), (-1.0,), ["-1"]),
        ((0.0,), (math.inf,), ["inf"]),
    ],
)
def test_steps_that_cannot_be_are_refused(
    times_s: tuple[float, ...], rates: tuple[float, ...], named: list[str]
) -> None:
    refused(lambda: RateSteps(times_s, rates), *named)


def test_profiles_that_cannot_be_are_refused() -> None:
    refused(lambda: RateSteps((0.0, 2.0), (1.0,) * 2, 2.0), "2.0 s")
    refused(lambda: constant(1.0, 1.0, -1.0), "latency_s", "-1")
    refused(lambda: segments([]), "segments")
    refused(lambda: segments([(0.0, 1.0, 1.0)]), "seconds = 0")
