"""The messages of a round of groups: what each is told to do, its ring, its samples, and the model for its leader."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from socflower.hierarchy import Group, Quorum, SyncInterval
from socflower.hierarchy.group_preemption import GROUPS
from socflower.peers.ring.settings import RingSettings
from socflower.strategies.group_models import ServerModels
from socflower.strategies.methods.group_work import GroupWork, SyncPlan
from socflower.strategies.methods.late_groups import LateGroups
from socflower.strategies.round import Round, ring_tasks
from socflower.strategies.round_planner import RoundPlanner
from socflower.training.batches import interval_rows
from socflower.wire.message_keys import (
    ARRAYS,
    CONFIG,
    GROUP,
    PRICED,
    RESUMED,
    RING,
    SAMPLES,
    SCALES,
    SERVER_ROUND,
    GroupTask,
    encode,
)
from socflower.workloads.dataset import LabelledData
from socflower.workloads.dispatched import sent_samples


@dataclass(kw_only=True)
class GroupMessages:
    """Makes the messages of each round of a training."""

    sync: SyncPlan
    planner: RoundPlanner
    work: GroupWork
    rings: RingSettings
    # Models of servers, which their groups begin with.
    servers: ServerModels
    # Those that are at work get no message.
    late: LateGroups | None = None
    # All training data, if the hub sends groups their samples.
    dispatch: LabelledData | None = None
    # The weight of FedProx's term in the loss.
    proximal_mu: float = 0.0
    tolerate_errors: bool = False
    # Whether the group's client returns its optimiser with the model.
    hands_over: bool = False
    # The round after which the training was resumed, and by group its leader in it and whether that has its state.
    _resumed_after: int = 0
    _states: Mapping[int, tuple[int, bool]] = field(default_factory=dict)

    def resume(self, server_round: int, states: Mapping[int, tuple[int, bool]]) -> None:
        """Continue after a round, with each group's leader in it and whether that has the group's state."""
        self._resumed_after, self._states = server_round, states

    def of_round(self, this: Round, config: ConfigRecord) -> list[Message]:
        """Return a message for each leader, in group order, or in rings for each member."""
        planner = self.planner
        configs = self._configs(this, config)
        records = self.work.records(this.plan)
        rings = {}
        if this.in_rings:
            rings = ring_tasks(
                this,
                self.rings,
                planner.registry.ring_address_of,
                planner.participant_of,
                resident=planner.registry.resident,
                rebalance_steps=planner.balancer.ring_steps,
                tolerate_errors=self.tolerate_errors,
                quorum=Quorum() if self.late is None else self.late.quorum,
                ends_with_member=self._ends_groups(this),
            )
        in_int8, messages = this.in_int8, []
        if in_int8 is not None:
            # Also for members without the model: any of them may answer for the group.
            records = {**records, SCALES: in_int8.scales}
        for group in this.addressed:
            told = self.task(group, this.interval)
            task, samples = ConfigRecord(told.encode()), self._samples_of(told)
            for soc in group.members if this.in_rings else (group.leader,):
                content = RecordDict(
                    {CONFIG: configs[group.group_id], GROUP: task, **samples, **records}
                )
                if soc == group.leader:
                    sent = this.sent if in_int8 is None else in_int8.arrays
                    content[ARRAYS] = self.servers.models.get(group.server, sent)
                if this.in_rings:
                    content[RING] = ConfigRecord(encode(rings[soc]))
                node, number = this.node_of[soc], str(this.server_round)
                messages.append(Message(content, node, MessageType.TRAIN, group_id=number))
        return messages

    def _ends_groups(self, this: Round) -> bool:
        """Whether a ring ends its interval when a user takes a member.

        The last group cannot, and only a grid that settles groups asks one of them again if users have ended all.
        """
        return (
            self.planner.preemption == GROUPS and len(this.plan.groups) > 1 and this.settled_by_grid
        )

    def _samples_of(self, task: GroupTask) -> dict[str, ConfigRecord]:
        """Return the record of a group's samples, if the hub sends them: in rings to each of its members.

        A member may take over any sample of its group, when another leaves or shares change within the interval.
        """
        if self.dispatch is None:
            return {}
        sent = sent_samples(self.dispatch, interval_rows(task))
        return {SAMPLES: ConfigRecord(encode(sent))}

    def _configs(self, this: Round, config: ConfigRecord) -> dict[int, ConfigRecord]:
        """Return each group's config; in the first round after a resume, with whether a saved state is required."""
        settings = ConfigRecord({**config, SERVER_ROUND: this.server_round, PRICED: True})
        configs = {group.group_id: settings for group in this.plan.groups}
        before = self._states
        is_first = this.server_round == self._resumed_after + 1
        if is_first and len(before) != len(configs):
            before = {}
        # Groups that are late get their first message after a resume in a later round.
        self._states = {ident: state for ident, state in before.items() if ident in this.late}
        for group in this.addressed:
            if group.group_id not in before:
                continue
            leader, has_state = before[group.group_id]
            # As without the interruption: in one process a leader that is new to the group has no momentum for it; in a
            # ring any member may have it, and gives it to the others.
            if group.leader == leader:
                configs[group.group_id] = ConfigRecord({**settings, RESUMED: has_state})
            elif this.in_rings:
                configs[group.group_id] = ConfigRecord({**settings, RESUMED: False})
        return configs

    def task(self, group: Group, interval: SyncInterval) -> GroupTask:
        """Return what a group is told to do in an interval."""
        planner, schedule, last = self.planner, self.sync.schedule, self.sync.intervals[-1]
        return GroupTask(
            group_id=group.group_id,
            num_groups=len(planner.plan.groups),
            members=group.members,
            leader=group.leader,
            partitions=tuple(planner.participant_of[soc] for soc in group.members),
            num_partitions=len(planner.participant_of),
            capacities=planner.balancer.capacities(group),
            first_step=interval.first_step,
            num_steps=interval.num_steps,
            steps_per_epoch=self.sync.steps_per_epoch,
            total_steps=last.first_step + last.num_steps,
            batch_size=schedule.batch_size,
            reshuffle=schedule.reshuffle,
            deal_epoch=interval.deal_epoch,
            seed=schedule.seed,
            num_samples=schedule.num_samples,
            npu_ratios=self.work.npu_ratios(group),
            proximal_mu=self.proximal_mu,
            num_buckets=self.sync.exchange.overlap_buckets,
            compression=self.work.gradients.coding.spec,
            exchange=self.work.gradients.kind,
            local_epochs=self.sync.local_epochs,
            missed_steps=(
                0
                if self.late is None
                else self.late.missed_steps(group.group_id, interval.first_step)
            ),
            hands_over=self.hands_over,
        )
