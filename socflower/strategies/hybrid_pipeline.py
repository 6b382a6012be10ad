"""HybridPipeline: one model over unequal devices, in stages that are cut and shared by predicted time (Asteroid)."""

import math
from collections.abc import Sequence
from dataclasses import replace
from logging import INFO
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.supercore import log

from socflower.cluster import FP32, HUB, GraphBuilder, Usage, VirtualClock
from socflower.errors import (
    ConfigError,
    InfeasiblePlan,
    TrainingFailed,
    require_range,
    require_type,
)
from socflower.hierarchy import Rebalancing, plan_groups
from socflower.hierarchy.leader_topology import STAR
from socflower.peers.ring.settings import RingSettings
from socflower.pipeline.plan import Plan, to_json
from socflower.pipeline.planner.selection import (
    Planned,
    PlannerSettings,
    nothing_fits,
    plan_pipeline,
    predict,
    single_device,
)
from socflower.pipeline.problem import LayerSeconds, PipelineDevice, PipelineProblem
from socflower.pipeline.profiler.estimates import default_micro_batches
from socflower.pipeline.runtime.payloads import EXACT, ActivationCoding
from socflower.pipeline.schedule.run import simulate_schedule
from socflower.plain_numbers import plain_numbers
from socflower.quantities import counted, human_bytes, human_seconds
from socflower.sim import EventClock
from socflower.strategies.round import Round
from socflower.strategies.settings import Costs, ExchangeSettings, TrainingSchedule
from socflower.strategies.socflow import SoCFlow
from socflower.wire.message_keys import PIPELINE, PipelineTask, RingOutcome, encode


