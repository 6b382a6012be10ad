"""Stages on an accelerator: they train there, and results say so."""

import pytest
import torch

from socflower.training.fp32 import FP32Trainer, sgd
from tests.fake_device import fake_device  # noqa: F401 - a fixture
from tests.pipeline.runtime.training import minis, model, plan_of, train_together


@pytest.mark.parametrize("on", ["cpu", "accelerator"])
def test_stages_train_on_the_trainers_device_and_results_name_it(fake_device: str, on: str) -> None:  # noqa: F811
    device = fake_device if on == "accelerator" else "cpu"
    plan = plan_of((1, 3, 5), ((4,), (2, 2), (4,)), 4)
    end = train_together(
        model(norm=True), plan, minis(2, 16), FP32Trainer(optimizer=sgd(0.1), device=device)
    )
    reference = train_together(model(norm=True), plan, minis(2, 16))
    assert set(end.devices) == set(plan.socs)
    assert all(device.partition(":")[0] in name for name in end.devices.values()), end.devices
    assert all(
        torch.allclose(end.weights[name], weight, atol=1e-6)
        for name, weight in reference.weights.items()
    )
