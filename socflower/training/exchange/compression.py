"""A member's side of exchanges in fewer bytes than float32 sums; `hierarchy/exchange/coding_bytes.py` describes them.

A member's part of an exchange is a script: it yields what all members sum or gather, and is resumed with the result.
`run_together` runs the scripts of a group in one process, `exchange_over` of `peers/collective.py` one member's over a
ring. All members get the same bits. A value that cannot be sent as a finite number becomes NaN at all members, so that
divergence is detected.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from socflower.errors import ConfigError
from socflower.hierarchy.exchange.coding_bytes import (
    BLOCK,
    RING,
    SERVER,
    SMALL_BLOCK,
    Coding,
    Int4,
    Int8,
)
from socflower.training.exchange.buckets import sum_at_server, sum_in_ring_order
from socflower.wire.codecs.quantisation import half_exponent, pack_lanes, unpack_lanes
from socflower.wire.saved_state import from_bytes, to_bytes

_Result = TypeVar("_Result")

Shapes: TypeAlias = Sequence[Sequence[int]]

Script: TypeAlias = Generator[Tensor | bytes, list[bytes] | None, _Result]
"""A member's part of an exchange. It yields a buffer that is replaced by the sum over all members, or a payload.

For a payload it is resumed with those of all members, by rank. All members yield the same kinds in the same order.
"""


SUMS: Mapping[str, Callable[[Sequence[NDArray[Any]]], NDArray[Any]]] = {
    RING: sum_in_ring_order,
    SERVER: sum_at_server,
}
"""The sum of all members' buffers, by rank, by the kind of exchange."""


def run_together(scripts: Sequence[Script[_Result]], kind: str = RING) -> list[_Result]:
    """Run the scripts of all members, by rank, with the bits of a ring's sums or a server's; return their results."""
    results: list[_Result] = []
    payloads: list[bytes] | None = None
    while True:
        yielded: list[Tensor | bytes] = []
        for script in scripts:
            try:
                yielded.append(script.send(payloads))
            except StopIteration as ended:
                results.append(ended.value)
        if not yielded:
            return results
        payloads = [each for each in yielded if isinstance(each, bytes)] or None
        buffers = [each for each in yielded if isinstance(each, Tensor)]
        if buffers:
            total = torch.from_numpy(SUMS[kind]([buffer.numpy() for buffer in buffers]))
            for buffer in buffers:
                buffer.copy_(total)


class GradientCompression(ABC):
    """One member's side of compressed exchanges, for one training.

    Some compressions keep residuals of each bucket, which are sent later. A step may fail and be repeated, so residuals
    change only at its end: call `start_step`, then `exchange` for each bucket, then `finish_step`; `start_step`
    discards the residuals of an unfinished step.
    """

    def __init__(self, coding: Coding) -> None:
        self._coding = coding
        self._step: int | None = None
        self._kept: dict[int, tuple[Tensor, ...]] = {}
        self._pending: dict[int, tuple[Tensor, ...]] = {}
        self._shapes: dict[int, Shapes] = {}

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
        self, rank: int, size: int, bucket: int, gradient: Tensor, shapes: Shapes = ()
    ) -> Script[None]:
        """Replace `gradient`, which is weighted with the member's share, by the sum over all `size` members.

        Members run it for the same buckets in the same order. `gradient` is float32, contiguous, one-dimensional and on
        the CPU. It has tensors of these shapes one after the other; without shapes it is one vector. Raises
        `ConfigError` for other types, and for a group that is too large.
        """
        assert self._step is not None, "start_step comes first"
        assert gradient.dim() == 1 and gradient.is_contiguous() and gradient.device.type == "cpu"
        if gradient.dtype != torch.float32 and not self._coding.is_exact:
            raise ConfigError(
                f"compression = {self._coding.name!r} takes float32 gradients, not "
                f"{str(gradient.dtype).removeprefix('torch.')}; use 'none'"
            )
        self._coding.require_size(size)
        self._shapes[bucket] = shapes or (gradient.shape,)
        return self._run(self._pending, rank, size, bucket, gradient)

    def _run(
        self,
        pending: dict[int, tuple[Tensor, ...]],
        rank: int,
        size: int,
        bucket: int,
        gradient: Tensor,
    ) -> Script[None]:
        if not gradient.numel():
            return
        residuals = yield from self._exchange(rank, size, bucket, gradient)
        if residuals:
            pending[bucket] = residuals

    @abstractmethod
    def _exchange(
        self, rank: int, size: int, bucket: int, gradient: Tensor
    ) -> Script[tuple[Tensor, ...]]:
        """Do `exchange`, and return the bucket's residuals, which must not be changed afterwards."""

    @property
    def _kind(self) -> str:
        return f"residuals of compression {self._coding.name!r}"

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
        if len(kept) != num_tensors or kept[-1].shape != gradient.shape:
            raise ConfigError(
                f"compression = {self._coding.name!r}: bucket {bucket} had {kept[-1].numel()} elements and "
                f"has {gradient.numel()}; keep model and number of buckets, or start a "
                "new training"
            )
        return kept


