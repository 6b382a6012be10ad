"""BatchNorm statistics of each member of a group that runs in one process."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from socflower.errors import ConfigError


def depends_on_batch(model: nn.Module) -> bool:
    """Return whether a sample's output depends on the other samples of its pass, as with BatchNorm."""
    return any(
        isinstance(module, _NormBase) and (module.training or not module.track_running_stats)
        for module in model.modules()
    )


def require_batch_statistics(model: nn.Module, trainer: str) -> None:
    """Raise `ConfigError` if a normalisation layer in training has frozen statistics, which int8 does not support."""
    for name, module in model.named_modules():
        if model.training and isinstance(module, _NormBase) and not module.training:
            raise ConfigError(
                f"{trainer}: {type(module).__name__} {name!r} is in evaluation mode, and int8 training has "
                "only statistics of the batch; put it into training mode, or train in FP32"
            )


class MemberBuffers:
    """Gives each member of a group its own buffers, as on separate machines, while weights are shared.

    Normalisation and its running statistics use only the member's samples. Running statistics are averaged like weights
    at a synchronisation (F3), weighted by the samples of each member.
    """

    def __init__(self, model: nn.Module, num_members: int) -> None:
        self._model = model
        self._slots = list(_buffer_slots(model))
        buffers = [buffer for _, _, buffer in self._slots]
        self._own = [[buffer.clone() for buffer in buffers] for _ in range(num_members)]
        self._samples = [0] * num_members

    def activate(self, member: int, num_samples: int) -> None:
        """Make the model read and write this member's buffers, for a pass over `num_samples`."""
        for (module, name, _), buffer in zip(self._slots, self._own[member], strict=True):
            # Assigning through the dictionary skips nn.Module's checks: this runs for every member of every step.
            module._buffers[name] = buffer
        self._samples[member] += num_samples

    def average(self, samples: Sequence[int] | None = None) -> None:
        """Write the members' mean to the model's original buffers and to those of every member (F3).

        `samples` are those of each member; by default, those of its passes since the last average.
        """
        samples = samples or self._samples
        total = sum(samples)
        if not total:
            # No samples since the last average: all members have the mean.
            return
        weights = [own / total for own in samples]
        for (module, name, shared), *members in zip(self._slots, *self._own, strict=True):
            if shared.is_floating_point():
                # On the CPU: mps has no float64.
                mean = torch.zeros(shared.shape, dtype=torch.float64)
                for weight, buffer in zip(weights, members, strict=True):
                    mean += weight * buffer.cpu().double()
                shared.copy_(mean.to(shared.dtype))
            else:
                # Counters of batches: all members get the maximum.
                shared.copy_(torch.stack(members).amax(dim=0))
            module._buffers[name] = shared
            for buffer in members:
                buffer.copy_(shared)
        self._samples = [0] * len(self._samples)


def _buffer_slots(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer
