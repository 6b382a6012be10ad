"""What a split scenario's ServerApp does: edges, cloud, links and strategy put together, and what came of it."""

from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from socflower.clients.split_cloud import CloudClient
from socflower.cluster.catalog import device
from socflower.edgecloud import baselines
from socflower.edgecloud.decision import DecisionEngine, WindowSchedule
from socflower.edgecloud.deployment import Deployment, SplitCosts
from socflower.edgecloud.link_trace import LinkTrace
from socflower.edgecloud.planning import rates_at_the_start
from socflower.edgecloud.runtime.credentials import SplitTls, read_token
from socflower.edgecloud.runtime.operator_calls import Operator
from socflower.edgecloud.timeline import Party
from socflower.edgecloud.timeline_servers import CloudMode
from socflower.errors import ConfigError, TrainingFailed
from socflower.scenario.config import Scenario
from socflower.scenario.round_record import RoundRecord, event_documents
from socflower.scenario.run_folder import RunFolder
from socflower.scenario.scenario_file import scenario_cluster
from socflower.scenario.split_links import edge_links
from socflower.scenario.split_measuring import measured_costs
from socflower.scenario.split_story import SplitStory, place, staleness_of
from socflower.scenario.split_workloads import Score, SplitWorkload, split_workload
from socflower.sim import EventClock, Trace
from socflower.strategies.split_replay import SplitReplay


class SplitSetting:
    """Edges and cloud of a scenario: what training, planning and predictions are made of."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.cluster = scenario_cluster(scenario)
        self.num_edges = scenario.strategy.socs or self.cluster.num_socs
        self.workload: SplitWorkload = split_workload(scenario, self.num_edges)
        self.links = edge_links(scenario, self.num_edges)
        cloud = device(scenario.split.cloud_device)
        by_catalogue = [self.workload.costs(edge, self.cluster.device_of(edge), cloud)
                        for edge in range(self.num_edges)]
        self.costs = tuple(measured_costs(Path(scenario.split.costs), costs) if scenario.split.costs else costs
                           for costs in by_catalogue)
        self.total_batches = self.workload.batches_per_epoch * scenario.train.epochs

    @property
    def is_sequential(self) -> bool:
        """Whether edge and cloud wait for each other: the baselines that do."""
        peer = baselines.PEERS.get(self.scenario.strategy.name)
        return peer is not None and peer.waits

    @property
    def mode(self) -> CloudMode:
        """How cloud halves serve the edges."""
        if self.workload.is_joined:
            return "joined"
        # Edges that train alone have no cloud half to share; their models are averaged.
        shared = self.scenario.split.halves == "shared" and self.num_edges > 1 and self._firsts[0].cut is not None
        return "turns" if shared else "own"

    @property
    def schedule(self) -> WindowSchedule:
        """K by part of training; 0 for those who wait for each other."""
        steps = ((0.0, 0),) if self.is_sequential else tuple(
            (part, int(limit)) for part, limit in self.scenario.split.window)
        return WindowSchedule(steps=steps)

    def window(self, batch: int) -> int:
        """Return K for a batch."""
        return self.schedule.window(batch, self.total_batches)

    @property
    def moves(self) -> bool:
        """Whether engines may move the edges' cuts."""
        return self.scenario.strategy.name == "split-replay" and self.scenario.split.adapt and (
            self.num_edges == 1 or self.mode == "own") and not self.workload.is_joined

    def live_engine(self, edge: int) -> DecisionEngine | None:
        """Return what may move an edge's cut on a real link; while a round runs, it cannot leave the cloud."""
        settings = self.scenario.split
        return DecisionEngine(
            self.costs[edge], settings.bits, num_batches=self.total_batches,
            reverse=self.workload.program.is_reverse) if self.moves else None

    def parties(self) -> list[Party]:
        """Return the edges as they begin."""
        engines = [self._engine(costs) for costs in self.costs]
        firsts = list(self._firsts)
        if self.mode == "turns":  # they share the cloud half, so they are cut at one place: the first edge's
            firsts = [replace(first, cut=firsts[0].cut) for first in firsts]
        return [Party(costs=costs, trace=link, deployment=first, window=self.window,
                      decider=engine if self.moves and first.cut is not None else None)
                for costs, engine, link, first in zip(self.costs, engines, self.links, firsts, strict=True)]

    @cached_property
    def _firsts(self) -> tuple[Deployment, ...]:
        """What suits each edge by itself."""
        return tuple(self._first(costs, self._engine(costs), link)
                     for costs, link in zip(self.costs, self.links, strict=True))

    def _engine(self, costs: SplitCosts) -> DecisionEngine:
        settings = self.scenario.split
        return DecisionEngine(costs, settings.bits, allow_edge_only=settings.allow_edge_only,
                              num_batches=self.total_batches, reverse=self.workload.program.is_reverse)

    def _first(self, costs: SplitCosts, engine: DecisionEngine, link: LinkTrace) -> Deployment:
        name, window = self.scenario.strategy.name, self.window(0)
        if name == "edge-only" and self.workload.is_joined:
            raise ConfigError(f"{self.scenario.name}: parties that hold different features cannot train alone; "
                              "leave edge-only out")
        best = engine.best(rates_at_the_start(link), window)
        if self.workload.is_joined:  # there is one cut, and nobody can train alone
            bits = baselines.PEERS[name].bits if name in baselines.PEERS else best.bits
            return Deployment(cut=0, bits=bits, window=window)
        cut = self._given_cut(costs)
        if name in baselines.PEERS:
            return baselines.planned(
                name, costs, link.mean_rates(), num_batches=self.total_batches, window=window, cut=cut,
                allow_edge_only=self.scenario.split.allow_edge_only, reverse=self.workload.program.is_reverse)
        if cut is None:
            return best
        given = DecisionEngine(replace(costs, cuts=costs.cuts[cut:cut + 1]), self.scenario.split.bits,
                               reverse=self.workload.program.is_reverse).best(rates_at_the_start(link), window)
        return Deployment(cut=cut, bits=given.bits, window=window)

    def _given_cut(self, costs: SplitCosts) -> int | None:
        cut, names = self.scenario.split.cut, [each.name for each in costs.cuts]
        if cut == "auto":
            return None
        if isinstance(cut, str):
            if cut not in names:
                raise ConfigError(f"{self.scenario.name} [edgecloud] cut = {cut!r}: the model can be cut after "
                                  f"{', '.join(names)}")
            return names.index(cut)
        if not 0 <= cut < len(names):
            raise ConfigError(f"{self.scenario.name} [edgecloud] cut = {cut}: cuts are 0 to {len(names) - 1}")
        return cut


