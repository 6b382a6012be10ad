"""The edges beside the groups of a scenario: their clock and strategy, and their part of the run's result."""

from collections.abc import Mapping
from typing import Any

from socflower.engines.checkpoint import Checkpoint
from socflower.scenario.app.split_result import SplitHistory
from socflower.scenario.app.split_training import cuts_and_staleness, split_strategy
from socflower.scenario.heat import rack_dynamics
from socflower.scenario.prepared_run import PreparedRun
from socflower.sim import EventClock, Trace
from socflower.sim.trace import NamedTrace
from socflower.strategies.beside import Beside
from socflower.strategies.socflow import SoCFlow


class EdgesBeside:
    """The edges of one run."""

    def __init__(self, run: PreparedRun, trace: Trace) -> None:
        self._setting = setting = run.edges_setting
        self._first_soc = run.cluster.num_socs
        self.rack = rack_dynamics(setting.scenario, setting.cluster, self._first_soc)
        self.clock = EventClock(setting.cluster, dynamics=self.rack, trace=NamedTrace(trace, "edge"))
        self._edges = split_strategy(setting, self.clock, first_soc=self._first_soc)
        self._history = SplitHistory(setting.links, self._edges.parties)
        self._strategy: Beside | None = None

    def beside(self, groups: SoCFlow) -> Beside:
        """Return the strategy of both."""
        self._strategy = Beside(groups=groups, edges=self._edges)
        return self._strategy

    @property
    def transport(self) -> str:
        """The transport of features and gradients."""
        return self._edges.transport

    def resume_from(self, checkpoint: Checkpoint, of_groups: Mapping[str, Any]) -> None:
        """Make the strategy continue after a checkpoint; `RoundRecord` restores the clocks."""
        assert self._strategy is not None
        self._strategy.resume_from(checkpoint.server_round, groups=of_groups, edges=checkpoint.edges["strategy"],
                                   edge_model=checkpoint.edge_model)
        self._history = SplitHistory(self._setting.links, self._edges.parties, checkpoint.edges["history"])

    def state(self) -> dict[str, Any]:
        """Return the edges' fields of a checkpoint."""
        assert self._strategy is not None
        return {"edges": {"strategy": self._edges.state, "history": self._history.state()},
                "edge_model": self._strategy.state["edge_model"]}

    def round_end(self) -> dict[str, Any]:
        """Add the latest round to the history; return the edges' entries of it."""
        assert self._strategy is not None
        report = self._strategy.reports[-1]
        self._history.add(report.edges, self.clock.now_s - report.usage.duration_s)
        return cuts_and_staleness(self._edges)

    def document(self) -> dict[str, Any]:
        """Return the result's `split`."""
        return self._history.document(self._edges.parties, self._setting.mode, self.clock.now_s)
