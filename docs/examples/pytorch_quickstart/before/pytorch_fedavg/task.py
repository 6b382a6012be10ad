"""The network, the data, and how one is trained and tested on the other."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

NUM_TRAIN, NUM_TEST = 800, 400


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2, 2)
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


def load_model() -> Net:
    torch.manual_seed(1)
    return Net()


def make_images(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Return made-up images in 0..1: ten coarse patterns, each under noise."""
    patterns = torch.rand(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    pure = functional.interpolate(patterns, scale_factor=8)[labels]
    return (0.5 * pure + 0.5 * torch.rand(count, 3, 32, 32, generator=generator)), labels


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Return this node's part of the training images, and the test images."""
    images, labels = make_images(seed=1, count=NUM_TRAIN)
    own = TensorDataset((images[partition_id::num_partitions] - 0.5) / 0.25, labels[partition_id::num_partitions])
    images, labels = make_images(seed=2, count=NUM_TEST)
    test = TensorDataset((images - 0.5) / 0.25, labels)
    return DataLoader(own, batch_size=batch_size, shuffle=True), DataLoader(test, batch_size=batch_size)


def train(net: nn.Module, loader: DataLoader, epochs: int, learning_rate: float) -> float:
    """Return the mean loss of the last epoch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=learning_rate, momentum=0.9)
    net.train()
    for _ in range(epochs):
        total = 0.0
        for images, labels in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / len(loader)


def test(net: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Return loss and accuracy."""
    net.eval()
    loss, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for images, labels in loader:
            outputs = net(images)
            loss += functional.cross_entropy(outputs, labels, reduction="sum").item()
            correct += (outputs.argmax(1) == labels).sum().item()
            count += len(labels)
    return loss / count, correct / count
