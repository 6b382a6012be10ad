"""A cloud in this process, and the training of halves in NumPy with it."""

from pathlib import Path
from typing import Any

from socflower.edgecloud.cloud.cloud_service import CloudService
from socflower.edgecloud.cloud.operator_calls import CloudOperator, fetch_weights, open_session
from socflower.edgecloud.half_protocols import Weights
from socflower.edgecloud.runtime.edge_connection import EdgeConnection
from socflower.edgecloud.runtime.front_loop import FrontPlan
from socflower.edgecloud.runtime.half_state import LoopReport
from socflower.edgecloud.runtime.span_training import BatchSpan, train_back, train_front
from tests.edgecloud.runtime.loops import plan
from tests.edgecloud.runtime.numpy_halves import (
    FINGERPRINT,
    OPERATOR,
    Back,
    Front,
    connect,
    local_training,
    make_half,
    same,
)


class Cloud:
    """A service whose log is collected; runs are opened by `open`."""

    def __init__(
        self, listen: str = "127.0.0.1:0", factory: Any = make_half, **options: Any
    ) -> None:
        self.lines: list[str] = []
        given = {"operator_token": OPERATOR, "log": self.lines.append, **options}
        self.service = CloudService(listen, factory, **given)
        self.port = self.service.port
        self.operator = CloudOperator(address=self.service.address, token=OPERATOR)

    def __enter__(self) -> "Cloud":
        return self

    def __exit__(self, *_: object) -> None:
        self.service.close()

    def open(self, run_id: str = "run", **options: Any) -> None:
        open_session(self.operator, **{"run_id": run_id, "fingerprint": FINGERPRINT, **options})

    def half(self, run_id: str = "run") -> Any:
        return self.service._sessions.get(run_id)._state.half

    def weights(self, run_id: str = "run") -> Weights:
        return fetch_weights(self.operator, run_id)[1]

    def trained(self, half: Any, num_batches: int, run_id: str = "run", seed: int = 0) -> bool:
        """Whether both halves together have the bits of `num_batches` in one place."""
        wanted = local_training(num_batches, seed)
        return same(half.weights(), self.weights(run_id), wanted=wanted)


def train(
    at: int | EdgeConnection,
    half: Front | Back,
    num_batches: int,
    how: FrontPlan | None = None,
    *,
    first: int = 0,
    folder: Path | None = None,
    **options: Any,
) -> LoopReport:
    """Train a span with the cloud at a port, or over a connection."""
    connection = connect(at, **options) if isinstance(at, int) else at
    span = BatchSpan(first_batch=first, num_batches=num_batches)
    if isinstance(half, Back):
        return train_back(connection, half, span, folder=folder)
    return train_front(connection, half, span, how or plan(), folder=folder)
