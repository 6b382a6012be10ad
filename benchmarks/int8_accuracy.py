"""Does int8 training reach the accuracy of FP32? Equal data order, initial weights, epochs and schedule per seed.

    socflower bench int8-accuracy --json                       (about an hour and a half on one core)
    python benchmarks/int8_accuracy.py --quick                 (a small piece: LeNet, one epoch of 6,000 digits)

Rows give the accuracy on the whole test set after the last epoch, int8 against FP32, per network, algorithm and
seed. Every run that is done is kept as a file in out/int8-accuracy/, with its curve, so a cut run goes on where it
stopped; --fresh starts anew, and `--curves FOLDER` also writes all curves there, as JSON and as a picture. Needs
MNIST and CIFAR-10 in the folder that SOCFLOWER_DATA names.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Row, main
from socflower.precision import ADAPTIVE_FIXED_POINT, NITI, Int8Model, TrainingAlgorithm
from socflower.precision.algorithm import IntegerUpdate
from socflower.workloads.dataset import LabelledData
from socflower.workloads.models import build_model
from socflower.workloads.sources import load_data

FOLDER = Path("out/int8-accuracy")
SEEDS = (0, 1, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A network on the first `num_images` of a data set."""

    model: str
    data: str
    num_images: int
    epochs: int
    learning_rate: float
    methods: tuple[str, ...]
    batch_size: int = 64


FP32 = "fp32"
# NITI's gradient bits are 5, 4, 3; fewer are a smaller step, which suits short trainings better. With 0 bits and
# fewer, only the pseudo-stochastic carry moves a weight.
NITI_321 = replace(NITI, name="niti, bits 3-2-1", update=IntegerUpdate(bits=(3, 2, 1)))
NITI_210 = replace(NITI, name="niti, bits 2-1-0", update=IntegerUpdate(bits=(2, 1, 0)))
ALGORITHMS: dict[str, TrainingAlgorithm] = {
    a.name: a for a in (NITI, NITI_321, NITI_210, ADAPTIVE_FIXED_POINT)
}

SMALL_STEPS = ("niti, bits 2-1-0", "adaptive-fixed-point")
CASES = (
    Case(
        model="lenet5", data="mnist", num_images=60_000, epochs=10, learning_rate=0.05,
        methods=("niti", "niti, bits 3-2-1", "adaptive-fixed-point"),
    ),
    Case(model="vgg-small", data="cifar10", num_images=20_000, epochs=12, learning_rate=0.05, methods=SMALL_STEPS),
    Case(model="resnet8", data="cifar10", num_images=20_000, epochs=12, learning_rate=0.1, methods=SMALL_STEPS),
)  # fmt: skip
QUICK = Case(
    model="lenet5", data="mnist", num_images=6_000, epochs=1, learning_rate=0.05, methods=("niti",)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The test accuracies of one training, epoch by epoch."""

    case: Case
    method: str
    seed: int
    test_accuracy: list[float]
    train_loss: list[float]
    train_s: float


class Images:
    """A data set, normalised a batch at a time."""

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


def train(case: Case, method: str, seed: int) -> Run:
    """Train once and return the curve; equal seeds see equal batches in equal order from equal weights."""
    data = load_data(case.data)
    train_images, test_images = Images(data.train, case.num_images), Images(data.test)
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
        print(
            f"{case.model} {method} seed {seed} epoch {len(losses)}: {accuracies[-1]:.4f}",
            file=sys.stderr,
        )
    return Run(
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
    """Train every case, method and seed that no file has yet, and compare the accuracies."""
    torch.set_num_threads(1)
    if "--fresh" in sys.argv[1:]:
        for path in FOLDER.glob("*.json"):
            path.unlink()
    rows = []
    for case in (QUICK,) if quick else CASES:
        for seed in SEEDS[:1] if quick else SEEDS:
            methods = (*case.methods, FP32)
            runs = {
                method: train(case, method, seed) if quick else kept(case, method, seed)
                for method in methods
            }
            fp32 = runs[FP32].test_accuracy[-1]
            for name in case.methods:
                ours = runs[name].test_accuracy[-1]
                rows.append(
                    Row(
                        case=f"{case.model}, {case.num_images} images of {case.data}, {case.epochs} epochs, "
                        f"seed {seed}, {name}",
                        ours=100 * ours,
                        peer="torch FP32",
                        peer_value=100 * fp32,
                        unit="% of the test images",
                        ratio=ours / fp32,
                        ok=math.isfinite(runs[name].train_loss[-1]),
                    )
                )
    if "--curves" in sys.argv[1:]:
        write_curves(Path(sys.argv[sys.argv.index("--curves") + 1]))
    return rows


def write_curves(folder: Path) -> None:
    """Write every kept run of the cases, and a picture: test accuracy by epoch, one line per method and seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    documents = []
    for case, axes in zip(CASES, figure.subplots(1, len(CASES)), strict=True):
        for index, method in enumerate((FP32, *case.methods)):
            for seed in SEEDS:
                result = kept(case, method, seed)
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
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "int8-accuracy-curves.json").write_text(json.dumps(documents, indent=1) + "\n")
    figure.savefig(folder / "int8-accuracy-curves.svg")


def settings_of(case: Case) -> dict[str, object]:
    """Return what a run's result depends on: all of the case but the other methods."""
    return {key: value for key, value in asdict(case).items() if key != "methods"}


def kept(case: Case, method: str, seed: int) -> Run:
    """Return the run from its file, or train and write the file."""
    path = FOLDER / f"{case.model}-{method.replace(', ', '-').replace(' ', '-')}-seed{seed}.json"
    settings = settings_of(case)
    if path.exists():
        document = json.loads(path.read_text())
        if document["case"] == settings:
            return Run(**{**document, "case": case})
    result = train(case, method, seed)
    FOLDER.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps({**asdict(result), "case": settings}, indent=1))
    partial.replace(path)
    return result


if __name__ == "__main__":
    sys.exit(main(run))
