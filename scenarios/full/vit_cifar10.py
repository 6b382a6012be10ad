"""ViT-tiny and CIFAR-10 with augmentation: a model and data of a user's own for vit_cifar10.toml."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from socflower import DataSource, load_data

IMAGE, CLASSES = 32, 10


class ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2021): ViT-tiny is 192 wide, 12 deep, with 3 heads."""

    def __init__(self, patch: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (IMAGE // patch) ** 2, width))
        block = nn.TransformerEncoderLayer(
            width,
            heads,
            4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.blocks = nn.TransformerEncoder(
            block, depth, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.classes = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores (n, 10) of images (n, 3, 32, 32)."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], 1) + self.positions
        return self.classes(self.blocks(tokens)[:, 0])


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Images that are mirrored and shifted at random by at most 4 pixels, as is usual for CIFAR-10."""

    def __init__(self, source: DataSource, num_samples: int) -> None:
        self.images, self.targets = source.batch(range(num_samples))

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        top, left, mirror = (int(torch.randint(high, ())) for high in (9, 9, 2))
        image = functional.pad(self.images[index], (4, 4, 4, 4))[
            :, top : top + IMAGE, left : left + IMAGE
        ]
        return image.flip(2) if mirror else image, self.targets[index]


def model(patch: int = 4, width: int = 192, depth: int = 12, heads: int = 3) -> nn.Module:
    """Return a ViT-tiny for images of 32 x 32, by default of patches of 4 x 4."""
    return ViT(patch, width, depth, heads)


def data(
    num_train: int = 50_000, num_test: int = 10_000
) -> tuple[Dataset[tuple[Tensor, Tensor]], DataSource]:
    """Return (training, test): augmented images, and test images as they are."""
    cifar10 = load_data("cifar10")
    return Augmented(cifar10.train, num_train), cifar10.test.select(range(num_test))
