"""Does training on CPU and NPU at once keep the accuracy of FP32? SoCFlow+ Fig. 15 on 32 virtual SoCs in 8 groups.

    python benchmarks/mixed_accuracy.py --json --curves docs/results    (hours; continues after an interruption)
    python benchmarks/mixed_accuracy.py --stored --json                 (only the runs that are done)
    python benchmarks/mixed_accuracy.py --quick                         (one epoch of one network, one seed)

The scenarios are scenarios/full/mixed_mnist.toml and mixed_cifar10.toml, the latter also with LeNet-5: whole data sets,
real gradients. With the same seed, all rules have equal initial weights and equal samples in equal order. The five
rules of mixed precision are compared with int8 alone (NITI, whose weights are int8 too) and, for ResNet-8, with FP32
on half the batch per SoC, which separates the cost of splitting a batch for BatchNorm from the cost of int8. Rows give
the mean accuracy against that of FP32 on the same seeds. Finished runs are kept in out/mixed-accuracy/. Needs MNIST
and CIFAR-10 in SOCFLOWER_DATA.
"""

import json
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, half_width, kept, main, more_is_better, note
from socflower.precision import MIXING_RULES
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.file import load_scenario

FOLDER = Path("out/mixed-accuracy")
SEEDS = (1, 2, 3)
NITI, HALVES = "niti", "fp32-in-halves"
METHODS: dict[str, list[str]] = {
    **{rule: [f"precision.rule={rule}"] for rule in MIXING_RULES},
    # Small steps suit short trainings best (benchmarks/int8_accuracy.py). Mixed precision holds out
    # as many samples.
    NITI: [
        "precision.arithmetic=int8",
        "precision.algorithm=niti",
        "precision.gradient_bits=[2, 1, 0]",
        "precision.held_out=128",
    ],
    # FP32 on twice the SoCs in as many groups shows what half the batch per SoC costs a network
    # with BatchNorm.
    HALVES: ["precision.rule=fp32", "cluster.boards=13", "strategy.socs=64"],
}
FIVE_RULES = (*MIXING_RULES, NITI)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedCase:
    """A network and data set, how it is trained, and how much accuracy it may lose."""

    title: str
    # Begins the names of the kept files.
    key: str
    scenario: str
    overrides: tuple[str, ...] = ()
    methods: tuple[str, ...] = FIVE_RULES
    tolerance: float


CASES = (
    MixedCase(title="LeNet-5, MNIST", key="mixed_mnist", scenario="mixed_mnist", tolerance=0.005),
    MixedCase(title="LeNet-5, CIFAR-10", key="mixed_cifar10_lenet5", scenario="mixed_cifar10", tolerance=0.01,
         overrides=("model.name=lenet5", "train.learning_rate=0.02")),
    MixedCase(title="ResNet-8, CIFAR-10", key="mixed_cifar10", scenario="mixed_cifar10", tolerance=0.01,
         methods=(*FIVE_RULES, HALVES)),
)  # fmt: skip

_OF_ROUND = ("epoch", "accuracy", "copy_similarity", "cpu_share", "virtual_s", "energy_j")
_OF_RUN = ("final_accuracy", "virtual_s", "energy_j", "wall_s", "weights_sha256", "kernels")


def run_case(case: MixedCase, method: str, seed: int, *, epochs: int | None = None) -> Any:
    """Return a run's figures by round; a finished run is read from its file."""
    return kept(_file(case, method, seed, epochs), lambda: _run_anew(case, method, seed, epochs))


def _run_anew(case: MixedCase, method: str, seed: int, epochs: int | None) -> dict[str, Any]:
    overrides = [f"seed={seed}", *case.overrides, *METHODS[method]]
    if epochs is not None:
        overrides.append(f"train.epochs={epochs}")
    scenario = load_scenario(Path("scenarios/full") / f"{case.scenario}.toml", overrides)
    result = run_scenario(scenario)
    rounds = [{key: entry.get(key) for key in _OF_ROUND} for entry in result["rounds"]]
    note(
        f"{case.key} {method} seed {seed}: {result['final_accuracy']:.4f} in {result['wall_s']:.0f} s"
    )
    own = {"scenario": case.key, "method": method, "seed": seed, "rounds": rounds}
    return own | {key: result[key] for key in _OF_RUN}


