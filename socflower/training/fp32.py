"""FP32 training with any torch optimiser and scheduler, for one device or a whole group."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, TypeAlias

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from socflower.errors import ConfigError, require_range
from socflower.field_rules import OneOf, checked
from socflower.model_graph.batch_form import (
    Batch,
    concatenated,
    form_of,
    mapped,
    output_entry,
    output_of,
    split,
)
from socflower.model_graph.batch_form import num_samples as num_samples_of
from socflower.model_graph.torch_device import AUTO, device_of, on_device, resolve_device
from socflower.plain_numbers import plain_numbers
from socflower.training.batch_statistics import MemberBuffers, depends_on_batch
from socflower.training.loss_weights import (
    BY_SAMPLES,
    LossWeights,
    WeightFn,
    require_divisible,
    trial_batches,
    weights_of,
)
from socflower.training.saved_values import from_bytes, to_bytes
from socflower.training.schedules import SchedulerFn
from socflower.training.session import (
    LossFn,
    OptimizerFn,
    TorchSession,
    loss_between,
    part_of_loss,
    require_loss,
)
from socflower.training.trainer import Part, SessionResult, TrainingSpan, require_trained_parameters
from socflower.workloads.data_source import DataSource

REDUCTIONS = ("auto", "always", "ring")

TrainStep: TypeAlias = Callable[[nn.Module, Batch], Tensor]


@plain_numbers
def sgd(
    learning_rate: float = 0.01, momentum: float = 0.9, weight_decay: float = 0.0
) -> OptimizerFn:
    """Return a factory of SGD with momentum, the papers' optimiser.

    Raises `ConfigError` for a learning rate that is not positive and finite, and for a momentum outside [0, 1).
    """
    require_range("sgd", above=0.0, learning_rate=learning_rate)
    require_range("sgd", least=0.0, below=1.0, momentum=momentum)
    require_range("sgd", least=0.0, weight_decay=weight_decay)
    return partial(torch.optim.SGD, lr=learning_rate, momentum=momentum, weight_decay=weight_decay)


@checked
class FP32Trainer:
    """Trains in float32.

    `device` is "auto", "cpu", "cuda", "cuda:1", "mps", or another device of torch: the model is moved there and stays,
    and batches follow. "auto" is the accelerator that torch finds, else the CPU, whose sums round differently.

    `train_step(model, batch)` returns the mean loss of a batch of any form, a tensor without dimensions; it runs no
    backward pass and steps no optimiser. Without it the loss of a batch (inputs, labels) is `loss(model(inputs),
    labels)`; inputs in a dict are keyword arguments of the model, and in a tuple positional ones. The loss of a batch
    that is a dict is the `loss` of `model(**batch)`, as models of Hugging Face return it.
    If a batch is divided, among members, micro-batches or passes, its loss is computed from those of its parts. Losses
    of torch, with class weights, `ignore_index` and any reduction, are known by their type. Another loss must be a mean
    over samples, or `loss_weight(batch)` must return what it divides by, such as the number of labels that count. It is
    tried on three batches before the first step, and refused if its parts do not add up to the whole.
    `max_grad_norm` limits the norm of the whole group's gradient. `accumulation_steps` computes the gradient in this
    many passes, which takes less memory. `autocast` runs the passes in another type, such as torch.bfloat16; weights,
    gradients and optimiser stay in float32.
    `optimizer` is called with the model's parameters and must hold all trainable ones, or they would silently stay
    untrained; frozen ones (`requires_grad` False) are optional.
    `scheduler` is called with the optimiser and the total number of steps, and stepped once a batch.
    `channels_last` converts 4-d weights and inputs to the layout in which convolutions run faster on most CPUs; models
    that flatten features by `view` do not support it. Without it, layouts are unchanged.
    `reduction`: "auto" runs a separate pass per member only if that changes the result, that is for models with
    batch-dependent layers; otherwise one pass over the whole batch has the same gradient (F4).
    "always" runs every member's pass, as a real ring does; "ring" also sums their gradients in a ring's order, which
    gives the same bits as a gRPC ring (and as a gloo ring of two).
    """

    optimizer: OptimizerFn = field(default_factory=sgd)
    scheduler: SchedulerFn | None = None
    loss: LossFn = functional.cross_entropy
    train_step: TrainStep | None = None
    loss_weight: WeightFn | None = None
    max_grad_norm: Annotated[float, Field(gt=0.0)] | None = None
    accumulation_steps: Annotated[int, Field(ge=1)] = 1
    autocast: torch.dtype | None = None
    channels_last: bool = False
    reduction: Annotated[str, OneOf(REDUCTIONS)] = "auto"
    device: str = AUTO

    def check(self) -> None:
        """Raise `ConfigError` if a function cannot be called, and if settings contradict each other."""
        functions: dict[str, object] = {"optimizer": self.optimizer}
        if self.loss_weight is not None:
            functions["loss_weight"] = self.loss_weight
        for key, value in functions.items():
            if not callable(value):
                raise ConfigError(
                    f"{key} = {_type_or_value(value)}; give a function, not its result"
                )
        if self.train_step is not None and self.loss is not functional.cross_entropy:
            raise ConfigError(
                "train_step computes the loss itself; give train_step or loss, not both"
            )
        if self.autocast not in (None, torch.bfloat16):
            raise ConfigError(
                f"autocast = {self.autocast}; use torch.bfloat16, or None for float32"
            )

    @property
    def loss_weights(self) -> LossWeights:
        """How the loss of a batch follows from those of its parts."""
        if self.loss_weight is not None:
            return LossWeights(read=self.loss_weight)
        return BY_SAMPLES if self.train_step is not None else weights_of(self.loss) or BY_SAMPLES

    def require_divisible_loss(
        self, model: nn.Module, first: Batch, data: DataSource, batch_size: int
    ) -> None:
        """Raise `ConfigError` if batches of `data`, such as `first`, cannot be divided.

        A loss that is unknown is tried, and one that the model computes.
        """
        is_own = self.loss_weight is not None or self.train_step is not None
        is_known = not is_own and weights_of(self.loss) is not None
        if is_known and not isinstance(first, Mapping):
            return
        # In bfloat16 parts would round differently from the whole.
        exact = replace(self, autocast=None)
        require_divisible(
            model,
            exact.loss_of,
            self.loss_weights,
            trial_batches(data, batch_size),
            remedy=(
                "return the mean over samples, give FP32Trainer(loss_weight=...), which returns what the "
                "mean of a batch divides by, or train on one device"
            ),
        )

    def loss_of(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of a batch, a tensor without dimensions.

        The batch is moved to the model's device. Raises `ConfigError` for another result, and for a form of batch
        whose loss is unknown.
        """
        device = device_of(model)
        batch = on_device(batch, device)
        if self.channels_last:
            batch = mapped(batch, _as_channels_last)
        own_type = self.autocast is not None
        with torch.autocast(device.type, self.autocast) if own_type else nullcontext():
            if self.train_step is not None:
                loss = self.train_step(model, batch)
            elif isinstance(batch, Mapping):
                loss = self._own_loss(model, batch)
            elif isinstance(batch, tuple | list) and len(batch) == 2:
                inputs, labels = batch
                made = output_of(model, inputs)
                loss = loss_between(self.loss, made, labels, "FP32Trainer")
            else:
                raise ConfigError(
                    f"FP32Trainer: the loss of {form_of(batch)} is unknown; give FP32Trainer(train_step=...)"
                )
        return require_loss(loss, "FP32Trainer", has_gradient=torch.is_grad_enabled())

    def _own_loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Any:
        """Return the loss that a model computes from a dict with labels."""
        if self.loss is not functional.cross_entropy:
            raise ConfigError(
                f"FP32Trainer: the model computes the loss of {form_of(batch)}, so loss would be ignored; "
                "leave it out, or give train_step"
            )
        loss = output_entry(model(**batch), "loss")
        if loss is None:
            raise ConfigError(
                f"FP32Trainer: the model returned no loss for {form_of(batch)}; add labels, or give "
                "FP32Trainer(train_step=...)"
            )
        return loss

    def start(
        self, model: nn.Module, span: TrainingSpan, state: bytes | None = None
    ) -> "FP32Session":
        """Begin, or continue from the state an earlier session returned; see `Trainer.start`."""
        require_trained_parameters(model)
        return FP32Session(self, model, span, None if state is None else from_bytes(state))

    def session(
        self,
        run: Callable[..., Any],
        module: nn.Module,
        span: TrainingSpan,
        state: Mapping[str, Any] | None = None,
        *,
        seed: int | None = None,
        named: Mapping[str, nn.Parameter] | None = None,
    ) -> TorchSession:
        """Return a session of a module that `run` computes, a whole model or a part of one; see `TorchSession`.

        It continues from `state`, or begins at the span's first step. `named` has the parameters by other names than
        the module's.
        """
        session = TorchSession(
            run,
            dict(module.named_parameters()) if named is None else named,
            self.optimizer,
            where="FP32Trainer",
            scheduler=self.scheduler,
            total_steps=span.total_steps,
            max_grad_norm=self.max_grad_norm,
            seed=seed,
        )
        session.stay_near(span.proximal_mu)
        if state:
            session.restore(state)
        else:
            session.advance_schedule(span.first_step)
            session.require_readable(session.state())
        return session


