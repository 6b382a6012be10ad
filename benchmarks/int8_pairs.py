"""Does `int8_` reach the accuracy of FP32 on whole CIFAR-10, with one recipe and an ordinary learning rate?

    socflower bench int8-pairs --json                      (about six hours on one core)
    python -m benchmarks int8-pairs --quick             (one epoch of 2,560 images in each arithmetic)

A pair is one network trained twice by the same loop of torch, once after `int8_(module)`: equal initial weights, equal
batches in equal order, equal augmentation, optimiser and schedule. FP32's learning rate is the best of `RATES` in
shorter trainings with a seed of their own; int8 takes it over. Rows give the accuracy on the whole test set after the
last epoch, and for each network the mean difference with its 95 % interval.

Finished trainings are in docs/results/int8-pairs.json, with their curves, and are not done again; an interrupted one
goes on from its last epoch, kept in out/int8-pairs/. Needs CIFAR-10 in the folder that SOCFLOWER_DATA names.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness import Row, from_json, half_width, more_is_better, note, write_json
from socflower.errors import TrainingFailed
from socflower.training.int8_module import int8_
from socflower.workloads.dataset import LabelledData
from socflower.workloads.models.classifiers import mobilenet_v1, resnet8
from socflower.workloads.sources import load_data

STORE = Path(__file__).resolve().parents[1] / "docs" / "results" / "int8-pairs.json"
CHECKPOINTS = Path("out/int8-pairs")
ARITHMETICS = ("fp32", "int8")
SEARCH_SEED = 100
BATCH_SIZE = 128
_IMAGE = {"in_channels": 3, "image_size": 32, "num_classes": 10}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """An optimiser, with the learning rates that FP32 is searched over."""

    optimizer: str
    rates: tuple[float, ...]
    weight_decay: float


SGD = Recipe(optimizer="sgd", rates=(0.05, 0.1, 0.2, 0.4, 0.8), weight_decay=5e-4)
ADAMW = Recipe(optimizer="adamw", rates=(0.0005, 0.001, 0.002, 0.004, 0.008), weight_decay=0.05)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A network, how long it trains on the first `num_images`, and how long in the search for a rate."""

    model: str
    recipe: Recipe
    epochs: int
    seeds: tuple[int, ...]
    num_images: int = 50_000
    search_epochs: int = 3
    search_images: int = 12_800


CASES = (
    Case(model="resnet9-half", recipe=SGD, epochs=8, seeds=(1, 2, 3, 4, 5)),
    Case(model="resnet8", recipe=SGD, epochs=8, seeds=(1, 2, 3)),
    Case(model="mobilenet-v1-quarter", recipe=SGD, epochs=8, seeds=(1, 2, 3)),
    Case(model="vit-tiny", recipe=ADAMW, epochs=4, seeds=(1, 2, 3)),
)
QUICK = Case(model="resnet8", recipe=SGD, epochs=1, seeds=(1,), num_images=2_560)


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A finished training: its settings, and test accuracy and mean training loss epoch by epoch."""

    model: str
    arithmetic: str
    seed: int
    epochs: int
    num_images: int
    learning_rate: float
    test_accuracy: tuple[float, ...]
    train_loss: tuple[float, ...]
    processor_s: float
    # Why it ended before its last epoch, if it did: then the accuracy is that of the last whole epoch.
    ended: str = ""


class Residual(nn.Module):
    """Return x + body(x)."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (n, channels, h, w) to the same shape."""
        output: Tensor = inputs + self.body(inputs)
        return output


def _convolution(in_channels: int, out_channels: int, *, pooled: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pooled else []))


