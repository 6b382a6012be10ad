"""The virtual timeline: staleness, order, and F26's duration; times against a recurrence over its own actions."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

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
from socflower.edgecloud.plan.cuts import CutCost, SplitCosts, SplitPlan
from socflower.edgecloud.plan.party import Party
from socflower.edgecloud.plan.phases import batch_times, phases
from socflower.edgecloud.plan.split_pipeline import PROBE_BYTES, Timeline, round_ends
from socflower.edgecloud.plan.timeline_actions import (
    Action,
    ActionKind,
    decode_actions,
    encode_actions,
)
from socflower.errors import ConfigError, SocflowerError
from tests.split_edges import simulate_split

SECONDS = st.integers(0, 40).map(lambda part: part / 8)
CLOUDS = st.sampled_from(["own", "turns", "joined"])


def cut(
    index: int,
    forward_s: float,
    backward_s: float,
    cloud_s: float,
    elements: int,
    trains: bool = True,
) -> CutCost:
    return CutCost(
        name=f"layer{index}",
        edge_forward_s=forward_s,
        edge_backward_s=backward_s,
        cloud_s=cloud_s,
        feature_elements=elements,
        front_weight_bytes=100.0 * (index + 1),
        front_trains=trains,
    )


@st.composite
def costs(draw: st.DrawFn, *, frozen: bool = True) -> SplitCosts:
    cuts = tuple(
        cut(
            index,
            draw(SECONDS),
            draw(SECONDS),
            draw(SECONDS),
            draw(st.integers(1, 300)),
            not (frozen and draw(st.booleans())),
        )
        for index in range(3)
    )
    return SplitCosts(
        model="tiny",
        batch_size=8,
        cuts=cuts,
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
            assert [action.kind for action in three] == [
                ActionKind.FORWARD,
                ActionKind.STEP,
                ActionKind.APPLY,
            ]
            assert len({(action.cut, action.bits, action.window) for action in three}) == 1
            assert three[0].window == party.limit(batch)
        for kind in (ActionKind.FORWARD, ActionKind.STEP, ActionKind.APPLY):
            order = [
                action.batch
                for action in timeline.actions
                if (action.party, action.kind) == (index, kind)
            ]
            assert order == sorted(order)
        newest, out, staleness = first - 1, 0, []
        now = (party.split_plan.cut, party.split_plan.bits)
        for action in timeline.actions:
            if action.party != index:
                continue
            if action.kind == ActionKind.FORWARD:
                newest, out = action.batch, out + 1
                assert action.cut == now[0], "only a RECUT moves the cut"
            elif action.kind == ActionKind.APPLY:
                trains = action.cut is None or party.costs.cuts[action.cut].front_trains
                staleness.append(newest - action.batch if trains else 0)
                assert newest - action.batch <= party.limit(newest)
                out -= 1
            elif action.kind == ActionKind.RECUT:
                assert out == 0, "something was in flight while the cut moved"
                assert action.batch == newest + 1 and action.cut != now[0]
                now = (action.cut, action.bits)
        report = timeline.parties[index]
        assert report.staleness == tuple(staleness)
        assert len(report.staleness) == num_batches
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
        apply_first=data.draw(st.booleans()),
    )
    check(timeline, parties, first, num_batches)
    steps = [
        (action.batch, action.party)
        for action in timeline.actions
        if action.kind == ActionKind.STEP
    ]
    if cloud != "own":
        assert steps == sorted(steps), "the shared half takes batch by batch, party by party"
    for index, party in enumerate(parties):
        up, down = (
            party.costs.feature_bytes(where, party.split_plan.bits),
            party.costs.gradient_bytes(where),
        )
        up, down = (down, up) if reverse else (up, down)
        assert timeline.parties[index].up_bytes == pytest.approx(num_batches * up)
        assert timeline.parties[index].down_bytes == pytest.approx(num_batches * down)


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
    current = (party.split_plan.cut, party.split_plan.bits)
    moves = {move.batch: move for move in timeline.parties[0].moves}
    for batch in range(5, 45):
        wish = wishes[batch % len(wishes)]
        if wish is not None and (wish.cut, wish.bits) != current:
            assert (
                (moves[batch].old.cut, moves[batch].old.bits),
                (moves[batch].new.cut, moves[batch].new.bits),
            ) == (current, (wish.cut, wish.bits))
            assert moves[batch].drain_s >= 0 and moves[batch].migration_s >= 0
            current = (wish.cut, wish.bits)
        else:
            assert batch not in moves
        assert (
            by_batch(timeline, 0)[batch][0].cut == current[0]
            and by_batch(timeline, 0)[batch][0].bits == current[1]
        )
    recuts = [action.batch for action in timeline.actions if action.kind == ActionKind.RECUT]
    assert recuts == [batch for batch, move in moves.items() if move.old.cut != move.new.cut]


@settings(max_examples=50)
@given(data=st.data(), reverse=st.booleans(), apply_first=st.booleans())
def test_all_happens_as_early_as_its_order_allows(
    data: st.DataObject, reverse: bool, apply_first: bool
) -> None:
    """A recurrence over the front half's own order: no server waits while it could work."""
    party = Party(
        costs=data.draw(costs()),
        bandwidth_profile=data.draw(profiles()),
        window=data.draw(schedules()),
        split_plan=SplitPlan(cut=1, bits=8),
    )
    start_s = data.draw(st.sampled_from([0.0, 7.5]))
    timeline = simulate_split(
        [party], 25, reverse=reverse, apply_first=apply_first, start_s=start_s
    )
    out, back = ("down", "up") if reverse else ("up", "down")
    front_s = out_s = cloud_s = back_s = start_s
    gradient_s: dict[int, float] = {}
    step_s: dict[int, float] = {}
    for action, time_s in zip(timeline.actions, timeline.times_s, strict=True):
        one = batch_times(
            party.costs, SplitPlan(cut=1, bits=8, window=party.limit(action.batch)), reverse=reverse
        )
        if action.kind == ActionKind.FORWARD:
            front_s += one.forward_s
            expected_s = front_s
            out_s = party.bandwidth_profile.passed_s(out, max(out_s, front_s), one.feature_bytes)
            cloud_s = (
                max(cloud_s, out_s + party.bandwidth_profile.latency_s, front_s + one.sending_s)
                + one.step_s
            )
            step_s[action.batch] = cloud_s
            back_s = party.bandwidth_profile.passed_s(
                back, max(back_s, cloud_s), one.gradient_bytes
            )
            gradient_s[action.batch] = max(
                back_s + party.bandwidth_profile.latency_s, cloud_s + one.receiving_s
            )
            front_s += one.sending_s + one.receiving_s
        elif action.kind == ActionKind.STEP:
            expected_s = step_s[action.batch]
        else:
            front_s = max(front_s, gradient_s[action.batch]) + one.apply_s
            expected_s = front_s
        assert time_s + start_s == pytest.approx(expected_s, rel=1e-9, abs=1e-9)


