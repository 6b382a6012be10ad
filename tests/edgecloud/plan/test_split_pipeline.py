"""The virtual timeline: staleness, order, and F26's duration; times against a recurrence over its own actions."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.cluster import Tier
from socflower.edgecloud.links.bandwidth_profile import (
    BandwidthProfile,
    LinkRates,
    constant,
    segments,
)
from socflower.edgecloud.plan.cost_model import training_s
from socflower.edgecloud.plan.cuts import CutCost, SplitCosts, SplitPlan
from socflower.edgecloud.plan.decision import WindowSchedule
from socflower.edgecloud.plan.party import Party
from socflower.edgecloud.plan.phases import batch_times, phases
from socflower.edgecloud.plan.split_pipeline import PROBE_BYTES, Timeline, round_ends
from socflower.edgecloud.plan.timeline_actions import (
    Action,
    ActionKind,
    decode_actions,
    encode_actions,
)
from socflower.errors import SocflowerError
from tests.edgecloud.plan.tables import costs as table
from tests.edgecloud.plan.tables import cut as cut_cost
from tests.edgecloud.plan.tables import link
from tests.one_line import refused
from tests.split_edges import simulate_split

SECONDS = st.integers(0, 40).map(lambda part: part / 8)
FORWARD, STEP, APPLY = ActionKind.FORWARD, ActionKind.STEP, ActionKind.APPLY
CLOUDS = st.sampled_from(["own", "turns", "joined"])


def cut(
    index: int, forward_s: float, backward_s: float, cloud_s: float, elements: int, **more: Any
) -> CutCost:
    return cut_cost(forward_s, backward_s, cloud_s, elements, 100.0 * (index + 1), **more)


@st.composite
def costs(draw: st.DrawFn, *, frozen: bool = True) -> SplitCosts:
    cuts = []
    for index in range(3):
        seconds, elements = [draw(SECONDS) for _ in range(3)], draw(st.integers(1, 300))
        trains = not (frozen and draw(st.booleans()))
        cuts.append(cut(index, *seconds, elements, front_trains=trains))
    return table(
        *cuts,
        edge_only_s=1.0 + draw(SECONDS),
        label_bytes=8.0,
        codec_s_per_element={8: 0.001},
        edge_s_per_byte=draw(st.sampled_from([0.0, 0.001])),
        edge_s_per_batch=draw(st.sampled_from([0.0, 0.5])),
        cloud_s_per_byte=draw(st.sampled_from([0.0, 0.0005])),
        header_bytes=16.0,
        model_weight_bytes=1000.0,
    )


@st.composite
def profiles(draw: st.DrawFn) -> BandwidthProfile:
    """Constant, or with rates that change, outages included; something passes in every round."""
    latency_s = draw(st.sampled_from([0.0, 0.25, 2.0]))
    if draw(st.booleans()):
        return constant(draw(st.floats(50, 5000)), draw(st.floats(50, 5000)), latency_s)
    rate = st.sampled_from([0.0, 50.0]) | st.floats(20, 5000)
    parts = [
        (draw(st.floats(0.5, 30)), draw(rate), draw(rate)) for _ in range(draw(st.integers(1, 4)))
    ]
    return segments([*parts, (5.0, 300.0, 400.0)], latency_s=latency_s, repeats=draw(st.booleans()))


@st.composite
def schedules(draw: st.DrawFn) -> Callable[[int], int]:
    limits = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    length = draw(st.integers(1, 12))
    return lambda batch: limits[batch // length % len(limits)]


class Wandering:
    """Moves the cut and the bits as a list says."""

    def __init__(self, wishes: Sequence[SplitPlan | None]) -> None:
        self._wishes, self.asked = wishes, []

    def decide(
        self, batch: int, rates: LinkRates, current: SplitPlan, window: int, edge_speed: float = 1.0
    ) -> SplitPlan | None:
        assert rates.up_bytes_per_s >= 0 and current.window == window
        self.asked.append(batch)
        return self._wishes[batch % len(self._wishes)]


WISHES = st.lists(
    st.none()
    | st.builds(SplitPlan, cut=st.none() | st.integers(0, 2), bits=st.sampled_from([8, 32])),
    min_size=1,
    max_size=20,
)


def by_batch(timeline: Timeline, party: int) -> dict[int, list[Action]]:
    found: dict[int, list[Action]] = defaultdict(list)
    for action in timeline.actions:
        if action.party == party and action.kind != ActionKind.RECUT:
            found[action.batch].append(action)
    return found


def check(timeline: Timeline, parties: Sequence[Party], first: int, num_batches: int) -> None:
    """What holds whatever the phases, links, windows and deciders."""
    assert list(timeline.times_s) == sorted(timeline.times_s)
    assert len(timeline.times_s) == len(timeline.actions)
    assert decode_actions(encode_actions(timeline.actions)) == timeline.actions
    for index, party in enumerate(parties):
        acts = by_batch(timeline, index)
        assert sorted(acts) == list(range(first, first + num_batches))
        for batch, three in acts.items():
            assert [action.kind for action in three] == [FORWARD, STEP, APPLY]
            assert len({(action.cut, action.bits, action.window) for action in three}) == 1
            assert three[0].window == party.limit(batch)
        own = [action for action in timeline.actions if action.party == index]
        for kind in (FORWARD, STEP, APPLY):
            order = [action.batch for action in own if action.kind == kind]
            assert order == sorted(order)
        newest, out, staleness, cut_now = first - 1, 0, [], party.split_plan.cut
        for action in own:
            if action.kind == FORWARD:
                newest, out = action.batch, out + 1
                assert action.cut == cut_now, "only a RECUT moves the cut"
            elif action.kind == APPLY:
                trains = action.cut is None or party.costs.cuts[action.cut].front_trains
                staleness.append(newest - action.batch if trains else 0)
                assert newest - action.batch <= party.limit(newest)
                out -= 1
            elif action.kind == ActionKind.RECUT:
                assert out == 0, "something was in flight while the cut moved"
                assert action.batch == newest + 1 and action.cut != cut_now
                cut_now = action.cut
        report = timeline.parties[index]
        assert report.staleness == tuple(staleness) and len(staleness) == num_batches
        assert report.compute_s + report.idle_s == pytest.approx(timeline.duration_s, abs=1e-6)
        assert report.duration_s <= timeline.duration_s


@settings(max_examples=50)
@given(st.data())
def test_staleness_never_exceeds_the_window_and_every_batch_is_done_once_in_order(
    data: st.DataObject,
) -> None:
    cloud = data.draw(CLOUDS)
    reverse = cloud == "own" and data.draw(st.booleans())
    where = data.draw(st.integers(0, 2))
    parties = [
        Party(
            costs=data.draw(costs()),
            bandwidth_profile=data.draw(profiles()),
            split_plan=SplitPlan(cut=where, bits=data.draw(st.sampled_from([4, 8, 32]))),
            window=data.draw(schedules()),
        )
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    first, num_batches = data.draw(st.integers(0, 50)), data.draw(st.integers(1, 30))
    timeline = simulate_split(
        parties,
        num_batches,
        first,
        cloud=cloud,
        start_s=data.draw(st.floats(0, 30)),
        reverse=reverse,
    )
    check(timeline, parties, first, num_batches)
    if cloud != "own":
        steps = [(each.batch, each.party) for each in timeline.actions if each.kind == STEP]
        assert steps == sorted(steps), "the shared half takes batch by batch, party by party"
    for party, report in zip(parties, timeline.parties, strict=True):
        up = party.costs.feature_bytes(where, party.split_plan.bits)
        down = party.costs.gradient_bytes(where)
        up, down = (down, up) if reverse else (up, down)
        assert report.up_bytes == pytest.approx(num_batches * up)
        assert report.down_bytes == pytest.approx(num_batches * down)


@settings(max_examples=50)
@given(data=st.data(), reverse=st.booleans(), wishes=WISHES)
def test_the_cut_moves_only_while_nothing_is_in_flight(
    data: st.DataObject,
    reverse: bool,
    wishes: list[SplitPlan | None],
) -> None:
    decider = Wandering(wishes)
    party = Party(
        costs=data.draw(costs()),
        bandwidth_profile=data.draw(profiles()),
        window=data.draw(schedules()),
        split_plan=SplitPlan(cut=data.draw(st.none() | st.integers(0, 2))),
        decider=decider,
    )
    timeline = simulate_split(
        [party], 40, 5, reverse=reverse, cloud=data.draw(CLOUDS if not reverse else st.just("own"))
    )
    check(timeline, [party], 5, 40)
    assert decider.asked == list(range(5, 45)), "asked once before every batch"
    current = placed(party.split_plan)
    moves = {move.batch: move for move in timeline.parties[0].moves}
    acts = by_batch(timeline, 0)
    for batch in range(5, 45):
        wish = wishes[batch % len(wishes)]
        assert (batch in moves) == (wish is not None and placed(wish) != current)
        if batch in moves and wish is not None:
            move = moves[batch]
            assert (placed(move.old), placed(move.new)) == (current, placed(wish))
            assert move.drain_s >= 0 and move.migration_s >= 0
            current = placed(wish)
        assert (acts[batch][0].cut, acts[batch][0].bits) == current
    recuts = [action.batch for action in timeline.actions if action.kind == ActionKind.RECUT]
    assert recuts == [batch for batch, move in moves.items() if move.old.cut != move.new.cut]


def placed(split_plan: SplitPlan) -> tuple[int | None, int]:
    return split_plan.cut, split_plan.bits


@settings(max_examples=50)
@given(data=st.data(), reverse=st.booleans())
def test_all_happens_as_early_as_its_order_allows(data: st.DataObject, reverse: bool) -> None:
    """A recurrence over the front half's own order: a server waits only for its input, or the link for its turn."""
    party = Party(
        costs=data.draw(costs()),
        bandwidth_profile=data.draw(profiles()),
        window=data.draw(schedules()),
        split_plan=SplitPlan(cut=1, bits=8),
    )
    start_s = data.draw(st.sampled_from([0.0, 7.5]))
    timeline = simulate_split([party], 25, reverse=reverse, start_s=start_s)
    out, back = ("down", "up") if reverse else ("up", "down")
    link_, late_s = party.bandwidth_profile, party.bandwidth_profile.latency_s
    front_s = begun_s = out_s = cloud_s = back_s = start_s
    gradient_s: dict[int, float] = {}
    step_s: dict[int, float] = {}
    for action, time_s in zip(timeline.actions, timeline.times_s, strict=True):
        batch, split_plan = action.batch, SplitPlan(cut=1, bits=8, window=party.limit(action.batch))
        one = batch_times(party.costs, split_plan, reverse=reverse)
        if action.kind == FORWARD:
            # Not while the features of another batch wait for the link.
            expected_s = front_s = max(front_s, begun_s) + one.forward_s
            begun_s = max(out_s, front_s)
            out_s = link_.passed_s(out, begun_s, one.feature_bytes)
            cloud_s = max(cloud_s, out_s + late_s, front_s + one.sending_s) + one.step_s
            step_s[batch] = cloud_s
            back_s = link_.passed_s(back, max(back_s, cloud_s), one.gradient_bytes)
            gradient_s[batch] = max(back_s + late_s, cloud_s + one.receiving_s)
            front_s += one.sending_s + one.receiving_s
        elif action.kind == STEP:
            expected_s = step_s[batch]
        else:
            expected_s = front_s = max(front_s, gradient_s[batch]) + one.apply_s
        assert time_s + start_s == pytest.approx(expected_s, rel=1e-9, abs=1e-9)


