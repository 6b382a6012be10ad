"""The event clock on a rack that heats up, throttles and is cooled."""

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.cluster import Activity, TaskGraph, TaskGraphBuilder, Usage
from socflower.cluster.virtual_clock import Pace
from socflower.sim import EventClock
from socflower.thermal.fans.fan_curve import rack_fans
from socflower.thermal.fans.policies import FanPolicy, FixedSpeed, PassiveCooling
from socflower.thermal.model.background_load import NOBODY, BackgroundLoad, Steps, always, changes
from socflower.thermal.model.dynamics import RackDynamics, Surroundings
from socflower.thermal.model.governor import snapdragon_governor
from socflower.thermal.model.rack import Rack
from tests.one_line import refused
from tests.toy_clusters import same_usage, toy_cluster

FEW = settings(max_examples=15)
SLOTS = (3, 2)
# So little air that the toys' 5 W throttle it within minutes.
RACK = Rack(slots_per_board=SLOTS, chassis_j_per_k=300.0, soc_to_board_w_per_k=0.4)
SLOW_FANS = FixedSpeed(fixed_rpm=3250.0)
POLICIES = st.sampled_from([SLOW_FANS, FixedSpeed(fixed_rpm=11000.0), PassiveCooling()])


def heat(
    policy: FanPolicy = SLOW_FANS, around: Surroundings | None = None, tick_s: float = 5.0
) -> RackDynamics:
    return RackDynamics(RACK, policy, surroundings=around, tick_s=tick_s)


def together(seconds: Sequence[float]) -> TaskGraph:
    """Every SoC computes, and nobody goes on before all have done."""
    b = TaskGraphBuilder()
    works = [b.compute("work", soc, one_s) for soc, one_s in enumerate(seconds)]
    for work in works:
        b.follow_previous(work, works)
    return b.build(range(len(seconds)))


def test_a_prediction_is_for_nominal_speeds_and_warms_nothing() -> None:
    """On a rack that is throttled all the same."""
    cluster = toy_cluster(SLOTS)
    hot, graph = EventClock(cluster, heat()), together([40.0] * sum(SLOTS))
    cold_s = EventClock(cluster).run(graph, repeat=30).duration_s
    assert hot.run(graph, repeat=30).duration_s > 1.02 * cold_s
    state = hot.state()
    assert hot.predicted_s(graph, repeat=30) == cold_s
    assert hot.state() == state