@dataclass(frozen=True, slots=True)
class _Pass:
    """A member's part of a step, or the whole of it, in micro-batches with their weights."""

    member: int
    num_samples: int
    micro_batches: Sequence[tuple[Batch, float]]

    @property
    def weight(self) -> float:
        """The weight of all micro-batches."""
        return sum(weight for _, weight in self.micro_batches)


class FP32Session:
    """One model under FP32 training; see `TrainingSession`."""

    def __init__(
        self,
        trainer: FP32Trainer,
        model: nn.Module,
        span: TrainingSpan,
        state: Mapping[str, Any] | None,
    ) -> None:
        self._trainer = trainer
        self._weights = trainer.loss_weights
        self._device = resolve_device(trainer.device, "FP32Trainer: device")
        model.to(self._device)
        if trainer.channels_last:
            # Layout first: the optimiser's state takes the layout of the parameters.
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if not model.training:
            # In a training model, layers in evaluation mode are intended, such as BatchNorm with frozen statistics.
            model.train()
        self._model = model
        # Whether a state has been saved and read back.
        self._is_read_back = state is not None
        # Not a method: a cycle of references would keep the optimiser's memory.
        run = partial(_part_loss, trainer, self._weights, model)
        self._session = trainer.session(run, model, span, state)
        assert self._session.optimizer is not None
        self._optimizer = self._session.optimizer
        # As made, since momentum may be disabled in a state.
        self._momentum = float(self._session.first_settings[0].get("momentum", 0.0))
        self._buffers: MemberBuffers | None = None
        if span.num_members > 1 and (trainer.reduction != "auto" or depends_on_batch(model)):
            self._buffers = MemberBuffers(model, span.num_members)

    def step(self, parts: Sequence[Part]) -> Tensor:
        """Do one synchronous step of the group; see `TrainingSession.step`."""
        self.begin()
        loss = self._accumulate(self._passes(parts), None)
        self.apply()
        return loss

    @property
    def in_ring_order(self) -> bool:
        """Whether members' gradients are summed as a ring does; see `ExchangingSession.in_ring_order`."""
        return self._trainer.reduction == "ring" and self._buffers is not None

    @property
    def final_in_backward(self) -> bool:
        """Whether one backward pass computes the whole gradient; see `ExchangingSession.final_in_backward`."""
        return self._trainer.accumulation_steps == 1

    def require_divisible_loss(
        self, first: Batch, data: DataSource, batch_size: int, *, divided: bool
    ) -> None:
        """Try the loss if batches are divided; see `TriesLoss.require_divisible_loss`."""
        if divided or self._trainer.accumulation_steps > 1:
            self._trainer.require_divisible_loss(self._model, first, data, batch_size)

    def batch_weight(self, parts: Sequence[Part]) -> float | None:
        """Return the weight of these parts of a batch; see `ExchangingSession.batch_weight`."""
        return sum(each.weight for each in self._passes(parts)) if self._weights.is_read else None

    def gradients(
        self, parts: Sequence[Part], num_samples: int, weight: Callable[[], float] | None = None
    ) -> Tensor:
        """Compute the gradient of `parts` of a batch of `num_samples`; see `ExchangingSession.gradients`."""
        self.begin()
        return self.accumulate(parts, num_samples, weight)

    def begin(self) -> None:
        """Clear the gradients of the last step."""
        self._session.begin()

    def accumulate(
        self, parts: Sequence[Part], num_samples: int, weight: Callable[[], float] | None = None
    ) -> Tensor:
        """Add the gradient of the members' parts of a batch of `num_samples`; return their part of its mean loss.

        Parts are in the order of the members; another processor may add the gradients of further samples (F12).
        `weight` returns the weight of the whole batch, if that is not its number of samples.
        """
        return self._accumulate(self._passes(parts), weight or (lambda: float(num_samples)))

    def _passes(self, parts: Sequence[Part]) -> list["_Pass"]:
        """Return the passes over the members' parts: one over all of them, unless members have layers of their own."""
        present = [(member, part) for member, part in enumerate(parts) if num_samples_of(part)]
        if self._buffers is None and len(present) > 1:
            whole = concatenated([part for _, part in present])
            present = present if whole is None else [(0, whole)]
        passes = []
        for member, part in present:
            micro_batches = _micro_batches(part, self._trainer.accumulation_steps)
            weighted = [(micro, self._weights.of(micro)) for micro in micro_batches]
            passes.append(_Pass(member, num_samples_of(part), weighted))
        return passes

    def _accumulate(self, passes: Sequence["_Pass"], total: Callable[[], float] | None) -> Tensor:
        """Add the gradients of passes over a batch with the weight `total`; None: there are no others."""
        own = sum(each.weight for each in passes)
        loss = torch.zeros((), device=self._device)
        for each in passes:
            if self._buffers is not None:
                self._buffers.activate(each.member, each.num_samples)
            for micro, weight in each.micro_batches:
                (part,) = self._session.forward(0, micro, weight, total or (lambda: own))
                self._session.backward(0)
                loss = loss + part
        return loss

    def apply(self) -> None:
        """Step the optimiser and the schedule with the current gradients."""
        self._session.step()

    def disable_momentum(self) -> float:
        """Return the optimiser's momentum and set it to 0; the caller applies it instead.

        Raises `ConfigError` for an optimiser without the momentum of plain SGD.
        """
        is_sgd = isinstance(self._optimizer, torch.optim.SGD)
        for group in self._optimizer.param_groups:
            if not is_sgd or group["nesterov"] or group["dampening"]:
                raise ConfigError(
                    f"{type(self._optimizer).__name__}: a gradient compression cannot take over its "
                    "momentum; use SGD without nesterov and dampening, or another compression"
                )
            group["momentum"] = 0.0
        return self._momentum

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step, of the optimiser's first parameter group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def activate(self, member: int) -> bool:
        """Give the model the running statistics of a member; return whether members have statistics of their own."""
        if self._buffers is not None:
            self._buffers.activate(member, 0)
        return self._buffers is not None

    def average_statistics(self, samples: Sequence[int] | None = None) -> None:
        """Average the members' BatchNorm statistics into the model; see `MemberBuffers.average`."""
        if self._buffers is not None:
            self._buffers.average(samples)

    def finish(self) -> SessionResult:
        """Average the statistics and return the state; see `TrainingSession.finish`."""
        self.average_statistics()
        return SessionResult(state=self.state())

    def state(self) -> bytes:
        """Return the state of optimiser and schedule; see `ExchangingSession.state`."""
        state = self._session.state()
        if not self._is_read_back and self._optimizer.state:
            # Once: later states have values of the same types.
            self._is_read_back = True
            self._session.require_readable(state)
        return to_bytes(state)