def phases_of(
    one: SplitCosts, where: int, bits: int, window: int, rates: LinkRates
) -> tuple[list[float], float]:
    """T1 to T4 and T_Σ by hand."""
    layer, late_s = one.cuts[where], rates.latency_s
    up_bytes = 16.0 + 8.0 + math.ceil(layer.feature_elements * bits / 8)
    down_bytes = 16.0 + 4.0 * layer.feature_elements
    passes_s = layer.edge_forward_s * (2 if window else 1) + layer.edge_backward_s
    codec_s = layer.feature_elements * (0.001 if bits == 8 else 0.0)
    layers_s = passes_s + one.edge_s_per_batch + codec_s
    sent_s, received_s = up_bytes * one.edge_s_per_byte, down_bytes * one.edge_s_per_byte
    up_s, down_s = up_bytes / rates.up_bytes_per_s, down_bytes / rates.down_bytes_per_s
    cloud_s = layer.cloud_s + (up_bytes + down_bytes) * one.cloud_s_per_byte
    waits_s = max(up_s + late_s, sent_s) + max(down_s + late_s, received_s)
    four = [layers_s + sent_s + received_s, up_s, cloud_s, down_s]
    return four, layers_s + cloud_s + waits_s


LATENCIES = st.sampled_from([0.0, 0.5, 4.0])
RATES = st.builds(link, st.floats(30, 5000), st.floats(30, 5000), LATENCIES)


