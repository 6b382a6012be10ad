"""A byte-level GPT, the source files of Python's standard library as its text, and the training."""

import sysconfig
from functools import cache, partial
from pathlib import Path

import torch
from flwr.app import Context
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, Subset

from socflower import FP32Trainer, evaluate

CONTEXT, WIDTH, NUM_HEADS, NUM_BLOCKS = 64, 64, 4, 2
# Numbers of windows, each of CONTEXT + 1 bytes.
NUM_TRAIN, NUM_TEST = 3000, 300
# A batch of one window; it determines the cost of training.
EXAMPLE = torch.zeros(1, CONTEXT, dtype=torch.int64)


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = (x.shape[0], x.shape[1], NUM_HEADS, x.shape[2] // NUM_HEADS)
        queries, keys, values = (
            part.reshape(heads).transpose(1, 2)
            for part in self.queries_keys_values(self.attention_norm(x)).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).reshape(x.shape))
        return x + self.feed_forward(self.feed_forward_norm(x))


class ByteGPT(nn.Module):
    """Predicts the next byte: int64 bytes (n, length) become logits (n, length, 256)."""

    def __init__(
        self, context: int = CONTEXT, width: int = WIDTH, num_blocks: int = NUM_BLOCKS
    ) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(num_blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.blocks(self.bytes(text) + self.positions(places))))


def make_model(context: Context | None = None) -> nn.Module:
    """Return the network with its initial weights."""
    torch.manual_seed(1)
    return ByteGPT()


class Windows(Dataset[Tensor]):
    """Windows of a text, each (context + 1,) int64: the input and, one byte later, the bytes to predict."""

    def __init__(self, text: bytes, context: int = CONTEXT) -> None:
        self.text, self.context = torch.frombuffer(bytearray(text), dtype=torch.uint8), context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * self.context : (index + 1) * self.context + 1].long()


def text_of_library(num_bytes: int) -> bytes:
    """Return the beginning of the standard library's modules, one after the other."""
    text = b""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += file.read_bytes()
        if len(text) >= num_bytes:
            break
    return text[:num_bytes]


@cache
def load_windows() -> tuple[Windows, Windows]:
    """Return the windows for training and for the test, which come from different files."""
    text = text_of_library((NUM_TRAIN + NUM_TEST) * CONTEXT + 1)
    return Windows(text[: NUM_TRAIN * CONTEXT + 1]), Windows(text[NUM_TRAIN * CONTEXT :])


def training_data(context: Context, partition_id: int, num_partitions: int) -> Dataset[Tensor]:
    """Return the samples of one node; partition 0 of 1 is all of them."""
    windows = load_windows()[0]
    return Subset(windows, range(partition_id, len(windows), num_partitions))


def predict(model: nn.Module, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits (n · CONTEXT, 256) and the bytes that follow (n · CONTEXT,)."""
    return model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next byte, in nats."""
    return functional.cross_entropy(*predict(model, windows))


def next_byte_scores(model: nn.Module, windows: Tensor) -> dict[str, Tensor]:
    """Return the loss of a batch and the share of its bytes that are predicted correctly."""
    logits, following = predict(model, windows)
    return {
        "accuracy": (logits.argmax(1) == following).float().mean(),
        "loss": functional.cross_entropy(logits, following),
    }


def make_trainer(context: Context) -> FP32Trainer:
    """Train with AdamW at the run config's learning rate."""
    return FP32Trainer(
        train_step=next_byte_loss,
        max_grad_norm=1.0,
        optimizer=partial(torch.optim.AdamW, lr=float(context.run_config["learning-rate"])),
    )


def test_scores(model: nn.Module) -> dict[str, float]:
    """Return accuracy and loss on the text that is not trained on."""
    return dict(evaluate(model, load_windows()[1], step=next_byte_scores).metrics)
