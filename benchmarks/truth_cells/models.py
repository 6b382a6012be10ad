"""The cells' models, of images of 28 x 28, and the data they train on."""

import torch
from torch import Tensor, nn

from benchmarks.truth_cells.cell import REFERENCE
from socflower.workloads.dataset import LabelledData

IMAGE = (1, 28, 28)
NUM_CLASSES = 10
# Of the transformer.
WIDTH = 64


class Transformer(nn.Module):
    """A transformer encoder of 16 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, 7, stride=7)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of images (samples, 1, 28, 28)."""
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.encoder(tokens).mean(dim=1))


def build_model(name: str) -> nn.Module:
    """Return a model with the same weights in every process."""
    torch.manual_seed(0)
    widths = {REFERENCE: (300, 100), "mlp": (256, 128)}.get(name)
    if widths is not None:
        first, second = widths
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, first),
            nn.ReLU(),
            nn.Linear(first, second),
            nn.ReLU(),
            nn.Linear(second, NUM_CLASSES),
        )
    if name == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 49, 64),
            nn.ReLU(),
            nn.Linear(64, NUM_CLASSES),
        )
    return Transformer()


def build_data(num_samples: int) -> LabelledData:
    """Return random images, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    return LabelledData(
        inputs=torch.randint(0, 256, (num_samples, *IMAGE), generator=generator, dtype=torch.uint8),
        labels=torch.randint(0, NUM_CLASSES, (num_samples,), generator=generator),
        mean=(0.5,),
        std=(0.5,),
        num_classes=NUM_CLASSES,
    )
