"""The model and made-up data: which of two rings around the origin is a point on?"""

import torch
from torch import Tensor, nn


def load_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))


def load_points(seed: int, count: int = 512) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (count,), generator=generator)
    angles = 2 * torch.pi * torch.rand(count, generator=generator)
    radii = 1.0 + labels + 0.2 * torch.randn(count, generator=generator)
    return torch.stack([radii * angles.cos(), radii * angles.sin()], dim=1), labels


def accuracy_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return (model(inputs).argmax(1) == labels).double().mean().item()