def phases_of(
    one: SplitCosts,
    where: int,
    bits: int,
    window: int,
    rates: tuple[float, float, float],
) -> tuple[list[float], float]:
    """T1 to T4 and T_Σ by hand."""
    layer = one.cuts[where]
    up_bytes = 16.0 + 8.0 + math.ceil(layer.feature_elements * bits / 8)
    down_bytes = 16.0 + 4.0 * layer.feature_elements
    layers_s = (
        layer.edge_forward_s * (2 if window else 1)
        + layer.edge_backward_s
        + one.edge_s_per_batch
        + layer.feature_elements * (0.001 if bits == 8 else 0.0)
    )
    for_bytes_s = up_bytes * one.edge_s_per_byte, down_bytes * one.edge_s_per_byte
    cloud_s = layer.cloud_s + (up_bytes + down_bytes) * one.cloud_s_per_byte
    four = [layers_s + sum(for_bytes_s), up_bytes / rates[0], cloud_s, down_bytes / rates[1]]
    return four, (
        layers_s
        + max(four[1] + rates[2], for_bytes_s[0])
        + cloud_s
        + max(four[3] + rates[2], for_bytes_s[1])
    )


RATES = st.tuples(st.floats(30, 5000), st.floats(30, 5000), st.sampled_from([0.0, 0.5, 4.0]))


