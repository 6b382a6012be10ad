"""A synchronous step of a group in one process, with the gradients that a ring of machines would have summed."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from socflower.errors import ConfigError
from socflower.hierarchy.exchange.coding_bytes import Coding
from socflower.hierarchy.exchange.gradients import GradientExchange
from socflower.model_graph import batch_form
from socflower.model_graph.batch_form import NOTHING
from socflower.training.exchange.buckets import make_buckets
from socflower.training.exchange.codings import make_compression
from socflower.training.exchange.compression import SUMS, GradientCompression, run_together
from socflower.training.trainer import (
    ExchangingSession,
    JointSession,
    Part,
    TrainingSession,
    WeighingSession,
)
from socflower.wire.saved_state import from_bytes, to_bytes

_KIND = "group with compressed gradients"
_SESSION = "session"


def exchanging(session: TrainingSession, coding: Coding, trainer: str) -> ExchangingSession:
    """Return a session whose gradients can be sent in a coding; `ConfigError` for a session of another kind."""
    if isinstance(session, ExchangingSession):
        return session
    if isinstance(session, JointSession):
        raise ConfigError(
            f"compression = {coding.name!r} rounds what {trainer} has to sum exactly, int32 gradients; leave it "
            "out, or use MixedPrecisionTrainer"
        )
    raise ConfigError(
        f"{trainer} cannot train in a ring: it does not hand out its gradients; use FP32Trainer, Int8Trainer or "
        "MixedPrecisionTrainer on real clusters"
    )


def own_compression(session: ExchangingSession, coding: Coding, seed: int) -> GradientCompression:
    """Return a member's side of a coding, which takes the optimiser's momentum over if it applies momentum."""
    momentum = session.disable_momentum() if coding.applies_momentum else 0.0
    return make_compression(coding, seed=seed, momentum=momentum)


def split_state(state: bytes) -> tuple[bytes, dict[int, bytes]]:
    """Return the session's state and each SoC's residuals from what `GroupSum.state` returned."""
    arrays = from_bytes(_KIND, state)[1]
    session = arrays.pop(_SESSION).tobytes()
    return session, {int(soc): residuals.tobytes() for soc, residuals in arrays.items()}


class GroupSum:
    """The members of a group in one process: each one's gradient is computed by itself, in the order of its exchange.

    `socs` are the members; `num_buckets` must equal the ring's, since sums and codings begin again with each bucket.
    `residuals` are those of members at the end of the previous interval.
    """

    def __init__(
        self,
        session: ExchangingSession,
        model: nn.Module,
        exchange: GradientExchange,
        socs: Sequence[int],
        *,
        num_buckets: int,
        seed: int,
        residuals: Mapping[int, bytes],
    ) -> None:
        self._session, self._socs = session, socs
        self._parameters = [part for part in model.parameters() if part.requires_grad]
        self._kind = exchange.kind
        self._make = partial(own_compression, session, exchange.coding, seed)
        self._buckets = [make_buckets(model, num_buckets) for _ in socs]
        self._compressions = [self._make() for _ in socs]
        for soc, compression in zip(socs, self._compressions, strict=True):
            if soc in residuals:
                compression.restore(residuals[soc])

    def step(self, parts: Sequence[Part], present: Sequence[int], step: int) -> Tensor:
        """Do step `step` of the whole training, and return its loss; see `TrainingSession.step`.

        `present` are the positions of the members that take part. The residuals of the others are lost.
        """
        total = sum(map(batch_form.num_samples, parts))
        weight = self._weight(parts, present)
        losses = []
        for member in present:
            if batch_form.num_samples(parts[member]):
                losses.append(self._session.gradients(_alone(parts, member), total, *weight))
            for bucket in self._buckets[member]:
                bucket.take_gradients()
        self._exchange(present, step)
        for bucket in self._buckets[present[0]]:
            bucket.from_host()
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view
        self._session.apply()
        for parameter in self._parameters:
            parameter.grad = None
        return torch.stack(losses).sum()

    def state(self, session: bytes) -> bytes:
        """Return the state of a session together with all members' residuals."""
        arrays = {_SESSION: np.frombuffer(session, np.uint8)}
        for soc, compression in zip(self._socs, self._compressions, strict=True):
            arrays[str(soc)] = np.frombuffer(compression.state(), np.uint8)
        return to_bytes(_KIND, {}, arrays)

    def _weight(self, parts: Sequence[Part], present: Sequence[int]) -> list[object]:
        """Return a function for the weight of the batch, or nothing if that is its number of samples."""
        session = self._session
        if not isinstance(session, WeighingSession):
            return []
        weights = [session.batch_weight(_alone(parts, member)) for member in present]
        if any(weight is None for weight in weights):
            return []
        total = float(SUMS[self._kind]([np.array([weight]) for weight in weights])[0])
        return [lambda: total]

    def _exchange(self, present: Sequence[int], step: int) -> None:
        """Replace the present members' gradients by their sums."""
        for member, compression in enumerate(self._compressions):
            if member not in present:
                self._compressions[member] = self._make()
            else:
                compression.start_step(step)
        for number, alike in enumerate(
            zip(*(self._buckets[member] for member in present), strict=True)
        ):
            run_together(
                [
                    self._compressions[member].exchange(
                        rank, len(present), number, bucket.buffer, bucket.shapes
                    )
                    for rank, (member, bucket) in enumerate(zip(present, alike, strict=True))
                ],
                self._kind,
            )
        for member in present:
            self._compressions[member].finish_step()


def _alone(parts: Sequence[Part], member: int) -> list[Part]:
    """Return the parts with those of other members empty."""
    return [part if at == member else NOTHING for at, part in enumerate(parts)]
