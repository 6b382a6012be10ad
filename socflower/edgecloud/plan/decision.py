"""The decision engine (F27): chooses the cut and the feature width, again whenever the link has changed."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Annotated, Any

from pydantic import Field

from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile, LinkRates
from socflower.edgecloud.plan.cost_model import migration_s, period_s, predicted_s
from socflower.edgecloud.plan.cuts import SplitCosts, SplitPlan
from socflower.edgecloud.plan.party import Party
from socflower.edgecloud.plan.phases import phases, window_limit
from socflower.errors import ConfigError
from socflower.field_rules import checked
from socflower.plain_numbers import plain_numbers


@checked
class WindowSchedule:
    """K by training progress: a new value from each given fraction of all batches on.

    `steps` are pairs (fraction, K), by default those with which the paper trains. Batches are `grouped` as in the
    paper's Fig. 5 (F23): in groups of K + 1, the first of which waits until nothing is in flight. Groups begin anew
    with each step. Without groups the window slides.
    """

    steps: tuple[tuple[float, Annotated[int, Field(ge=0)]], ...] = ((0.0, 4), (0.5, 5))
    grouped: bool = False

    def check(self) -> None:
        """Raise `ConfigError` for fractions that do not begin with 0 and rise below 1."""
        fractions = [fraction for fraction, _ in self.steps]
        if fractions[:1] != [0.0] or not all(a < b < 1.0 for a, b in pairwise(fractions)):
            raise ConfigError(f"fractions must begin with 0 and rise below 1, got {fractions}")

    def window(self, batch: int, num_batches: int) -> int:
        """Return K for a batch of a training of `num_batches`; the last value beyond its end."""
        return self._step(batch, num_batches)[1]

    def limit(self, batch: int, num_batches: int) -> int:
        """Return how many batches may be in flight as a batch goes forward: K, or grouped those of its own group."""
        first, window = self._step(batch, num_batches)
        return (batch - first) % (window + 1) if self.grouped else window

    def _step(self, batch: int, num_batches: int) -> tuple[int, int]:
        """Return the first batch of a batch's step, and its K."""
        reached = [step for step in self.steps if step[0] * num_batches <= batch]
        fraction, window = reached[-1]
        return math.ceil(fraction * num_batches), window


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """One change of deployment, with the estimates on which it was decided.

    `rates` were measured at that moment. The predictions are the seconds of the next τ batches (`gap_batches`): without
    the change, and with it, drain and migration included.
    """

    batch: int
    rates: LinkRates
    gap_batches: float
    old: SplitPlan
    new: SplitPlan
    predicted_s_stay: float
    predicted_s_move: float


_ABOVE_LOST = 1.2
"""A lead must exceed by this factor one that was lost before."""


_RETURN_PART = 0.1
"""The part of the usual lead that suffices to return to the deployment that was left last."""

_MOST_WAITS = 3.0
"""Leads lost before let a move wait for at most so many times the usual lead."""

_Share = Annotated[float, Field(ge=0, lt=1)]


@checked
class DecisionRules:
    """The settings by which a decision engine judges moves; see `DecisionEngine`."""

    beta: _Share
    min_gain: _Share
    patience: _Share
    first_gap_batches: Annotated[float, Field(ge=1)]
    rest_batches: Annotated[int, Field(ge=1)]
    num_batches: Annotated[int, Field(ge=1)] | None