def train_split(scenario: Scenario, grid: Grid, folder: RunFolder) -> dict[str, Any]:
    """Train and return the outcome: the part of the result document that does not depend on who asked.

    Both halves train in the clients' processes unless the run's folder says where a cloud is.
    """
    started_s = perf_counter()
    setting = SplitSetting(scenario)
    cloud = _cloud(folder, setting)
    workload, model = setting.workload, setting.workload.program.model()
    trace = Trace()
    clock = EventClock(setting.cluster, trace=trace)

    def evaluate(arrays: ArrayRecord) -> Score:
        model.load_state_dict(arrays.to_torch_state_dict())
        return workload.evaluate(model)

    record = RoundRecord(scenario, folder, clock, trace, evaluate)
    strategy = SplitReplay(
        cluster=setting.cluster, parties=setting.parties(), edge_names=workload.program.edge_names, mode=setting.mode,
        batches_per_epoch=workload.batches_per_epoch, num_epochs=scenario.train.epochs, clock=clock, cloud=cloud,
        reverse=workload.program.is_reverse, round_epochs=scenario.split.round_epochs, seed=scenario.seed,
        fingerprint=workload.program.fingerprint(), tolerate_client_errors=scenario.strategy.tolerate_client_errors)
    arrays = ArrayRecord(model.state_dict())
    resumed = record.resume()
    if resumed is not None:
        checkpoint, arrays = resumed
        strategy.resume_from(checkpoint.server_round, state=checkpoint.balance)
    story = SplitStory(setting.links, strategy.parties, resumed[0].balance.get("story") if resumed else None)

    def round_end(server_round: int) -> dict[str, Any]:
        report = strategy.reports[-1]
        story.add(report, clock.now_s - report.timeline.duration_s)
        stale = staleness_of(report)
        entry = {"epoch": report.epoch, "events": event_documents(report.events),
                 "mean_staleness": sum(value * count for value, count in stale.items()) / max(1, stale.total()),
                 "cuts": [place(party.deployment, party.costs) for party in strategy.parties]}
        if report.measured:
            entry["links"] = [asdict(each) for each in report.measured]
        return entry

    def own_state() -> dict[str, Any]:
        return {"balance": {**strategy.state, "story": story.state()}}

    try:
        final = strategy.start(
            grid, arrays, num_rounds=strategy.num_rounds, timeout=scenario.train.reply_timeout_s,
            evaluate_fn=record.evaluation(round_end, strategy.num_rounds, own_state)).arrays
    finally:  # else a cloud that serves others too would keep what nobody comes back for
        if cloud is not None:
            cloud.close()
    if not final:
        raise TrainingFailed("Flower returned no model: every client failed; see the log for the first cause")
    return {
        "strategy": scenario.strategy.name,
        "kernels": {"fp32": f"torch {torch.__version__}", "aggregation": "native weighted sum, float32"},
        "transports": {"edge and cloud": strategy.transport, "hub": "Flower messages"},
        "data_source": workload.source,
        **record.totals(final),
        "wall_s": perf_counter() - started_s, "heat": None, "plan": None,
        "split": story.document(strategy.parties, setting.mode, clock.now_s),
    }


def _cloud(folder: RunFolder, setting: SplitSetting) -> CloudClient | None:
    where = folder.read_cloud()
    if where is None:
        return None
    tls = SplitTls(ca=Path(where.ca)) if where.ca else None
    operator = Operator(address=where.address, token=read_token(Path(where.token_file)), tls=tls)
    return CloudClient(operator, setting.workload.program)

