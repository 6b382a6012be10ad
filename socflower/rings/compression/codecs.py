"""Gradient exchange in fewer bytes than float32 sums: in halves, in eight bits, or only the largest values.

| name              | a member sends, per element, of n members | what is lost                                       |
| ----------------- | ----------------------------------------- | -------------------------------------------------- |
| `none`            | 8(n-1)/n bytes                            | nothing                                            |
| `fp16`            | 4(n-1)/n                                  | 11 bits are kept; n rounding errors                |
| `int8`            | 2(n-1)/n                                  | nothing for good: what is rounded off is sent later |
| `int8-stochastic` | 2(n-1)/n                                  | noise that is zero on average; keeps no state      |
| `dgc`             | 8(n-1) · ratio                            | nothing for good: small values are sent later      |

All members get the same bits. A value that cannot be sent as a finite number becomes NaN at all members, so that
divergence is detected.
"""

import math

import numpy as np
import torch
from torch import Tensor

from socflower.errors import ConfigError
from socflower.rings.collective import Collective, Poll
from socflower.rings.compression.base import GradientCompression, all_reduce_bytes
from socflower.rings.compression.top_k import DeepGradientCompression
from socflower.wire.message_keys import COMPRESSIONS


def make_compression(
    name: str, *, seed: int = 0, momentum: float = 0.0, ratio: float = 0.001, warm_up_steps: int = 0,
    clip_norm: float | None = None, half_values: bool = False,
) -> GradientCompression | None:
    """Return a member's compression by name, None for `none`; `ConfigError` for an unknown name.

    `seed` is for stochastic rounding, the other parameters for `dgc`; see `DeepGradientCompression`.
    """
    if name == "none":
        return None
    if name == "fp16":
        return Float16Compression()
    if name in ("int8", "int8-stochastic"):
        return Int8Compression() if name == "int8" else StochasticInt8Compression(seed)
    if name == "dgc":
        return DeepGradientCompression(momentum=momentum, ratio=ratio, warm_up_steps=warm_up_steps,
                                       clip_norm=clip_norm, half_values=half_values)
    raise ConfigError(f"gradient compression {name!r} does not exist; use one of {', '.join(COMPRESSIONS)}")


class Float16Compression(GradientCompression):
    """Sums in float16, in units that all members agree on.

    The unit is the smallest power of two with which no partial sum can overflow: the members' largest magnitudes are
    summed first. Values below 2^-40 of that sum underflow; otherwise the error of a sum is at most
    n · 2^-11 · Σ|gᵢ|. Gathering the halves and summing them in float32 would round each value only once, but sends
    2(n-1) bytes per element: from four members on, at least as many as float32.
    """

    name = "fp16"

    def _exchange(self, ring: Collective, bucket: int, gradient: Tensor, poll: Poll) -> tuple[Tensor, ...]:
        if ring.size == 1:
            return ()
        bound = torch.linalg.vector_norm(gradient, math.inf)[None]
        ring.all_reduce(bound).wait(poll)
        limit = float(bound)
        if not math.isfinite(limit):
            gradient.fill_(math.nan)
            return ()
        # 2^15 leaves a factor of almost 2 for rounding; beyond ±126 the factor itself would not be a normal float32.
        exponent = max(-126, min(126, 15 - math.frexp(limit)[1])) if limit else 0
        halves = (gradient * 2.0 ** exponent).to(torch.float16)
        ring.all_reduce(halves).wait(poll)
        gradient.copy_(halves).mul_(2.0 ** -exponent)
        return ()

    def wire_bytes(self, num_elements: int, size: int) -> int:
        """Return the bytes of one all-reduce in halves; see `GradientCompression.wire_bytes`."""
        return all_reduce_bytes(2 * num_elements + 4, size) if num_elements else 0


# Of a lane's ±127: one level is reserved for float32 rounding errors in steps and quotients.
_LEVELS = 126
_BLOCK = 4096
_ZERO_LANES = np.uint32(0x80808080)


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
    _max_rounding = 0.5  # maximum rounding of a quotient away from zero

    def _exchange(self, ring: Collective, bucket: int, gradient: Tensor, poll: Poll) -> tuple[Tensor, ...]:
        self._require_few(ring.size)
        values = torch.zeros(-(-gradient.numel() // _BLOCK), _BLOCK)
        flat = values.view(-1)[:gradient.numel()]
        flat.copy_(gradient)
        if self._error_feedback:
            flat += self._residuals(bucket, gradient, 1)[0]
        if ring.size == 1:
            gradient.copy_(flat)
            return (torch.zeros_like(flat),) if self._error_feedback else ()
        step = values.abs().amax(dim=1, keepdim=True)
        ring.all_reduce(step.view(-1)).wait(poll)
        if not torch.isfinite(step).all():
            gradient.fill_(math.nan)
            return ()
        # Blocks of zeros or subnormal numbers get the smallest normal step.
        step.div_(_LEVELS - self._max_rounding * ring.size).clamp_(min=torch.finfo(step.dtype).tiny)
        levels = self._rounded(values / step, bucket, ring.rank)
        values.addcmul_(levels, step, value=-1)
        words = _pack(levels.view(-1)[:_whole_words(gradient.numel())])
        ring.all_reduce(words).wait(poll)
        levels.view(-1)[:4 * words.numel()] = _unpack(words)
        gradient.copy_(levels.mul_(step).view(-1)[:gradient.numel()])
        return (flat,) if self._error_feedback else ()

    def _rounded(self, quotients: Tensor, bucket: int, rank: int) -> Tensor:
        return quotients.round_()

    def _require_few(self, size: int) -> None:
        # With more members, each would have fewer levels than a sign and a zero need.
        if size > _LEVELS // 2:
            raise ConfigError(f"gradient compression {self.name!r}: a group has at most {_LEVELS // 2} members, this "
                              f"one {size}; use 'fp16', or more groups")

    def wire_bytes(self, num_elements: int, size: int) -> int:
        """Return the bytes of one all-reduce of bytes, and of the scales; see `GradientCompression.wire_bytes`."""
        num_blocks = -(-num_elements // _BLOCK)
        return all_reduce_bytes(_whole_words(num_elements) + 4 * num_blocks, size)


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
        words = np.random.SeedSequence((self._seed % 2 ** 64, self._step, bucket, rank)).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(words[0] >> np.uint64(1)))
        return (quotients + torch.rand(quotients.shape, generator=generator)).floor_()


def _whole_words(num_elements: int) -> int:
    return -(-num_elements // 4) * 4


def _pack(levels: Tensor) -> Tensor:
    """Return int32 words of four integers each, -127 to 127: Σ levelⱼ · 256^j.

    Words add lane by lane as long as lanes stay in ±127, without overflow: 127 · (1 + 256 + 256² + 256³) < 2^31.
    """
    lanes = (levels + 128).to(torch.uint8).numpy()
    # Subtracting the zero point of all lanes at once makes the borrows from lane to lane.
    return torch.from_numpy((lanes.view("<u4") - _ZERO_LANES).astype(np.uint32).view(np.int32))


def _unpack(words: Tensor) -> Tensor:
    """Return the four numbers of each word, as float32."""
    lanes = (words.numpy().view(np.uint32) + _ZERO_LANES).astype("<u4").view(np.uint8)
    return torch.from_numpy(lanes).to(torch.float32).sub_(128)