class BruteForce:
    """Steps of work and a rack, in small explicit steps; idle 1 W, at work 5 W, as the toys of these tests."""

    def __init__(self, tick_s: float, rpm: float) -> None:
        self.tick_s, self.looks, self.at_s, self.energy_j, self.fan_j = tick_s, 0, 0.0, 0.0, 0.0
        self.governor = snapdragon_governor()
        self.conductance, self.fan_w = (
            rack_fans().conductance_w_per_k(rpm),
            rack_fans().power_w(rpm),
        )
        self.board_of = np.repeat(np.arange(len(SLOTS)), SLOTS)
        self.socs_c, self.boards_c, self.air_c = (
            np.full(sum(SLOTS), 28.0),
            np.full(len(SLOTS), 28.0),
            28.0,
        )
        self.levels = np.zeros(sum(SLOTS), int)

    def step(self, seconds: Sequence[float]) -> bool:
        """Do one repetition; speeds are those at its begin. Return whether a trip was too near to call."""
        speeds = np.array([1.0, 2.55 / 2.84, 1.80 / 2.84])[self.levels]
        work_s = np.array(seconds) / speeds
        duration_s = float(work_s.max())
        watts = 1.0 + speeds**2 * 4.0 * work_s / duration_s
        self.energy_j += float(watts.sum()) * duration_s
        self.fan_j += self.fan_w * duration_s
        end_s, unsure = self.at_s + duration_s, False
        while self.at_s < end_s - 1e-9:
            next_s = min((self.looks + 1) * self.tick_s, end_s)
            self.flow(watts, next_s - self.at_s)
            self.at_s = next_s
            if next_s >= (self.looks + 1) * self.tick_s - 1e-9:
                self.looks += 1
                for soc, hot_c in enumerate(self.socs_c):
                    level = self.levels[soc]
                    unsure = (
                        unsure or min(abs(hot_c - edge) for edge in (34.0, 35.0, 38.5, 39.5)) < 1e-3
                    )
                    if level < 2 and hot_c >= self.governor.trip_c[level]:
                        self.levels[soc] += 1
                    elif level and hot_c <= self.governor.resume_c[level - 1]:
                        self.levels[soc] -= 1
        return unsure

    def flow(self, watts: np.ndarray, duration_s: float) -> None:
        steps = max(int(duration_s / 0.05), 1)
        h = duration_s / steps
        # Heun's rule.
        for _ in range(steps):
            first = self.slopes(watts, self.socs_c, self.boards_c, self.air_c)
            second = self.slopes(
                watts,
                self.socs_c + h * first[0],
                self.boards_c + h * first[1],
                self.air_c + h * first[2],
            )
            self.socs_c, self.boards_c, self.air_c = (
                now + 0.5 * h * (a + b)
                for now, a, b in zip(
                    (self.socs_c, self.boards_c, self.air_c), first, second, strict=True
                )
            )

    def slopes(
        self, watts: np.ndarray, socs_c: np.ndarray, boards_c: np.ndarray, air_c: float
    ) -> tuple[np.ndarray, np.ndarray, float]:
        up = RACK.soc_to_board_w_per_k * (socs_c - boards_c[self.board_of])
        out = RACK.board_to_air_w_per_k * (boards_c - air_c)
        return (
            (watts - up) / RACK.soc_j_per_k,
            (np.bincount(self.board_of, up) - out) / RACK.board_j_per_k,
            (float(out.sum()) - self.conductance * (air_c - 25.0)) / RACK.chassis_j_per_k,
        )


@pytest.mark.slow
@settings(max_examples=8)
@given(
    seconds=st.lists(st.floats(0.5, 8.0), min_size=5, max_size=5),
    tick_s=st.sampled_from([1.0, 5.0, 0.7]),
    rpm=st.sampled_from([3250.0, 8300.0]),
)
def test_virtual_time_under_throttling_equals_a_brute_force_integration(
    seconds: list[float],
    tick_s: float,
    rpm: float,
) -> None:
    """Time, joules of SoCs and of fans, over about three minutes of work."""
    repeat = int(180.0 / max(seconds))
    brute = BruteForce(tick_s, rpm)
    for done in range(repeat):
        if brute.step(seconds):
            repeat = done + 1
            break
    rack = heat(FixedSpeed(fixed_rpm=rpm), tick_s=tick_s)
    usage = EventClock(toy_cluster(SLOTS), rack).run(together(seconds), repeat=repeat)
    # The clock looks ahead with the watts of the work that is about to begin. Where a step under way draws others, a
    # trip may come a look earlier than that, and one of these long steps begins at the speed before.
    assert usage.duration_s == pytest.approx(brute.at_s, rel=5e-3)
    assert usage.total_energy_j - usage.energy_j[Activity.COOLING] == pytest.approx(
        brute.energy_j, rel=5e-3
    )
    assert usage.energy_j[Activity.COOLING] == pytest.approx(brute.fan_j, rel=5e-3)
    assert rack.temperatures_c == pytest.approx(brute.socs_c, abs=0.2)


@st.composite
def graphs(draw: st.DrawFn) -> TaskGraph:
    """Computing and sending in a ring, with or without a barrier."""
    b = TaskGraphBuilder()
    works = [b.compute("work", soc, draw(st.integers(1, 12)) / 2) for soc in range(5)]
    sent = [
        b.transfer("send", soc, (soc + 1) % 5, 50.0 * draw(st.integers(0, 3)), after=(works[soc],))
        for soc in range(5)
    ]
    if draw(st.booleans()):
        for work in works:
            b.follow_previous(work, sent)
    return b.build(range(5))


