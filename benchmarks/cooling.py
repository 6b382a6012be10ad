"""The gain of cooling: two hours of training on a hot rack under fan policies, in virtual time; the paper's gain.

SoCFlow+ 4.7 states that passive cooling and re-balancing make training 1.59 to 1.77 times as fast as a rack without
control. The governor's clocks bound the gain to 2.84 / 1.80 = 1.58 of the time in which SoCs compute; the time in which
they exchange stays. `limit` is the time at full clocks. Each row starts from a rack at rest, on SoCs that differ
randomly in how well they are cooled (equal in all rows).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from benchmarks.harness import Row, less_is_better, more_is_better, note
from socflower.cluster import (
    FP32,
    Activity,
    Cluster,
    ModelProfile,
    Pricing,
    Usage,
    parse_cluster,
    sustained_rates,
)
from socflower.hierarchy import IntervalCosts, Rebalancing, SyncInterval, plan_groups
from socflower.model_graph.layer_profile import profile_module
from socflower.precision.processor_costs import MixedPricing
from socflower.sim import EventClock
from socflower.strategies.balancer import Balancer
from socflower.thermal.fans.policies import (
    FanPolicy,
    FixedSpeed,
    PassiveCooling,
    PlannedLoad,
    PredictiveCooling,
)
from socflower.thermal.model.dynamics import RackDynamics
from socflower.thermal.model.rack import Rack
from socflower.workloads.models.classifiers import build_model

# What the work takes if nothing gets hot.
COLD_S = 2.0 * 3600.0
NUM_INTERVALS = 24
# Standard deviation of the logarithms of the SoCs' conductances to their boards.
SPREAD = 0.5
HOT_BOARD, HOT_BOARD_AIRFLOW = 2, 0.1
# The clocks fall by this factor, so no policy can gain more.
CLOCKS = 2.84 / 1.80
PAPER = "SoCFlow+ 4.7, times as fast as without control (1.59 to 1.77)"


@dataclass(frozen=True, kw_only=True, slots=True)
class RackWork:
    """One workload on one rack."""

    name: str
    model: str
    num_boards_busy: int
    batch_size: int
    pricing: Pricing = FP32
    socs_per_group: int = 5
    hot_board: bool = False


CASES = (
    *(
        RackWork(
            name=f"{title}, {5 * boards} of 60 SoCs, {what}",
            model=model,
            num_boards_busy=boards,
            batch_size=batch,
            pricing=pricing,
        )
        for model, title in (("vgg11", "VGG-11"), ("resnet18", "ResNet-18"))
        for boards in (8, 12)
        for what, batch, pricing in (
            ("CPU", 64, FP32),
            ("CPU and NPU", 256, MixedPricing(rule="normalised")),
        )
    ),
    # SoCs that compute all the time depend on their clocks alone, so this comes closest to the
    # paper's bound.
    RackWork(
        name="ResNet-18, 60 of 60 SoCs, CPU, each alone",
        model="resnet18",
        num_boards_busy=12,
        batch_size=64,
        socs_per_group=1,
    ),
    RackWork(
        name="ResNet-18, 60 of 60 SoCs, CPU, one hot board, groups of 4",
        model="resnet18",
        num_boards_busy=12,
        batch_size=64,
        socs_per_group=4,
        hot_board=True,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How the fans are controlled, and whether the work is re-balanced."""

    name: str
    fan: str
    rpm: float = 3250.0
    rebalancing: Rebalancing | None = None
    max_slowdown: float = 0.0


