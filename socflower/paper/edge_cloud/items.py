"""Our values for each table and figure of the edge-cloud paper: exact, predicted, in virtual time, or stored."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import mean, median
from typing import Any

import torch
from torch.nn import functional

from socflower.edgecloud.links.bandwidth_profile import LinkRates, segments
from socflower.edgecloud.plan.baselines import plan_baseline
from socflower.edgecloud.plan.cost_model import period_s, training_s
from socflower.edgecloud.plan.cuts import SplitCosts, SplitPlan
from socflower.edgecloud.plan.decision import DecisionEngine
from socflower.edgecloud.plan.party import Party
from socflower.edgecloud.plan.phases import Phases, phases
from socflower.edgecloud.plan.split_pipeline import Timeline
from socflower.paper.comparison import NOT_COMPARABLE, read_paper, stored_results, stored_row
from socflower.paper.edge_cloud.predictions import (
    BATCH,
    EDGE_ONLY,
    JOINT_DNN,
    LINKS,
    NUM_BATCHES,
    OURS,
    PI,
    TX2,
    WINDOW,
    WORKLOADS,
    PredictedBatches,
    costs_of,
    din_costs,
    link_of,
    party_of,
    profile_of,
    run_of,
    simulate,
)
from socflower.scenario.schema.config import TrainConfig
from socflower.workloads.models.classifiers import build_model
from socflower.workloads.sources import data_names, data_shape, load_data

Ours = Mapping[str, float | bool | str]

ACCURACIES, MOVES = "split-accuracy.json", "bench-moving-cut.json"
_MBIT = 125e3


def table_1() -> Ours:
    """Return samples and classes of CIFAR-10, and which models are built in."""
    cifar, known = data_shape("cifar10"), {"CIFAR10": "cifar10"}
    found: dict[str, float | bool] = {
        "CIFAR10: training samples": cifar.num_train,
        "CIFAR10: categories": cifar.num_classes,
    }
    for cell in _cells("table-1"):
        model, _, what = cell.partition(": ")
        if what == "model":
            found[cell] = model in (*WORKLOADS, "DIN")
        elif what == "data":
            found[cell] = known.get(model, model) in data_names()
    return _and_texts("table-1", found, "not built in")


_TRAININGS: Mapping[str, Mapping[str, Any]] = {
    "ResNet50 (CIFAR10)": {"epochs": 160, "milestones": (80, 120)},
    "Mobilenetv3 (large)": {"epochs": 200, "milestones": (100, 150, 180)},
    "VGG19": {"epochs": 100, "milestones": (80,)},
    "Chair": {"optimizer": "adam", "learning_rate": 5e-4, "schedule": "constant", "epochs": 100},
    "BI-LSTM": {
        "optimizer": "adam",
        "learning_rate": 1e-3,
        "weight_decay": 1e-3,
        "epochs": 10,
        "milestones": (3,),
    },
    "ResNet50 (Tiny-Imagenet)": {
        "optimizer": "rmsprop",
        "learning_rate": 8e-5,
        "schedule": "constant",
        "epochs": 5,
    },
    "ResNet50 (Imagenet to CIFAR10)": {
        "learning_rate": 5e-5,
        "schedule": "exponential",
        "epochs": 5,
    },
    "DIN": {"learning_rate": 0.1, "schedule": "exponential", "epochs": 5},
}
# Of the trainings that differ in nothing else.
_MULTI_STEP: Mapping[str, Any] = {
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "weight_decay": 1e-4,
    "schedule": "multi-step",
}


def table_2() -> Ours:
    """Return which of the paper's trainings `[train]` of a scenario can describe."""
    return {
        model: _is_accepted({**_MULTI_STEP, **training} if "milestones" in training else training)
        for model, training in _TRAININGS.items()
    }


def _is_accepted(training: Mapping[str, Any]) -> bool:
    try:
        TrainConfig.model_validate(dict(training))
    except ValueError:
        return False
    return True


