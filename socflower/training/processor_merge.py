"""The merge of what CPU and NPU computed: their gradients of a step, or weights between two merges (F12).

For weights the NPUs of a group's members train int8 models of their own (SoCFlow+ 3.2, Eq. 5).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from socflower.errors import ConfigError, TrainingFailed
from socflower.precision import Int8Backend


def add_gradients(
    parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor], weight: float
) -> None:
    """Add an NPU's gradients, times its share of the batch, to those that the CPU left in the parameters."""
    for name, gradient in gradients.items():
        parameter = parameters[name]
        if parameter.grad is None:
            parameter.grad = gradient * weight
        else:
            parameter.grad.add_(gradient, alpha=weight)


class OwnCopies:
    """One int8 model for each member of a group, beside the FP32 model that all members have in common.

    `make` returns a built accelerator that holds the present weights of `model`, the FP32 model. `num_members` is that
    of the session, 1 in a ring. Raises `ConfigError` for an accelerator that only computes gradients.
    """

    def __init__(self, make: Callable[[], Int8Backend], model: nn.Module, num_members: int) -> None:
        self.backends = [make() for _ in range(num_members)]
        self._model = model
        # Of each member in this session: all, and its NPU's.
        self.samples = [0] * num_members
        self._npu_samples = [0] * num_members
        # Samples of each member in the step that is not applied yet.
        self.pending: dict[int, int] = {}
        # The last step of each member's copy, and its loss: a ring may repeat the pass of a step.
        self._last: list[tuple[int, float]] = [(-1, 0.0)] * num_members
        name = self.backends[0].name
        if not self.backends[0].updates_weights:
            raise ConfigError(
                f"MixedPrecisionTrainer: merge = 'weights', but {name} only computes gradients; give "
                "backend=partial(NativeInt8Backend, NITI), or leave backend out"
            )

    def train(
        self, member: int, step: int, batch: tuple[Any, Any], *, rate: float, progress: float
    ) -> float:
        """Do a step on a member's own copy, once, and return its loss."""
        if self._last[member][0] != step:
            images, labels = batch
            result = self.backends[member].train_step(
                images, labels, learning_rate=rate, progress=progress
            )
            self._npu_samples[member] += len(labels)
            self._last[member] = step, result.loss
        return self._last[member][1]

    def apply(self) -> None:
        """Count the samples of the step that is applied."""
        for member, num_samples in self.pending.items():
            self.samples[member] += num_samples
        self.pending.clear()

    def has_trained(self, member: int) -> bool:
        """Whether a member's NPU had samples in the session."""
        return self._npu_samples[member] > 0

    def merge(self, shares: Sequence[float], activate: Callable[[int], object]) -> None:
        """Write sum_i s_i (gamma_i w_FP32 + (1 - gamma_i) w_INT8,i) to the model (Eq. 5).

        `shares` are the gamma_i, and s_i is the part of member i in the samples of the session. A copy without samples
        is not merged. `activate` makes the running statistics of the model those of a member, which are merged with
        the member's own. Raises `TrainingFailed`, and changes nothing, if a copy has a value that is not finite.
        """
        total = sum(self.samples)
        trained = {name: own for name, own in self._model.named_parameters() if own.requires_grad}
        # Members are added in float64, as a ring adds them.
        sums = {name: torch.zeros(own.shape, dtype=torch.float64) for name, own in trained.items()}
        statistics: list[tuple[Tensor, Tensor]] = []
        for member, samples in enumerate(self.samples):
            if not samples:
                continue
            activate(member)
            copies = self.backends[member].weights() if self.has_trained(member) else {}
            share, part = shares[member], samples / total
            for name, fp32 in trained.items():
                sums[name] += _mixed(name, fp32.detach(), copies, share).double() * part
            for name, buffer in self._model.named_buffers():
                if name in copies and buffer.is_floating_point():
                    statistics.append((buffer, _mixed(name, buffer, copies, share)))
        if not total:
            return
        for name, parameter in trained.items():
            parameter.detach().copy_(sums[name])
        for buffer, mixed in statistics:
            buffer.copy_(mixed)


def _mixed(name: str, fp32: Tensor, copies: Mapping[str, Any], share: float) -> Tensor:
    """Return gamma w_FP32 + (1 - gamma) w_INT8, or w_FP32 if there is no copy."""
    if name not in copies:
        return fp32
    int8 = torch.from_numpy(np.array(copies[name])).reshape(fp32.shape).to(fp32.dtype)
    if not bool(torch.isfinite(int8).all()):
        raise TrainingFailed(f"its {name} is not finite")
    return torch.lerp(int8, fp32, share)
