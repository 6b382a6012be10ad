"""One member's part of a group's training, on a machine of its own: the same steps as `train_group`, over a ring."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging import INFO
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from socflower.capture.random_state import own_random_state
from socflower.errors import ConfigError
from socflower.rings.balance import PassTimer, RingBalance
from socflower.rings.collective import Collective, PeerLost
from socflower.rings.compression.codecs import GradientCompression, make_compression
from socflower.rings.gradient_exchange import GradientExchange, Turn
from socflower.rings.membership import Generation, LeftOut, Membership, NoModel, Standing
from socflower.rings.model_state import (
    Snapshot,
    restore,
    split_buffers,
    take_snapshot,
    weights_digest,
    weights_from_bytes,
    weights_to_bytes,
)
from socflower.rings.preemption import Preempted, PreemptionSwitch
from socflower.rings.transports.gloo import GlooRing
from socflower.rings.transports.grpc import GrpcRing
from socflower.rings.transports.in_process import in_process_rings
from socflower.rings.transports.port import RingPort
from socflower.rings.uplink_turns import Neighbours, Turns
from socflower.training.batches import BatchSchedule, Indices
from socflower.training.trainer import ExchangingSession, SessionEnd, Trainer, TrainingSpan
from socflower.wire.logs import log
from socflower.wire.message_keys import COMPLETED, LEFT_OUT, NO_MODEL, PREEMPTED, GroupTask, RingOutcome, RingTask
from socflower.workloads import LabelledData

TRANSPORTS = ("gloo", "grpc")


def open_ring(transport: str, port: RingPort, ranks: Sequence[int], generation: int, heartbeat_s: float) -> Collective:
    """Return this member's end of generation `generation` among `ranks` of the port's addresses, in ring order.

    "gloo" is for a trusted network, "grpc" for any. A member that is alone needs neither. Generations are numbered
    upwards; the one before has to be closed. `heartbeat_s` is how long a member may be out of reach while the ring
    opens. Raises `ConfigError` for other names, and for gloo on an address that is not private.
    """
    if transport not in TRANSPORTS:
        raise ConfigError(f'ring transport "{transport}" is unknown; give one of {", ".join(TRANSPORTS)}')
    if len(ranks) == 1:
        return in_process_rings(1)[0]
    ring = GlooRing if transport == "gloo" else GrpcRing
    return ring(port, ranks, generation, heartbeat_s)


_WARM_UP_EPOCHS = 4  # in which deep gradient compression comes to its full ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class AppliedStep:
    """A step that counts for a member, in the ring that made it; a ledger of these shows that no batch is lost."""

    step: int  # counted from the start of training
    members: tuple[int, ...]  # participants whose gradients are in it
    samples: tuple[int, ...]  # of this member; positions in the group's data, or in its own where data stay
    adopted: bool = False  # applied by the others; this member took over what came of it
    own_s: float = 0.0  # seconds of this member's own work, in which it waited for nobody; 0 for an adopted step


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberEnd:
    """What a member's part came to."""

    outcome: RingOutcome
    mean_loss: float  # of the group
    num_samples: int  # of the group
    end: SessionEnd | None  # None without a model
    compression: bytes = b""  # state of the gradient compression


@dataclass(frozen=True, kw_only=True)
class RingMember:
    """All that a member needs; `train` runs its part.

    `data` is the whole data set if the group's data are dealt, else the member's own. `state` is the trainer's, of the
    end of the interval before. `departs_at` makes the member leave before that of the interval's steps, as if a user
    had asked for the device.
    """

    model: nn.Module
    has_model: bool  # whether the weights in `model` are those to begin with; else they come over the ring
    data: LabelledData
    group: GroupTask
    ring: RingTask
    trainer: Trainer
    port: RingPort  # its ranks are participants
    switch: PreemptionSwitch
    state: bytes | None = None
    compression_state: bytes | None = None  # of the gradient compression, of the end of the interval before
    departs_at: int | None = None
    on_step: Callable[[AppliedStep], None] = lambda step: None
    clock: Callable[[], float] = time.perf_counter  # in seconds; by it a member measures how fast it is

    def train(self) -> MemberEnd:
        """Train `model` in place with the members that come and stay; the port is left to its owner.

        The ring forms again whenever a member dies, hangs or leaves; at most the batch under way is done again.
        """
        work = _MemberSession(self)
        group = self.group
        try:
            with own_random_state(group.seed, group.group_id, group.first_step, self.ring.participant):
                return work.run()
        finally:
            work.close()


