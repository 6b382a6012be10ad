"""Our values for each table and figure of SoCFlow+, in virtual time, in simulated heat, and from stored trainings."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import mean
from typing import Any

from socflower.cluster import device, parse_cluster
from socflower.errors import InfeasiblePlan
from socflower.hierarchy import (
    Exchange,
    GradientExchange,
    communication_groups,
    exchange_graph,
    integrity_greedy,
    map_groups,
    plan_groups,
)
from socflower.hierarchy.exchange.coding_bytes import RING as IN_A_RING
from socflower.hierarchy.exchange.coding_bytes import SERVER
from socflower.hierarchy.exchange.collective_tasks import BUCKETS, PER_TENSOR
from socflower.paper.comparison import stored_results, stored_row
from socflower.paper.socflow_plus.heat import (
    Experiment,
    cooling_s,
    fan_table_experiment,
    onset_s,
    settled,
    temperature_after,
)
from socflower.paper.socflow_plus.predictions import (
    EPOCHS,
    FP32,
    MIXED,
    NO_STRATEGY,
    NUM_SOCS,
    OURS,
    RING,
    WORKLOADS,
    Epoch,
    as_run,
    at_best,
    mean_epoch,
    planned,
    rack,
    scenario_of,
    synchronising,
)
from socflower.scenario.costs import model_profile
from socflower.sim import EventClock
from socflower.strategies.presets import STRATEGIES
from socflower.thermal.fans.fan_curve import rack_fans
from socflower.thermal.model.constants import constant, fan_table

Ours = Mapping[str, float | bool | str]

PEERS = ("ps", RING, "hipress", "2d", "fedavg", "tree-fedavg")
"""The paper's baselines, by their names as strategies (§4.1)."""

STUDIED = ("VGG-11", "ResNet-18")
TECHNIQUES = ("groups", "mapping", "turns", "mixed precision")
"""What Fig. 14 adds to a ring, in its order."""

# The numbers of equal groups of 60 SoCs.
_EQUAL_GROUPS = tuple(number for number in range(2, 60) if not 60 % number)
ACCURACIES, CURVES, COOLING, TRAININGS = (
    "bench-mixed-accuracy.json",
    "bench-delayed-aggregation.json",
    "bench-cooling.json",
    "bench-socflow-figures.json",
)
SIZES = (8, 16, NUM_SOCS, 60)
"""The numbers of SoCs of the stored trainings of Fig. 10."""


def figure_2a() -> Ours:
    """Return the hours of a training on one SoC, FP32 on its CPU and int8 on its NPU."""
    found = {}
    for label in STUDIED:
        for side, arithmetic in (("CPU", "fp32"), ("NPU", "int8")):
            scenario = scenario_of(label, "sgd", rack(1), arithmetic=arithmetic)
            found[f"{label}/{side}"] = mean_epoch(scenario).duration_s * EPOCHS / 3600.0
    return found


def figure_2b() -> Ours:
    """Return the milliseconds of one gradient exchange, and of the handling of messages in the largest ring."""
    cluster = parse_cluster(rack(35))
    found = {}
    for label in STUDIED:
        profile = model_profile(scenario_of(label, OURS, rack(1)))
        exchange = Exchange(num_bytes=profile.weight_bytes, num_tensors=profile.num_tensors)
        for kind, name in ((IN_A_RING, "ring"), (SERVER, "server")):
            for size in (5, NUM_SOCS):
                graph = exchange_graph(range(size), exchange, GradientExchange(kind=kind))
                seconds = EventClock(cluster).run(graph).duration_s
                found[f"{label}/{name}/{size}"] = 1e3 * seconds
        # Each sub-step of a ring handles a message for every tensor.
        found[f"{label}/ring/{NUM_SOCS}: start of transfers"] = (
            1e3 * 2 * (NUM_SOCS - 1) * exchange.num_tensors * cluster.message_s
        )
    return found


