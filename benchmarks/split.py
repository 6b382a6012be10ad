"""Split training in two real processes over a shaped link: throughput and memory, against what else one could do.

The edge is held to a tenth of a core by a CPU quota, the cloud has one, so it is ten times as fast; features and
gradients go over gRPC through a relay, a third process, which limits each direction. At every speed of the link,
samples a second of: the edge alone; plain split learning (middle cut, K = 0, 32 bits); JointDNN (best fixed cut,
sequential, 32 bits, edge-only among its choices); pipelined (best cut, K = 5, 32 bits, with and without edge-only);
ours (what the decision engine chooses from 8 bits and edge-only, K = 5), with gradients in 32 bits and in 8. A
deployment that two of them choose is run once. All choices go by costs that are measured anew at each speed, in the
same processes, under the same quota and over the same link. Rows "by F26" have what the cost model says of each, with
the edge's part, messages included, measured again just before and after: what a tenth of a core gets done
changes from second to second.

Memory is the peak of the resident memory of a fresh edge process, quota or not, against plain split learning; the link
is made slow enough to be what limits, so that all that may wait does wait. Energy is that of the same deployments by
profiles. `ok`: losses are finite, no gradient is staler than K, and plain split learning gave the weights of local
training bit for bit. Time never decides it.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from os import getloadavg
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks.harness import Row, main
from benchmarks.split_contest.launch import Pair
from benchmarks.split_contest.plan import BATCH_SIZE, MODEL, Batches, Measured, Run, program
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
_PLANNED_BATCHES = 200  # as many as the engine plans for
_told: dict[str, object] = {}
_runs: list[dict[str, object]] = []  # what was said of each, and what it took


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """One way to train, as it is deployed at one speed."""

    name: str
    split_plan: SplitPlan
    gradient_bits: int = 32

    def label(self, costs: SplitCosts) -> str:
        """Return the name, with what was chosen."""
        cut = self.split_plan.cut
        if cut is None:
            return f"{self.name} (edge alone)"
        return f"{self.name} (behind {costs.cuts[cut].name}, {self.split_plan.bits} bits, K = {self.split_plan.window})"

    def seconds(self, costs: SplitCosts, rates: LinkRates) -> float:
        """Return what F26 says of a batch in the full pipeline."""
        return period_s(self.phases(costs, rates), self.split_plan.window)

    def phases(self, costs: SplitCosts, rates: LinkRates) -> Phases:
        """Return a batch's phases."""
        return phases(replace(costs, gradient_bits=self.gradient_bits), self.split_plan, rates)


def run(quick: bool = False) -> list[Row]:
    """Return rows of throughput, of predictions, of memory and of energy; of the first two only where quotas can be."""
    _told.clear()
    _runs.clear()
    _told["quota"] = missing() or f"{CORES} cores"
    rows: list[Row] = []
    if missing() is None:
        with Pair(CORES) as pair:
            exact = _is_exact(pair)
            _told["weights of local training at K = 0"], _told["costs"] = (
                exact,
                (by_speed := dict[str, object]()),
            )
            for speed in _QUICK_SPEEDS if quick else SPEEDS:
                costs = pair.costs(mbit_per_s=speed, num_repeats=1, num_batches=10)
                by_speed[_place(speed)] = to_document(costs)
                rows += _rows_of(pair, costs, speed, exact, seconds=2.0 if quick else 5.0)
    return [*rows, *_memory_rows(quick), *_energy_rows()]


def peers() -> dict[str, object]:
    """Return how processes were held, what a batch costs at every cut, how busy the machine was, and each run."""
    return {"load_average": list(getloadavg()), **_told, "runs": _runs}


