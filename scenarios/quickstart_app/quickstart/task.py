"""The model and the data, as any Flower app has them."""

from functools import cache

from flwr.app import Context
from torch import nn

from socflower import LabelledData, build_model, iid_partition, load_data


def load_model(context: Context | None = None) -> nn.Module:
    """Return a fresh LeNet-5; every node starts from the weights of the server anyway."""
    return build_model("lenet5", in_channels=1, image_size=28, num_classes=10, seed=1)


@cache
def load_partition(partition_id: int, num_partitions: int) -> LabelledData:
    """Return one SoC's part of the training digits."""
    data = load_data("digits").train
    return data.select(iid_partition(len(data), num_partitions, seed=1)[partition_id])
