"""Gradient exchange in fewer bytes than float32 sums: in float16, in eight bits, or only the largest values.

| name              | a member sends, per element, of n members | what is lost                                       |
| ----------------- | ----------------------------------------- | -------------------------------------------------- |
| `none`            | 8(n-1)/n bytes                            | nothing                                            |
| `fp16`            | 4(n-1)/n                                  | 11 bits are kept; n rounding errors                |
| `int8`            | 2(n-1)/n                                  | nothing for good: rounding errors are sent later   |
| `int8-stochastic` | 2(n-1)/n                                  | noise that is zero on average; keeps no state      |
| `dgc`             | 8(n-1) · ratio                            | nothing for good: small values are sent later      |

All members get the same bits. A value that cannot be sent as a finite number becomes NaN at all members, so that
divergence is detected.
"""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from socflower.errors import ConfigError, require_range
from socflower.peers.collective import Collective, Poll, no_poll
from socflower.peers.largest_values import decode_values, encode_values, encoded_bytes, largest
from socflower.wire.codecs.quantisation import half_exponent, pack_lanes, unpack_lanes
from socflower.wire.message_keys import COMPRESSIONS
from socflower.wire.saved_state import from_bytes, to_bytes

# The ratio of deep gradient compression changes by this factor in its warm-up.
_WARM_UP_FACTOR = 4
# Of an int8 lane's ±127: one level is reserved for float32 rounding errors in steps and quotients.
_LEVELS = 126
# Elements of a block share a step.
_BLOCK = 4096
MOST_MEMBERS = _LEVELS // 2
"""Of a sum in eight bits: with more, each would have fewer levels than a sign and a zero need."""


class GradientCompression(ABC):
    """One member's side of compressed exchanges, for one training.

    Some compressions keep residuals of each bucket, which are sent later. A step may fail and be repeated, so residuals
    change only at its end: call `start_step`, then `exchange` for each bucket, then `finish_step`; `start_step`
    discards the residuals of an unfinished step.
    """

    name: ClassVar[str]
    applies_momentum: ClassVar[bool] = False
    """Whether the compression applies momentum, so that the optimiser's must be 0."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._kept: dict[int, tuple[Tensor, ...]] = {}
        self._pending: dict[int, tuple[Tensor, ...]] = {}

    def start_step(self, step: int) -> None:
        """Begin or repeat step `step` of the whole training (0, 1, …), the same on all members."""
        self._step = step
        # A new dictionary: an exchange that was cancelled may still write to the old one.
        self._pending = {}

    def finish_step(self) -> None:
        """Store the residuals of the step's exchanges, now that all members have applied it."""
        self._kept.update(self._pending)
        self._pending = {}

    def exchange(
        self, ring: Collective, bucket: int, gradient: Tensor, poll: Poll = no_poll
    ) -> None:
        """Replace `gradient`, which is weighted with the member's share, by the sum over all members.

        Members call it for the same buckets in the same order. `gradient` is float32, contiguous, one-dimensional and
        on the CPU. Raises what the ring and `poll` raise, and `ConfigError` for other types.
        """
        assert self._step is not None, "start_step comes first"
        assert gradient.dim() == 1 and gradient.is_contiguous() and gradient.device.type == "cpu"
        if gradient.dtype != torch.float32:
            raise ConfigError(
                f"gradient compression {self.name!r}: takes float32 gradients, not "
                f"{str(gradient.dtype).removeprefix('torch.')}; use 'none'"
            )
        if not gradient.numel():
            return
        pending = self._pending
        residuals = self._exchange(ring, bucket, gradient, poll)
        if residuals:
            pending[bucket] = residuals

    @abstractmethod
    def _exchange(
        self, ring: Collective, bucket: int, gradient: Tensor, poll: Poll
    ) -> tuple[Tensor, ...]:
        """Do `exchange`, and return the bucket's residuals, which must not be changed afterwards."""

    @abstractmethod
    def wire_bytes(self, num_elements: int, size: int) -> int:
        """Return how many bytes a member sends for a bucket, the mean over members, in a ring of `size`.

        A ring all-reduce sends 2(n-1)/n of the buffer, an all-gather n-1 payloads; headers are not counted.
        """

    @property
    def _kind(self) -> str:
        return f"residuals of gradient compression {self.name!r}"

    def state(self) -> bytes:
        """Return the residuals, to be restored later."""
        return to_bytes(
            self._kind,
            {},
            {
                f"{bucket} {index}": tensor.numpy()
                for bucket, tensors in self._kept.items()
                for index, tensor in enumerate(tensors)
            },
        )

    def restore(self, state: bytes) -> None:
        """Restore what `state` returned; `ConfigError` if it is damaged or from another compression."""
        self._kept = {}
        for name, array in from_bytes(self._kind, state)[1].items():
            bucket = int(name.partition(" ")[0])
            self._kept[bucket] = (*self._kept.get(bucket, ()), torch.from_numpy(array))
        self._pending = {}

    def _residuals(self, bucket: int, gradient: Tensor, num_tensors: int) -> tuple[Tensor, ...]:
        """Return a bucket's residuals of earlier steps; zeros at first. They must not be changed."""
        kept = self._kept.get(bucket)
        if kept is None:
            return tuple(torch.zeros_like(gradient) for _ in range(num_tensors))
        if len(kept) != num_tensors or kept[0].shape != gradient.shape:
            raise ConfigError(
                f"gradient compression {self.name!r}: bucket {bucket} had {kept[0].numel()} elements and "
                f"has {gradient.numel()}; keep model and number of buckets, or start a "
                "new training"
            )
        return kept


