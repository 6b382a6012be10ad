"""One optimiser over the current layers of a half; its state moves with the layers."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from socflower.errors import ConfigError, require_range
from socflower.plain_numbers import plain_numbers
from socflower.training.fp32 import SchedulerFn, require_no_closure

SEPARATOR = "::"
"""Separates a weight's name from a key of its optimiser state."""

OptimizerFactory: TypeAlias = Callable[[Iterable[nn.Parameter]], Optimizer]
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


class HalfOptimizer:
    """Updates named weights, except those that are not trained.

    `max_grad_norm` limits the norm of all gradients of the half; the other half has its own.

    The update of a weight must depend on that weight and its state alone, as in SGD and Adam: then two halves do what
    one optimiser over the whole model does. State must be tensors per weight; `ConfigError` otherwise (LBFGS).
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        schedule: Schedule = constant_rate,
        *,
        max_grad_norm: float | None = None,
    ) -> None:
        self._factory = factory
        self._max_grad_norm = max_grad_norm
        self._schedule = schedule
        self._weights: dict[str, nn.Parameter] = {}
        self._optimizer: Optimizer | None = None
        self._rates: list[float] = []

    def set_weights(
        self, weights: Mapping[str, torch.Tensor], taken: Mapping[str, NDArray[Any]] | None = None
    ) -> None:
        """Set the weights to update: weights that stay keep their state, the state of new ones is in `taken`."""
        state = {**self.state(), **(taken or {})}
        named: dict[str, nn.Parameter] = {}
        first_names: dict[int, str] = {}
        for name, weight in weights.items():
            if isinstance(weight, nn.Parameter) and weight.requires_grad:
                # A tied weight is updated under its first name, at the place of its last one.
                first = first_names.setdefault(id(weight), name)
                named.pop(first, None)
                named[first] = weight
        self._weights = named
        self._rates = []
        # torch optimisers do not accept an empty list of weights.
        self._optimizer = self._factory(list(named.values())) if named else None
        if self._optimizer is None:
            return
        require_no_closure(self._optimizer, "split training")
        groups = self._optimizer.param_groups
        if {id(weight) for group in groups for weight in group["params"]} != set(first_names):
            raise ConfigError(
                f"optimizer: {type(self._optimizer).__name__} must hold the weights with which its function is "
                "called; exclude some by requires_grad_(False)"
            )
        self._rates = [float(group["lr"]) for group in groups]
        for key, array in state.items():
            name, _, entry = key.partition(SEPARATOR)
            if name in named:
                self._optimizer.state[named[name]][entry] = self._tensor(named[name], array)

    def zero_grad(self) -> None:
        """Reset gradients to None."""
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)

    def step(self, batch: int) -> None:
        """Update all weights by their gradients, with the learning rate of a batch."""
        if self._optimizer is None:
            return
        factor = self._schedule(batch)
        require_range(f"schedule: batch {batch}", least=0, factor=factor)
        for group, rate in zip(
            self._optimizer.param_groups,
            self._rates,
            strict=True,
        ):
            group["lr"] = rate * factor
        if self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._weights.values(), self._max_grad_norm)
        self._optimizer.step()

    def state(self, names: Iterable[str] | None = None) -> dict[str, NDArray[Any]]:
        """Return the state of the named weights, or of all, by `name::key`."""
        if self._optimizer is None:
            return {}
        arrays: dict[str, NDArray[Any]] = {}
        wanted = (
            self._weights if names is None else [name for name in names if name in self._weights]
        )
        for name in wanted:
            for entry, value in self._optimizer.state.get(self._weights[name], {}).items():
                if isinstance(value, torch.Tensor):
                    arrays[f"{name}{SEPARATOR}{entry}"] = np.array(value.detach().cpu().numpy())
                # The momentum of SGD without momentum is None.
                elif value is not None:
                    raise ConfigError(
                        f"optimizer: {type(self._optimizer).__name__} keeps {entry} as {type(value).__name__}, which "
                        "cannot move with a layer; use SGD or Adam"
                    )
        return arrays

    def _tensor(self, weight: nn.Parameter, array: NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(np.array(array))
        # Adam keeps its step count on the CPU, unless it is capturable or fused.
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        in_kernel = any(group.get("capturable") or group.get("fused") for group in groups)
        return tensor.to(weight.device) if tensor.ndim or in_kernel else tensor