def constant_of(one: SplitCosts, split_plan: SplitPlan, rates: LinkRates) -> Party:
    return Party(costs=one, bandwidth_profile=constant(*astuple(rates)), split_plan=split_plan)


@settings(max_examples=4)
@given(
    one=costs(frozen=False),
    where=st.integers(0, 2),
    bits=st.sampled_from([8, 32]),
    window=st.integers(1, 7),
    rates=RATES,
)
def test_constant_rates_give_the_duration_of_f26(
    one: SplitCosts, where: int, bits: int, window: int, rates: LinkRates
) -> None:
    num_batches, split_plan = 1500, SplitPlan(cut=where, bits=bits, window=window)
    four, total_s = phases_of(one, where, bits, window, rates)
    package = phases(one, split_plan, rates)
    assert (max(four), total_s) == pytest.approx((package.longest_s, package.total_s))
    timeline = simulate_split([constant_of(one, split_plan, rates)], num_batches)
    formula_s = (num_batches - 1) * max(max(four), total_s / (window + 1)) + total_s
    assert timeline.duration_s == pytest.approx(formula_s, rel=0.02)
    # No server can be faster than its own work, and a batch waits for the update of the one K + 1 before it.
    least_s = max(
        num_batches * four[0],
        (num_batches - 1) * max(four[1:]) + total_s,
        math.ceil(num_batches / (window + 1)) * total_s,
    )
    assert timeline.duration_s >= least_s * (1 - 1e-9)
    (party,) = timeline.parties
    busy_s = (party.compute_s, party.sending_s, timeline.cloud_busy_s, party.receiving_s)
    assert busy_s == pytest.approx([num_batches * each for each in four], abs=1e-6)


