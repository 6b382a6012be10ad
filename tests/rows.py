"""Samples one by one, as a map-style data set has them."""

import torch
from torch.utils.data import Dataset

from socflower.workloads.dataset import LabelledData


class Rows(Dataset[tuple[torch.Tensor, int]]):
    """The samples of `data`; with `augment` half of them are mirrored, by torch's global generator."""

    def __init__(self, data: LabelledData, *, augment: bool = False) -> None:
        self.data, self.augment = data, augment

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        inputs, labels = self.data.batch([index])
        return (inputs[0].flip(-1) if self.augment and torch.rand(()) < 0.5 else inputs[0]), int(
            labels[0]
        )
