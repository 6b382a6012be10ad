"""The processor time that the messages of a batch cost at either end of a stream.

Echoes replace the halves of the model: features are sent, and a gradient of the same size comes back, over the same
link as in training. Each end counts the processor time of its process, with serialising, copying and system calls.
Measurements at two sizes separate the cost per byte from the fixed cost per batch. Between batches each end touches
more memory than a cache holds, as in training; that time is subtracted. With several batches in flight threads switch
more often, so the messages of a pipeline are measured with its window.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.split_contest.plan import full_period_s
from socflower.edgecloud.cloud.operator_calls import CloudOperator, close_session, open_session
from socflower.edgecloud.half_protocols import Array, Weights
from socflower.edgecloud.plan.cuts import SplitCosts, SplitPlan
from socflower.edgecloud.runtime.edge_connection import EdgeConnection
from socflower.edgecloud.runtime.front_loop import FrontPlan
from socflower.edgecloud.runtime.span_training import BatchSpan, train_front
from socflower.errors import ConfigError

FINGERPRINT = "a stream that carries nothing but zeros"
# Of features.
FEW_BYTES, MOST_BYTES = 256, 2 << 20
_WARM_UP_BATCHES = 3
_TRAINING_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamCosts:
    """An end's processor time for a batch's features and its gradient."""

    # Sent or received.
    s_per_byte: float
    s_per_batch: float

    @classmethod
    def of(cls, few_s: float, many_s: float, many_bytes: int) -> "StreamCosts":
        """Return the costs from the seconds of a batch of `FEW_BYTES` and of one of `many_bytes` in each direction."""
        if not many_bytes > FEW_BYTES:
            raise ConfigError(
                f"stream costs: many_bytes = {many_bytes} must be more than {FEW_BYTES}"
            )
        s_per_byte = max(0.0, many_s - few_s) / (2 * (many_bytes - FEW_BYTES))
        return cls(s_per_byte=s_per_byte, s_per_batch=max(0.0, few_s - 2 * FEW_BYTES * s_per_byte))


def with_streams(costs: SplitCosts, edge: StreamCosts, cloud: StreamCosts) -> SplitCosts:
    """Return a model's costs with the costs of its messages."""
    return replace(
        costs,
        edge_s_per_byte=edge.s_per_byte,
        edge_s_per_batch=edge.s_per_batch,
        cloud_s_per_byte=cloud.s_per_byte,
        cloud_s_per_batch=cloud.s_per_batch,
    )


def measure_slowdown(work: Callable[[], object] | None = None, *, at_least_s: float = 0.5) -> float:
    """Return the wall-clock seconds per processor second of this process, at least 1.

    `work` is repeated until `at_least_s` have passed; it must not leave threads running.
    """
    values = np.zeros(1 << 16, np.float32)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    while (passed_s := time.perf_counter() - began_s) < at_least_s:
        if work is None:
            np.sqrt(values, out=values)
        else:
            work()
    return max(1.0, passed_s / max(1e-9, time.process_time() - began_cpu_s))


def echo_s(
    address: str, token: str, num_bytes: int, *, num_batches: int, name: str, window: int = 0
) -> float:
    """Return this process's processor seconds for a batch with features of `num_bytes`, sent to a cloud that echoes.

    The session `name` has the settings {"echo": num_bytes}. Up to window + 1 batches are in flight; only batches of the
    full pipeline count.
    """
    if num_batches < 1:
        raise ConfigError(f"stream costs: num_batches = {num_batches} must be 1 or more")
    operator, front = CloudOperator(address=address, token=token), Echo(num_bytes)
    edge_token = open_session(
        operator, run_id=name, fingerprint=FINGERPRINT, settings={"echo": num_bytes}
    )
    connection = EdgeConnection(address, run_id=name, token=edge_token, fingerprint=FINGERPRINT)
    try:
        train_front(
            connection,
            front,
            BatchSpan(first_batch=0, num_batches=_WARM_UP_BATCHES + num_batches + 2 * window),
            FrontPlan(
                split_plan=SplitPlan(cut=0, window=window), progress=lambda progress: front.note()
            ),
        )
    finally:
        connection.close()
        close_session(operator, name)
    return front.batch_s(window)


class Echo:
    """A front or back half without a model; it returns arrays of zeros."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._features = np.zeros((1, num_bytes // 4), np.float32)
        self._memory = np.zeros(_TRAINING_BYTES // 4, np.float32)
        # Of the processor.
        self._training_s = 0.0
        self._noted_s: list[float] = []

    def note(self) -> None:
        """Record the processor time so far at the end of a batch."""
        self._noted_s.append(time.process_time() - self._training_s)

    def batch_s(self, window: int = 0) -> float:
        """Return the processor seconds of a batch in the full pipeline, without those for touching memory."""
        return full_period_s(self._noted_s[_WARM_UP_BATCHES - 2 :], window)

    def _train(self) -> None:
        began_s = time.thread_time()
        self._memory += 1.0
        self._training_s += time.thread_time() - began_s

    @property
    def cut(self) -> int:
        return 0

    def forward(self, batch: int, *, keep_graph: bool = False) -> Array:
        self._train()
        # A real half also returns new memory.
        return self._features.copy()

    @property
    def feature_quantum(self) -> float | None:
        return None

    def labels(self, batch: int) -> NDArray[Any]:
        return np.zeros(1, np.int64)

    def sample_ids(self, batch: int) -> NDArray[np.int64]:
        return np.array([batch], np.int64)

    def apply(self, batch: int, gradient: Array | None) -> None:
        """Discard the gradient."""
        self._train()

    def step(
        self, batch: int, features: Sequence[Array], labels: NDArray[Any]
    ) -> tuple[list[Array | None], float]:
        self._train()
        self.note()
        return [part.copy() for part in features], 0.0

    def weights(self) -> Weights:
        return {}

    def save(self) -> bytes:
        return b""

    def restore(self, saved: bytes) -> None:
        """Do nothing: there is no state."""

    def export_layers(self, cut: int) -> Mapping[str, NDArray[Any]]:
        raise ConfigError("stream costs: the cut does not move")

    def import_layers(self, cut: int, weights: Weights) -> None:
        raise ConfigError("stream costs: the cut does not move")
