"""FP32 training on the CPU with any torch optimiser and scheduler, for one device or a whole group."""

import inspect
import io
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from socflower.errors import ConfigError
from socflower.training.batch_statistics import MemberBuffers, depends_on_batch
from socflower.training.sum_order import RingOrder
from socflower.training.trainer import Part, SessionEnd, TrainingSpan, require_trained_parameters

REDUCTIONS = ("auto", "always", "ring")

OptimizerFn: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
SchedulerFn: TypeAlias = Callable[[torch.optim.Optimizer, int], LRScheduler]
LossFn: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def sgd(learning_rate: float = 0.01, momentum: float = 0.9, weight_decay: float = 0.0) -> OptimizerFn:
    """Return a factory of SGD with momentum, the papers' optimiser.

    Raises `ConfigError` for a learning rate that trains nothing or diverges at once, and for a momentum outside [0, 1).
    """
    if not 0.0 < learning_rate < math.inf:
        raise ConfigError(f"sgd: learning_rate = {learning_rate} must be above 0 and finite, such as 0.01")
    if not 0.0 <= momentum < 1.0:
        raise ConfigError(f"sgd: momentum = {momentum} must be 0 or more and below 1, such as 0.9")
    if not 0.0 <= weight_decay < math.inf:
        raise ConfigError(f"sgd: weight_decay = {weight_decay} must be 0 or more and finite, such as 5e-4")
    return partial(torch.optim.SGD, lr=learning_rate, momentum=momentum, weight_decay=weight_decay)