@settings(max_examples=8)
@given(
    one=costs(frozen=False),
    where=st.integers(0, 2),
    bits=st.sampled_from([8, 32]),
    window=st.integers(1, 7),
    rates=RATES,
)
def test_constant_rates_give_the_duration_of_f26(
    one: SplitCosts,
    where: int,
    bits: int,
    window: int,
    rates: tuple[float, float, float],
) -> None:
    num_batches = 1500
    split_plan = SplitPlan(cut=where, bits=bits, window=window)
    four, total_s = phases_of(one, where, bits, window, rates)
    by_package = phases(
        one,
        split_plan,
        LinkRates(up_bytes_per_s=rates[0], down_bytes_per_s=rates[1], latency_s=rates[2]),
    )
    assert (max(four), total_s) == pytest.approx((by_package.longest_s, by_package.total_s))
    timeline = simulate_split(
        [Party(costs=one, bandwidth_profile=constant(*rates), split_plan=split_plan)], num_batches
    )
    formula_s = (num_batches - 1) * max(max(four), total_s / (window + 1)) + total_s
    assert timeline.duration_s == pytest.approx(formula_s, rel=0.02)
    # No server can be faster than its own work, and a batch waits for the update of the one K + 1 before it.
    least_s = max(
        num_batches * four[0],
        (num_batches - 1) * max(four[1:]) + total_s,
        math.ceil(num_batches / (window + 1)) * total_s,
    )
    assert timeline.duration_s >= least_s * (1 - 1e-9)
    assert timeline.parties[0].compute_s == pytest.approx(num_batches * four[0], abs=1e-6)
    assert timeline.parties[0].sending_s == pytest.approx(num_batches * four[1])
    assert timeline.parties[0].receiving_s == pytest.approx(num_batches * four[3])
    assert timeline.cloud_busy_s == pytest.approx(num_batches * four[2])


@settings(max_examples=40)
@given(
    one=costs(frozen=False),
    where=st.integers(0, 2),
    bits=st.sampled_from([8, 32]),
    rates=RATES,
    num_batches=st.integers(1, 200),
    reverse=st.booleans(),
)
def test_a_window_of_0_takes_the_sum_of_all_phases(
    one: SplitCosts,
    where: int,
    bits: int,
    rates: tuple[float, float, float],
    num_batches: int,
    reverse: bool,
) -> None:
    split_plan = SplitPlan(cut=where, bits=bits)
    _, total_s = phases_of(one, where, bits, 0, rates)
    if reverse:
        total_s = phases(
            one,
            split_plan,
            LinkRates(up_bytes_per_s=rates[0], down_bytes_per_s=rates[1], latency_s=rates[2]),
            reverse=True,
        ).total_s
    timeline = simulate_split(
        [Party(costs=one, bandwidth_profile=constant(*rates), split_plan=split_plan)],
        num_batches,
        reverse=reverse,
    )
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
    one: SplitCosts,
    where: int | None,
    window: int,
    reverse: bool,
    rates: tuple[float, float, float],
) -> None:
    split_plan = SplitPlan(cut=where, bits=8, window=window)
    expected = phases(
        one,
        split_plan,
        LinkRates(up_bytes_per_s=rates[0], down_bytes_per_s=rates[1]),
        reverse=reverse,
    )
    batch = batch_times(one, split_plan, reverse=reverse)
    front_s = batch.forward_s + batch.sending_s + batch.receiving_s + batch.apply_s
    ends = (batch.step_s, front_s) if reverse and not batch.alone else (front_s, batch.step_s)
    assert ends == pytest.approx((expected.edge_s, expected.cloud_s))


