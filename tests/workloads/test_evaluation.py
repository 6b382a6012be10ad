from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from socflower.errors import ConfigError
from socflower.workloads import LabelledData, build_model, evaluate, load_data


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
    model = build_model("mobilenet-v1", in_channels=3, image_size=32, num_classes=10, seed=0).train()
    frozen = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d)).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    evaluate(model, noise(4))
    assert [module for module in model.modules() if not module.training] == [frozen]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())


def test_modes_return_after_a_failure() -> None:
    model = build_model("lenet5", in_channels=1, image_size=28, num_classes=10, seed=0).train()
    with pytest.raises(RuntimeError):
        evaluate(model, noise(4))  # three channels, not one
    assert all(module.training for module in model.modules())


def test_nothing_to_evaluate_is_refused() -> None:
    model = nn.Flatten()
    with pytest.raises(ConfigError, match="no samples"):
        evaluate(model, noise(4).select([]))
    with pytest.raises(ConfigError, match="batch_size = 0 must be 1 or more"):
        evaluate(model, noise(4), batch_size=0)


def test_lenet_learns_the_digits(shared_cache: Path) -> None:
    data = load_data("digits")
    model = build_model("lenet5", in_channels=1, image_size=28, num_classes=10, seed=0)
    before = evaluate(model, data.test)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))
    for rows in order[: 60 * 64].split(64):
        inputs, labels = data.train.batch(rows)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    after = evaluate(model, data.test)
    assert before.accuracy < 0.3 and before.loss > 1.8
    assert after.accuracy > 0.75 and after.loss < before.loss / 2
