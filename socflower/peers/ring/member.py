"""One member's part of a group's training on its own machine: the same steps as `train_group`, over a ring."""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from socflower.errors import ConfigError, TrainingFailed
from socflower.hierarchy.averaging import non_finite_tensors
from socflower.hierarchy.exchange.coding_bytes import RING, SERVER, gradient_coding
from socflower.hierarchy.exchange.models import NONE
from socflower.model_graph.random_state import RandomState, own_random_state
from socflower.model_graph.torch_device import device_label, device_of
from socflower.peers.collective import Collective, RingPeers, gather_json
from socflower.peers.leaders.model_changes import Floats, MemberChanges, feedback_digest
from socflower.peers.leaders.model_exchange import GroupLeader, GroupsModel, feedback_after
from socflower.peers.membership import Generation, Membership, MemberState
from socflower.peers.owner_preemption import Preempted, PreemptionSwitch
from socflower.peers.ring.balance import RingBalance, StepTimer
from socflower.peers.ring.bucket_exchange import BucketExchange, TurnCallbacks
from socflower.peers.ring.turn_signals import Neighbours, TurnSignals
from socflower.peers.session import (
    ElasticSession,
    Role,
    Terminated,
    answering,
    counts_pending,
)
from socflower.peers.transports.gloo import GlooRing, GlooServer
from socflower.peers.transports.grpc import GrpcRing
from socflower.peers.transports.in_process import in_process_rings
from socflower.peers.transports.port import RingPort
from socflower.peers.transports.tree import grpc_tree
from socflower.training.batches import BatchSchedule, Indices, sample_key
from socflower.training.exchange.compression import GradientCompression
from socflower.training.exchange.group_sum import exchanging, own_compression
from socflower.training.hang_watch import working
from socflower.training.model_state import load_trainable_state, trainable_state, untrained_names
from socflower.training.trainer import (
    DivergingSession,
    ExchangingSession,
    JointSession,
    Part,
    SessionResult,
    Trainer,
    TrainingSpan,
    WeighingSession,
    arithmetic_of,
    mean_loss,
    training_device,
    try_loss,
)
from socflower.wire.arrays import array_to_bytes, pack_arrays, unpack_arrays
from socflower.wire.message_keys import (
    COMPLETED,
    PREEMPTED,
    TERMINATED,
    DeviceReport,
    GroupTask,
    RingOutcome,
    RingTask,
)
from socflower.workloads.data_source import DataSource

TRANSPORTS = ("gloo", "grpc")


def open_ring(
    transport: str,
    port: RingPort,
    ranks: Sequence[int],
    generation: int,
    heartbeat_s: float,
    kind: str = RING,
) -> Collective:
    """Return this member's end of generation `generation` among `ranks` of the port's addresses, in ring order.

    With `kind` "server" the first of them is the parameter server of the others. "gloo" is for a trusted network,
    "grpc" for any. A ring of one member uses none. Generation numbers increase; the previous one must be closed.
    `heartbeat_s` is how long a member may be unreachable while the ring opens. Raises `ConfigError` for other names,
    and for gloo on an address that is not private.
    """
    if transport not in TRANSPORTS:
        raise ConfigError(
            f'ring transport "{transport}" is unknown; give one of {", ".join(TRANSPORTS)}'
        )
    if len(ranks) == 1:
        return in_process_rings(1)[0]
    if kind == SERVER and transport != "gloo":
        return grpc_tree(port, ranks, [()] * len(ranks), generation, heartbeat_s)
    ring = GlooRing if transport == "gloo" else GrpcRing
    opened = ring(port, ranks, generation, heartbeat_s)
    return GlooServer(opened) if kind == SERVER and isinstance(opened, GlooRing) else opened


# The stages after the last step: members share statistics, then have the mean of all groups.
_AVERAGED, _MET = (
    1,
    2,
)
# The limit of events about gradients that were left out.
_MOST_LINES = 3
# The interval of signs of life that a leader sends to its group while it meets other leaders.
_SIGN_OF_LIFE_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AppliedStep:
    """A step that was applied by a member; a ledger of these shows that no batch is lost."""

    # Counted from the start of training.
    step: int
    # The participants whose gradients are included.
    members: tuple[int, ...]
    # This member's samples: positions in the group's data, or in its own if data are not reshuffled.
    samples: tuple[int, ...]
    # Whether the others applied it and this member received the weights.
    adopted: bool = False
    # Seconds of this member's own work, without waits; 0 for an adopted step.
    own_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberResult:
    """The result of a member's part."""

    outcome: RingOutcome
    # The group's mean or sum.
    mean_loss: float
    # The group's mean or sum.
    num_samples: int
    # None without a model.
    end: SessionResult | None
    # The state of the gradient compression.
    compression: bytes = b""
    # The changes of the group that the compression of leaders' models has not sent.
    feedback: Floats | None = None
    # The devices of the members at the end.
    devices: DeviceReport | None = None


