"""A BERT with random weights, lines of two packages of Python's standard library, and the loops."""

import asyncio
import email
from functools import cache
from pathlib import Path

import torch
from datasets import Dataset
from flwr_datasets.partitioner import IidPartitioner
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

SUBJECTS = (asyncio, email)
NUM_TRAIN, NUM_TEST, NUM_BYTES = 1600, 400, 48


def load_model() -> nn.Module:
    torch.manual_seed(1)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=257,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=NUM_BYTES,
            num_labels=len(SUBJECTS),
        )
    )


@cache
def lines() -> Dataset:
    """Return lines as bytes, each with the number of its package."""
    texts = [
        (line.strip().encode()[:NUM_BYTES], subject)
        for subject, package in enumerate(SUBJECTS)
        for path in sorted(Path(package.__file__).parent.glob("*.py"))
        for line in path.read_text().splitlines()
    ]
    long = [(text, subject) for text, subject in texts if len(text) > 24]
    rows = Dataset.from_dict(
        {
            "input_ids": [[byte + 1 for byte in text] for text, _ in long],
            "labels": [subject for _, subject in long],
        }
    )
    return rows.shuffle(seed=1).select(range(NUM_TRAIN + NUM_TEST))


def collate(rows: list[dict]) -> dict[str, Tensor]:
    """Pad to the longest line of the batch."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def load_data(
    partition_id: int, num_partitions: int, batch_size: int
) -> tuple[DataLoader, DataLoader]:
    """Return this node's part of the lines for training, and those for tests."""
    partitioner = IidPartitioner(num_partitions)
    partitioner.dataset = lines().select(range(NUM_TRAIN))
    test = lines().select(range(NUM_TRAIN, NUM_TRAIN + NUM_TEST))
    own = partitioner.load_partition(partition_id)
    return DataLoader(own, batch_size=batch_size, shuffle=True, collate_fn=collate), DataLoader(
        test, batch_size=100, collate_fn=collate
    )


def train(model: nn.Module, loader: DataLoader, epochs: int, lr: float) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()


def test(model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Return loss and accuracy."""
    model.eval()
    loss, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for batch in loader:
            outputs, labels = model(**batch), batch["labels"]
            loss += outputs.loss.item() * len(labels)
            correct += (outputs.logits.argmax(1) == labels).sum().item()
            count += len(labels)
    return loss / count, correct / count
