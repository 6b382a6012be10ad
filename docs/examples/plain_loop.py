"""A torch training loop without Flower, in three groups on twelve Raspberry Pis: `python docs/examples/plain_loop.py`.

Four lines differ from the loop for one machine: they have a comment.
"""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import socflower

DIGITS = socflower.load_data("digits")


def net() -> nn.Module:
    """Return a small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 13 * 13, 10)
    )


def samples(data: socflower.LabelledData) -> TensorDataset:
    """Return images and labels as tensors."""
    return TensorDataset(*data.batch(torch.arange(len(data))))


def train(group: socflower.LoopGroup) -> None:
    """Train as on one machine."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = DataLoader(samples(DIGITS.train), batch_size=64, shuffle=True)
    model, optimizer, batches = group.prepare(model, optimizer, batches)  # new
    for _ in group.epochs:  # in place of range(3)
        for inputs, labels in batches:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), labels)
            group.backward(loss)  # in place of loss.backward()
            optimizer.step()


if __name__ == "__main__":
    cluster = socflower.parse_cluster(
        {"boards": 1, "socs_per_board": 12, "device": "raspberry-pi-4b"}
    )
    trained = socflower.launch(train, cluster=cluster, epochs=3, groups=3, num_workers=0)  # new
    model = net()
    model.load_state_dict(trained.state_dict)
    accuracy = socflower.evaluate(model, DIGITS.test).metrics["accuracy"]
    print(f"accuracy {accuracy:.3f} after {trained.virtual_s:.2f} s and {trained.energy_j:.0f} J")
