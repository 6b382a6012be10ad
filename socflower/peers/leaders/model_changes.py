"""Leaders' models in fewer bytes: their changes since the last common model, weighted by samples (F8).

    x_k = p_k · (w_k − c) + e_k,    w = c + Σ Q(x_k),    e_k ← x_k − Q(x_k),    p_k = samples_k / Σ samples

c is the model with which all groups began the interval, e_k the sum of the group's earlier rounding errors. A change
is small compared with the weights, so few bits represent it well. "fp16" sums halves and has no e; "int8" sums
eight-bit multiples of a step for each 4,096 elements (`Int8Compression`), "int4" gathers four-bit ones, with steps of
each group's own (`Int4Compression`). Both have error feedback: over any number of
exchanges the sum of what was exchanged is within half a step, per group, of the sum of all changes.

Every member computes the group's e from values that all of them have: w_k, c and the previous e, p_k, and the steps,
which the leader passes on with the mean. So any member can lead next.

Only weights of at most 32 bits that an optimiser changes are compressed. Rounding could make a variance of BatchNorm
negative, and statistics and counters are few; float64 models must keep their bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from socflower.hierarchy.exchange.models import FP16, INT4
from socflower.training.exchange.compression import (
    Script,
    agree_on_steps,
    in_blocks,
    sum_in_halves,
    sum_levels,
    sum_of_four_bits,
    to_four_bits,
)
from socflower.wire.arrays import array_to_bytes, digest_of, pack_arrays, unpack_arrays

_Array = NDArray[Any]
Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChangeCompression:
    """How a group's change is compressed in one exchange; all but `feedback` is equal for all groups."""

    # "fp16", "int8" or "int4".
    name: str
    # The model c, with at least the exchanged tensors.
    common: Mapping[str, _Array]
    # Tensors that no optimiser changes.
    untrained: frozenset[str] = frozenset()
    # The feedback e in one row; None if it is zero.
    feedback: Floats | None = None

    def compresses(self, name: str, array: _Array) -> bool:
        """Return whether a tensor is compressed."""
        return (
            name not in self.untrained
            and np.issubdtype(array.dtype, np.inexact)
            and reals(array).itemsize <= 4
        )

    def layout(self, arrays: Mapping[str, _Array]) -> str:
        """Return a digest of what groups must have in common to add their changes."""
        names = [name for name, array in arrays.items() if self.compresses(name, array)]
        return f"{self.name} {digest_of({name: bytes(array_to_bytes(self.common[name])) for name in names})}"

    def change(self, arrays: Mapping[str, _Array], share: float) -> Floats:
        """Return x in one row, in the order of the tensors; values that are too large become infinite."""
        parts = [
            (reals(array).astype(np.float64) - reals(self.common[name]).astype(np.float64)) * share
            for name, array in self._compressed(arrays)
        ]
        with np.errstate(over="ignore"):
            change: Floats = np.concatenate([np.zeros(0), *parts]).astype(np.float32)
            if self.feedback is not None:
                assert self.feedback.shape == change.shape, "it is of another model"
                change += self.feedback
        return change

    def model(self, arrays: Mapping[str, _Array], total: Floats) -> dict[str, _Array]:
        """Return the compressed tensors of c + the sum of all groups' changes."""
        made: dict[str, _Array] = {}
        start = 0
        for name, array in self._compressed(arrays):
            row = reals(self.common[name])
            part = (row.astype(np.float64) + total[start : start + row.size]).astype(row.dtype)
            made[name] = part.view(array.dtype).reshape(array.shape)
            start += row.size
        return made

    def unsent(self, arrays: Mapping[str, _Array], share: float, steps: Floats) -> Floats:
        """Return the next e of a group whose change was summed with these steps."""
        change = self.change(arrays, share)
        if self.name == INT4:
            return to_four_bits(torch.from_numpy(change))[1].numpy()
        blocks, step = in_blocks(torch.from_numpy(change)), torch.from_numpy(steps)[:, None]
        return (blocks - _levels(blocks, step) * step).view(-1)[: len(change)].numpy().copy()

    def sum(self, change: Floats, size: int) -> Script[tuple[Floats, Floats | None]]:
        """Return the sum of all members' changes, bit-identical at all of them, and with "int8" the steps of its
        blocks; with "int4", whose steps each group has itself, an empty array.

        `size` is the number of members. The largest magnitudes of all members' changes, summed, must be finite.
        """
        flat = torch.from_numpy(change.copy())
        if self.name == FP16:
            yield from sum_in_halves(flat, size)
            return flat.numpy(), None
        if self.name == INT4:
            payloads = yield to_four_bits(flat)[0]
            assert payloads is not None
            return sum_of_four_bits(payloads, flat.numel()).numpy(), np.zeros(0, np.float32)
        blocks = in_blocks(flat)
        step = yield from agree_on_steps(blocks, size)
        levels = yield from sum_levels(_levels(blocks, step), flat.numel())
        return (levels * step).view(-1)[: flat.numel()].numpy(), step.view(-1).numpy()

    def _compressed(self, arrays: Mapping[str, _Array]) -> Iterator[tuple[str, _Array]]:
        return ((name, array) for name, array in arrays.items() if self.compresses(name, array))


