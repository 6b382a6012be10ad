"""Schedules of the learning rate: torch's own schedulers are the reference."""

import pytest
import torch
from torch import nn

from socflower.errors import ConfigError
from socflower.scenario.runner import run_scenario
from socflower.training.int8 import Int8Trainer
from socflower.training.schedules import RateSchedule, scheduler_of
from tests.few_digits import few_digits
from tests.scenario.small_runs import small

STEPS, EPOCHS = 7, 6
SCHEDULES = {
    "multi-step": (
        RateSchedule(kind="multi-step", num_epochs=EPOCHS, milestones=(2, 5), factor=0.3),
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.3),
    ),
    "exponential": (
        RateSchedule(kind="exponential", num_epochs=EPOCHS, factor=0.7),
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7),
    ),
    "constant": (
        RateSchedule(kind="constant", num_epochs=EPOCHS),
        lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0),
    ),
}


def rates(make, *, steps_per_call):
    """Return the rate of each batch under a scheduler that is stepped once in so many batches."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.4)
    scheduler = make(optimizer)
    found = []
    for batch in range(STEPS * EPOCHS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if (batch + 1) % steps_per_call == 0:
            scheduler.step()
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_torchs_scheduler_stepped_once_an_epoch(name):
    schedule, reference = SCHEDULES[name]
    ours = rates(lambda one: scheduler_of(schedule, one, STEPS * EPOCHS), steps_per_call=1)
    assert ours == pytest.approx(rates(reference, steps_per_call=STEPS))
    trainer = Int8Trainer(learning_rate=0.4, schedule=schedule)
    by_progress = [trainer.rate(batch / (STEPS * EPOCHS)) for batch in range(STEPS * EPOCHS)]
    assert by_progress == pytest.approx(ours)


def test_a_scenario_trains_with_rmsprop_and_a_rate_that_falls_to_nothing():
    """After the milestone the rate is 1e-9 of what it was, so the second epoch changes nothing that counts."""
    scenario = small(epochs=2, interval=1.0)
    train = scenario.train.replaced(
        optimizer="rmsprop",
        learning_rate=0.001,
        schedule="multi-step",
        milestones=(1,),
        decay_factor=1e-9,
    )
    with few_digits():
        stepped = run_scenario(scenario.replaced(train=train), num_workers=0)
    first, second = (entry["accuracy"] for entry in stepped["rounds"][-2:])
    assert first == pytest.approx(second, abs=0.01)
    assert first > 0.2


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "multi-step"},
        {"kind": "multi-step", "milestones": (3, 2)},
        {"kind": "multi-step", "milestones": (EPOCHS,)},
        {"kind": "cosine", "milestones": (2,)},
        {"kind": "linear"},
        {"kind": "exponential", "factor": 0.0},
    ],
)
def test_a_schedule_that_cannot_be_is_refused(settings):
    with pytest.raises(ConfigError):
        RateSchedule(num_epochs=EPOCHS, **settings)
