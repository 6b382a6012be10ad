"""The interface of trainers for clients, implemented by the FP32, INT8 and mixed-precision trainers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from socflower.allocator import keep_freed_memory
from socflower.errors import ConfigError
from socflower.model_graph.batch_form import Batch, num_samples
from socflower.model_graph.torch_device import AUTO, resolve_device
from socflower.plain_numbers import plain_numbers
from socflower.precision.int8.batch_share import BatchPeers
from socflower.wire.message_keys import GroupTask
from socflower.workloads.data_source import DataSource

Part: TypeAlias = Batch
"""One member's share of a batch: (inputs, labels), or a batch of the data's collate function; `()` without samples."""

Metric: TypeAlias = float | list[float]


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSpan:
    """The steps of a training that a session does, and the number of members of its group.

    `first_step` counts from the start of training, which has `total_steps`. `proximal_mu` is that of FedProx: the
    loss grows by mu / 2 times the squared distance from the received weights. `seed` is that of the random numbers
    which all members share; if it is empty, they come from torch's global generator. `npu_ratios` has each member's
    beta (F10); if it is empty, the client measures it.
    """

    num_members: int = 1
    first_step: int = 0
    total_steps: int = 1
    steps_per_epoch: int = 1
    proximal_mu: float = 0.0
    seed: tuple[int, ...] = ()
    npu_ratios: tuple[float, ...] = ()

    @classmethod
    def of_group(cls, task: GroupTask, step: int = 0, **of_session: Any) -> "TrainingSpan":
        """Return the rest of a group's interval, from a step of it on; `of_session` has what its session adds."""
        return cls(
            first_step=task.first_step + step,
            total_steps=task.total_steps,
            steps_per_epoch=task.steps_per_epoch,
            proximal_mu=task.proximal_mu,
            seed=(task.seed, task.group_id),
            **of_session,
        )


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class SessionResult:
    """The result of a session, besides the trained model.

    A later session resumes from `state`. `metrics` go into the reply, besides loss and number of samples; `events`
    are the failures that the session recovered from, one line each.
    """

    state: bytes
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    events: tuple[str, ...] = ()


class TrainingSession(Protocol):
    """A model under training: optimiser, schedule position, and one set of BatchNorm statistics per member."""

    def step(self, parts: Sequence[Part]) -> Tensor:
        """Do one synchronous step of a group and return its loss (0-d, mean over all samples).

        Each part is one member's share; the members' mean gradients are weighted by samples (F4). An empty
        part contributes nothing.
        """
        ...

    def finish(self) -> SessionResult:
        """Average the members' BatchNorm statistics in the model and return the result."""
        ...


@runtime_checkable
class ExchangingSession(TrainingSession, Protocol):
    """A session that can train in a ring: members exchange gradients between computing and applying them."""

    @property
    def in_ring_order(self) -> bool:
        """Whether a group in one process sums its members' gradients in the order of a ring."""
        ...

    @property
    def final_in_backward(self) -> bool:
        """Whether a parameter's gradient is final as soon as the backward pass has computed it (F7)."""
        ...

    def gradients(self, parts: Sequence[Part], num_samples: int) -> Tensor:
        """Compute the gradient of `parts` of a batch of `num_samples` in the parameters; return their part of its loss.

        The gradients of all machines that have a part of the batch sum to that of its mean loss (F4).
        """
        ...

    def apply(self) -> None:
        """Do an optimiser step with the parameters' gradients."""
        ...

    def state(self) -> bytes:
        """Return the state with which `Trainer.start` continues from here."""
        ...

    def disable_momentum(self) -> float:
        """Return the optimiser's momentum and set it to 0, since a gradient compression applies it."""
        ...


@runtime_checkable
class WeighingSession(Protocol):
    """A session whose loss divides by more than the number of samples, such as class weights or labels that count.

    In a ring, members sum their weights before the backward pass.
    """

    def batch_weight(self, parts: Sequence[Part]) -> float | None:
        """Return the weight of `parts` of a batch, 0 without samples; None if it is always their number of samples."""
        ...

    def gradients(
        self, parts: Sequence[Part], num_samples: int, weight: Callable[[], float] | None = None
    ) -> Tensor:
        """Do as `ExchangingSession.gradients`; `weight` waits for the batch's weight, summed over all machines."""
        ...