class DecisionEngine:
    """Minimises M + U over cuts and bits, O(cuts·bits) per decision, and moves only if it pays (Alg. 2, F27).

    Three rules prevent premature moves. (1) A change of the link is detected by its cost: each deployment has a
    lead, the batches that it would have gained on the present one at the measured rates, in the time of each batch,
    and never below 0 (a cumulative sum as in Page's test). A move waits for a lead of `patience` of the batches
    that the move and the longer part of the training, past or remaining, take. So a lasting drop costs about that
    part more than if it had been known; a large one is detected within few batches, since one over the slow link
    outweighs many. On a link that alternates a lead is lost again; the next one must be larger; and a move is soon
    reversed. The best deployment must be the same as at the last decision, as an estimate that still changes would
    need a second move. Nothing moves over a dead link. (2) τ is the mean gap between changes (Eq. 14): if changes
    are frequent, a move must pay within few batches. The current gap counts if it would raise τ; otherwise an
    engine with a small τ would never move again. `first_gap_batches` is the upper limit of τ. (3) A move must gain
    `min_gain` of the time of staying, and after a move there is none for `rest_batches`: a change of bits moves no
    weights, so no cost prevents its immediate reversal, and the link has to be measured under the new deployment.

    Hence in N batches there are at most 1 + N/rest_batches changes; and of those that move the cut at most
    2·(N + first_gap_batches/(1 − beta))/n*, where n* is the fewest batches in which a migration can pay.
    """

    def __init__(
        self,
        costs: SplitCosts,
        bits: Sequence[int] = (8,),
        *,
        allow_edge_only: bool = False,
        beta: float = 0.5,
        first_gap_batches: float = 200.0,
        min_gain: float = 0.05,
        rest_batches: int = 2,
        patience: float = 0.14,
        num_batches: int | None = None,
        reverse: bool = False,
        grouped: bool = False,
    ) -> None:
        """Choose among the cuts of `costs` that fit into the edge's memory, and among `bits`.

        `beta` is the weight of the past in τ; `grouped` is that of the `WindowSchedule`. With `num_batches`, no
        deployment is expected to last longer than the training. Raises `ConfigError` for invalid settings, and
        `InfeasiblePlan` if no cut fits.
        """
        self._rules = DecisionRules(
            beta=beta,
            min_gain=min_gain,
            patience=patience,
            first_gap_batches=first_gap_batches,
            rest_batches=rest_batches,
            num_batches=num_batches,
        )
        self._costs = costs
        self._reverse = reverse
        self._grouped = grouped
        self._places = _places(costs, bits, allow_edge_only)
        # By place: the batches that it would have gained; infinite for the first decision, which needs not wait.
        self._leads = [math.inf] * len(self._places)
        # The place that the last move left.
        self._previous = -1
        # The best place at the last decision.
        self._preferred = -1
        # By place: the largest lead that was lost again, as on a link that alternates, or led to a move.
        self._lost_leads = [0.0] * len(self._places)
        self._gap_batches = first_gap_batches
        # The batch of the last change; None before the first.
        self._changed_at: int | None = None
        self._costs_by_speed: dict[float, SplitCosts] = {}
        self._log: list[Decision] = []

    @property
    def log(self) -> tuple[Decision, ...]:
        """All changes so far, in order."""
        return tuple(self._log)

    def choices(self, window: int) -> Iterator[SplitPlan]:
        """Yield every deployment that may be chosen: smaller cuts first, for each cut wider features first.

        The first of equal deployments is chosen, so ties go to the smaller cut, which heats the edge least, and to the
        wider features, which lose least.
        """
        for place in self._places:
            yield replace(place, window=window, grouped=self._grouped)

    def best(self, rates: LinkRates, window: int) -> SplitPlan:
        """Return the deployment to begin with, without the cost of a move; over a dead link the first one."""
        gap = self.expected_batches(0)
        reverse = self._reverse

        def seconds(choice: SplitPlan) -> float:
            return predicted_s(self._costs, choice, rates, gap, reverse=reverse)

        return min(self.choices(window), key=seconds)

    def decide(
        self, batch: int, rates: LinkRates, current: SplitPlan, window: int, edge_speed: float = 1.0
    ) -> SplitPlan | None:
        """Return the deployment to change to before the forward pass of `batch`, or None to stay (F27).

        Call it between batches with the measured rates and the current K, which is not part of the choice; a new K
        alone is not a change. At a lower `edge_speed` all work of the edge takes longer. A returned deployment is
        recorded as made.
        """
        if not (rates.up_bytes_per_s and rates.down_bytes_per_s) and current.cut is not None:
            return None
        current = replace(current, window=window, grouped=self._grouped)
        costs = self._costs_at(edge_speed)
        self._update_leads(costs, rates, current)
        rests = self._changed_at is not None and batch - self._changed_at < self._rules.rest_batches
        gap = self.expected_batches(batch)
        if rests or gap < 1:
            return None
        stay_s = predicted_s(costs, current, rates, gap, reverse=self._reverse)
        chosen, move_s, place = self._quickest(costs, current, rates, gap, stay_s)
        lead = 0.0 if chosen is current else self._leads[place]
        if math.isinf(self._leads[0]):
            self._leads = [0.0] * len(self._places)
        # An estimate that is still changing would need a second move.
        is_confirmed = math.isinf(lead) or place == self._preferred
        self._preferred = place
        if chosen is current or not is_confirmed:
            return None
        wait = self._wait_batches(costs, chosen, rates, current, batch)
        if place == self._previous:
            wait *= _RETURN_PART
        known = _ABOVE_LOST * self._lost_leads[place]
        if lead < max(wait, min(known, _MOST_WAITS * wait)):
            return None
        if stay_s - move_s <= self._rules.min_gain * stay_s:
            return None
        decision = Decision(
            batch=batch,
            rates=rates,
            gap_batches=gap,
            old=current,
            new=chosen,
            predicted_s_stay=stay_s,
            predicted_s_move=move_s,
        )
        self._log.append(decision)
        self._previous = self._place_of(current)
        self._gap_batches = self._next_gap(batch)
        self._changed_at = batch
        if not math.isinf(lead):
            self._lost_leads[place] = lead
        self._leads = [0.0] * len(self._places)
        return chosen

    def _quickest(
        self,
        costs: SplitCosts,
        current: SplitPlan,
        rates: LinkRates,
        gap: float,
        stay_s: float,
    ) -> tuple[SplitPlan, float, int]:
        """Return the deployment of the least time, moving included, with that time and its place; -1 to stay."""
        best = current, stay_s, -1
        for index, choice in enumerate(self.choices(current.window)):
            if choice == current or (choice.cut is None and current.cut is None):
                continue
            seconds = predicted_s(costs, choice, rates, gap, current, reverse=self._reverse)
            if seconds < best[1]:
                best = choice, seconds, index
        return best

    def _place_of(self, plan: SplitPlan) -> int:
        """Return the index of a plan's place, or -1 for one that is not a choice."""
        place = replace(plan, window=0, grouped=False)
        return self._places.index(place) if place in self._places else -1

    def _period_s(self, costs: SplitCosts, choice: SplitPlan, rates: LinkRates) -> float:
        times = phases(costs, choice, rates, reverse=self._reverse)
        return period_s(times, window_limit(costs, choice), grouped=choice.grouped)

    def _update_leads(self, costs: SplitCosts, rates: LinkRates, current: SplitPlan) -> None:
        own_s = self._period_s(costs, current, rates)
        for index, choice in enumerate(self.choices(current.window)):
            gained = own_s / self._period_s(costs, choice, rates) - 1.0
            lead = self._leads[index]
            if gained < 0.0 and not math.isinf(lead):
                self._lost_leads[index] = max(self._lost_leads[index], lead)
            self._leads[index] = max(0.0, lead + gained)

    def _wait_batches(
        self, costs: SplitCosts, choice: SplitPlan, rates: LinkRates, current: SplitPlan, batch: int
    ) -> float:
        """Return the lead with which a move pays even if it is reversed soon."""
        moving_s = migration_s(costs, current.cut, choice.cut, rates, reverse=self._reverse)
        moving_batches = moving_s / self._period_s(costs, choice, rates)
        return self._rules.patience * (moving_batches + max(batch, self._remaining_batches(batch)))

    def _costs_at(self, edge_speed: float) -> SplitCosts:
        if edge_speed not in self._costs_by_speed:
            self._costs_by_speed[edge_speed] = self._costs.at_edge_speed(edge_speed)
        return self._costs_by_speed[edge_speed]

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as values that JSON represents exactly; the log is left out."""
        return {
            "gap_batches": self._gap_batches,
            "changed_at": self._changed_at,
            "previous": self._previous,
            "preferred": self._preferred,
            "lost_leads": self._lost_leads,
            "leads": [None if math.isinf(lead) else lead for lead in self._leads],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of another engine with the same settings."""
        self._gap_batches = state["gap_batches"]
        self._changed_at = state["changed_at"]
        self._previous = state["previous"]
        self._preferred = state["preferred"]
        self._lost_leads = list(state["lost_leads"])
        self._leads = [math.inf if lead is None else lead for lead in state["leads"]]

    def expected_batches(self, batch: int) -> float:
        """Return τ, the expected number of batches that a change made before `batch` lasts."""
        return min(max(self._gap_batches, self._next_gap(batch)), self._remaining_batches(batch))

    def _remaining_batches(self, batch: int) -> float:
        num_batches = self._rules.num_batches
        if num_batches is None:
            return self._rules.first_gap_batches
        return float(num_batches - batch)

    def _next_gap(self, batch: int) -> float:
        """Return the new τ if the gap ends now (Eq. 14); the first change does not end a gap."""
        if self._changed_at is None:
            return self._gap_batches
        beta = self._rules.beta
        gap = beta * self._gap_batches + (1.0 - beta) * (batch - self._changed_at)
        return min(gap, self._rules.first_gap_batches)


