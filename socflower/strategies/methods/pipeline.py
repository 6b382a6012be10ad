"""One model in stages over the members of a group, cut and shared by predicted time (Asteroid)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from socflower.cluster import Usage, VirtualClock
from socflower.errors import ConfigError, InfeasiblePlan, TrainingFailed
from socflower.hierarchy import (
    CapacitiesInUse,
    Exchanges,
    Group,
    GroupPlan,
    IntervalCosts,
    Rebalancing,
    SyncInterval,
    unpredicted_exchanges,
)
from socflower.hierarchy.exchange.gradients import EXACT_RING
from socflower.hierarchy.exchange.models import NONE
from socflower.hierarchy.uplink_turns import AUTO
from socflower.pipeline.plan import Plan, to_json
from socflower.pipeline.planner.selection import (
    Planned,
    PlannerSettings,
    nothing_fits,
    plan_pipeline,
    predict,
    single_stage,
)
from socflower.pipeline.problem import LayerSeconds, PipelineDevice, PipelineProblem
from socflower.pipeline.problem import to_json as problem_to_json
from socflower.pipeline.runtime.payloads import ActivationCoding
from socflower.pipeline.schedule.run import interval_usage
from socflower.quantities import counted, human_bytes, human_seconds
from socflower.sim import EventClock
from socflower.strategies.methods.group_work import require_cluster_of
from socflower.strategies.round import Round
from socflower.wire.message_keys import PIPELINE, PipelineTask, RingOutcome, encode


class PipelineWork:
    """Members run stages of one model, by the plan of the least predicted time within their memory.

    Raises `InfeasiblePlan` if nothing fits, `ConfigError` for a plan that is not of this problem.

    Parameters
    ----------
    problem : PipelineProblem
        Model, devices and mini-batch.
    planner : PlannerSettings
        How far the planner looks.
    plan : PipelinePlan or TwoDPlan, optional
        A plan of the user's, used as long as all its devices are there.
    coding : ActivationCoding
        In how many bits activations and their gradients cross a cut.
    backup_steps : int
        After how many updates a stage on one device alone is copied; 0: once a round.
    rebalancing : Rebalancing, optional
        With groups, rounds are planned again for the speeds in use.
    in_use : CapacitiesInUse
        The devices' present parts of their nominal speeds.
    """

    gradients = EXACT_RING

    def __init__(
        self,
        *,
        problem: PipelineProblem,
        planner: PlannerSettings,
        plan: Plan | None,
        coding: ActivationCoding,
        backup_steps: int,
        rebalancing: Rebalancing | None,
        in_use: CapacitiesInUse,
        clock: VirtualClock | None,
    ) -> None:
        self.clock: VirtualClock | None = None if clock is None else _event_clock(clock)
        self._problem = replace(
            problem, activation_part=coding.bits / 32, gradient_part=coding.gradient_bits / 32
        )
        self._settings, self._own_plan = planner, plan
        self._coding, self._backup_steps = coding, backup_steps
        self._rebalancing, self._in_use = rebalancing, in_use
        self._planned: dict[tuple[tuple[int, float], ...], Planned] = {}
        # Of the latest round.
        self.latest: Planned | None = None
        if plan is not None:
            plan.check(problem)
            if plan.num_samples != problem.mini_batch_size:
                raise ConfigError(
                    f"HybridPipeline: the plan takes {plan.num_samples} samples an update, and the "
                    f"schedule has batch_size = {problem.mini_batch_size}; give both the same"
                )

    # ------------------------------------------------------------------------------------------ the plan
    def planned_for(self, socs: Sequence[int]) -> Planned:
        """Return the plan for devices at their present speeds; an earlier one while a new one gains too little."""
        parts = self._parts(socs)
        key = tuple(parts.items())
        if key in self._planned:
            return self._planned[key]
        devices = [
            _slower(device, parts[device.soc])
            for device in self._problem.devices
            if device.soc in parts
        ]
        problem = replace(self._problem, devices=tuple(devices))
        before, own = self.latest, self._own_plan
        if before is not None and {device.soc for device in before.problem.devices} == {*parts}:
            planned = self._better(_as_planned(problem, before.plan), problem)
        elif own is not None and {*own.socs} <= {*parts}:
            planned = _as_planned(problem, own)
        else:
            planned = self._best(problem)
        self._planned[key] = planned
        return planned

    def _parts(self, socs: Sequence[int]) -> dict[int, float]:
        """Return the devices' parts of their nominal speeds, by SoC, ascending."""
        if self._rebalancing is None or not self._rebalancing.across_groups:
            return dict.fromkeys(sorted(socs), 1.0)
        # Never 0, by which seconds would be divided.
        return {soc: max(0.01, round(self._in_use.part(soc), 2)) for soc in sorted(socs)}

    def _better(self, present: Planned, problem: PipelineProblem) -> Planned:
        """Return the present plan, or that for the devices' new speeds if it gains more than the tolerance."""
        # Without re-balancing, devices have one speed.
        assert self._rebalancing is not None
        new = self._best(problem)
        limit_s = present.prediction.step_s * (1.0 - self._rebalancing.tolerance)
        return new if new.prediction.step_s < limit_s else present

    def _best(self, problem: PipelineProblem) -> Planned:
        """Return the planner's choice, or the only one that there is for one device."""
        settings, num_devices = self._settings, len(problem.devices)
        # A number of groups that was asked for is one of all devices.
        if settings.grid and num_devices < len(self._problem.devices):
            settings = replace(settings, grid=0)
        if num_devices > 1:
            return plan_pipeline(problem, settings)
        plan = single_stage(problem, problem.devices)
        if plan is None:
            raise nothing_fits(problem)
        return Planned(problem=problem, plan=plan, prediction=predict(problem, plan))

    def describe(self, plan: GroupPlan) -> list[str]:
        """Return the stages and an update's cost in lines."""
        planned = self.planned_for(plan.participants)
        devices = counted(len(planned.plan.socs), "device")
        lines = [f"Pipeline: {planned.plan.architecture} of {devices}"]
        for pipeline in planned.plan.pipelines:
            for stage in pipeline.stages:
                pairs = zip(stage.devices, stage.shares, strict=True)
                shares = ", ".join(f"SoC {soc}: {share}" for soc, share in pairs)
                lines.append(
                    f"layers {stage.first_layer} to {stage.last_layer}, {stage.in_flight} in flight; "
                    f"samples of each micro-batch: {shares}"
                )
        sent = human_bytes(planned.plan.communication_bytes(planned.problem))
        step = human_seconds(planned.prediction.step_s)
        return [*lines, f"An update of {planned.plan.num_samples} samples: {step}, {sent} sent"]

    def document(self, plan: GroupPlan, exchanges: Exchanges) -> dict[str, Any]:
        """Return the stages and what an update costs."""
        return self.planned_for(plan.participants).to_document()

    # --------------------------------------------------------------------------------------- of the group
    def use_grid(self, grid: Grid, plan: GroupPlan, arrays: ArrayRecord) -> None:
        """Take the grid's clock; `ConfigError` for one without processes, or for another cluster."""
        if (clock := getattr(grid, "clock", None)) is not None:
            self.clock = _event_clock(clock)
            require_cluster_of(grid, self._problem.cluster)

    def exchanges_of(
        self, plan: GroupPlan, leaders: str, ways: Sequence[str]
    ) -> tuple[Exchanges, IntervalCosts | None]:
        """Return those of a single group, which has nobody to take turns or to average with."""
        return unpredicted_exchanges(plan, AUTO, leaders, NONE, ways), None

    def records(self, plan: GroupPlan) -> Mapping[str, ConfigRecord]:
        """Return the pipeline's plan for the members; `TrainingFailed` if nothing fits those that are left."""
        try:
            planned = self.planned_for(plan.participants)
        except InfeasiblePlan as error:
            raise TrainingFailed(f"HybridPipeline: {error}") from None
        self.latest = planned
        budgets = tuple(planned.problem.device(soc).memory_bytes for soc in planned.plan.socs)
        task = PipelineTask(
            plan=to_json(planned.plan),
            cuts=planned.problem.model.cuts,
            layers_sha256=planned.problem.model.sha256,
            sample_shape=planned.problem.model.sample_shape,
            sample_type=planned.problem.model.sample_type,
            bits=self._coding.bits,
            gradient_bits=self._coding.gradient_bits,
            feedback=self._coding.feedback,
            budget_bytes=budgets if all(map(math.isfinite, budgets)) else (),
            backup_steps=self._backup_steps,
            int8_socs=planned.problem.int8_socs,
            problem=problem_to_json(planned.problem),
        )
        return {PIPELINE: ConfigRecord(encode(task))}

    def npu_ratios(self, group: Group) -> tuple[float, ...]:
        """Return none: a stage computes in FP32 or in int8, as its device's processor does."""
        return ()

    def comparable(self, outcome: RingOutcome, nominal: Callable[[int], float]) -> RingOutcome:
        """Return rates of whole devices: nominal ones times what each stage's measured part of its estimate is."""
        planned = self.latest
        if planned is None or not outcome.rates:
            return outcome
        # After a loss the rates are of other stages than these.
        if outcome.recoveries_s:
            return replace(outcome, rates=())
        predicted_s = _sample_seconds(planned)
        rates = [
            nominal(soc) * self._part_in(planned, soc) * rate * predicted_s[soc]
            if soc in predicted_s
            else 0.0
            for soc, rate in zip(outcome.members, outcome.rates, strict=True)
        ]
        return replace(outcome, rates=tuple(rates))

    def _part_in(self, planned: Planned, soc: int) -> float:
        """Return the part of its nominal speed that a plan has taken a device to have."""
        own = next(device for device in self._problem.devices if device.soc == soc)
        last, seconds = own.seconds.num_layers - 1, planned.problem.device(soc).seconds
        slow_s = seconds.forward(0, last, 1)
        return own.seconds.forward(0, last, 1) / slow_s if slow_s else 1.0

    def price(
        self, this: Round, usable: Sequence[Message], in_use: CapacitiesInUse
    ) -> tuple[Usage, frozenset[int]]:
        """Return the usage of the interval's updates and of the stages' way to the hub, and no group."""
        if not isinstance(self.clock, EventClock):
            return Usage(), frozenset()
        usage = self._priced(self.clock, this.plan.participants, this.interval.num_steps)
        return usage, frozenset()

    def undisturbed_s(self, socs: Sequence[int], intervals: Sequence[SyncInterval]) -> float:
        """Return the virtual seconds of all rounds on all devices without heat, users and events."""
        clock = EventClock(self._problem.cluster)
        for interval in intervals:
            self._priced(clock, socs, interval.num_steps)
        return clock.now_s

    def _priced(self, clock: EventClock, socs: Sequence[int], num_steps: int) -> Usage:
        """Advance a clock by an interval of the plan for these devices."""
        planned = self.planned_for(socs)
        # At nominal speeds: the clock itself slows devices down.
        devices = tuple(device for device in self._problem.devices if device.soc in socs)
        nominal = replace(planned.problem, devices=devices)
        return interval_usage(nominal, planned.plan, clock, num_steps)

    def log_changes(self, before: Round | None, this: Round) -> None:
        """Log nothing: there is one group."""