@runtime_checkable
class DivergingSession(ExchangingSession, Protocol):
    """A session whose `finish` may leave the members of a ring with different weights, as merged int8 models do."""

    @property
    def averages_weights(self) -> bool:
        """Whether the mean of the members' weights, by samples, is the group's model."""
        ...

    @property
    def measured(self) -> float | None:
        """What the members are to agree on, as this one has measured it."""
        ...

    def agree(self, measured: Sequence[float | None]) -> None:
        """Continue with what all members have measured, in their order."""
        ...


@runtime_checkable
class TriesLoss(Protocol):
    """A session that can try whether the loss of a batch follows from those of its parts."""

    def require_divisible_loss(
        self, first: Batch, data: DataSource, batch_size: int, *, divided: bool
    ) -> None:
        """Raise `ConfigError` if it does not and batches are divided: by the caller, if `divided`, or by the session.

        `first` is a batch of the form that is trained on. The model, its mode, and the generators are as before.
        """
        ...


def try_loss(
    session: TrainingSession,
    parts: Sequence[Part],
    data: DataSource,
    batch_size: int,
    *,
    divided: bool,
) -> None:
    """Before the first step of a training, on `parts`, refuse a loss that cannot be divided; see `TriesLoss`."""
    first = next((part for part in parts if num_samples(part)), None)
    if first is not None and isinstance(session, TriesLoss):
        session.require_divisible_loss(first, data, batch_size, divided=divided)


@runtime_checkable
class JointSession(TrainingSession, Protocol):
    """A session that can train in a ring in which members agree during a step, as int8 training does on its scales.

    Nothing is changed before `apply`, so that a step may be begun again, also with other members.
    """

    def join(self, peers: BatchPeers) -> None:
        """Train with these members from now on; all of them call it at the same step."""
        ...

    def gradients(self, parts: Sequence[Part], num_samples: int) -> Tensor:
        """Compute the gradient of this member's part of a batch; return its part of the batch's mean loss."""
        ...

    def exchange(self) -> None:
        """Sum the gradients over the members."""
        ...

    def apply(self) -> None:
        """Update the parameters."""
        ...

    def state(self) -> bytes:
        """Write the trained values to the module, and return the state with which `Trainer.start` continues."""
        ...


class Trainer(Protocol):
    """Starts training sessions.

    A trainer that computes on another device than the CPU has its name as `device`. One that trains in another
    arithmetic than FP32 has "int8" or "mixed" as `arithmetic`.
    """

    def start(
        self, model: nn.Module, span: TrainingSpan, state: bytes | None = None
    ) -> TrainingSession:
        """Start a session at the span's first step, from the `state` of an earlier session's result.

        Without a state the optimiser is new, but the learning-rate schedule still starts at the first step.
        """
        ...


def training_device(trainer: Trainer) -> torch.device:
    """Return the device that a trainer computes on; `ConfigError` if this machine does not have it."""
    return resolve_device(getattr(trainer, "device", "cpu"), f"{type(trainer).__name__}: device")


def arithmetic_of(trainer: Trainer) -> str:
    """Return the arithmetic that a trainer trains in, as `DeviceReport` names it."""
    return str(getattr(trainer, "arithmetic", ""))


def require_cpu(device: str, trainer: str) -> None:
    """Raise `ConfigError` in the name of a trainer with integer kernels for a device other than "auto" and "cpu"."""
    if device not in (AUTO, "cpu"):
        raise ConfigError(f"{trainer}: device = {device!r}, but int8 runs on the CPU; leave it out")


def require_images(shape: Sequence[int], trainer: str) -> Sequence[int]:
    """Return the shape of a sample; raise `ConfigError` if it is not (channels, height, width)."""
    if len(shape) != 3:
        raise ConfigError(
            f"{trainer}: int8 training takes images (n, channels, height, width), not inputs of shape "
            f"{('n', *shape)}; use FP32Trainer"
        )
    return shape


def mean_loss(losses: Sequence[Tensor]) -> float:
    """Return the mean of the losses of steps, 0 without any; the only place that waits for the device."""
    if not losses:
        return 0.0
    device = losses[-1].device
    return float(torch.stack([loss.to(device) for loss in losses]).mean())


def require_trained_parameters(model: nn.Module) -> None:
    """Raise `ConfigError` for a model without trainable parameters."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"{type(model).__name__} has no parameter with requires_grad: there is nothing to train"
        )


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Train with `num_threads` of torch in the block; 1 makes results independent of the number of cores."""
    keep_freed_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