def figure_2c() -> Ours:
    """Return the points that int8 training on 32 SoCs loses."""
    lost = {
        label: 100.0 * (row["peer_value"] - row["ours"])
        for label, row in (
            ("LeNet-5, MNIST", stored_row(ACCURACIES, "LeNet-5, MNIST, niti")),
            ("ResNet-8, CIFAR-10", stored_row(ACCURACIES, "ResNet-8, CIFAR-10, niti")),
        )
    }
    trained = trained_int8()
    worst = max(*lost.values(), trained["LeNet-5, digits: niti"])
    return {
        **dict.fromkeys(STUDIED, "not trained"),
        **lost,
        **trained,
        "int8 on all SoCs loses more than two points": worst > 2.0,
        "so does the default algorithm": trained["LeNet-5, digits: real-scales"] > 2.0,
    }


def trained_int8() -> Mapping[str, float]:
    """Return the points that int8 loses on digits, with the least and the most of all seeds."""
    found: dict[str, float] = {}
    fp32 = trained_arm("int8/fp32")["accuracy"]
    for algorithm in ("real-scales", "niti"):
        pairs = zip(fp32, trained_arm(f"int8/{algorithm}")["accuracy"], strict=True)
        lost = [100.0 * (theirs - ours) for theirs, ours in pairs]
        found |= _spread(f"LeNet-5, digits: {algorithm}", lost)
    return found


def figure_2d() -> Ours:
    """Return the hottest SoC, the slowest clock and the longer epochs after 15 minutes on all processors of 60 SoCs."""
    soc = device("snapdragon-865")
    npu_w = soc.processor("npu").active_w - soc.idle_w
    experiment = Experiment(
        num_busy=60,
        busy_w=soc.processor("cpu").active_w + npu_w,
        idle_w=soc.idle_w,
        unthrottled_w=npu_w,
    )
    hottest_c, speed = temperature_after(experiment, constant("fan", "low_rpm"), 900.0)
    return {
        "hottest SoC after 15 minutes": hottest_c,
        "slowest clock over the fastest": speed,
        "epochs are longer by, least": 100.0 * (1.0 / speed - 1.0),
    }


def figure_4() -> Ours:
    """Return how accuracy depends on the number of groups, at the end and after one epoch."""
    best, first = (
        {n: _curve(f"{n} groups: {what}") for n in (1, 2, 4, 8, 16, 32)}
        for what in ("best", "first")
    )
    return {
        "too many groups lose accuracy": best[32] < max(best.values()) - 0.01,
        "the first epoch ranks as the end does": _rank_correlation(best, first) > 0.5,
        **{f"{n} groups: at the end": 100.0 * value for n, value in best.items()},
        **{f"{n} groups: first epoch": 100.0 * value for n, value in first.items()},
    }


def figure_5() -> Ours:
    """Return how accuracy and time to 90 % depend on the interval between synchronisations, in epochs."""
    intervals = ("0.25", "0.5", "1", "2", "4")
    best = {each: _curve(f"{each} epochs: best") for each in intervals}
    seconds = {each: _curve(f"{each} epochs: to") for each in intervals}
    return {
        "an interval of 0.25 is the quickest": min(seconds, key=seconds.__getitem__) == "0.25",
        "0.25 is less accurate than 1 or 2": best["0.25"] < max(best["1"], best["2"]),
        **{f"{each} epochs": 100.0 * value for each, value in best.items()},
        **{f"{each} epochs: to 90 %": value for each, value in seconds.items()},
    }


def figure_6() -> Ours:
    """Return whether communication groups in turn hide the exchange, and whether turns pay (F7)."""
    steps = [planned(label, OURS, epochs=1) for label in STUDIED]
    return {
        "two communication groups suffice": _num_turns(rack(NUM_SOCS)["boards"], 8) <= 2,
        "the exchange is hidden while computing is slower": all(
            step["exchange_fraction"] < 0.01 for step in steps if step["exchange_fraction"] < 0.5
        ),
        "turns shorten the step": any(
            step["step_with_turns_s"] < 0.999 * step["step_without_turns_s"] for step in steps
        ),
    }


def theorems() -> Ours:
    """Return whether the paper's mapping is optimal on full boards, and on boards with idle slots (F5, F6)."""
    return {
        "greedy minimises C on full boards": _greedy_is_best([5] * 12, _EQUAL_GROUPS),
        "greedy minimises C with slots in use by others": _greedy_is_best([5] * 4, (6,), 18)
        and _greedy_is_best([4, 4, 5, 5], (6,)),
        "two communication groups suffice": all(
            _num_turns([5] * 12, number) <= 2 for number in range(2, 61)
        ),
    }


