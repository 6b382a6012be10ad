"""One device's part of a pipeline across machines, which continues without devices that are lost (F33).

Devices agree on the present members as rings do (`peers/membership.py`). The first member compares the states that all
have kept. It chooses the newest step at which the members together have the whole model, and the plan for them. Then
parts of the model move between devices, all pairs at once, and training continues from that step. Later updates are
repeated, so each is in the weights once, as if the pipeline had been planned at that step.
"""

import json
import math
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from socflower.errors import InfeasiblePlan, SocflowerError
from socflower.model_graph.model_copy import copied
from socflower.peers.membership import Generation, Membership, MemberState, NoModel
from socflower.peers.owner_preemption import Preempted, PreemptionSwitch
from socflower.peers.ring.member import AppliedStep, MemberResult
from socflower.peers.session import ElasticSession, Role, answering
from socflower.peers.transports.port import RingPort
from socflower.pipeline.plan import Plan, from_json, to_json
from socflower.pipeline.problem import PipelineProblem
from socflower.pipeline.profiler.layers import ReadModel
from socflower.pipeline.recovery.weight_moves import (
    StageState,
    StateTransfer,
    backup_of,
    moves,
    newest_common,
)
from socflower.pipeline.replanning import for_speeds, heavy_plan, remaining_plan, with_new_shares
from socflower.pipeline.runtime.channels import Channels, QueueChannels, run_script
from socflower.pipeline.runtime.gloo_channels import GlooChannels
from socflower.pipeline.runtime.group import LabelledSource, outcome_of
from socflower.pipeline.runtime.grpc_channels import GrpcChannels
from socflower.pipeline.runtime.member import Member, Mini, StageMember, refuse_unfit
from socflower.pipeline.runtime.messages import CONTROL, END, STATE, Receive
from socflower.pipeline.runtime.payloads import EXACT, ActivationCoding
from socflower.pipeline.runtime.trained_model import TrainedModel
from socflower.quantities import counted
from socflower.training.batches import BatchSchedule, sample_key
from socflower.training.fp32 import FP32Trainer
from socflower.training.model_state import load_trainable_state, trainable_state
from socflower.training.saved_values import from_bytes
from socflower.training.trainer import TrainingSpan
from socflower.wire.message_keys import (
    COMPLETED,
    DeviceReport,
    GroupTask,
    RingOutcome,
    RingTask,
)
from socflower.workloads.data_source import AbsentSamples, DataSource

# The part of a stage's time that new shares must save.
_SHARE_TOLERANCE = 0.1
# Two steps are kept, since the newest backup may be incomplete when a device is lost.
_KEPT_STEPS = 2
_UNBOUNDED = 1 << 30
# After a loss: updates between two questions for the whole planner's plan, and the part of the time that it must save.
_HEAVY_STEPS, _HEAVY_GAIN = 4, 0.05


@dataclass(frozen=True, kw_only=True)
class PipelineMember:
    """The configuration of one device's part of an interval; `train` runs it.

    `plan` is of SoCs, as `group.members`; `group.partitions` has their participants, which are the port's ranks.
    `state` is from the previous interval, if this device leads. Stages are backed up every `backup_steps` updates of
    the interval; 0: only at its beginning.
    """

    model: nn.Module
    # Whether `model` has the initial weights, as the leader's model does.
    has_model: bool
    read: ReadModel
    data: DataSource
    group: GroupTask
    ring: RingTask
    plan: Plan
    trainer: FP32Trainer
    port: RingPort
    switch: PreemptionSwitch
    state: bytes | None = None
    coding: ActivationCoding = EXACT
    budget_bytes: Mapping[int, float] = field(default_factory=dict)
    int8_socs: Collection[int] = ()
    # What a plan after a loss is made from; None: the plan and the budgets.
    problem: PipelineProblem | None = None
    backup_steps: int = 0
    departs_at: int | None = None
    # Called after each update.
    on_step: Callable[[AppliedStep], None] = lambda step: None

    def train(self) -> MemberResult:
        """Train with the other devices; the leader's `model` gets the result. The caller closes the port."""
        work = _Session(self)
        try:
            return work.run()
        finally:
            work.close()