def cosine_annealing(optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler:
    """Anneal the learning rate to zero along a cosine over all steps, as SoCFlow+ does."""
    return CosineAnnealingLR(optimizer, T_max=max(1, total_steps))


@dataclass(frozen=True, kw_only=True)
class FP32Trainer:
    """Trains in float32.

    `optimizer` is called with the model's parameters and has to hold all trainable ones, since whoever counts on one
    that no optimiser has would wait for it in vain; frozen ones (`requires_grad` False) may be among them or not.
    `scheduler` is called with the optimiser and the total number of steps, and stepped once a batch.
    `channels_last` turns 4-d weights and inputs into the layout in which convolutions run faster on most CPUs; a model
    that flattens features by `view` cannot take it. Without it both stay in the layout that they come in.
    `reduction`: "auto" gives each member a pass of its own only where that changes the result, that is for
    models with batch-dependent layers; elsewhere one pass over the whole batch has the same gradient (F4).
    "always" runs every member's pass, as a real ring does; "ring" sums their gradients in a ring's order as well, in
    `num_buckets` parts, which gives the very bits of a gRPC ring (and of a gloo ring of two).
    """

    optimizer: OptimizerFn = field(default_factory=sgd)
    scheduler: SchedulerFn | None = None
    loss: LossFn = functional.cross_entropy
    channels_last: bool = False
    reduction: str = "auto"
    num_buckets: int = 1

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ConfigError(f"FP32Trainer: reduction = {self.reduction!r}; use one of "
                              f"{', '.join(REDUCTIONS)}")

    def start(self, model: nn.Module, span: TrainingSpan, state: bytes | None = None) -> "FP32Session":
        """Begin, or continue from the state an earlier session returned; see `Trainer.start`."""
        require_trained_parameters(model)
        session = FP32Session(self, model, span.num_members, span.total_steps)
        if state is None:
            session.advance_schedule(span.first_step)
        else:
            session.restore(state)
        return session


class FP32Session:
    """One model under FP32 training; see `TrainingSession`."""

    def __init__(self, trainer: FP32Trainer, model: nn.Module, num_members: int, total_steps: int) -> None:
        self._trainer = trainer
        if trainer.channels_last:
            # Layout first: the optimiser's state takes the layout of the parameters.
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if not model.training:
            # Else layers in evaluation mode are meant so: a BatchNorm that keeps its statistics.
            model.train()
        self._model = model
        self._optimizer = trainer.optimizer(model.parameters())
        _require_trains(self._optimizer, model, scheduled=trainer.scheduler is not None)
        # Before a state is restored, in which somebody else may have taken it over.
        self._momentum = float(self._optimizer.param_groups[0].get("momentum", 0.0))
        self._scheduler = trainer.scheduler(self._optimizer, total_steps) if trainer.scheduler else None
        each_member_alone = num_members > 1 and (trainer.reduction != "auto" or depends_on_batch(model))
        self._buffers = MemberBuffers(model, num_members) if each_member_alone else None
        self._ring_order = RingOrder(model, num_members, trainer.num_buckets) \
            if each_member_alone and trainer.reduction == "ring" else None

    def step(self, parts: Sequence[Part]) -> Tensor:
        """Do one synchronous step of the group; see `TrainingSession.step`."""
        loss = self.gradients(parts, sum(len(labels) for _, labels in parts))
        self.apply()
        return loss

    final_in_backward = True

    def gradients(self, parts: Sequence[Part], num_samples: int) -> Tensor:
        """Make the gradient of `parts` of a batch of `num_samples`; see `ExchangingSession.gradients`."""
        self.begin()
        return self.accumulate(parts, num_samples)

    def begin(self) -> None:
        """Forget the gradients of the last step."""
        self._optimizer.zero_grad(set_to_none=True)

    def accumulate(self, parts: Sequence[Part], num_samples: int) -> Tensor:
        """Add the gradient of the members' parts of a batch of `num_samples`; return their part of its mean loss.

        Parts are in the order of the members; other processors may add the gradients of other samples (F12).
        """
        present = [part for part in parts if len(part[1])]
        if not present:
            return torch.zeros(())
        if self._buffers is None:
            inputs, labels = present[0] if len(present) == 1 else _joined(present)
            return self._backward(inputs, labels, weight=len(labels) / num_samples)
        loss = torch.zeros(())
        if self._ring_order is not None:
            self._ring_order.begin()
        for member, (inputs, labels) in enumerate(parts):
            if len(labels):
                self._buffers.use(member, len(labels))
                loss = loss + self._backward(inputs, labels, weight=len(labels) / num_samples)
                if self._ring_order is not None:
                    self._ring_order.take(member)
        if self._ring_order is not None:
            self._ring_order.finish()
        return loss

    def apply(self) -> None:
        """Let optimiser and schedule do a step with the gradients that are there."""
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()

    def hand_over_momentum(self) -> float:
        """Return the optimiser's momentum and set it to 0: whoever asks applies it himself.

        Raises `ConfigError` for an optimiser whose momentum is another one than that of plain SGD.
        """
        for group in self._optimizer.param_groups:
            if not isinstance(self._optimizer, torch.optim.SGD) or group["nesterov"] or group["dampening"]:
                raise ConfigError(f"{type(self._optimizer).__name__}: its momentum cannot be handed over to a gradient "
                                  "compression; use SGD without nesterov and dampening, or another compression")
            group["momentum"] = 0.0
        return self._momentum

    @property
    def learning_rate(self) -> float:
        """That of the next step, of the optimiser's first group of parameters."""
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def adds_up_gradients(self) -> bool:
        """Whether the optimiser keeps a running mean of gradients: momentum, or Adam's first moment."""
        group = self._optimizer.param_groups[0]
        return bool(self._momentum) or bool(group.get("betas", (0.0,))[0])

    def settle(self) -> None:
        """Average the members' BatchNorm statistics into the model."""
        if self._buffers is not None:
            self._buffers.average()

    def finish(self) -> SessionEnd:
        """Settle, and return optimiser and schedule; see `TrainingSession.finish`."""
        self.settle()
        return SessionEnd(state=self.state())

    def state(self) -> bytes:
        """Return optimiser and schedule; see `ExchangingSession.state`."""
        state = {"optimizer": self._optimizer.state_dict(),
                 "scheduler": self._scheduler.state_dict() if self._scheduler else None}
        stream = io.BytesIO()
        torch.save(state, stream)
        return stream.getvalue()

    def _backward(self, inputs: Tensor, labels: Tensor, weight: float) -> Tensor:
        if self._trainer.channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        made = self._model(inputs)
        try:
            loss = self._trainer.loss(made, labels)
        except IndexError:
            if not isinstance(made, Tensor) or made.dim() != 2 or int(labels.max()) < made.shape[1]:
                raise
            raise ConfigError(f"FP32Trainer: the labels reach {int(labels.max())}, but the model has {made.shape[1]} "
                              "outputs; give the model an output for each class") from None
        if weight != 1.0:
            loss = loss * weight
        loss.backward()
        return loss.detach()

    def advance_schedule(self, num_steps: int) -> None:
        """Move the learning-rate schedule as if `num_steps` steps had been done."""
        with warnings.catch_warnings():
            # torch warns when a schedule moves before its optimiser has; that is what is wanted here.
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
            for _ in range(num_steps if self._scheduler is not None else 0):
                self._scheduler.step()  # type: ignore[union-attr]

    def restore(self, state: bytes) -> None:
        """Take up optimiser and schedule where `finish` left them."""
        saved = torch.load(io.BytesIO(state), weights_only=True)
        self._optimizer.load_state_dict(saved["optimizer"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(saved["scheduler"])


def _require_trains(optimizer: torch.optim.Optimizer, model: nn.Module, *, scheduled: bool) -> None:
    """Raise `ConfigError` for an optimiser that would not move what is to be trained, and all of that."""
    what = f"FP32Trainer: {type(optimizer).__name__}"
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(f"{what} evaluates the loss several times a step, where a step here is one gradient; use an "
                          "optimiser whose step needs no closure, such as SGD or AdamW")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held - {id(parameter) for parameter in model.parameters()}:
        raise ConfigError(f"{what} holds tensors that are no parameters of the model; give it those that the optimizer "
                          "function is called with")
    left_out = [name for name, part in model.named_parameters() if part.requires_grad and id(part) not in held]
    if left_out:
        named = ", ".join(left_out[:3]) + (f" and {len(left_out) - 3} more" if len(left_out) > 3 else "")
        raise ConfigError(f"{what} leaves out {named}, which would never be trained; give it all parameters that the "
                          "optimizer function is called with, or freeze those in model_fn by requires_grad_(False)")
    rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    if not all(0.0 <= rate < math.inf for rate in rates):
        raise ConfigError(f"{what} has lr = {', '.join(map(str, rates))}; it must be above 0 and finite")
    # A scheduler may set the rate itself: OneCycleLR does, from the rate that it is given.
    if rates and not any(rates) and not scheduled:
        raise ConfigError(f"{what} has lr = 0 and no scheduler raises it, so nothing would be trained; give it an lr "
                          "above 0")


def _joined(parts: Sequence[Part]) -> Part:
    return torch.cat([inputs for inputs, _ in parts]), torch.cat([labels for _, labels in parts])