@settings(max_examples=60)
@given(
    one=costs(frozen=False),
    where=st.integers(0, 2),
    window=st.integers(0, 7),
    rates=RATES,
    num_batches=st.integers(1, 80),
    data=st.data(),
)
def test_groups_wait_for_each_other_and_take_their_formula(
    one: SplitCosts,
    where: int,
    window: int,
    rates: LinkRates,
    num_batches: int,
    data: st.DataObject,
) -> None:
    """A batch goes forward with nothing of an earlier group in flight; also from the middle of a group on."""
    schedule, plan = WindowSchedule(steps=((0.0, window),), grouped=True), SplitPlan(cut=where)
    party = replace(
        constant_of(one, replace(plan, window=window, grouped=True), rates),
        in_flight_limit=lambda batch: schedule.limit(batch, 200),
    )
    first = data.draw(st.integers(0, 20))
    timeline = simulate_split([party], num_batches, first)
    in_flight: list[int] = []
    for action in timeline.actions:
        if action.kind == FORWARD:
            assert all(each // (window + 1) == action.batch // (window + 1) for each in in_flight)
            in_flight.append(action.batch)
        elif action.kind == APPLY:
            in_flight.remove(action.batch)
    if first % (window + 1):
        return
    times = phases(one, replace(plan, window=window), rates)
    formula_s = training_s(times, num_batches, window, grouped=True)
    # A lower bound: an edge with few batches in a group may wait for the first of them although it is the slowest.
    assert formula_s * (1 - 1e-9) <= timeline.duration_s <= 1.5 * formula_s
    if times.longest_s > times.edge_s:
        assert timeline.duration_s <= 1.1 * formula_s


@settings(max_examples=40)
@given(
    one=costs(frozen=False),
    where=st.integers(0, 2),
    bits=st.sampled_from([8, 32]),
    rates=RATES,
    num_batches=st.integers(1, 100),
    reverse=st.booleans(),
)
def test_a_window_of_0_takes_the_sum_of_all_phases(
    one: SplitCosts, where: int, bits: int, rates: LinkRates, num_batches: int, reverse: bool
) -> None:
    split_plan = SplitPlan(cut=where, bits=bits)
    _, total_s = phases_of(one, where, bits, 0, rates)
    if reverse:
        total_s = phases(one, split_plan, rates, reverse=True).total_s
    party = constant_of(one, split_plan, rates)
    timeline = simulate_split([party], num_batches, reverse=reverse)
    assert timeline.duration_s == pytest.approx(num_batches * total_s, rel=1e-9)
    assert set(timeline.parties[0].staleness) == {0}


@settings(max_examples=40)
@given(
    one=costs(),
    where=st.none() | st.integers(0, 2),
    window=st.integers(0, 5),
    reverse=st.booleans(),
    rates=RATES,
)
def test_the_work_of_a_batch_sums_up_to_its_phases(
    one: SplitCosts, where: int | None, window: int, reverse: bool, rates: LinkRates
) -> None:
    split_plan = SplitPlan(cut=where, bits=8, window=window)
    expected = phases(one, split_plan, rates, reverse=reverse)
    batch = batch_times(one, split_plan, reverse=reverse)
    front_s = batch.forward_s + batch.sending_s + batch.receiving_s + batch.apply_s
    ends = (batch.step_s, front_s) if reverse and not batch.alone else (front_s, batch.step_s)
    assert ends == pytest.approx((expected.edge_s, expected.cloud_s))


def tiny(
    forward_s: float = 1.0, backward_s: float = 1.0, cloud_s: float = 1.0, **changes: Any
) -> SplitCosts:
    cuts = (cut(index, forward_s, backward_s, cloud_s, 25) for index in range(2))
    return table(*cuts, header_bytes=0.0, **changes)


SLOW = link(100.0)


def party_of(
    one: SplitCosts | None = None, window: int = 0, rates: LinkRates = SLOW, cut: int = 0
) -> Party:
    return constant_of(one or tiny(), SplitPlan(cut=cut, window=window), rates)


def test_parties_do_not_slow_each_other_down_but_for_what_they_share() -> None:
    fast = party_of(tiny(0.1, 0.1, 1.0), 4, link(1e4))
    slow = replace(fast, costs=tiny(2.0, 2.0, 1.0))
    own = simulate_split([fast, slow], 200)
    for party, found in zip((fast, slow), own.parties, strict=True):
        assert found.duration_s == simulate_split([party], 200).duration_s
    turns = simulate_split([fast, fast], 200, cloud="turns")
    assert turns.duration_s == pytest.approx(400, rel=0.02)
    joined = simulate_split([fast, slow], 200, cloud="joined")
    assert joined.duration_s == pytest.approx(own.parties[1].duration_s, rel=0.02)
    assert joined.cloud_busy_s == pytest.approx(200)
    # The fast one is ahead by all that the window allows.
    assert max(joined.parties[0].staleness) == 4


def test_what_moves_takes_the_link_that_it_travels() -> None:
    plans = [SplitPlan(cut=where) for where in (0, None, 1)]
    party = replace(
        party_of(tiny(model_weight_bytes=1000.0), 0, link(1e6, 5e6, 0.5), 1),
        decider=Wandering([None, *plans]),
    )
    moves = simulate_split([party], 4).parties[0].moves
    # The last one is behind the probe by which the edge alone looked.
    wanted_s = (100 / 1e6, 900 / 5e6, (PROBE_BYTES + 800) / 1e6)
    for batch, move, seconds in zip((1, 2, 3), moves, wanted_s, strict=True):
        assert (move.batch, move.migration_s) == (batch, pytest.approx(seconds + 0.5))
    turned = replace(party, decider=Wandering([None, SplitPlan(cut=0)]))
    (move,) = simulate_split([turned], 2, reverse=True).parties[0].moves
    assert move.migration_s == pytest.approx(100 / 5e6 + 0.5)


class ByRate:
    """Cuts early while the link is good, late while it is not."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def decide(
        self, batch: int, rates: LinkRates, current: SplitPlan, window: int, edge_speed: float = 1.0
    ) -> SplitPlan:
        rate = rates.up_bytes_per_s
        self.seen.append(rate)
        return SplitPlan(cut=None if rate < 500 else 0 if rate > 2000 else 1)


def test_the_decider_sees_what_the_link_carries_even_from_an_edge_that_trains_alone() -> None:
    parts = [(400.0, factor * 1000.0, factor * 4000.0) for factor in (1.0, 4.0, 1.0, 0.2, 1.0)]
    profile = segments([*parts, (100.0, 0.0, 0.0), (400.0, 1000.0, 4000.0)], latency_s=0.025)
    cuts = (cut(i, 0.5, 0.5, 0.5, 2500) for i in range(2))
    party = Party(
        costs=table(*cuts, model_weight_bytes=1000.0),
        bandwidth_profile=profile,
        split_plan=SplitPlan(cut=1, window=2),
        decider=(decider := ByRate()),
    )
    timeline = simulate_split([party], 500)
    check(timeline, [party], 0, 500)
    assert [move.new.cut for move in timeline.parties[0].moves][:4] == [0, 1, None, 1]
    assert min(decider.seen) < 500


@pytest.mark.parametrize("reverse", [False, True])
def test_a_link_that_is_lost_for_good_is_one_line(reverse: bool) -> None:
    profile = segments([(20.0, 100.0, 100.0), (1.0, 0.0, 100.0)])
    party = replace(party_of(window=3), bandwidth_profile=profile)
    named = ("party 0", "up link")
    refused(lambda: simulate_split([party], 100, reverse=reverse), *named, error=SocflowerError)


BROAD = Wandering([None])
ALONE = Wandering([SplitPlan(cut=None)])


@pytest.mark.parametrize(
    ("change", "others", "named"),
    [
        ({}, None, ["parties"]),
        ({"num_batches": 0}, {}, ["num_batches = 0"]),
        ({"first_batch": -1}, {}, ["first_batch = -1"]),
        ({"cloud": "ours"}, {}, ["cloud", "'ours'"]),
        ({"cloud": "joined", "reverse": True}, {}, ["reverse", "'joined'"]),
        ({"cloud": "turns", "cloud_processors": 2}, {}, ["'turns'", "cloud_processors = 2"]),
        ({"cloud_processors": 0}, {}, ["cloud_processors = 0"]),
        ({"cloud": "turns"}, {"split_plan": SplitPlan(cut=None)}, ["'turns'", "edge"]),
        ({"cloud": "turns"}, {"split_plan": SplitPlan(cut=1)}, ["same cut"]),
        ({"cloud": "turns"}, {"decider": BROAD}, ["'turns'", "decider"]),
        ({"cloud": "turns"}, {"away": (range(3),)}, ["'turns'", "away"]),
        ({}, {"split_plan": SplitPlan(cut=7)}, ["cut 7", "0 to 1"]),
        ({}, {"decider": ALONE}, ["model_weight_bytes"]),
        ({"num_batches": 8}, {"away": (range(3),)}, ["batch 3", "0 to 7"]),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    change: dict[str, Any], others: dict[str, Any] | None, named: list[str]
) -> None:
    parties = [] if others is None else [party_of(), replace(party_of(), **others)]
    settings_ = {"num_batches": 3, **change}
    refused(lambda: simulate_split(parties, **settings_), *named)


def test_one_party_must_be_there() -> None:
    away = replace(party_of(), away=(range(8),))
    refused(lambda: simulate_split([away], 8), "away", "batch 0")


# ------------------------------------------------------------------------------------------- what edges share


def edges(count: int, *, up_bytes_per_s: float = 1000.0, cloud_s: float = 0.5) -> list[Party]:
    one = table(cut(0, 0.01, 0.01, cloud_s, 100), label_bytes=8.0, header_bytes=16.0)
    split_plan = SplitPlan(cut=0, bits=32, window=6)
    return [constant_of(one, split_plan, link(up_bytes_per_s, 1e6))] * count


@pytest.mark.parametrize("count", [1, 2, 5])
def test_edges_behind_one_uplink_share_it(count: int) -> None:
    """Each sends 424 bytes a batch over 1,000 B/s of its own and an even part of 1,500 B/s."""
    timeline = simulate_split(edges(count, cloud_s=0.0), 400, uplink=constant(1500.0, 1e6, 0.25))
    wanted_s = 400 * 424.0 / min(1000.0, 1500.0 / count)
    assert timeline.duration_s == pytest.approx(wanted_s, rel=0.01)
    for party in timeline.parties:
        assert party.sending_s == pytest.approx(wanted_s, rel=0.02)
    assert timeline.usage.num_bytes[Tier.WAN] == pytest.approx(count * 400 * (424.0 + 416.0))


@pytest.mark.parametrize(("processors", "at_a_time"), [(1, 1), (2, 2), (5, 4), (None, 4)])
def test_a_cloud_serves_as_many_edges_at_a_time_as_it_has_processors(
    processors: int | None, at_a_time: int
) -> None:
    timeline = simulate_split(edges(4, up_bytes_per_s=1e6), 100, cloud_processors=processors)
    assert timeline.duration_s == pytest.approx(100 * 0.5 * 4 / at_a_time, rel=0.02)
    assert timeline.cloud_busy_s == pytest.approx(4 * 100 * 0.5)
    ends = [party.duration_s for party in timeline.parties]
    assert max(ends) - min(ends) < 0.05 * max(ends), "they are served in turn"


@settings(max_examples=20)
@given(costs=costs(), profile=profiles(), window=schedules(), left=st.integers(0, 7))
def test_an_edge_that_leaves_does_the_first_batches_and_the_others_do_as_before(
    costs: SplitCosts, profile: BandwidthProfile, window: Callable[[int], int], left: int
) -> None:
    split_plan = SplitPlan(cut=1, bits=8, window=0)
    party = Party(costs=costs, bandwidth_profile=profile, split_plan=split_plan, window=window)
    leaving = replace(party, away=(range(16 + left, 24),))
    whole, both = (simulate_split(each, 8, 16) for each in ([party], [party, leaving]))
    done = list(zip(both.actions, both.times_s, strict=True))
    of_first = [each for each in done if not each[0].party]
    assert of_first == list(zip(whole.actions, whole.times_s, strict=True))
    applied = [each.batch for each, _ in done if each.party and each.kind is APPLY]
    assert applied == list(range(16, 16 + left))


def test_rounds_end_at_the_epochs_that_are_given() -> None:
    assert round_ends([0.5, 1.0, 1.25, 2.0], 10, 2) == (5, 10, 12, 20)


@pytest.mark.parametrize(
    ("round_epochs", "named"),
    [
        ([0.01, 1.0, 2.0], ["round 1", "0.01", "10"]),
        ([0.5, 0.5, 2.0], ["round 2", "0.5"]),
        ([0.5, 1.0], ["1 of 2 epochs"]),
        ([], ["0 of 2 epochs"]),
    ],
)
def test_rounds_without_a_batch_or_an_end_are_refused(
    round_epochs: list[float], named: list[str]
) -> None:
    refused(lambda: round_ends(round_epochs, 10, 2), *named)