def resnet9_half() -> nn.Module:
    """Return the ResNet-9 of DAWNBench (Page 2018) at half its width: 1.65 million parameters."""
    return nn.Sequential(
        _convolution(3, 32),
        _convolution(32, 64, pooled=True),
        Residual(nn.Sequential(_convolution(64, 64), _convolution(64, 64))),
        _convolution(64, 128, pooled=True),
        _convolution(128, 256, pooled=True),
        Residual(nn.Sequential(_convolution(256, 256), _convolution(256, 256))),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


class VitTiny(nn.Module):
    """A vision transformer of four layers of 128 features on 64 patches of 4x4 pixels: 0.8 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 128, kernel_size=4, stride=4)
        self.positions = nn.Parameter(torch.zeros(1, 64, 128))
        nn.init.normal_(self.positions, std=0.02)
        layer = nn.TransformerEncoderLayer(
            128, 4, 512, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (n, 3, 32, 32) to logits (n, 10)."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        features = self.norm(self.encoder(patches + self.positions))
        logits: Tensor = self.head(features.mean(dim=1))
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet9-half": resnet9_half,
    "resnet8": lambda: resnet8(**_IMAGE),
    "mobilenet-v1-quarter": lambda: mobilenet_v1(**_IMAGE, width=0.25),
    "vit-tiny": VitTiny,
}


def train(
    case: Case, arithmetic: str, seed: int, learning_rate: float, *, checkpoint: Path | None = None
) -> Training:
    """Train once, from the last epoch in `checkpoint` on if there is one."""
    data = load_data("cifar10")
    torch.manual_seed(seed)
    module = MODELS[case.model]()
    if arithmetic == "int8":
        int8_(module, unsupported="refuse")
    else:
        module = module.to(memory_format=torch.channels_last)
    steps_per_epoch = case.num_images // BATCH_SIZE
    optimizer = _optimizer(case.recipe, module, learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=learning_rate,
        total_steps=case.epochs * steps_per_epoch,
        pct_start=0.25,
        cycle_momentum=False,
        anneal_strategy="linear",
    )
    accuracies: list[float] = []
    losses: list[float] = []
    processor_s = 0.0
    if checkpoint is not None and checkpoint.exists():
        kept = torch.load(checkpoint, weights_only=True)
        module.load_state_dict(kept["module"])
        optimizer.load_state_dict(kept["optimizer"])
        schedule.load_state_dict(kept["schedule"])
        accuracies, losses, processor_s = kept["curve"]
    ended, what = "", f"{case.model} {arithmetic} seed {seed} rate {learning_rate:g}"
    for epoch in range(len(losses), case.epochs):
        begun_s = time.process_time()
        batches = _augmented_batches(data.train, case.num_images, seed, epoch)
        try:
            loss_sum = _train_epoch(module, optimizer, schedule, batches)
        except TrainingFailed as failure:
            ended = f"epoch {epoch + 1}: {failure}"
            note(f"{what}: {ended}")
            break
        processor_s += time.process_time() - begun_s
        losses.append(loss_sum / steps_per_epoch)
        accuracies.append(_accuracy(module, data.test))
        note(f"{what} epoch {epoch + 1}: loss {losses[-1]:.3f}, {accuracies[-1]:.4f} right")
        if checkpoint is not None:
            _keep(checkpoint, module, optimizer, schedule, [accuracies, losses, processor_s])
    return Training(
        model=case.model,
        arithmetic=arithmetic,
        seed=seed,
        epochs=case.epochs,
        num_images=case.num_images,
        learning_rate=learning_rate,
        test_accuracy=tuple(accuracies),
        train_loss=tuple(losses),
        processor_s=round(processor_s, 1),
        ended=ended,
    )


def _train_epoch(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    batches: Iterator[tuple[Tensor, Tensor]],
) -> float:
    """Train on all batches; return the sum of their losses."""
    module.train()
    loss_sum = 0.0
    for images, labels in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(module(images), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        loss_sum += float(loss.detach())
    return loss_sum


def _optimizer(recipe: Recipe, module: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(
            module.parameters(), lr=learning_rate, weight_decay=recipe.weight_decay
        )
    return torch.optim.SGD(
        module.parameters(),
        lr=learning_rate,
        momentum=0.9,
        weight_decay=recipe.weight_decay,
        nesterov=True,
    )


def _augmented_batches(
    data: LabelledData, num_images: int, seed: int, epoch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield normalised batches, moved by up to 4 pixels and mirrored; seed and epoch determine all of them."""
    random = torch.Generator().manual_seed(1_000 * seed + epoch)
    order = torch.randperm(num_images, generator=random)
    for rows in order.split(BATCH_SIZE):
        if len(rows) < BATCH_SIZE:
            return
        images, labels = data.batch(rows.numpy())
        padded = functional.pad(images, (4, 4, 4, 4))
        top, left = torch.randint(0, 9, (2, len(rows), 1, 1), generator=random)
        pixels = torch.arange(32)
        moved = padded[
            torch.arange(len(rows)).view(-1, 1, 1, 1),
            torch.arange(3).view(1, -1, 1, 1),
            (top + pixels.view(1, -1)).view(len(rows), 1, 32, 1),
            (left + pixels.view(1, -1)).view(len(rows), 1, 1, 32),
        ]
        mirrored = torch.rand(len(rows), 1, 1, 1, generator=random) < 0.5
        yield torch.where(mirrored, moved.flip(3), moved), labels.long()


def _accuracy(module: nn.Module, data: LabelledData) -> float:
    module.eval()
    num_right = 0
    with torch.no_grad():
        for rows in torch.arange(len(data)).split(500):
            images, labels = data.batch(rows.numpy())
            num_right += int((module(images).argmax(1) == labels).sum())
    return num_right / len(data)


def _keep(
    path: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    curve: list[Any],
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    state = {
        "module": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "curve": curve,
    }
    torch.save(state, partial)
    partial.replace(path)


class Store:
    """The finished trainings in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def trainings(self) -> list[Training]:
        """Return all of them."""
        if not self._path.exists():
            return []
        return from_json(list[Training], json.loads(self._path.read_text("utf-8"))["trainings"])

    def training(self, case: Case, arithmetic: str, seed: int, learning_rate: float) -> Training:
        """Return a training, done now if the file does not have it."""
        wanted = (case.model, arithmetic, seed, case.epochs, case.num_images, learning_rate)
        for one in self.trainings():
            known = (one.model, one.arithmetic, one.seed, one.epochs, one.num_images)
            if (*known, one.learning_rate) == wanted:
                return one
        name = "-".join(str(part) for part in wanted)
        done = train(
            case, arithmetic, seed, learning_rate, checkpoint=CHECKPOINTS / f"{name}.checkpoint"
        )
        # Read again: another process may have added its own.
        documents = [asdict(one) for one in (*self.trainings(), done)]
        write_json(self._path, {"trainings": documents})
        return done


def best_rate(case: Case, store: Store) -> float:
    """Return FP32's learning rate: of the least training loss at the end of the shorter trainings."""
    short = Case(
        model=case.model,
        recipe=case.recipe,
        epochs=case.search_epochs,
        seeds=(SEARCH_SEED,),
        num_images=case.search_images,
    )
    losses = {
        rate: store.training(short, "fp32", SEARCH_SEED, rate).train_loss[-1]
        for rate in case.recipe.rates
    }
    return min(losses, key=lambda rate: losses[rate])


def run(quick: bool, network: int = 0, pairs: int = 5) -> list[Row]:
    """Train what is missing and compare; `network` 1 to 4 takes one case, `pairs` limits the seeds of each."""
    torch.set_num_threads(1)
    if quick:
        fp32, int8 = (train(QUICK, arithmetic, 1, 0.1) for arithmetic in ARITHMETICS)
        return [_row(QUICK, f"seed {fp32.seed}", int8.test_accuracy[-1], fp32.test_accuracy[-1])]
    store = Store(STORE)
    rows = []
    for case in CASES if network == 0 else (CASES[network - 1],):
        rate = best_rate(case, store)
        differences = []
        for seed in case.seeds[:pairs]:
            fp32, int8 = (
                store.training(case, arithmetic, seed, rate) for arithmetic in ARITHMETICS
            )
            ended = "".join(
                f", {one.arithmetic} ended in {one.ended}" for one in (fp32, int8) if one.ended
            )
            accuracies = int8.test_accuracy[-1], fp32.test_accuracy[-1]
            rows.append(_row(case, f"rate {rate:g}, seed {seed}{ended}", *accuracies, ok=not ended))
            differences.append(100 * (accuracies[0] - accuracies[1]))
        note(f"{case.model}: int8 - FP32 = {interval(differences)} points")
    return rows


def interval(differences: list[float]) -> str:
    """Return a mean with its 95 % interval, as text."""
    mean = statistics.mean(differences)
    if len(differences) < 2:
        return f"{mean:+.2f}"
    return f"{mean:+.2f} ± {half_width(differences):.2f}"


def _row(case: Case, what: str, int8: float, fp32: float, *, ok: bool = True) -> Row:
    return more_is_better(
        f"{case.model}, {case.num_images} images, {case.epochs} epochs, {what}",
        100 * int8,
        "torch FP32",
        100 * fp32,
        "% of the test images",
        ok=ok,
    )