BALANCED = Rebalancing()
POLICIES = (
    Policy(name="no control (3,250 rpm)", fan="fixed"),
    *(
        Policy(name=f"fixed {rpm:,} rpm", fan="fixed", rpm=rpm)
        for rpm in (5700, 8300, 11000, 14000)
    ),
    Policy(name="no control, re-balancing", fan="fixed", rebalancing=BALANCED),
    Policy(name="passive", fan="passive"),
    Policy(name="passive, re-balancing", fan="passive", rebalancing=BALANCED),
    Policy(name="predictive", fan="predictive"),
    Policy(name="predictive, re-balancing", fan="predictive", rebalancing=BALANCED),
    Policy(
        name="predictive, 5 % slower", fan="predictive", rebalancing=BALANCED, max_slowdown=0.05
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyResult:
    """Time, energy and temperature of the work under a policy."""

    duration_s: float
    energy_j: float
    cooling_j: float
    peak_c: float


@cache
def profile(name: str) -> ModelProfile:
    return profile_module(
        build_model(name, in_channels=3, image_size=32, num_classes=10, seed=1), (3, 32, 32), name
    )


def work_of(
    case: RackWork, cluster: Cluster, rebalancing: Rebalancing | None
) -> tuple[IntervalCosts, list[SyncInterval]]:
    """Return the case's work: the number of steps that take `COLD_S` on a cold rack."""
    socs = 5 * case.num_boards_busy
    plan = plan_groups(cluster, socs // case.socs_per_group, socs)
    work = IntervalCosts(
        cluster=cluster,
        plan=plan,
        profile=profile(case.model),
        num_samples=50_000,
        batch_size=case.batch_size,
        steps_per_epoch=1,
        uplink_turns=False,
        pricing=case.pricing,
        rebalancing=rebalancing,
    )
    step_s = EventClock(cluster).run(work.step(), repeat=100).duration_s / 100.0
    steps = round(COLD_S / step_s / NUM_INTERVALS)
    return work, [
        SyncInterval(
            index=index,
            first_step=index * steps,
            num_steps=steps,
            epoch_end=float(index + 1),
            deal_epoch=0,
        )
        for index in range(NUM_INTERVALS)
    ]


def rack_of(case: RackWork, cluster: Cluster) -> Rack:
    random = np.random.default_rng(7)
    return Rack(
        slots_per_board=cluster.slots_per_board,
        coupling={
            soc: float(np.exp(SPREAD * random.standard_normal())) for soc in range(cluster.num_socs)
        },
        airflow={HOT_BOARD: HOT_BOARD_AIRFLOW} if case.hot_board else {},
    )


def cold(case: RackWork, cluster: Cluster) -> Usage:
    """Return time and energy of the work on a rack that does not get hot."""
    work, intervals = work_of(case, cluster, None)
    one = work.run(intervals[0], EventClock(cluster))
    usage = Usage()
    for _ in intervals:
        usage += one
    return usage


def fan_policy(
    policy: Policy, case: RackWork, cluster: Cluster, rack: Rack, planned: Usage
) -> FanPolicy:
    if policy.fan == "fixed":
        return FixedSpeed(fixed_rpm=policy.rpm)
    if policy.fan == "passive":
        return PassiveCooling()
    num_socs = 5 * case.num_boards_busy
    busy_w = planned.total_energy_j / planned.duration_s
    idle_w = sum(cluster.device_of(soc).idle_w for soc in range(num_socs, cluster.num_socs))
    load = PlannedLoad(
        rack_w=busy_w + idle_w,
        local_rise_c=rack.local_rise_c(busy_w / num_socs, 5),
        end_s=planned.duration_s,
    )
    return PredictiveCooling(load=load, max_slowdown=policy.max_slowdown)


def run_under(policy: Policy, case: RackWork, cluster: Cluster, planned: Usage) -> PolicyResult:
    """Return time and energy of the work under a policy, from a rack at rest."""
    rack = rack_of(case, cluster)
    dynamics = RackDynamics(rack, fan_policy(policy, case, cluster, rack, planned))
    clock = EventClock(cluster, dynamics=dynamics)
    work, intervals = work_of(case, cluster, policy.rebalancing)
    rates = sustained_rates(cluster, case.model, case.pricing)
    balancer = Balancer(cluster, rates, policy.rebalancing)
    plan = work.plan
    for interval in intervals:
        balancer.update_speeds(clock, plan.participants)
        plan, _ = balancer.rebalance_groups(plan)
        work = replace(work, plan=plan)
        work.run(interval, clock, capacities=balancer.in_use)
    return PolicyResult(
        duration_s=clock.now_s,
        energy_j=clock.usage.total_energy_j,
        cooling_j=clock.usage.energy_j[Activity.COOLING],
        peak_c=dynamics.peak_c,
    )


def case_rows(case: RackWork, cluster: Cluster) -> list[Row]:
    """Return a case's rows: times and total energies against no control, fan energies against passive cooling."""
    planned = cold(case, cluster)
    runs = {policy.name: run_under(policy, case, cluster, planned) for policy in POLICIES}
    for name, one in runs.items():
        note(
            f"{case.name}: {name}: {one.duration_s:.0f} s, {one.energy_j / 1e3:.0f} kJ, of them fans "
            f"{one.cooling_j / 1e3:.1f} kJ, at most {one.peak_c:.1f} C"
        )
    none = runs[POLICIES[0].name]
    found = []
    for name, one in runs.items():
        found += _policy_rows(f"{case.name}: {name}", name, one, runs, planned)
    gain = none.duration_s / runs["passive, re-balancing"].duration_s
    claim = more_is_better(
        f"{case.name}: passive, re-balancing, beside the paper's least",
        gain,
        PAPER,
        1.59,
        "times",
        limit=none.duration_s / planned.duration_s,
        ok=1.0 <= gain <= CLOCKS,
    )
    return [*found, claim]


def _policy_rows(
    case: str, name: str, one: PolicyResult, runs: Mapping[str, PolicyResult], planned: Usage
) -> list[Row]:
    peer = POLICIES[0].name
    none, passive = runs[peer], runs["passive"]
    right = planned.duration_s * 0.999 < one.duration_s and 0.0 < one.cooling_j < one.energy_j
    limit = planned.duration_s
    rows = [
        less_is_better(case, one.duration_s, peer, none.duration_s, "s", limit=limit, ok=right),
        less_is_better(f"{case}, SoCs and fans", one.energy_j, peer, none.energy_j, "J", ok=right),
    ]
    if name.startswith("predictive"):
        # Fan energy must not be saved by slower clocks, except under the policy that asks for it.
        cooled = runs.get(name.replace("predictive", "passive"))
        same = cooled is None or abs(one.duration_s / cooled.duration_s - 1.0) < 0.01
        rows.append(
            less_is_better(
                f"{case}, fans alone", one.cooling_j, "passive", passive.cooling_j, "J", ok=same
            )
        )
    return rows


def run(quick: bool = False) -> list[Row]:
    """Return the rows of all cases, with `quick` of the first one."""
    cluster = parse_cluster({"boards": 12, "socs_per_board": 5}, [], {}, where="benchmark")
    return [row for case in (CASES[:1] if quick else CASES) for row in case_rows(case, cluster)]