def _file(case: MixedCase, method: str, seed: int, epochs: int | None) -> Path:
    return (
        FOLDER / f"{case.key}-{method}-{seed}{'' if epochs is None else f'-{epochs}-epochs'}.json"
    )


def run(quick: bool = False, stored: bool = False) -> list[Row]:
    """Return a row for every network and method: accuracy against FP32, and the speed in virtual time.

    With `stored` only finished runs are compared.
    """
    cases = (replace(CASES[0], methods=("fp32", "paper")),) if quick else CASES
    seeds, epochs = (SEEDS[:1], 1) if quick else (SEEDS, None)
    # Seed by seed, so that finished runs can be compared after an interruption.
    runs = {
        (case.key, method, seed): run_case(case, method, seed, epochs=epochs)
        for seed in seeds
        for case in cases
        for method in case.methods
        if not stored or _file(case, method, seed, epochs).exists()
    }
    found = []
    for case in cases:
        for method in case.methods:
            pairs = [
                (runs[case.key, method, seed], runs[case.key, "fp32", seed])
                for seed in seeds
                if (case.key, method, seed) in runs and (case.key, "fp32", seed) in runs
            ]
            found += [_row(case, method, pairs, judged=not quick)] if pairs else []
    return found


def _row(
    case: MixedCase,
    method: str,
    pairs: list[tuple[dict[str, Any], dict[str, Any]]],
    *,
    judged: bool,
) -> Row:
    """Return the row of a method's runs, each paired with that of FP32 with the same seed."""
    differences = [ours["final_accuracy"] - fp32["final_accuracy"] for ours, fp32 in pairs]
    mean = statistics.mean(differences)
    speed = statistics.mean(fp32["virtual_s"] / ours["virtual_s"] for ours, fp32 in pairs)
    ours, fp32 = (
        statistics.mean(run["final_accuracy"] for run in runs) for runs in zip(*pairs, strict=True)
    )
    claimed = judged and method in ("paper", "normalised")
    return more_is_better(
        f"{case.title}, {method}, {len(pairs)} seeds: {100 * mean:+.2f} +- {100 * half_width(differences):.2f} "
        f"points, {speed:.2f}x the speed in virtual time",
        ours,
        "fp32",
        fp32,
        "accuracy",
        ok=not claimed or mean >= -case.tolerance,
    )


def write_curves(folder: Path) -> None:
    """Write all runs that are done as one JSON document and as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    runs = [
        json.loads(path.read_text())
        for path in sorted(FOLDER.glob("*.json"))
        if "epochs" not in path.stem
    ]
    (folder / "mixed-accuracy-curves.json").write_text(json.dumps(runs))
    figure, axes = plt.subplots(len(CASES), 3, figsize=(13, 3.5 * len(CASES)), layout="constrained")
    for row, case in zip(axes, CASES, strict=True):
        for method in case.methods:
            curves = [
                run["rounds"]
                for run in runs
                if run["scenario"] == case.key and run["method"] == method
            ]
            if not curves:
                continue
            times = [
                statistics.mean(entry["virtual_s"] for entry in entries)
                for entries in zip(*curves, strict=True)
            ]
            for axis, key in zip(row, ("accuracy", "copy_similarity", "cpu_share"), strict=True):
                points = [
                    (time, [entry[key] for entry in entries])
                    for time, entries in zip(times, zip(*curves, strict=True), strict=True)
                    if all(entry[key] is not None for entry in entries)
                ]
                if points:
                    axis.plot(
                        [time for time, _ in points],
                        [statistics.mean(values) for _, values in points],
                        label=method,
                    )
        for axis, what in zip(
            row,
            ("test accuracy", "similarity of copies (F9)", "gamma: the CPU's share"),
            strict=True,
        ):
            axis.set(title=case.title, xlabel="virtual seconds", ylabel=what)
        row[0].legend()
    figure.savefig(folder / "mixed-accuracy-curves.svg")


if __name__ == "__main__":
    sys.exit(main(__name__))