def table_2() -> Ours:
    """Return the steady state of 40 busy SoCs at each fan speed."""
    experiment = fan_table_experiment()
    found: dict[str, float] = {}
    for row in fan_table():
        state, watts = settled(experiment, row.rpm), rack_fans().power_w(row.rpm)
        busy_w = experiment.num_busy * experiment.busy_w
        found |= {
            f"{row.rpm:g}/fan": watts,
            f"{row.rpm:g}/SoC": state.soc_c,
            f"{row.rpm:g}/speed": 100.0 * (1.0 - state.decline),
            f"{row.rpm:g}/overhead": 100.0 * watts / busy_w,
        }
    return found


def figure_7() -> Ours:
    """Return the minutes until 40 SoCs lower their clocks, and until high fan speeds restore them."""
    experiment = fan_table_experiment()
    found = {"minutes until clocks fall": onset_s(experiment, constant("fan", "low_rpm")) / 60.0}
    for rpm in (8300.0, 11000.0, 14000.0):
        found[f"minutes of cooling, {rpm:g} rpm"] = cooling_s(experiment, rpm) / 60.0
    return found


def figure_8() -> Ours:
    """Return the least and greatest ratio of each baseline's seconds to ours, and the hours of the trainings."""
    return {**_ratios(lambda epoch: epoch.duration_s), **training_hours()}


def training_hours() -> Ours:
    """Return the hours of each training under SoCFlow+ as run, and whether none takes more than two."""
    hours = {
        label: _epoch(as_run(label, OURS, arithmetic=MIXED)).duration_s * EPOCHS / 3600.0
        for label in WORKLOADS
    }
    return {
        "all trainings end within two hours": max(hours.values()) <= 2.0,
        **{f"hours of {EPOCHS} epochs, {label}": value for label, value in hours.items()},
    }


def figure_9() -> Ours:
    """Return the least and greatest ratio of each baseline's joules to ours."""
    return _ratios(lambda epoch: epoch.energy_j)


def figure_10() -> Ours:
    """Return the mean ratio of each baseline's seconds to ours on 8 and on 32 SoCs."""
    found: dict[str, float | bool | str] = {}
    growing = []
    for peer in PEERS:
        means = {
            size: _mean(_over(peer, size, lambda epoch: epoch.duration_s)) for size in (8, 16, 32)
        }
        found |= {f"{peer}, {size} SoCs": value for size, value in means.items()}
        numbers = [value for value in means.values() if not isinstance(value, str)]
        if numbers:
            growing.append(numbers == sorted(numbers))
    return {
        **found,
        "the gain grows with the number of SoCs": all(growing),
        **trained_scalability(),
    }


def trained_scalability() -> Ours:
    """Return the trained ring's and our seconds and joules on each number of SoCs, and their ratio."""
    found: dict[str, float] = {}
    for size in SIZES:
        ours, ring = (trained_arm(f"scalability/{size}/{name}") for name in (OURS, RING))
        for key in ("seconds", "joules"):
            label = f"trained, {size} SoCs: {key}"
            found |= _spread(label, _divided(ring[key], ours[key]))
            found[f"{label} of {OURS}"] = mean(ours[key])
            found[f"{label} of {RING}"] = mean(ring[key])
    gains = [found[f"trained, {size} SoCs: seconds"] for size in SIZES]
    return {**found, "trained: the gain grows with the number of SoCs": gains == sorted(gains)}


def figure_11() -> Ours:
    """Return how much faster, and on how many times less energy, 60 SoCs train than one V100."""
    found: dict[str, float | bool | str] = {}
    as_fast = []
    for label in ("VGG-11", "ResNet-18", "LeNet"):
        gpu = mean_epoch(scenario_of(label, "sgd", {"boards": [1], "device": "gpu-v100"}))
        ours = _epoch(as_run(label, OURS, 60, arithmetic=MIXED))
        best = min(
            mean_epoch(
                scenario_of(label, OURS, rack(60), groups=number, fusion=BUCKETS, arithmetic=MIXED)
            )
            for number in (15, 20, 30, 60)
        )
        as_fast.append(gpu.duration_s / ours.duration_s)
        for name, epoch in (("", ours), (" at its best", best)):
            found[f"{label}: speed{name}"] = gpu.duration_s / epoch.duration_s
            found[f"{label}: energy{name}"] = gpu.energy_j / epoch.energy_j
    return {**found, "least speed": min(as_fast), "most speed": max(as_fast)}


