"""Training on each node alone, on its own data: models are averaged after each round (FedAvg, McMahan et al. 2017)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from pydantic import Field

from socflower.cluster import Usage
from socflower.errors import ConfigError, InfeasiblePlan, TrainingFailed
from socflower.field_rules import checked
from socflower.quantities import counted
from socflower.strategies.method import (
    Description,
    Method,
    NodesForEvaluation,
    OuterClients,
    OuterModels,
    RoundReport,
)
from socflower.strategies.mixed_replies import client_events, mixed_figures
from socflower.strategies.records import (
    SentInt8,
    aggregate_records,
    array_views,
)
from socflower.strategies.replies import (
    failure_of,
    fault_of,
    heat_events,
    no_reply_event,
    num_examples_of,
    other_layouts,
)
from socflower.strategies.reply_events import ReplyEvent
from socflower.strategies.settings import BatchSize, Epochs
from socflower.wire.message_keys import (
    ARRAYS,
    CONFIG,
    INT8_WIRE,
    SCALES,
    SERVER_ROUND,
    WIRES,
)


@checked
class LocalSchedule:
    """How much each node trains, with a new optimiser in each round.

    Parameters
    ----------
    num_rounds, local_epochs : int
        How many rounds, and passes over a node's own data in each.
    batch_size : int
        Of a node.
    seed : int
        Seed of the order of the data.
    """

    num_rounds: Epochs
    local_epochs: Epochs = 1
    batch_size: BatchSize = 32
    seed: Annotated[int, Field(gt=0)] = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalRound:
    """A round between its messages and its replies."""

    server_round: int
    sent: ArrayRecord
    # The nodes that got a message, by SoC, ascending.
    node_of: dict[int, int]
    # SoCs whose nodes are not connected.
    absent: tuple[int, ...]
    # The model as it was sent; None if that was in float32.
    in_int8: SentInt8 | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SettledLocal:
    """The replies of a round, read."""

    # In the order of the SoCs.
    usable: Sequence[Message]
    events: tuple[ReplyEvent, ...]


class LocalTraining(Method[LocalRound, SettledLocal]):
    """Rounds in which all nodes train alone; nodes are the SoCs in ascending order of their ids.

    Messages are those of any Flower app, so the grid prices them. `InfeasiblePlan` at the first round if there are
    fewer than `num_socs` nodes; later rounds continue without nodes that are gone.
    """

    def __init__(
        self,
        *,
        schedule: LocalSchedule,
        num_socs: int,
        proximal_mu: float = 0.0,
        tolerate_client_errors: bool = False,
        wire: str = WIRES[0],
    ) -> None:
        self._wire = wire
        self.schedule, self.seed = schedule, schedule.seed
        self._proximal_mu = proximal_mu
        self._num_socs, self._tolerates = num_socs, tolerate_client_errors
        # All nodes that took part, by SoC.
        self._node_of: dict[int, int] = {}
        self.outer_models = OuterNodes(self._node_of)

    @property
    def num_rounds(self) -> int:
        """How many rounds the schedule has."""
        return self.schedule.num_rounds

    @property
    def socs(self) -> Sequence[int]:
        """The first SoCs."""
        return range(self._num_socs)

    def describe(self) -> Description:
        """Return the rounds in a line."""
        schedule = self.schedule
        epochs = counted(schedule.local_epochs, "epoch")
        line = (
            f"{counted(self._num_socs, 'node')}, {counted(schedule.num_rounds, 'round')} of {epochs} "
            f"in batches of {schedule.batch_size}"
        )
        return Description(lines=[line])

    # ------------------------------------------------------------------------------------- opening a round
    def open(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> tuple[LocalRound, list[Message]]:
        """Address all nodes that are connected."""
        connected = sorted(grid.get_node_ids())
        if not self._node_of:
            if len(connected) < self._num_socs:
                raise InfeasiblePlan(
                    f"OrderedFedAvg: it trains on {self._num_socs} SoCs and Flower has "
                    f"{counted(len(connected), 'node')}; start more SuperNodes, or train on fewer"
                )
            self._node_of.update(zip(self.socs, connected, strict=False))
        present = {soc: node for soc, node in self._node_of.items() if node in connected}
        if not present:
            raise TrainingFailed(f"round {server_round}: no node is connected")
        content = RecordDict({ARRAYS: arrays, CONFIG: self._settings(server_round, config)})
        in_int8 = SentInt8.of(arrays) if self._wire == INT8_WIRE else None
        if in_int8 is not None:
            content[ARRAYS], content[SCALES] = in_int8.arrays, in_int8.scales
        this = LocalRound(
            server_round=server_round,
            sent=arrays,
            node_of=present,
            absent=tuple(soc for soc in self._node_of if soc not in present),
            in_int8=in_int8,
        )
        return this, [
            Message(
                RecordDict({**content}),
                node,
                MessageType.TRAIN,
                group_id=str(server_round),
            )
            for node in present.values()
        ]

    def _settings(self, server_round: int, config: ConfigRecord) -> ConfigRecord:
        """Return the train config: the caller's, and the schedule; `ConfigError` for a key of both."""
        own: dict[str, int | float] = {
            "batch-size": self.schedule.batch_size,
            "local-epochs": self.schedule.local_epochs,
            "num-rounds": self.schedule.num_rounds,
            "seed": self.schedule.seed,
        }
        if self._proximal_mu:
            own["proximal-mu"] = self._proximal_mu
        if both := [key for key in own if key in config]:
            raise ConfigError(
                f"OrderedFedAvg: train_config has {both[0]!r}, which the schedule gives; leave it out"
            )
        return ConfigRecord({**config, **own, SERVER_ROUND: server_round})

    # ------------------------------------------------------------------------------------ settling a round
    def settle(self, this: LocalRound, replies: Sequence[Message]) -> SettledLocal:
        """Drop broken replies; `TrainingFailed` if none is left, or if a client raised and that is not tolerated."""
        if this.in_int8 is not None:
            replies = [*map(this.in_int8.in_float32, replies)]
        answers = {reply.metadata.src_node_id: reply for reply in replies}
        sent = array_views(this.sent)
        usable: dict[int, Message] = {}
        faults: dict[int, ReplyEvent] = {
            soc: no_reply_event(soc, f"SoC {soc} (node {self._node_of[soc]}, not connected)")
            for soc in this.absent
        }
        for soc, node in this.node_of.items():
            reply, where = answers.get(node), f"SoC {soc} (node {node})"
            if reply is None:
                faults[soc] = no_reply_event(soc, where)
            elif fault := fault_of(reply, soc, where, sent=sent):
                faults[soc] = fault
            else:
                usable[soc] = reply
        for soc, difference in other_layouts(usable, this.sent).items():
            del usable[soc]
            text = f"SoC {soc} (node {this.node_of[soc]}): {difference}, dropped"
            faults[soc] = ReplyEvent(kind="malformed", group_id=soc, text=text)
        events = [faults[soc] for soc in sorted(faults)]
        raised = [event for event in events if event.kind == "client-raised"]
        if raised and not self._tolerates:
            raise TrainingFailed(raised[0].text)
        if not usable:
            raise failure_of("no client sent a usable model", events)
        for soc, reply in usable.items():
            where = f"SoC {soc} (node {this.node_of[soc]})"
            events += client_events(reply, soc, where) + heat_events(reply, soc, where)
        return SettledLocal(usable=[*usable.values()], events=tuple(events))

    def merge(self, this: LocalRound, settled: SettledLocal) -> ArrayRecord:
        """Return the mean by samples, in the order of the SoCs (F8)."""
        models = [reply.content.array_records[ARRAYS] for reply in settled.usable]
        return aggregate_records(models, [num_examples_of(reply) for reply in settled.usable])

    def report(
        self,
        this: LocalRound,
        settled: SettledLocal,
        usage: Usage,
        events: tuple[ReplyEvent, ...],
    ) -> RoundReport:
        """Return the round's report."""
        return RoundReport(
            server_round=this.server_round,
            epoch=float(this.server_round * self.schedule.local_epochs),
            events=events,
            usage=usage,
            **mixed_figures(settled.usable),
        )


class OuterNodes(OuterModels[LocalRound, SettledLocal]):
    """Nodes as clients of an outer strategy."""

    def __init__(self, node_of: Mapping[int, int]) -> None:
        # All nodes that took part in a round, by SoC.
        self._node_of = node_of

    def clients(self, this: LocalRound) -> OuterClients:
        """Return the number of nodes."""
        return OuterClients(num_models=len(this.node_of), in_rings=False)

    def nodes(self, this: LocalRound, grid: Grid) -> NodesForEvaluation:
        """Return the connected nodes."""
        connected = set(grid.get_node_ids())
        socs = {node: soc for soc, node in self._node_of.items() if node in connected}
        return NodesForEvaluation(soc_of_node=socs)