def tiny(
    forward_s: float = 1.0, backward_s: float = 1.0, cloud_s: float = 1.0, **changes: float
) -> SplitCosts:
    return SplitCosts(
        model="tiny",
        batch_size=8,
        cuts=tuple(cut(index, forward_s, backward_s, cloud_s, 25) for index in range(2)),
        edge_only_s=5.0,
        header_bytes=0.0,
        **changes,
    )


def test_to_apply_first_bunches_batches_up() -> None:
    """f = 1, an update of 2, 4 s elsewhere, K = 1: taking turns F26's 3.5 s a batch, else 4.5 s."""
    party = Party(
        costs=tiny(1.0, 1.0, 0.0),
        bandwidth_profile=constant(1e9, 1e9, 2.0),
        split_plan=SplitPlan(cut=0, window=1),
    )
    assert simulate_split([party], 1000).duration_s == pytest.approx(3500, rel=0.01)
    assert simulate_split([party], 1000, apply_first=True).duration_s == pytest.approx(
        4500, rel=0.01
    )


def test_three_thousand_batches_of_two_parties() -> None:
    parties = [
        Party(
            costs=tiny(),
            bandwidth_profile=constant(100.0, 100.0),
            split_plan=SplitPlan(cut=0, window=4),
        )
    ] * 2
    timeline = simulate_split(parties, 3_000)
    assert timeline.num_batches / timeline.duration_s == pytest.approx(1 / 3, rel=0.01)
    assert len(timeline.actions) == 18_000


def test_parties_do_not_slow_each_other_down_but_for_what_they_share() -> None:
    fast = Party(
        costs=tiny(0.1, 0.1, 1.0),
        bandwidth_profile=constant(1e4, 1e4),
        split_plan=SplitPlan(cut=0, window=4),
    )
    slow = replace(fast, costs=tiny(2.0, 2.0, 1.0))
    own = simulate_split([fast, slow], 200)
    assert own.parties[0].duration_s == simulate_split([fast], 200).duration_s
    assert own.parties[1].duration_s == simulate_split([slow], 200).duration_s
    assert simulate_split([fast, fast], 200, cloud="turns").duration_s == pytest.approx(
        400, rel=0.02
    )
    joined = simulate_split([fast, slow], 200, cloud="joined")
    assert joined.duration_s == pytest.approx(own.parties[1].duration_s, rel=0.02)
    assert joined.cloud_busy_s == pytest.approx(200)
    assert max(joined.parties[0].staleness) == 4, (
        "the fast one is ahead by all that the window allows"
    )


def test_what_moves_takes_the_link_that_it_travels() -> None:
    party = Party(
        costs=tiny(model_weight_bytes=1000.0),
        bandwidth_profile=constant(1e6, 5e6, 0.5),
        split_plan=SplitPlan(cut=1),
        decider=Wandering([None, SplitPlan(cut=0), SplitPlan(cut=None), SplitPlan(cut=1)]),
    )
    moves = simulate_split([party], 4).parties[0].moves
    assert [(move.batch, move.migration_s) for move in moves] == [
        (1, pytest.approx(100 / 1e6 + 0.5)),
        (2, pytest.approx(900 / 5e6 + 0.5)),
        (3, pytest.approx((PROBE_BYTES + 800) / 1e6 + 0.5)),
    ]  # behind the probe by which the edge alone looked
    reverse = simulate_split(
        [replace(party, decider=Wandering([None, SplitPlan(cut=0)]))], 2, reverse=True
    )
    assert reverse.parties[0].moves[0].migration_s == pytest.approx(100 / 5e6 + 0.5)


class ByRate:
    """Cuts early while the link is good, late while it is not."""

    def __init__(self) -> None:
        self.seen: list[LinkRates] = []

    def decide(
        self, batch: int, rates: LinkRates, current: SplitPlan, window: int, edge_speed: float = 1.0
    ) -> SplitPlan:
        self.seen.append(rates)
        return SplitPlan(
            cut=None if rates.up_bytes_per_s < 500 else 0 if rates.up_bytes_per_s > 2000 else 1
        )