def _sample_seconds(planned: Planned) -> dict[int, float]:
    """Return the predicted seconds of a sample in each device's stage, by SoC."""
    seconds_of: dict[int, float] = {}
    for pipeline in planned.plan.pipelines:
        for stage in pipeline.stages:
            for soc, share in zip(stage.devices, stage.shares, strict=True):
                seconds = planned.problem.device(soc).seconds
                forward_s = seconds.forward(stage.first_layer, stage.last_layer, share)
                backward_s = seconds.backward(stage.first_layer, stage.last_layer, share)
                seconds_of[soc] = (forward_s + backward_s) / share
    return seconds_of


def _as_planned(problem: PipelineProblem, plan: Plan) -> Planned:
    """Return a plan with its prediction, and its problem in micro-batches of its size."""
    size = plan.pipelines[0].micro_batch_size
    sized = replace(
        problem, micro_batch_size=size, num_micro_batches=problem.mini_batch_size // size
    )
    return Planned(problem=sized, plan=plan, prediction=predict(sized, plan))


def _slower(device: PipelineDevice, part: float) -> PipelineDevice:
    """Return a device at a part of its speed; at all of it the same object, by which planners know equal devices."""
    if part == 1.0:
        return device
    seconds = device.seconds
    return replace(
        device,
        seconds=LayerSeconds(
            device=f"{seconds.device} at {part:.0%}",
            batches=seconds.batches,
            forward_s=seconds.forward_s / part,
            backward_s=seconds.backward_s / part,
            estimated=seconds.estimated,
        ),
    )


def _event_clock(clock: Any) -> EventClock:
    if not isinstance(clock, EventClock):
        raise ConfigError(
            f"HybridPipeline: clock = {type(clock).__name__} cannot run the processes of a pipeline; use "
            "socflower.EventClock"
        )
    return clock
