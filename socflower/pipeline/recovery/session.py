"""One device's part of a pipeline on machines of their own, which goes on without devices that are lost.

Devices agree on who is there as rings do (`peers/membership.py`). The first of them compares what all have kept, and
chooses the newest step of which together they have everything, and the plan for those that are there: the present one
where a replicated stage has lost a device, else that of the last backup. Then parts of the model move between devices,
all pairs at once, and training goes on from that step. Updates since are done again: each is in the weights once, as if
the pipeline had been planned anew at that step.
"""

import io
import json
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from logging import INFO
from typing import Any

import torch
from torch import nn

from socflower.errors import InfeasiblePlan
from socflower.model_graph.model_copy import copied
from socflower.peers.collective import PeerLost
from socflower.peers.membership import LeftOut, Membership, MemberState, NoModel
from socflower.peers.preemption import Preempted, PreemptionSwitch
from socflower.peers.ring.member import AppliedStep, MemberResult
from socflower.peers.transports.port import RingPort
from socflower.pipeline.plan import Plan, from_json, to_json
from socflower.pipeline.profiler.layers import ReadModel
from socflower.pipeline.recovery.backups import (
    StageState,
    StateTransfer,
    backup_of,
    moves,
    newest_common,
)
from socflower.pipeline.replanning import replanned, shared_anew
from socflower.pipeline.runtime.channels import Channels, QueueChannels, run_script
from socflower.pipeline.runtime.gloo_channels import GlooChannels
from socflower.pipeline.runtime.group import outcome_of
from socflower.pipeline.runtime.grpc_channels import GrpcChannels
from socflower.pipeline.runtime.member import (
    CONTROL,
    END,
    STATE,
    Member,
    Mini,
    Receive,
    TrainedModel,
    refuse_unfit,
)
from socflower.pipeline.runtime.payloads import EXACT, ActivationCoding
from socflower.quantities import counted
from socflower.training.batches import BatchSchedule, sample_key
from socflower.training.fp32 import FP32Trainer
from socflower.training.model_state import load_trainable_state, trainable_state
from socflower.training.trainer import TrainingSpan
from socflower.wire.logs import log
from socflower.wire.message_keys import (
    COMPLETED,
    LEFT_OUT,
    NO_MODEL,
    PREEMPTED,
    DeviceReport,
    GroupTask,
    RingOutcome,
    RingTask,
)
from socflower.workloads import DataSource

_SHARE_TOLERANCE = 0.1  # of a stage's time, that new shares have to save
_KEPT_STEPS = 2  # the newest backup may be incomplete when a device is lost


@dataclass(frozen=True, kw_only=True)
class PipelineMember:
    """The configuration of one device's part of an interval; `train` runs it.

    `plan` is of SoCs, as `group.members`; `group.partitions` has their participants, which are the port's ranks.
    `state` is of the interval before, if this device leads. With `backup_steps` stages are backed up so often within
    the interval; 0: only at its beginning.
    """

    model: nn.Module
    has_model: bool  # whether `model` has the initial weights, as the leader's has
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
    backup_steps: int = 0
    departs_at: int | None = None
    on_step: Callable[[AppliedStep], None] = lambda step: None  # called after each update

    def train(self) -> MemberResult:
        """Train with the other devices; the caller closes the port. The leader's `model` has the result."""
        work = _Session(self)
        try:
            return work.run()
        finally:
            work.close()


