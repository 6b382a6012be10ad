"""One session of training for a whole model, a half of one, or a stage: forward, backward, step, state."""

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from socflower.errors import ConfigError, require_range
from socflower.model_graph.parts import random_streams
from socflower.training.proximal_term import ProximalTerm
from socflower.training.saved_values import plain, require_readable
from socflower.training.schedules import Schedule, SchedulerFn

OptimizerFn: TypeAlias = Callable[[Iterable[nn.Parameter]], Optimizer]
LossFn: TypeAlias = Callable[[Any, Any], Tensor]

PARAMETERS = "parameters"
"""The key of a session's state under which it has the state of each parameter, by name."""


class Session(Protocol):
    """What one machine trains: a whole model, a half of one, or a stage.

    Several passes may wait for their gradients at once, each under its number.
    """

    def forward(
        self, number: int, *inputs: Any, keep: bool = True, stream: int | None = None
    ) -> tuple[Tensor, ...]:
        """Return the outputs of a pass, without a graph; with `keep` the pass waits for `backward`.

        `stream` is the number of its random stream, by default that of the pass.
        """
        ...

    def backward(
        self, number: int, gradients: Sequence[Tensor | None] | None = None
    ) -> tuple[Tensor | None, ...]:
        """Take the gradients of a pass's outputs; return one for each input, None if it needs none.

        Without gradients the pass has returned its loss. Gradients of parameters add up until `begin`. An int8 session
        updates its weights here, as their gradients are computed.
        """
        ...

    def begin(self) -> None:
        """Clear the gradients of the last step."""
        ...

    def step(self, number: int = 0) -> None:
        """Update the weights with the gradients; a schedule may need the number of the batch."""
        ...

    def keeps(self, number: int) -> bool:
        """Return whether a pass waits for `backward`; another pass may have taken the memory of one in int8."""
        ...

    def discard(self, number: int) -> None:
        """Free the memory of a pass that gets no backward pass."""
        ...

    def state(self) -> dict[str, Any]:
        """Return everything besides weights and buffers that `restore` needs; `PARAMETERS` has it by name."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of this session's parameters from that of one or several sessions."""
        ...


@dataclass(frozen=True, slots=True)
class _KeptPass:
    """What a pass keeps from forward to backward."""

    inputs: tuple[Any, ...]
    # With the graph.
    made: tuple[Tensor, ...]