class _MemberSession:
    """The state of a member's part."""

    def __init__(self, member: RingMember) -> None:
        group, ring = member.group, member.ring
        self._member, self._group, self._ring = member, group, ring
        self._model, self._port = member.model, member.port
        self._membership = Membership(member.port, ring.participant, group.partitions,
                                      heartbeat_s=ring.heartbeat_s, rendezvous_s=ring.rendezvous_s)
        self._exchange = GradientExchange(member.model, ring.num_buckets)
        self._turns = _turns(member.port, group, ring)
        self._compression: GradientCompression | None = None
        self._collective: Collective | None = None
        self._session: ExchangingSession | None = None
        self._state = member.state
        self._has_model = member.has_model
        self._end: SessionEnd | None = None
        self._schedule = BatchSchedule(group, [len(member.data)] if group.reshuffle else [])
        self._num_steps = self._num_samples = self._num_own_samples = 0
        self._losses: list[Tensor] = []
        self._under_way: tuple[Snapshot, list[int], Tensor] | None = None  # of a step that is not applied yet
        self._members: tuple[int, ...] = ()
        self._lost_s: float | None = None
        self._recoveries_s: list[float] = []
        self._hooks: list[RemovableHandle] = []
        self._work = PassTimer(member.clock)
        self._rates: dict[int, float] = {}  # of the members, at the end
        self._balance = RingBalance(group, self._work) if ring.rebalance_steps and group.reshuffle else None

    def run(self) -> MemberEnd:
        """Form the ring, train, and both again as often as needed."""
        while True:
            try:
                self._form()
                self._train()
                return self._finish()
            except PeerLost as error:
                log(INFO, "ring: %s; forming it again", error)
                self._lost_s = self._lost_s or time.monotonic()
                self._exchange.abandon()
                self._close_ring()
            except Preempted:
                self._membership.leave()
                return self._without_model(PREEMPTED)
            except LeftOut as error:
                log(INFO, "ring: %s", error)
                return self._without_model(LEFT_OUT)
            except NoModel:
                return self._without_model(NO_MODEL)

    def close(self) -> None:
        """Let go of ring and model."""
        self._exchange.close()
        for hook in self._hooks:
            hook.remove()
        self._close_ring()
        if self._turns is not None:
            self._turns.close()
        self._membership.close()

    # ------------------------------------------------------------------------------------------------- forming

    def _form(self) -> None:
        switch = self._member.switch
        standing = Standing(num_steps=self._num_steps, has_model=self._has_model, optimizer=self._optimizer_digest())
        generation = self._membership.form(standing, switch.raise_if_active)
        transport = self._ring.transport.partition("+")[0]  # whether the port has TLS is the port's business
        self._collective = open_ring(transport, self._port, generation.members, generation.number,
                                     self._ring.heartbeat_s)
        self._members = generation.members
        if not self._group.reshuffle:
            self._schedule = BatchSchedule(self._group, self._sizes())
        if self._balance is not None:
            self._balance.agree(self._collective, self._poll)
        self._take_over(generation)
        if self._lost_s is not None:
            self._recoveries_s.append(time.monotonic() - self._lost_s)
            self._lost_s = None

    def _sizes(self) -> list[int]:
        """Return how many samples each member of the group has; those that are gone count none."""
        assert self._collective is not None
        told = self._collective.all_gather(str(len(self._member.data)).encode(), self._poll)
        sizes = dict(zip(self._members, map(int, told), strict=True))
        return [sizes.get(participant, 0) for participant in self._group.partitions]

    def _take_over(self, generation: Generation) -> None:
        """Stand where the generation's source stands: its weights, its optimiser, its number of steps.

        A member that failed in a step which the source has applied was part of that step: it had given its gradient,
        or the source could not have got the sum. So the step counts for it as well, and is not done again.
        """
        stands_behind = generation.num_steps != self._num_steps or not self._has_model
        if self._under_way is not None and generation.num_steps == self._num_steps:
            self._undo_step_under_way()
        weights = None if generation.same_model else self._from(
            generation.source, lambda: weights_to_bytes(self._model, with_buffers=not self._num_steps))
        state = None if generation.same_optimizer else self._from(
            generation.optimizer_source, lambda: self._current_state() or b"")
        # From here on nothing can fail. Had the source died between its weights and its optimiser, or before either, a
        # member that had counted its step already would pass for one that has applied it, and the step would be lost.
        if weights is not None and generation.source != self._ring.participant:
            weights_from_bytes(self._model, weights, with_buffers=not generation.num_steps)
        if self._under_way is not None:
            self._adopt_step_under_way()
        if state is not None and generation.optimizer_source != self._ring.participant:
            self._state = state or None
            self._drop_session()
        elif stands_behind:
            self._drop_session()
        self._num_steps = generation.num_steps
        self._has_model = True
        if self._session is None:
            self._session = self._start_session()

    def _from(self, participant: int, make: Callable[[], bytes]) -> bytes:
        """Return what a member of the ring makes, in all members."""
        assert self._collective is not None
        return self._collective.broadcast(make() if participant == self._ring.participant else None,
                                          self._members.index(participant), self._poll)

    def _undo_step_under_way(self) -> None:
        """Undo what a step's passes have changed, before it is redone."""
        assert self._under_way is not None
        snapshot, _, _ = self._under_way
        self._under_way = None
        restore(self._model, snapshot)

    def _adopt_step_under_way(self) -> None:
        """Count a step that the others have applied."""
        assert self._under_way is not None
        _, own, loss = self._under_way
        self._under_way = None
        if self._compression is not None:
            self._compression.finish_step()
        self._count(own, loss, adopted=True)

    def _start_session(self) -> ExchangingSession:
        group, position = self._group, self._group.partitions.index(self._ring.participant)
        span = TrainingSpan(first_step=group.first_step + self._num_steps, total_steps=group.total_steps,
                            steps_per_epoch=group.steps_per_epoch,
                            npu_ratios=group.npu_ratios[position:position + 1])
        session = self._member.trainer.start(self._model, span, self._state)
        if not isinstance(session, ExchangingSession):
            raise ConfigError(f"{type(self._member.trainer).__name__} cannot train in a ring: it does not hand out its "
                              "gradients; use FP32Trainer or MixedPrecisionTrainer on real clusters")
        momentum = session.hand_over_momentum() if self._ring.compression == "dgc" else 0.0
        if self._compression is None:
            self._compression = make_compression(
                self._ring.compression, seed=group.seed, momentum=momentum,
                warm_up_steps=_WARM_UP_EPOCHS * group.steps_per_epoch)
            if self._compression is not None and self._member.compression_state is not None:
                self._compression.restore(self._member.compression_state)
        if session.final_in_backward and not self._hooks:
            # A pass of a large model on a small SoC takes longer than its user wants to wait: look at every layer.
            self._hooks = [module.register_forward_pre_hook(lambda module, inputs: self._poll())
                           for module in self._model.modules() if not any(True for _ in module.children())]
        return session

    def _optimizer_digest(self) -> str:
        state = self._current_state()
        return hashlib.sha256(state).hexdigest() if state else ""

    def _current_state(self) -> bytes | None:
        return self._state if self._session is None else self._session.state()

    # ------------------------------------------------------------------------------------------------ training

    def _train(self) -> None:
        session, group = self._session, self._group
        assert session is not None and self._collective is not None
        present = [group.partitions.index(participant) for participant in self._members]
        position = self._members.index(self._ring.participant)
        while self._num_steps < group.num_steps:
            if self._member.departs_at is not None and self._num_steps >= self._member.departs_at:
                raise Preempted("the device is wanted for something else")
            shares = self._shares(present)
            total = sum(map(len, shares))
            if not total:
                self._num_steps += 1
                continue
            self._work.begin_step()
            with self._work.timed():
                inputs, labels = self._member.data.batch(torch.from_numpy(shares[position]))
                snapshot = take_snapshot(self._model)
            if self._compression is not None:
                self._compression.start_step(group.first_step + self._num_steps)
            self._exchange.begin(self._collective, self._poll, overlapped=session.final_in_backward,
                                 turn=self._turn(), compression=self._compression)
            loss = torch.zeros(())
            try:
                with self._work.timed():
                    loss = session.gradients([(inputs, labels)], total)
            finally:
                # Also when the pass was broken off: its random numbers and statistics are to be undone.
                self._under_way = (snapshot, shares[position].tolist(), loss)
            self._exchange.finish()
            with self._work.timed():
                session.apply()
            if self._compression is not None:
                self._compression.finish_step()
            self._under_way = None
            self._work.end_step(len(shares[position]))
            self._count(shares[position].tolist(), loss, total=total)
            # Shares that are balanced after the last step would be those of no step.
            if self._balance is not None and self._num_steps % self._ring.rebalance_steps == 0 \
                    and self._num_steps < group.num_steps:
                self._balance.exchange(self._collective, present, self._poll)

    def _shares(self, present: list[int]) -> list[Indices]:
        step, balance = self._group.first_step + self._num_steps, self._balance
        if balance is None:
            return self._schedule.shares(step, present)
        return self._schedule.shares(step, present, balance.capacities(present), balance.due(present))

    def _count(self, own: list[int], loss: Tensor, *, adopted: bool = False, total: int | None = None) -> None:
        """Note a step as done."""
        step = self._group.first_step + self._num_steps
        if total is None:
            total = sum(map(len, self._schedule.batch(step)))
        self._num_steps += 1
        self._num_samples += total
        self._num_own_samples += len(own)
        self._losses.append(loss)
        self._member.on_step(AppliedStep(step=step, members=() if adopted else self._members, samples=tuple(own),
                                         adopted=adopted, own_s=0.0 if adopted else self._work.step_s))

    def _turn(self) -> Turn | None:
        """Return what makes the group exchange in its turn: one member waits, and lets the others know."""
        turns, ring = self._turns, self._collective
        if turns is None or ring is None:
            return None
        step, waits = self._num_steps, self._members[0] == self._ring.participant

        def begin() -> None:
            if waits:
                turns.end(step - 1)  # the member that waited before this one may have died before it could say so
                turns.wait(step, self._poll)
            ring.broadcast(b"" if waits else None, 0, self._poll)

        def end() -> None:
            if waits:
                turns.end(step)

        return Turn(begin=begin, end=end)

    def _poll(self) -> None:
        self._member.switch.raise_if_active()
        self._membership.require_whole()

    # -------------------------------------------------------------------------------------------------- ending

    def _finish(self) -> MemberEnd:
        """Make sure that all members have the same weights, average what is not shared, and say how it went."""
        assert self._session is not None and self._collective is not None
        if self._end is None:
            self._end = self._session.finish()
        floats, counters = split_buffers(self._model)
        losses = float(torch.stack(self._losses).mean()) if self._losses else 0.0
        told = [json.loads(payload) for payload in self._collective.all_gather(json.dumps({
            "weights": weights_digest(self._model), "steps": self._num_steps, "loss": losses,
            "samples": self._num_own_samples, "counters": [counter.tolist() for counter in counters],
            "rate": self._work.rate,
        }).encode(), self._poll)]
        if len({(entry["weights"], entry["steps"]) for entry in told}) > 1:
            raise RuntimeError(f"group {self._group.group_id}: its members have come to different weights; nothing of "
                               "this interval is used")
        self._average(floats, counters, told)
        self._rates = {member: entry["rate"] for member, entry in zip(self._members, told, strict=True)}
        self._membership.finish()
        members = self._members
        answering = self._ring.leader if self._ring.leader in members else members[0]
        return MemberEnd(
            outcome=self._outcome(COMPLETED, answers=answering == self._ring.participant),
            mean_loss=sum(entry["loss"] for entry in told), num_samples=self._num_samples, end=self._end,
            compression=self._compression.state() if self._compression is not None else b"")

    def _average(self, floats: list[Tensor], counters: list[Tensor], told: list[dict[str, Any]]) -> None:
        """Average BatchNorm's running statistics by the samples that each member has seen (F3)."""
        assert self._collective is not None
        total = sum(entry["samples"] for entry in told)
        if not floats or not total or len(self._members) == 1:
            return
        flat = torch.cat([buffer.double().flatten() for buffer in floats]) * (self._num_own_samples / total)
        self._collective.all_reduce(flat).wait(self._poll)
        start = 0
        for buffer in floats:
            buffer.copy_(flat[start:start + buffer.numel()].view(buffer.size()))
            start += buffer.numel()
        for index, counter in enumerate(counters):
            counter.copy_(torch.stack([torch.tensor(entry["counters"][index]) for entry in told]).amax(dim=0))

    def _without_model(self, outcome: str) -> MemberEnd:
        return MemberEnd(outcome=self._outcome(outcome, answers=False), mean_loss=0.0, num_samples=0, end=None)

    def _outcome(self, outcome: str, *, answers: bool) -> RingOutcome:
        soc_of = dict(zip(self._group.partitions, self._group.members, strict=True))
        return RingOutcome(
            outcome=outcome, members=tuple(soc_of[participant] for participant in self._membership.finished),
            num_steps=self._num_steps, answers=answers, recoveries_s=tuple(self._recoveries_s),
            preempted=tuple(soc_of[participant] for participant in self._membership.preempted),
            log=self._membership.log_lines,
            rates=tuple(self._rates.get(participant, 0.0) for participant in self._membership.finished)
            if self._rates else ())

    def _drop_session(self) -> None:
        if self._session is not None and self._end is None:
            self._session.finish()
        self._session, self._end = None, None

    def _close_ring(self) -> None:
        if self._collective is not None:
            self._collective.close()
            self._collective = None


def _turns(port: RingPort, group: GroupTask, ring: RingTask) -> Turns | None:
    if not ring.groups_before and not ring.groups_after:
        return None
    members: dict[int, list[int]] = {}
    for text in ring.neighbours:
        group_id, participant, _ = text.split(" ")
        members.setdefault(int(group_id), []).append(int(participant))
    return Turns(port, group.group_id,
                 Neighbours(before=ring.groups_before, after=ring.groups_after, members=members),
                 heartbeat_s=ring.heartbeat_s, rendezvous_s=ring.rendezvous_s)