@st.composite
def surroundings(draw: st.DrawFn) -> Surroundings:
    user = st.builds(
        BackgroundLoad, share=st.floats(0.0, 0.8), power_w=st.floats(0.0, 3.0), taken=st.booleans()
    )
    return Surroundings(
        ambient_c=changes(
            25.0, draw(st.lists(st.tuples(st.floats(1.0, 90.0), st.floats(20.0, 30.0)), max_size=1))
        ),
        background_load=tuple(
            changes(NOBODY, draw(st.lists(st.tuples(st.floats(1.0, 90.0), user), max_size=1)))
            for _ in range(5)
        ),
    )


def overheard(rack: RackDynamics) -> list[tuple[float, Sequence[float]]]:
    """Return the list of the durations and loads by which a rack advances from now on."""
    loads, advance = [], rack.advance

    def listen(duration_s: float, power_w: Sequence[float]) -> float:
        loads.append((duration_s, power_w))
        return advance(duration_s, power_w)

    rack.advance = listen  # type: ignore[method-assign]
    return loads


@FEW
@given(graph=graphs(), policy=POLICIES, around=surroundings(), repeat=st.integers(1, 25))
def test_extrapolation_equals_full_simulation_on_a_rack(
    graph: TaskGraph,
    policy: FanPolicy,
    around: Surroundings,
    repeat: int,
) -> None:
    first, second = heat(policy, around), heat(policy, around)
    cluster = toy_cluster(SLOTS)
    same_usage(
        EventClock(cluster, first).run(graph, repeat=repeat),
        EventClock(cluster, second, extrapolate=False).run(graph, repeat=repeat),
    )
    assert first.temperatures_c == pytest.approx(second.temperatures_c, abs=1e-6)


@FEW
@given(graph=graphs(), policy=POLICIES, around=surroundings(), repeat=st.integers(1, 25))
def test_activities_and_cooling_sum_to_everything(
    graph: TaskGraph,
    policy: FanPolicy,
    around: Surroundings,
    repeat: int,
) -> None:
    """Seconds of all SoCs are those of the clock; cooling is the rack's; the rest is the mean load that heated it."""
    rack = heat(policy, around)
    loads = overheard(rack)
    clock = EventClock(toy_cluster(SLOTS), rack)
    usage = clock.run(graph, repeat=repeat)
    assert sum(usage.soc_seconds.values()) == pytest.approx(5.0 * usage.duration_s)
    assert Activity.COOLING not in usage.soc_seconds
    assert usage.energy_j[Activity.COOLING] == pytest.approx(rack.cooling_j)
    assert usage.total_energy_j == pytest.approx(
        sum(long_s * sum(power_w) for long_s, power_w in loads) + rack.cooling_j
    )
    assert rack.state()["time_s"] == pytest.approx(clock.now_s)


@FEW
@given(graph=graphs(), policy=POLICIES, around=surroundings(), at_most=st.integers(1, 60))
def test_running_while_steady_again_and_again_is_running(
    graph: TaskGraph,
    policy: FanPolicy,
    around: Surroundings,
    at_most: int,
) -> None:
    """While it goes on, all that work can see stays as it is: a copy is looked at often."""
    whole, parts = heat(policy, around), heat(policy, around)
    loads = overheard(parts)
    usage = EventClock(toy_cluster(SLOTS), whole).run(graph, repeat=at_most)
    clock, total = EventClock(toy_cluster(SLOTS), parts), Usage()
    pace = Pace(dict.fromkeys(range(5), at_most))
    while not pace.done:
        walker = heat(policy, around)
        walker.restore(parts.state())
        before = sum(pace.remaining.values()), sum(pace.ahead_s.values())
        loads.clear()
        part = clock.run_while_steady(graph, pace)
        assert (sum(pace.remaining.values()), sum(pace.ahead_s.values())) < before
        total += part
        assert part.duration_s == pytest.approx(sum(duration_s for duration_s, _ in loads))
        duration_s, power_w = loads[-1]
        seen = walker.speed_factors(), walker.power_factors(), walker.taken_socs()
        # Looked ahead was with the watts of new work; where old work ended first or SoCs idled, they were others.
        for _ in range(20 if len(loads) == 1 else 0):
            walker.advance(0.0499 * duration_s, power_w)
            assert (walker.speed_factors(), walker.power_factors(), walker.taken_socs()) == seen
    assert total == clock.usage == usage
    assert parts.state() == whole.state()