class ExactSum(GradientCompression):
    """Sums gradients as they are."""

    def _exchange(
        self, rank: int, size: int, bucket: int, gradient: Tensor
    ) -> Script[tuple[Tensor, ...]]:
        yield gradient
        return ()


class Float16Compression(GradientCompression):
    """Sums in float16, in units that all members agree on.

    The unit is the smallest power of two with which no partial sum can overflow: the members' largest magnitudes are
    summed first. Values below 2^-40 of that sum underflow; otherwise the error of a sum is at most
    n · 2^-11 · Σ|gᵢ|. Gathering the halves and summing them in float32 would round each value only once, but sends
    2(n-1) bytes per element: from four members on, at least as many as float32.
    """

    def _exchange(
        self, rank: int, size: int, bucket: int, gradient: Tensor
    ) -> Script[tuple[Tensor, ...]]:
        yield from sum_in_halves(gradient, size)
        return ()


def sum_in_halves(values: Tensor, size: int) -> Script[None]:
    """Replace a row of values by the sum over all `size` members; see `Float16Compression`."""
    if size == 1:
        return
    bound = torch.linalg.vector_norm(values, math.inf)[None]
    yield bound
    limit = float(bound)
    if not math.isfinite(limit):
        values.fill_(math.nan)
        return
    exponent = half_exponent(limit)
    halves = (values * 2.0**exponent).to(torch.float16)
    yield halves
    values.copy_(halves).mul_(2.0**-exponent)


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

    _error_feedback: ClassVar[bool] = True

    def __init__(self, coding: Int8) -> None:
        super().__init__(coding)
        self._max_rounding = coding.max_rounding

    def _exchange(
        self, rank: int, size: int, bucket: int, gradient: Tensor
    ) -> Script[tuple[Tensor, ...]]:
        values = in_blocks(gradient)
        flat = values.view(-1)[: gradient.numel()]
        if self._error_feedback:
            flat += self._residuals(bucket, gradient, 1)[0]
        if size == 1:
            gradient.copy_(flat)
            return (torch.zeros_like(flat),) if self._error_feedback else ()
        step = yield from agree_on_steps(values, size, self._max_rounding)
        if not torch.isfinite(step).all():
            gradient.fill_(math.nan)
            return ()
        levels = self._rounded(values / step, bucket, rank)
        values.addcmul_(levels, step, value=-1)
        levels = yield from sum_levels(levels, gradient.numel())
        gradient.copy_(levels.mul_(step).view(-1)[: gradient.numel()])
        return (flat,) if self._error_feedback else ()

    def _rounded(self, quotients: Tensor, bucket: int, rank: int) -> Tensor:
        return quotients.round_()


