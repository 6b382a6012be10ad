"""A small convolutional network, randomly shifted digits, and the training."""

from functools import cache

import torch
from flwr.app import Context
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from socflower import DataSet, FP32Trainer, evaluate, load_data, sgd

# The shape of an image; it determines the cost of training.
EXAMPLE = (1, 28, 28)
# The largest shift of a training image.
MOST_PIXELS = 2


def make_model(context: Context | None = None) -> nn.Module:
    """Return the network with its initial weights."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class ShiftedDigits(Dataset[tuple[Tensor, Tensor]]):
    """The training digits. The shift of a sample depends on seed, epoch and sample alone, on every engine."""

    def __init__(self) -> None:
        digits = load_digits().train
        # (n, 1, 28, 28) normalised, (n,).
        self.images, self.labels = digits.batch(range(len(digits)))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        down, right = torch.randint(-MOST_PIXELS, MOST_PIXELS + 1, (2,)).tolist()
        return self.images[index].roll((down, right), dims=(1, 2)), self.labels[index]


@cache
def load_digits() -> DataSet:
    """Return 4,000 training and 1,000 test digits, which are installed with socflower[demo]."""
    return load_data("digits")


@cache
def all_training_data() -> ShiftedDigits:
    return ShiftedDigits()


def training_data(
    context: Context, partition_id: int, num_partitions: int
) -> Dataset[tuple[Tensor, Tensor]]:
    """Return the samples of one node; partition 0 of 1 is all of them."""
    samples = all_training_data()
    return Subset(samples, range(partition_id, len(samples), num_partitions))


def make_trainer(context: Context) -> FP32Trainer:
    """Train with SGD at the run config's learning rate."""
    return FP32Trainer(optimizer=sgd(float(context.run_config["learning-rate"]), momentum=0.9))


def test_scores(model: nn.Module) -> dict[str, float]:
    """Return accuracy and loss on the test digits, which are not shifted."""
    return dict(evaluate(model, load_digits().test).metrics)
