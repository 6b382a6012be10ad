"""What is saved of a training is read back, whatever types an optimiser and a schedule have made."""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from socflower.training.fp32 import FP32Session, FP32Trainer, sgd
from socflower.training.saved_values import from_bytes, plain, require_readable, to_bytes
from socflower.training.trainer import TrainingSpan
from tests.one_line import refused
from tests.seeded import built


def cosine(optimizer: optim.Optimizer, steps: int) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(np.pi * step / steps)))


TRAINERS: dict[str, dict[str, Any]] = {
    "np.cos": {"optimizer": sgd(0.05), "scheduler": cosine},
    "rate of np.logspace": {"optimizer": partial(optim.SGD, lr=np.logspace(-3, -1, 5)[2])},
    "one cycle": {
        "optimizer": sgd(0.05),
        "scheduler": lambda own, steps: lr_scheduler.OneCycleLR(
            own, np.float64(0.1), total_steps=steps
        ),
    },
    "milestones": {
        "optimizer": sgd(0.05),
        "scheduler": lambda own, steps: lr_scheduler.MultiStepLR(own, np.array([2, 5])),
    },
    "betas": {"optimizer": partial(optim.AdamW, lr=1e-3, betas=tuple(np.array([0.9, 0.99])))},
}


def trained(session: FP32Session, num_steps: int) -> list[Tensor]:
    for step in range(num_steps):
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        session.step([(inputs, torch.arange(6) % 3)])
    return [parameter.detach().clone() for parameter in session._model.parameters()]


def network() -> nn.Module:
    return built(lambda: nn.Linear(4, 3), 1)


@pytest.mark.parametrize("name", TRAINERS)
def test_a_training_goes_on_from_what_was_saved_with_numbers_of_numpy(name: str) -> None:
    trainer = FP32Trainer(device="cpu", **TRAINERS[name])
    span = TrainingSpan(total_steps=12)
    model = network()
    straight = trainer.start(network(), span)
    first = trainer.start(model, span)
    for session in (first, straight):
        trained(session, 4)
    second = trainer.start(model, span, first.finish().state)
    for ours, reference in zip(trained(second, 4), trained(straight, 4), strict=True):
        assert torch.equal(ours, reference)


def test_values_of_numpy_become_those_of_python() -> None:
    state = {
        "a": np.float64(0.5),
        "b": (np.int64(3), [np.float32(0.25)]),
        "c": Counter({np.int64(2): 1}),
        "d": {np.int64(1): np.array([1.0, 2.0])},
        "e": None,
        "f": "text",
        "g": np.bool_(True),
    }
    assert from_bytes(to_bytes(state)) == {
        "a": 0.5,
        "b": (3, [0.25]),
        "c": Counter({2: 1}),
        "d": {1: [1.0, 2.0]},
        "e": None,
        "f": "text",
        "g": True,
    }
    assert type(plain(np.float64(0.5))) is float and type(plain(np.int64(3))) is int


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"own": {"queue": deque([1])}}, ("own['queue']", "deque")),
        ({"own": [1, object()]}, ("own[1]", "object")),
    ],
)
def test_a_value_that_would_not_be_read_is_named(
    state: dict[str, Any], named: tuple[str, str]
) -> None:
    refused(lambda: require_readable(state, "optimizer"), "optimizer", *named)


class Odd(lr_scheduler.LambdaLR):
    """Keeps an object that cannot be read back."""

    def __init__(self, optimizer: optim.Optimizer, keep: Callable[[], Any]) -> None:
        super().__init__(optimizer, lambda step: 1.0)
        self.kept = keep()


def test_a_schedule_that_cannot_be_saved_is_refused_before_the_first_step() -> None:
    trainer = FP32Trainer(scheduler=lambda own, steps: Odd(own, lambda: deque([1])), device="cpu")
    start = partial(trainer.start, network(), TrainingSpan())
    refused(start, "SGD and Odd", "scheduler['kept']", "deque")


class OddOptimizer(optim.SGD):
    """Keeps such an object for each parameter, from the first step on."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["seen"] = deque([1])


def test_an_optimiser_is_read_back_at_the_first_save() -> None:
    session = FP32Trainer(optimizer=OddOptimizer, device="cpu").start(network(), TrainingSpan())
    trained(session, 1)
    refused(session.finish, "parameters['weight']['seen']", "deque")
