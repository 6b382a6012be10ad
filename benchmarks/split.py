"""Split training in two real processes over a shaped link: throughput and memory against other ways to train.

A CPU quota holds the edge to a tenth of a core; the cloud has a whole one. Features and gradients go over gRPC through
a relay, a third process, which limits each direction. At every speed of the link, samples per second of: the edge
alone; plain split learning (middle cut, K = 0, 32 bits); JointDNN (best fixed cut, sequential, 32 bits, may choose
edge-only); pipelined (best cut, K = 5, 32 bits, with and without edge-only); ours (the decision engine chooses from 8
bits and edge-only, K = 5), with gradients in 32 bits and in 8. A deployment that two systems choose is run once. All
choose by the same costs, which are measured at each speed in the same processes, under the same quota and over the same
link. Rows "by F26" compare with the cost model. For them the edge's part, with messages, is measured again just before
and after the run: the speed of a tenth of a core changes from second to second.

Memory is the peak of the resident memory of a fresh edge process without a quota, against plain split learning; the
link is slow enough to be the bottleneck, so that all queues fill. Energy is predicted from device profiles. `ok`:
losses are finite, no gradient is staler than K, and plain split learning gave the weights of local training bit for
bit. Time never decides it.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from os import getloadavg
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import Row, less_is_better, more_is_better, peer_notes
from benchmarks.split_contest.launch import Pair
from benchmarks.split_contest.plan import BATCH_SIZE, MODEL, Batches, EdgeRun, EdgeTimes, program
from socflower.cluster.device_catalog import device
from socflower.edgecloud.cloud.operator_calls import CloudOperator, fetch_weights
from socflower.edgecloud.links.bandwidth_profile import LinkRates
from socflower.edgecloud.plan import baselines
from socflower.edgecloud.plan.cost_model import period_s
from socflower.edgecloud.plan.cuts import SplitCosts, SplitPlan
from socflower.edgecloud.plan.decision import DecisionEngine
from socflower.edgecloud.plan.device_costs import CutShape, split_costs, training_energy_j
from socflower.edgecloud.plan.phases import Phases, phases
from socflower.edgecloud.runtime.measuring import to_document
from socflower.model_graph.layer_profile import profile_module
from tests.cpu_quota import missing

CORES = 0.1
WINDOW = 5
SPEEDS = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
_QUICK_SPEEDS = (5.0, 50.0, 500.0)
_MEMORY_CUT, _MEMORY_MBIT_PER_S = 2, 200.0
_ENERGY_MBIT_PER_S, _ENERGY_BATCHES = 20.0, 1000
# The engine plans for as many batches.
_PLANNED_BATCHES = 200
# The prediction and the measurement of each run.
_runs: list[dict[str, object]] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """One way to train, as it is deployed at one speed."""

    name: str
    split_plan: SplitPlan
    gradient_bits: int = 32

    def label(self, costs: SplitCosts) -> str:
        """Return the name with the chosen cut, bits and window."""
        cut = self.split_plan.cut
        if cut is None:
            return f"{self.name} (edge alone)"
        return f"{self.name} (behind {costs.cuts[cut].name}, {self.split_plan.bits} bits, K = {self.split_plan.window})"

    def seconds(self, costs: SplitCosts, rates: LinkRates) -> float:
        """Return the seconds of a batch in the full pipeline (F26)."""
        return period_s(self.phases(costs, rates), self.split_plan.window)

    def phases(self, costs: SplitCosts, rates: LinkRates) -> Phases:
        """Return a batch's phases."""
        return phases(replace(costs, gradient_bits=self.gradient_bits), self.split_plan, rates)


@dataclass(frozen=True, slots=True)
class SystemResult:
    """The predicted and the measured seconds of a batch for a system at one speed."""

    label: str
    predicted_s: float
    measured_s: float
    ok: bool


def run(quick: bool = False) -> list[Row]:
    """Return rows of throughput, predictions, memory and energy; the first two only if quotas can be set."""
    _runs.clear()
    peer_notes["load_average"] = list(getloadavg())
    peer_notes["runs"] = _runs
    peer_notes["quota"] = missing() or f"{CORES} cores"
    rows: list[Row] = []
    if missing() is None:
        with Pair(CORES) as pair:
            exact = _is_exact(pair)
            by_speed: dict[str, object] = {}
            peer_notes["weights of local training at K = 0"] = exact
            peer_notes["costs"] = by_speed
            for speed in _QUICK_SPEEDS if quick else SPEEDS:
                costs = pair.costs(mbit_per_s=speed, num_repeats=1, num_batches=10)
                by_speed[_place(speed)] = to_document(costs)
                rows += _rows_of(pair, costs, speed, exact, seconds=2.0 if quick else 5.0)
    return [*rows, *_memory_rows(quick), *_energy_rows()]