class _Session:
    """The state of a device's part of an interval."""

    def __init__(self, member: PipelineMember) -> None:
        self._config, self._group, self._ring = member, member.group, member.ring
        self._soc_of = dict(zip(member.group.partitions, member.group.members, strict=True))
        self._soc = self._soc_of[member.ring.participant]
        self._membership = Membership(
            member.port,
            member.ring.participant,
            member.group.partitions,
            heartbeat_s=member.ring.heartbeat_s,
            rendezvous_s=member.ring.rendezvous_s,
        )
        self._names = frozenset(trainable_state(member.model))
        self._of_layers = [
            self._names & frozenset().union(*(one.tensors for one in piece.operations))
            for piece in member.read.chain.pieces
        ]
        self._socs: list[int] = []  # that are there
        self._kept: dict[int, StageState] = {}
        if member.has_model:
            self._kept[0] = StageState(
                weights={
                    name: tensor.detach().cpu().clone()
                    for name, tensor in trainable_state(member.model).items()
                },
                optimizer={}
                if member.state is None
                else torch.load(io.BytesIO(member.state), weights_only=True, map_location="cpu"),
            )
        self._awaited: dict[int, list[int]] = {}  # SoCs whose backups of a step are to come
        self._schedule = BatchSchedule(member.group, [len(member.data)])
        self._channels: Channels | None = None
        self._stage: Member | None = None
        self._plan = member.plan
        self._step = 0
        self._lost_at_s: float | None = None
        self._recoveries_s: list[float] = []
        self._end: TrainedModel | None = None
        self._log: list[str] = []

    def run(self) -> MemberResult:
        """Form the pipeline and train; do both again whenever a device is lost."""
        config, group = self._config, self._group
        refuse_unfit(config.trainer)
        if not group.first_step:
            config.trainer.require_divisible_loss(config.model, (), config.data, group.batch_size)
        while True:
            try:
                self._form()
                self._train()
                return self._finish()
            except PeerLost as error:
                log(INFO, "pipeline: %s; re-forming it", error)
                self._lost_at_s = self._lost_at_s or time.monotonic()
                if self._stage is not None:
                    self._keep(self._stage)
                    self._stage = None
                self._close_channels()
            except Preempted:
                self._membership.leave()
                return self._without_model(PREEMPTED)
            except LeftOut as error:
                log(INFO, "pipeline: %s", error)
                return self._without_model(LEFT_OUT)
            except NoModel:
                return self._without_model(NO_MODEL)

    def close(self) -> None:
        """Leave the pipeline."""
        self._close_channels()
        self._membership.close()

    # ------------------------------------------------------------------------------------------------- forming

    def _form(self) -> None:
        standing = MemberState(
            num_steps=max(self._kept, default=0), has_model=bool(self._kept), optimizer=""
        )
        generation = self._membership.form(standing, self._config.switch.raise_if_active)
        socs = self._socs = [self._soc_of[participant] for participant in generation.members]
        kind = GlooChannels if self._ring.transport == "gloo" else GrpcChannels
        self._channels = (
            QueueChannels.of(socs)[self._soc]
            if len(socs) == 1
            else kind(
                self._config.port,
                socs,
                generation.members,
                generation.number,
                self._ring.heartbeat_s,
            )
        )
        decision = self._agree(socs)
        if decision["step"] is None:
            self._log.append(decision["why"])
            self._membership.finish()
            raise NoModel
        self._plan, self._step = from_json(decision["plan"]), decision["step"]
        self._move([StateTransfer(*each) for each in decision["moves"]])
        self._awaited.clear()
        self._stage = self._make_stage()
        if self._lost_at_s is not None:
            self._recoveries_s.append(time.monotonic() - self._lost_at_s)
            self._lost_at_s = None
            self._log.append(
                f"the pipeline goes on from update {self._step} on "
                f"{counted(len(self._plan.socs), 'device')}, as {self._plan.architecture}"
            )

    def _agree(self, socs: list[int]) -> dict[str, Any]:
        """Return what the first device has decided: a plan, the step to go on from, and what has to move."""
        channels, first = self._channels, socs[0]
        assert channels is not None
        held = {step: sorted(state.weights) for step, state in self._kept.items()}
        if self._soc != first:
            channels.send(first, CONTROL, bytearray(json.dumps(sorted(held.items())).encode()))
            return dict(json.loads(bytes(channels.receive(Receive(first, CONTROL), self._poll))))
        reports: dict[int, dict[int, list[str]]] = {first: held}
        for soc in socs[1:]:
            reports[soc] = dict(
                json.loads(bytes(channels.receive(Receive(soc, CONTROL), self._poll)))
            )
        decision = self._decide(socs, reports)
        for soc in socs[1:]:
            channels.send(soc, CONTROL, bytearray(json.dumps(decision).encode()))
        return decision

    def _decide(
        self, socs: list[int], reports: Mapping[int, Mapping[int, list[str]]]
    ) -> dict[str, Any]:
        step = newest_common(reports, self._names)
        if step is None:
            return {"step": None, "why": "a stage and its backup were lost together"}
        try:
            plan = replanned(self._config.plan, self._config.read.model, socs)
        except InfeasiblePlan as error:
            return {"step": None, "why": str(error)}
        needed = {soc: sorted(self._names_of(plan, soc)) for soc in socs}
        for soc, keeper in backup_of(plan).items():
            needed[keeper] = sorted({*needed[keeper], *needed[soc]})
        found = moves(needed, {soc: own.get(step, ()) for soc, own in reports.items()}, socs)
        return {"step": step, "plan": to_json(plan), "moves": found}

    def _names_of(self, plan: Plan, soc: int) -> frozenset[str]:
        """Return the names of what a device of a plan trains; those of no layer are the first device's."""
        own = frozenset().union(
            *(
                self._of_layers[layer]
                for pipeline in plan.pipelines
                for stage in pipeline.stages
                if soc in stage.devices
                for layer in range(stage.first_layer, stage.last_layer + 1)
            )
        )
        return (
            own | (self._names - frozenset().union(*self._of_layers))
            if soc == self._leader_of(plan)
            else own
        )

    def _leader_of(self, plan: Plan) -> int:
        """Return the device that answers: the leader of the group, or if it is lost the plan's first one."""
        return self._group.leader if self._group.leader in self._socs else plan.socs[0]

    def _move(self, parts: list[StateTransfer]) -> None:
        """Send and receive parts of the state of the step that all go on from; forget other steps."""
        channels = self._channels
        assert channels is not None
        state = self._kept.get(self._step, StageState())
        for part in parts:
            if part.source == self._soc:
                channels.send(part.target, STATE, state.to_bytes(part.names))
        for part in parts:
            if part.target == self._soc:
                state = state.joined(
                    StageState.from_bytes(channels.receive(Receive(part.source, STATE), self._poll))
                )
        self._kept = {self._step: state}

    def _make_stage(self) -> Member:
        config, channels = self._config, self._channels
        assert channels is not None
        state = self._kept[self._step]
        model = copied(config.model)
        load_trainable_state(model, {**trainable_state(model), **state.weights})
        span = TrainingSpan(
            first_step=self._group.first_step + self._step,
            total_steps=self._group.total_steps,
            steps_per_epoch=self._group.steps_per_epoch,
            proximal_mu=self._group.proximal_mu,
            seed=(self._group.seed, self._group.group_id),
        )
        return Member(
            self._plan,
            self._soc,
            config.read,
            model,
            config.trainer,
            span,
            data=config.data,
            send=channels.send,
            state=state.optimizer_bytes(),
            coding=config.coding,
            budget_bytes=config.budget_bytes.get(self._soc, math.inf),
            on_pass=lambda *_: self._poll(),
            leader=self._leader_of(self._plan),
            int8_socs=config.int8_socs,
        )

    # ------------------------------------------------------------------------------------------------ training

    def _train(self) -> None:
        stage, channels, group = self._stage, self._channels, self._group
        assert stage is not None and channels is not None
        begun = self._step
        while self._step < group.num_steps:
            if self._config.departs_at is not None and self._step >= self._config.departs_at:
                raise Preempted("the device is preempted")
            if (
                self._config.backup_steps
                and self._step > begun
                and self._step % self._config.backup_steps == 0
            ):
                self._back_up()
            every = self._ring.rebalance_steps
            if every and self._step > begun and self._step % every == 0:
                self._share_anew()
            (indices,) = self._schedule.batch(group.first_step + self._step)
            run_script(
                stage.update(
                    Mini(
                        step=group.first_step + self._step,
                        indices=indices,
                        key=sample_key(group, self._step),
                    )
                ),
                channels,
                self._poll,
            )
            self._step += 1
            self._take_backups()
            self._config.on_step(
                AppliedStep(
                    step=group.first_step + self._step - 1,
                    samples=tuple(indices.tolist()),
                    members=tuple(
                        group.partitions[group.members.index(soc)] for soc in self._plan.socs
                    ),
                )
            )

    def _share_anew(self) -> None:
        """Divide the samples of replicated stages by what their devices have measured since the last time."""
        stage, channels, first = self._stage, self._channels, self._socs[0]
        assert stage is not None and channels is not None
        own = [stage.drain_sample_s(), self._most_samples(stage)]
        if self._soc != first:
            channels.send(first, CONTROL, bytearray(json.dumps(own).encode()))
            answer = bytes(channels.receive(Receive(first, CONTROL), self._poll)).decode()
        else:
            reports = {first: own} | {
                soc: json.loads(bytes(channels.receive(Receive(soc, CONTROL), self._poll)))
                for soc in self._socs[1:]
            }
            plan = shared_anew(
                self._plan,
                {soc: each[0] for soc, each in reports.items()},
                {soc: each[1] for soc, each in reports.items()},
                _SHARE_TOLERANCE,
            )
            answer = "" if plan is None else to_json(plan)
            for soc in self._socs[1:]:
                channels.send(soc, CONTROL, bytearray(answer.encode()))
        if answer:
            self._plan = from_json(answer)
            stage.share_anew(self._plan)
            self._log.append(
                f"shares anew after {counted(self._step, 'update')}: "
                + "; ".join(
                    f"stage {number}: {', '.join(map(str, each.shares))}"
                    for number, each in enumerate(self._plan.pipelines[0].stages)
                    if len(each.devices) > 1
                )
            )

    def _most_samples(self, stage: Member) -> int:
        """Return how many samples of a micro-batch fit this device's budget, by what it has needed so far."""
        work = stage.work
        if (
            work is None
            or not math.isfinite(work.budget_bytes)
            or work.peak_bytes <= work.state_bytes
        ):
            return 1 << 30
        share = next(
            share
            for pipeline in self._plan.pipelines
            for each in pipeline.stages
            for soc, share in zip(each.devices, each.shares, strict=True)
            if soc == self._soc
        )
        return int(
            share * (work.budget_bytes - work.state_bytes) / (work.peak_bytes - work.state_bytes)
        )

    def _back_up(self) -> None:
        """Keep this step's state, and send it to the device that keeps a copy."""
        stage, channels = self._stage, self._channels
        assert stage is not None and channels is not None
        self._keep(stage)
        keepers = backup_of(self._plan)
        if self._soc in keepers:
            channels.send(keepers[self._soc], STATE, self._kept[self._step].to_bytes(self._names))
        self._awaited[self._step] = [soc for soc, keeper in keepers.items() if keeper == self._soc]
        for soc in self._awaited[self._step]:
            channels.expect([Receive(soc, STATE)])
        for step in sorted(self._kept)[:-_KEPT_STEPS]:
            del self._kept[step]

    def _keep(self, stage: Member) -> None:
        """Keep the state after the last update that this device has done."""
        weights, optimizer = stage.snapshot()
        loose = self._names - frozenset().union(
            *self._of_layers
        )  # buffers of no layer, which nothing changes
        rest = {
            name: weight
            for name, weight in self._kept[min(self._kept)].weights.items()
            if name in loose
        }
        own = StageState(weights={**rest, **weights}, optimizer=optimizer)
        self._kept[self._step] = own.joined(self._kept.get(self._step, StageState()))

    def _take_backups(self) -> None:
        """Keep the copies of others' states that have come meanwhile."""
        assert self._channels is not None
        for step, senders in self._awaited.items():
            while senders and self._channels.has_arrived(Receive(senders[0], STATE)):
                body = self._channels.receive(Receive(senders.pop(0), STATE), self._poll)
                if step in self._kept:
                    self._kept[step] = self._kept[step].joined(StageState.from_bytes(body))

    def _poll(self) -> None:
        self._config.switch.raise_if_active()
        self._membership.require_complete()

    # -------------------------------------------------------------------------------------------------- ending

    def _finish(self) -> MemberResult:
        """Bring the model together on the leader, which answers; the others wait until it has it.

        Another one, the deputy, gets the model too and keeps it, in case the leader is lost before it has answered.
        """
        stage, channels = self._stage, self._channels
        assert stage is not None and channels is not None
        end = run_script(stage.finish(), channels, self._poll)
        leader = self._leader_of(self._plan)
        deputy = next((soc for soc in self._socs if soc != leader), None)
        if end is not None:
            for soc in self._socs:
                if soc != leader:
                    channels.send(soc, END, bytearray(end.to_bytes() if soc == deputy else b""))
            channels.flush(self._poll)
        else:
            body = channels.receive(Receive(leader, END), self._poll)
            end = TrainedModel.from_bytes(body) if self._soc == deputy else None
        self._membership.finish()
        return self._completed(end, answers=self._soc == leader)

    @property
    def _present(self) -> list[int]:
        return [self._soc_of[participant] for participant in self._membership.finished]

    def _completed(self, end: TrainedModel | None, *, answers: bool) -> MemberResult:
        self._end = end
        outcome = self._outcome(COMPLETED, answers=answers)
        if end is None:
            return MemberResult(outcome=outcome, mean_loss=0.0, num_samples=0, end=None)
        own = trainable_state(self._config.model)
        load_trainable_state(self._config.model, {**own, **end.weights})
        num_samples = sum(
            len(self._schedule.batch(self._group.first_step + step)[0])
            for step in range(self._group.num_steps)
        )
        whole = outcome_of(end, self._plan, num_samples)
        devices = DeviceReport(devices=tuple(end.devices.values()), socs=tuple(end.devices))
        return MemberResult(
            outcome=outcome,
            mean_loss=whole.mean_loss,
            num_samples=num_samples,
            end=whole.end,
            devices=devices,
        )

    def _without_model(self, outcome: str) -> MemberResult:
        return MemberResult(
            outcome=self._outcome(outcome, answers=False), mean_loss=0.0, num_samples=0, end=None
        )

    def _outcome(self, outcome: str, *, answers: bool) -> RingOutcome:
        rates = {
            soc: 1.0 / each
            for soc, each in (self._end.sample_s.items() if self._end else ())
            if each
        }
        return RingOutcome(
            outcome=outcome,
            members=tuple(self._present),
            num_steps=self._step,
            answers=answers,
            rates=tuple(rates.get(soc, 0.0) for soc in self._present) if rates else (),
            recoveries_s=tuple(self._recoveries_s),
            log=tuple(self._membership.log_lines),
            notes=tuple(self._log),
            preempted=tuple(
                self._soc_of[participant] for participant in self._membership.preempted
            ),
        )

    def _close_channels(self) -> None:
        if self._channels is not None:
            self._channels.close()
            self._channels = None