def figure_12() -> Ours:
    """Return the percentage of an epoch in which SoCs wait for gradients or weights."""
    found: dict[str, float | str] = {}
    for peer in PEERS:
        shares = []
        for label in STUDIED:
            share: float | str = NO_STRATEGY if peer not in STRATEGIES else "not broken down"
            if isinstance(as_run(label, peer), Epoch) and not STRATEGIES[peer].is_grid:
                share = 100.0 * synchronising(planned(label, peer))
            found[f"{peer}/{label}"] = share
            shares.append(share)
        found[f"{peer}: mean"] = _mean(shares)
    for label in STUDIED:
        found[f"{OURS}/{label}"] = 100.0 * synchronising(planned(label, OURS, arithmetic=MIXED))
    return {**found, f"{OURS}: mean": _mean([found[f"{OURS}/{label}"] for label in STUDIED])}


def figure_14() -> Ours:
    """Return what each technique gains alone: groups, mixed precision, cooling with re-balancing."""
    groups, mixed = [], []
    for label in STUDIED:
        ring, fp32, both = (
            _epoch(each)
            for each in (
                as_run(label, RING),
                as_run(label, OURS),
                as_run(label, OURS, arithmetic=MIXED),
            )
        )
        groups.append(ring.duration_s / fp32.duration_s)
        mixed.append(fp32.duration_s / both.duration_s)
    best = [
        _epoch(at_best(label, RING, BUCKETS)).duration_s
        / _epoch(at_best(label, OURS, BUCKETS)).duration_s
        for label in STUDIED
    ]
    rows = stored_results(COOLING)["rows"]
    cooling = [row["ours"] for row in rows if row["case"].endswith("beside the paper's least")]
    alone = [
        stored_row("bench-mixed-cluster.json", f"{WORKLOADS[label].model}, paper, one SoC")["ratio"]
        for label in STUDIED
    ]
    return {
        "groups, least": min(groups), "groups, most": max(groups),
        "groups, each at its best, least": min(best), "groups, each at its best, most": max(best),
        "mixed precision, least": min(mixed), "mixed precision, most": max(mixed),
        "mixed precision on one SoC, least": min(alone), "mixed precision on one SoC, most": max(alone),
        "cooling, least": min(cooling), "cooling, most": max(cooling),
        **trained_ablation(),
    }  # fmt: skip


def trained_ablation() -> Ours:
    """Return the ratio of seconds without a technique to those with it, in trainings to an accuracy."""
    found: dict[str, float | bool | str] = {}
    arms = [trained_arm(f"ablation/{name}") for name in (RING, *TECHNIQUES)]
    for technique, (before, after) in zip(TECHNIQUES, pairwise(arms), strict=True):
        found |= _spread(f"{technique}, trained", _divided(before["seconds"], after["seconds"]))
    _, groups, mapping, turns, _ = (arm["weights"] for arm in arms)
    same = groups == mapping == turns
    return {**found, "trained weights with mapping and turns": "equal" if same else "others"}


def trained_arm(label: str) -> Mapping[str, Any]:
    """Return the figures of each seed of a stored training, as benchmarks/socflow_figures.py names it."""
    return dict(stored_results(TRAININGS)["peers"][label])


def figure_15() -> Ours:
    """Return the accuracy of mixed precision beside FP32, int8 and halves, and its speed."""
    lost = {
        rule: 100.0 * (row["peer_value"] - row["ours"])
        for rule in ("paper", "normalised", "niti", "half")
        for row in (stored_row(ACCURACIES, f"ResNet-8, CIFAR-10, {rule}"),)
    }
    step_s = {
        rule: planned("VGG-11", OURS, arithmetic="mixed", rule=rule)["epoch_s"]
        for rule in ("paper", "int8", "half", "fp32")
    }
    return {
        "as accurate as FP32, within a point": lost["paper"] <= 1.0,
        "more accurate than int8": lost["paper"] < lost["niti"],
        "as fast as int8, within a tenth": step_s["paper"] <= 1.1 * step_s["int8"],
        "halves are slower than int8": step_s["half"] > step_s["int8"],
        "halves are less accurate than FP32": lost["half"] > 0.0,
        **{f"points lost: {rule}": points for rule, points in lost.items()},
    }


