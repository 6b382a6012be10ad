"""An interval on the clock: its phases, together, are its steps."""

from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.cluster import Compute, Usage, parse_cluster
from socflower.hierarchy import IntervalCosts, SyncInterval, sync_schedule
from socflower.hierarchy.exchange.coding_bytes import LargestValues, gradient_coding
from socflower.hierarchy.exchange.gradients import GradientExchange
from socflower.hierarchy.exchange.models import ModelExchange
from socflower.precision.processor_costs import MixedPricing
from socflower.sim import EventClock
from tests.hierarchy.toy_trainings import interval_costs
from tests.toy_clusters import same_usage, toy_profile

CLUSTER = parse_cluster({"boards": [2, 2]})
(INTERVAL,) = sync_schedule(1, 10, 1.0)

ALPHAS = st.floats(0.0, 1.0)


def work(**changes: Any) -> IntervalCosts:
    """Two groups of two, ten steps an epoch, which is the only interval."""
    values = {"profile": toy_profile(1e8, 4e5, 2), "pricing": MixedPricing(rule="paper")} | changes
    return interval_costs(values.pop("cluster", CLUSTER), values.pop("num_groups", 2), **values)


def usage(of: IntervalCosts, phases: Any = (), interval: SyncInterval = INTERVAL) -> Usage:
    return of.run(interval, EventClock(CLUSTER), phases)


@given(alpha=ALPHAS)
def test_phases_that_say_what_the_pricing_says_cost_the_same(alpha: float) -> None:
    pricing = MixedPricing(rule="paper", alpha=alpha)
    same = work(pricing=pricing)
    expected = usage(same)
    same_usage(usage(same, [(10, {})]), expected)
    same_usage(usage(same, [(10, {0: pricing, 1: pricing})]), expected)
    same_usage(usage(same, [(10, {1: pricing})]), expected)
    # At the same shares, pricing all groups by themselves is pricing the whole.
    other = work(pricing=MixedPricing(rule="paper", alpha=1.0 - alpha))
    same_usage(usage(other, [(10, {0: pricing, 1: pricing})]), expected)


@given(first=st.tuples(ALPHAS, ALPHAS), second=st.tuples(ALPHAS, ALPHAS), cut=st.integers(1, 9))
def test_two_phases_cost_the_sum_of_both_and_one_synchronisation(
    first: tuple[float, float],
    second: tuple[float, float],
    cut: int,
) -> None:
    """Against the two phases on the clock by hand; pipelines drain between them, and leaders wait for each other."""
    of, clock = work(models=ModelExchange(kind="ring")), EventClock(CLUSTER)
    pricings = [
        {group_id: MixedPricing(rule="paper", alpha=alpha) for group_id, alpha in enumerate(alphas)}
        for alphas in (first, second)
    ]
    expected = clock.run(of.step(pricings=pricings[0]), repeat=cut)
    expected += clock.run(of.step(pricings=pricings[1]), repeat=10 - cut)
    synchronisation = of.synchronisation()
    assert synchronisation is not None
    expected += clock.run(synchronisation)
    same_usage(usage(of, [(cut, pricings[0]), (10 - cut, pricings[1])]), expected)


def test_a_cut_where_nothing_changes_costs_nothing() -> None:
    same_usage(usage(work(), [(4, {}), (6, {})]), usage(work()))


def test_one_slow_group_does_not_slow_the_others_steps() -> None:
    """It ends later; only the synchronisation waits for it. In a star the other's model is at the hub by then."""
    on_cpu = MixedPricing(rule="paper", cpu_share=1.0)
    slow, all_slow = [(10, {1: on_cpu})], [(10, {0: on_cpu, 1: on_cpu})]
    for leaders, saved in (("ring", 0.0), ("star", 1.0)):
        of = work(models=ModelExchange(kind=leaders))
        exchange = of.exchange
        upload_s = exchange.num_messages * CLUSTER.message_s
        upload_s += exchange.num_bytes / CLUSTER.hub_bytes_per_s
        slow_s, all_slow_s = usage(of, slow).duration_s, usage(of, all_slow).duration_s
        assert usage(of).duration_s < slow_s
        assert all_slow_s - slow_s == pytest.approx(saved * upload_s)
        assert usage(of, slow).soc_seconds["compute"] < usage(of, all_slow).soc_seconds["compute"]


def test_shares_follow_the_rates_of_the_pricing_whatever_the_phases_say() -> None:
    """F4: the clients split batches before the alphas of the interval are known."""
    mixed = parse_cluster({}, [{"device": "snapdragon-865"}, {"device": "raspberry-pi-4b"}])
    of = work(cluster=mixed, num_groups=1)
    shares = dict(of.shares)
    assert shares[0] > shares[1] and sum(shares.values()) == 32
    rates = [MixedPricing(rule="paper").rate("toy", mixed.device_of(soc)) for soc in (0, 1)]
    assert shares[0] / 32 == pytest.approx(rates[0] / sum(rates), abs=1 / 32)
    of.step(pricings={0: MixedPricing(rule="paper", alpha=0.0)})
    assert dict(of.shares) == shares


@given(first=st.integers(0, 12), num_steps=st.integers(1, 20), warm_up_steps=st.integers(0, 16))
def test_steps_of_a_warm_up_cost_what_each_stage_sends(
    first: int, num_steps: int, warm_up_steps: int
) -> None:
    """Against the stages on the clock by hand."""
    coding = LargestValues(ratio=0.01, warm_up_steps=warm_up_steps)
    of = work(gradients=GradientExchange(coding=coding), models=ModelExchange(kind="ring"))
    interval = replace(INTERVAL, first_step=first, num_steps=num_steps)
    clock, expected = EventClock(CLUSTER), Usage()
    for ratio, steps in groupby(range(first, first + num_steps), coding.ratio_at):
        run = list(steps)
        assert ratio == coding.ratio_at(run[0])
        expected += clock.run(of.step(step=run[0]), repeat=len(run))
    synchronisation = of.synchronisation()
    assert synchronisation is not None
    same_usage(usage(of, (), interval), expected + clock.run(synchronisation))


@pytest.mark.parametrize("spec", ["dgc", "dgc ratio=1", "fp16"])
def test_values_are_chosen_in_the_time_of_their_memory_traffic(spec: str) -> None:
    """Before each member sends, also where buckets overlap; formats of fewer bits are converted for nothing."""
    coding = gradient_coding(spec)
    of = work(gradients=GradientExchange(coding=coding), overlap_buckets=2)
    group = of.plan.groups[0].members
    buckets = [bucket.exchange for bucket in of.exchange.buckets(2)]
    encoded_s = sum(coding.memory_bytes(bucket, len(group)) for bucket in buckets)
    encoded_s /= CLUSTER.device_of(0).memory_bytes_per_s
    assert (encoded_s > 0) == (spec == "dgc")
    for soc in group:
        found = [
            task.seconds
            for task in of.step().tasks
            if isinstance(task, Compute) and task.device == soc and "encode" in task.name
        ]
        assert sum(found) == pytest.approx(encoded_s)


def test_compressed_gradients_take_less_time_energy_and_bytes() -> None:
    exact, halves, bytes_ = (
        usage(
            work(
                gradients=GradientExchange(coding=gradient_coding(name)),
                profile=toy_profile(1e8, 4e7, 2),
            )
        )
        for name in ("none", "fp16", "int8")
    )
    for before, after in ((exact, halves), (halves, bytes_)):
        assert after.duration_s < before.duration_s
        assert after.total_energy_j < before.total_energy_j
        assert sum(after.num_bytes.values()) < sum(before.num_bytes.values())
