"""The rack of a scenario: the cluster with heat and background load, by `[thermal]` and `[background_load]`."""

from dataclasses import replace
from typing import Any

import numpy as np

from socflower.cluster import Cluster
from socflower.quantities import human_seconds
from socflower.scenario.planning import planned_intervals, planned_training, planned_work, with_plan
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.schema.thermal import BackgroundLoadConfig, ThermalConfig
from socflower.scenario.split_setting import SplitSetting
from socflower.scenario.split_trials import run_split
from socflower.sim import EventClock
from socflower.strategies.balancer import Balancer
from socflower.thermal.fans.fan_curve import rack_fans
from socflower.thermal.fans.objectives import ObjectiveCooling
from socflower.thermal.fans.policies import (
    FanPolicy,
    FixedSpeed,
    PlannedLoad,
    PredictiveCooling,
)
from socflower.thermal.model.background_load import DAY_S, changes, idle_windows
from socflower.thermal.model.dynamics import RackDynamics, Surroundings
from socflower.thermal.model.governor import ClockGovernor
from socflower.thermal.model.rack import Rack

# Games are drawn for this time; later there are none.
_HORIZON_S = 14.0 * DAY_S
# Predicting heat for that many rounds takes minutes.
_MAX_ROUNDS = 20_000
_ONE_CLOCK = ClockGovernor(clock_hz=(1.0,), trip_c=(), resume_c=(), power_exponent=0.0)
_NO_FANS = replace(rack_fans(), drag_w_per_rpm=0.0, air_w_per_rpm3=0.0)


def rack_dynamics(scenario: Scenario, cluster: Cluster) -> RackDynamics | None:
    """Return how the SoCs' speeds change with heat and users; None if the scenario has neither table."""
    if scenario.thermal is None and scenario.background_load is None:
        return None
    check_boards(scenario, cluster)
    thermal = scenario.thermal or ThermalConfig()
    background_load = scenario.background_load or BackgroundLoadConfig()
    games: Any = ()
    if background_load.games != "none":
        games = background_load.tide.loads(
            cluster.num_socs, _HORIZON_S, background_load.start_hour, scenario.seed
        )
    # Positions in the rack are drawn from the scenario's seed, like games.
    rack = _rack(thermal, cluster, scenario.seed)
    return RackDynamics(
        rack,
        _policy(thermal, scenario, cluster, rack),
        start_c=thermal.start_c,
        start_rpm=thermal.rpm,
        # Without [thermal], only users matter: clocks do not throttle and fans draw no power.
        governor=None if scenario.thermal else _ONE_CLOCK,
        fans=None if scenario.thermal else _NO_FANS,
        surroundings=Surroundings(
            ambient_c=changes(thermal.first_ambient_c, thermal.ambient_changes),
            fans_working=changes(1.0, thermal.fans_working_changes),
            background_load=games,
            open=idle_windows(background_load.idle_windows, _HORIZON_S, background_load.start_hour),
        ),
    )


def heat_document(
    scenario: Scenario,
    rack: RackDynamics,
    virtual_s: float,
    unthrottled_s: float | None,
) -> dict[str, Any]:
    """Return the heat part of a result; `unthrottled_s` is the training time without heat and users.

    Without a `[thermal]` table there are only users and no temperatures.
    """
    slowdown = virtual_s / unthrottled_s - 1.0 if unthrottled_s else None
    if scenario.thermal is None:
        return {"peak_c": None, "cooling_j": 0.0, "slowdown": slowdown, "history": None}
    history = rack.history
    return {
        "peak_c": rack.peak_c,
        "cooling_j": rack.cooling_j,
        "slowdown": slowdown,
        "history": {
            "at_s": [entry.at_s for entry in history],
            "hottest_c": [entry.hottest_c for entry in history],
            "mean_clock": [entry.mean_clock for entry in history],
            "rpm": [entry.rpm for entry in history],
            "fan_w": [entry.fan_w for entry in history],
        },
    }


def predicted_heat(scenario: Scenario, cluster: Cluster) -> dict[str, Any] | None:
    """Predict the planned training with heat and users: the heat part of a result, and totals.

    None without a heat simulation. A run plans again without the SoCs that users have taken at a
    synchronisation; the prediction lets their groups continue without them.
    """
    rack = rack_dynamics(scenario, cluster)
    if rack is None:
        return None
    unthrottled_s = unthrottled_training_s(scenario, cluster)
    if unthrottled_s is not None and unthrottled_s > _HORIZON_S:
        why = (
            f"heat is followed for {_HORIZON_S / DAY_S:g} days, not {human_seconds(unthrottled_s)}"
        )
        raise scenario.mistake("train", "epochs", why)
    clock = EventClock(cluster, dynamics=rack)
    if scenario.kind.uses_cloud:
        run_split(SplitSetting(scenario), clock)
    else:
        _run_groups(scenario, cluster, clock)
    return {
        "virtual_s": clock.now_s,
        "energy_j": clock.usage.total_energy_j,
        **heat_document(scenario, rack, clock.now_s, unthrottled_s),
    }


