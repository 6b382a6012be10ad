"""Learning rates over a training: torch's schedulers, and factors by the number of a batch."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from socflower.errors import ConfigError
from socflower.plain_numbers import plain_numbers

SchedulerFn: TypeAlias = Callable[[Optimizer, int], LRScheduler]
Schedule: TypeAlias = Callable[[int], float]
"""The factor on the learning rate by batch number over the whole training; both halves apply the same factor."""


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