def _part_loss(
    trainer: FP32Trainer,
    weights: LossWeights,
    model: nn.Module,
    number: int,
    batch: Batch,
    weight: float,
    total: Callable[[], float],
) -> Tensor:
    """Return the part of these samples in the loss of the whole batch, which has the weight `total`.

    The total is asked for after the forward pass, during which other members may still send theirs.
    """
    loss = trainer.loss_of(model, batch)
    share = weights.share(weight, total())
    return part_of_loss(loss, share if weight else 0.0)


def _micro_batches(batch: Batch, count: int) -> list[Batch]:
    """Return a batch in `count` parts whose sizes differ by at most one, without empty ones."""
    if count == 1:
        return [batch]
    sizes = [len(each) for each in np.array_split(range(num_samples_of(batch)), count)]
    return [part for part in split(batch, sizes) if num_samples_of(part)]


def _type_or_value(value: Any) -> str:
    """Return a value as text; an optimiser, whose text has many lines, by its type."""
    return repr(value) if isinstance(value, int | float | str) else f"{type(value).__name__}(...)"


def _as_channels_last(tensor: Tensor) -> Tensor:
    if tensor.dim() != 4:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


def accumulates_gradients(session: FP32Session) -> bool:
    """Return whether a session's optimiser keeps a running mean of gradients: momentum, or Adam's first moment."""
    group = session._optimizer.param_groups[0]
    return bool(session._momentum) or bool(group.get("betas", (0.0,))[0])
