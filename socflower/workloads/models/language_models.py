"""Models of token ids, in plain torch: BERT-small, GPT, a BiLSTM. torch.fx can follow them, unlike those of a library.

A model is built for one length: a size that `forward` reads from the input would have to cross a cut.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from socflower.errors import ConfigError, require_range
from socflower.workloads.models.layers import drawn


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence to itself, with separate projections of queries, keys and values."""

    def __init__(self, width: int, num_heads: int, *, causal: bool) -> None:
        super().__init__()
        if width % num_heads:
            raise ConfigError(
                f"attention: width = {width} must be a multiple of num_heads = {num_heads}"
            )
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.project = nn.Linear(width, width)
        self.num_heads, self.causal = num_heads, causal

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (n, length, width) to the same shape."""
        parts = (self.query(inputs), self.key(inputs), self.value(inputs))
        query, key, value = (
            part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in parts
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        output: torch.Tensor = self.project(attended.transpose(1, 2).flatten(2))
        return output


class TransformerBlock(nn.Module):
    """Attention and a perceptron with GELU, each added to its input.

    The norm is behind the sum as in BERT, or before the layer as in GPT-2 (`norm_first`).
    """

    def __init__(
        self, width: int, num_heads: int, *, causal: bool, norm_first: bool, dropout: float
    ) -> None:
        super().__init__()
        self.attention = SelfAttention(width, num_heads, causal=causal)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_dropout, self.perceptron_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.norm_first = norm_first

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (n, length, width) to the same shape."""
        if self.norm_first:
            inputs = inputs + self.attention_dropout(self.attention(self.attention_norm(inputs)))
            return inputs + self.perceptron_dropout(self.perceptron(self.perceptron_norm(inputs)))
        inputs = self.attention_norm(inputs + self.attention_dropout(self.attention(inputs)))
        output: torch.Tensor = self.perceptron_norm(
            inputs + self.perceptron_dropout(self.perceptron(inputs))
        )
        return output


class Bert(nn.Module):
    """BERT's encoder (Devlin et al. 2019), its pooler and a classifier; all tokens are of the first segment."""

    def __init__(
        self,
        *,
        num_blocks: int,
        width: int,
        num_heads: int,
        vocabulary: int,
        length: int,
        num_classes: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions, self.segments = nn.Embedding(_BERT_LENGTH, width), nn.Embedding(2, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        blocks = [
            TransformerBlock(width, num_heads, causal=False, norm_first=False, dropout=dropout)
            for _ in range(num_blocks)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.pooler, self.tanh = nn.Linear(width, width), nn.Tanh()
        self.classifier = nn.Linear(width, num_classes)
        self.length = length

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map token ids (n, length) int64 to logits (n, num_classes)."""
        where = self.positions.weight[: self.length] + self.segments.weight[0]
        hidden = self.blocks(self.dropout(self.norm(self.words(tokens) + where)))
        logits: torch.Tensor = self.classifier(self.tanh(self.pooler(hidden[:, 0])))
        return logits


class Gpt(nn.Module):
    """GPT-2 (Radford et al. 2019), but with an untied head: a model with a shared embedding cannot be cut."""

    def __init__(
        self,
        *,
        num_blocks: int,
        width: int,
        num_heads: int,
        vocabulary: int,
        length: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        blocks = [
            TransformerBlock(width, num_heads, causal=True, norm_first=True, dropout=dropout)
            for _ in range(num_blocks)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map token ids (n, length) int64 to logits (n, length, vocabulary)."""
        hidden = self.blocks(self.dropout(self.words(tokens) + self.positions.weight))
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


class BiLstm(nn.Module):
    """Two bidirectional LSTMs (Graves et al. 2013) over words, the mean over them, and a perceptron.

    Sizes are those at which the edge-cloud paper's Table 3 measures its features; it prints no others.
    """

    def __init__(self, *, vocabulary: int, num_classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, 100)
        self.first = nn.LSTM(100, 100, batch_first=True, bidirectional=True)
        self.second = nn.LSTM(200, 50, batch_first=True, bidirectional=True)
        self.hidden, self.relu = nn.Linear(100, 128), nn.ReLU()
        self.classifier = nn.Linear(128, num_classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map token ids (n, length) int64 to logits (n, num_classes)."""
        features, _ = self.first(self.words(tokens))
        features, _ = self.second(features)
        logits: torch.Tensor = self.classifier(self.relu(self.hidden(features.mean(1))))
        return logits


def bi_lstm(*, num_classes: int = 2, vocabulary: int = 20_000, seed: int) -> BiLstm:
    """Return a BiLSTM for texts, of any length; 2.27 M parameters.

    Equal seeds give equal weights; torch's global random state is neither read nor changed.
    """
    require_range("model bi-lstm", least=1, num_classes=num_classes, vocabulary=vocabulary)
    return drawn(partial(BiLstm, vocabulary=vocabulary, num_classes=num_classes), seed)


_BERT_LENGTH = 512


def bert_small(
    *, length: int, num_classes: int, vocabulary: int = 30_522, dropout: float = 0.1, seed: int
) -> Bert:
    """Return BERT-small of Turc et al. (2019), L = 4, H = 512: 28.76 M parameters and a classifier.

    Equal seeds give equal weights; torch's global random state is neither read nor changed. Raises ConfigError for
    sequences longer than 512 tokens.
    """
    name = "model bert-small"
    require_range(name, least=1, most=_BERT_LENGTH, length=length)
    require_range(name, least=1, num_classes=num_classes, vocabulary=vocabulary)
    require_range(name, least=0, dropout=dropout)
    sizes: dict[str, Any] = {"num_blocks": 4, "width": 512, "num_heads": 8, "length": length}
    build = partial(Bert, **sizes, vocabulary=vocabulary, num_classes=num_classes, dropout=dropout)
    return drawn(build, seed)


def gpt_small(
    *,
    length: int,
    vocabulary: int = 256,
    width: int = 256,
    num_blocks: int = 6,
    dropout: float = 0.0,
    seed: int,
) -> Gpt:
    """Return a GPT of `num_blocks` blocks, with a head for each 64 units of `width`; by default for bytes.

    Width 768, 12 blocks, 50,257 tokens and length 1024 are GPT-2's smallest model, with an untied head. Equal seeds
    give equal weights; torch's global random state is neither read nor changed. Raises ConfigError for a width that is
    no multiple of its heads.
    """
    sizes: dict[str, Any] = {
        "length": length,
        "vocabulary": vocabulary,
        "width": width,
        "num_blocks": num_blocks,
    }
    require_range("model gpt-small", least=1, **sizes)
    require_range("model gpt-small", least=0, dropout=dropout)
    return drawn(partial(Gpt, **sizes, num_heads=max(1, width // 64), dropout=dropout), seed)
