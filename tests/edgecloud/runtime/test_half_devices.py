"""Halves on an accelerator: what crosses the cut is on the CPU, and the weights are the CPU's, on a fake device."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from socflower.edgecloud.runtime.back import TorchBack
from socflower.edgecloud.runtime.front import TorchFront
from socflower.edgecloud.runtime.measuring import Measuring, measure_costs
from socflower.edgecloud.split_program import LayeredProgram
from tests.edgecloud.runtime.split_training import (
    LOSS,
    Optimizer,
    Source,
    adam,
    assert_same,
    chain,
    chain_split,
    falling,
    halves,
    move,
    one_batch,
    sgd,
    train_locally,
)
from tests.fake_device import MODULE, fake_device  # noqa: F401 - a fixture
from tests.one_line import refused

pytestmark = pytest.mark.usefixtures("fake_device")


def on(devices: tuple[str, str], cut: int, optimizer: Optimizer) -> tuple[TorchFront, TorchBack]:
    """Return halves on a device each."""
    split, here, there = chain_split(), *devices
    how: dict[str, Any] = {"schedule": falling, "loss": LOSS}
    front = TorchFront(split.copy(), cut, Source(), optimizer, **how, device=here)
    return front, TorchBack(split.copy(), cut, optimizer, **how, device=there)


@pytest.mark.few_cells(2)
@pytest.mark.parametrize(
    "devices", [pair for pair in itertools.product(("cpu", "fake"), repeat=2) if "fake" in pair]
)
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_halves_on_any_devices_train_what_the_whole_model_does(
    devices: tuple[str, str], optimizer: Optimizer
) -> None:
    """Also while the cut moves, by replay and with a kept graph, and after a state was saved and restored."""
    losses, expected = train_locally(chain_split(), 6, optimizer)
    front, back = on(devices, 2, optimizer)
    ours = [one_batch(front, back, 0), one_batch(front, back, 1, keep_graph=False)]
    for batch, cut in ((2, 4), (3, 1), (4, front.all_layers_cut)):
        move(front, back, cut)
        ours.append(one_batch(front, back, batch))
    move(front, back, 3)
    again = on(devices, 3, optimizer)
    again[0].restore(front.save())
    again[1].restore(back.save())
    ours.append(one_batch(*again, 5))
    assert ours == losses
    assert_same({**again[0].weights(), **again[1].weights()}, expected)


def test_a_state_of_the_accelerator_continues_on_the_cpu() -> None:
    front, back = on(("fake", "fake"), 2, adam)
    one_batch(front, back, 0)
    plain = halves(chain_split(), 2, adam)
    plain[0].restore(front.save())
    plain[1].restore(back.save())
    assert one_batch(*plain, 1) == one_batch(front, back, 1)


def program(device: str) -> LayeredProgram:
    return LayeredProgram(model_fn=chain, example=(6,), optimizer=sgd, device=device)


def test_a_program_runs_on_what_each_machine_has() -> None:
    ends = []
    for device, used in (("auto", "fake"), ("cpu", "cpu")):
        made = program(device)
        front, back = made.front(0, 2, Source()).half, made.back(2).half
        one_batch(front, back, 0)
        assert {each.device.type for each in back.split.tensors().values()} == {used}
        ends.append({**front.weights(), **back.weights()})
    assert all(np.array_equal(ends[0][name], ends[1][name]) for name in ends[1])
    refused(lambda: program("cuda").back(2), "device = 'cuda'", "fake:0")


def test_costs_are_timed_when_the_device_is_done() -> None:
    before, device = MODULE.num_synchronisations, torch.device("fake", 0)
    how = Measuring(optimizer=sgd, batch_size=4, num_repeats=1, num_warm_ups=1, device=device)
    costs = measure_costs(chain_split(), how)
    assert MODULE.num_synchronisations >= before + 2 * len(costs.cuts)
