"""The processor time that the messages of a batch cost on this device, measured over a local stream.

Both ends run in this process and do the same work: features are sent, and a gradient of the same size comes back. So
an edge spends half of the process's processor time, serialising, copying and system calls included. Measurements at two
sizes separate the cost per byte from the fixed cost per batch. Between batches more memory is touched than a cache
holds, as in training; the time for that is subtracted.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from socflower.edgecloud.cloud.cloud_service import CloudService
from socflower.edgecloud.cloud.operator_calls import CloudOperator, open_session
from socflower.edgecloud.halves import Array, Weights
from socflower.edgecloud.plan.cuts import SplitCosts, SplitPlan
from socflower.edgecloud.runtime.edge_connection import EdgeConnection
from socflower.edgecloud.runtime.front_loop import FrontPlan, Progress
from socflower.edgecloud.runtime.span_training import Span, train_front
from socflower.edgecloud.stream.credentials import new_token
from socflower.errors import ConfigError

_FINGERPRINT = "a stream that carries nothing but zeros"
_FEW, _MANY = 64, 1 << 18  # elements of float32
_WARM_UP_BATCHES = 3
_TRAINING_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamCosts:
    """The edge's processor time for sending a batch's features and receiving its gradient."""

    s_per_byte: float  # sent or received
    s_per_batch: float

    def added_to(self, costs: SplitCosts) -> SplitCosts:
        """Return a model's costs with these included."""
        return replace(costs, edge_s_per_byte=self.s_per_byte, edge_s_per_batch=self.s_per_batch)


def measure_stream(*, num_batches: int = 20, slowdown: float | None = None) -> StreamCosts:
    """Return what a stream costs on this device; at 32 bits, since other widths add the cost of the codec.

    Processor seconds are converted to seconds by `slowdown`: the ratio of wall-clock to processor time under a quota
    or other load; it is measured where it is not given.
    """
    if num_batches < 1:
        raise ConfigError(f"stream costs: num_batches = {num_batches} must be 1 or more")
    factor = measure_slowdown() if slowdown is None else slowdown
    few_s, many_s = (_edge_cpu_s(elements, num_batches) for elements in (_FEW, _MANY))
    s_per_byte = max(0.0, many_s - few_s) / (2 * 4 * (_MANY - _FEW))
    return StreamCosts(s_per_byte=factor * s_per_byte,
                       s_per_batch=factor * max(0.0, few_s - 2 * 4 * _FEW * s_per_byte))


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


def _edge_cpu_s(elements: int, num_batches: int) -> float:
    """Return the processor seconds of one end for a batch of this many feature elements."""
    token, run = new_token(), "stream-costs"
    told_s: list[float] = []
    front, back = _Echo(elements), _Echo(elements)
    service = CloudService("127.0.0.1:0", lambda terms, weights: back, operator_token=token, log=lambda line: None)

    def note(progress: Progress) -> None:
        told_s.append(time.process_time() - front.training_s - back.training_s)

    try:
        edge_token = open_session(CloudOperator(address=service.address, token=token), run_id=run,
                                  fingerprint=_FINGERPRINT)
        connection = EdgeConnection(service.address, run_id=run, token=edge_token, fingerprint=_FINGERPRINT)
        plan = FrontPlan(split_plan=SplitPlan(cut=0), progress=note)
        train_front(connection, front, Span(first_batch=0, num_batches=_WARM_UP_BATCHES + num_batches), plan)
        connection.close()
    finally:
        service.close()
    spent_s = [after - before for before, after in itertools.pairwise(told_s)][_WARM_UP_BATCHES - 1:]
    return statistics.median(spent_s) / 2


class _Echo:
    """A front or back half without a model: it returns arrays of zeros."""

    def __init__(self, elements: int) -> None:
        self._features = np.zeros((1, elements), np.float32)
        self._memory = np.zeros(_TRAINING_BYTES // 4, np.float32)
        self.training_s = 0.0  # of the processor

    def _train(self) -> None:
        began_s = time.thread_time()
        self._memory += 1.0
        self.training_s += time.thread_time() - began_s

    @property
    def cut(self) -> int:
        return 0

    def forward(self, batch: int, *, keep_graph: bool = False) -> Array:
        self._train()
        return self._features.copy()  # a real half also returns new memory

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

    def step(self, batch: int, features: Sequence[Array], labels: NDArray[Any]) -> tuple[list[Array | None], float]:
        self._train()
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
