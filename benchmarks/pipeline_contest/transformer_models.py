"""Workloads of a contest: a small GPT-2 and a small BERT of `transformers`, as their users hold them.

Both read bytes in sentences of unequal lengths, as padded dicts with masks, and their heads are their embeddings. A
base is trained on code; the contest fine-tunes it on English.
"""

import copy
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.pipeline_contest.adapters import BYTES, code, english
from benchmarks.pipeline_contest.work import Workload
from socflower.model_graph.exported_module import exported_module
from socflower.pipeline.profiler.layers import ReadModel, read_model
from socflower.training.fp32 import FP32Trainer
from socflower.workloads.data_source import DataSource, Indices

KINDS = ("gpt-2", "bert")
WIDTH, NUM_LAYERS, NUM_HEADS, LENGTH = 192, 6, 6, 48
_MASK, _IGNORED, _MASKED_PART = BYTES, -100, 0.15
_BASE_RATE, _BATCH, _RATE = 1e-3, 16, 2e-4


class Sentences(DataSource):
    """Texts of 16 to 48 bytes: dicts with ids and mask, and the labels of next bytes, or of masked ones."""

    __slots__ = ("_kind", "_windows")

    def __init__(self, kind: str, windows: DataSource) -> None:
        self._kind, self._windows = kind, windows

    def __len__(self) -> int:
        return len(self._windows)

    def batch(self, indices: Indices, key: Sequence[int] = ()) -> tuple[dict[str, Tensor], Tensor]:
        texts, following = self._windows.batch(indices)
        masked = [
            torch.rand(LENGTH, generator=torch.Generator().manual_seed(int(index)))
            for index in indices
        ]
        lengths = torch.tensor([16 + 2 * (int(index) % 17) for index in indices])
        longest = int(lengths.max())
        mask = (torch.arange(longest)[None] < lengths[:, None]).long()
        ids, labels = texts[:, :longest] * mask, following[:, :longest].clone()
        if self._kind == "bert":
            hidden = torch.stack(masked)[:, :longest] < _MASKED_PART
            labels = ids.masked_fill(~hidden, _IGNORED)
            ids = ids.masked_fill(hidden, _MASK)
        labels = labels.masked_fill(mask == 0, _IGNORED)
        return {"input_ids": ids, "attention_mask": mask}, labels


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats over the bytes that count, of logits (n, length, bytes)."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=_IGNORED)


def num_counted(batch: Any) -> Tensor:
    """Return how many labels of a pair count."""
    return (batch[1] != _IGNORED).sum()


def model_of(kind: str) -> nn.Module:
    """Return a model of `transformers` with its initial weights."""
    import transformers

    torch.manual_seed(0)
    if kind == "gpt-2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=BYTES,
                n_positions=LENGTH,
                n_embd=WIDTH,
                n_layer=NUM_LAYERS,
                n_head=NUM_HEADS,
                bos_token_id=0,
                eos_token_id=0,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=BYTES + 1,
            hidden_size=WIDTH,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=NUM_HEADS,
            intermediate_size=4 * WIDTH,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def save_base(kind: str, path: Path, num_updates: int) -> float:
    """Train a model on code, save its weights, and return the loss of the last update."""
    model, data = model_of(kind).train(), Sentences(kind, code(num_updates * _BATCH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=_BASE_RATE)
    loss = torch.zeros(())
    for indices in torch.arange(num_updates * _BATCH).split(_BATCH):
        inputs, labels = data.batch(indices)
        loss = loss_of(model(**inputs).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), path)
    return float(loss.detach())


@cache
def prepared(kind: str, base: str) -> tuple[nn.Module, ReadModel]:
    """Return the trained model, exported for batches of any length, and its layers; made once in a process."""
    model = model_of(kind)
    model.load_state_dict(torch.load(base, weights_only=True))
    example, _ = Sentences(kind, english()).batch(torch.tensor([16, 33]))
    module = exported_module(model, example, free={1: LENGTH})
    return module, read_model(module, example, kind)


def built(kind: str, base: str) -> nn.Module:
    """Return a copy of the trained model."""
    return copy.deepcopy(prepared(kind, base)[0])


def sentences(kind: str, *, test: bool = False) -> DataSource:
    """Return English to train on, or for the test."""
    return Sentences(kind, english(test=test))


def workload(kind: str, base: Path) -> Workload:
    """Return the fine-tuning of a base."""
    return Workload(
        build=partial(built, kind, str(base)),
        data=partial(sentences, kind),
        trainer=FP32Trainer(
            optimizer=partial(torch.optim.AdamW, lr=_RATE),
            loss=loss_of,
            loss_weight=num_counted,
            device="cpu",
        ),
        prepared=partial(prepared, kind, str(base)),
    )


def test_loss(kind: str, model: nn.Module) -> float:
    """Return the mean loss of a byte on the English of the test."""
    data, total, count = sentences(kind, test=True), 0.0, 0
    with torch.no_grad():
        for indices in torch.arange(len(data)).split(16):
            inputs, labels = data.batch(indices)
            counted = int(num_counted((inputs, labels)))
            total += float(loss_of(model.eval()(**inputs), labels)) * counted
            count += counted
    return total / count
