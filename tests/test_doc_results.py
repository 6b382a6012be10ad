"""The figures of docs/results.md that no generator writes are those of the files beside it, or of the commands."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.int8_pairs import SEARCH_SEED, interval
from socflower.quantities import human_joules, human_seconds
from socflower.report.quality import ACCURACY
from socflower.report.summary import prediction_table
from socflower.scenario.predicted_methods import front_of
from socflower.strategies.presets import family_of

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "results.md").read_text("utf-8")
MNIST = "scenarios/full/mnist_32_socs.toml"


def document(name: str) -> Any:
    return json.loads((DOCS / "results" / f"{name}.json").read_text("utf-8"))


def row(name: str, case: str) -> dict[str, Any]:
    return next(row for row in document(name)["rows"] if row["case"].startswith(case))


def test_every_file_of_results_is_linked_from_a_page() -> None:
    pages = "".join(
        page.read_text("utf-8") for page in [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]
    )
    files = [path.name for path in (DOCS / "results").glob("*.json")]
    assert len(files) > 30
    drawn = [
        f"{path.stem}.json" for path in (DOCS / "results").glob("*.svg")
    ]  # the data of the pictures
    linked = [*drawn, *re.findall(r"results/([\w.-]+\.json)", pages)]
    assert [name for name in files if name not in linked] == []


def test_differences_of_pairs_are_those_of_their_trainings() -> None:
    trainings = document("int8-pairs")["trainings"]
    for model in ("resnet8", "mobilenet-v1-quarter"):
        last = {
            (each["arithmetic"], each["seed"]): each["test_accuracy"][-1]
            for each in trainings
            if each["model"] == model and each["seed"] < SEARCH_SEED
        }
        seeds = [seed for arithmetic, seed in last if arithmetic == "int8"]
        assert len(seeds) == 3
        differences = [100 * (last["int8", seed] - last["fp32", seed]) for seed in seeds]
        assert interval(differences) in PAGE


def test_figures_in_sentences_are_those_of_their_files() -> None:
    predicted = [
        abs(row["ours"] / row["peer_value"] - 1)
        for row in document("bench-exchange")["rows"]
        if "predicted from the other seven" in row["case"]
    ]
    rings = [abs(row["error"]) for row in document("testbed")["rows"] if not row["compute_s"]]
    runs = [document(f"mnist_32_socs.{engine}") for engine in ("local", "simulation")]
    memory = row("bench-int8-step", "avx512-vnni: VGG-11, peak memory")
    ideal = row(
        "bench-rebalancing", "constant quotas, gloo: part of what members do in the same steps"
    )
    average = row("bench-aggregate", "32 replies of 63 tensors, time")
    adapters = {
        each["case"].rpartition("groups: ")[2]: each for each in document("bench-byte-gpt")["rows"]
    }
    hub = row("bench-hub-traffic", "perceptron of 7454760 B, 4 SuperNodes in 2 groups: to")
    recovery = [
        row["recovery_s"]
        for row in document("fault-matrix")["rows"]
        if row["recovery_s"] is not None
    ]
    again = [
        row["again_s"] for row in document("split-faults")["rows"] if row["outcome"] == "went on"
    ]
    assert len({run["weights_sha256"] for run in runs}) == 1
    said = " ".join(PAGE.split())
    third = (
        row("bench-exchange", "with a rate across boards: largest error"),
        row("bench-exchange", "with a rate across boards: largest error of a figure left out"),
    )
    truth = [
        {
            row["case"].partition(",")[0] + row["case"].rpartition(":")[2]: row["ours"]
            for row in document(name)["rows"]
            if f"of seed {name[-3:]}:" in row["case"]
        }
        for name in ("bench-truth-501", "bench-truth-502")
    ]
    again_s = {
        how: [row["ours"] for row in document("bench-recovery")["rows"] if how in row["case"]]
        for how in ("a board dies", "a board stops")
    }
    killed, hung = again_s.values()
    split = [
        abs(run["predicted_s"] / run["measured_s"] - 1) <= 0.1
        for run in document("split")["peers"]["runs"]
    ]
    median, tail = " median error", " 95th percentile"
    goodput = row("bench-goodput", "VGG-11, seed 41, goodput")["ours"]
    alone = next(
        each["peer_value"]
        for each in document("bench-goodput")["rows"]
        if each["peer"] == "local-sgd" and "goodput" in each["case"]
    )
    for text in (
        f"leaves SoCFlow {goodput:.1f} % of its work, local SGD {alone:.1f} %",
        *(
            f"{truth[0][half + kind]:.1f} and {truth[1][half + kind]:.1f} %"
            for half in ("sleeping", "computing")
            for kind in (median, tail)
        ),
        f"{min(killed):.2f} to {max(killed):.2f} s after that is noticed",
        f"{min(hung):.1f} to {max(hung):.1f} s if it hangs",
        f"the worst error is {max(predicted) * 100:.1f} %",
        f"fits all within {third[0]['ours']:.1f} %",
        f"predicts one {third[1]['ours']:.1f} % off",
        f"at most {max(rings) * 100:.1f} % off",
        f"within 10 % for {sum(split)} of {len(split)} deployments",
        f"10 epochs: {runs[0]['final_accuracy'] * 100:.2f} %",
        f"is {memory['ours']:.0f} MB, in torch {memory['peer_value']:.0f} MB",
        f"reaches {ideal['ours'] * 100:.0f} % of the ideal",
        f"with equal shares {ideal['peer_value'] * 100:.0f} %",
        f"simulated {row('bench-clock', 'VGG-11 epoch, 1,000 SoCs in')['ratio']:.1f} times",
        f"plan included, takes {row('bench-clock', 'VGG-11 epoch, 12,000 SoCs, groups')['ours']:.1f} s",
        f"ring {row('bench-clock', 'VGG-11 epoch, 12,000 SoCs, one ring')['ours']:.1f} s",
        f"up to {row('bench-simgrid', '50 random graphs of 2706 tasks, 0.1 ms')['ours'] * 100:.0f} % off",
        f"takes {row('bench-plan', '12 x 5, 20 groups, whole')['ours']:.2f} ms",
        f"takes {average['ours']:.4f} s, Flower's {average['peer_value']:.3f} s",
        f"{hub['ours'] / 1e6:.1f} MB to the SuperLink in a synchronisation, under FedAvg "
        f"{hub['peer_value'] / 1e6:.1f} MB",
        f"are {100 / adapters['hub and rings']['ratio']:.1f} % of the bytes of all 5.36 MB",
        f"makes them {adapters['hub']['ours'] / 1e3:.0f} kB, {100 / adapters['hub']['ratio']:.1f} %",
        f"within {max(recovery):.1f} s",
        f"within {max(again):.0f} s",
    ):
        assert text in said


LABELS = {
    "socflow": "SoCFlow, 32 SoCs in 8 groups",
    "sgd": "one SoC",
    "ring": "one ring of 16 SoCs",
    "local-sgd": "local SGD, 32 SoCs",
    "fedavg": "FedAvg, 32 SoCs",
}


def test_the_front_in_the_readme_is_that_of_the_stored_seeds() -> None:
    readme = " ".join((DOCS.parent / "README.md").read_text("utf-8").split())
    front = front_of(document("digits_seeds")["rows"], ACCURACY)
    assert {row["strategy"] for row in front} == set(LABELS)
    for row in front:
        time, energy = human_seconds(row["time_s"]), human_joules(row["energy_j"])
        verdict = "on the front" if row["on_front"] else "dominated"
        assert f"| {LABELS[row['strategy']]} | {time} | {energy} | {verdict} |" in readme


def test_the_demonstration_trained_the_front_of_the_readme() -> None:
    """The stored run is of another seed than the means, so that another method may have won."""
    demo, seeds = document("digits_demo"), document("digits_seeds")["rows"]
    by_seed = {(row["strategy"], row["seed"]): row for row in seeds}
    front = [row["strategy"] for row in front_of(seeds, ACCURACY) if row["on_front"]]
    assert sorted(row["strategy"] for row in demo["rows"]) == sorted({*front, "sgd"})
    for row in demo["rows"]:
        stored = by_seed[row["strategy"], row["seed"]]
        for key in (ACCURACY.time_key, ACCURACY.energy_key):
            assert row[key] == pytest.approx(stored[key], rel=0.05)
    predicted = {row["strategy"] for row in demo["methods"]["rows"]}
    assert predicted | set(demo["methods"]["refused"]) == set(family_of("socflow"))


@pytest.mark.slow
def test_the_pictures_of_the_readme_are_those_of_the_stored_seeds(tmp_path: Path) -> None:
    """Letters and numbers: positions may differ in their last digits."""
    subprocess.run([sys.executable, DOCS / "draw_picture.py", tmp_path], check=True)
    number = re.compile(r"-?\d+(?:\.\d+)?")
    for theme in ("light", "dark"):
        texts = [
            (folder / f"picture-{theme}.svg").read_text("utf-8") for folder in (DOCS, tmp_path)
        ]
        shapes = [number.sub("#", re.sub(r"\b[mp][0-9a-f]{10}\b", "", text)) for text in texts]
        assert shapes[0] == shapes[1]
        for label in LABELS.values():
            assert label in texts[0]
        points = [
            [*map(float, number.findall(" ".join(re.findall(r' (?:d|x|y)="([^"]*)"', text))))]
            for text in texts
        ]
        assert points[0] == pytest.approx(points[1], abs=0.5)


def test_predictions_in_the_readme_are_those_of_the_demonstration() -> None:
    readme = " ".join((DOCS.parent / "README.md").read_text("utf-8").split())
    demo = document("digits_demo")
    predicted = prediction_table(demo["predictions"])
    for row, label in zip(
        predicted["rows"],
        (
            "VGG-11, FP32",
            "VGG-11, CPU and NPU at once",
            "ResNet-18, FP32",
            "ResNet-18, CPU and NPU at once",
        ),
        strict=True,
    ):
        cells = [*map(human_seconds, row["best_epoch_s"]), f"{row['best_gain']:.2f} times"]
        assert f"| {label} | {' | '.join(cells)} |" in readme
