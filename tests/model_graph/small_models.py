"""Small models with one peculiarity each."""

import torch
from torch import Tensor, nn


class Branching(nn.Module):
    """A layer that torch.fx cannot follow, as adapters are that look at their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs) if inputs.dtype == self.linear.weight.dtype else inputs


class Tied(nn.Module):
    """The last layer multiplies by the first one's weights; one layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.unused, self.last = nn.Linear(6, 30), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.first(inputs))
        output: Tensor = self.last(torch.tanh(self.middle(hidden)))
        return output
