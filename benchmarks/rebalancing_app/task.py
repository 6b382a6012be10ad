"""The training of all nodes: on noise, a network whose computation takes far longer than its exchange."""

import torch
from torch import nn

from socflower.workloads.dataset import LabelledData
from socflower.workloads.models.classifiers import build_model


def load_model() -> nn.Module:
    """Return the model, always with the same weights."""
    return build_model("vgg-small", in_channels=3, image_size=32, num_classes=10, seed=1)


def load_samples(num_samples: int) -> LabelledData:
    """Return noise, which takes as long to train on as images."""
    generator = torch.Generator().manual_seed(1)
    return LabelledData(
        inputs=torch.randint(
            0, 256, (num_samples, 3, 32, 32), generator=generator, dtype=torch.uint8
        ),
        labels=torch.randint(0, 10, (num_samples,), generator=generator),
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        num_classes=10,
    )


def num_samples(config: dict[str, object]) -> int:
    """Return the number of samples with which a round of one epoch has the wanted steps."""
    batch_size, steps, num_groups = (
        int(str(config[key])) for key in ("batch-size", "steps-per-round", "num-groups")
    )
    return batch_size * steps * num_groups
