"""Small models, made-up samples, and local training with plain torch, which split training is compared with."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from socflower.edgecloud.half_protocols import Weights
from socflower.edgecloud.runtime.back import TorchBack
from socflower.edgecloud.runtime.front import Samples, TorchFront
from socflower.model_graph.cut_points import SplitModel, capture_split
from socflower.model_graph.parts import random_streams, start_stream
from socflower.workloads.models.classifiers import build_model
from tests.seeded import built

BATCH_SIZE = 4
LOSS = nn.functional.cross_entropy


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.first(inputs)) + inputs)


def chain(seed: int = 0, *, dropout: float = 0.3, inplace: bool = False) -> nn.Sequential:
    """Return a model of 6 features and 3 classes with all that makes halves differ: norms, masks, a residual block."""
    return built(
        lambda: nn.Sequential(
            nn.Linear(6, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(inplace=inplace),
            nn.Dropout(dropout),
            Block(8),
            nn.Linear(8, 8),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(8, 8),
            nn.ReLU(inplace=inplace),
            nn.Linear(8, 3),
        ),
        seed,
    )


def image_model(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """Return a model of the workloads and the shape of its samples."""
    channels, size = (1, 28) if name == "lenet5" else (3, 32)
    made = {"in_channels": channels, "image_size": size, "num_classes": 10, "seed": 5}
    return build_model(name, **made), (channels, size, size)


@dataclass(frozen=True)
class Source:
    """Batches that are a function of their number."""

    shape: tuple[int, ...] = (6,)
    num_classes: int = 3

    def __call__(self, batch: int) -> Samples:
        rng = np.random.default_rng(batch)
        labels = rng.integers(0, self.num_classes, BATCH_SIZE)
        inputs = rng.normal(size=(BATCH_SIZE, *self.shape)).astype(np.float32)
        return torch.from_numpy(inputs), labels, np.arange(BATCH_SIZE) + BATCH_SIZE * batch


def sgd(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.05, momentum=0.9, weight_decay=1e-3)


def adam(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(weights, lr=0.01)


def falling(batch: int) -> float:
    return 1.0 / (1.0 + 0.3 * batch)


Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def train_locally(
    split: SplitModel,
    num_batches: int,
    optimizer: Optimizer,
    *,
    source: Callable[[int], Samples] = Source(),
    seed: int = 0,
    loss: Callable[..., torch.Tensor] = LOSS,
    evaluating: Sequence[str] = (),
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a copy of the undivided model as anyone would in torch; layers that draw begin their streams by hooks."""
    model = copy.deepcopy(split.model)
    model.train()
    for path in evaluating:
        model.get_submodule(path).eval()
    modules = dict(model.named_modules())
    for stream, path in split.random_layers.items():
        modules[path].register_forward_pre_hook(lambda *_, stream=stream: start_stream(stream))
    updates = optimizer([weight for weight in model.parameters() if weight.requires_grad])
    rates = [group["lr"] for group in updates.param_groups]
    losses: list[float] = []
    for batch in range(num_batches):
        inputs, labels, _ = source(batch)
        for group, rate in zip(updates.param_groups, rates, strict=True):
            group["lr"] = rate * falling(batch)
        updates.zero_grad()
        with random_streams(seed, batch):
            outputs = model(inputs)
        result = loss(outputs, torch.from_numpy(labels))
        result.backward()
        updates.step()
        losses.append(result.item())
    return losses, model.state_dict()


def halves(
    split: SplitModel,
    cut: int,
    optimizer: Optimizer,
    source: Callable[[int], Samples] = Source(),
) -> tuple[TorchFront, TorchBack]:
    front = TorchFront(split.copy(), cut, source, optimizer, schedule=falling, loss=LOSS)
    return front, TorchBack(split.copy(), cut, optimizer, LOSS, schedule=falling)


def chain_split(**settings: bool | float) -> SplitModel:
    return capture_split(chain(**settings), (6,))  # type: ignore[arg-type]


def assert_same(weights: Weights, expected: dict[str, torch.Tensor]) -> None:
    """Require the very bits."""
    assert set(weights) == set(expected)
    pairs = {name: (weights[name], value.numpy()) for name, value in expected.items()}
    different = [name for name, pair in pairs.items() if not np.array_equal(*pair)]
    assert not different, f"{different} differ"


def assert_together(pair: tuple[TorchFront, TorchBack], expected: dict[str, torch.Tensor]) -> None:
    """Require the very bits of both halves."""
    assert_same({**pair[0].weights(), **pair[1].weights()}, expected)


def move(front: TorchFront, back: TorchBack, cut: int) -> None:
    if cut < front.cut:
        back.import_layers(cut, front.export_layers(cut))
    elif cut > front.cut:
        front.import_layers(cut, back.export_layers(cut))


def one_batch(front: TorchFront, back: TorchBack, batch: int, *, keep_graph: bool = True) -> float:
    """Train on one batch with nothing else in flight; alone where all layers are in the front half."""
    if front.cut == front.all_layers_cut:
        return front.train_alone(batch)
    features = front.forward(batch, keep_graph=keep_graph)
    (gradient,), loss = back.step(batch, [features], front.labels(batch))
    front.apply(batch, gradient)
    return loss
