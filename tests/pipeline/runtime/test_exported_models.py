"""BERT and GPT-2 of `transformers` over a pipeline: the weights of plain torch on one device."""

import copy
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from socflower.model_graph.exported_module import exported_module
from socflower.pipeline.plan import PipelinePlan, synchronised_parts
from socflower.pipeline.profiler.layers import ReadModel, read_model
from socflower.pipeline.runtime.member import Mini
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.workloads.map_dataset import MapDataset
from tests.one_line import refused
from tests.pipeline.problems import straight_plan
from tests.pipeline.runtime.processes import Devices, Training
from tests.pipeline.runtime.training import assert_close, minis, train_together
from tests.seeded import built

models = pytest.importorskip("tests.model_graph.test_exported_module")
NUM_SENTENCES, LENGTH, IGNORED = 64, 8, -100


class Sentences:
    """Sentences of 3 to 8 words; their batches are dicts, padded to the longest one."""

    def __init__(self, *, words: bool) -> None:
        generator = torch.Generator().manual_seed(5)
        lengths = torch.randint(3, LENGTH + 1, (NUM_SENTENCES,), generator=generator)
        self.words, self.rows = (
            words,
            [torch.randint(1, 50, (int(length),), generator=generator) for length in lengths],
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]

    def collate(self, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        padded = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        labels = padded[:, 0] % 2
        if self.words:
            following = nn.functional.pad(padded[:, 1:], (0, 1))
            labels = following.masked_fill(following == 0, IGNORED)
        return {"input_ids": padded, "attention_mask": mask, "labels": labels}

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        return self.collate([self.rows[index] for index in indices])


def loss_of_words(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of logits (n, length, words) over the words that count."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def num_counted(batch: Any) -> Tensor:
    return (batch[1] != IGNORED).sum()


TRAINERS = {
    "bert": FP32Trainer(optimizer=sgd(0.05), device="cpu"),
    "gpt-2": FP32Trainer(
        loss=loss_of_words, loss_weight=num_counted, optimizer=sgd(0.05), device="cpu"
    ),
}


def made(kind: str) -> nn.Module:
    """Return a classifier, or a language model whose head is its embedding; GPT-2 is PEFT's if asked for."""
    if kind == "bert":
        return built(lambda: models.Classifier().model, 3)
    tied = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": True}
    return built(lambda: models.Writer(**tied).model, 3)


def trained_by_torch(model: nn.Module, data: Sentences, kind: str, steps: Sequence[Mini]) -> Any:
    own, trainer = copy.deepcopy(model).train(), TRAINERS[kind]
    optimizer = trainer.optimizer(own.parameters())
    for mini in steps:
        batch = data.batch(mini.indices.tolist())
        labels = batch.pop("labels")
        optimizer.zero_grad()
        trainer.loss(own(**batch).logits, labels).backward()
        optimizer.step()
    return {name: own for name, own in own.named_parameters() if own.requires_grad}


def straight(reading: ReadModel, num_stages: int) -> PipelinePlan:
    last = reading.model.num_layers - 1
    ends = tuple(last * number // num_stages for number in range(1, num_stages + 1))
    assert all(one < other for one, other in pairwise((-1, *ends)))
    # The first stage is on two devices.
    shares = ((3, 1), *((4,),) * (num_stages - 1)) if num_stages > 1 else ((4,),)
    return straight_plan(ends, shares, 2)


def members_of(kind: str, model: nn.Module | None = None) -> dict[str, Any]:
    """Return what members of a pipeline train, and how: module, reading, trainer and data."""
    data = Sentences(words=kind != "bert")
    example = data.batch([0, 1, 2])
    del example["labels"]
    module = exported_module(model or made(kind), example, free={1: LENGTH})
    return {
        "module": module,
        "reading": read_model(module, example, kind),
        "trainer": TRAINERS[kind],
        "data": MapDataset(data, data.collate),
    }


def require_equal(kind: str, model: nn.Module) -> None:
    steps, given = minis(3, 8), members_of(kind, model)
    expected = trained_by_torch(model, Sentences(words=kind != "bert"), kind, steps)
    before = dict(given["module"].named_parameters())
    for num_stages in (1, 3):
        plan = straight(given["reading"], num_stages)
        found = train_together(plan=plan, steps=steps, **given)
        assert found.weights.keys() <= given["module"].state_dict().keys()
        weights = {name: found.weights[name] for name in expected}
        assert_close(weights, {name: own.detach() for name, own in expected.items()}, 1e-5)
        assert any(not np.array_equal(weights[name], before[name].detach()) for name in weights)


@pytest.mark.slow
def test_gpt_2_with_a_tied_head_trains_on_padded_dicts_as_plain_torch_does() -> None:
    model = made("gpt-2")
    assert model.lm_head.weight is model.transformer.wte.weight
    require_equal("gpt-2", model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt-2", "bert"])
def test_four_processes_give_the_weights_of_one_device(kind: str) -> None:
    """Over sockets, with a stage on two devices, and GPT-2's embedding in two stages."""
    steps, given = tuple(minis(3, 8)), members_of(kind)
    work = Training(plan=straight(given["reading"], 3), minis=steps, make=partial(members_of, kind))
    with Devices(4) as four:
        reports = four.train(work)
    assert not any(report.lost or report.threads_left for report in reports.values()), reports
    end = next(report.end for report in reports.values() if report.end is not None)
    expected = trained_by_torch(made(kind), Sentences(words=kind != "bert"), kind, steps)
    weights = {name: torch.from_numpy(end.weights[name]) for name in expected}
    assert_close(weights, {name: own.detach() for name, own in expected.items()}, 1e-5)


@pytest.mark.slow
def test_bert_and_an_adapted_gpt_2_train_on_padded_dicts_as_plain_torch_does() -> None:
    peft = pytest.importorskip("peft")
    require_equal("bert", made("bert"))
    config = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    require_equal("gpt-2", built(lambda: peft.get_peft_model(made("gpt-2"), config), 4))


class Tied(nn.Module):
    """A language model whose head is its embedding; masked words are not read."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(9, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.inner(self.words(words))) * mask[:, :, None])
        return found.mean(1)


class Pairs(Sentences):
    def collate(self, rows: Sequence[Tensor]) -> Any:
        words = torch.stack([row[:3] % 9 for row in rows])
        return (words, (words > 2).float()), words[:, 0] % 2


def test_a_tied_weight_is_one_weight_of_stages_on_any_devices_bit_for_bit() -> None:
    model, data = built(Tied, 1), Pairs(words=False)
    reading = read_model(model, (torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3)), "tied")
    (tie,) = reading.model.ties
    assert (tie.names, tie.weight_bytes) == (("words.weight",), 4.0 * 9 * 4)
    last = reading.model.num_layers - 1
    # Once in a stage that has both uses.
    assert reading.model.weight_bytes(0, last) == 4.0 * (9 * 4 + 4 * 4 + 4)
    trainer = FP32Trainer(optimizer=sgd(0.1), device="cpu")
    found = []
    for plan in (
        straight_plan((last,), ((4,),), 1),
        straight_plan((last - 1, last), ((4,), (4,)), 1),
        straight_plan((last - 1, last), ((3, 1), (2, 2)), 1),
    ):
        parts = synchronised_parts(plan, reading.model.ties)
        assert [part.devices for part in parts if part.tie] == [plan.socs] * (len(plan.stages) > 1)
        end = train_together(
            model, plan, minis(3, 4), trainer, reading, data=MapDataset(data, data.collate)
        )
        assert "head.weight" not in end.weights
        found.append(end.weights)
    # With one micro-batch the gradient is the same sum, of two numbers.
    for name, weight in found[0].items():
        assert torch.equal(found[1][name], weight), name
    assert_close(found[2], found[0], 1e-6)


def test_what_prevents_a_cut_is_named_with_a_remedy() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.outer(torch.tanh(self.inner(x.transpose(0, 1))))
            return found.transpose(0, 1)

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.norm(torch.tanh(self.norm(x)) + 1)
            return found

    refused(
        lambda: read_model(built(Recurrent, 1), (3, 4), "m"),
        "cannot be cut",
        "(3, 7, 4)",
        "batch_first",
    )
    refused(lambda: read_model(built(Shared, 1), (4,), "m"), "norm.running", "its own")