def _run_groups(scenario: Scenario, cluster: Cluster, clock: EventClock) -> None:
    """Let the planned training of groups pass on a clock, with its heat and users, round by round."""
    if scenario.synchronous_epochs:
        why = "it has two plans, and heat is planned for one; use 'local-sgd', or run it"
        raise scenario.mistake("strategy", "name", why)
    predicting = EventClock(cluster)
    work, _ = planned_work(scenario, cluster, predicting)
    intervals = planned_intervals(scenario, work)
    if len(intervals) > _MAX_ROUNDS:
        why = f"heat is planned for at most {_MAX_ROUNDS} rounds, not {len(intervals)}"
        raise scenario.mistake("train", "epochs", why)
    balancer = Balancer(cluster, work.rates, work.rebalancing)
    for interval in intervals:
        balancer.update_speeds(clock, work.plan.participants)
        # As in a run, SoCs change groups only between rounds.
        plan, _ = balancer.rebalance_groups(work.plan)
        if plan is not work.plan:
            work, _ = with_plan(scenario, work, plan, predicting)
        work.run(interval, clock, capacities=balancer.in_use)


def unthrottled_training_s(scenario: Scenario, cluster: Cluster) -> float | None:
    """Return the virtual seconds of the planned training without heat and users; None for fedavg and pipelines."""
    if scenario.kind.uses_cloud:
        clock = EventClock(cluster)
        run_split(SplitSetting(scenario), clock)
        return clock.now_s
    if not scenario.kind.has_groups:
        return None
    return planned_training(scenario, cluster).duration_s


def check_boards(scenario: Scenario, cluster: Cluster) -> None:
    """Raise `ConfigError` for a board of `[thermal]` that the cluster does not have."""
    last = len(cluster.boards) - 1
    for board in scenario.thermal.hot_boards if scenario.thermal else ():
        if board > last:
            why = f"there is no board {board}; the cluster has 0 to {last}"
            raise scenario.mistake("thermal", "hot_boards", why)


def _rack(thermal: ThermalConfig, cluster: Cluster, seed: int) -> Rack:
    draws = np.random.default_rng([seed, 1]).standard_normal(cluster.num_socs)
    coupling = (
        {}
        if not thermal.spread
        else {soc: float(np.exp(thermal.spread * draw)) for soc, draw in enumerate(draws)}
    )
    return Rack(
        slots_per_board=cluster.slots_per_board,
        coupling=coupling,
        airflow=thermal.hot_boards,
    )


def _policy(thermal: ThermalConfig, scenario: Scenario, cluster: Cluster, rack: Rack) -> FanPolicy:
    if thermal.fan == "fixed":
        return FixedSpeed(fixed_rpm=thermal.rpm)
    if thermal.fan == "passive":
        return thermal.passive_cooling()
    if thermal.fan == "objective":
        return ObjectiveCooling(
            load=planned_load(scenario, cluster, rack),
            objective=thermal.objective,
            ambient_c=thermal.first_ambient_c,
            rack_j_per_k=rack.total_j_per_k,
        )
    return PredictiveCooling(
        load=planned_load(scenario, cluster, rack),
        ambient_c=thermal.first_ambient_c,
        low_rpm=thermal.rpm,
        high_rpm=thermal.high_rpm,
        max_slowdown=thermal.max_slowdown,
    )


def planned_load(scenario: Scenario, cluster: Cluster, rack: Rack) -> PlannedLoad:
    """Return the power and heat of the planned training over the run's virtual time."""
    idle_w = [cluster.device_of(soc).idle_w for soc in range(cluster.num_socs)]
    # Without groups there is no plan: all SoCs work all the time.
    if not scenario.kind.has_groups:
        num_socs = scenario.strategy.socs or cluster.num_socs
        busy = [cluster.device_of(soc) for soc in range(num_socs)]
        busy_w = sum(device.processor(device.default_processor).active_w for device in busy)
        return PlannedLoad(
            rack_w=busy_w + sum(idle_w[num_socs:]),
            idle_w=sum(idle_w),
            num_busy=num_socs,
            local_rise_c=rack.local_rise_c(busy_w / num_socs, max(cluster.slots_per_board)),
        )
    training = planned_training(scenario, cluster)
    busy_w = training.energy_j / training.duration_s
    others_w = sum(idle_w) - sum(idle_w[soc] for soc in training.socs)
    return PlannedLoad(
        rack_w=busy_w + others_w,
        end_s=training.duration_s,
        idle_w=sum(idle_w),
        num_busy=len(training.socs),
        compute_part=min(1.0, training.compute_part),
        local_rise_c=rack.local_rise_c(busy_w / len(training.socs), max(cluster.slots_per_board)),
    )