def test_the_decider_sees_what_the_link_carries_even_from_an_edge_that_trains_alone() -> None:
    decider = ByRate()
    parts = [(400.0, factor * 1000.0, factor * 4000.0) for factor in (1.0, 4.0, 1.0, 0.2, 1.0)]
    profile = segments([*parts, (100.0, 0.0, 0.0), (400.0, 1000.0, 4000.0)], latency_s=0.025)
    costs_ = SplitCosts(
        model="tiny",
        batch_size=8,
        cuts=tuple(cut(i, 0.5, 0.5, 0.5, 2500) for i in range(2)),
        edge_only_s=5.0,
        model_weight_bytes=1000.0,
    )
    party = Party(
        costs=costs_,
        bandwidth_profile=profile,
        split_plan=SplitPlan(cut=1, window=2),
        decider=decider,
    )
    timeline = simulate_split([party], 500)
    check(timeline, [party], 0, 500)
    assert [move.new.cut for move in timeline.parties[0].moves][:4] == [0, 1, None, 1]
    assert min(rates.up_bytes_per_s for rates in decider.seen) < 500


@pytest.mark.parametrize("reverse", [False, True])
def test_a_link_that_is_lost_for_good_is_one_line(reverse: bool) -> None:
    profile = segments([(20.0, 100.0, 100.0), (1.0, 0.0, 100.0)])
    party = Party(costs=tiny(), bandwidth_profile=profile, split_plan=SplitPlan(cut=0, window=3))
    with pytest.raises(
        SocflowerError, match="party 0: its up link carries nothing any more"
    ) as caught:
        simulate_split([party], 100, reverse=reverse)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"parties": []}, "no parties"),
        ({"num_batches": 0}, "num_batches = 0"),
        ({"first_batch": -1}, "first_batch = -1"),
        ({"cloud": "ours"}, "cloud = 'ours' is unknown"),
        ({"cloud": "joined", "reverse": True}, "a reverse split"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(change: dict[str, object], complaint: str) -> None:
    party = Party(
        costs=tiny(), bandwidth_profile=constant(100.0, 100.0), split_plan=SplitPlan(cut=0)
    )
    with pytest.raises(ConfigError, match=complaint) as caught:
        simulate_split(**{"parties": [party, party], "num_batches": 3, **change})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"split_plan": SplitPlan(cut=None)}, "an edge alone beside"),
        ({"split_plan": SplitPlan(cut=1)}, "the same cut"),
        ({"decider": Wandering([None])}, "none can move its cut"),
        ({"split_plan": SplitPlan(cut=2)}, "the same cut"),
    ],
)
def test_parties_that_share_a_half_cannot_move_its_cut(
    change: dict[str, object], complaint: str
) -> None:
    party = Party(
        costs=tiny(), bandwidth_profile=constant(100.0, 100.0), split_plan=SplitPlan(cut=0)
    )
    other = replace(party, **change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=complaint):
        simulate_split([party, other], 3, cloud="turns")


def test_windows_cuts_and_weights_that_cannot_be_are_refused() -> None:
    party = Party(
        costs=tiny(), bandwidth_profile=constant(100.0, 100.0), split_plan=SplitPlan(cut=0)
    )
    with pytest.raises(ConfigError, match="batch 2: K = -1"):
        simulate_split([replace(party, window=lambda batch: 1 - batch)], 5)
    with pytest.raises(ConfigError, match="has no cut 7"):
        simulate_split([replace(party, split_plan=SplitPlan(cut=7))], 5)
    with pytest.raises(ConfigError, match="model_weight_bytes is not known"):
        simulate_split([replace(party, decider=Wandering([SplitPlan(cut=None)]))], 5)


# ------------------------------------------------------------------------------------------- what edges share


