"""Does training on CPU and NPU at once keep the accuracy of FP32? SoCFlow+ Fig. 15 on 32 virtual SoCs in 8 groups.

    python benchmarks/mixed_accuracy.py --json --curves docs/results    (hours; goes on where it was cut)
    python benchmarks/mixed_accuracy.py --quick                         (one epoch of one network, one seed)

The scenarios are scenarios/full/mixed_mnist.toml and mixed_cifar10.toml: whole data sets, real gradients, every
rule on equal samples in equal order from equal weights, seed by seed. Beside the five rules of mixed precision stands
training in int8 alone with NITI, whose weights are int8 too. Rows give the mean accuracy against that of FP32 on the
same seeds. Every run that is done is kept in out/mixed-accuracy/. Needs MNIST and CIFAR-10 in SOCFLOWER_DATA.
"""

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Row, main
from socflower.precision import MIXING_RULES
from socflower.scenario.runner import run_scenario
from socflower.scenario.scenario_file import load_scenario

FOLDER = Path("out/mixed-accuracy")
SEEDS = (1, 2, 3)
SCENARIOS = {"LeNet-5, MNIST": "mixed_mnist", "ResNet-8, CIFAR-10": "mixed_cifar10"}
NITI = "niti"
METHODS: dict[str, list[str]] = {
    **{rule: [f"precision.rule={rule}"] for rule in MIXING_RULES},
    # Small steps, which suit short trainings best (benchmarks/int8_accuracy.py), and the samples that mixed sets aside.
    NITI: ["precision.arithmetic=int8", "precision.gradient_bits=[2, 1, 0]", "precision.held_out=128"],
}
TOLERANCE = {"mixed_mnist": 0.005, "mixed_cifar10": 0.01}
"""How far below FP32 the accuracy of the paper's and the normalised rule may lie."""

# Student's t, two-sided 95 %, by degrees of freedom.
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}


def run_case(name: str, method: str, seed: int, *, epochs: int | None = None, folder: Path = FOLDER) -> dict[str, Any]:
    """Return accuracy, alpha, CPU share and virtual time of a run by round; from its file if it was done before."""
    path = folder / f"{name}-{method}-{seed}{'' if epochs is None else f'-{epochs}-epochs'}.json"
    if path.exists():
        return dict(json.loads(path.read_text()))
    overrides = [f"seed={seed}", *METHODS[method], *([] if epochs is None else [f"train.epochs={epochs}"])]
    result = run_scenario(load_scenario(Path("scenarios/full") / f"{name}.toml", overrides))
    document = {
        "scenario": name, "method": method, "seed": seed,
        "rounds": [{key: entry.get(key) for key in ("epoch", "accuracy", "alpha", "cpu_share", "virtual_s", "energy_j")}
                   for entry in result["rounds"]],
        "final_accuracy": result["final_accuracy"], "virtual_s": result["virtual_s"], "energy_j": result["energy_j"],
        "wall_s": result["wall_s"], "weights_sha256": result["weights_sha256"], "kernels": result["kernels"],
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(document))
    partial.replace(path)
    print(f"{name} {method} seed {seed}: {document['final_accuracy']:.4f} in {document['wall_s']:.0f} s",
          file=sys.stderr, flush=True)
    return document


def paired_interval(differences: list[float]) -> float:
    """Return the half width of the 95 % interval of the mean of paired differences; infinity of a single one."""
    if len(differences) < 2:
        return math.inf
    return _T95[len(differences) - 1] * statistics.stdev(differences) / math.sqrt(len(differences))


def run(quick: bool = False) -> list[Row]:
    """Return a row for every network and method: accuracy against FP32, energy and virtual time in its name."""
    scenarios = {"LeNet-5, MNIST": "mixed_mnist"} if quick else SCENARIOS
    seeds, epochs = (SEEDS[:1], 1) if quick else (SEEDS, None)
    # Seed by seed, so that what is there after a cut can be compared.
    runs = {(title, method, seed): run_case(name, method, seed, epochs=epochs)
            for seed in seeds for title, name in scenarios.items() for method in METHODS}
    found = []
    for title, name in scenarios.items():
        reference = [runs[title, "fp32", seed]["final_accuracy"] for seed in seeds]
        for method in METHODS:
            accuracies = [runs[title, method, seed]["final_accuracy"] for seed in seeds]
            differences = [ours - fp32 for ours, fp32 in zip(accuracies, reference, strict=True)]
            gain = statistics.mean(runs[title, "fp32", seed]["virtual_s"] / runs[title, method, seed]["virtual_s"]
                                   for seed in seeds)
            mean = statistics.mean(differences)
            claimed = method in ("paper", "normalised") and not quick
            found.append(Row(
                case=f"{title}, {method}: {100 * mean:+.2f} +- {100 * paired_interval(differences):.2f} points, "
                     f"{gain:.2f}x the speed in virtual time",
                ours=statistics.mean(accuracies), peer="fp32", peer_value=statistics.mean(reference), unit="accuracy",
                ratio=statistics.mean(accuracies) / statistics.mean(reference),
                ok=not claimed or mean >= -TOLERANCE[name],
            ))  # fmt: skip
    return found


def write_curves(folder: Path) -> None:
    """Write all runs that are done as one JSON document and as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    runs = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json")) if "epochs" not in path.stem]
    (folder / "mixed-accuracy-curves.json").write_text(json.dumps(runs))
    figure, axes = plt.subplots(2, 3, figsize=(13, 7), layout="constrained")
    for row, (title, name) in zip(axes, SCENARIOS.items(), strict=True):
        for method in METHODS:
            curves = [run["rounds"] for run in runs if run["scenario"] == name and run["method"] == method]
            if not curves:
                continue
            times = [statistics.mean(entry["virtual_s"] for entry in entries) for entries in zip(*curves, strict=True)]
            for axis, key in zip(row, ("accuracy", "alpha", "cpu_share"), strict=True):
                points = [(time, [entry[key] for entry in entries])
                          for time, entries in zip(times, zip(*curves, strict=True), strict=True)
                          if all(entry[key] is not None for entry in entries)]
                if points:
                    axis.plot([time for time, _ in points], [statistics.mean(values) for _, values in points],
                              label=method)
        for axis, what in zip(row, ("test accuracy", "alpha (F9)", "gamma: the CPU's share"), strict=True):
            axis.set(title=title, xlabel="virtual seconds", ylabel=what)
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