@FEW
@given(
    graph=graphs(),
    policy=POLICIES,
    around=surroundings(),
    before=st.integers(1, 12),
    after=st.integers(1, 12),
)
def test_a_restored_clock_and_its_rack_go_on_to_the_last_bit(
    graph: TaskGraph,
    policy: FanPolicy,
    around: Surroundings,
    before: int,
    after: int,
) -> None:
    cluster = toy_cluster(SLOTS)
    whole, restored = (
        EventClock(cluster, heat(policy, around)),
        EventClock(cluster, heat(policy, around)),
    )
    whole.run(graph, repeat=before)
    restored.restore(json.loads(json.dumps(whole.state())))
    assert restored.run(graph, repeat=after) == whole.run(graph, repeat=after)
    assert restored.state() == whole.state()


def test_resting_lasts_until_the_window_opens_and_cools_the_rack() -> None:
    around = Surroundings(open=Steps((0.0, 100.0, 400.0), (True, False, True)))
    cluster, rack = toy_cluster(SLOTS), heat(FixedSpeed(fixed_rpm=8300.0), around)
    clock, graph = EventClock(cluster, rack), together([2.5] * 5)
    pace = Pace(dict.fromkeys(range(5), 100))
    while not clock.taken_socs():
        clock.run_while_steady(graph, pace)
    assert clock.taken_socs() == frozenset(range(5))
    assert clock.now_s >= 100.0
    hot_c, rested_s, before_j = rack.temperatures_c, 0.0, rack.cooling_j
    rests = []
    while clock.taken_socs():
        rests.append(clock.idle([0, 1]))
        rested_s += rests[-1].duration_s
    assert clock.now_s == pytest.approx(400.0)
    assert sum(rest.energy_j[Activity.IDLE] for rest in rests) == pytest.approx(
        2.0 * 1.0 * rested_s
    )
    assert sum(rest.soc_seconds[Activity.IDLE] for rest in rests) == pytest.approx(2.0 * rested_s)
    assert sum(rest.energy_j[Activity.COOLING] for rest in rests) == pytest.approx(
        rack.cooling_j - before_j
    )
    assert (rack.temperatures_c < hot_c).all()
    # Half an hour at a time where nothing changes any more.
    still = EventClock(cluster, heat())
    assert still.idle([0]).duration_s == pytest.approx(1800.0)


@FEW
@given(graph=graphs(), repeat=st.integers(1, 40))
def test_a_rack_that_never_gets_hot_changes_nothing_but_the_fans_joules(
    graph: TaskGraph,
    repeat: int,
) -> None:
    cool = Surroundings(ambient_c=always(0.0))
    cluster = toy_cluster(SLOTS)
    fans = FixedSpeed(fixed_rpm=14000.0)
    rack = RackDynamics(Rack(slots_per_board=SLOTS), fans, surroundings=cool, start_c=0.0)
    plain, cooled = EventClock(cluster), EventClock(cluster, rack)
    with_fans, without = cooled.run(graph, repeat=repeat), plain.run(graph, repeat=repeat)
    assert with_fans.energy_j[Activity.COOLING] == pytest.approx(
        with_fans.duration_s * rack_fans().power_w(14000.0), rel=1e-6, abs=5.0 * 107.0
    )
    energy_j = dict(with_fans.energy_j)
    del energy_j[Activity.COOLING]
    same_usage(replace(with_fans, energy_j=energy_j), without)
    assert plain.changes is False and cooled.changes is True
    assert plain.speed_factors() == [1.0] * 5 and plain.taken_socs() == frozenset()
    assert Activity.COOLING not in without.energy_j and "dynamics" not in plain.state()


def test_a_rack_of_another_size_is_a_config_error() -> None:
    clock = EventClock(toy_cluster((4,)), heat())
    refused(lambda: clock.run(together([1.0] * 4)), "4 speed factors")