def all_reduce_bytes(num_bytes: int, size: int) -> int:
    """Return the bytes that a member sends in a ring all-reduce of `num_bytes`, the mean over members, rounded up."""
    return -(-2 * (size - 1) * num_bytes // size)


class Float16Compression(GradientCompression):
    """Sums in float16, in units that all members agree on.

    The unit is the smallest power of two with which no partial sum can overflow: the members' largest magnitudes are
    summed first. Values below 2^-40 of that sum underflow; otherwise the error of a sum is at most
    n · 2^-11 · Σ|gᵢ|. Gathering the halves and summing them in float32 would round each value only once, but sends
    2(n-1) bytes per element: from four members on, at least as many as float32.
    """

    name = "fp16"

    def _exchange(
        self, ring: Collective, bucket: int, gradient: Tensor, poll: Poll
    ) -> tuple[Tensor, ...]:
        if ring.size == 1:
            return ()
        bound = torch.linalg.vector_norm(gradient, math.inf)[None]
        ring.all_reduce(bound).wait(poll)
        limit = float(bound)
        if not math.isfinite(limit):
            gradient.fill_(math.nan)
            return ()
        exponent = half_exponent(limit)
        halves = (gradient * 2.0**exponent).to(torch.float16)
        ring.all_reduce(halves).wait(poll)
        gradient.copy_(halves).mul_(2.0**-exponent)
        return ()

    def wire_bytes(self, num_elements: int, size: int) -> int:
        """Return the bytes of one all-reduce in halves; see `GradientCompression.wire_bytes`."""
        return all_reduce_bytes(2 * num_elements + 4, size) if num_elements else 0


class Int8Compression(GradientCompression):
    """Sums integer multiples of a common step, four to an int32; rounding errors are added to the next gradient.

    Members first sum their largest magnitudes mᵢ of each block of 4,096 elements, so that layers with small
    gradients keep their own scale. With the block's step Σmᵢ / (126 - n/2) the sum of all members' rounded quotients
    fits a signed byte, so four of them are added as one int32 without overflow between lanes: the ring sends a quarter
    of float32's bytes for any size of the group, and integer sums are exact. (Gathering every member's bytes would
    give each member 254 levels, but sends n-1 bytes per element: from five members on, more than float16.)

    Rounding to nearest with error feedback (Karimireddy et al., 2019): after any number of steps the sum of all that
    was exchanged is within half a step of the sum of all gradients, per member, while stochastic rounding's error
    grows with the root of that number.
    """

    name = "int8"
    _error_feedback = True
    # The maximum rounding of a quotient away from zero.
    _max_rounding = 0.5

    def _exchange(
        self, ring: Collective, bucket: int, gradient: Tensor, poll: Poll
    ) -> tuple[Tensor, ...]:
        self._require_few(ring.size)
        values = in_blocks(gradient)
        flat = values.view(-1)[: gradient.numel()]
        if self._error_feedback:
            flat += self._residuals(bucket, gradient, 1)[0]
        if ring.size == 1:
            gradient.copy_(flat)
            return (torch.zeros_like(flat),) if self._error_feedback else ()
        step = agree_on_steps(ring, values, max_rounding=self._max_rounding, poll=poll)
        if not torch.isfinite(step).all():
            gradient.fill_(math.nan)
            return ()
        levels = self._rounded(values / step, bucket, ring.rank)
        values.addcmul_(levels, step, value=-1)
        levels = sum_levels(ring, levels, gradient.numel(), poll)
        gradient.copy_(levels.mul_(step).view(-1)[: gradient.numel()])
        return (flat,) if self._error_feedback else ()

    def _rounded(self, quotients: Tensor, bucket: int, rank: int) -> Tensor:
        return quotients.round_()

    def _require_few(self, size: int) -> None:
        if size > MOST_MEMBERS:
            raise ConfigError(
                f"gradient compression {self.name!r}: a group has at most {MOST_MEMBERS} members, this "
                f"one {size}; use 'fp16', or more groups"
            )

    def wire_bytes(self, num_elements: int, size: int) -> int:
        """Return the bytes of one all-reduce of bytes, and of the scales; see `GradientCompression.wire_bytes`."""
        num_blocks = -(-num_elements // _BLOCK)
        return all_reduce_bytes(_whole_words(num_elements) + 4 * num_blocks, size)


def in_blocks(flat: Tensor) -> Tensor:
    """Return a copy of a row of values as blocks (blocks, 4096), each with one step; zeros pad the last block."""
    values = torch.zeros(-(-flat.numel() // _BLOCK), _BLOCK)
    values.view(-1)[: flat.numel()].copy_(flat)
    return values


def agree_on_steps(
    ring: Collective, values: Tensor, *, max_rounding: float = 0.5, poll: Poll = no_poll
) -> Tensor:
    """Return the step (blocks, 1) of each block, equal at all members; not finite if a value or a sum is not."""
    step = values.abs().amax(dim=1, keepdim=True)
    ring.all_reduce(step.view(-1)).wait(poll)
    # Blocks of zeros or subnormal numbers get the smallest normal step.
    return step.div_(_LEVELS - max_rounding * ring.size).clamp_(min=torch.finfo(step.dtype).tiny)


def sum_levels(ring: Collective, levels: Tensor, num_elements: int, poll: Poll = no_poll) -> Tensor:
    """Return the exact sum over members of multiples of the steps (blocks, 4096); `levels` is overwritten."""
    words = torch.from_numpy(pack_lanes(levels.view(-1)[: _whole_words(num_elements)].numpy()))
    ring.all_reduce(words).wait(poll)
    levels.view(-1)[: 4 * words.numel()] = torch.from_numpy(unpack_lanes(words.numpy()))
    return levels


class StochasticInt8Compression(Int8Compression):
    """`Int8Compression` with unbiased stochastic rounding, and without residuals.

    For groups whose members change: no residual is lost with a member. The noise depends only on seed, step, bucket and
    rank, so that runs are reproducible.
    """

    name = "int8-stochastic"
    _error_feedback = False
    _max_rounding = 1.0

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def _rounded(self, quotients: Tensor, bucket: int, rank: int) -> Tensor:
        assert self._step is not None
        words = np.random.SeedSequence(
            (self._seed % 2**64, self._step, bucket, rank)
        ).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(words[0] >> np.uint64(1)))
        return (quotients + torch.rand(quotients.shape, generator=generator)).floor_()


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
    """

    name = "dgc"
    applies_momentum = True

    def __init__(
        self, *, momentum: float = 0.0, ratio: float = 0.001, warm_up_steps: int = 0
    ) -> None:
        super().__init__()
        require_range("dgc", least=0, below=1, momentum=momentum)
        require_range("dgc", above=0, most=1, ratio=ratio)
        require_range("dgc", least=0, warm_up_steps=warm_up_steps)
        self._momentum = momentum
        self._ratio = ratio
        self._warm_up_steps = warm_up_steps

    def _exchange(
        self, ring: Collective, bucket: int, gradient: Tensor, poll: Poll
    ) -> tuple[Tensor, ...]:
        velocity, unsent = self._residuals(bucket, gradient, 2)
        velocity = torch.add(gradient, velocity, alpha=self._momentum)
        unsent = unsent + velocity
        num_sent = self.num_sent(gradient.numel(), ring.size)
        if num_sent == gradient.numel():
            ring.all_reduce(unsent).wait(poll)
            gradient.copy_(unsent)
            return velocity, torch.zeros_like(unsent)
        indices = largest(unsent.numpy(), num_sent)
        payload = encode_values(indices, unsent.numpy()[indices])
        unsent.numpy()[indices] = 0
        velocity.numpy()[indices] = 0
        payloads = ring.all_gather(payload, poll)
        lengths = {len(payload) for payload in payloads}
        if len(lengths) > 1:
            raise ConfigError(
                f"dgc: members sent {min(lengths)} to {max(lengths)} bytes for the same bucket; give all "
                "of them the same ratio and warm-up"
            )
        gradient.zero_()
        # The order of ranks gives all members the same bits.
        for payload in payloads:
            where, values = decode_values(payload)
            gradient.numpy()[where] += values
        return velocity, unsent

    def num_sent(self, num_elements: int, size: int) -> int:
        """Return the number of a bucket's values that each of `size` members sends in the current step."""
        num_sent = max(1, math.ceil(self._current_ratio() * num_elements))
        gathered = (size - 1) * encoded_bytes(num_sent)
        return num_elements if gathered >= all_reduce_bytes(4 * num_elements, size) else num_sent

    def wire_bytes(self, num_elements: int, size: int) -> int:
        """Return the bytes that a member sends in the current step; see `GradientCompression.wire_bytes`."""
        num_sent = self.num_sent(num_elements, size)
        if num_sent >= num_elements:
            return all_reduce_bytes(4 * num_elements, size)
        return (size - 1) * encoded_bytes(num_sent)

    def _current_ratio(self) -> float:
        if self._step is None or self._step >= self._warm_up_steps:
            return self._ratio
        # The last power above the ratio ends the warm-up: 1/4, 1/16, 1/64, 1/256, then 0.001.
        num_stages = max(1, math.ceil(round(math.log(1 / self._ratio, _WARM_UP_FACTOR), 9)) - 1)
        stage = self._step * num_stages // self._warm_up_steps
        return max(self._ratio, _WARM_UP_FACTOR ** -(stage + 1.0))


def _whole_words(num_elements: int) -> int:
    return -(-num_elements // 4) * 4


def make_compression(
    name: str,
    *,
    seed: int = 0,
    momentum: float = 0.0,
    ratio: float = 0.001,
    warm_up_steps: int = 0,
) -> GradientCompression | None:
    """Return a member's compression by name, None for `none`; `ConfigError` for an unknown name.

    `seed` is for stochastic rounding, the other parameters for `dgc`; see `DeepGradientCompression`.
    """
    match name:
        case "none":
            return None
        case "fp16":
            return Float16Compression()
        case "int8":
            return Int8Compression()
        case "int8-stochastic":
            return StochasticInt8Compression(seed)
        case "dgc":
            return DeepGradientCompression(
                momentum=momentum, ratio=ratio, warm_up_steps=warm_up_steps
            )
    raise ConfigError(
        f"gradient compression {name!r} does not exist; use one of {', '.join(COMPRESSIONS)}"
    )
