"""Our values for what SoCFlow's slides show, most of it by the same computations as for SoCFlow+."""

from collections.abc import Callable, Mapping
from itertools import pairwise

from socflower.cluster import device
from socflower.paper.socflow_plus.items import (
    Ours,
    figure_2b,
    figure_4,
    figure_11,
    theorems,
    training_hours,
)
from socflower.paper.socflow_plus.predictions import (
    OURS,
    WORKLOADS,
    mean_epoch,
    rack,
    scenario_of,
)
from socflower.precision.cpu_share import compute_power_ratio, cpu_share

_GROUPS = (1, 2, 4, 8, 16, 32)


def latency() -> Ours:
    """Return how many times longer an exchange over boards takes than one on a board, over models and kinds."""
    found = figure_2b()
    ratios = [
        float(found[f"{label}/{kind}/32"]) / float(found[f"{label}/{kind}/5"])
        for label in ("VGG-11", "ResNet-18")
        for kind in ("ring", "server")
    ]
    return {"least": min(ratios), "most": max(ratios)}


def group_size() -> Ours:
    """Return whether epochs get shorter with more groups of the same batch."""
    seconds = [
        mean_epoch(scenario_of("VGG-11", OURS, rack(32), groups=number)).duration_s
        for number in _GROUPS
    ]
    falls = all(more < less for less, more in pairwise(seconds))
    return {
        "an epoch is negatively correlated to N": falls,
        "smaller N leads to a lower training time": not falls,
        **{
            f"epoch of VGG-11 in {number} groups": each
            for number, each in zip(_GROUPS, seconds, strict=True)
        },
    }


def mixed_precision() -> Ours:
    """Return how the CPU's share follows confidence and compute power (F9 to F11), and its bound."""
    soc = device("snapdragon-865")
    npu, cpu = (soc.processor(side).rate("vgg11") for side in ("npu", "cpu"))
    beta = compute_power_ratio(npu, cpu)
    shares = [cpu_share("paper", alpha / 10.0, beta) for alpha in range(11)]
    by_power = [cpu_share("paper", 1.0, power / 10.0) for power in range(11)]
    return {
        "more data for int8 as alpha rises": all(more <= less for less, more in pairwise(shares)),
        "more data for int8 as beta rises": all(more <= less for less, more in pairwise(by_power)),
        "beta of VGG-11, by throughputs": beta,
        "beta of VGG-11, by seconds as printed": compute_power_ratio(1.0 / npu, 1.0 / cpu),
        "least share of the CPU": shares[-1],
    }


def gpus() -> Ours:
    """Return the energy of one V100 over that of 60 SoCs, and whether small models gain more."""
    found = figure_11()
    speeds = {
        label: float(found[f"{label}: speed"]) for label in WORKLOADS if f"{label}: speed" in found
    }
    return {
        "energy, most": max(float(found[f"{label}: energy"]) for label in speeds),
        "energy at its best, most": max(
            float(found[f"{label}: energy at its best"]) for label in speeds
        ),
        "small models suit it more than large ones": speeds["LeNet"] > speeds["ResNet-18"],
    }


COMPUTE: Mapping[str, Callable[[], Ours]] = {
    "latency": latency, "group-size": group_size, "first-epoch": figure_4, "mapping": theorems,
    "communication-groups": theorems, "mixed-precision": mixed_precision, "end-to-end": training_hours,
    "gpus": gpus,
}  # fmt: skip
