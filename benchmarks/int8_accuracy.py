"""Does int8 training reach the accuracy of FP32? Equal data order, initial weights, epochs and schedule per seed.

    socflower bench int8-accuracy --json                       (about an hour and a half on one core)
    python benchmarks/int8_accuracy.py --quick                 (a small piece: LeNet, one epoch of 6,000 digits)

Rows give the accuracy on the whole test set after the last epoch, int8 against FP32, per network, algorithm and
seed. Every finished run is kept as a file in out/int8-accuracy/, with its curve, so that an interrupted benchmark
continues; `--curves FOLDER` also writes all curves there, as JSON and as a picture. Needs MNIST and CIFAR-10 in the
folder that SOCFLOWER_DATA names.
"""

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.harness import Row, kept, main, more_is_better, note
from socflower.precision import ADAPTIVE_FIXED_POINT, NITI, Int8Model, TrainingAlgorithm
from socflower.precision.algorithm import IntegerUpdate
from socflower.workloads.dataset import LabelledData
from socflower.workloads.models.classifiers import build_model
from socflower.workloads.sources import load_data

FOLDER = Path("out/int8-accuracy")
SEEDS = (0, 1, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class AccuracyCase:
    """A network on the first `num_images` of a data set."""

    model: str
    data: str
    num_images: int
    epochs: int
    learning_rate: float
    methods: tuple[str, ...]
    batch_size: int = 64


FP32 = "fp32"
# NITI's gradient bits are 5, 4, 3. Fewer bits are a smaller step, which suits short trainings
# better. With 0 bits or fewer, only the pseudo-stochastic carry changes a weight.
NITI_321 = replace(NITI, name="niti, bits 3-2-1", update=IntegerUpdate(bits=(3, 2, 1)))
NITI_210 = replace(NITI, name="niti, bits 2-1-0", update=IntegerUpdate(bits=(2, 1, 0)))
ALGORITHMS: dict[str, TrainingAlgorithm] = {
    a.name: a for a in (NITI, NITI_321, NITI_210, ADAPTIVE_FIXED_POINT)
}

SMALL_STEPS = ("niti, bits 2-1-0", "adaptive-fixed-point")
CASES = (
    AccuracyCase(
        model="lenet5", data="mnist", num_images=60_000, epochs=10, learning_rate=0.05,
        methods=("niti", "niti, bits 3-2-1", "adaptive-fixed-point"),
    ),
    AccuracyCase(model="vgg-small", data="cifar10", num_images=20_000, epochs=12, learning_rate=0.05,
    methods=SMALL_STEPS), AccuracyCase(model="resnet8", data="cifar10", num_images=20_000, epochs=12, learning_rate=0.1,
    methods=SMALL_STEPS),
)  # fmt: skip
QUICK = AccuracyCase(
    model="lenet5", data="mnist", num_images=6_000, epochs=1, learning_rate=0.05, methods=("niti",)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The test accuracies of one training, epoch by epoch."""

    case: AccuracyCase
    method: str
    seed: int
    test_accuracy: list[float]
    train_loss: list[float]
    train_s: float


class NormalisedImages:
    """A data set; a batch is normalised when it is read."""

    def __init__(self, labelled: LabelledData, num_images: int | None = None) -> None:
        self._labelled = labelled
        self.count = min(len(labelled), num_images or len(labelled))

    def batch(
        self, indices: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        images, labels = self._labelled.batch(indices)
        return images.numpy(), labels.numpy().astype(np.int32)

    def batches(
        self, batch_size: int, order: npt.NDArray[np.int64]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(0, len(order), batch_size):
            yield self.batch(order[start : start + batch_size])


def train(case: AccuracyCase, method: str, seed: int) -> Curve:
    """Train once and return the curve. Equal seeds have equal initial weights, and equal batches in equal order."""
    data = load_data(case.data)
    train_images = NormalisedImages(data.train, case.num_images)
    test_images = NormalisedImages(data.test)
    channels, size = data.train.inputs.shape[1], data.train.inputs.shape[2]
    module = build_model(
        case.model, in_channels=channels, image_size=size, num_classes=10, seed=seed
    )
    learner = (
        Fp32Learner(module)
        if method == FP32
        else Int8Learner(module, (channels, size, size), method)
    )
    order = np.random.default_rng(seed)
    steps_per_epoch = train_images.count // case.batch_size
    total, step, train_s = steps_per_epoch * case.epochs, 0, 0.0
    accuracies, losses = [], []
    for _ in range(case.epochs):
        permuted = order.permutation(train_images.count)[: steps_per_epoch * case.batch_size]
        loss = 0.0
        for images, labels in train_images.batches(case.batch_size, permuted):
            progress = step / total
            learning_rate = case.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
            start_s = time.perf_counter()
            loss += learner.step(images, labels, learning_rate, progress)
            train_s += time.perf_counter() - start_s
            step += 1
        correct = sum(
            learner.correct(*batch)
            for batch in test_images.batches(500, np.arange(test_images.count))
        )
        accuracies.append(correct / test_images.count)
        losses.append(loss / steps_per_epoch)
        note(f"{case.model} {method} seed {seed} epoch {len(losses)}: {accuracies[-1]:.4f}")
    return Curve(
        case=case,
        method=method,
        seed=seed,
        test_accuracy=accuracies,
        train_loss=losses,
        train_s=round(train_s, 1),
    )


class Fp32Learner:
    """torch, channels-last, SGD."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module.to(memory_format=torch.channels_last)
        self._optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step(
        self, images: np.ndarray, labels: np.ndarray, learning_rate: float, progress: float
    ) -> float:
        self._module.train()
        self._optimizer.param_groups[0]["lr"] = learning_rate
        self._optimizer.zero_grad()
        batch = torch.from_numpy(images).to(memory_format=torch.channels_last)
        loss = torch.nn.functional.cross_entropy(
            self._module(batch), torch.from_numpy(labels).long()
        )
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())

    def correct(self, images: np.ndarray, labels: np.ndarray) -> int:
        self._module.eval()
        with torch.no_grad():
            return int((self._module(torch.from_numpy(images)).argmax(1).numpy() == labels).sum())


class Int8Learner:
    """Our engine."""

    def __init__(
        self, module: torch.nn.Module, input_shape: tuple[int, int, int], method: str
    ) -> None:
        self._model = Int8Model.from_module(
            module, input_shape=input_shape, algorithm=ALGORITHMS[method]
        )

    def step(
        self, images: np.ndarray, labels: np.ndarray, learning_rate: float, progress: float
    ) -> float:
        return self._model.train_step(
            images, labels, learning_rate=learning_rate, progress=progress
        ).loss

    def correct(self, images: np.ndarray, labels: np.ndarray) -> int:
        return self._model.evaluate(images, labels, batch_size=500).num_correct


def run(quick: bool) -> list[Row]:
    """Train every case, method and seed that has no file yet, and compare the accuracies."""
    torch.set_num_threads(1)
    rows = []
    for case in (QUICK,) if quick else CASES:
        for seed in SEEDS[:1] if quick else SEEDS:
            methods = (*case.methods, FP32)
            runs = {
                method: train(case, method, seed) if quick else kept_curve(case, method, seed)
                for method in methods
            }
            fp32 = runs[FP32].test_accuracy[-1]
            for name in case.methods:
                ours = runs[name].test_accuracy[-1]
                rows.append(
                    more_is_better(
                        f"{case.model}, {case.num_images} images of {case.data}, {case.epochs} epochs, "
                        f"seed {seed}, {name}",
                        100 * ours,
                        "torch FP32",
                        100 * fp32,
                        "% of the test images",
                        ok=math.isfinite(runs[name].train_loss[-1]),
                    )
                )
    return rows


def write_curves(folder: Path) -> None:
    """Write all kept runs of the cases, and a picture of test accuracy by epoch, a line per method and seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    documents = []
    for case, axes in zip(CASES, figure.subplots(1, len(CASES)), strict=True):
        for index, method in enumerate((FP32, *case.methods)):
            for seed in SEEDS:
                result = kept_curve(case, method, seed)
                documents.append({**asdict(result), "case": settings_of(case)})
                label = method if seed == SEEDS[0] else None
                epochs = range(1, case.epochs + 1)
                accuracy = [100 * value for value in result.test_accuracy]
                axes.plot(
                    epochs, accuracy, color=f"C{index}", alpha=0.8, linewidth=1.2, label=label
                )
        axes.set_title(f"{case.model}, {case.num_images} images of {case.data}", fontsize=9)
        axes.set_xlabel("epoch")
        axes.legend(fontsize=7)
    figure.axes[0].set_ylabel("% of the test images")
    figure.axes[0].set_ylim(95, 99.5)
    (folder / "int8-accuracy-curves.json").write_text(json.dumps(documents, indent=1) + "\n")
    figure.savefig(folder / "int8-accuracy-curves.svg")


def settings_of(case: AccuracyCase) -> dict[str, object]:
    """Return the settings that a run's result depends on: the case without its list of methods."""
    return {key: value for key, value in asdict(case).items() if key != "methods"}


def kept_curve(case: AccuracyCase, method: str, seed: int) -> Curve:
    """Return the run from its file, or train and write the file."""
    path = FOLDER / f"{case.model}-{method.replace(', ', '-').replace(' ', '-')}-seed{seed}.json"
    if path.exists() and json.loads(path.read_text())["case"] != settings_of(case):
        path.unlink()

    def document() -> dict[str, object]:
        return {**asdict(train(case, method, seed)), "case": settings_of(case)}

    return Curve(**{**kept(path, document), "case": case})


if __name__ == "__main__":
    sys.exit(main(__name__))
