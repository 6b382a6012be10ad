"""What mixed precision gains on 32 Snapdragon 865 in virtual time: SoCFlow+ section 4.7 says 3.53 to 5.78 times.

    socflower bench mixed-cluster --json

Rows are seconds and joules of an epoch of CIFAR-10 against the same cluster in FP32, predicted as `socflower plan`
does, from the catalogue's rates (the CPU in FP32, the NPU in int8; as a Snapdragon 888) at alpha = 1, the largest share
for int8. `limit` is the bound of F11 on the computation, for rules that have one: under the paper's rule gamma is at
least e^-1, so no NPU makes a step more than 2.72 times as fast, and 3.53 to 5.78 is out of reach. Rows of `one SoC`
have no communication and show the rule itself; their answer is checked against throughputs alone.
"""

import math
from typing import Any

from benchmarks.harness import Row, less_is_better
from socflower.cluster import FP32, ModelProfile, device
from socflower.precision.cpu_share import cpu_share, most_speedup
from socflower.precision.processor_costs import MixedPricing
from socflower.scenario.costs import model_profile
from socflower.scenario.planning import plan_scenario
from socflower.scenario.schema.file import parse_scenario

MODELS = ("vgg11", "resnet18")
RULES = ("paper", "normalised", "int8")
BATCH = 64


def run(quick: bool = False) -> list[Row]:
    """Return step times of one SoC, and epochs of the whole cluster in seconds and joules."""
    found: list[Row] = []
    for model in MODELS:
        profile = model_profile(_scenario(model, "fp32"))
        fp32 = _epoch(model, "fp32")
        for rule in RULES:
            found.append(_one_soc(model, rule, profile))
            mixed = _epoch(model, rule)
            for key, unit in (
                ("epoch_s", "virtual s per epoch"),
                ("epoch_energy_j", "virtual J per epoch"),
            ):
                row = less_is_better(
                    f"{model}, {rule}, 32 SoCs in 8 groups",
                    mixed[key],
                    "the same in fp32",
                    fp32[key],
                    unit,
                    limit=_limit(rule, fp32[key]) if key == "epoch_s" else None,
                    ok=mixed["epoch_s"] <= fp32["epoch_s"],
                )
                found.append(row)
    return found


def _one_soc(model: str, rule: str, profile: ModelProfile) -> Row:
    """Return the row of a SoC's compute time for a batch, checked against the catalogue's two rates."""
    soc = device("snapdragon-865")
    alone_s = FP32.step_cost(profile, soc, BATCH).compute_s
    seconds = max(
        work.compute_s for work in MixedPricing(rule=rule).step_cost(profile, soc, BATCH).processors
    )
    cpu, npu = (soc.processor(name).rate(model) for name in ("cpu", "npu"))
    gamma = cpu_share(rule, 1.0, npu / (npu + cpu))
    on_cpu = round(gamma * BATCH)
    overhead_s = len(profile.layers) * soc.layer_overhead_s
    expected_s = max(
        (on_cpu * profile.training_flops / cpu + overhead_s) if on_cpu else 0.0,
        (BATCH - on_cpu) * profile.training_flops / npu + overhead_s,
    )
    return less_is_better(
        f"{model}, {rule}, one SoC",
        seconds,
        "fp32 on its CPU",
        alone_s,
        "virtual s per batch of 64",
        limit=_limit(rule, alone_s),
        ok=math.isclose(seconds, expected_s, rel_tol=1e-9),
    )


def _limit(rule: str, fp32_s: float) -> float | None:
    most = most_speedup(rule)
    return fp32_s / most if math.isfinite(most) else None


def _epoch(model: str, rule: str) -> dict[str, Any]:
    predicted: dict[str, Any] = plan_scenario(_scenario(model, rule))["predicted"]
    return predicted


def _scenario(model: str, rule: str) -> Any:
    return parse_scenario(
        {
            "cluster": {"boards": 7, "socs_per_board": 5}, "model": {"name": model}, "data": {"name": "cifar10"},
            "train": {"epochs": 10, "batch_size": BATCH},
            "strategy": {"groups": 8, "socs": 32, "sync_interval_epochs": 0.5},
            "precision": {"arithmetic": "mixed", "rule": rule},
        },
        name=f"{model}-{rule}", question="", where="benchmark",
    )  # fmt: skip
