"""What all nodes train: a network that computes far longer than its gradients travel, on noise."""

import torch
from torch import nn

from socflower.workloads import LabelledData, build_model


def load_model() -> nn.Module:
    """Return the model, always with the same weights."""
    return build_model("vgg-small", in_channels=3, image_size=32, num_classes=10, seed=1)


def load_samples(num_samples: int) -> LabelledData:
    """Return noise, which takes as long to train on as anything else."""
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
    """Return how many samples make the rounds' steps: each is an epoch."""
    batch_size, steps, num_groups = (
        int(str(config[key])) for key in ("batch-size", "steps-per-round", "num-groups")
    )
    return batch_size * steps * num_groups
