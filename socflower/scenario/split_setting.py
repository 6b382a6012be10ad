"""The edges and the cloud of a split scenario, built once for checks, plans, training and predictions."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from socflower.cluster import Device
from socflower.cluster.device_catalog import device
from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile, LinkRates, constant
from socflower.edgecloud.plan import baselines
from socflower.edgecloud.plan.accuracy_budget import TrialPlan
from socflower.edgecloud.plan.cuts import SplitCosts, SplitPlan
from socflower.edgecloud.plan.decision import DecisionEngine, WindowSchedule, initial_rates
from socflower.edgecloud.plan.device_costs import require_edge_memory
from socflower.edgecloud.plan.party import CloudMode, Party
from socflower.edgecloud.plan.split_pipeline import round_ends
from socflower.errors import ConfigError
from socflower.scenario.costs import num_samples, num_training_samples
from socflower.scenario.schema.file import num_participants, scenario_cluster
from socflower.scenario.schema.links import edge_links
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.schema.split import CLICKS, GENERATOR
from socflower.scenario.split_costs import built_in_costs, is_built_in
from socflower.workloads.partition import iid_partition

# Importing torch takes long.
if TYPE_CHECKING:
    from socflower.scenario.split_models import SplitWorkload


class SplitSetting:
    """Edges, links, costs and cloud mode of a split scenario, for training, planning and predictions."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.cluster = scenario_cluster(scenario)
        self.num_edges = num_participants(scenario, self.cluster)
        self.links = edge_links(scenario, self.num_edges)
        cloud = device(scenario.split.cloud_device)
        self.costs = tuple(self._edge_costs(edge, cloud) for edge in range(self.num_edges))
        self.total_batches = self.batches_per_epoch * scenario.train.epochs
        # The batches of a calibration's trial, which is the first round; 0: there is none.
        self.trial_batches = 0

    def _edge_costs(self, edge: int, cloud: Device) -> SplitCosts:
        """Return the costs of an edge by the catalogue, or those of `[edgecloud] costs`, which has the same cuts."""
        scenario, edge_device = self.scenario, self.cluster.device_of(edge)
        if is_built_in(scenario):
            costs = built_in_costs(scenario, edge_device, cloud)
        else:
            costs = self.workload.costs(edge, edge_device, cloud)
        if not scenario.split.costs:
            return costs
        from socflower.scenario.split_measuring import measured_costs

        return measured_costs(Path(scenario.split.costs), costs)

    @cached_property
    def workload(self) -> "SplitWorkload":
        """The model and the data; the plan of a built-in model with an even partition needs neither."""
        from socflower.scenario.split_models import split_workload

        return split_workload(self.scenario, self.num_edges)

    @cached_property
    def batches_per_epoch(self) -> int:
        """Batches of every edge in an epoch; see `SplitWorkload.batches_per_epoch`."""
        scenario = self.scenario
        if not is_built_in(scenario) or scenario.data.partition != "iid":
            return self.workload.batches_per_epoch
        num_left = num_training_samples(scenario, num_samples(scenario))
        sizes = map(len, iid_partition(num_left, self.num_edges, scenario.seed))
        return math.ceil(max(sizes) / scenario.train.batch_size)

    @property
    def is_joined(self) -> bool:
        """Whether edges hold different features of the same samples."""
        return self.scenario.data.name == CLICKS

    @property
    def is_reverse(self) -> bool:
        """Whether the front half is in the cloud."""
        return self.scenario.model.name == GENERATOR

    @property
    def is_sequential(self) -> bool:
        """Whether edge and cloud wait for each other, as in some baselines."""
        peer = baselines.BASELINES.get(self.scenario.strategy.name)
        return peer is not None and peer.waits

    @property
    def mode(self) -> CloudMode:
        """How the cloud's halves serve the edges."""
        if self.is_joined:
            return "joined"
        # Edges that train alone have no cloud half to share; their models are averaged.
        shared = (
            self.scenario.split.cloud_model == "shared"
            and self.num_edges > 1
            and self._initial_plans[0].cut is not None
        )
        return "turns" if shared else "own"

    @property
    def schedule(self) -> WindowSchedule:
        """K by fraction of training done; 0 if edge and cloud wait for each other."""
        if self.is_sequential:
            return WindowSchedule(steps=((0.0, 0),))
        return self.scenario.split.window_schedule()

    @property
    def can_move_cuts(self) -> bool:
        """Whether decision engines may move the edges' cuts."""
        return (
            self.scenario.strategy.name == "split-replay"
            and self.scenario.split.adapt
            and (self.num_edges == 1 or self.mode == "own")
            and not self.is_joined
        )

    @property
    def uplink(self) -> BandwidthProfile | None:
        """The link that all edges share, if any."""
        rates = self.scenario.split.shared_bytes_per_s
        return None if rates is None else constant(*rates)

    def planned_rates(self, rates: LinkRates) -> LinkRates:
        """Return the rates of an edge's own link with an even share of the uplink behind it."""
        return rates.behind(self.uplink.rates(0.0) if self.uplink else None, self.num_edges)

    def round_ends(self) -> tuple[int, ...]:
        """Return how many batches are done at the end of each round."""
        ends = round_ends(
            self.scenario.strategy.round_epochs,
            self.batches_per_epoch,
            self.scenario.train.epochs,
        )
        if not self.trial_batches:
            return ends
        return (self.trial_batches, *(end for end in ends if end > self.trial_batches))

    @cached_property
    def trial_plan(self) -> TrialPlan:
        """The trials by which K and bits are calibrated; `InfeasiblePlan` if the training is too short for them."""
        from socflower.scenario.split_trials import planned_trials

        return planned_trials(self)

    @property
    def widths(self) -> tuple[int, ...]:
        """The bits of features among which an edge may choose."""
        return self.scenario.split.widths(self.scenario.strategy.name)[0]

    def decision_engine(self, edge: int) -> DecisionEngine | None:
        """Return the engine that may move an edge's cut on a real link; within a round it always keeps a cloud half."""
        return self._engine(edge, allow_edge_only=False) if self.can_move_cuts else None

    def parties(self) -> list[Party]:
        """Return the edges in their initial state."""
        allowed = self.scenario.split.allow_edge_only
        edges = range(self.num_edges)
        engines = [self._engine(edge, allow_edge_only=allowed) for edge in edges]
        initial = list(self._initial_plans)
        # Edges that share the cloud's half have the first edge's cut.
        if self.mode == "turns":
            initial = [replace(plan, cut=initial[0].cut) for plan in initial]
        for edge, plan in enumerate(initial):
            require_edge_memory(self.cluster.device_of(edge), self.costs[edge], plan, edge)
        self._check_events()
        return [
            Party(
                costs=costs,
                bandwidth_profile=link,
                split_plan=plan,
                window=partial(self.schedule.window, num_batches=self.total_batches),
                in_flight_limit=partial(self.schedule.limit, num_batches=self.total_batches),
                away=self._away(edge),
                decider=engine if self.can_move_cuts and plan.cut is not None else None,
            )
            for edge, (costs, engine, link, plan) in enumerate(
                zip(self.costs, engines, self.links, initial, strict=True)
            )
        ]

    def _away(self, edge: int) -> tuple[range, ...]:
        """Return the batches for which an edge's user has it."""
        spans, away = spans_of(self.round_ends()), []
        for event in self.scenario.events:
            if event.soc == edge:
                first, num_batches = spans[event.round - 1]
                last, num_last = spans[min(len(spans), event.round + event.rounds - 1) - 1]
                away.append(range(first + int(event.at * num_batches), last + num_last))
        return tuple(away)

    def _check_events(self) -> None:
        """Raise for an event of an unknown edge or round, and if the others cannot train without the edge."""
        where, spans = f"{self.scenario.name} [[event]]", spans_of(self.round_ends())
        alone = "there is no other edge" if self.num_edges == 1 else ""
        why = alone or ("" if self.mode == "own" else "the cloud's half needs every edge's batches")
        known = f"edges are 0 to {self.num_edges - 1}, rounds 1 to {len(spans)}"
        for event in self.scenario.events:
            if why:
                raise ConfigError(f"{where} kind = 'preempt': {why}; use [background_load]")
            at = f"soc = {event.soc}, round = {event.round}"
            if event.soc >= self.num_edges or event.round > len(spans):
                raise ConfigError(f"{where} {at}: {known}")
        # A round that begins without any edge has nothing to average.
        away = [self._away(edge) for edge in range(self.num_edges)]
        for number, (first, _) in enumerate(spans, 1):
            if all(any(first in absence for absence in absences) for absences in away):
                raise ConfigError(f"{where}: users have all edges from round {number}; leave one")

    @cached_property
    def _initial_plans(self) -> tuple[SplitPlan, ...]:
        """The best split plan of each edge alone."""
        return tuple(self._initial_plan(edge) for edge in range(self.num_edges))

    def _engine(self, edge: int, *, allow_edge_only: bool) -> DecisionEngine:
        return DecisionEngine(
            self.costs[edge],
            self.widths,
            allow_edge_only=allow_edge_only,
            num_batches=self.total_batches,
            reverse=self.is_reverse,
            grouped=self.schedule.grouped,
        )

    def _initial_plan(self, edge: int) -> SplitPlan:
        costs, link, allowed = (
            self.costs[edge],
            self.links[edge],
            self.scenario.split.allow_edge_only,
        )
        name = self.scenario.strategy.name
        window = self.schedule.window(0, self.total_batches)
        if name == "edge-only" and self.is_joined:
            why = "parties with different features cannot train alone"
            raise self.scenario.mistake("strategy", "name", why)
        first = self.planned_rates(initial_rates(link))
        # A run begins with the link's first rates, before anything is measured.
        best = self._engine(edge, allow_edge_only=allowed).best(first, window)
        # There is one cut, and no edge can train alone.
        if self.is_joined:
            bits = min(self.widths) if name in baselines.BASELINES else best.bits
            return SplitPlan(cut=0, bits=bits, window=window, grouped=self.schedule.grouped)
        cut = self._configured_cut(costs)
        if name in baselines.BASELINES:
            return baselines.plan_baseline(
                name,
                costs,
                self.planned_rates(link.mean_rates()),
                num_batches=self.total_batches,
                window=window,
                grouped=self.schedule.grouped,
                cut=cut,
                allow_edge_only=allowed,
                bits=self.widths,
                reverse=self.is_reverse,
            )
        if cut is None:
            return best
        # With a single cut left, the engine only chooses the width of features.
        given = DecisionEngine(
            replace(costs, cuts=costs.cuts[cut : cut + 1]),
            self.widths,
            reverse=self.is_reverse,
            grouped=self.schedule.grouped,
        ).best(first, window)
        return replace(given, cut=cut)

    def _configured_cut(self, costs: SplitCosts) -> int | None:
        cut, names = self.scenario.split.cut, [each.name for each in costs.cuts]
        if cut == "auto":
            return None
        if isinstance(cut, str):
            if cut in names:
                return names.index(cut)
            why = f"the model can be cut after {', '.join(names)}"
            raise self.scenario.mistake("edgecloud", "cut", why)
        if not 0 <= cut < len(names):
            raise self.scenario.mistake("edgecloud", "cut", f"cuts are 0 to {len(names) - 1}")
        return cut


def spans_of(ends: Sequence[int]) -> list[tuple[int, int]]:
    """Return each round's first batch and number of batches, by how many are done at the end of each."""
    return [(first, end - first) for first, end in pairwise((0, *ends))]
