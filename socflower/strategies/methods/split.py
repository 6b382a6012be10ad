"""Split training: edges train the front of a model, a cloud the back, as an asynchronous pipeline (F22-F27)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from socflower.cluster import Cluster, Usage
from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile
from socflower.edgecloud.plan.decision import DecisionEngine
from socflower.edgecloud.plan.device_costs import require_edge_memory
from socflower.edgecloud.plan.party import CloudMode, Party
from socflower.edgecloud.plan.split_pipeline import Timeline, moved, round_ends, simulate_split
from socflower.edgecloud.plan.timeline_actions import encode_actions
from socflower.errors import ConfigError, NodesLost, TrainingFailed
from socflower.sim import EventClock
from socflower.strategies.method import Description, Method
from socflower.strategies.methods.split_report import SplitRoundReport
from socflower.strategies.mixed_replies import client_events
from socflower.strategies.node_registry import NodeRegistry
from socflower.strategies.records import aggregate_records, array_views, to_array_record
from socflower.strategies.replies import failure_of, fault_of, no_reply_event, num_examples_of
from socflower.strategies.reply_events import ReplyEvent
from socflower.wire.message_keys import (
    ARRAYS,
    CONFIG,
    FROZEN_SHA256,
    PRICED,
    SERVER_ROUND,
)
from socflower.wire.split_message_keys import (
    EDGE_ALONE,
    OWN,
    SPLIT,
    SPLIT_REPORT,
    SplitReport,
    SplitTask,
)

Arrays = Mapping[str, NDArray[Any]]
_RESTARTED = "restarted"


class CloudSessions(Protocol):
    """Manages the cloud halves on real machines; `socflower.clients.split.cloud_sessions.CloudClient` is one."""

    def open(self, task: SplitTask, weights: Arrays) -> SplitTask:
        """Prepare a cloud half for the parties of `task`; return the task with the cloud's address and a token.

        An open session continues with its own weights and optimiser, unless its weights are to be the mean of several
        edges' halves: then it restarts with `weights`.
        """
        ...

    def fetch(self, run: str) -> Arrays:
        """Return the weights of a session's half."""
        ...

    def close(self) -> None:
        """End all sessions: the training is over."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRound:
    """A span of batches between its messages and its replies."""

    server_round: int
    sent: ArrayRecord
    arrays: Arrays
    first: int
    num_batches: int
    # The simulated schedule, which is fixed before the messages: it has the order of all actions.
    timeline: Timeline
    frozen_sha256: str
    # Parties whose nodes have not answered yet, and those that have since the last round.
    left_out: frozenset[int]
    returned: tuple[int, ...]
    # The parties of each message, by node.
    parties_of: dict[int, tuple[int, ...]] = field(default_factory=dict)
    # The cloud's session, and why it was restarted, by party.
    runs: dict[int, str] = field(default_factory=dict)
    restart_notes: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class SettledSplit:
    """The replies of a span, read."""

    replies: Mapping[tuple[int, ...], Message]
    events: tuple[ReplyEvent, ...]
    measured: Mapping[int, SplitReport]

    @property
    def usable(self) -> Sequence[Message]:
        """The replies, in the order of the messages."""
        return [*self.replies.values()]


class SplitMethod(Method[SplitRound, SettledSplit]):
    """Rounds of split training; see `socflower.strategies.split_replay.SplitReplay` for the parameters."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        parties: Sequence[Party],
        edge_names: Callable[[int, int | None], Collection[str]],
        batches_per_epoch: int,
        num_epochs: int,
        mode: CloudMode = OWN,
        reverse: bool = False,
        round_epochs: float | Sequence[float] = 1.0,
        seed: int = 1,
        fingerprint: str = "",
        clock: EventClock | None = None,
        cloud: CloudSessions | None = None,
        tolerate_client_errors: bool = False,
        uplink: BandwidthProfile | None = None,
        cloud_processors: int | None = None,
        trial: str = "",
    ) -> None:
        if not 1 <= len(parties) <= cluster.num_socs:
            raise ConfigError(
                f"SplitReplay: {len(parties)} edges on a cluster of {cluster.num_socs} SoCs; need 1 to "
                f"{cluster.num_socs}"
            )
        for edge, party in enumerate(parties):
            require_edge_memory(cluster.device_of(edge), party.costs, party.split_plan, edge)
        self.parties = tuple(parties)
        self._cluster, self._mode, self._reverse, self.seed = cluster, mode, reverse, seed
        self._edge_names, self._fingerprint = edge_names, fingerprint
        self._batches_per_epoch = batches_per_epoch
        self._total_batches = batches_per_epoch * num_epochs
        self._round_ends = round_ends(round_epochs, batches_per_epoch, num_epochs)
        self._clock, self._cloud = clock, cloud
        self._uplink, self._cloud_processors = uplink, cloud_processors
        self._tolerates, self._trial = tolerate_client_errors, trial
        self._registry = NodeRegistry(cluster, range(len(parties)))
        self._left_out: frozenset[int] = frozenset()

    @property
    def num_rounds(self) -> int:
        """How many spans the training has."""
        return len(self._round_ends)

    @property
    def socs(self) -> Sequence[int]:
        """The edges."""
        return range(len(self.parties))

    @property
    def transport(self) -> str:
        """The transport of features and gradients."""
        return "in process" if self._cloud is None else "gRPC"

    def describe(self) -> Description:
        """Return each edge's split plan, and the spans."""
        lines = []
        for index, party in enumerate(self.parties):
            now = party.split_plan
            where = "the edge alone"
            if now.cut is not None:
                where = f"cut after {party.costs.cuts[now.cut].name}"
            moves = "" if party.decider is None else ", moves with the link"
            lines.append(f"Edge {index}: {where}, {now.bits} bits, K = {now.window}{moves}")
        longest = max(self._span(index + 1)[1] for index in range(self.num_rounds))
        rounds = f"Rounds: {self.num_rounds} of up to {longest} batches, cloud halves: {self._mode}"
        return Description(lines=[*lines, rounds], between={"edge and cloud": self.transport})

    def _span(self, server_round: int) -> tuple[int, int]:
        first = self._round_ends[server_round - 2] if server_round > 1 else 0
        return first, self._round_ends[server_round - 1] - first

    # ------------------------------------------------------------------------------------- opening a round
    def open(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> tuple[SplitRound, list[Message]]:
        """Address every edge; in one process, edges that share a cloud half are trained by one client."""
        returned = self._look_for_nodes(server_round, grid)
        if self._clock is None:
            self._clock = getattr(grid, "clock", None) or EventClock(self._cluster)
        first, num_batches = self._span(server_round)
        this = SplitRound(
            server_round=server_round,
            sent=arrays,
            arrays=array_views(arrays),
            first=first,
            num_batches=num_batches,
            timeline=simulate_split(
                self.parties,
                num_batches,
                first,
                clock=self._clock,
                cluster=self._cluster,
                cloud=self._mode,
                reverse=self._reverse,
                uplink=self._uplink,
                cloud_processors=self._cloud_processors,
            ),
            frozen_sha256=str(config.get(FROZEN_SHA256, "")),
            left_out=self._left_out,
            returned=returned,
        )
        settings = ConfigRecord({**config, SERVER_ROUND: server_round, PRICED: True})
        return this, self._messages(this, settings)

    def _look_for_nodes(self, server_round: int, grid: Grid) -> tuple[int, ...]:
        """Match nodes with edges; return the parties whose nodes are back. `NodesLost` if one is needed."""
        registry = self._registry
        if not registry.node_of:
            registry.match_nodes(grid, query=self._cloud is not None)
        registry.poll_answers(grid)
        registry.ask(grid, server_round)
        returned = tuple(sorted(self._left_out - registry.lost))
        self._left_out = frozenset(registry.lost)
        if self._left_out and self._mode != OWN:
            raise NodesLost(
                f"SplitReplay: {registry.left_out}; edges that share a cloud half need each other"
            )
        return returned

    def _messages(self, this: SplitRound, settings: ConfigRecord) -> list[Message]:
        counts = [party.num_batches(this.first, this.num_batches) for party in self.parties]
        training = tuple(
            party for party, count in enumerate(counts) if count and party not in this.left_out
        )
        in_one_client = self._mode != OWN and self._cloud is None
        groups = [training] if in_one_client else [(party,) for party in training]
        messages = []
        for group in groups:
            arrays, lead = this.sent, group[0]
            if self._cloud is not None and self.parties[lead].split_plan.cut is not None:
                task, arrays = self._open_session(this, lead, counts[lead])
            else:
                task = self._task(this, group, counts[lead], this.timeline)
            content = RecordDict(
                {ARRAYS: arrays, CONFIG: settings, SPLIT: ConfigRecord(task.encode())}
            )
            node = self._registry.node_of[lead]
            this.parties_of[node] = group
            number = str(this.server_round)
            messages.append(Message(content, node, MessageType.TRAIN, group_id=number))
        return messages

    def _task(
        self,
        this: SplitRound,
        group: tuple[int, ...],
        num_batches: int,
        timeline: Timeline | None = None,
    ) -> SplitTask:
        now = [self.parties[party].split_plan for party in group]
        actions = b""
        if timeline is not None:
            actions = encode_actions(action for action in timeline.actions if action.party in group)
        return SplitTask(
            parties=group,
            num_parties=len(self.parties),
            mode=self._mode,
            reverse=self._reverse,
            first_batch=this.first,
            num_batches=num_batches,
            total_batches=self._total_batches,
            batches_per_epoch=self._batches_per_epoch,
            seed=self.seed,
            cuts=tuple(EDGE_ALONE if each.cut is None else each.cut for each in now),
            bits=tuple(each.bits for each in now),
            windows=tuple(each.window for each in now),
            gradient_bits=self.parties[0].costs.gradient_bits,
            actions=actions,
            fingerprint=self._fingerprint,
            frozen_sha256=this.frozen_sha256,
            trial=self._trial,
        )

    def _open_session(
        self, this: SplitRound, party: int, num_batches: int
    ) -> tuple[SplitTask, ArrayRecord]:
        """Open the cloud's session; return the edge's task, and only the tensors of its own half."""
        assert self._cloud is not None
        edge = self._names_at_edge(party)
        in_any_edge = edge
        if self._mode != OWN:
            in_any_edge = set().union(*map(self._names_at_edge, range(len(self.parties))))
        weights = {name: array for name, array in this.arrays.items() if name not in in_any_edge}
        task = self._cloud.open(self._task(this, (party,), num_batches), weights)
        this.runs[party] = task.run
        # Halves of several edges are averaged each round, so they always begin with new weights.
        continues = self._mode != OWN or len(self.parties) == 1
        if continues and 0 < task.first_batch == task.session_first:
            this.restart_notes[party] = (
                f"the cloud's half begins a new session before batch {task.first_batch}, "
                "with the last round's weights and a new optimiser"
            )
        own = {name: array for name, array in this.arrays.items() if name in edge}
        return task, to_array_record(own)

    def _names_at_edge(self, party: int) -> set[str]:
        return set(self._edge_names(party, self.parties[party].split_plan.cut))

    # ------------------------------------------------------------------------------------ settling a round
    def settle(self, this: SplitRound, replies: Sequence[Message]) -> SettledSplit:
        """Read the edges' replies; `TrainingFailed` if a part of the model is missing or a client raised."""
        answers = {reply.metadata.src_node_id: reply for reply in replies}
        events, usable = list[ReplyEvent](), dict[tuple[int, ...], Message]()
        for node, group in this.parties_of.items():
            where = f"edge {', '.join(map(str, group))} (node {node})"
            reply = answers.get(node)
            if reply is None:
                events.append(no_reply_event(group[0], where))
            elif fault := fault_of(reply, group[0], where, sent=this.arrays):
                events.append(fault)
            else:
                usable[group] = reply
        events += [
            no_reply_event(party, f"edge {party} ({self._registry.left_out})")
            for party in sorted(this.left_out)
        ]
        self._require_enough(usable, events)
        measured = {
            group[0]: SplitReport.decode(reply.content.config_records[SPLIT_REPORT])
            for group, reply in usable.items()
            if SPLIT_REPORT in reply.content.config_records
        }
        for party, report in measured.items():
            events += [_event("link", party, text) for text in report.events]
        for group, reply in usable.items():
            where = f"edge {', '.join(map(str, group))}"
            events += client_events(reply, group[0], where, _RESTARTED)
        events += [_event(_RESTARTED, party, text) for party, text in this.restart_notes.items()]
        events += [_event("returned", party, "is back") for party in this.returned]
        events += self._absences(this)
        self._update_split_plans(this, measured)
        return SettledSplit(replies=usable, events=tuple(events), measured=measured)

    def _require_enough(self, usable: Collection[object], events: Sequence[ReplyEvent]) -> None:
        raised = [event for event in events if event.kind == "client-raised"]
        if raised and not self._tolerates:
            raise TrainingFailed(raised[0].text)
        if events and (self._mode != OWN or not usable):
            raise failure_of("a part of the model is missing", events)

    def _absences(self, this: SplitRound) -> list[ReplyEvent]:
        """Return events of the edges that were preempted or came back in a round."""
        events = []
        for index, party in enumerate(self.parties):
            for absence in party.away:
                trained = absence.start - this.first
                if 0 <= trained < this.num_batches:
                    text = f"preempted by its user after {trained} of {this.num_batches} batches"
                    events.append(_event("preempted", index, text))
                elif absence.stop == this.first:
                    events.append(_event("returned", index, "is back"))
        return events

    def _update_split_plans(self, this: SplitRound, measured: Mapping[int, SplitReport]) -> None:
        """Start the next round with the cuts of this one's end, as reported by the edges or as simulated.

        An edge whose reply was dropped starts with its previous cut: the move is lost with the reply.
        """
        simulated = moved(self.parties, this.timeline)
        parties = []
        for index, (party, after) in enumerate(zip(self.parties, simulated, strict=True)):
            now = party.split_plan if index in this.runs else after.split_plan
            if index in measured:
                cut, bits = measured[index].cut, measured[index].bits
                now = replace(now, cut=None if cut == EDGE_ALONE else cut, bits=bits)
            parties.append(replace(party, split_plan=now))
        self.parties = tuple(parties)

    def merge(self, this: SplitRound, settled: SettledSplit) -> ArrayRecord:
        """Return the whole model: on real machines, the edges' tensors and those of the cloud.

        Models of several edges are averaged by samples (F8).
        """
        samples = [num_examples_of(reply) for reply in settled.usable]
        replies: list[Arrays] = [
            array_views(cast(ArrayRecord, reply.content[ARRAYS])) for reply in settled.usable
        ]
        if self._cloud is not None and this.runs:
            replies, samples = self._with_cloud(this, [*settled.replies], replies, samples)
        ordered = [
            to_array_record({name: reply[name] for name in this.arrays}) for reply in replies
        ]
        return ordered[0] if len(ordered) == 1 else aggregate_records(ordered, samples)

    def _with_cloud(
        self,
        this: SplitRound,
        groups: Sequence[tuple[int, ...]],
        replies: list[Arrays],
        samples: list[float],
    ) -> tuple[list[Arrays], list[float]]:
        """Return whole models and their samples, with the tensors that the cloud has."""
        assert self._cloud is not None
        runs = [this.runs.get(group[0]) for group in groups]
        clouds = {run: self._cloud.fetch(run) for run in sorted(filter(None, set(runs)))}
        if self._mode == OWN:
            # An edge without a cut has the whole model.
            whole = [
                reply if run is None else {**clouds[run], **reply}
                for run, reply in zip(runs, replies, strict=True)
            ]
            return whole, samples
        model = dict(next(iter(clouds.values())))
        for reply in [_mean(replies, samples)] if self._mode == "turns" else replies:
            model.update(reply)
        return [model], [1.0]

    def price(self, this: SplitRound, settled: SettledSplit) -> Usage:
        """Return the usage of the simulated schedule, which `open` has charged."""
        return this.timeline.usage

    def report(
        self, this: SplitRound, settled: SettledSplit, usage: Usage, events: tuple[ReplyEvent, ...]
    ) -> SplitRoundReport:
        """Return the round's report."""
        return SplitRoundReport(
            server_round=this.server_round,
            epoch=(this.first + this.num_batches) / self._batches_per_epoch,
            events=events,
            usage=usage,
            timeline=this.timeline,
            measured=tuple(settled.measured.values()),
            answered=tuple(settled.measured),
            parties=self.parties,
            ended_s=0.0 if self._clock is None else self._clock.now_s,
        )

    def close(self) -> None:
        """End the sessions of the cloud, which may also serve other runs."""
        if self._cloud is not None:
            self._cloud.close()

    # ------------------------------------------------------------------------------------------- resuming
    def save(self) -> dict[str, Any]:
        """Return the edges' split plans and engines, as plain values that JSON keeps exactly."""
        now = [party.split_plan for party in self.parties]
        return {
            "deployments": [[each.cut, each.bits, each.window] for each in now],
            "engines": [
                party.decider.state() if isinstance(party.decider, DecisionEngine) else {}
                for party in self.parties
            ],
        }

    def restore(self, server_round: int, state: Mapping[str, Any]) -> None:
        """Restore the split plans and engines of a round's end."""
        split_plans = state.get("deployments", ())
        if split_plans:
            self.parties = tuple(
                replace(
                    party,
                    split_plan=replace(party.split_plan, cut=cut, bits=bits, window=window),
                )
                for party, (cut, bits, window) in zip(self.parties, split_plans, strict=True)
            )
        for party, engine in zip(self.parties, state.get("engines", ()), strict=False):
            if isinstance(party.decider, DecisionEngine):
                party.decider.restore(engine)


def _event(kind: str, party: int, text: str) -> ReplyEvent:
    return ReplyEvent(kind=kind, group_id=party, text=f"edge {party}: {text}")


def _mean(replies: Sequence[Arrays], samples: Sequence[float]) -> Arrays:
    return array_views(aggregate_records([to_array_record(reply) for reply in replies], samples))
