"""What a client needs of a trainer; FP32, INT8 and mixed-precision trainers all look like this."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from torch import Tensor, nn

Part: TypeAlias = tuple[Tensor, Tensor]
"""One member's share of a batch: inputs (samples, ...) and labels (samples,)."""


class TrainingSession(Protocol):
    """A model under training: optimiser, schedule position, and one set of BatchNorm statistics per member."""

    def step(self, parts: Sequence[Part]) -> Tensor:
        """Do one synchronous step of a group and return its loss (0-d, mean over all samples).

        Each part is one member's share; the members' mean gradients are weighted by samples (F4). An empty
        part contributes nothing.
        """
        ...

    def finish(self) -> bytes:
        """Settle the model (members' BatchNorm statistics averaged) and return the state to resume from."""
        ...


class Trainer(Protocol):
    """Makes sessions. Must be picklable where worker processes are spawned."""

    def start(
        self, model: nn.Module, *, num_members: int, first_step: int, total_steps: int, state: bytes | None,
    ) -> TrainingSession:
        """Continue at `first_step` of `total_steps` from the `state` an earlier session's `finish` returned.

        Without a state the optimiser is new, but the learning-rate schedule still stands at `first_step`.
        """
        ...