def systems(costs: SplitCosts, rates: LinkRates) -> list[System]:
    """Return all systems at one speed; ours are the last two."""
    ours = [
        System(
            name=f"ours, gradients in {bits} bits",
            gradient_bits=bits,
            split_plan=DecisionEngine(
                replace(costs, gradient_bits=bits), (8,), allow_edge_only=True
            ).best(rates, WINDOW),
        )
        for bits in (32, 8)
    ]

    def peer(kind: str, name: str, *, allow_edge_only: bool = True) -> System:
        return System(
            name=name,
            split_plan=baselines.plan_baseline(
                kind,
                costs,
                rates,
                num_batches=_PLANNED_BATCHES,
                window=WINDOW,
                allow_edge_only=allow_edge_only,
            ),
        )

    # Ours may choose edge-only here, so the pipeline without compression may as well.
    return [
        peer("edge-only", "edge-only"),
        peer("split", "plain split learning"),
        peer("joint-dnn", "JointDNN"),
        peer("pipelined", "pipelined"),
        peer("pipelined", "pipelined, always split", allow_edge_only=False),
        *ours,
    ]


def _rows_of(
    pair: Pair, costs: SplitCosts, mbit_per_s: float, exact: bool, *, seconds: float
) -> list[Row]:
    rates = _rates(mbit_per_s)
    # By deployment: two systems may choose the same one.
    runs: dict[EdgeRun, SystemResult] = {}
    found: list[SystemResult] = []
    for system in systems(costs, rates):
        chosen = system.split_plan
        run = EdgeRun(cut=None, mbit_per_s=mbit_per_s)
        if chosen.cut is not None:
            run = replace(
                run,
                cut=chosen.cut,
                bits=chosen.bits,
                window=chosen.window,
                gradient_bits=system.gradient_bits,
            )
        label = system.label(costs)
        if run not in runs:
            runs[run] = _measured(pair, system, run, costs, exact, label, seconds=seconds)
        found.append(replace(runs[run], label=label))
    return throughput_rows(mbit_per_s, found)


def _measured(
    pair: Pair,
    system: System,
    run: EdgeRun,
    costs: SplitCosts,
    exact: bool,
    label: str,
    *,
    seconds: float,
) -> SystemResult:
    """Do a run of about `seconds`, and measure the edge's costs before and after it."""
    rates, window, chosen = _rates(run.mbit_per_s), run.window, system.split_plan
    sent = replace(costs, gradient_bits=system.gradient_bits)
    now = pair.as_of_now(sent, chosen)
    now_s = system.seconds(now, rates)
    steady = max(4 if window == 0 else window + 2, math.ceil(seconds / now_s))
    times = pair.train(replace(run, num_batches=2 * (window + 1) + steady))
    then_s = system.seconds(pair.as_of_now(sent, chosen), rates)
    result = SystemResult(
        label=label,
        predicted_s=(now_s + then_s) / 2,
        measured_s=times.period_s(window),
        ok=exact and _is_right(times, chosen),
    )
    peer_notes["samples"] = times.source
    _runs.append(
        {
            "case": f"{_place(run.mbit_per_s)}: {label}",
            "predicted_s": result.predicted_s,
            "measured_s": result.measured_s,
            "phases": asdict(system.phases(now, rates)),
            "measured_edge_s": pair.slowdown * times.spent_period_s(window),
        }
    )
    return result


def throughput_rows(mbit_per_s: float, found: Sequence[SystemResult]) -> list[Row]:
    """Return the rows of one speed; `found` begins with edge-only and ends with both of ours."""
    place = _place(mbit_per_s)
    rows = [
        more_is_better(
            f"{place}: {own.label}, by F26",
            BATCH_SIZE / own.measured_s,
            "F26",
            BATCH_SIZE / own.predicted_s,
            "samples/s",
            ok=own.ok,
        )
        for own in found
    ]
    for own in found[-2:]:
        rows += [
            more_is_better(
                f"{place}: {own.label}",
                BATCH_SIZE / own.measured_s,
                other.label,
                BATCH_SIZE / other.measured_s,
                "samples/s",
                ok=own.ok and other.ok,
            )
            for other in found[:-2]
        ]
    return rows


def _place(mbit_per_s: float) -> str:
    return f"{mbit_per_s:g} Mbit/s"


def _rates(mbit_per_s: float) -> LinkRates:
    return LinkRates(up_bytes_per_s=mbit_per_s * 1e6 / 8, down_bytes_per_s=mbit_per_s * 1e6 / 8)


