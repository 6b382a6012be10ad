"""LeNet-5 (LeCun et al. 1998) with ReLU and max-pooling, as trained today."""

from torch import nn

from socflower.workloads.models.layers import padding_to_32


def lenet5(*, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
    """Return LeNet-5 for (n, in_channels, image_size, image_size) inputs; 61,706 parameters for MNIST.

    Raises ConfigError unless the image size is 28 or 32.
    """
    return nn.Sequential(
        nn.Conv2d(in_channels, 6, kernel_size=5, padding=padding_to_32("lenet5", image_size)),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    )