@dataclass(frozen=True, kw_only=True)
class RingMember:
    """The configuration of a member; `train` runs its part of the training.

    `data` is the whole data set if data are reshuffled, else the member's own. `state` is the trainer's, from the end
    of the previous interval. `departs_at` makes the member leave before that step of the interval, as if the device
    were preempted.
    """

    model: nn.Module
    # Whether `model` has the initial weights; else they are received over the ring.
    has_model: bool
    data: DataSource
    group: GroupTask
    ring: RingTask
    trainer: Trainer
    # The port's ranks are participants.
    port: RingPort
    switch: PreemptionSwitch
    state: bytes | None = None
    # The state of the gradient compression at the end of the previous interval.
    compression_state: bytes | None = None
    # The feedback with the digest `RingTask.feedback_sha256`, if this member holds it.
    feedback: Floats | None = None
    departs_at: int | None = None
    on_step: Callable[[AppliedStep], None] = lambda step: None
    # A clock in seconds, which measures the member's speed.
    clock: Callable[[], float] = time.perf_counter

    def train(self) -> MemberResult:
        """Train `model` in place with the other members; the caller closes the port.

        The ring is re-formed whenever a member dies, hangs or leaves; at most the current batch is repeated.
        """
        work = _MemberSession(self)
        group = self.group
        try:
            with own_random_state(
                group.seed, group.group_id, group.first_step, self.ring.participant
            ):
                return work.run()
        finally:
            work.close()


class _Snapshot:
    """State other than gradients and weights that a pass changes; it is restored before a pass is repeated."""

    def __init__(self, model: nn.Module | None) -> None:
        """Save the buffers of `model`, if any, and the state of the random generators."""
        # Where a buffer belongs, too: a forward pass may assign another tensor instead of changing
        # this one.
        self._buffers = (
            []
            if model is None
            else [
                (module, name, buffer, buffer.clone())
                for module in model.modules()
                for name, buffer in module.named_buffers(recurse=False)
            ]
        )
        self._random = RandomState()

    def restore(self) -> None:
        for module, name, buffer, saved in self._buffers:
            buffer.copy_(saved)
            if module.get_buffer(name) is not buffer:
                setattr(module, name, buffer)
        self._random.restore()


@dataclass(frozen=True, kw_only=True, slots=True)
class _PendingStep:
    """A step whose gradient this member has given, and which is not yet applied."""

    # The random state before the pass.
    snapshot: _Snapshot
    # This member's samples.
    own: list[int]
    # The number of samples of all members.
    total: int
    loss: Tensor


@dataclass(slots=True)
class _Progress:
    """What a member has done of its interval."""

    num_steps: int = 0
    # Samples of all members, and this member's.
    num_samples: int = 0
    num_own_samples: int = 0
    losses: list[Tensor] = field(default_factory=list)
    pending_step: _PendingStep | None = None
    # Whether a repeated sum was not finite either; later sums are not examined.
    diverged: bool = False
    # Gradients that were left out, by step and SoC.
    dropped: dict[tuple[int, int], str] = field(default_factory=dict)


@dataclass(slots=True)
class _Training:
    """The training of a member's model, which may begin again during the interval."""

    # Of the trainer, when no session is open.
    state: bytes | None
    has_model: bool
    session: ExchangingSession | JointSession | None = None
    end: SessionResult | None = None
    # None for sessions that exchange their gradients themselves.
    exchange: BucketExchange | None = None
    compression: GradientCompression | None = None
    hooks: list[RemovableHandle] = field(default_factory=list)
    tries_loss: bool = False


@dataclass(slots=True)
class _Meeting:
    """The exchange of models with other groups' leaders, as far as it has come."""

    leader: GroupLeader
    # None if the models are not compressed.
    changes: MemberChanges | None
    # 0, `_AVERAGED` or `_MET`.
    stage: int = 0
    # Groups and samples in the mean.
    met: tuple[int, ...] = ()
    met_samples: float = 0.0
    group_samples: float = 0.0
    # The feedback of the mean of all groups, if it was summed in eight bits.
    steps: Floats | None = None
    began_with: dict[str, NDArray[Any]] = field(default_factory=dict)


def _changes(member: RingMember) -> MemberChanges | None:
    ring = member.ring
    if ring.leader_compression == NONE or not ring.leaders:
        return None
    untrained = untrained_names(member.model)
    return MemberChanges(ring.leader_compression, untrained, member.feedback, ring.feedback_sha256)