def in_blocks(flat: Tensor, size: int = BLOCK) -> Tensor:
    """Return a copy of a row of values as blocks (blocks, size), each with one step; zeros pad the last block."""
    values = torch.zeros(-(-flat.numel() // size), size)
    values.view(-1)[: flat.numel()].copy_(flat)
    return values


def agree_on_steps(
    values: Tensor, size: int, max_rounding: float = Int8.max_rounding
) -> Script[Tensor]:
    """Return the step (blocks, 1) of each block, equal at all members; not finite if a value or a sum is not."""
    step = values.abs().amax(dim=1, keepdim=True)
    yield step.view(-1)
    # Blocks of zeros or subnormal numbers get the smallest normal step.
    return step.div_(Int8.levels - max_rounding * size).clamp_(min=torch.finfo(step.dtype).tiny)


def sum_levels(levels: Tensor, num_elements: int) -> Script[Tensor]:
    """Return the exact sum over members of multiples of the steps (blocks, 4096); `levels` is overwritten."""
    # Four lanes are a word.
    num_lanes = -(-num_elements // 4) * 4
    words = torch.from_numpy(pack_lanes(levels.view(-1)[:num_lanes].numpy()))
    yield words
    levels.view(-1)[:num_lanes] = torch.from_numpy(unpack_lanes(words.numpy()))
    return levels


class StochasticInt8Compression(Int8Compression):
    """`Int8Compression` with unbiased stochastic rounding, and without residuals.

    For groups whose members change: no residual is lost with a member. The noise depends only on seed, step, bucket and
    rank, so that runs are reproducible.
    """

    _error_feedback = False

    def __init__(self, coding: Int8, seed: int) -> None:
        super().__init__(coding)
        self._seed = seed

    def _rounded(self, quotients: Tensor, bucket: int, rank: int) -> Tensor:
        assert self._step is not None
        generator = seeded(self._seed, self._step, bucket, rank)
        return (quotients + torch.rand(quotients.shape, generator=generator)).floor_()


def seeded(seed: int, *key: int) -> torch.Generator:
    """Return a generator that depends only on these numbers."""
    words = np.random.SeedSequence((seed % 2**64, *key)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0] >> np.uint64(1)))


class Int4Compression(GradientCompression):
    """Gathers four bits for each element, and sums them in float32 in the order of ranks, with error feedback.

    Each member has steps of its own, an eighth of a block's largest magnitude or less, so that none has to agree with
    the others; what rounding left is added to the next gradient, as `Int8Compression` does.
    """

    def _exchange(
        self, rank: int, size: int, bucket: int, gradient: Tensor
    ) -> Script[tuple[Tensor, ...]]:
        (left,) = self._residuals(bucket, gradient, 1)
        whole = gradient + left
        if size == 1:
            gradient.copy_(whole)
            return (torch.zeros_like(whole),)
        payload, left = to_four_bits(whole)
        payloads = yield payload
        assert payloads is not None
        gradient.copy_(sum_of_four_bits(payloads, gradient.numel()))
        return (left,)


def to_four_bits(values: Tensor) -> tuple[bytes, Tensor]:
    """Return a row of values as bytes, the steps of its blocks first, and what rounding leaves of it.

    The steps of blocks that are not finite make them NaN.
    """
    blocks = in_blocks(values, SMALL_BLOCK)
    step = blocks.abs().amax(dim=1, keepdim=True).div_(Int4.levels)
    step.clamp_(min=torch.finfo(step.dtype).tiny)
    levels = (blocks / step).round_()
    left = (blocks - levels * step).view(-1)[: values.numel()].clone()
    nibbles = levels.nan_to_num_(0.0).view(-1).numpy().astype(np.int8).view(np.uint8) & 15
    packed = (nibbles[0::2] | nibbles[1::2] << 4)[: -(-values.numel() // 2)]
    return step.numpy().astype("<f4").tobytes() + packed.tobytes(), left


def sum_of_four_bits(payloads: Sequence[bytes], num_elements: int) -> Tensor:
    """Return the sum of the rows that `to_four_bits` made bytes of, in their order."""
    num_blocks = -(-num_elements // SMALL_BLOCK)
    total = torch.zeros(num_blocks * SMALL_BLOCK)
    for payload in payloads:
        step = torch.from_numpy(np.frombuffer(payload, "<f4", num_blocks).astype(np.float32))
        packed = np.frombuffer(payload, np.uint8, offset=4 * num_blocks)
        levels = np.zeros(num_blocks * SMALL_BLOCK, np.int8)
        levels[0 : 2 * len(packed) : 2] = packed << 4
        levels[1 : 2 * len(packed) : 2] = packed & 240
        # The sign is in the upper half of a byte.
        signed = torch.from_numpy((levels >> 4).astype(np.float32))
        total += (signed.view(num_blocks, -1) * step[:, None]).view(-1)
    return total[:num_elements]
