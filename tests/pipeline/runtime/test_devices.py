"""Stages on an accelerator: they train there, and results say so."""

import pytest

from socflower.training.fp32 import FP32Trainer, sgd
from tests.fake_device import fake_device  # noqa: F401 - a fixture
from tests.pipeline.problems import straight_plan
from tests.pipeline.runtime.training import assert_close, minis, model, train_together


@pytest.mark.parametrize("on", ["cpu", "accelerator"])
def test_stages_train_on_the_trainers_device_and_results_name_it(fake_device: str, on: str) -> None:  # noqa: F811
    device = fake_device if on == "accelerator" else "cpu"
    module, plan = model(norm=True), straight_plan((1, 3, 5), ((4,), (2, 2), (4,)), 4)
    trainer = FP32Trainer(optimizer=sgd(0.1), device=device)
    end = train_together(module, plan, minis(2, 16), trainer)
    assert set(end.devices) == set(plan.socs)
    assert all(device.partition(":")[0] in name for name in end.devices.values()), end.devices
    assert_close(end.weights, train_together(module, plan, minis(2, 16)).weights, 1e-6)