class _MemberSession(Role[MemberResult]):
    """The state of a member's part."""

    what = "ring"

    def __init__(self, member: RingMember) -> None:
        group, ring = member.group, member.ring
        self._member, self._group, self._ring = member, group, ring
        self._model = member.model
        # Before anything refers to its parameters: not all devices let them keep their identity.
        self._model.to(training_device(member.trainer))
        membership = Membership(
            member.port,
            ring.participant,
            group.partitions,
            heartbeat_s=ring.heartbeat_s,
            rendezvous_s=ring.rendezvous_s,
            reach_s=ring.reach_s,
        )
        self._elastic = ElasticSession(membership, self._interrupt)
        self._poll = self._elastic.poll
        self._turns = _turns(member.port, group, ring)
        self._collective: Collective | None = None
        self._schedule = BatchSchedule(group, [len(member.data)] if group.reshuffle else [])
        self._training = _Training(state=member.state, has_model=member.has_model)
        self._progress = _Progress()
        self._meeting = _Meeting(
            leader=GroupLeader(member.port, group.group_id, ring), changes=_changes(member)
        )
        self._members: tuple[int, ...] = ()
        self._timer = StepTimer(member.clock)
        # The devices of the members, known at the end.
        self._rates: dict[int, float] = {}
        self._balance = (
            RingBalance(group, self._timer) if ring.rebalance_steps and group.reshuffle else None
        )

    def _interrupt(self) -> None:
        """Raise `Preempted` if this device is preempted, `Terminated` if that of another member ends the interval.

        A member that has done all steps has the group's model, and completes.
        """
        self._member.switch.raise_if_active()
        ends = self._ring.ends_with_member and self._progress.num_steps < self._group.num_steps
        if ends and self._elastic.membership.departed:
            raise Terminated

    def run(self) -> MemberResult:
        """Form the ring and train; repeat both whenever a member is lost."""
        return self._elastic.run(self)

    def release(self) -> None:
        """Release the ring; the sum of the present step is not used."""
        if self._training.exchange is not None:
            self._training.exchange.abandon()
        self._close_ring()

    def close(self) -> None:
        self._meeting.leader.close()
        if self._training.exchange is not None:
            self._training.exchange.close()
        for hook in self._training.hooks:
            hook.remove()
        self._close_ring()
        if self._turns is not None:
            self._turns.close()
        self._elastic.membership.close()

    # ------------------------------------------------------------------------------------------------- forming

    def kept(self) -> MemberState:
        """Return the steps that this member has applied, and its optimiser."""
        state = self._current_state()
        return MemberState(
            num_steps=self._progress.num_steps + self._meeting.stage,
            has_model=self._training.has_model,
            optimizer=hashlib.sha256(state).hexdigest() if state else "",
        )

    def form(self, generation: Generation) -> None:
        """Open the ring, and adopt the state of the generation's source."""
        # The port itself knows whether it has TLS.
        transport = self._ring.transport.partition("+")[0]
        self._collective = open_ring(
            transport,
            self._member.port,
            generation.members,
            generation.number,
            self._ring.heartbeat_s,
            self._group.exchange,
        )
        self._members = generation.members
        if not self._group.reshuffle:
            reports = self._collective.all_gather(str(len(self._member.data)).encode(), self._poll)
            # 0 for members that are lost.
            sizes = dict(zip(self._members, map(int, reports), strict=True))
            self._schedule = BatchSchedule(
                self._group, [sizes.get(member, 0) for member in self._group.partitions]
            )
        if self._balance is not None:
            self._balance.synchronise(self._collective, self._poll)
        self._synchronise_state(generation)

    def _synchronise_state(self, generation: Generation) -> None:
        """Adopt the state of the generation's source: its weights, optimiser and number of steps."""
        is_behind = (
            generation.num_steps != self._progress.num_steps + self._meeting.stage
            or not self._training.has_model
        )
        if self._progress.pending_step is not None and not counts_pending(
            self._progress.num_steps, generation.num_steps
        ):
            self._progress.pending_step.snapshot.restore()
            self._progress.pending_step = None
        weights = (
            None
            if generation.same_model
            else self._broadcast_from(generation.source, self._common_state)
        )
        state = (
            None
            if generation.same_optimizer
            else self._broadcast_from(
                generation.optimizer_source, lambda: self._current_state() or b""
            )
        )
        stage = max(0, generation.num_steps - self._group.num_steps)
        # All members have done all steps: none could continue without the others' reports.
        if stage:
            if weights is not None and generation.source != self._ring.participant:
                self._adopt(weights, stage)
            return
        # From here on nothing can fail. If a member counted its step earlier and the source then
        # died before it sent weights and optimiser, that member would appear to have applied the
        # step, and the step would be lost.
        if is_behind or (
            state is not None and generation.optimizer_source != self._ring.participant
        ):
            # Before weights are loaded: a session may have its own, which it writes to the model.
            self._drop_session()
        if weights is not None and generation.source != self._ring.participant:
            _load_bytes([*_trained(self._model), *self._model.buffers()], weights)
        if not generation.num_steps:
            self._meeting.began_with = non_finite_tensors(self._group_model().arrays)
        if self._meeting.changes is not None and not generation.num_steps:
            self._meeting.changes.begin(self._group_model().arrays)
        # The others have applied this step.
        if self._progress.pending_step is not None:
            pending, self._progress.pending_step = self._progress.pending_step, None
            if self._training.compression is not None:
                self._training.compression.finish_step()
            self._record_step(pending.own, pending.loss, pending.total, adopted=True)
        if state is not None and generation.optimizer_source != self._ring.participant:
            self._training.state = state or None
        self._progress.num_steps = generation.num_steps
        self._training.has_model = True
        if self._training.session is None:
            self._training.session = self._start_session()
        if isinstance(self._training.session, JointSession):
            assert self._collective is not None
            self._training.session.join(RingPeers(self._collective, self._poll, self._timer.paused))

    def _common_tensors(self) -> list[Tensor]:
        """Return the tensors that all members have in common now.

        They include BatchNorm's statistics at the beginning of an interval, after the statistics are averaged, and if
        members compute them together.
        """
        common = (
            not self._progress.num_steps
            or self._meeting.stage
            or isinstance(self._training.session, JointSession)
        )
        return [*_trained(self._model), *(self._model.buffers() if common else ())]

    def _common_state(self) -> bytes:
        met = torch.tensor(
            [self._meeting.met_samples, self._meeting.group_samples, *self._meeting.met],
            dtype=torch.float64,
        )
        steps = [] if self._meeting.steps is None else [torch.from_numpy(self._meeting.steps)]
        return _to_bytes(
            [*self._common_tensors(), *([met, *steps] if self._meeting.stage == _MET else [])]
        )

    def _adopt(self, state: bytes, stage: int) -> None:
        """Adopt what another member has at a stage after the last step."""
        tensors, arrays = [*_trained(self._model), *self._model.buffers()], _from_bytes(state)
        if stage == _MET:
            (samples, group_samples, *met), *steps = (
                arrays[len(tensors)].tolist(),
                *arrays[len(tensors) + 1 :],
            )
            self._on_mean(
                GroupsModel(
                    arrays={},
                    samples=samples,
                    groups=tuple(map(int, met)),
                    steps=steps[0] if steps else None,
                ),
                group_samples,
            )
        _load(tensors, arrays)
        self._meeting.stage = stage

    def _broadcast_from(self, participant: int, make: Callable[[], bytes]) -> bytes:
        """Broadcast the payload that `make` returns at one member, and return it at all members."""
        assert self._collective is not None
        return self._collective.broadcast(
            make() if participant == self._ring.participant else None,
            self._members.index(participant),
            self._poll,
        )

    def _start_session(self) -> ExchangingSession | JointSession:
        group, position = self._group, self._group.partitions.index(self._ring.participant)
        span = TrainingSpan.of_group(
            group,
            self._progress.num_steps,
            npu_ratios=group.npu_ratios[position : position + 1],
        )
        session = self._member.trainer.start(self._model, span, self._training.state)
        trainer = type(self._member.trainer).__name__
        coding = gradient_coding(group.compression, steps_per_epoch=group.steps_per_epoch)
        if isinstance(session, JointSession) and coding.is_exact:
            if group.num_buckets > 1:
                raise ConfigError(
                    f"ring: overlap_buckets = {group.num_buckets}, but {trainer} exchanges its "
                    "gradients after the backward pass, in which members agree on scales; leave it out"
                )
            return session
        session = exchanging(session, coding, trainer)
        if self._training.exchange is None:
            self._training.exchange = BucketExchange(self._model, group.num_buckets)
        if not coding.is_exact:
            compression = own_compression(session, coding, group.seed)
            # A session may start again during an interval, but the residuals stay.
            if self._training.compression is None:
                self._training.compression = compression
                if self._member.compression_state is not None:
                    compression.restore(self._member.compression_state)
        if session.final_in_backward and not self._training.hooks:
            # A pass of a large model on a small SoC may take longer than its user wants to wait:
            # poll at every layer.
            self._training.hooks = [
                module.register_forward_pre_hook(lambda module, inputs: self._poll_in_layer())
                for module in self._model.modules()
                if not any(True for _ in module.children())
            ]
        return session

    def _poll_in_layer(self) -> None:
        # What a loss raises in its trial is the user's error, so the trial, on a copy of the model, is not interrupted.
        if not self._training.tries_loss:
            self._poll()

    def _current_state(self) -> bytes | None:
        return (
            self._training.state
            if self._training.session is None
            else self._training.session.state()
        )

    # ------------------------------------------------------------------------------------------------ training

    def work(self) -> None:
        """Train through the steps that are left."""
        session, group = self._training.session, self._group
        assert session is not None and self._collective is not None
        present = [group.partitions.index(participant) for participant in self._members]
        while self._progress.num_steps < group.num_steps:
            if (
                self._member.departs_at is not None
                and self._progress.num_steps >= self._member.departs_at
            ):
                raise Preempted("the device is preempted")
            shares = self._shares(present)
            total = sum(map(len, shares))
            if not total:
                self._progress.num_steps += 1
                continue
            self._timer.begin_step()
            loss = self._sum_gradients(session, shares, present)
            if not self._progress.diverged and self._sum_is_poisoned():
                shares = self._without_culprits(session, shares, present)
                total = sum(map(len, shares))
                if not total:
                    self._progress.pending_step = None
                    self._progress.num_steps += 1
                    continue
                # The time of a step that is repeated says nothing about a member's speed.
                self._timer.begin_step()
                loss = self._sum_gradients(session, shares, present)
                self._progress.diverged = self._sum_is_poisoned()
            with self._timer.timed():
                session.apply()
            if self._training.compression is not None:
                self._training.compression.finish_step()
            self._progress.pending_step = None
            own = shares[self._position]
            self._timer.end_step(len(own))
            self._record_step(own.tolist(), loss, total)
            # After the last step there is nothing to balance.
            if (
                self._balance is not None
                and self._progress.num_steps % self._ring.rebalance_steps == 0
                and self._progress.num_steps < group.num_steps
            ):
                self._balance.exchange(self._collective, present, self._poll)

    @property
    def _position(self) -> int:
        return self._members.index(self._ring.participant)

    def _sum_gradients(
        self,
        session: ExchangingSession | JointSession,
        shares: Sequence[Indices],
        present: Sequence[int],
    ) -> Tensor:
        """Compute this member's gradient of a step, sum it over the members, and return this member's part of the
        loss."""
        batch, total = self._own_part(shares, present), sum(map(len, shares))
        # The buffers of a joint session's model are written when it ends.
        snapshot = _Snapshot(None if isinstance(session, JointSession) else self._model)
        if not self._group.first_step + self._progress.num_steps:
            self._try_loss(session, batch)
        # Before other operations of the ring, which a thread of the exchange may begin at any time.
        weight = self._begin_weight_sum(session, batch)
        finish_exchange = self._begin_exchange(session)
        loss = torch.zeros(())
        try:
            with self._timer.timed():
                loss = session.gradients([batch], total, *weight)
        finally:
            # Also if the pass was interrupted: its random numbers and statistics must be undone.
            self._progress.pending_step = _PendingStep(
                snapshot=snapshot, own=shares[self._position].tolist(), total=total, loss=loss
            )
        finish_exchange()
        return loss

    def _try_loss(self, session: ExchangingSession | JointSession, batch: Part) -> None:
        self._training.tries_loss = True
        try:
            with working("the trial of the loss"):
                try_loss(session, [batch], self._member.data, self._group.batch_size, divided=True)
        finally:
            self._training.tries_loss = False

    def _own_part(self, shares: Sequence[Indices], present: Sequence[int]) -> Part:
        with self._timer.timed():
            return self._member.data.batch(
                torch.from_numpy(shares[self._position]),
                sample_key(self._group, self._progress.num_steps, present[self._position]),
            )

    def _sum_is_poisoned(self) -> bool:
        """Return whether the sum of gradients has a NaN or an infinity."""
        if self._training.exchange is None or isinstance(self._training.session, JointSession):
            # A joint session sums integers.
            return False
        return not self._training.exchange.is_finite()

    def _without_culprits(
        self,
        session: ExchangingSession | JointSession,
        shares: Sequence[Indices],
        present: Sequence[int],
    ) -> list[Indices]:
        """Return the shares for repeating a step whose sum was not finite; they are equal at all members.

        Members whose own gradients are not finite get no samples. They are named: in the outcome if errors are
        tolerated, else by `TrainingFailed`. All shares stay if no member's gradient is finite (the model has diverged,
        and the group's reply will be refused), or if each is (the fault has passed). All shares are empty if the
        remaining samples have no weight in the loss.
        """
        assert self._collective is not None
        faults, weights = self._own_faults(session, shares, present)
        finite = [at for at, fault in enumerate(faults) if not fault and len(shares[at])]
        if not any(faults) or not finite:
            return list(shares)
        step = self._group.first_step + self._progress.num_steps
        for participant, fault in zip(self._members, faults, strict=True):
            if not fault:
                continue
            soc = self._group.members[self._group.partitions.index(participant)]
            text = f"the gradient of SoC {soc} in step {step} has NaN or infinite values (first {fault})"
            if not self._ring.tolerate_errors:
                raise TrainingFailed(
                    f"group {self._group.group_id}: {text}; look at its samples, or set "
                    "tolerate_client_errors to leave such gradients out"
                )
            self._progress.dropped[step, soc] = f"{text}, left out"
        some_count = any(weights[at] is None or weights[at] for at in finite)
        return [
            share if some_count and at in finite else share[:0] for at, share in enumerate(shares)
        ]

    def _own_faults(
        self,
        session: ExchangingSession | JointSession,
        shares: Sequence[Indices],
        present: Sequence[int],
    ) -> tuple[list[str], list[float | None]]:
        """Compute this member's gradient of the pending step again, and exchange which tensors are not finite.

        Return, for each member, the name of the first tensor whose gradient is not finite (empty if there is none),
        and its weight in the loss (None if that is its number of samples).
        """
        assert self._collective is not None and self._progress.pending_step is not None
        snapshot, batch = self._progress.pending_step.snapshot, self._own_part(shares, present)
        snapshot.restore()
        own = session.batch_weight([batch]) if isinstance(session, WeighingSession) else None
        weights = gather_json(self._collective, own, self._poll)
        # Weighed as in the sum: by its own weight alone, a gradient in float16 could overflow.
        group_weight = sum(
            weight for weight in weights if weight is not None and math.isfinite(weight)
        )
        fault = ""
        if own is not None and not math.isfinite(own):
            fault = "the weight of its loss"
        elif own is None or own:
            # Samples without weight have no gradient.
            weight = [] if own is None else [lambda: group_weight]
            session.gradients([batch], sum(map(len, shares)), *weight)
            fault = _first_spoilt_gradient(self._model)
        snapshot.restore()
        return [
            payload.decode() for payload in self._collective.all_gather(fault.encode(), self._poll)
        ], weights

    def _begin_weight_sum(
        self, session: ExchangingSession | JointSession, batch: Part
    ) -> list[Callable[[], float]]:
        """Begin to sum the members' weights of a batch; return a function that waits for the sum, or nothing if it is
        not needed."""
        own = session.batch_weight([batch]) if isinstance(session, WeighingSession) else None
        if own is None:
            return []
        assert self._collective is not None
        total = torch.tensor([own], dtype=torch.float64)
        work = self._collective.all_reduce(total)

        def wait() -> float:
            with self._timer.paused():
                work.wait(self._poll)
            return float(total)

        return [wait]

    def _begin_exchange(self, session: ExchangingSession | JointSession) -> Callable[[], None]:
        """Prepare a step's exchange; return what completes it after the pass."""
        turn = self._make_turn()
        if isinstance(session, JointSession):
            return partial(self._exchange_jointly, session, turn)
        assert self._training.exchange is not None and self._collective is not None
        if self._training.compression is not None:
            self._training.compression.start_step(self._group.first_step + self._progress.num_steps)
        self._training.exchange.begin(
            self._collective,
            self._poll,
            overlapped=session.final_in_backward,
            turn=turn,
            compression=self._training.compression,
        )
        return self._training.exchange.finish

    def _exchange_jointly(self, session: JointSession, turn: TurnCallbacks | None) -> None:
        if turn is not None:
            turn.begin()
        with self._timer.timed():
            session.exchange()
        if turn is not None:
            turn.end()

    def _shares(self, present: list[int]) -> list[Indices]:
        step, balance = self._group.first_step + self._progress.num_steps, self._balance
        if balance is None:
            return self._schedule.shares(step, present)
        return self._schedule.shares(
            step, present, balance.capacities(present), balance.due(present)
        )

    def _record_step(
        self, own: list[int], loss: Tensor, total: int, *, adopted: bool = False
    ) -> None:
        """Record a step as done, of `own` samples of this member and `total` of all."""
        step = self._group.first_step + self._progress.num_steps
        self._progress.num_steps += 1
        self._progress.num_samples += total
        self._progress.num_own_samples += len(own)
        self._progress.losses.append(loss)
        self._member.on_step(
            AppliedStep(
                step=step,
                members=() if adopted else self._members,
                samples=tuple(own),
                adopted=adopted,
                own_s=0.0 if adopted else self._timer.step_s,
            )
        )

    def _make_turn(self) -> TurnCallbacks | None:
        """Return the callbacks for the group's turn: one member waits and signals the others."""
        turns, ring = self._turns, self._collective
        if turns is None or ring is None:
            return None
        step, waits = self._progress.num_steps, self._members[0] == self._ring.participant

        def begin() -> None:
            if waits:
                # The member that waited before may have died before it notified them.
                turns.finish_step(step - 1)
                turns.wait(step, self._poll)
            ring.broadcast(b"" if waits else None, 0, self._poll)

        def end() -> None:
            if waits:
                turns.finish_step(step)

        return TurnCallbacks(begin=begin, end=end)

    # -------------------------------------------------------------------------------------------------- ending

    def finish(self) -> MemberResult:
        """Check that all members have the same weights, average their statistics, and return the result."""
        training, meeting = self._training, self._meeting
        assert training.session is not None and self._collective is not None
        if training.end is None:
            training.end = training.session.finish()
        diverging = training.session if isinstance(training.session, DivergingSession) else None
        averages_weights = diverging is not None and diverging.averages_weights
        reports = gather_json(self._collective, self._report(diverging), self._poll)
        answers = answering(self._ring.leader, self._members)[0]
        self._require_same_weights(reports, answers)
        if meeting.stage < _AVERAGED:
            self._average(reports, averages_weights=averages_weights)
            if diverging is not None and averages_weights:
                diverging.agree([entry["measured"] for entry in reports])
                training.end = replace(training.end, state=diverging.state())
            meeting.stage = _AVERAGED
        if self._ring.leaders and meeting.stage < _MET:
            if meeting.changes is not None:
                meeting.changes.complete(
                    [entry["changes"] for entry in reports],
                    lambda rank, make: self._broadcast_from(self._members[rank], make),
                )
            self._meet(answers)
        self._rates = {
            member: entry["rate"] for member, entry in zip(self._members, reports, strict=True)
        }
        self._elastic.membership.finish()
        return MemberResult(
            outcome=self._outcome(COMPLETED, answers=answers == self._ring.participant),
            mean_loss=sum(entry["loss"] for entry in reports),
            num_samples=self._progress.num_samples,
            end=training.end,
            compression=b"" if training.compression is None else training.compression.state(),
            feedback=None if meeting.changes is None else meeting.changes.feedback,
            devices=DeviceReport(
                devices=tuple(entry["device"] for entry in reports),
                socs=self._socs_of(self._members),
                arithmetic=arithmetic_of(self._member.trainer),
            ),
        )

    def _report(self, diverging: DivergingSession | None) -> dict[str, Any]:
        """Return what this member tells the others at the end."""
        digest = hashlib.sha256()
        if diverging is None or not diverging.averages_weights:
            for parameter in _trained(self._model):
                digest.update(array_to_bytes(parameter.detach().cpu().numpy()))
        changes = self._meeting.changes
        return {
            "weights": digest.hexdigest(),
            "steps": self._progress.num_steps,
            "loss": mean_loss(self._progress.losses),
            "samples": self._progress.num_own_samples,
            "counters": [counter.tolist() for counter in self._counters()],
            "rate": self._timer.rate,
            "device": device_label(device_of(self._model)),
            "changes": None if changes is None else changes.held,
            "measured": None if diverging is None else diverging.measured,
        }

    def _counters(self) -> list[Tensor]:
        return [buffer for buffer in self._model.buffers() if not buffer.is_floating_point()]

    def _require_same_weights(self, reports: Sequence[Mapping[str, Any]], answering: int) -> None:
        """Raise `RuntimeError` if members have different weights, unless different kinds of devices explain it by
        rounding. In that case all take the weights of the member that answers for the group.
        """
        if len({(entry["weights"], entry["steps"]) for entry in reports}) == 1:
            return
        if (
            len({entry["steps"] for entry in reports}) > 1
            or len({entry["device"] for entry in reports}) == 1
        ):
            raise RuntimeError(
                f"group {self._group.group_id}: its members have come to different weights; nothing of "
                "this interval is used"
            )
        weights = self._broadcast_from(answering, lambda: _to_bytes(_trained(self._model)))
        if answering != self._ring.participant:
            _load_bytes(_trained(self._model), weights)

    def _average(self, reports: list[dict[str, Any]], *, averages_weights: bool) -> None:
        """Average BatchNorm's running statistics, and weights if each member has its own, by samples (F3)."""
        assert self._collective is not None
        floats = [buffer for buffer in self._model.buffers() if buffer.is_floating_point()]
        if averages_weights:
            floats += [parameter.detach() for parameter in _trained(self._model)]
        total = sum(entry["samples"] for entry in reports)
        if not floats or not total or len(self._members) == 1:
            return
        flat = torch.cat([buffer.cpu().double().flatten() for buffer in floats]) * (
            self._progress.num_own_samples / total
        )
        self._collective.all_reduce(flat).wait(self._poll)
        start = 0
        for buffer in floats:
            buffer.copy_(flat[start : start + buffer.numel()].view(buffer.size()).to(buffer.dtype))
            start += buffer.numel()
        for index, counter in enumerate(self._counters()):
            counter.copy_(
                torch.stack([torch.tensor(entry["counters"][index]) for entry in reports]).amax(
                    dim=0
                )
            )

    def _meet(self, answering: int) -> None:
        """Let the answering member exchange models with the other groups' leaders and pass the mean to its group."""
        answers = answering == self._ring.participant
        while True:
            # A ring's operations must not wait for other groups, which may take long: gloo limits
            # their time.
            mean = (
                self._meeting.leader.mean(
                    self._group_model,
                    _SIGN_OF_LIFE_S,
                    None if self._meeting.changes is None else self._meeting.changes.compression(),
                )
                if answers
                else None
            )
            if mean is not None:
                self._on_mean(mean, float(self._progress.num_samples))
                load_trainable_state(
                    self._model,
                    {name: torch.from_numpy(array) for name, array in mean.arrays.items()},
                )
                self._meeting.stage = _MET
            state = self._broadcast_from(
                answering, lambda: self._common_state() if self._meeting.stage == _MET else b""
            )
            if state:
                break
        if not answers:
            self._adopt(state, _MET)

    def _on_mean(self, mean: GroupsModel, group_samples: float) -> None:
        """Before weights are loaded, record the groups in the mean and the unsent part of this group's change.

        `group_samples` is the count of the answering member, since others may have adopted steps.
        """
        if self._meeting.changes is not None and self._meeting.stage < _MET:
            own = replace(self._group_model(), samples=group_samples)
            self._meeting.changes.on_mean(partial(feedback_after, own, mean))
        self._meeting.met, self._meeting.met_samples, self._meeting.steps = (
            mean.groups,
            mean.samples,
            mean.steps,
        )
        self._meeting.group_samples = group_samples

    def _group_model(self) -> GroupsModel:
        return GroupsModel(
            arrays={
                name: entry.cpu().numpy() for name, entry in trainable_state(self._model).items()
            },
            samples=float(self._progress.num_samples),
            groups=(self._group.group_id,),
            began_with=self._meeting.began_with,
        )

    def without_model(self, outcome: str) -> MemberResult:
        """Return what a member reports that has no model of the interval."""
        if self._ring.ends_with_member and outcome in (PREEMPTED, TERMINATED):
            self._meeting.leader.withdraw()
        return MemberResult(
            outcome=self._outcome(outcome, answers=False), mean_loss=0.0, num_samples=0, end=None
        )

    def _outcome(self, outcome: str, *, answers: bool) -> RingOutcome:
        finished = self._elastic.membership.finished
        log_lines = [*self._elastic.membership.log_lines, *self._meeting.leader.log_lines]
        feedback = None
        if self._meeting.changes is not None:
            log_lines += self._meeting.changes.log_lines
            feedback = self._meeting.changes.feedback if self._meeting.stage == _MET else None
        rates: list[float] = []
        if self._rates:
            rates = [self._rates.get(participant, 0.0) for participant in finished]
        return RingOutcome(
            outcome=outcome,
            members=self._socs_of(finished),
            num_steps=self._progress.num_steps,
            answers=answers,
            recoveries_s=tuple(self._elastic.recoveries_s),
            preempted=self._socs_of(self._elastic.membership.preempted),
            log=tuple(log_lines),
            dropped=tuple(_shortened([*self._progress.dropped.values()])),
            met=self._meeting.met,
            met_samples=self._meeting.met_samples,
            feedback_sha256=feedback_digest(feedback),
            rates=tuple(rates),
        )

    def _socs_of(self, participants: Iterable[int]) -> tuple[int, ...]:
        soc_of = dict(zip(self._group.partitions, self._group.members, strict=True))
        return tuple(soc_of[participant] for participant in participants)

    def _drop_session(self) -> None:
        if self._training.session is not None and self._training.end is None:
            self._training.session.finish()
        self._training.session, self._training.end = None, None

    def _close_ring(self) -> None:
        if self._collective is not None:
            self._collective.close()
            self._collective = None


