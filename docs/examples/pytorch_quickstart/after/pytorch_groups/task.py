"""The network and the data. The loops of `../before` are gone: the trainer and `evaluate` have them."""

from functools import cache

import torch
from flwr.app import Context
from torch import Tensor, nn
from torch.nn import functional

from socflower import DataSet, LabelledData, load_data

SHAPE = (3, 32, 32)
NUM_TRAIN, NUM_TEST = 800, 400


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(functional.relu(self.conv1(x)))
        x = self.pool(functional.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        x = functional.relu(self.fc1(x))
        x = functional.relu(self.fc2(x))
        return self.fc3(x)


def load_model(context: Context | None = None) -> Net:
    torch.manual_seed(1)
    return Net()


def make_images(seed: int, count: int) -> LabelledData:
    """Return made-up images in 0..1: ten coarse patterns, each under noise."""
    patterns = torch.rand(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    pure = functional.interpolate(patterns, scale_factor=8)[labels]
    images = 0.5 * pure + 0.5 * torch.rand(count, *SHAPE, generator=generator)
    return LabelledData(images, labels, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25), num_classes=10)


@cache
def load_images(name: str) -> DataSet:
    """Return the images that the run config names: "generated", or those of a data set such as "cifar10"."""
    if name != "generated":
        return load_data(name)
    return DataSet(make_images(seed=1, count=NUM_TRAIN), make_images(seed=2, count=NUM_TEST), name, "made up")


def load_partition(context: Context, partition_id: int, num_partitions: int) -> LabelledData:
    """Return a part of the training images; part 0 of 1 is all of them."""
    train = load_images(str(context.run_config["data"])).train
    return train.select(torch.arange(partition_id, len(train), num_partitions))
