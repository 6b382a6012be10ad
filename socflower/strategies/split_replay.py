"""Split training: edges train the front of a model, a cloud the back, as an asynchronous pipeline (F22-F27)."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from typing import Any, Protocol, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log
from numpy.typing import NDArray

from socflower.cluster import Cluster, Usage
from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile
from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.plan.decision import DecisionEngine
from socflower.edgecloud.plan.device_costs import require_edge_memory
from socflower.edgecloud.plan.party import CloudMode, Party
from socflower.edgecloud.plan.split_pipeline import Timeline, moved, round_ends, simulate_split
from socflower.edgecloud.plan.timeline_actions import encode_actions
from socflower.errors import ConfigError, TrainingFailed
from socflower.plain_numbers import plain_numbers
from socflower.sim import EventClock
from socflower.strategies.mixed_replies import client_events
from socflower.strategies.node_registry import NodeRegistry
from socflower.strategies.planned_rounds import PlannedRounds
from socflower.strategies.records import aggregate_records, array_views, to_array_record
from socflower.strategies.replies import ReplyEvent, fault_of, no_reply_event
from socflower.wire.message_keys import (
    ARRAYS,
    CONFIG,
    FROZEN_SHA256,
    METRICS,
    NUM_EXAMPLES,
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


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRoundReport:
    """The report of one round; the latest is `strategy.reports[-1]`."""

    server_round: int
    epoch: float  # epochs completed at its end
    usage: Usage  # of the edges in this round alone; a prediction on real machines
    events: tuple[ReplyEvent, ...]
    timeline: Timeline  # the simulated schedule that virtual time follows
    measured: tuple[
        SplitReport, ...
    ] = ()  # on real links, in the order of the parties that answered
    answered: tuple[int, ...] = ()  # these parties


@plain_numbers
class SplitReplay(PlannedRounds):
    """Train a model with its front half at edges and its back half in a cloud, pipelined.

    A round is a span of batches. Without `cloud`, both halves train in the client's process, in the order of the
    simulated schedule: the staleness of each gradient follows from costs and link, and equal seeds give equal weights.
    With `cloud`, edges connect to it, and gradients are applied as they arrive.

    Parameters
    ----------
    cluster : Cluster
        Its first SoCs are the edges, one for each of `parties`.
    parties : sequence of Party
        For each edge, the cost of a batch at every cut, its link, its initial split plan, the engine that may move its
        cut, and the batches for which it is away (`socflower.edgecloud`): the others train them without it.
    mode : "own", "turns" or "joined"
        "own": each edge has its own cloud half, and all halves are averaged after each round (SplitFed). "turns": one
        cloud half trains on the edges' batches in turn. "joined": edges hold different features of the same samples,
        which the cloud concatenates.
    edge_names : (party, cut) -> names
        The tensors that an edge holds; None is the cut of an edge that holds the whole model.
    batches_per_epoch, num_epochs, round_epochs, seed
        A round is `round_epochs` epochs, rounded to batches, or ends at each of the epochs given.
    reverse : bool
        The front half is in the cloud: generative models, whose last layers see the data.
    uplink, cloud_processors
        What edges share in virtual time; see `socflower.edgecloud.plan.split_pipeline.simulate_split`.
    clock : EventClock, optional
        Of the same cluster; each round is simulated on it. Default: the grid's, else one of its own.
    cloud : CloudSessions, optional
        The cloud, on real machines.
    """

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
    ) -> None:
        if not 1 <= len(parties) <= cluster.num_socs:
            raise ConfigError(
                f"SplitReplay: {len(parties)} edges on a cluster of {cluster.num_socs} SoCs; need 1 to "
                f"{cluster.num_socs}"
            )
        for edge, party in enumerate(parties):
            require_edge_memory(cluster.device_of(edge), party.costs, party.split_plan, edge)
        self.reports: list[SplitRoundReport] = []
        self.parties = tuple(parties)
        self._cluster, self._mode, self._reverse, self._seed = cluster, mode, reverse, seed
        self._edge_names, self._fingerprint = edge_names, fingerprint
        self._batches_per_epoch = batches_per_epoch
        self._total_batches = batches_per_epoch * num_epochs
        self._round_ends = round_ends(round_epochs, batches_per_epoch, num_epochs)
        self._clock, self._cloud = clock, cloud
        self._uplink, self._cloud_processors = uplink, cloud_processors
        self._tolerate_client_errors = tolerate_client_errors
        self._registry = NodeRegistry(cluster, range(len(parties)))
        self._timeline: Timeline | None = None
        self._runs: dict[int, str] = {}  # the cloud's session, by party
        self._left_out: set[int] = set()  # parties whose nodes have not answered yet
        self._returned: list[int] = []  # parties whose nodes have answered since the last round
        self._restart_notes: dict[int, str] = {}  # why a cloud session was restarted, by party
        self._arrays: Arrays = {}  # at the beginning of the round
        self._frozen_sha256 = ""
        self._party_of_message: dict[int, tuple[int, ...]] = {}  # by node

    def resume_from(self, server_round: int, *, state: Mapping[str, Any] | None = None) -> None:
        """Make `start` continue after `server_round`; `state` is the `SplitReplay.state` of that round."""
        super().resume_from(server_round)
        split_plans = (state or {}).get("deployments", ())
        if split_plans:
            self.parties = tuple(
                replace(party, split_plan=SplitPlan(cut=cut, bits=bits, window=window))
                for party, (cut, bits, window) in zip(self.parties, split_plans, strict=True)
            )
        for party, engine in zip(self.parties, (state or {}).get("engines", ()), strict=False):
            if isinstance(party.decider, DecisionEngine):
                party.decider.restore(engine)

    @property
    def state(self) -> dict[str, Any]:
        """The state besides the weights that the next rounds depend on, as plain values that JSON keeps exactly."""
        now = [party.split_plan for party in self.parties]
        return {
            "deployments": [[each.cut, each.bits, each.window] for each in now],
            "engines": [
                party.decider.state() if isinstance(party.decider, DecisionEngine) else {}
                for party in self.parties
            ],
        }

    @property
    def num_rounds(self) -> int:
        """How many rounds `start` needs for all epochs."""
        return len(self._round_ends)

    @property
    def transport(self) -> str:
        """The transport of features and gradients."""
        return "in process" if self._cloud is None else "gRPC"

    def summary(self) -> None:
        """Log the plan."""
        for index, party in enumerate(self.parties):
            now = party.split_plan
            where = (
                "the edge alone"
                if now.cut is None
                else f"cut after {party.costs.cuts[now.cut].name}"
            )
            log(
                INFO,
                "\t├──> Edge %d: %s, %d bits, K = %d%s",
                index,
                where,
                now.bits,
                now.window,
                "" if party.decider is None else ", moves with the link",
            )
        log(
            INFO,
            "\t└──> Rounds: %d of up to %d batches, cloud halves: %s",
            self.num_rounds,
            max(self._span(index + 1)[1] for index in range(self.num_rounds)),
            self._mode,
        )

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> list[Message]:
        """Address every edge; in one process, edges that share a cloud half are trained by one client."""
        if not self._begins(server_round):
            return []
        if not self._registry.node_of:
            self._registry.match_nodes(grid, query=self._cloud is not None)
        self._registry.hear(grid)
        self._registry.ask(grid, server_round)
        self._returned, self._left_out = (
            sorted(self._left_out - self._registry.lost),
            set(self._registry.lost),
        )
        if self._left_out and self._mode != OWN:
            raise TrainingFailed(
                f"SplitReplay: {self._registry.left_out}; edges that share a cloud half need each "
                "other"
            )
        if self._clock is None:
            self._clock = getattr(grid, "clock", None) or EventClock(self._cluster)
        first, num_batches = self._span(server_round)
        timeline = self._timeline = simulate_split(
            self.parties,
            num_batches,
            first,
            clock=self._clock,
            cluster=self._cluster,
            cloud=self._mode,
            reverse=self._reverse,
            uplink=self._uplink,
            cloud_processors=self._cloud_processors,
        )
        self._arrays = array_views(arrays)
        self._frozen_sha256 = str(config.get(FROZEN_SHA256, ""))
        settings = ConfigRecord({**config, SERVER_ROUND: server_round, PRICED: True})
        self._party_of_message, self._runs, self._restart_notes = {}, {}, {}
        counts = [party.num_batches(first, num_batches) for party in self.parties]
        everyone = tuple(
            party for party, count in enumerate(counts) if count and party not in self._left_out
        )
        groups = (
            [everyone]
            if self._mode != OWN and self._cloud is None
            else [(party,) for party in everyone]
        )
        messages = []
        for group in groups:
            if self._cloud is not None and self.parties[group[0]].split_plan.cut is not None:
                task = self._task(group, first, counts[group[0]])
                messages.append(self._open_session_message(group[0], task, settings, server_round))
            else:
                task = self._task(group, first, counts[group[0]], timeline)
                messages.append(self._message(group, task, arrays, settings, server_round))
        return messages

    def aggregate_train(
        self,
        server_round: int,
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the halves into one model, averaging those of several edges by samples.

        Raises `TrainingFailed` if a part of the model is missing or a client raised.
        """
        if not self._ends(server_round):
            return None, None
        assert self._timeline is not None
        answers = {reply.metadata.src_node_id: reply for reply in replies}
        events, usable = [], dict[tuple[int, ...], Message]()
        for node, group in self._party_of_message.items():
            where = f"edge {', '.join(map(str, group))} (node {node})"
            reply = answers.get(node)
            fault = (
                no_reply_event(group[0], where)
                if reply is None
                else fault_of(reply, group[0], where, sent=self._arrays)
            )
            if fault is None:
                usable[group] = cast(Message, reply)
            else:
                events.append(fault)
        events += [
            no_reply_event(party, f"edge {party} ({self._registry.left_out})")
            for party in sorted(self._left_out)
        ]
        self._require_enough(usable, events)
        measured = {
            group[0]: SplitReport.decode(reply.content.config_records[SPLIT_REPORT])
            for group, reply in usable.items()
            if SPLIT_REPORT in reply.content.config_records
        }
        events += [
            ReplyEvent(kind="link", group_id=party, text=f"edge {party}: {text}")
            for party, report in measured.items()
            for text in report.events
        ]
        for group, reply in usable.items():
            events += client_events(
                reply, group[0], f"edge {', '.join(map(str, group))}", "began-anew"
            )
        events += [
            ReplyEvent(kind="began-anew", group_id=party, text=f"edge {party}: {text}")
            for party, text in self._restart_notes.items()
        ]
        for event in events:
            log(WARNING, "aggregate_train: %s", event.text)
        first, num_batches = self._span(server_round)
        events += [
            ReplyEvent(kind="returned", group_id=party, text=f"edge {party}: is back")
            for party in self._returned
        ]
        events += self._absences(first, num_batches)
        self.reports.append(
            SplitRoundReport(
                server_round=server_round,
                epoch=(first + num_batches) / self._batches_per_epoch,
                events=tuple(events),
                usage=self._timeline.usage,
                timeline=self._timeline,
                measured=tuple(measured.values()),
                answered=tuple(measured),
            )
        )
        self._update_split_plans(measured)
        metrics = [cast(MetricRecord, reply.content[METRICS]) for reply in usable.values()]
        samples = [float(cast(float, metric[NUM_EXAMPLES])) for metric in metrics]
        loss = sum(
            float(cast(float, metric["train-loss"])) * count
            for metric, count in zip(metrics, samples, strict=True)
        ) / sum(samples)
        return self._merged_model(usable, samples), MetricRecord(
            {"train-loss": loss, NUM_EXAMPLES: int(sum(samples))}
        )

    def _absences(self, first: int, num_batches: int) -> list[ReplyEvent]:
        """Return events of the edges that their users took or gave back in a round."""
        events = []
        for index, party in enumerate(self.parties):
            for absence in party.away:
                if first <= absence.start < first + num_batches:
                    events.append(
                        ReplyEvent(
                            kind="preempted",
                            group_id=index,
                            text=f"edge {index}: preempted by its user after "
                            f"{absence.start - first} of {num_batches} batches",
                        )
                    )
                elif absence.stop == first:
                    events.append(
                        ReplyEvent(kind="returned", group_id=index, text=f"edge {index}: is back")
                    )
        return events

    # ---------------------------------------------------------------------------------------- to the edges

    def _span(self, server_round: int) -> tuple[int, int]:
        first = self._round_ends[server_round - 2] if server_round > 1 else 0
        return first, self._round_ends[server_round - 1] - first

    def _task(
        self,
        group: tuple[int, ...],
        first: int,
        num_batches: int,
        timeline: Timeline | None = None,
    ) -> SplitTask:
        now = [self.parties[party].split_plan for party in group]
        actions = (
            b""
            if timeline is None
            else encode_actions(action for action in timeline.actions if action.party in group)
        )
        return SplitTask(
            parties=group,
            num_parties=len(self.parties),
            mode=self._mode,
            reverse=self._reverse,
            first_batch=first,
            num_batches=num_batches,
            total_batches=self._total_batches,
            batches_per_epoch=self._batches_per_epoch,
            seed=self._seed,
            cuts=tuple(EDGE_ALONE if each.cut is None else each.cut for each in now),
            bits=tuple(each.bits for each in now),
            windows=tuple(each.window for each in now),
            gradient_bits=self.parties[0].costs.gradient_bits,
            actions=actions,
            fingerprint=self._fingerprint,
            frozen_sha256=self._frozen_sha256,
        )

    def _open_session_message(
        self, party: int, task: SplitTask, settings: ConfigRecord, server_round: int
    ) -> Message:
        """Open the cloud's session and return the edge's message, with only the tensors of its own half."""
        assert self._cloud is not None
        edge = set(self._edge_names(party, self.parties[party].split_plan.cut))
        others = (
            set().union(
                *(
                    self._edge_names(other, self.parties[other].split_plan.cut)
                    for other in range(len(self.parties))
                )
            )
            if self._mode != OWN
            else edge
        )
        task = self._cloud.open(
            task, {name: array for name, array in self._arrays.items() if name not in others}
        )
        self._runs[party] = task.run
        continues = (
            self._mode != OWN or len(self.parties) == 1
        )  # not averaged with others each round
        if continues and 0 < task.first_batch == task.session_first:
            self._restart_notes[party] = (
                f"the cloud's half begins a new session before batch {task.first_batch}, "
                "with the last round's weights and a new optimiser"
            )
        own = to_array_record({name: array for name, array in self._arrays.items() if name in edge})
        return self._message((party,), task, own, settings, server_round)

    def _message(
        self,
        group: tuple[int, ...],
        task: SplitTask,
        arrays: ArrayRecord,
        settings: ConfigRecord,
        server_round: int,
    ) -> Message:
        node = self._registry.node_of[group[0]]
        self._party_of_message[node] = group
        return Message(
            RecordDict({ARRAYS: arrays, CONFIG: settings, SPLIT: ConfigRecord(task.encode())}),
            node,
            MessageType.TRAIN,
            group_id=str(server_round),
        )

    # -------------------------------------------------------------------------------------- from the edges

    def _require_enough(self, usable: Collection[object], events: Sequence[ReplyEvent]) -> None:
        raised = [event for event in events if event.kind == "client-raised"]
        if raised and not self._tolerate_client_errors:
            raise TrainingFailed(raised[0].text)
        if events and (self._mode != OWN or not usable):
            raise TrainingFailed(f"a part of the model is missing; first cause: {events[0].text}")

    def _merged_model(
        self, usable: Mapping[tuple[int, ...], Message], samples: Sequence[float]
    ) -> ArrayRecord:
        """Return the whole model: on real machines, the edges' tensors and those of the cloud."""
        replies = [
            array_views(cast(ArrayRecord, reply.content[ARRAYS])) for reply in usable.values()
        ]
        if self._cloud is not None and self._runs:
            clouds = {
                run: self._cloud.fetch(run)
                for run in sorted(
                    {self._runs[group[0]] for group in usable if group[0] in self._runs}
                )
            }
            if self._mode == OWN:  # an edge without a cut has the whole model
                replies = [
                    {**clouds[self._runs[group[0]]], **reply} if group[0] in self._runs else reply
                    for group, reply in zip(usable, replies, strict=True)
                ]
            else:
                whole = dict(next(iter(clouds.values())))
                for reply in replies if self._mode != "turns" else [_mean(replies, samples)]:
                    whole.update(reply)
                replies, samples = [whole], [1.0]
        ordered = [
            to_array_record({name: reply[name] for name in self._arrays}) for reply in replies
        ]
        return ordered[0] if len(ordered) == 1 else aggregate_records(ordered, samples)

    def _update_split_plans(self, measured: Mapping[int, SplitReport]) -> None:
        """Start the next round with the cuts of this one's end, as reported by the edges or as simulated.

        An edge whose reply was dropped starts with its previous cut: the move is lost with the reply.
        """
        assert self._timeline is not None
        for index, (party, simulated) in enumerate(
            zip(self.parties, moved(self.parties, self._timeline), strict=True)
        ):
            now = party.split_plan if index in self._runs else simulated.split_plan
            if index in measured:
                report = measured[index]
                now = replace(
                    now, cut=None if report.cut == EDGE_ALONE else report.cut, bits=report.bits
                )
            self.parties = (
                *self.parties[:index],
                replace(party, split_plan=now),
                *self.parties[index + 1 :],
            )


def _mean(replies: Sequence[Arrays], samples: Sequence[float]) -> Arrays:
    return array_views(aggregate_records([to_array_record(reply) for reply in replies], samples))