@plain_numbers
class HybridPipeline(SoCFlow):
    """Synchronous SGD of one model that is cut into stages over unequal devices.

    Devices of a stage share the samples of every micro-batch; stages pass activations and their gradients on. The plan
    is that of the least predicted time within the devices' memory; it may be one device, or data parallelism. A round
    is an interval of the schedule, after which the model is evaluated. Devices that leave, or come back, between rounds
    are planned for anew; the optimiser's state goes with the layers.

    On the engines `local` and `simulation` the client of one node runs all stages. Nodes with a ring address run a
    stage each, over gloo or gRPC, and go on without one that is lost: from the newest step of which the others have all
    parts.

    Parameters
    ----------
    problem : PipelineProblem
        Model, devices and mini-batch, as `pipeline_problem(model, example, cluster, batch_size=…)` describes them. With
        `int8_socs=…` it says whose stages compute in int8: planned, priced and trained so.
    schedule : TrainingSchedule
        How much is trained. `batch_size` is the problem's mini-batch, and `reshuffle` stays True.
    planner : PlannerSettings, optional
        How far the planner looks, and where samples are; by default at micro-batches of a 4th to a 32nd of the batch.
    plan : PipelinePlan or TwoDPlan, optional
        A plan of yours instead, as long as all its devices are there.
    coding : ActivationCoding
        In how many bits activations and their gradients cross a cut.
    rings : RingSettings
        Real machines: how long devices may be silent or absent, and the transport; gradients are float32.
    backup_steps : int
        Real machines: after how many updates a stage that is on one device alone is copied to the next one's device;
        0: once a round. More often costs their bytes, and less is done again after a loss.
    clock : VirtualClock, optional
        By default that of the grid, if it has one.
    rebalancing : Rebalancing, optional
        Follow the devices' speeds, as of `SoCFlow`: with shares, replicated stages divide micro-batches anew within a
        round; with groups, rounds are planned anew for speeds that real machines have measured, or the clock knows.
    tolerate_client_errors : bool
        As of `SoCFlow`.
    """

    def __init__(
        self,
        *,
        problem: PipelineProblem,
        schedule: TrainingSchedule,
        planner: PlannerSettings | None = None,
        plan: Plan | None = None,
        coding: ActivationCoding = EXACT,
        clock: VirtualClock | None = None,
        rings: RingSettings = RingSettings(),
        backup_steps: int = 0,
        rebalancing: Rebalancing | None = None,
        tolerate_client_errors: bool = False,
    ) -> None:
        name = type(self).__name__
        require_type(
            name,
            (PipelineProblem,),
            "a PipelineProblem, as of pipeline_problem(model, …)",
            problem=problem,
        )
        require_type(name, (TrainingSchedule,), "TrainingSchedule(…)", schedule=schedule)
        require_type(name, (ActivationCoding,), "ActivationCoding(…)", coding=coding)
        if schedule.batch_size != problem.mini_batch_size:
            raise ConfigError(
                f"{name}: the schedule has batch_size = {schedule.batch_size}, and mini-batches of the "
                f"problem have {problem.mini_batch_size} samples; give both the same"
            )
        if not schedule.reshuffle:
            raise ConfigError(
                f"{name}: all samples of a mini-batch come from one place, so data cannot stay at their "
                "nodes; use reshuffle=True"
            )
        require_type(name, (RingSettings,), "RingSettings(…)", rings=rings)
        if rings.compression != "none":
            raise ConfigError(
                f"{name}: rings has compression = {rings.compression!r}, and stages sum gradients in "
                "float32; leave it out, or give coding=ActivationCoding(bits=8)"
            )
        require_type(name, (int,), "a whole number, 0 or more", backup_steps=backup_steps)
        require_range(name, least=0, backup_steps=backup_steps)
        self._backup_steps = backup_steps
        socs = {device.soc for device in problem.devices}
        self._problem = replace(
            problem, activation_part=coding.bits / 32, gradient_part=coding.gradient_bits / 32
        )
        self._coding, self._own_plan = coding, plan
        self._settings = planner or PlannerSettings(
            micro_batch_sizes=default_micro_batches(schedule.batch_size)
        )
        self._planned: dict[tuple[tuple[int, float], ...], Planned] = {}
        self._latest: Planned | None = None  # of the latest round
        super().__init__(
            cluster=problem.cluster,
            schedule=schedule,
            groups=plan_groups(
                problem.cluster,
                1,
                None,
                [float(soc in socs) for soc in range(problem.cluster.num_socs)],
            ),
            costs=Costs(pricing=FP32),
            exchange=ExchangeSettings(leaders=STAR),
            rings=rings,
            rebalancing=rebalancing,
            tolerate_client_errors=tolerate_client_errors,
        )
        if clock is not None:
            self._clock = _event_clock(clock)
        if plan is not None:
            plan.check(problem)
            if plan.num_samples != schedule.batch_size:
                raise ConfigError(
                    f"{name}: the plan takes {plan.num_samples} samples an update, and the schedule has "
                    f"batch_size = {schedule.batch_size}; give both the same"
                )
        self._planned_for(
            self.plan.participants
        )  # so that what nothing fits is an error before anything starts

    @property
    def pipeline(self) -> Planned:
        """The plan of the latest round, with its prediction."""
        return self._planned_for(self.plan.participants)

    def _planned_for(self, socs: Sequence[int]) -> Planned:
        """Return the plan for devices at their present speeds; an earlier one while a new one gains too little."""
        # Never 0, by which seconds would be divided.
        parts = (
            {
                soc: max(0.01, round(self._planner.balancer.in_use.part(soc), 2))
                for soc in sorted(socs)
            }
            if self._rebalancing is not None and self._rebalancing.across_groups
            else dict.fromkeys(sorted(socs), 1.0)
        )
        key = tuple(parts.items())
        if key not in self._planned:
            problem = replace(
                self._problem,
                devices=tuple(
                    _slower(device, parts[device.soc])
                    for device in self._problem.devices
                    if device.soc in parts
                ),
            )
            before, own = self._latest, self._own_plan
            if before is not None and {device.soc for device in before.problem.devices} == {*parts}:
                self._planned[key] = self._better(_as_planned(problem, before.plan), problem)
            elif own is not None and {*own.socs} <= {*parts}:
                self._planned[key] = _as_planned(problem, own)
            else:
                self._planned[key] = self._best(problem)
        return self._planned[key]

    def _better(self, present: Planned, problem: PipelineProblem) -> Planned:
        """Return the present plan, or that for the devices' new speeds if it gains more than the tolerance."""
        assert self._rebalancing is not None  # without it, devices have one speed
        new = self._best(problem)
        gains = new.prediction.step_s < present.prediction.step_s * (
            1.0 - self._rebalancing.tolerance
        )
        return new if gains else present

    def _best(self, problem: PipelineProblem) -> Planned:
        """Return the planner's choice, or the only one that there is for one device."""
        if len(problem.devices) > 1:
            return plan_pipeline(problem, self._settings)
        plan = single_device(problem, problem.devices[0])
        if plan is None:
            raise nothing_fits(problem)
        return Planned(problem=problem, plan=plan, prediction=predict(problem, plan))

    def summary(self) -> None:
        """Log the plan."""
        planned = self.pipeline
        log(
            INFO,
            "\t├──> Pipeline: %s of %s",
            planned.plan.architecture,
            counted(len(planned.plan.socs), "device"),
        )
        for pipeline in planned.plan.pipelines:
            for stage in pipeline.stages:
                shares = ", ".join(
                    f"SoC {soc}: {share}"
                    for soc, share in zip(stage.devices, stage.shares, strict=True)
                )
                log(
                    INFO,
                    "\t├──> layers %d to %d, %d in flight; samples of each micro-batch: %s",
                    stage.first_layer,
                    stage.last_layer,
                    stage.in_flight,
                    shares,
                )
        log(
            INFO,
            "\t└──> An update of %d samples: %s, %s sent",
            planned.plan.num_samples,
            human_seconds(planned.prediction.step_s),
            human_bytes(planned.plan.communication_bytes(planned.problem)),
        )

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> list[Message]:
        """Send the plan to the node that runs all stages, or to every node that runs one; the leader gets the model."""
        messages = super().configure_train(server_round, arrays, config, grid)
        if not messages:
            return []
        assert self.round is not None
        try:
            planned = self.pipeline
        except InfeasiblePlan as error:
            raise TrainingFailed(f"HybridPipeline: {error}") from None
        self._latest = planned
        budgets = tuple(planned.problem.device(soc).memory_bytes for soc in planned.plan.socs)
        task = PipelineTask(
            plan=to_json(planned.plan),
            cuts=planned.problem.model.cuts,
            layers_sha256=planned.problem.model.sha256,
            sample_shape=planned.problem.model.sample_shape,
            bits=self._coding.bits,
            gradient_bits=self._coding.gradient_bits,
            feedback=self._coding.feedback,
            budget_bytes=budgets if all(map(math.isfinite, budgets)) else (),
            backup_steps=self._backup_steps,
            int8_socs=planned.problem.int8_socs,
        )
        for message in messages:
            message.content[PIPELINE] = ConfigRecord(encode(task))
        return messages

    def _with_nominal_rates(self, outcome: RingOutcome) -> RingOutcome:
        """Return rates of whole devices: the nominal ones times what each stage's measured part of its estimate is."""
        planned = self._latest
        if planned is None or not outcome.rates:
            return outcome
        if outcome.recoveries_s:  # they are of other stages than these
            return replace(outcome, rates=())
        estimated = {soc: planned.problem.device(soc).seconds for soc in planned.plan.socs}
        predicted_s = {
            soc: (
                estimated[soc].forward(stage.first_layer, stage.last_layer, share)
                + estimated[soc].backward(stage.first_layer, stage.last_layer, share)
            )
            / share
            for pipeline in planned.plan.pipelines
            for stage in pipeline.stages
            for soc, share in zip(stage.devices, stage.shares, strict=True)
        }
        return replace(
            outcome,
            rates=tuple(
                self._planner.balancer.nominal(soc)
                * self._part_in(planned, soc)
                * rate
                * predicted_s[soc]
                if soc in predicted_s
                else 0.0
                for soc, rate in zip(outcome.members, outcome.rates, strict=True)
            ),
        )

    def _part_in(self, planned: Planned, soc: int) -> float:
        """Return the part of its nominal speed that a plan has taken a device to have."""
        own = next(device for device in self._problem.devices if device.soc == soc)
        last, seconds = own.seconds.num_layers - 1, planned.problem.device(soc).seconds
        slow_s = seconds.forward(0, last, 1)
        return own.seconds.forward(0, last, 1) / slow_s if slow_s else 1.0

    def _use_clock_of(self, grid: Grid, arrays: ArrayRecord) -> None:
        if (clock := getattr(grid, "clock", None)) is not None:
            self._clock = _event_clock(clock)
            self._require_cluster_of(grid)

    def _log_changes(self, this: Round, grid: Grid) -> None:
        """Log nothing of groups' exchanges: there is one group."""

    def _price(self, this: Round, replies: Sequence[Message]) -> Usage:
        """Price the interval's updates, and the stages' way to the hub."""
        if not isinstance(self._clock, EventClock):
            return Usage()
        return self._planner.drain_idle() + self._priced(
            self._clock, this.plan.participants, this.interval.num_steps
        )

    def undisturbed_s(self) -> float:
        """Return the virtual seconds of all rounds on all devices without heat, users and events."""
        clock = EventClock(self._problem.cluster)
        for interval in self.intervals:
            self._priced(clock, self.plan.participants, interval.num_steps)
        return clock.now_s

    def _priced(self, clock: EventClock, socs: Sequence[int], num_steps: int) -> Usage:
        """Advance a clock by an interval of the plan for these devices."""
        planned = self._planned_for(socs)
        # At nominal speeds: the clock itself slows devices down.
        nominal = replace(
            planned.problem,
            devices=tuple(device for device in self._problem.devices if device.soc in socs),
        )
        usage = simulate_schedule(nominal, planned.plan, clock=clock, num_steps=num_steps).usage
        builder = GraphBuilder()
        for stage in planned.plan.pipelines[0].stages:
            if num_bytes := planned.problem.model.weight_bytes(stage.first_layer, stage.last_layer):
                builder.transfer(
                    "stage to the hub", stage.devices[0], HUB, num_bytes, num_messages=1
                )
        return usage + clock.run(builder.build(socs), label="model to the hub")


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
