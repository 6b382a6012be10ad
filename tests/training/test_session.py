"""A session of a part of a model: parts that pass tensors on compute what the whole model does, and exchange states."""

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from socflower.training.fp32 import FP32Trainer
from socflower.training.saved_values import from_bytes, to_bytes
from socflower.training.session import PARAMETERS, OptimizerFn, TorchSession
from socflower.training.trainer import TrainingSpan
from tests.one_line import refused
from tests.seeded import built

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
OPTIMIZERS: dict[str, OptimizerFn] = {
    "sgd": SGD,
    "plain sgd": partial(torch.optim.SGD, lr=0.05),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
}
CUTS = [(), (1,), (3,), (1, 2, 4)]
NUM_STEPS, IN_FLIGHT = 4, 3


def network() -> nn.Sequential:
    def make() -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
        )

    return built(make, 1)


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 5, generator=generator), torch.arange(4) % 3


def parts_of(model: nn.Sequential, cuts: tuple[int, ...], **how: Any) -> list[TorchSession]:
    """Return the sessions of the layers between cuts; names are those in the model."""
    ends = [0, *cuts, len(model)]
    sessions = []
    for first, stop in pairwise(ends):
        layers = model[first:stop]
        # A slice of a Sequential keeps the names.
        named = dict(layers.named_parameters())

        def run(number: int, entering: Tensor, own: nn.Module = layers) -> Tensor:
            return own(entering)

        sessions.append(TorchSession(run, named, **{"optimizer": SGD, "where": "test", **how}))
    return sessions


def train_in_parts(sessions: list[TorchSession], steps: Iterable[int]) -> None:
    """Train with several passes in flight; each update is by the mean over them."""
    for step in steps:
        numbers = range(step * IN_FLIGHT, (step + 1) * IN_FLIGHT)
        for session in sessions:
            session.begin()
        results = {}
        for number in numbers:
            entering, _ = batch(number)
            for position, session in enumerate(sessions):
                leaf = entering.requires_grad_(position > 0)
                (entering,) = session.forward(number, leaf)
            results[number] = entering
        for number in numbers:
            made = results[number].requires_grad_()
            (functional.cross_entropy(made, batch(number)[1]) / IN_FLIGHT).backward()
            gradient: Tensor | None = made.grad
            for session in reversed(sessions):
                (gradient,) = session.backward(number, [gradient])
            assert gradient is None
        for session in sessions:
            session.step(step)


def train_whole(
    model: nn.Module, optimizer: Optimizer, steps: Iterable[int], schedule: Any = None
) -> None:
    for step in steps:
        optimizer.zero_grad()
        for number in range(step * IN_FLIGHT, (step + 1) * IN_FLIGHT):
            inputs, labels = batch(number)
            (functional.cross_entropy(model(inputs), labels) / IN_FLIGHT).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts_of_a_model_train_as_the_whole_does(cuts: tuple[int, ...], name: str) -> None:
    """Bit for bit against torch's own loop, though a part without weights has no optimiser."""
    reference, model = network(), network()
    train_whole(reference, OPTIMIZERS[name](reference.parameters()), range(NUM_STEPS))
    train_in_parts(parts_of(model, cuts, optimizer=OPTIMIZERS[name]), range(NUM_STEPS))
    assert same(model, reference)


def merged(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for state in states:
        parameters = {**whole.get(PARAMETERS, {}), **state.get(PARAMETERS, {})}
        whole = {**whole, **state, PARAMETERS: parameters}
    return whole


@pytest.mark.parametrize("before", CUTS)
@pytest.mark.parametrize("after", CUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_continues_from_saved_states_of_any_parts(
    before: tuple[int, ...], after: tuple[int, ...], name: str
) -> None:
    def falling(optimizer: Optimizer, steps: int) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: 1.0 - step / steps)

    how = {"optimizer": OPTIMIZERS[name], "scheduler": falling, "total_steps": NUM_STEPS}
    reference, model = network(), network()
    updates = OPTIMIZERS[name](reference.parameters())
    train_whole(reference, updates, range(NUM_STEPS), falling(updates, NUM_STEPS))
    first = parts_of(model, before, **how)
    train_in_parts(first, range(2))
    saved = to_bytes(merged(session.state() for session in first))
    second = parts_of(model, after, **how)
    for session in second:
        session.restore(from_bytes(saved))
    train_in_parts(second, range(2, NUM_STEPS))
    assert same(model, reference)


def test_a_schedule_by_numbers_needs_no_state() -> None:
    """It sets the rates that torch's scheduler sets, also for a session that begins in the middle."""
    reference, model = network(), network()
    updates = SGD(reference.parameters())
    schedule = LambdaLR(updates, lambda step: 1.0 / (1 + step))
    train_whole(reference, updates, range(NUM_STEPS), schedule)
    how: dict[str, Any] = {"schedule": lambda number: 1.0 / (1 + number)}
    first = parts_of(model, (3,), **how)
    train_in_parts(first, range(2))
    second = parts_of(model, (1,), **how)
    moved = merged({PARAMETERS: session.state()[PARAMETERS]} for session in first)
    for session in second:
        session.restore(moved)
    train_in_parts(second, range(2, NUM_STEPS))
    assert same(model, reference)


class Slow(torch.optim.SGD):
    """Keeps more in its `state_dict` than torch's optimisers: a count of steps of its own."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        self.num_steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.num_steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.num_steps}

    def load_state_dict(self, state_dict: Any) -> None:
        self.num_steps = state_dict["steps"]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


def test_what_an_optimiser_adds_to_its_state_is_saved_too() -> None:
    trainer = FP32Trainer(optimizer=Slow, device="cpu")
    model = network()
    first = trainer.start(model, TrainingSpan())
    for number in range(3):
        first.step([batch(number)])
    second = trainer.start(model, TrainingSpan(), first.finish().state)
    assert isinstance(second._optimizer, Slow) and second._optimizer.num_steps == 3


def test_a_pass_is_kept_until_its_gradient_comes_or_it_is_discarded() -> None:
    (session,) = parts_of(network(), ())
    inputs, _ = batch(0)
    made, alone = session.forward(0, inputs), session.forward(1, inputs, keep=False)
    assert torch.equal(made[0], alone[0]) and not made[0].requires_grad
    assert session.keeps(0) and not session.keeps(1)
    session.forward(2, inputs)
    session.discard(2)
    session.backward(0, [torch.ones_like(made[0])])
    assert not session.keeps(0) and not session.keeps(2)


def test_random_layers_draw_from_the_stream_of_the_pass() -> None:
    dropout = nn.Dropout(0.5)

    def run(number: int, entering: Tensor) -> Tensor:
        return dropout(entering)

    session = TorchSession(run, {}, SGD, where="test", seed=3)
    ones = torch.ones(64)
    before = torch.get_rng_state()
    (first,), (again,), (other,) = (
        session.forward(number, ones, stream=stream) for number, stream in ((0, 5), (1, 5), (5, 6))
    )
    (by_number,) = session.forward(5, ones)
    assert torch.equal(first, again) and torch.equal(first, by_number)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_groups_of_another_part_are_refused_with_both_numbers() -> None:
    def two_groups(parameters: Iterable[nn.Parameter]) -> Optimizer:
        own = list(parameters)
        return SGD([{"params": own[:1]}, {"params": own[1:], "lr": 0.01}])

    (one,), (two,) = parts_of(network(), ()), parts_of(network(), (), optimizer=two_groups)
    refused(lambda: two.restore(one.state()), "test", "2", "1", "groups")