def edges(count: int, *, up_bytes_per_s: float = 1000.0, cloud_s: float = 0.5) -> list[Party]:
    one = SplitCosts(
        model="tiny",
        batch_size=8,
        cuts=(cut(0, 0.01, 0.01, cloud_s, 100),),
        edge_only_s=1.0,
        label_bytes=8.0,
        header_bytes=16.0,
        model_weight_bytes=1000.0,
    )
    return [
        Party(
            costs=one,
            bandwidth_profile=constant(up_bytes_per_s, 1e6),
            split_plan=SplitPlan(cut=0, bits=32, window=6),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_edges_behind_one_uplink_share_it(count: int) -> None:
    """Each sends 424 bytes a batch over 1,000 B/s of its own and an even part of 1,500 B/s."""
    timeline = simulate_split(edges(count, cloud_s=0.0), 400, uplink=constant(1500.0, 1e6, 0.25))
    rate = min(1000.0, 1500.0 / count)
    assert timeline.duration_s == pytest.approx(400 * 424.0 / rate, rel=0.01)
    for party in timeline.parties:
        assert party.sending_s == pytest.approx(400 * 424.0 / rate, rel=0.02)
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


def test_a_shared_half_has_one_processor() -> None:
    with pytest.raises(
        ConfigError, match="one half and one processor; leave cloud_processors = 2 out"
    ):
        simulate_split(edges(2), 3, cloud="turns", cloud_processors=2)


@settings(max_examples=20)
@given(costs=costs(), profile=profiles(), window=schedules(), left=st.integers(0, 7))
def test_an_edge_that_leaves_does_the_first_batches_and_the_others_do_as_before(
    costs: SplitCosts,
    profile: BandwidthProfile,
    window: Callable[[int], int],
    left: int,
) -> None:
    party = Party(
        costs=costs,
        bandwidth_profile=profile,
        split_plan=SplitPlan(cut=1, bits=8, window=0),
        window=window,
    )
    whole = simulate_split([party], 8, 16)
    with_one_away = simulate_split([party, replace(party, away=(range(16 + left, 24),))], 8, 16)
    assert [
        (action, at_s)
        for action, at_s in zip(with_one_away.actions, with_one_away.times_s, strict=True)
        if not action.party
    ] == list(zip(whole.actions, whole.times_s, strict=True))
    assert [
        action.batch
        for action in with_one_away.actions
        if action.party and action.kind is ActionKind.APPLY
    ] == list(range(16, 16 + left))


def test_an_absence_ends_with_a_round_and_leaves_an_edge_and_every_batch_of_a_shared_half() -> None:
    costs = SplitCosts(
        model="tiny", batch_size=8, cuts=(cut(0, 1.0, 1.0, 1.0, 10),), edge_only_s=3.0
    )
    party = Party(
        costs=costs,
        bandwidth_profile=constant(1e3, 1e3),
        split_plan=SplitPlan(cut=0, bits=8, window=0),
    )
    with pytest.raises(ConfigError, match="until batch 3, within the round of batches 0 to 7"):
        simulate_split([party, replace(party, away=(range(3),))], 8)
    with pytest.raises(ConfigError, match="all parties are away from batch 0 on"):
        simulate_split([replace(party, away=(range(8),))], 8)
    with pytest.raises(ConfigError, match="the back half needs every party's batch"):
        simulate_split([party, replace(party, away=(range(8),))], 8, cloud="turns")


def test_rounds_end_at_the_epochs_that_are_given() -> None:
    assert round_ends([0.5, 1.0, 1.25, 2.0], 10, 2) == (5, 10, 12, 20)


@pytest.mark.parametrize(
    ("round_epochs", "line"),
    [
        ([0.01, 1.0, 2.0], "round 1, to epoch 0.01, would have no batch of the edges' 10 an epoch"),
        ([0.5, 0.5, 2.0], "round 2, to epoch 0.5, would have no batch"),
        ([0.5, 1.0], "end at 1 of 2 epochs"),
        ([], "end at 0 of 2 epochs"),
    ],
)
def test_rounds_without_a_batch_or_an_end_are_refused(round_epochs: list[float], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        round_ends(round_epochs, 10, 2)