def _places(costs: SplitCosts, bits: Sequence[int], allow_edge_only: bool) -> tuple[SplitPlan, ...]:
    """Return the deployments that fit into the edge's memory, in the order of preference."""
    if not bits:
        raise ConfigError("decision engine: bits is empty; give at least one width")
    if allow_edge_only and not costs.model_weight_bytes:
        raise ConfigError(
            f"decision engine: edge-only training of model {costs.model} needs model_weight_bytes in its costs"
        )
    widths = sorted(set(bits), reverse=True)
    places = [
        SplitPlan(cut=cut, bits=width) for cut, width in product(range(len(costs.cuts)), widths)
    ]
    if allow_edge_only:
        places.append(SplitPlan(cut=None))
    return costs.fitting(places)


@plain_numbers
def adaptive_party(
    costs: SplitCosts,
    link: BandwidthProfile,
    *,
    num_batches: int,
    bits: Sequence[int] = (8,),
    window: WindowSchedule | None = None,
    allow_edge_only: bool = False,
    moves: bool = True,
    reverse: bool = False,
) -> Party:
    """Return an edge that begins with the best deployment for its link, and moves the cut as the link changes.

    `num_batches` is the length of the whole training, `bits` the feature widths to choose from, `window` K by training
    progress, by default the paper's. Without `moves` the deployment is fixed. Raises what `DecisionEngine` raises.
    """
    schedule = window or WindowSchedule()
    engine = DecisionEngine(
        costs,
        bits,
        allow_edge_only=allow_edge_only,
        num_batches=num_batches,
        reverse=reverse,
        grouped=schedule.grouped,
    )
    first = engine.best(initial_rates(link), schedule.window(0, num_batches))
    return Party(
        costs=costs,
        bandwidth_profile=link,
        split_plan=first,
        window=lambda batch: schedule.window(batch, num_batches),
        in_flight_limit=lambda batch: schedule.limit(batch, num_batches),
        decider=engine if moves else None,
    )


def initial_rates(link: BandwidthProfile) -> LinkRates:
    """Return the rates of the link at the beginning, or their means if it begins with an outage."""
    now = link.rates(0.0)
    return now if now.up_bytes_per_s > 0 and now.down_bytes_per_s > 0 else link.mean_rates()