def table_3() -> Ours:
    """Return the megabytes of a batch's features at each cut."""
    found = {}
    for label in WORKLOADS:
        for number, cut in enumerate(profile_of(label)[1], 1):
            found[f"{label}/{number}"] = _megabytes(cut.feature_elements_per_sample)
    (din,) = din_costs(0, TX2).cuts
    return {**found, "DIN/1": _megabytes(din.feature_elements / BATCH)}


def _megabytes(elements: float) -> float:
    return elements * BATCH * 4.0 / 2**20


def table_4() -> Ours:
    """Return the points that stored trainings lose; the paper's models are not trained."""
    found = {
        f"VGG-tiny, {what}: points lost": _points(case)
        for what, case in (
            ("K = 5", "scratch, K = 5,"),
            ("K = 5, 8 bits, error feedback", "scratch, K = 5, 8 bits, diagonal"),
            ("type 1, K = 5", "type 1, K = 5,"),
            ("type 2, K = 5", "type 2, K = 5,"),
        )
    }
    return _and_texts("table-4", found, "not trained")


def figure_3() -> Ours:
    """Return how much the norm of LeNet-5's weights changes in K steps (Eq. 6), at the median of a training."""
    weights = _lenet_weights()
    changes = {
        window: median(
            abs(float(later.abs().sum() / earlier.abs().sum()) - 1.0)
            for earlier, later in zip(weights, weights[window:], strict=False)
        )
        for window in range(1, 7)
    }
    return {
        "most changes are negligible for K below 5": changes[4] < 0.01,
        "the smaller the K, the less the change": sorted(changes.values()) == [*changes.values()],
        **{f"K = {window}: change": 100.0 * value for window, value in changes.items()},
    }


