"""The network, the data, and how one is trained and tested on the other."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

NUM_TRAIN, NUM_TEST = 800, 400


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(functional.relu(self.conv1(x)))
        x = self.pool(functional.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        x = functional.relu(self.fc1(x))
        x = functional.relu(self.fc2(x))
        return self.fc3(x)


class Images(Dataset):
    """Made-up images: ten coarse patterns, each under noise; for training moved and partly covered at random."""

    def __init__(self, seed: int, count: int, augment: bool) -> None:
        patterns = torch.rand(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 10, (count,), generator=generator)
        pure = functional.interpolate(patterns, scale_factor=8)[self.labels]
        self.images = 2.0 * (pure + torch.rand(count, 3, 32, 32, generator=generator) - 1.0)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.augment:
            image = image.roll(tuple(torch.randint(-2, 3, (2,)).tolist()), dims=(-2, -1))
            top, left = torch.randint(0, 25, (2,)).tolist()
            image[:, top : top + 8, left : left + 8] = 0.0
        return image, self.labels[index]


def load_data(
    partition_id: int, num_partitions: int, batch_size: int
) -> tuple[DataLoader, DataLoader]:
    """Return this node's part of the training images, and the test images."""
    own = torch.utils.data.Subset(
        Images(1, NUM_TRAIN, augment=True), range(partition_id, NUM_TRAIN, num_partitions)
    )
    return DataLoader(own, batch_size=batch_size, shuffle=True), DataLoader(
        Images(2, NUM_TEST, augment=False), 100
    )


def train(
    net: nn.Module, loader: DataLoader, epochs: int, lr: float, device: torch.device
) -> float:
    """Return the mean loss of the last epoch."""
    net.to(device).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        total = 0.0
        for images, labels in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / len(loader)


def test(net: nn.Module, loader: DataLoader, device: torch.device) -> tuple[float, float]:
    """Return loss and accuracy."""
    net.to(device).eval()
    loss, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for images, labels in loader:
            outputs, labels = net(images.to(device)), labels.to(device)
            loss += functional.cross_entropy(outputs, labels, reduction="sum").item()
            correct += (outputs.argmax(1) == labels).sum().item()
            count += len(labels)
    return loss / count, correct / count
