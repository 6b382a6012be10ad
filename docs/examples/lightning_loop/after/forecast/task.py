"""A module with its own training step and optimiser, its data, and a trainer that runs it."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset

NUM_TRAIN, NUM_TEST, LENGTH = 800, 200, 24


class Forecast(nn.Module):
    def __init__(self, lr: float = 0.005) -> None:
        super().__init__()
        self.lr = lr
        self.encoder = nn.LSTM(1, 24, bidirectional=True, batch_first=True)
        self.head = nn.Linear(48, 1)

    def forward(self, series: Tensor) -> Tensor:
        return self.head(self.encoder(series)[0].mean(1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        series, following = batch
        return functional.mse_loss(self(series), following)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        series, following = batch
        return {"loss": functional.mse_loss(self(series), following)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def make_series(seed: int, count: int) -> TensorDataset:
    """Return waves of random frequency and phase, and the value that follows each."""
    generator = torch.Generator().manual_seed(seed)
    frequency = 0.1 + 0.5 * torch.rand(count, 1, generator=generator)
    phase = 6.3 * torch.rand(count, 1, generator=generator)
    waves = torch.sin(frequency * torch.arange(LENGTH + 1) + phase)
    return TensorDataset(waves[:, :-1, None], waves[:, -1:])


def load_data(
    partition_id: int, num_partitions: int, batch_size: int
) -> tuple[DataLoader, DataLoader]:
    """Return this node's part of the series for training, and those for tests."""
    own = Subset(make_series(1, NUM_TRAIN), range(partition_id, NUM_TRAIN, num_partitions))
    return DataLoader(own, batch_size=batch_size, shuffle=True), DataLoader(
        make_series(2, NUM_TEST), batch_size=100
    )


class Trainer:
    """What the app needs of Lightning's trainer."""

    def __init__(self, max_epochs: int = 1) -> None:
        self.max_epochs = max_epochs

    def fit(self, module: Forecast, loader: DataLoader) -> None:
        module.train()
        optimizer = module.configure_optimizers()
        for _ in range(self.max_epochs):
            for batch_idx, batch in enumerate(loader):
                optimizer.zero_grad()
                module.training_step(batch, batch_idx).backward()
                optimizer.step()

    def validate(self, module: Forecast, loader: DataLoader) -> float:
        """Return the mean loss."""
        module.eval()
        with torch.no_grad():
            losses = [
                module.validation_step(batch, batch_idx)["loss"].item()
                for batch_idx, batch in enumerate(loader)
            ]
        return sum(losses) / len(losses)
