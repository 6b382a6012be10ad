from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from socflower.workloads.dataset import LabelledData
from socflower.workloads.evaluation import evaluate
from socflower.workloads.models.classifiers import build_model
from socflower.workloads.sources import load_data
from tests.one_line import refused
from tests.seeded import built


def noise(num_samples: int) -> LabelledData:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randint(0, 256, (num_samples, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (num_samples,), generator=generator)
    return LabelledData(inputs, labels, (0.5,) * 3, (0.25,) * 3, 10)


@pytest.mark.parametrize("batch_size", [1, 7, 20, 500])
def test_every_batch_size_gives_the_same_result(batch_size: int) -> None:
    data = noise(20)
    model = build_model("lenet5", in_channels=3, image_size=32, num_classes=10, seed=0)
    inputs, labels = data.batch(range(20))
    with torch.no_grad():
        logits = model.eval()(inputs)
    result = evaluate(model, data, batch_size)
    assert result.num_samples == 20
    assert result.accuracy == pytest.approx(float((logits.argmax(1) == labels).float().mean()))
    assert result.loss == pytest.approx(float(functional.cross_entropy(logits, labels)), rel=1e-4)


def test_modes_and_statistics_stay_as_they_were() -> None:
    model = build_model(
        "mobilenet-v1", in_channels=3, image_size=32, num_classes=10, seed=0
    ).train()
    frozen = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d)).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    evaluate(model, noise(4))
    assert [module for module in model.modules() if not module.training] == [frozen]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())


def test_modes_return_after_a_failure() -> None:
    model = build_model("lenet5", in_channels=1, image_size=28, num_classes=10, seed=0).train()
    with pytest.raises(RuntimeError):
        # Three channels, not one.
        evaluate(model, noise(4))
    assert all(module.training for module in model.modules())


def test_nothing_to_evaluate_is_refused() -> None:
    flat, linear = nn.Flatten(), nn.Linear(4, 1)
    targets = [(torch.zeros(4), torch.tensor(0.5))] * 4
    ignored = DataLoader(with_ignored(4, 1))

    def either(model: nn.Module, batch: Any) -> dict[str, float]:
        return {"a" if len(batch[0]) == 3 else "b": 1.0}

    refused(lambda: evaluate(flat, noise(4).select([])), "no samples")
    refused(lambda: evaluate(flat, noise(4), batch_size=0), "batch_size = 0")
    refused(lambda: evaluate(linear, targets), "(4,)", "classes")
    refused(lambda: evaluate(linear, [torch.zeros(4)] * 4), "a tensor of shape")
    refused(lambda: evaluate(linear, targets, 3, step=either), "gave a", "b")
    refused(lambda: evaluate(nn.Linear(5, 3), ignored), "label")


class Regression(nn.Module):
    """Returns what models of Hugging Face return: a loss, and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = self.layer(inputs)
        return SimpleNamespace(logits=logits, loss=functional.cross_entropy(logits, labels))


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        {"inputs": torch.randn(4, generator=generator), "labels": torch.tensor(number % 3)}
        for number in range(count)
    ]


def test_dicts_have_the_models_own_loss_and_the_accuracy_of_its_logits() -> None:
    model, data = built(Regression, 3), rows(20)
    inputs, labels = (torch.stack([row[key] for row in data]) for key in ("inputs", "labels"))
    with torch.no_grad():
        made = model(inputs, labels)
    found = evaluate(model, data, 7)
    assert found.accuracy == pytest.approx(float((made.logits.argmax(1) == labels).float().mean()))
    assert found.loss == pytest.approx(float(made.loss), rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 7, 20])
def test_a_users_metrics_are_means_over_samples(batch_size: int) -> None:
    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | float]:
        ones = (batch["labels"] == 1).float()
        return {"mse": (model.layer(batch["inputs"]) ** 2).mean(), "share": float(ones.mean())}

    model, data = built(Regression, 3), rows(20)
    found = evaluate(model, DataLoader(data, batch_size=3), batch_size, step=step)
    with torch.no_grad():
        expected = float((model.layer(torch.stack([row["inputs"] for row in data])) ** 2).mean())
    assert found.metrics == pytest.approx({"mse": expected, "share": 7 / 20}, rel=1e-5)
    refused(lambda: found.accuracy, "accuracy", "mse, share")


def test_lenet_learns_the_digits(shared_cache: Path) -> None:
    data = load_data("digits")
    model = build_model("lenet5", in_channels=1, image_size=28, num_classes=10, seed=0)
    test = data.test.select(range(300))
    before = evaluate(model, test)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))
    for rows in order[: 30 * 64].split(64):
        inputs, labels = data.train.batch(rows)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    after = evaluate(model, test)
    assert before.accuracy < 0.3 and before.loss > 1.8
    assert after.accuracy > 0.5 and after.loss < before.loss


def with_ignored(num_samples: int, every: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return samples of three classes, of which each `every`-th has a label that is ignored."""
    inputs = torch.randn(num_samples, 5, generator=torch.Generator().manual_seed(6))
    labels = torch.arange(num_samples) % 3
    labels[::every] = -100
    return list(zip(inputs, labels, strict=True))


@pytest.mark.parametrize("batch_size", [1, 4, 50])
def test_labels_that_are_ignored_do_not_count(batch_size: int) -> None:
    """In batches of one, whole batches have no label that counts."""
    model, data = built(lambda: nn.Linear(5, 3), 1), with_ignored(20, 3)
    inputs, labels = (torch.stack(part) for part in zip(*data, strict=True))
    with torch.no_grad():
        logits = model(inputs)
    result = evaluate(model, DataLoader(data), batch_size)
    counted = labels != -100
    assert (result.num_samples, result.num_examples) == (20, int(counted.sum()))
    assert result.loss == pytest.approx(float(functional.cross_entropy(logits, labels)), rel=1e-5)
    assert result.accuracy == pytest.approx(
        float((logits.argmax(1) == labels)[counted].float().mean())
    )


def test_metrics_of_ones_own_divide_by_the_weight_that_is_given() -> None:
    model, data = built(lambda: nn.Linear(5, 3), 1), DataLoader(with_ignored(20, 3))

    def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"loss": functional.cross_entropy(model(batch[0]), batch[1])}

    def weight(batch: tuple[torch.Tensor, torch.Tensor]) -> int:
        return int((batch[1] != -100).sum())

    whole = pytest.approx(evaluate(model, data, 50, step=step, weight=weight).loss, rel=1e-5)
    assert evaluate(model, data, 7, step=step, weight=weight).loss == whole
    assert evaluate(model, data, 7, step=step).loss != whole
    refused(lambda: evaluate(model, data, step=step, weight=lambda batch: -1), "weight", "-1")
