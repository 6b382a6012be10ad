"""Learning rates over a training: torch's schedulers, and factors by the number of a batch."""

import math
from collections.abc import Callable
from typing import Annotated, TypeAlias

import torch
from pydantic import Field
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler

from socflower.errors import ConfigError
from socflower.field_rules import OneOf, checked
from socflower.plain_numbers import plain_numbers

SchedulerFn: TypeAlias = Callable[[Optimizer, int], LRScheduler]
Schedule: TypeAlias = Callable[[int], float]
"""The factor on the learning rate by batch number over the whole training; both halves apply the same factor."""


KINDS = ("cosine", "constant", "multi-step", "exponential")


@checked
class RateSchedule:
    """The factor on the learning rate by the fraction of a training of `num_epochs` that is done.

    `cosine` falls from 1 to 0. `multi-step` is multiplied by `factor` at each epoch of `milestones`, `exponential`
    after every epoch, as torch's MultiStepLR and ExponentialLR stepped once an epoch.
    """

    kind: Annotated[str, OneOf(KINDS)] = "cosine"
    num_epochs: Annotated[int, Field(ge=1)] = 1
    milestones: tuple[Annotated[int, Field(ge=1)], ...] = ()
    factor: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1

    def check(self) -> None:
        """Raise `ConfigError` for milestones that do not rise, are never reached, or belong to no step."""
        if self.kind != "multi-step":
            if self.milestones:
                raise ConfigError(
                    f"milestones = {list(self.milestones)} belong to a multi-step schedule"
                )
            return
        rise = list(self.milestones) == sorted(set(self.milestones))
        if not self.milestones or not rise or self.milestones[-1] >= self.num_epochs:
            raise ConfigError(
                f"milestones = {list(self.milestones)}: a multi-step schedule needs rising epochs below the training's "
                f"{self.num_epochs}"
            )

    def at(self, progress: float) -> float:
        """Return the factor at a fraction in [0, 1]."""
        if self.kind == "constant":
            return 1.0
        if self.kind == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        # Fractions of batches round to either side of an epoch's end.
        epoch = math.floor(progress * self.num_epochs + 1e-6)
        if self.kind == "exponential":
            return self.factor**epoch
        return self.factor ** sum(milestone <= epoch for milestone in self.milestones)


def scheduler_of(schedule: RateSchedule, optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """Return a torch scheduler, stepped once a batch, that follows a schedule."""
    if schedule.kind == "cosine":
        return cosine_annealing(optimizer, total_steps)

    def factor(step: int) -> float:
        return schedule.at(min(1.0, step / max(1, total_steps)))

    return LambdaLR(optimizer, factor)


@plain_numbers
def cosine_annealing(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """Anneal the learning rate to zero along a cosine over all steps, as SoCFlow+ does."""
    return CosineAnnealingLR(optimizer, T_max=max(1, total_steps))


def constant_rate(batch: int) -> float:
    """Return 1 for every batch."""
    return 1.0


@plain_numbers
def torch_schedule(scheduler: SchedulerFn, num_batches: int) -> Schedule:
    """Return the factors of a torch scheduler as a schedule: `scheduler(optimizer, num_batches)`, as in `FP32Trainer`.

    Raises `ConfigError` for a scheduler that follows the loss, sets absolute rates, or changes more than the rate: each
    half knows the batch's number only.
    """
    factors, doubled = (_rates(scheduler, num_batches, rate) for rate in (1.0, 2.0))
    if any(
        abs(twice - 2.0 * once) > 1e-9
        for once, twice in zip(
            factors,
            doubled,
            strict=True,
        )
    ):
        raise ConfigError(
            "split training: the scheduler sets absolute rates; use one that scales the optimiser's"
        )
    return lambda batch: factors[min(batch, num_batches - 1)]


def _rates(scheduler: SchedulerFn, num_batches: int, rate: float) -> list[float]:
    probe = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=rate, momentum=0.9)
    (group,) = probe.param_groups
    made = scheduler(probe, num_batches)
    rates = list[float]()
    where = f"split training: {type(made).__name__}"
    for _ in range(num_batches):
        rates.append(float(group["lr"]))
        probe.step()
        try:
            made.step()
        except TypeError:
            raise ConfigError(
                f"{where} follows the loss, which the edge learns too late; use one of the batch's number"
            ) from None
    if group["momentum"] != 0.9:
        raise ConfigError(f"{where} changes momentum too; use a scheduler of the rate alone")
    return rates
