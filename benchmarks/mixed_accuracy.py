"""Does training on CPU and NPU at once keep the accuracy of FP32? SoCFlow+ Fig. 15 on 32 virtual SoCs in 8 groups.

    python benchmarks/mixed_accuracy.py --json --curves docs/results    (hours; goes on where it was cut)
    python benchmarks/mixed_accuracy.py --stored --json                 (only the runs that are done)
    python benchmarks/mixed_accuracy.py --quick                         (one epoch of one network, one seed)

The scenarios are scenarios/full/mixed_mnist.toml and mixed_cifar10.toml, the latter also with LeNet-5: whole data sets,
real gradients, every rule on equal samples in equal order from equal weights, seed by seed. Beside the five rules of
mixed precision stands training in int8 alone with NITI, whose weights are int8 too; and for ResNet-8 FP32 with half
the batch on each SoC, which tells what splitting a batch costs BatchNorm from what int8 costs. Rows give the mean
accuracy against that of FP32 on the same seeds. Every run that is done is kept in out/mixed-accuracy/. Needs MNIST and
CIFAR-10 in SOCFLOWER_DATA.
"""

import json
import math
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Row, main
from socflower.precision import MIXING_RULES
from socflower.scenario.runner import run_scenario
from socflower.scenario.schema.file import load_scenario

FOLDER = Path("out/mixed-accuracy")
SEEDS = (1, 2, 3)
NITI, HALVES = "niti", "fp32-in-halves"
METHODS: dict[str, list[str]] = {
    **{rule: [f"precision.rule={rule}"] for rule in MIXING_RULES},
    # Small steps, which suit short trainings best (benchmarks/int8_accuracy.py), and the samples that mixed sets aside.
    NITI: [
        "precision.arithmetic=int8",
        "precision.gradient_bits=[2, 1, 0]",
        "precision.held_out=128",
    ],
    # FP32 on twice the SoCs in as many groups: what halving a SoC's batch costs a network with BatchNorm.
    HALVES: ["precision.rule=fp32", "cluster.boards=13", "strategy.socs=64"],
}
FIVE_RULES = (*MIXING_RULES, NITI)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A network and data set, how it is trained, and what its accuracy may lose."""

    title: str
    key: str  # in the names of the kept files
    scenario: str
    overrides: tuple[str, ...] = ()
    methods: tuple[str, ...] = FIVE_RULES
    tolerance: float


CASES = (
    Case(title="LeNet-5, MNIST", key="mixed_mnist", scenario="mixed_mnist", tolerance=0.005),
    Case(title="LeNet-5, CIFAR-10", key="mixed_cifar10_lenet5", scenario="mixed_cifar10", tolerance=0.01,
         overrides=("model.name=lenet5", "train.learning_rate=0.02")),
    Case(title="ResNet-8, CIFAR-10", key="mixed_cifar10", scenario="mixed_cifar10", tolerance=0.01,
         methods=(*FIVE_RULES, HALVES)),
)  # fmt: skip

# Student's t, two-sided 95 %, by degrees of freedom.
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}


def run_case(case: Case, method: str, seed: int, *, epochs: int | None = None) -> dict[str, Any]:
    """Return accuracy, alpha, CPU share and virtual time of a run by round; from its file if it was done before."""
    path = _file(case, method, seed, epochs)
    if path.exists():
        return dict(json.loads(path.read_text()))
    overrides = [
        f"seed={seed}",
        *case.overrides,
        *METHODS[method],
        *([] if epochs is None else [f"train.epochs={epochs}"]),
    ]
    result = run_scenario(
        load_scenario(Path("scenarios/full") / f"{case.scenario}.toml", overrides)
    )
    document = {
        "scenario": case.key, "method": method, "seed": seed,
        "rounds": [{key: entry.get(key) for key in ("epoch", "accuracy", "alpha", "cpu_share", "virtual_s", "energy_j")}
                   for entry in result["rounds"]],
        "final_accuracy": result["final_accuracy"], "virtual_s": result["virtual_s"], "energy_j": result["energy_j"],
        "wall_s": result["wall_s"], "weights_sha256": result["weights_sha256"], "kernels": result["kernels"],
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(document))
    partial.replace(path)
    print(
        f"{case.key} {method} seed {seed}: {document['final_accuracy']:.4f} in {document['wall_s']:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return document


def _file(case: Case, method: str, seed: int, epochs: int | None) -> Path:
    return (
        FOLDER / f"{case.key}-{method}-{seed}{'' if epochs is None else f'-{epochs}-epochs'}.json"
    )


def paired_interval(differences: list[float]) -> float:
    """Return the half width of the 95 % interval of the mean of paired differences; infinity of a single one."""
    if len(differences) < 2:
        return math.inf
    return _T95[len(differences) - 1] * statistics.stdev(differences) / math.sqrt(len(differences))


def run(quick: bool = False) -> list[Row]:
    """Return a row for every network and method: accuracy against FP32, and the speed in virtual time."""
    cases = (replace(CASES[0], methods=("fp32", "paper")),) if quick else CASES
    seeds, epochs = (SEEDS[:1], 1) if quick else (SEEDS, None)
    # Seed by seed, so that what is there after a cut can be compared.
    runs = {
        (case.key, method, seed): run_case(case, method, seed, epochs=epochs)
        for seed in seeds
        for case in cases
        for method in case.methods
        if "--stored" not in sys.argv or _file(case, method, seed, epochs).exists()
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
    case: Case, method: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]], *, judged: bool
) -> Row:
    """Return the row of a method's runs, each paired with that of FP32 with the same seed."""
    differences = [ours["final_accuracy"] - fp32["final_accuracy"] for ours, fp32 in pairs]
    mean = statistics.mean(differences)
    speed = statistics.mean(fp32["virtual_s"] / ours["virtual_s"] for ours, fp32 in pairs)
    ours, fp32 = (
        statistics.mean(run["final_accuracy"] for run in runs) for runs in zip(*pairs, strict=True)
    )
    claimed = judged and method in ("paper", "normalised")
    return Row(
        case=f"{case.title}, {method}, {len(pairs)} seeds: {100 * mean:+.2f} +- "
             f"{100 * paired_interval(differences):.2f} points, {speed:.2f}x the speed in virtual time",
        ours=ours, peer="fp32", peer_value=fp32, unit="accuracy", ratio=ours / fp32,
        ok=not claimed or mean >= -case.tolerance,
    )  # fmt: skip


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
            for axis, key in zip(row, ("accuracy", "alpha", "cpu_share"), strict=True):
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
            row, ("test accuracy", "alpha (F9)", "gamma: the CPU's share"), strict=True
        ):
            axis.set(title=case.title, xlabel="virtual seconds", ylabel=what)
        row[0].legend()
    figure.savefig(folder / "mixed-accuracy-curves.svg")


if __name__ == "__main__":
    if "--curves" in sys.argv:
        position = sys.argv.index("--curves")
        target = Path(sys.argv[position + 1])
        del sys.argv[position : position + 2]
        main(run)
        write_curves(target)
    else:
        main(run)
