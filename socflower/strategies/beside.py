"""Groups and edges of a split training side by side: in each round both train the same model on their own data."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.supercore import log
from numpy.typing import NDArray

from socflower.cluster import Usage
from socflower.errors import ConfigError, InfeasiblePlan, TrainingFailed, require_type
from socflower.plain_numbers import plain_numbers
from socflower.sim.side_by_side import idle_until_all_end
from socflower.strategies.outer_step import ChosenNodes
from socflower.strategies.records import aggregate_records, array_views, to_array_record
from socflower.strategies.replies import ReplyEvent
from socflower.strategies.resuming import PlannedRounds
from socflower.strategies.socflow import RoundReport, SoCFlow
from socflower.strategies.split_replay import SplitReplay, SplitRoundReport
from socflower.wire.message_keys import LOST_STATE, NUM_EXAMPLES, TRAIN_LOSS


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class BesideReport:
    """The report of one round; the latest is `strategy.reports[-1]`."""

    server_round: int
    epoch: float  # epochs completed by the groups at its end
    usage: Usage  # of both in this round alone, with the wait of the one that ended first
    events: tuple[ReplyEvent, ...]
    groups: RoundReport
    edges: SplitRoundReport


class Beside(PlannedRounds):
    """Train groups of SoCs and edges of a split training at the same time.

    Each round both get the model, and the next one is the average of their two results by samples (F8). Where servers
    synchronise less often than their groups (`server_interval`), edges take part in the synchronisations of all
    servers, and keep their own model in between. In virtual time a round takes as long as the slower of both; the
    other one idles. They share neither links nor a rack, so each has a cluster and a clock of its own.

    Of the nodes, in ascending order of their ids, the first are the groups', the next ones the edges'.

    Parameters
    ----------
    groups : SoCFlow
        The groups, without an outer strategy.
    edges : SplitReplay
        The edges, whose halves both train at their node. Their rounds are the groups': `round_epochs` is
        `[interval.epoch_end for interval in groups.intervals]`. By default their clock is their own, not the grid's.

    A part without any usable reply is left out of the average if the other one has some and that part tolerates client
    errors; otherwise `TrainingFailed` ends the training.
    """

    def __init__(self, *, groups: SoCFlow, edges: SplitReplay) -> None:
        require_type("Beside", (SoCFlow,), "SoCFlow(…)", groups=groups)
        require_type("Beside", (SplitReplay,), "SplitReplay(…)", edges=edges)
        if groups.num_rounds != edges.num_rounds:
            raise ConfigError(f"Beside: the groups have {groups.num_rounds} rounds and the edges {edges.num_rounds}; "
                              "give SplitReplay(round_epochs=[interval.epoch_end for interval in groups.intervals])")
        if groups.has_outer:
            raise ConfigError("Beside: outer makes the next model of the groups' models, and beside edges it is the "
                              "average of both; leave outer out")
        if edges.has_cloud:
            raise ConfigError("Beside: edges keep their own model in the sessions of a cloud on a machine of its own, "
                              "and beside groups every round begins with the average; leave cloud out")
        if groups.clock is not None and groups.clock is edges.clock:
            raise ConfigError("Beside: groups and edges have the same clock, on which they would train one after the "
                              "other; give each one of its own cluster")
        self.groups, self.edges = groups, edges
        self.reports: list[BesideReport] = []
        self._num_socs = len(groups.plan.participants)
        self._edge_nodes: list[int] = []
        self._edge_model: ArrayRecord | None = None  # after a synchronisation inside servers
        self._begin_s = (0.0, 0.0)

    @property
    def num_rounds(self) -> int:
        """How many rounds `start` needs for all epochs."""
        return self.groups.num_rounds

    def resume_from(
        self, server_round: int, *, groups: Mapping[str, Any] | None = None, edges: Mapping[str, Any] | None = None,
        edge_model: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        """Make `start` continue after `server_round`; the rest is the `state` then."""
        super().resume_from(server_round)
        self.groups.resume_from(server_round, **(groups or {}))
        self.edges.resume_from(server_round, state=edges)
        self._edge_model = to_array_record(edge_model) if edge_model else None

    @property
    def state(self) -> dict[str, Any]:
        """The state besides the weights that the next rounds depend on, as keyword arguments for `resume_from`."""
        return {"groups": self.groups.state, "edges": self.edges.state,
                "edge_model": {} if self._edge_model is None else array_views(self._edge_model)}

    def summary(self) -> None:
        """Log both plans."""
        self.groups.summary()
        self.edges.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid,
    ) -> list[Message]:
        """Address the groups and the edges, each among their own nodes."""
        if not self._begins(server_round):
            return []
        known = self.groups.clock or getattr(grid, "clock", None)
        self._begin_s = (known.now_s if known else 0.0, self.edges.clock.now_s if self.edges.clock else 0.0)
        nodes = sorted(grid.get_node_ids())
        if not self._edge_nodes:
            num_edges = len(self.edges.parties)
            if len(nodes) < self._num_socs + num_edges:
                raise InfeasiblePlan(f"Beside: {self._num_socs} SoCs of groups and {num_edges} edges need as many "
                                     f"nodes, and Flower has {len(nodes)}; start more SuperNodes, or plan with fewer")
            self._edge_nodes = nodes[self._num_socs:self._num_socs + num_edges]
        of_groups = [node for node in nodes if node not in self._edge_nodes]
        of_edges = [node for node in nodes if node in self._edge_nodes]
        return [*self.groups.configure_train(server_round, arrays, config, ChosenNodes(grid, of_groups)),
                *self.edges.configure_train(server_round, self._edge_model or arrays, config,
                                            _EdgeNodes(grid, of_edges))]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let each part aggregate its replies; return the average of both models by samples."""
        if not self._ends(server_round):
            return None, None
        ordered = sorted(replies, key=lambda reply: reply.metadata.src_node_id)
        found: list[tuple[ArrayRecord, MetricRecord]] = []
        lost: list[tuple[SoCFlow | SplitReplay, TrainingFailed]] = []
        for part in (self.groups, self.edges):
            try:
                found.append(cast(tuple[ArrayRecord, MetricRecord], part.aggregate_train(server_round, ordered)))
            except TrainingFailed as error:
                lost.append((part, error))
        for part, cause in lost:
            if not found or not part.tolerates_client_errors or LOST_STATE in str(cause):
                raise cause
            log(WARNING, "aggregate_train: %s", cause)
            part.skip_round(server_round, str(cause))
        self._keep_edge_model(found[-1][0] if not any(part is self.edges for part, _ in lost) else None)
        ours, theirs = self.groups.reports[-1], self.edges.reports[-1]
        self.reports.append(BesideReport(
            server_round=server_round, epoch=ours.epoch, events=(*ours.events, *theirs.events),
            usage=self._end_together(ours.usage.alongside(theirs.usage)), groups=ours, edges=theirs))
        return _average(found)

    def _keep_edge_model(self, model: ArrayRecord | None) -> None:
        """Keep the edges' own model for their next round, unless this round ended with all servers."""
        assert self.groups.round is not None
        if self.groups.round.interval.across_servers:
            self._edge_model = None
        else:
            self._edge_model = model or self._edge_model or self.groups.round.sent

    def _end_together(self, usage: Usage) -> Usage:
        """Let the part that ended first idle until the other has ended; return the usage of the whole round."""
        groups, edges = self.groups.clock, self.edges.clock
        if groups is None or edges is None:
            return usage
        waits = idle_until_all_end([
            (groups, self.groups.plan.participants, groups.now_s - self._begin_s[0]),
            (edges, range(len(self.edges.parties)), edges.now_s - self._begin_s[1])])
        longest = Usage(duration_s=groups.now_s - self._begin_s[0])
        return longest.alongside(sum((Usage(soc_seconds=each.soc_seconds, energy_j=each.energy_j,
                                            num_bytes=each.num_bytes) for each in (usage, *waits)), Usage()))


class _EdgeNodes(ChosenNodes):
    """The edges' nodes; the clock of the grid is the groups'."""

    clock = None


def _average(found: Sequence[tuple[ArrayRecord, MetricRecord]]) -> tuple[ArrayRecord, MetricRecord]:
    """Return the mean by samples of the parts' models and losses."""
    samples = [float(cast(float, metrics[NUM_EXAMPLES])) for _, metrics in found]
    merged = MetricRecord({NUM_EXAMPLES: int(sum(samples))})
    if all(TRAIN_LOSS in metrics for _, metrics in found):
        merged[TRAIN_LOSS] = sum(float(cast(float, metrics[TRAIN_LOSS])) * count
                                 for (_, metrics), count in zip(found, samples, strict=True)) / sum(samples)
    models = [model for model, _ in found]
    return (models[0] if len(models) == 1 else aggregate_records(models, samples)), merged