def _first_spoilt_gradient(model: nn.Module) -> str:
    """Return the name of the first parameter whose gradient is not finite; empty if there is none."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            return name
    return ""


def _turns(port: RingPort, group: GroupTask, ring: RingTask) -> TurnSignals | None:
    if not ring.groups_before and not ring.groups_after:
        return None
    members: dict[int, list[int]] = {}
    for text in ring.neighbours:
        group_id, participant, _ = text.split(" ")
        members.setdefault(int(group_id), []).append(int(participant))
    return TurnSignals(
        port,
        group.group_id,
        Neighbours(before=ring.groups_before, after=ring.groups_after, members=members),
        heartbeat_s=ring.heartbeat_s,
        rendezvous_s=ring.rendezvous_s,
    )


def _shortened(lines: Sequence[str]) -> list[str]:
    """Return the first lines and the number of the others: a broken device makes one in every step."""
    shown, num_more = list(lines[:_MOST_LINES]), len(lines) - _MOST_LINES
    if num_more > 0:
        shown.append(f"and {num_more} more such gradients")
    return shown


def _trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are trained; the others are every member's own."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _to_bytes(tensors: Sequence[Tensor]) -> bytes:
    return b"".join(
        pack_arrays(
            {str(index): tensor.detach().cpu().numpy() for index, tensor in enumerate(tensors)}
        )
    )


def _load_bytes(tensors: Sequence[Tensor], payload: bytes) -> None:
    _load(tensors, _from_bytes(payload))


def _from_bytes(payload: bytes) -> list[NDArray[Any]]:
    return list(unpack_arrays(memoryview(payload)).values())


def _load(tensors: Sequence[Tensor], arrays: Sequence[NDArray[Any]]) -> None:
    """Load as many tensors as there are arrays."""
    for tensor, array in zip(tensors, arrays, strict=False):
        tensor.detach().copy_(torch.from_numpy(array).reshape(tensor.shape))