def systems(costs: SplitCosts, rates: LinkRates) -> list[System]:
    """Return all that train at one speed; ours last."""
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

    # Ours may leave the cloud out here, so the pipeline without compression may too.
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
    runs: dict[tuple[object, ...], tuple[float, float, bool]] = {}
    found: list[Outcome] = []
    for system in systems(costs, rates):
        chosen = system.split_plan
        window = 0 if chosen.cut is None else chosen.window
        key = (
            (chosen.cut,)
            if chosen.cut is None
            else (chosen.cut, chosen.bits, window, system.gradient_bits)
        )
        if key not in runs:
            sent = replace(costs, gradient_bits=system.gradient_bits)
            now = pair.as_of_now(sent, chosen)
            steady = max(
                4 if window == 0 else window + 2, math.ceil(seconds / system.seconds(now, rates))
            )
            measured = pair.train(
                Run(
                    cut=chosen.cut,
                    bits=chosen.bits,
                    window=window,
                    gradient_bits=system.gradient_bits,
                    mbit_per_s=mbit_per_s,
                    num_batches=2 * (window + 1) + steady,
                )
            )
            then = pair.as_of_now(sent, chosen)
            predicted_s = (system.seconds(now, rates) + system.seconds(then, rates)) / 2
            runs[key] = (
                predicted_s,
                measured.period_s(window),
                exact and _is_right(measured, chosen),
            )
            _told["samples"] = measured.source
            _runs.append(
                {
                    "case": f"{_place(mbit_per_s)}: {system.label(costs)}",
                    "predicted_s": predicted_s,
                    "measured_s": measured.period_s(window),
                    "phases": asdict(system.phases(now, rates)),
                    "measured_edge_s": pair.slowdown * measured.spent_period_s(window),
                }
            )
        found.append(Outcome(system.label(costs), *runs[key]))
    return throughput_rows(mbit_per_s, found)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was said of a system at one speed, and what came of it."""

    label: str
    predicted_s: float  # of a batch
    measured_s: float
    ok: bool


def throughput_rows(mbit_per_s: float, found: Sequence[Outcome]) -> list[Row]:
    """Return rows of what was measured at one speed; edge-only is the first, both of ours are the last."""
    place = _place(mbit_per_s)
    rows = [
        Row(
            case=f"{place}: {own.label}, by F26",
            ours=BATCH_SIZE / own.measured_s,
            peer="F26",
            peer_value=BATCH_SIZE / own.predicted_s,
            unit="samples/s",
            ratio=own.predicted_s / own.measured_s,
            ok=own.ok,
        )
        for own in found
    ]
    for own in found[-2:]:
        rows += [
            Row(
                case=f"{place}: {own.label}",
                ours=BATCH_SIZE / own.measured_s,
                peer=other.label,
                peer_value=BATCH_SIZE / other.measured_s,
                unit="samples/s",
                ratio=other.measured_s / own.measured_s,
                ok=own.ok and other.ok,
            )
            for other in found[:-2]
        ]
    return rows


def _place(mbit_per_s: float) -> str:
    return f"{mbit_per_s:g} Mbit/s"


def _rates(mbit_per_s: float) -> LinkRates:
    return LinkRates(up_bytes_per_s=mbit_per_s * 1e6 / 8, down_bytes_per_s=mbit_per_s * 1e6 / 8)


def _is_right(measured: Measured, split_plan: SplitPlan) -> bool:
    return (
        all(map(math.isfinite, measured.losses))
        and max(measured.staleness, default=0) <= split_plan.window
    )


def _is_exact(pair: Pair) -> bool:
    """Whether plain split learning gives the weights of local training, bit for bit."""
    num_batches, name, file = 4, "exact", Path(pair.folder) / "edge.npz"
    pair.train(Run(cut=2, num_batches=num_batches, name=name, weights=str(file)))
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
    """Return the peak of an edge process against that of plain split learning."""
    cases = [Run(cut=_MEMORY_CUT, window=0)]
    cases += [
        Run(cut=_MEMORY_CUT, window=window) for window in ((WINDOW,) if quick else (1, WINDOW, 10))
    ]
    cases += [
        Run(cut=_MEMORY_CUT, window=WINDOW, bits=8, gradient_bits=bits, feedback=feedback)
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
                peak = measured.memory["peak_bytes"]
                plain = plain or peak
                rows.append(
                    Row(
                        case=f"peak memory of the edge, batch {batch_size}: K = {case.window}, features in {case.bits} "
                        f"bits, gradients in {case.gradient_bits}, error feedback {case.feedback}",
                        ours=peak / 1e6,
                        peer="plain split learning",
                        peer_value=plain / 1e6,
                        unit="MB",
                        ratio=plain / peak,
                        ok=_is_right(measured, case.split_plan),
                    )
                )
    return rows


def _energy_rows() -> list[Row]:
    """Return the edge's joules for a sample by profiles, at one speed of the link."""
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
                Row(
                    case=f"energy of a {name} at {_ENERGY_MBIT_PER_S:g} Mbit/s: {system.label(costs)}",
                    ours=1e3 * joules,
                    peer="plain split learning",
                    peer_value=1e3 * plain_j,
                    unit="mJ/sample",
                    ratio=plain_j / joules,
                    ok=math.isfinite(joules),
                )
            )
    return rows


if __name__ == "__main__":
    sys.exit(main(run, peers))