class _Session(Role[MemberResult]):
    """The state of a device's part of an interval."""

    what = "pipeline"

    def __init__(self, member: PipelineMember) -> None:
        self._config = member
        self._soc_of = dict(zip(member.group.partitions, member.group.members, strict=True))
        self._soc = self._soc_of[member.ring.participant]
        membership = Membership(
            member.port,
            member.ring.participant,
            member.group.partitions,
            heartbeat_s=member.ring.heartbeat_s,
            rendezvous_s=member.ring.rendezvous_s,
            reach_s=member.ring.reach_s,
        )
        self._elastic = ElasticSession(membership, member.switch.raise_if_active)
        self._poll = self._elastic.poll
        read = member.read
        self._names = frozenset(trainable_state(member.model)) - read.aliases.keys()
        self._of_layers = [
            self._names & read.tensor_names(layer, layer) for layer in range(read.model.num_layers)
        ]
        # Buffers of no layer, which nothing changes.
        self._of_no_layer = self._names - frozenset().union(*self._of_layers)
        # The present devices.
        self._socs: list[int] = []
        # States by step.
        self._kept: dict[int, StageState] = {}
        if member.has_model:
            own = trainable_state(member.model)
            self._kept[0] = StageState(
                weights={name: own[name].detach().cpu().clone() for name in sorted(self._names)},
                optimizer={} if member.state is None else from_bytes(member.state),
            )
        # By step, the SoCs whose backups have not arrived yet.
        self._awaited: dict[int, list[int]] = {}
        self._has_samples = not isinstance(member.data, AbsentSamples)
        self._schedule = BatchSchedule(member.group, [len(member.data)])
        self._channels: Channels | None = None
        self._stage: Member | None = None
        self._plan = member.plan
        self._step = 0
        self._log: list[str] = []
        # Of the first device: the thread of the whole planner after a loss, and its plan.
        self._searching: tuple[threading.Thread, list[str]]
        self._awaits_heavy = False

    def run(self) -> MemberResult:
        """Form the pipeline and train; repeat both after each loss of a device."""
        config, group = self._config, self._config.group
        refuse_unfit(config.trainer)
        if not group.first_step and self._has_samples:
            data = LabelledSource(config.data)
            config.trainer.require_divisible_loss(config.model, (), data, group.batch_size)
        return self._elastic.run(self)

    def release(self) -> None:
        """Keep the state of this device's stage, and release the channels."""
        if self._stage is not None:
            self._keep(self._stage)
            self._stage = None
        self._close_channels()

    def close(self) -> None:
        """Leave the pipeline."""
        self._close_channels()
        self._elastic.membership.close()

    # ------------------------------------------------------------------------------------------------- forming

    def kept(self) -> MemberState:
        """Return the newest step whose state this device has."""
        return MemberState(
            num_steps=max(self._kept, default=0), has_model=bool(self._kept), optimizer=""
        )

    def form(self, generation: Generation) -> None:
        """Open the channels, agree on a step and a plan, and move parts of the state of that step."""
        socs = self._socs = [self._soc_of[participant] for participant in generation.members]
        if len(socs) == 1:
            self._channels = QueueChannels.of(socs)[self._soc]
        else:
            kind = GlooChannels if self._config.ring.transport == "gloo" else GrpcChannels
            self._channels = kind(
                self._config.port,
                socs,
                generation.members,
                generation.number,
                self._config.ring.heartbeat_s,
            )
        held = {step: sorted(state.weights) for step, state in self._kept.items()}
        own = {"held": sorted(held.items()), "has_samples": self._has_samples}
        decision = self._agree(own, self._decide)
        if decision["step"] is None:
            self._log.append(decision["why"])
            self._elastic.membership.finish()
            raise NoModel
        self._plan, self._step = from_json(decision["plan"]), decision["step"]
        self._move([StateTransfer(*each) for each in decision["moves"]])
        self._awaited.clear()
        self._stage = self._make_stage()
        self._awaits_heavy = False
        if self._elastic.is_recovering:
            self._search_heavy(self._plan)
            self._log.append(
                f"the pipeline continues from update {self._step} on "
                f"{counted(len(self._plan.socs), 'device')}, as {self._plan.architecture}"
            )

    def _agree(self, own: Any, decide: Callable[[dict[int, Any]], Any]) -> Any:
        """Return what the first device decides from all devices' values, by SoC; values are plain."""
        first, *others = self._socs
        channels = self._open_channels
        if self._soc != first:
            channels.send(first, CONTROL, bytearray(json.dumps(own).encode()))
            return self._next_control(first)
        values = {first: json.loads(json.dumps(own))}
        for soc in others:
            values[soc] = self._next_control(soc)
        decision = json.loads(json.dumps(decide(values)))
        for soc in others:
            channels.send(soc, CONTROL, bytearray(json.dumps(decision).encode()))
        return decision

    def _next_control(self, soc: int) -> Any:
        return json.loads(bytes(self._open_channels.receive(Receive(soc, CONTROL), self._poll)))

    def _decide(self, reports: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """Return a plan, the step to continue from, and the parts of the state that must move."""
        socs, held = self._socs, {soc: dict(report["held"]) for soc, report in reports.items()}
        sources = {each.samples_on for each in self._config.plan.pipelines} - {None}
        has_samples = all(report["has_samples"] for report in reports.values())
        if not has_samples and not sources <= {*socs}:
            return {"step": None, "why": "the device with the samples was lost"}
        step = newest_common(held, self._names)
        if step is None:
            return {"step": None, "why": "a stage and its backup were lost together"}
        try:
            plan = remaining_plan(
                self._config.plan,
                self._config.read.model,
                socs,
                problem=self._config.problem,
                budget_bytes=self._config.budget_bytes,
            )
        except InfeasiblePlan as error:
            return {"step": None, "why": str(error)}
        kept = {soc: own.get(step, ()) for soc, own in held.items()}
        found = moves(self._needed(plan), kept, socs)
        return {
            "step": step,
            "plan": to_json(plan),
            "moves": found,
        }

    def _needed(self, plan: Plan) -> dict[int, list[str]]:
        """Return the names that each device must have to begin with a plan: those of its stage, and of its copies."""
        needed = {soc: sorted(self._names_of(plan, soc)) for soc in self._socs}
        for soc, keeper in backup_of(plan).items():
            needed[keeper] = sorted({*needed[keeper], *needed[soc]})
        return needed

    def _names_of(self, plan: Plan, soc: int) -> frozenset[str]:
        """Return the names of a device's weights and buffers; the leader also has those of no layer."""
        found = frozenset[str]()
        for pipeline in plan.pipelines:
            for stage in pipeline.stages:
                if soc in stage.devices:
                    own = self._of_layers[stage.first_layer : stage.last_layer + 1]
                    found = found.union(*own)
        return found | self._of_no_layer if soc == self._leader_of(plan) else found

    def _leader_of(self, plan: Plan) -> int:
        """Return the device that answers: the group's leader, or the plan's first device if the leader is lost."""
        leader = self._config.group.leader
        return leader if leader in self._socs else plan.socs[0]

    def _move(self, parts: list[StateTransfer]) -> None:
        """Send and receive parts of the state of the common step; forget other steps."""
        channels, state = self._open_channels, self._kept.get(self._step, StageState())
        for part in parts:
            if part.source == self._soc:
                channels.send(part.target, STATE, state.to_bytes(part.names))
        for part in parts:
            if part.target == self._soc:
                body = channels.receive(Receive(part.source, STATE), self._poll)
                state = state.joined(StageState.from_bytes(body))
        self._kept = {self._step: state}

    @property
    def _open_channels(self) -> Channels:
        assert self._channels is not None
        return self._channels

    def _make_stage(self) -> Member:
        config, state = self._config, self._kept[self._step]
        model = copied(config.model)
        weights = config.read.with_aliases(state.weights)
        load_trainable_state(model, {**trainable_state(model), **weights})
        return Member(
            self._plan,
            self._soc,
            config.read,
            model,
            config.trainer,
            TrainingSpan.of_group(self._config.group, self._step),
            data=config.data,
            send=self._open_channels.send,
            state=state.optimizer_bytes(),
            coding=config.coding,
            budget_bytes=config.budget_bytes.get(self._soc, math.inf),
            on_pass=lambda *_: self._poll(),
            leader=self._leader_of(self._plan),
            int8_socs=config.int8_socs,
        )

    # ------------------------------------------------------------------------------------------------ training

    def work(self) -> None:
        """Train through the updates that are left."""
        group, backup_steps = self._config.group, self._config.backup_steps
        share_steps, begun = self._config.ring.rebalance_steps, self._step
        while self._step < group.num_steps:
            if self._config.departs_at is not None and self._step >= self._config.departs_at:
                raise Preempted("the device is preempted")
            if self._step > begun:
                if backup_steps and self._step % backup_steps == 0:
                    self._back_up()
                if share_steps and self._step % share_steps == 0:
                    self._follow_speeds()
                if self._awaits_heavy and (self._step - begun) % _HEAVY_STEPS == 0:
                    self._take_heavy()
            self._update()

    def _update(self) -> None:
        group, step = self._config.group, self._config.group.first_step + self._step
        (indices,) = self._schedule.batch(step)
        mini = Mini(step=step, indices=indices, key=sample_key(group, self._step))
        run_script(self._present_stage.update(mini), self._open_channels, self._poll)
        self._step += 1
        self._take_backups()
        members = [group.partitions[group.members.index(soc)] for soc in self._plan.socs]
        self._config.on_step(
            AppliedStep(step=step, samples=tuple(indices.tolist()), members=tuple(members))
        )

    @property
    def _present_stage(self) -> Member:
        assert self._stage is not None
        return self._stage

    def _follow_speeds(self) -> None:
        """Follow the speeds that devices measured since the last time: by new shares, or else by moving layers."""
        stage = self._present_stage.stage
        own = [0.0, _UNBOUNDED] if stage is None else [stage.drain_sample_s(), self._most(stage)]

        def decide(values: dict[int, Any]) -> list[str]:
            sample_s = {soc: value[0] for soc, value in values.items()}
            most = {soc: value[1] for soc, value in values.items()}
            plan = with_new_shares(self._plan, sample_s, most, _SHARE_TOLERANCE)
            if plan is not None:
                return [to_json(plan), ""]
            problem = self._config.problem
            if problem is not None:
                plan = for_speeds(self._plan, problem, self._socs, sample_s, _SHARE_TOLERANCE)
            return ["", "" if plan is None else to_json(plan)]

        shared, moved = self._agree(own, decide)
        if moved:
            self._switch(from_json(moved), "the measured speeds")
        if shared:
            self._share(from_json(shared))

    def _share(self, plan: Plan) -> None:
        """Continue with a plan of other shares."""
        self._plan = plan
        self._present_stage.update_shares(plan)
        shares = [
            f"stage {number}: {', '.join(map(str, each.shares))}"
            for number, each in enumerate(self._plan.pipelines[0].stages)
            if len(each.devices) > 1
        ]
        self._log.append(f"new shares after {counted(self._step, 'update')}: {'; '.join(shares)}")

    def _take_heavy(self) -> None:
        """Continue with the plan of the whole planner once the first device has it, if it is enough quicker."""

        def decide(_: dict[int, Any]) -> list[Any]:
            thread, found = self._searching
            return [not thread.is_alive(), found[0] if found and not thread.is_alive() else ""]

        is_found, text = self._agree(None, decide)
        self._awaits_heavy = not is_found
        if text:
            self._switch(from_json(text), "the whole planner")

    def _search_heavy(self, plan: Plan) -> None:
        """Let the first device plan for those that are left, beside the training."""
        problem, present = self._config.problem, tuple(self._socs)
        self._awaits_heavy = problem is not None and len(present) > 1
        if problem is None or self._soc != present[0]:
            return
        found: list[str] = []

        def search() -> None:
            # A light plan is there already.
            with suppress(SocflowerError):
                heavy = heavy_plan(plan, problem, present, _HEAVY_GAIN)
                if heavy is not None:
                    found.append(to_json(heavy))

        thread = threading.Thread(target=search, name="pipeline-planner", daemon=True)
        self._searching = thread, found
        thread.start()

    def _switch(self, plan: Plan, why: str) -> None:
        """Continue with another plan of the present devices, after parts of the model have moved between them."""
        for senders in self._awaited.values():
            # They would be taken for the parts that move.
            for soc in senders:
                self._open_channels.receive(Receive(soc, STATE), self._poll)
        self._keep(self._present_stage)
        held = {soc: self._names_of(self._plan, soc) for soc in self._socs}
        self._plan = plan
        self._move(list(moves(self._needed(plan), held, self._socs)))
        self._awaited.clear()
        self._stage = self._make_stage()
        self._log.append(
            f"another plan after {counted(self._step, 'update')}, for {why}: {plan.architecture} on "
            f"{counted(len(plan.socs), 'device')}"
        )

    def _most(self, stage: StageMember) -> int:
        """Return how many samples of a micro-batch fit this device's budget, judging by its peak so far."""
        work = stage.work
        used_bytes = work.peak_bytes - work.state_bytes
        if not math.isfinite(work.budget_bytes) or used_bytes <= 0:
            return _UNBOUNDED
        room_bytes = work.budget_bytes - work.state_bytes
        return int(stage.share * room_bytes / used_bytes)

    def _back_up(self) -> None:
        """Keep this step's state, and send it to the device that keeps a copy."""
        channels, keepers = self._open_channels, backup_of(self._plan)
        self._keep(self._present_stage)
        if self._soc in keepers:
            channels.send(keepers[self._soc], STATE, self._kept[self._step].to_bytes(self._names))
        self._awaited[self._step] = [soc for soc, keeper in keepers.items() if keeper == self._soc]
        for soc in self._awaited[self._step]:
            channels.expect([Receive(soc, STATE)])
        for step in sorted(self._kept)[:-_KEPT_STEPS]:
            del self._kept[step]

    def _keep(self, stage: Member) -> None:
        """Keep the state after the last complete update of this device."""
        weights, optimizer = stage.snapshot()
        for name, weight in self._kept[min(self._kept)].weights.items():
            if name in self._of_no_layer:
                weights.setdefault(name, weight)
        own = StageState(weights=weights, optimizer=optimizer)
        self._kept[self._step] = own.joined(self._kept.get(self._step, StageState()))

    def _take_backups(self) -> None:
        """Keep the copies of other devices' states that have arrived."""
        channels = self._open_channels
        for step, senders in self._awaited.items():
            while senders and channels.has_arrived(Receive(senders[0], STATE)):
                body = channels.receive(Receive(senders.pop(0), STATE), self._poll)
                if step in self._kept:
                    self._kept[step] = self._kept[step].joined(StageState.from_bytes(body))

    # -------------------------------------------------------------------------------------------------- ending

    def finish(self) -> MemberResult:
        """Collect the model on the leader, which answers; the others wait until the leader has it.

        One other device, the deputy, also gets the model, in case the leader is lost before it has answered.
        """
        channels = self._open_channels
        end = run_script(self._present_stage.finish(), channels, self._poll)
        leader, *deputies = answering(self._leader_of(self._plan), self._socs)
        deputy = deputies[0] if deputies else None
        if end is not None:
            for soc in self._socs:
                if soc != leader:
                    channels.send(soc, END, bytearray(end.to_bytes() if soc == deputy else b""))
            channels.flush(self._poll)
        else:
            body = channels.receive(Receive(leader, END), self._poll)
            end = TrainedModel.from_bytes(body) if self._soc == deputy else None
        self._elastic.membership.finish()
        return self._completed(end, answers=self._soc == leader)

    @property
    def _present(self) -> list[int]:
        return [self._soc_of[participant] for participant in self._elastic.membership.finished]

    def _completed(self, end: TrainedModel | None, *, answers: bool) -> MemberResult:
        outcome = self._outcome(COMPLETED, end, answers=answers)
        if end is None:
            return MemberResult(
                outcome=outcome,
                mean_loss=0.0,
                num_samples=0,
                end=None,
            )
        own = trainable_state(self._config.model)
        weights = self._config.read.with_aliases(end.weights)
        load_trainable_state(self._config.model, {**own, **weights})
        first = self._config.group.first_step
        steps = range(first, first + self._config.group.num_steps)
        num_samples = sum(len(self._schedule.batch(step)[0]) for step in steps)
        whole = outcome_of(end, self._plan, num_samples)
        devices = DeviceReport(devices=tuple(end.devices.values()), socs=tuple(end.devices))
        return MemberResult(
            outcome=outcome,
            mean_loss=whole.mean_loss,
            num_samples=num_samples,
            end=whole.end,
            devices=devices,
        )

    def without_model(self, outcome: str) -> MemberResult:
        """Return what a device reports that has no model of the interval."""
        own = self._outcome(outcome, None, answers=False)
        return MemberResult(
            outcome=own,
            mean_loss=0.0,
            num_samples=0,
            end=None,
        )

    def _outcome(self, outcome: str, end: TrainedModel | None, *, answers: bool) -> RingOutcome:
        membership, soc_of = self._elastic.membership, self._soc_of
        present = [soc_of[participant] for participant in membership.finished]
        sample_s = {} if end is None else {soc: each for soc, each in end.sample_s.items() if each}
        rates = [1.0 / sample_s[soc] if soc in sample_s else 0.0 for soc in present]
        return RingOutcome(
            outcome=outcome,
            members=tuple(present),
            num_steps=self._step,
            answers=answers,
            rates=tuple(rates) if sample_s else (),
            recoveries_s=tuple(self._elastic.recoveries_s),
            log=tuple(membership.log_lines),
            notes=tuple(self._log),
            preempted=tuple(soc_of[participant] for participant in membership.preempted),
        )

    def _close_channels(self) -> None:
        if self._channels is not None:
            self._channels.close()
            self._channels = None
