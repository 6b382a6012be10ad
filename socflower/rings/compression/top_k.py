"""Deep gradient compression: only the largest accumulated gradients are sent (Lin et al., ICLR 2018)."""

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from socflower.errors import ConfigError
from socflower.rings.collective import Collective, Poll
from socflower.rings.compression.base import GradientCompression, all_reduce_bytes

_WARM_UP_FACTOR = 4
_Floats: TypeAlias = npt.NDArray[np.float32]
_Indices: TypeAlias = npt.NDArray[np.uint32]


class DeepGradientCompression(GradientCompression):
    """Each member sends its largest accumulated gradients, and accumulates the others further.

    In each step, with momentum m and a member's weighted gradient g:

        u = m·u + g,  v = v + u                 (momentum correction, local accumulation)
        send v where |v| is largest; v = 0, u = 0 there   (momentum factor masking)

    so the optimiser's own momentum must be 0. If an all-reduce of all values costs no more bytes, all are sent, and
    u is kept: with a ratio of 1 this is SGD with momentum. If a member is lost, so are its unsent values.

    Parameters
    ----------
    momentum : float
        m, at least 0 and below 1.
    ratio : float
        Fraction of a bucket's values that is sent, above 0 and at most 1; at least one value is sent.
    warm_up_steps : int
        Number of steps from a ratio of 1/4 over 1/16, 1/64, … to `ratio`, in stages of equal length; 4 epochs in the
        paper.
    clip_norm : float, optional
        Scale a bucket's gradient down to a norm of clip_norm/√n in each of the n members, before it is added.
    half_values : bool
        Send values as float16, in a unit of each member: 6 bytes per value instead of 8. The rounding error is kept
        as a residual.
    """

    name = "dgc"
    applies_momentum = True

    def __init__(
        self, *, momentum: float = 0.0, ratio: float = 0.001, warm_up_steps: int = 0, clip_norm: float | None = None,
        half_values: bool = False,
    ) -> None:
        super().__init__()
        if not 0 <= momentum < 1:
            raise ConfigError(f"dgc: momentum = {momentum}; give at least 0 and less than 1")
        if not 0 < ratio <= 1:
            raise ConfigError(f"dgc: ratio = {ratio}; give the part of the values to send, above 0 and at most 1")
        if warm_up_steps < 0:
            raise ConfigError(f"dgc: warm_up_steps = {warm_up_steps}; give 0 or more")
        if clip_norm is not None and not (clip_norm > 0 and math.isfinite(clip_norm)):
            raise ConfigError(f"dgc: clip_norm = {clip_norm}; give a number above 0, or none")
        self._momentum = momentum
        self._ratio = ratio
        self._warm_up_steps = warm_up_steps
        self._clip_norm = clip_norm
        self._half_values = half_values

    def _exchange(self, ring: Collective, bucket: int, gradient: Tensor, poll: Poll) -> tuple[Tensor, ...]:
        if self._clip_norm is not None:
            _clip(gradient, self._clip_norm / math.sqrt(ring.size))
        velocity, unsent = self._residuals(bucket, gradient, 2)
        velocity = torch.add(gradient, velocity, alpha=self._momentum)
        unsent = unsent + velocity
        num_sent = self.num_sent(gradient.numel(), ring.size)
        if num_sent == gradient.numel():
            ring.all_reduce(unsent).wait(poll)
            gradient.copy_(unsent)
            return velocity, torch.zeros_like(unsent)
        indices = _largest(unsent, num_sent)
        payload = self._encoded(indices, unsent)
        unsent.numpy()[indices] = self._rounded_off(payload, unsent.numpy()[indices])
        velocity.numpy()[indices] = 0
        payloads = ring.all_gather(payload, poll)
        lengths = {len(payload) for payload in payloads}
        if len(lengths) > 1:
            raise ConfigError(f"dgc: members sent {min(lengths)} to {max(lengths)} bytes for the same bucket; give all "
                              "of them the same ratio, warm-up and kind of values")
        gradient.zero_()
        for payload in payloads:  # in rank order, so that all members get the same bits
            where, values = self._decoded(payload)
            gradient.numpy()[where] += values
        return velocity, unsent

    def num_sent(self, num_elements: int, size: int) -> int:
        """Return the number of a bucket's values that each of `size` members sends in the current step."""
        num_sent = max(1, math.ceil(self._current_ratio() * num_elements))
        gathered = (size - 1) * self._payload_bytes(num_sent)
        return num_elements if gathered >= all_reduce_bytes(4 * num_elements, size) else num_sent

    def wire_bytes(self, num_elements: int, size: int) -> int:
        """Return the bytes that a member sends in the current step; see `GradientCompression.wire_bytes`."""
        num_sent = self.num_sent(num_elements, size)
        if num_sent >= num_elements:
            return all_reduce_bytes(4 * num_elements, size)
        return (size - 1) * self._payload_bytes(num_sent)

    def _current_ratio(self) -> float:
        if self._step is None or self._step >= self._warm_up_steps:
            return self._ratio
        # The last power above the ratio ends the warm-up: 1/4, 1/16, 1/64, 1/256, then 0.001.
        num_stages = max(1, math.ceil(round(math.log(1 / self._ratio, _WARM_UP_FACTOR), 9)) - 1)
        stage = self._step * num_stages // self._warm_up_steps
        return max(self._ratio, _WARM_UP_FACTOR ** -(stage + 1.0))

    def _payload_bytes(self, num_sent: int) -> int:
        return num_sent * (6 if self._half_values else 8) + (4 if self._half_values else 0)

    def _encoded(self, indices: _Indices, values: Tensor) -> bytes:
        chosen = values.numpy()[indices]
        if not self._half_values:
            return indices.tobytes() + chosen.astype("<f4").tobytes()
        largest = float(np.abs(chosen).max())
        exponent = max(-126, min(126, 15 - math.frexp(largest)[1])) if math.isfinite(largest) and largest else 0
        with np.errstate(over="ignore"):  # only next to values that are already infinite
            halves = (chosen * np.float32(2.0 ** exponent)).astype("<f2")
        return np.int32(exponent).astype("<i4").tobytes() + indices.tobytes() + halves.tobytes()

    def _decoded(self, payload: bytes) -> tuple[_Indices, _Floats]:
        """Return a payload's indices, without duplicates, and its values as float32."""
        if not self._half_values:
            middle = len(payload) // 2
            return np.frombuffer(payload[:middle], "<u4"), np.frombuffer(payload[middle:], "<f4")
        num_values = (len(payload) - 4) // 6
        scale = np.float32(2.0 ** -int(np.frombuffer(payload, "<i4", 1)[0]))
        indices = np.frombuffer(payload, "<u4", num_values, offset=4)
        return indices, np.frombuffer(payload, "<f2", offset=4 + 4 * num_values).astype(np.float32) * scale

    def _rounded_off(self, payload: bytes, chosen: _Floats) -> _Floats:
        """Return the rounding errors of the chosen values, which are exact: halves are the values' leading bits."""
        with np.errstate(invalid="ignore"):
            rest = chosen - self._decoded(payload)[1]
        rest[~np.isfinite(rest)] = 0  # infinities were sent to all; as residuals they would become NaN
        return rest


def _largest(values: Tensor, count: int) -> _Indices:
    """Return the indices of the `count` largest magnitudes, in ascending order; NaN counts as larger than all."""
    magnitudes = values.abs().numpy()
    found = np.argpartition(magnitudes, magnitudes.size - count)[magnitudes.size - count:]
    return np.sort(found).astype("<u4")


def _clip(gradient: Tensor, limit: float) -> None:
    norm = float(torch.linalg.vector_norm(gradient))
    if math.isfinite(norm) and norm > limit:  # a non-finite norm is not clipped, so that divergence is detected
        gradient.mul_(limit / norm)