COMPUTE: Mapping[str, Callable[[], Ours]] = {
    "figure-2a": figure_2a, "figure-2b": figure_2b, "figure-2c": figure_2c, "figure-2d": figure_2d,
    "figure-4": figure_4, "figure-5": figure_5, "figure-6": figure_6, "theorems": theorems, "table-2": table_2,
    "figure-7": figure_7, "figure-8": figure_8, "figure-9": figure_9, "figure-10": figure_10, "figure-11": figure_11,
    "figure-12": figure_12, "figure-14": figure_14, "figure-15": figure_15,
}  # fmt: skip


def _ratios(value: Callable[[Epoch], float]) -> Ours:
    """Return the least and greatest ratio of each baseline to ours: as run, and with each at its best."""
    readings: Mapping[str, Callable[[str, str], Epoch | str]] = {
        "": lambda label, method: as_run(
            label, method, arithmetic=MIXED if method == OURS else FP32
        ),
        **{
            f", at its best, {fusion}": partial(at_best, fusion=fusion)
            for fusion in (PER_TENSOR, BUCKETS)
        },
    }
    found: dict[str, float | bool | str] = {}
    for peer in PEERS:
        for reading, epoch_of in readings.items():
            ratios = [
                _ratio(epoch_of(label, peer), epoch_of(label, OURS), value) for label in WORKLOADS
            ]
            numbers = [each for each in ratios if not isinstance(each, str)]
            missing = ratios[0] if not numbers else ""
            found[f"least over {peer}{reading}"] = missing or min(numbers)
            found[f"most over {peer}{reading}"] = missing or max(numbers)
    return found


def _over(peer: str, num_socs: int, value: Callable[[Epoch], float]) -> list[float | str]:
    return [
        _ratio(
            as_run(label, peer, num_socs), as_run(label, OURS, num_socs, arithmetic=MIXED), value
        )
        for label in WORKLOADS
    ]


def _ratio(theirs: Epoch | str, ours: Epoch | str, value: Callable[[Epoch], float]) -> float | str:
    if isinstance(theirs, str):
        return theirs
    return value(theirs) / value(_epoch(ours))


def _epoch(found: Epoch | str) -> Epoch:
    if isinstance(found, str):
        raise InfeasiblePlan(f"{OURS}: {found}")
    return found


def _mean(values: Sequence[float | str]) -> float | str:
    """Return the mean of the numbers; the first text if there are none."""
    numbers = [value for value in values if not isinstance(value, str)]
    return sum(numbers) / len(numbers) if numbers else values[0]


def _divided(theirs: Sequence[float], ours: Sequence[float]) -> list[float]:
    return [their / own for their, own in zip(theirs, ours, strict=True)]


def _spread(label: str, values: Sequence[float]) -> dict[str, float]:
    """Return the mean of all seeds, the least and the most."""
    return {label: mean(values), f"{label}, least": min(values), f"{label}, most": max(values)}


def _curve(case: str) -> float:
    return float(stored_row(CURVES, case)["ours"])


def _rank_correlation(left: Mapping[int, float], right: Mapping[int, float]) -> float:
    """Return Kendall's tau: how much more pairs are in the same order than in the opposite one."""
    keys = [*left]
    signs = [
        math.copysign(1.0, (left[a] - left[b]) * (right[a] - right[b]))
        for i, a in enumerate(keys)
        for b in keys[:i]
        if left[a] != left[b] and right[a] != right[b]
    ]
    return sum(signs) / len(signs) if signs else 0.0


def _greedy_is_best(
    boards: Sequence[int], numbers: Sequence[int], num_socs: int | None = None
) -> bool:
    return all(
        integrity_greedy(boards, number, num_socs).contention
        == map_groups(boards, number, num_socs).contention
        for number in numbers
    )


def _num_turns(boards: Sequence[int], number: int) -> int:
    """Return the number of communication groups of so many groups on all SoCs of the boards."""
    plan = plan_groups(parse_cluster({"boards": list(boards)}), number)
    return len(communication_groups(plan.groups))
