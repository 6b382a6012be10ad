"""Training steps of one's own: batches of any form, any loss, clipping, accumulation and bfloat16."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from socflower.errors import ConfigError
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.training.trainer import TrainingSpan
from tests.seeded import built


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


def trained(
    trainer: FP32Trainer, steps: list[list[Any]], model: nn.Module | None = None
) -> nn.Module:
    model = model or built(Tagger, 4)
    session = trainer.start(model, TrainingSpan(num_members=len(steps[0]), total_steps=len(steps)))
    for parts in steps:
        session.step(parts)
    session.finish()
    return model


def assert_close(ours: nn.Module, theirs: nn.Module) -> None:
    for first, second in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


def reference(steps: list[Any], *, clip: float | None = None) -> nn.Module:
    """Train on the parts of each step as a loop of one's own does: the gradient of the mean loss over all samples."""
    model = built(Tagger, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parts in steps:
        present = [part for part in parts if part != ()]
        total = sum(len(part["labels"]) for part in present)
        optimizer.zero_grad()
        sum(own_step(model, part) * (len(part["labels"]) / total) for part in present).backward()  # type: ignore[union-attr]
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


SGD = sgd(0.1, 0.9)


@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    counts=st.lists(st.integers(0, 4), min_size=4, max_size=4),
)
def test_members_with_batches_of_other_lengths_train_the_mean_over_all_samples(
    lengths: list[int],
    counts: list[int],
) -> None:
    parts = [
        tokens(count, length, seed) if count else ()
        for seed, (length, count) in enumerate(
            zip(lengths, [max(1, counts[0]), *counts[1:]], strict=False)
        )
    ]
    steps = [parts, parts]
    assert_close(trained(FP32Trainer(optimizer=SGD, train_step=own_step), steps), reference(steps))
    assert_close(
        trained(FP32Trainer(optimizer=SGD), steps), reference(steps)
    )  # by the model's own loss


def test_inputs_in_a_dict_or_a_tuple_beside_labels_reach_the_model() -> None:
    batch = tokens(6, 3)
    named = ({"ids": batch["ids"], "mask": batch["mask"]}, batch["labels"])
    placed = ((batch["ids"], batch["mask"]), batch["labels"])
    for pair in (named, placed):
        assert_close(trained(FP32Trainer(optimizer=SGD), [[pair]] * 2), reference([[batch]] * 2))


def test_the_norm_of_the_whole_groups_gradient_is_clipped() -> None:
    steps = [[tokens(4, 3, 1), tokens(2, 3, 2)]] * 3
    clipped = trained(FP32Trainer(optimizer=SGD, train_step=own_step, max_grad_norm=0.05), steps)
    assert_close(clipped, reference(steps, clip=0.05))
    with pytest.raises(AssertionError):
        assert_close(clipped, reference(steps))


@pytest.mark.parametrize("proximal_mu", [0.01, 1.0, 5.0])
def test_the_proximal_term_is_that_of_a_loss_that_contains_it(proximal_mu: float) -> None:
    """Li et al., Federated Optimization in Heterogeneous Networks: h(w) = F(w) + mu / 2 ||w - w_t||^2."""
    model, batch = built(Tagger, 4), tokens(6, 3)
    received = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        apart = zip(model.parameters(), received, strict=True)
        term = torch.stack([(parameter - start).square().sum() for parameter, start in apart]).sum()
        (own_step(model, batch) + proximal_mu / 2 * term).backward()
        optimizer.step()
    session = FP32Trainer(optimizer=SGD).start(
        ours := built(Tagger, 4), TrainingSpan(proximal_mu=proximal_mu)
    )
    for _ in range(4):
        session.step([batch])
    assert_close(ours, model)


@pytest.mark.parametrize("accumulation_steps", [1, 2, 3, 7, 20])
def test_accumulated_passes_have_the_gradient_of_one(accumulation_steps: int) -> None:
    sizes: list[int] = []

    def noted(model: nn.Module, batch: Any) -> torch.Tensor:
        sizes.append(len(batch["labels"]))
        return own_step(model, batch)

    trainer = FP32Trainer(optimizer=SGD, train_step=noted, accumulation_steps=accumulation_steps)
    assert_close(trained(trainer, [[tokens(7, 3)]] * 2), reference([[tokens(7, 3)]] * 2))
    assert len(sizes) == 2 * min(7, accumulation_steps) and max(sizes) - min(sizes) <= 1
    session = trainer.start(built(Tagger, 4), TrainingSpan())
    assert session.final_in_backward is (accumulation_steps == 1)


def test_bfloat16_runs_in_the_passes_alone() -> None:
    seen = set()

    def noted(model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(batch["ids"], batch["mask"])
        seen.add(logits.dtype)
        return functional.cross_entropy(logits.float(), batch["labels"])

    model = trained(
        FP32Trainer(optimizer=SGD, train_step=noted, autocast=torch.bfloat16), [[tokens(6, 3)]] * 2
    )
    assert seen == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    for ours, theirs in zip(
        model.parameters(), reference([[tokens(6, 3)]] * 2).parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.01)


def test_own_steps_of_batch_norm_models_keep_statistics_by_member() -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    generator = torch.Generator().manual_seed(7)
    pairs = [
        (torch.randn(5, 3, generator=generator), torch.randint(0, 2, (5,), generator=generator))
        for _ in range(2)
    ]
    by_pair = trained(FP32Trainer(optimizer=SGD), [pairs] * 3, built(network, 2))
    by_step = trained(
        FP32Trainer(
            optimizer=SGD,
            train_step=lambda model, batch: functional.cross_entropy(model(batch["x"]), batch["y"]),
        ),
        [[{"x": x, "y": y} for x, y in pairs]] * 3,
        built(network, 2),
    )
    for ours, theirs in zip(
        by_step.state_dict().values(), by_pair.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs)


def refused(trainer: FP32Trainer, batch: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        trained(trainer, [[batch]], copy.deepcopy(built(Tagger, 4)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_losses_that_cannot_be_trained_are_one_line() -> None:
    batch = tokens(4, 3)
    without = {"ids": batch["ids"], "mask": batch["mask"]}
    assert "returned no loss for a dict of ids, mask; give it its labels" in refused(
        FP32Trainer(), without
    )
    assert "give FP32Trainer(train_step=...)" in refused(FP32Trainer(), batch["ids"])
    for made, says in (
        (lambda model, batch: 1.0, "is float"),
        (lambda model, batch: own_step(model, batch).detach(), "a tensor without a gradient"),
        (lambda model, batch: own_step(model, batch).expand(2), "a tensor of shape (2,)"),
    ):
        assert says in refused(FP32Trainer(train_step=made), batch)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"train_step": own_step, "loss": functional.nll_loss}, "give one of the two"),
        ({"accumulation_steps": 0}, "accumulation_steps = 0"),
        ({"accumulation_steps": 1.5}, "accumulation_steps = 1.5"),
        ({"max_grad_norm": 0.0}, "max_grad_norm = 0.0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm = nan"),
        ({"autocast": torch.float16}, "use torch.bfloat16"),
    ],
)
def test_options_that_cannot_be_are_one_line(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FP32Trainer(**options)
    assert says in str(caught.value) and "\n" not in str(caught.value)