def _levels(blocks: Tensor, step: Tensor) -> Tensor:
    return (blocks / step).round_()


class MemberChanges:
    """A member's state of its group for compressed exchanges: c and e, either of which it may lack at first.

    `feedback` is e if this member holds it, `owed` the digest of e if e is not zero.
    """

    def __init__(
        self, name: str, untrained: Sequence[str], feedback: Floats | None, owed: str
    ) -> None:
        self._name, self._untrained, self._owed = name, frozenset(untrained), owed
        self._common: Mapping[str, _Array] | None = None
        self._is_complete = False
        self.feedback = feedback
        self.log_lines: list[str] = []

    def begin(self, arrays: Mapping[str, _Array]) -> None:
        """Keep the model with which the interval begins; later calls change nothing."""
        if self._common is None:
            self._common = {name: array.copy() for name, array in arrays.items()}

    @property
    def held(self) -> tuple[bool, bool]:
        """Whether this member has c, and e."""
        return self._common is not None, self.feedback is not None

    def complete(
        self,
        held: Sequence[tuple[bool, bool]],
        broadcast_from: Callable[[int, Callable[[], bytes]], bytes],
    ) -> None:
        """Get missing parts of the state from the first member that has them; `held` lists the members' parts in ring
        order.

        All members call `broadcast_from` equally, with the rank of the member that has the part.
        """
        with_common, with_feedback = (
            [rank for rank, has in enumerate(held) if has[part]] for part in (0, 1)
        )
        if 0 < len(with_common) < len(held):
            common = broadcast_from(
                with_common[0], lambda: b"".join(pack_arrays(self._common or {}))
            )
            self._common = self._common or unpack_arrays(memoryview(common))
        if 0 < len(with_feedback) < len(held):
            packed = broadcast_from(
                with_feedback[0], lambda: b"".join(pack_arrays({"": self._own_feedback()}))
            )
            if self.feedback is None:
                self.feedback = unpack_arrays(memoryview(packed))[""]
        elif self._owed and not with_feedback:
            self.log_lines.append(
                "what compression has left of its earlier changes is lost with those that held it"
            )
        self._is_complete = True

    def compression(self) -> ChangeCompression:
        """Return how the group's change is compressed."""
        assert self._common is not None, (
            "a ring does no step before all of its members have the model"
        )
        return ChangeCompression(
            name=self._name, common=self._common, untrained=self._untrained, feedback=self.feedback
        )

    def on_mean(self, next_feedback: Callable[[ChangeCompression], Floats | None]) -> None:
        """Compute the next e, or drop it if this member lacks one of the values for it."""
        self.feedback = next_feedback(self.compression()) if self._is_complete else None

    def _own_feedback(self) -> Floats:
        assert self.feedback is not None
        return self.feedback


def feedback_digest(feedback: Floats | None) -> str:
    """Return by which a group's feedback is known; empty without any."""
    return "" if feedback is None else digest_of({"": bytes(array_to_bytes(feedback))})


def reals(array: _Array) -> _Array:
    """Return an array's values in a row, of complex numbers both parts."""
    row: _Array = np.ascontiguousarray(array).reshape(-1)
    return row.view(row.real.dtype)