class TorchSession:
    """A `Session` by torch's autograd and a torch optimiser; `run(number, *inputs)` computes a pass.

    `run` returns a tensor or a tuple of tensors. Inputs with `requires_grad` get a gradient. `named` has the parameters
    by name, in the order in which `optimizer` gets them; without a trainable one, no optimiser is made and a step does
    nothing. `scheduler` is stepped with the optimiser; `schedule` gives the factor on the learning rate by the number
    of a step instead. `where` begins the texts of errors. `seed` is that of random layers; without it, they draw from
    torch's generator.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        named: Mapping[str, nn.Parameter],
        optimizer: OptimizerFn,
        *,
        where: str,
        scheduler: SchedulerFn | None = None,
        total_steps: int = 1,
        schedule: Schedule | None = None,
        max_grad_norm: float | None = None,
        seed: int | None = None,
    ) -> None:
        """Make the optimiser and the scheduler."""
        self.optimizer: Optimizer | None = None
        self._run = run
        self._named = dict(named)
        self._names = {id(parameter): name for name, parameter in self._named.items()}
        self._where, self._max_grad_norm, self._seed = where, max_grad_norm, seed
        self._kept: dict[int, _KeptPass] = {}
        self._proximal = ProximalTerm(0.0, [])
        self._scheduler: LRScheduler | None = None
        self._schedule = schedule
        # The settings of each group as the optimiser was made, before a scheduler or a saved state changes them.
        self.first_settings: list[dict[str, Any]] = []
        if not any(parameter.requires_grad for parameter in self._named.values()):
            # torch optimisers refuse an empty list.
            return
        self.optimizer = optimizer(list(self._named.values()))
        self._require_trains(
            self.optimizer, rate_is_set=scheduler is not None or schedule is not None
        )
        self.first_settings = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        if scheduler is not None:
            self._scheduler = scheduler(self.optimizer, total_steps)

    # ----------------------------------------------------------------------------------------------------- passes

    def forward(
        self, number: int, *inputs: Any, keep: bool = True, stream: int | None = None
    ) -> tuple[Tensor, ...]:
        """Run a pass; see `Session.forward`."""
        with self._streams(number if stream is None else stream), torch.set_grad_enabled(keep):
            results = self._run(number, *inputs)
        made = (results,) if isinstance(results, Tensor) else tuple(results)
        if keep:
            self._kept[number] = _KeptPass(inputs, made)
        return tuple(tensor.detach() for tensor in made)

    def backward(
        self, number: int, gradients: Sequence[Tensor | None] | None = None
    ) -> tuple[Tensor | None, ...]:
        """Add the gradients of the parameters; see `Session.backward`."""
        kept = self._kept.pop(number)
        roots: list[Tensor] = []
        of_roots: list[Tensor | None] = []
        given = [None] * len(kept.made) if gradients is None else gradients
        for made, gradient in zip(kept.made, given, strict=True):
            if made.requires_grad and (gradients is None or gradient is not None):
                roots.append(made)
                of_roots.append(gradient)
        if roots:
            torch.autograd.backward(roots, of_roots)
        return tuple(map(_gradient_of, kept.inputs))

    def keeps(self, number: int) -> bool:
        """Return whether the graph of a pass is kept; see `Session.keeps`."""
        return number in self._kept

    def discard(self, number: int) -> None:
        """Free the graph of a pass; see `Session.discard`."""
        self._kept.pop(number, None)

    def _streams(self, stream: int) -> AbstractContextManager[None]:
        return nullcontext() if self._seed is None else random_streams(self._seed, stream)

    # ------------------------------------------------------------------------------------------------------ a step

    def begin(self) -> None:
        """Reset the gradients to None, which frees their memory."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)

    def step(self, number: int = 0) -> None:
        """Step the optimiser and the scheduler; see `Session.step`."""
        if self.optimizer is None:
            return
        if self._schedule is not None:
            factor = self._schedule(number)
            require_range(f"schedule: batch {number}", least=0, factor=factor)
            groups = self.optimizer.param_groups
            for group, first in zip(groups, self.first_settings, strict=True):
                group["lr"] = float(first["lr"]) * factor
        self._proximal.add_gradients()
        if self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._named.values(), self._max_grad_norm)
        self.optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()

    def stay_near(self, proximal_mu: float) -> None:
        """Add FedProx's term around the present weights to every loss; see `ProximalTerm`."""
        self._proximal = ProximalTerm(proximal_mu, self._named.values())

    def advance_schedule(self, num_steps: int) -> None:
        """Move the learning-rate schedule as if `num_steps` steps had been done."""
        if self._scheduler is None:
            return
        with warnings.catch_warnings():
            # torch warns if a schedule is stepped before its optimiser, which is intended here.
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
            for _ in range(num_steps):
                self._scheduler.step()

    # ----------------------------------------------------------------------------------------------------- its state

    def state(self) -> dict[str, Any]:
        """Return the state of optimiser and scheduler, on the CPU; empty without an optimiser.

        `parameters` has each parameter's state by name, `groups` the settings of each group, `scheduler` the
        scheduler's state, `others` what else the optimiser's `state_dict` has, and `optimizer` its type.
        """
        if self.optimizer is None:
            return {}
        saved = self.optimizer.state_dict()
        states, names = saved.get("state", {}), self._names_by_number(saved)
        others = {key: one for key, one in saved.items() if key not in ("state", "param_groups")}
        return {
            "optimizer": type(self.optimizer).__name__,
            PARAMETERS: {
                names[key]: plain(dict(own)) for key, own in states.items() if key in names
            },
            "groups": [
                {key: plain(one) for key, one in group.items() if key != "params"}
                for group in saved.get("param_groups", ())
            ],
            "others": {
                **plain(others),
                "state": {key: plain(own) for key, own in states.items() if key not in names},
            },
            "scheduler": None if self._scheduler is None else plain(self._scheduler.state_dict()),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of this session's parameters; see `Session.restore`.

        Without `groups`, those of the optimiser keep their settings. Raises `ConfigError` for another number of groups.
        """
        if self.optimizer is None or not state:
            return
        own = self.optimizer.state_dict()
        own_groups = own.get("param_groups", [])
        groups = state.get("groups", own_groups)
        if len(groups) != len(own_groups):
            raise ConfigError(
                f"{self._where}: the optimizer function makes {len(own_groups)} parameter groups of one part of "
                f"the model and {len(groups)} of another; make equally many"
            )
        others = {**own, **state.get("others", {})}
        states = dict(state.get("others", {}).get("state", {}))
        for number, name in self._names_by_number(own).items():
            if name in state[PARAMETERS]:
                states[number] = dict(state[PARAMETERS][name])
        settings = [
            {**group, "params": own_group["params"]}
            for group, own_group in zip(groups, own_groups, strict=True)
        ]
        self.optimizer.load_state_dict({**others, "param_groups": settings, "state": states})
        if self._scheduler is not None and state.get("scheduler") is not None:
            self._scheduler.load_state_dict(state["scheduler"])

    def require_readable(self, state: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for a state, or a part of one, that can be saved but not read back."""
        schedule = "" if self._scheduler is None else f" and {type(self._scheduler).__name__}"
        require_readable(state, f"{self._where}: {type(self.optimizer).__name__}{schedule}")

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimiser's state, besides weights and gradients."""
        if self.optimizer is None:
            return 0
        values = [value for own in self.optimizer.state.values() for value in own.values()]
        return sum(value.nbytes for value in values if isinstance(value, Tensor))

    def _names_by_number(self, saved: Mapping[str, Any]) -> dict[int, str]:
        """Return the names of the parameters, which torch numbers through all groups."""
        assert self.optimizer is not None
        found = {}
        groups = saved.get("param_groups", ())
        for group, own in zip(groups, self.optimizer.param_groups, strict=False):
            for number, parameter in zip(group["params"], own["params"], strict=True):
                found[number] = self._names[id(parameter)]
        return found

    def _require_trains(self, optimizer: Optimizer, *, rate_is_set: bool) -> None:
        """Raise `ConfigError` for an optimiser that would not train all trainable parameters."""
        what = f"{self._where}: {type(optimizer).__name__}"
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ConfigError(
                f"{what} evaluates the loss several times a step; use an optimiser without a closure, such as "
                "SGD or AdamW"
            )
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if held - set(self._names):
            raise ConfigError(f"{what} holds tensors that are no parameters of the model")
        left_out = [
            name
            for name, parameter in self._named.items()
            if parameter.requires_grad and id(parameter) not in held
        ]
        if left_out:
            raise ConfigError(
                f"{what} leaves out {', '.join(left_out[:3])}; give it all parameters, or freeze those in "
                "model_fn by requires_grad_(False)"
            )
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        # A schedule may set the rate itself: OneCycleLR does, from the rate that it is given.
        trains = not rates or any(rates) or rate_is_set
        if not trains or not all(0.0 <= rate < math.inf for rate in rates):
            given = ", ".join(f"{rate:g}" for rate in rates)
            raise ConfigError(f"{what} has lr = {given} and no scheduler; give a finite lr above 0")


def _gradient_of(given: Any) -> Tensor | None:
    if not isinstance(given, Tensor) or not given.requires_grad:
        return None
    return torch.zeros_like(given) if given.grad is None else given.grad


# ----------------------------------------------------------------------------------------------------------- losses


def loss_between(loss: LossFn, made: Any, labels: Any, where: str) -> Tensor:
    """Return the loss of a model's outputs; `ConfigError` for labels beyond the model's classes."""
    try:
        return loss(made, labels)
    except IndexError:
        is_of_classes = isinstance(made, Tensor) and made.dim() == 2
        largest = int(labels.max()) if isinstance(labels, Tensor) else -1
        if not is_of_classes or largest < made.shape[1]:
            raise
        raise ConfigError(
            f"{where}: the labels reach {largest}, but the model has {made.shape[1]} outputs; give it one for each "
            "class"
        ) from None


def part_of_loss(loss: Tensor, share: float) -> Tensor:
    """Return the part of some samples in the loss of a batch, from their own loss and their share of the weights."""
    if not share:
        # Nothing of it counts: its mean is 0 / 0, and its gradient 0.
        return torch.zeros((), device=loss.device)
    return loss if share == 1.0 else loss * share


def require_loss(loss: object, where: str, *, has_gradient: bool = True) -> Tensor:
    """Return a loss; `ConfigError` if it is not one number, or lacks a gradient although it should have one."""
    if not isinstance(loss, Tensor):
        wrong = type(loss).__name__
    elif loss.dim():
        wrong = f"a tensor of shape {tuple(loss.shape)}"
    elif has_gradient and not loss.requires_grad:
        wrong = "a tensor without a gradient"
    else:
        return loss
    raise ConfigError(
        f"{where}: the loss is {wrong}; return the mean over samples, a tensor without dimensions but with a gradient"
    )