def figure_4() -> Ours:
    """Return how deviations of the weights over K steps compare, early, midway and late in LeNet-5's training."""
    weights = _lenet_weights()
    deviations = {
        (phase, window): float((weights[at] - weights[at - window]).std())
        for phase, at in zip((0, 2, 4), (20, len(weights) // 2, len(weights) - 1), strict=True)
        for window in (4, 5, 6)
    }
    found: dict[str, float | bool] = {
        f"epoch {phase}: K = 6 over K = 4": deviations[phase, 6] / deviations[phase, 4]
        for phase in (0, 2, 4)
    }
    for window in (4, 5, 6):
        found[f"K = {window}: late over early"] = deviations[4, window] / deviations[0, window]
    later = [deviations[phase, 5] for phase in (0, 2, 4)]
    found["weights vary less towards the end"] = later[0] > later[1] > later[2]
    return _and_texts("figure-4", found, "another model")


_LENET_BATCHES = 250


def _lenet_weights() -> list[torch.Tensor]:
    """Return the weights before and after each batch of LeNet-5 on digits, at a rate that falls to a tenth."""
    digits = load_data("digits").train
    model = build_model("lenet5", in_channels=1, image_size=28, num_classes=10, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1 ** (1.0 / _LENET_BATCHES))
    draws = torch.Generator().manual_seed(1)
    weights = []
    for _ in range(_LENET_BATCHES):
        weights.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
        images, labels = digits.batch(torch.randint(0, len(digits), (BATCH,), generator=draws))
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        schedule.step()
    return weights


_LATE_LINK = Phases(edge_s=1.0, up_s=3.0, cloud_s=0.5, down_s=0.5)
_EQUAL_PARTS = Phases(edge_s=2.0, up_s=2.0, cloud_s=2.0, down_s=2.0)


def figure_5() -> Ours:
    """Return whether groups of K + 1 = 3 cost time in the figure's two deployments, by Eq. 12 and with barriers."""
    num, window = 120, 2
    full = {times: training_s(times, num, math.inf) for times in (_LATE_LINK, _EQUAL_PARTS)}
    return {
        "deployment 1 is as fast in groups": training_s(_LATE_LINK, num, window)
        == full[_LATE_LINK],
        "deployment 2 is slower in groups": training_s(_EQUAL_PARTS, num, window)
        > full[_EQUAL_PARTS],
        "deployment 1 is as fast in groups with barriers": _with_barriers_s(_LATE_LINK, num, window)
        == full[_LATE_LINK],
    }


def equations() -> Ours:
    """Return what Eq. 12 becomes at both ends of K, and how far it is from groups with barriers and from a window."""
    cases = list(product((_LATE_LINK, _EQUAL_PARTS), (1, 2, 5)))
    return {
        "K = 0 is normal backpropagation, Eq. 10": all(
            _eq_12(times, 60, 0) == 60 * times.total_s for times, _ in cases
        ),
        "K without limit is full parallelisation, Eq. 11": all(
            _eq_12(times, 60, 10**6) == 59 * times.longest_s + times.total_s for times, _ in cases
        ),
        "Eq. 12 is the time of groups": all(
            math.isclose(_eq_12(times, 60, window), _with_barriers_s(times, 60, window))
            for times, window in cases
        ),
        "Eq. 12 is at most a batch from that of a window": all(
            abs(_eq_12(times, 60, window) - training_s(times, 60, window)) <= times.total_s
            for times, window in cases
        ),
        "groups with barriers over Eq. 12, most": max(
            _with_barriers_s(times, 60, window) / _eq_12(times, 60, window)
            for times, window in cases
        ),
    }


def _eq_12(times: Phases, num_batches: int, window: int) -> float:
    groups = math.ceil(num_batches / (window + 1))
    waiting_s = max(0.0, times.total_s - (window + 1) * times.longest_s)
    return (num_batches - 1) * times.longest_s + times.total_s + (groups - 1) * waiting_s


def _with_barriers_s(times: Phases, num_batches: int, window: int) -> float:
    """Return the seconds if a group begins when the one before it has ended, by its four servers (§4.1.3)."""
    steps = (times.edge_s, times.up_s, times.cloud_s, times.down_s)
    free_s = [0.0] * len(steps)
    for batch in range(num_batches):
        at_s = free_s[-1] if batch % (window + 1) == 0 else 0.0
        for server, step_s in enumerate(steps):
            at_s = free_s[server] = max(at_s, free_s[server]) + step_s
    return free_s[-1]


def figure_6() -> Ours:
    """Return whether a larger K is faster, as predicted, and less accurate, as stored at the fast recipe."""
    costs = costs_of("ResNet50", TX2)
    rates = link_of("5g").mean_rates()
    plan, _ = _fastest("ResNet50", TX2, rates)
    seconds = [
        training_s(phases(costs, replace(plan, window=window), rates), NUM_BATCHES, window)
        for window in (1, 2, 5)
    ]
    lost = [_points(f"scratch, fast, K = {window},") for window in (1, 2, 5)]
    return {
        "a larger K is faster": seconds[0] > seconds[-1]
        and sorted(seconds, reverse=True) == seconds,
        "a larger K is less accurate": sorted(lost) == lost,
        **{
            f"K = {window}: points lost": points
            for window, points in zip((1, 2, 5), lost, strict=True)
        },
    }


def figure_8() -> Ours:
    """Return the points lost by widths of features, and what 8 bits save of the upload."""
    costs = costs_of("ResNet50", TX2)
    lost = {bits: _points(f"scratch, K = 5, {bits} bits, 3 seeds") for bits in (8, 4, 2)}
    return {
        "8 bits: less upload": costs.feature_bytes(17, 32) / costs.feature_bytes(17, 8),
        "narrower features lose more": lost[8] < lost[4] < lost[2],
        **{f"{bits} bits: points lost": points for bits, points in lost.items()},
    }


def figure_10() -> Ours:
    """Return how running times on edges and cloud compare, over the cuts."""
    split = [label for label in WORKLOADS if not WORKLOADS[label].is_reverse]
    rising, ratios = True, {PI: [0.0], TX2: [0.0]}
    for label, edge in product(split, (PI, TX2)):
        costs = costs_of(label, edge)
        own_s = _edge_s(costs)
        rising = rising and sorted(own_s) == own_s
        # Of the whole model, which the first cut leaves to the cloud but for a block.
        ratios[edge].append(costs.cuts[0].cloud_s / costs.edge_only_s)
    chair = costs_of("Chair", TX2)
    whole_s = [own_s + cut.cloud_s for own_s, cut in zip(_edge_s(chair), chair.cuts, strict=True)]
    return {
        "the cloud is much faster than a TX2": max(ratios[TX2]) < 0.5,
        "the cloud is negligible beside a Pi": max(ratios[PI]) < 0.05,
        "more blocks at the edge take longer": rising,
        "Chair takes nearly as long at every cut": max(whole_s) < 1.25 * min(whole_s),
        "cloud over TX2, most": max(ratios[TX2]),
        "cloud over Pi, most": max(ratios[PI]),
        "Chair on a TX2: slowest cut over fastest": max(whole_s) / min(whole_s),
    }


def _edge_s(costs: SplitCosts) -> list[float]:
    return [cut.edge_forward_s + cut.edge_backward_s for cut in costs.cuts]


def figure_11() -> Ours:
    """Return the seconds that an edge needs for coding a megabyte of features."""
    elements = 2**20 / 4
    return {
        name: elements * costs_of("ResNet50", edge).codec_s_per_element[8]
        for name, edge in (("TX2", TX2), ("Pi", PI))
    }


def figure_13() -> Ours:
    """Return what 8 bits lose with and without error feedback."""
    alone, plain, fed_back = (
        _points(f"scratch, K = 5,{what}") for what in ("", " 8 bits, 3", " 8 bits, diagonal")
    )
    return {
        "with error feedback as accurate as without compression": fed_back - alone < 1.0,
        "without error feedback training fails": plain > 5.0,
        "8 bits: points lost": plain,
        "8 bits, error feedback: points lost": fed_back,
    }


def figure_14() -> Ours:
    """Return whether K = 5 loses accuracy, from the beginning and in transfer."""
    scratch, *transfer = (_points(f"{what}, K = 5,") for what in ("scratch", "type 1", "type 2"))
    found = {
        "K = 5 loses less than a point": scratch < 1.0,
        "K = 5 loses almost nothing in transfer": max(transfer) < 0.25,
        "K = 5: points lost": scratch,
        "K = 5: points lost, a rate ten times as high": _points("scratch, fast, K = 5,"),
    }
    return _and_texts("figure-14", found, "not trained")


_THROUGHPUT = (
    *(("Mobilenetv3", TX2), ("ResNet50 TinyImg", TX2)),
    *(("BI-LSTM", PI), ("Chair", PI)),
)
_SPEEDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


def figure_16() -> Ours:
    """Return samples a second over constant links (F26), beside JointDNN and the edge alone."""
    highest = growing = alone_when_poor = True
    gains: list[float] = []
    for label, edge in _THROUGHPUT:
        before = 0.0
        for speed in _SPEEDS:
            rates = LinkRates(up_bytes_per_s=speed * _MBIT, down_bytes_per_s=speed * _MBIT)
            plan, ours_s = _fastest(label, edge, rates)
            joint_s = _joint_s(label, edge, rates)
            highest = highest and ours_s <= joint_s and ours_s <= costs_of(label, edge).edge_only_s
            growing = growing and 1.0 / ours_s >= before
            gains.append(joint_s / ours_s)
            before = 1.0 / ours_s
            alone_when_poor = alone_when_poor and (speed > 1.0 or plan.cut is None)
    return {
        "ours is highest at every speed": highest,
        "it grows with the speed": growing,
        "edge alone where the link is poor": alone_when_poor,
        "over JointDNN, most": max(gains),
    }


def _fastest(label: str, edge: str, rates: LinkRates) -> tuple[SplitPlan, float]:
    """Return the deployment that trains fastest, and its seconds a batch."""
    costs, reverse = costs_of(label, edge), WORKLOADS[label].is_reverse
    engine = DecisionEngine(costs, (8,), allow_edge_only=True, reverse=reverse)
    plan = engine.best(rates, WINDOW)
    return plan, period_s(phases(costs, plan, rates, reverse=reverse), WINDOW)


def _joint_s(label: str, edge: str, rates: LinkRates) -> float:
    costs, reverse = costs_of(label, edge), WORKLOADS[label].is_reverse
    plan = plan_baseline(JOINT_DNN, costs, rates, reverse=reverse)
    return phases(costs, plan, rates, reverse=reverse).total_s


def figure_17() -> Ours:
    """Return the seconds of a hundred batches over generated links, beside both baselines."""
    saved = [
        100.0 * (1.0 - runs[OURS].duration_s / runs[EDGE_ONLY].duration_s)
        for _, runs in _runs(PI)
        if EDGE_ONLY in runs
    ]
    minutes = [
        (runs[OURS].duration_s / 60.0, runs[EDGE_ONLY].duration_s / 60.0)
        for case, runs in _runs(PI)
        if case.startswith(("ResNet50/", "Mobilenetv3/"))
    ]
    gains = [
        (
            case,
            min(run.duration_s for name, run in runs.items() if name != OURS)
            / runs[OURS].duration_s,
        )
        for case, runs in _runs(TX2)
    ]
    poor = [gain for case, gain in gains if case.endswith(LINKS[0])]
    fast = [gain for case, gain in gains if case.endswith(LINKS[-1])]
    return {
        "saved on the Pi, most": max(saved),
        "lowest on the Pi over all links": _is_least(PI, lambda run: run.duration_s),
        "several minutes for an hour of the Pi alone": all(
            ours < 10.0 and alone > 60.0 for ours, alone in minutes
        ),
        "BI-LSTM, least on a TX2": min(
            runs[OURS].duration_s for case, runs in _runs(TX2) if case.startswith("BI-LSTM/")
        ),
        "a TX2 gains less where the link is poor": mean(poor) < mean(fast),
        "lowest on the TX2 over all links": _is_least(TX2, lambda run: run.duration_s),
        "saved on the Pi, mean": mean(saved),
    }


def figure_18() -> Ours:
    """Return what the engine does when a link surges, drops for a moment, and drops for good."""
    slow, fast = 0.5 * _MBIT, 400.0 * _MBIT
    surge = _moves("ResNet50", TX2, [(60.0, slow, slow), (1.0, fast, fast)])
    moment = _moves("Mobilenetv3", TX2, [(5.0, fast, fast), (0.2, slow, slow), (1.0, fast, fast)])
    lasting = _moves("VGG19", PI, [(10.0, fast, fast), (1.0, slow, slow)])
    chair = costs_of("Chair", PI)
    least = min(range(len(chair.cuts)), key=lambda cut: chair.cuts[cut].feature_elements)
    chosen, _ = _fastest("Chair", PI, link_of("wifi").mean_rates())
    drops = [row for row in stored_results(MOVES)["rows"] if row["case"].startswith("drops ")]
    return {
        "a surge moves work to the cloud": bool(surge) and surge[-1] < surge[0],
        "a sudden drop alone moves nothing": len(moment) <= 1,
        "a lasting drop moves the cut": len(lasting) > 1,
        "Chair over WiFi sends as little as possible": chosen.cut == least,
        "after a lasting drop: over an oracle, median": median(row["ours"] for row in drops),
    }


def _moves(label: str, edge: str, parts: Sequence[tuple[float, float, float]]) -> list[int]:
    """Return the positions of the cut, from the first on, over a link whose last part never ends."""
    link = segments(parts)
    party = party_of(label, edge, link, OURS)
    (trained,) = simulate([party], edge).parties
    plans = [party.split_plan, *(move.new for move in trained.moves)]
    return [party.costs.position(plan) for plan in plans]


def figure_19() -> Ours:
    """Return the predicted hours of whole trainings, of Table 1's samples and Table 2's epochs."""
    found: dict[str, float | bool] = {}
    shares = []
    for label, kind in (("Chair", "wifi"), ("BI-LSTM", "wifi"), ("Mobilenetv3", "wifi")):
        runs = dict(_runs(PI))[f"{label}/{kind}"]
        workload = WORKLOADS[label]
        times = workload.epochs * workload.num_train / BATCH / NUM_BATCHES / 3600.0
        found[f"{label}: hours on a Pi over {kind}"] = runs[OURS].duration_s * times
        shares.append(
            runs[OURS].duration_s
            / min(run.duration_s for name, run in runs.items() if name != OURS)
        )
    return {
        "MobileNetV3: time over the better baseline": shares[-1],
        "others converge within an hour": all(
            hours < 1.0 for case, hours in found.items() if "Mobilenetv3" not in case
        ),
        **found,
    }


_SILOS = {
    "TX2 WiFi, TX2 WiFi": ((TX2, "wifi"), (TX2, "wifi")),
    "TX2 5G, TX2 5G": ((TX2, "5g"), (TX2, "5g")),
    "TX2 WiFi, Pi WiFi": ((TX2, "wifi"), (PI, "wifi")),
    "TX2 5G, Pi 5G": ((TX2, "5g"), (PI, "5g")),
    "TX2 WiFi, Pi 5G": ((TX2, "wifi"), (PI, "5g")),
}


def figure_20() -> Ours:
    """Return by how much K = 5 shortens the training of two parties' deep interest network."""
    gains = {
        name: _silo(name, 0, 32).duration_s / _silo(name, WINDOW, 8).duration_s for name in _SILOS
    }
    slow = ("TX2 5G, Pi 5G", "TX2 WiFi, Pi 5G")
    others = [gain for name, gain in gains.items() if name not in slow]
    return {
        "ours is faster but for two settings": min(others) > 1.05,
        "it gains nothing with a Pi over 5G": max(gains[name] for name in slow) < 1.05,
        **{f"{name}: gain": gain for name, gain in gains.items()},
    }


def figure_21() -> Ours:
    """Return how stale the gradients of both parties are."""
    mixed = _silo("TX2 5G, Pi 5G", WINDOW, 8).parties
    tx2, pi = (Counter(party.staleness) for party in mixed)
    return {
        "a TX2 beside a Pi: staleness": tx2.most_common(1)[0][0],
        "a Pi beside a TX2: staleness": pi.most_common(1)[0][0],
        "of equal edges it is uniform": _is_uniform(
            _silo("TX2 WiFi, TX2 WiFi", WINDOW, 8).parties[0].staleness
        ),
    }


def _is_uniform(staleness: Sequence[int]) -> bool:
    counts = Counter(staleness)
    return len(counts) == WINDOW + 1 and max(counts.values()) < 2 * min(counts.values())


def _silo(name: str, window: int, bits: int) -> Timeline:
    parties = [
        Party(
            costs=din_costs(number, edge),
            bandwidth_profile=link_of(kind),
            split_plan=SplitPlan(cut=0, bits=bits, window=window),
        )
        for number, (edge, kind) in enumerate(_SILOS[name])
    ]
    return simulate(parties, *(edge for edge, _ in _SILOS[name]))


def figure_22() -> Ours:
    """Return how much more memory ours takes than the baselines, in percent."""

    def more(
        edge: str, other: str, runs: Iterator[tuple[str, Mapping[str, PredictedBatches]]]
    ) -> float:
        ratios = [
            own[OURS].memory_bytes / own[other].memory_bytes for _, own in runs if other in own
        ]
        return 100.0 * (mean(ratios) - 1.0)

    near = [
        runs[OURS].memory_bytes / runs[EDGE_ONLY].memory_bytes
        for edge in (PI, TX2)
        for _, runs in _runs(edge)
        if EDGE_ONLY in runs
    ]
    return {
        "Pi: more than JointDNN, mean": more(PI, JOINT_DNN, _runs(PI)),
        "Pi: less than the edge alone, mean": -more(PI, EDGE_ONLY, _runs(PI)),
        "most over the edge alone": 100.0 * (max(near) - 1.0),
        "TX2: more than JointDNN, mean": more(TX2, JOINT_DNN, _runs(TX2)),
    }


def figure_23() -> Ours:
    """Return whether ours needs the least energy, over all models and links, and stored joules of a small model."""
    stored = {
        what: float(
            stored_row("split.json", f"energy of a jetson-tx2 at 20 Mbit/s: {what}")["ours"]
        )
        for what in ("8 bits both ways", "edge-only")
    }
    totals = {
        method: sum(runs[method].energy_j for _, runs in _runs(TX2))
        for method in (OURS, JOINT_DNN, EDGE_ONLY)
    }
    found = {
        "TX2: much less in total than both": totals[OURS]
        < 0.8 * min(totals[JOINT_DNN], totals[EDGE_ONLY]),
        "TX2: less than alone, VGG-tiny at 20 Mbit/s": stored["8 bits both ways"]
        < stored["edge-only"],
        "Pi: less than both for every model": _is_least(PI, lambda run: run.energy_j),
        "TX2: less than both for every model": _is_least(TX2, lambda run: run.energy_j),
        "TX2: total over the better baseline": totals[OURS]
        / min(totals[JOINT_DNN], totals[EDGE_ONLY]),
        "VGG-tiny on a TX2, 20 Mbit/s: ours": stored["8 bits both ways"],
        "VGG-tiny on a TX2, 20 Mbit/s: alone": stored["edge-only"],
    }
    return _and_texts("figure-23", found, "not split into parts")


def _runs(edge: str) -> Iterator[tuple[str, Mapping[str, PredictedBatches]]]:
    """Yield by model and link the runs of all methods that fit into the edge's memory."""
    for label, kind in product(WORKLOADS, LINKS):
        runs = {
            method: run_of(label, edge, kind, method) for method in (OURS, JOINT_DNN, EDGE_ONLY)
        }
        yield f"{label}/{kind}", {name: run for name, run in runs.items() if run is not None}


def _is_least(edge: str, value: Callable[[PredictedBatches], float]) -> bool:
    """Return whether ours is the least of all methods; where it trains alone too, within a percent."""
    return all(
        value(runs[OURS]) <= 1.01 * min(map(value, runs.values())) for _, runs in _runs(edge)
    )


COMPUTE: Mapping[str, Callable[[], Ours]] = {
    "table-1": table_1, "table-2": table_2, "table-3": table_3, "table-4": table_4, "figure-3": figure_3,
    "figure-4": figure_4, "figure-5": figure_5, "equations": equations, "figure-6": figure_6, "figure-8": figure_8,
    "figure-10": figure_10, "figure-11": figure_11, "figure-13": figure_13, "figure-14": figure_14,
    "figure-16": figure_16, "figure-17": figure_17, "figure-18": figure_18, "figure-19": figure_19,
    "figure-20": figure_20, "figure-21": figure_21, "figure-22": figure_22, "figure-23": figure_23,
}  # fmt: skip


def _points(case: str) -> float:
    """Return the points of accuracy that a stored training loses against normal training."""
    row = stored_row(ACCURACIES, case)
    return 100.0 * float(row["peer_value"] - row["ours"])


def _cells(item_id: str) -> list[str]:
    return [cell.key for cell in read_paper("edge-cloud").item(item_id).cells]


def _and_texts(item_id: str, found: Mapping[str, float | bool | str], text: str) -> Ours:
    """Return what was found, and a text for each cell that is not comparable and that nothing was found for."""
    cells = read_paper("edge-cloud").item(item_id).cells
    return {cell.key: text for cell in cells if cell.use == NOT_COMPARABLE} | dict(found)