def _is_right(measured: EdgeTimes, split_plan: SplitPlan) -> bool:
    return (
        all(map(math.isfinite, measured.losses))
        and max(measured.staleness, default=0) <= split_plan.window
    )


def _is_exact(pair: Pair) -> bool:
    """Return whether plain split learning gives the weights of local training, bit for bit."""
    num_batches, name, file = 4, "exact", Path(pair.folder) / "edge.npz"
    pair.train(EdgeRun(cut=2, num_batches=num_batches, name=name, weights=str(file)))
    cloud = fetch_weights(CloudOperator(address=pair.address, token=pair.token), name)[1]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = program().front(0, None, Batches(BATCH_SIZE)).half
        for batch in range(num_batches):
            alone.train_alone(batch)
    finally:
        torch.set_num_threads(num_threads)
    with np.load(file) as edge:
        both = {**cloud, **{name: edge[name] for name in edge.files}}
    local = alone.weights()
    return set(both) == set(local) and all(
        np.array_equal(both[name], local[name]) for name in local
    )


def _memory_rows(quick: bool) -> list[Row]:
    """Return rows of an edge process's peak memory against plain split learning."""
    cases = [EdgeRun(cut=_MEMORY_CUT, window=0)]
    cases += [
        EdgeRun(cut=_MEMORY_CUT, window=window)
        for window in ((WINDOW,) if quick else (1, WINDOW, 10))
    ]
    cases += [
        EdgeRun(cut=_MEMORY_CUT, window=WINDOW, bits=8, gradient_bits=bits, feedback=feedback)
        for bits, feedback in (
            ((8, "diagonal"),) if quick else ((32, "none"), (8, "none"), (8, "diagonal"))
        )
    ]
    rows: list[Row] = []
    with Pair(None) as pair:
        for batch_size in (BATCH_SIZE,) if quick else (BATCH_SIZE, 4 * BATCH_SIZE):
            plain = 0.0
            for case in cases:
                pair.renew_edge()
                measured = pair.train(
                    replace(
                        case,
                        batch_size=batch_size,
                        mbit_per_s=_MEMORY_MBIT_PER_S,
                        num_batches=12 + 2 * case.window,
                    )
                )
                peak = measured.peak_bytes
                plain = plain or peak
                rows.append(
                    less_is_better(
                        f"peak memory of the edge, batch {batch_size}: K = {case.window}, features in {case.bits} "
                        f"bits, gradients in {case.gradient_bits}, error feedback {case.feedback}",
                        peak / 1e6,
                        "plain split learning",
                        plain / 1e6,
                        "MB",
                        ok=_is_right(measured, case.split_plan),
                    )
                )
    return rows


def _energy_rows() -> list[Row]:
    """Return rows of the edge's joules per sample, by device profiles at one speed of the link."""
    split, profile = (
        program().split,
        profile_module(program().model(), torch.zeros(1, *program().example), MODEL),
    )
    shapes = [
        CutShape(
            name=cut.name,
            num_layers=cut.num_layers(profile),
            front_state_bytes=cut.front_weight_bytes,
            feature_elements_per_sample=cut.feature_elements,
        )
        for cut in split.cuts
    ]
    rates = _rates(_ENERGY_MBIT_PER_S)
    rows: list[Row] = []
    for name in ("raspberry-pi-4b", "jetson-tx2"):
        edge = device(name)
        costs = split_costs(profile, shapes, edge, device("gpu-v100"), BATCH_SIZE)
        plain_j = 0.0
        for system in (
            System(name="plain split learning", split_plan=SplitPlan(cut=_MEMORY_CUT)),
            *(
                System(name=f"K = {window}", split_plan=SplitPlan(cut=_MEMORY_CUT, window=window))
                for window in (1, WINDOW, 10)
            ),
            System(
                name="8 bits both ways",
                gradient_bits=8,
                split_plan=SplitPlan(cut=_MEMORY_CUT, bits=8, window=WINDOW),
            ),
            System(name="edge-only", split_plan=SplitPlan(cut=None)),
        ):
            times = phases(
                replace(costs, gradient_bits=system.gradient_bits), system.split_plan, rates
            )
            joules = training_energy_j(edge, times, _ENERGY_BATCHES, system.split_plan.window) / (
                _ENERGY_BATCHES * BATCH_SIZE
            )
            plain_j = plain_j or joules
            rows.append(
                less_is_better(
                    f"energy of a {name} at {_ENERGY_MBIT_PER_S:g} Mbit/s: {system.label(costs)}",
                    1e3 * joules,
                    "plain split learning",
                    1e3 * plain_j,
                    "mJ/sample",
                    ok=math.isfinite(joules),
                )
            )
    return rows
