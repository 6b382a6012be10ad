"""Training steps of one's own: batches of any form, any loss, clipping, accumulation and bfloat16."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from socflower.training.fp32 import FP32Trainer, sgd
from socflower.training.trainer import TrainingSpan
from tests.one_line import refused
from tests.seeded import built
from tests.training.by_torch import assert_close, assert_equal, by_torch, trained

SGD = sgd(0.1, 0.9)


class Tagger(nn.Module):
    """Classifies sequences of token ids of any length; like models of Hugging Face if given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.output = nn.Linear(6, 3)

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor | None = None
    ) -> Any:
        weights = mask.float() / mask.sum(1, keepdim=True)
        logits = self.output((self.embedding(ids) * weights[..., None]).sum(1))
        if labels is None:
            return logits
        return SimpleNamespace(loss=functional.cross_entropy(logits, labels), logits=logits)


def tokens(count: int, length: int, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, 20, (count, length), generator=generator),
        "mask": torch.ones(count, length, dtype=torch.bool),
        "labels": torch.randint(0, 3, (count,), generator=generator),
    }


def own_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch["ids"], batch["mask"]), batch["labels"])


def reference(steps: list[Any], *, clip: float | None = None) -> nn.Module:
    """Train on the parts of each step: the gradient of the mean loss over all samples."""

    def mean_loss(model: nn.Module, parts: list[Any]) -> torch.Tensor:
        present = [part for part in parts if part != ()]
        sizes = [len(part["labels"]) for part in present]
        losses = [own_step(model, part) * size for part, size in zip(present, sizes, strict=True)]
        return torch.stack(losses).sum() / sum(sizes)

    losses = [partial(mean_loss, parts=parts) for parts in steps]
    return by_torch(tagger(), SGD, losses, max_norm=clip)


def tagger() -> nn.Module:
    return built(Tagger, 4)


@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    counts=st.lists(st.integers(0, 4), min_size=3, max_size=3),
)
def test_members_with_batches_of_other_lengths_train_the_mean_over_all_samples(
    lengths: list[int],
    counts: list[int],
) -> None:
    """By a step of one's own, and by the model's own loss."""
    sizes = zip(lengths, [1, *counts], strict=False)
    parts = [
        tokens(count, length, seed) if count else () for seed, (length, count) in enumerate(sizes)
    ]
    steps = [parts, parts]
    for train_step in (own_step, None):
        trainer = FP32Trainer(optimizer=SGD, train_step=train_step)
        assert_close(trained(trainer, tagger(), steps), reference(steps))


def test_inputs_in_a_dict_or_a_tuple_beside_labels_reach_the_model() -> None:
    batch = tokens(6, 3)
    ids, mask, labels = batch.values()
    for inputs in ({"ids": ids, "mask": mask}, (ids, mask)):
        ours = trained(FP32Trainer(optimizer=SGD), tagger(), [[(inputs, labels)]] * 2)
        assert_close(ours, reference([[batch]] * 2))


def test_the_norm_of_the_whole_groups_gradient_is_clipped() -> None:
    steps = [[tokens(4, 3, 1), tokens(2, 3, 2)]] * 3
    clipped = trained(FP32Trainer(optimizer=SGD, max_grad_norm=0.05), tagger(), steps)
    assert_close(clipped, reference(steps, clip=0.05))
    with pytest.raises(AssertionError):
        assert_close(clipped, reference(steps))


@pytest.mark.parametrize("proximal_mu", [0.01, 5.0])
def test_the_proximal_term_is_that_of_a_loss_that_contains_it(proximal_mu: float) -> None:
    """Li et al., Federated Optimization in Heterogeneous Networks: h(w) = F(w) + mu / 2 ||w - w_t||^2."""
    batch = tokens(6, 3)
    received = tagger()

    def loss(model: nn.Module) -> torch.Tensor:
        apart = zip(model.parameters(), received.parameters(), strict=True)
        term = sum((weight - start.detach()).square().sum() for weight, start in apart)
        return own_step(model, batch) + proximal_mu / 2 * term

    trainer = FP32Trainer(optimizer=SGD)
    ours = trained(trainer, tagger(), [[batch]] * 4, proximal_mu=proximal_mu)
    assert_close(ours, by_torch(tagger(), SGD, [loss] * 4))


@pytest.mark.parametrize("accumulation_steps", [1, 3, 7, 20])
def test_accumulated_passes_have_the_gradient_of_one(accumulation_steps: int) -> None:
    sizes: list[int] = []

    def noted(model: nn.Module, batch: Any) -> torch.Tensor:
        sizes.append(len(batch["labels"]))
        return own_step(model, batch)

    trainer = FP32Trainer(optimizer=SGD, train_step=noted, accumulation_steps=accumulation_steps)
    steps = [[tokens(7, 3)]] * 2
    assert_close(trained(trainer, tagger(), steps), reference(steps))
    assert len(sizes) == 2 * min(7, accumulation_steps) and max(sizes) - min(sizes) <= 1
    session = trainer.start(tagger(), TrainingSpan())
    assert session.final_in_backward is (accumulation_steps == 1)


def test_bfloat16_runs_in_the_passes_alone() -> None:
    seen = set()

    def noted(model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(batch["ids"], batch["mask"])
        seen.add(logits.dtype)
        return functional.cross_entropy(logits.float(), batch["labels"])

    trainer = FP32Trainer(optimizer=SGD, train_step=noted, autocast=torch.bfloat16)
    steps = [[tokens(6, 3)]] * 2
    model = trained(trainer, tagger(), steps)
    assert seen == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert_close(model, reference(steps), rtol=0.05, atol=0.01)


def test_own_steps_of_batch_norm_models_keep_statistics_by_member() -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def of_dict(model: nn.Module, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(model(batch["x"]), batch["y"])

    inputs = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(7))
    pairs = [(inputs[0], torch.tensor([0, 1, 0, 0, 1])), (inputs[1], torch.tensor([1, 1, 0, 1, 0]))]
    dicts = [{"x": x, "y": y} for x, y in pairs]
    by_pair = trained(FP32Trainer(optimizer=SGD), built(network, 2), [pairs] * 3)
    own = FP32Trainer(optimizer=SGD, train_step=of_dict)
    assert_equal(trained(own, built(network, 2), [dicts] * 3), by_pair)


@pytest.mark.parametrize(
    ("train_step", "keys", "named"),
    [
        (None, ("ids", "mask"), ("no loss", "dict of ids, mask", "labels")),
        (None, ("ids",), ("FP32Trainer(train_step=...)",)),
        (lambda model, batch: 1.0, (), ("is float",)),
        (lambda model, batch: own_step(model, batch).detach(), (), ("without a gradient",)),
        (lambda model, batch: own_step(model, batch).expand(2), (), ("shape (2,)",)),
    ],
)
def test_losses_that_cannot_be_trained_are_refused(
    train_step: Any, keys: tuple[str, ...], named: tuple[str, ...]
) -> None:
    batch: Any = tokens(4, 3)
    if keys:
        batch = {key: batch[key] for key in keys} if len(keys) > 1 else batch[keys[0]]
    trainer = FP32Trainer(train_step=train_step)
    refused(lambda: trained(trainer, tagger(), [[batch]]), *named)
