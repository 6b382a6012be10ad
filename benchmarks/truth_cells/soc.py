"""One SoC of a cell, or its hub: trains with the parts of a deployment and records times."""

import socket
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import nn

from benchmarks.truth_cells.cell import FEDERATED, ONE_RING, Cell
from benchmarks.truth_cells.models import build_data, build_model
from benchmarks.truth_cells.prediction import (
    SLEEPING_UPDATE_S,
    Calibration,
    Prediction,
    model_profile,
    plan_of,
    shares_of,
    speeds_of,
)
from socflower.hierarchy import Group, SyncInterval, unpredicted_exchanges, weighted_average
from socflower.peers.owner_preemption import PreemptionSwitch
from socflower.peers.ring.member import AppliedStep, RingMember
from socflower.peers.ring.settings import RingSettings
from socflower.peers.transports.port import RingPort
from socflower.strategies.round import Round, ring_tasks
from socflower.training.fp32 import FP32Session, FP32Trainer, sgd
from socflower.training.model_state import load_trainable_state, trainable_state
from socflower.training.trainer import TrainingSpan
from socflower.wire.arrays import digest_of, pack_arrays, unpack_arrays
from socflower.wire.message_keys import GroupTask, RingTask

_RING_PORT, _HUB_PORT = 28200, 27000
_PATIENCE_S = 60.0
_WARM_UP, _REPEATS = 3, 40
_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """How the processes of a cell wait for each other."""

    together: Callable[[], None]
    # Like `together`; it returns a moment soon afterwards at which all begin.
    start: Callable[[], float]


def tasks_of(
    cell: Cell, prediction: Prediction, number: int
) -> dict[int, tuple[GroupTask, RingTask]]:
    """Return every SoC's tasks for an interval of the cell, as the strategy makes them."""
    alone = cell.strategy == ONE_RING
    plan, num_steps = prediction.plan, prediction.interval.num_steps
    length = 2 * num_steps if alone else num_steps
    addresses = {
        soc: f"{cell.rack.address(soc)}:{_RING_PORT + number}" for soc in range(cell.num_socs)
    }
    this = Round(
        server_round=number + 1,
        interval=prediction.interval,
        plan=plan,
        exchanges=prediction.exchanges,
        costs=None,
        node_of={soc: soc for soc in addresses},
        transport=cell.transport,
        sent=ArrayRecord(),
        settled_by_grid=True,
    )
    rings = ring_tasks(
        this,
        RingSettings(transport=cell.transport),
        addresses,
        {soc: soc for soc in addresses},
        rebalance_steps=0,
        tolerate_errors=False,
    )
    tasks = {}
    for group in plan.groups:
        task = _group_task(
            cell, group, first_step=number * num_steps, num_steps=length, total_steps=2 * num_steps
        )
        tasks |= {soc: (task, rings[soc]) for soc in group.members}
    return tasks


def _group_task(
    cell: Cell, group: Group, *, first_step: int, num_steps: int, total_steps: int
) -> GroupTask:
    speeds = speeds_of(cell)
    return GroupTask(
        group_id=group.group_id,
        num_groups=cell.num_groups,
        members=group.members,
        leader=group.leader,
        partitions=group.members,
        num_partitions=cell.num_socs,
        capacities=tuple(speeds[soc] for soc in group.members),
        first_step=first_step,
        num_steps=num_steps,
        steps_per_epoch=total_steps,
        total_steps=total_steps,
        batch_size=cell.batch_size,
        reshuffle=True,
        deal_epoch=0,
        seed=cell.number,
        num_samples=cell.batch_size * cell.num_groups * total_steps,
        num_buckets=cell.overlap_buckets,
    )


def calibrate(cell: Cell, soc: int, meeting: Meeting) -> tuple[float, float]:
    """Measure the seconds of this SoC's passes and of an update, while all other SoCs do the same."""
    share = max(1, shares_of(cell)[soc])
    model = build_model(cell.model)
    session = FP32Trainer(optimizer=sgd(0.01, 0.9), device="cpu").start(model, TrainingSpan())
    batch = build_data(share).batch(torch.arange(share), (0, 0))
    updates_s = []
    for _ in range(_WARM_UP + _REPEATS):
        session.gradients([batch], share)
        began_s = time.perf_counter()
        session.apply()
        updates_s.append(time.perf_counter() - began_s)
    alone = replace(
        cell, strategy=FEDERATED, num_groups=cell.num_socs, batch_size=share, sleeps=False
    )
    plan = plan_of(alone)
    interval = SyncInterval(
        index=0, first_step=0, num_steps=_WARM_UP + _REPEATS, epoch_end=1.0, deal_epoch=0
    )
    work = _Work(
        alone,
        soc,
        Prediction(
            plan=plan,
            exchanges=unpredicted_exchanges(plan, False, "star"),
            interval=interval,
            steps_s=0.0,
            synchronisation_s=0.0,
        ),
        0.0,
        meeting,
    )
    work.interval(0, has_model=True)
    *_, first_s = work.report["steps"][:_WARM_UP]
    return (work.report["steps"][-1] - first_s) / _REPEATS - median(updates_s[_WARM_UP:]), median(
        updates_s[_WARM_UP:]
    )


def train(
    cell: Cell, soc: int, prediction: Prediction, calibration: Calibration, meeting: Meeting
) -> dict[str, Any]:
    """Train both intervals and synchronise between them; return moments of the monotonic clock."""
    work = _Work(cell, soc, prediction, calibration.step_s[soc], meeting)
    work.connect()
    if cell.strategy == ONE_RING:
        work.interval(0, has_model=True)
        work.end()
        return work.report
    work.interval(0, has_model=True)
    work.synchronise()
    meeting.together()
    work.note("synchronised")
    work.interval(1, has_model=cell.leaders == "ring" or work.leads)
    work.end()
    return work.report


def serve(cell: Cell, meeting: Meeting) -> None:
    """Serve as the hub: average the leaders' models and send the mean back, or only receive a single model."""
    uploads = 0 if cell.strategy == ONE_RING else 1 if cell.leaders == "ring" else cell.num_groups
    with socket.create_server((cell.rack.address(cell.hub), _HUB_PORT)) as listener:
        listener.settimeout(_PATIENCE_S)
        # From now on SoCs may connect.
        meeting.together()
        connections = [listener.accept()[0] for _ in range(uploads)]
    meeting.start()
    if uploads:
        with ThreadPoolExecutor(uploads) as threads:
            for connection in connections:
                connection.settimeout(_PATIENCE_S)
            models = list(threads.map(_receive, connections))
            if cell.leaders == "star":
                mean = weighted_average(models, [1.0] * len(models))
                body = b"".join(pack_arrays(mean))
                list(
                    threads.map(
                        lambda connection: connection.sendall(_LENGTH.pack(len(body)) + body),
                        connections,
                    )
                )
        for connection in connections:
            # Returns when the connection is closed.
            connection.recv(1)
            connection.close()
        meeting.together()
    meeting.together()


class _Work:
    def __init__(
        self, cell: Cell, soc: int, prediction: Prediction, step_s: float, meeting: Meeting
    ) -> None:
        self._cell, self._soc, self._prediction, self._meeting = cell, soc, prediction, meeting
        self._model = build_model(cell.model)
        num_steps = 2 * prediction.interval.num_steps
        self._data = build_data(cell.batch_size * cell.num_groups * num_steps)
        self._trainer = _NotedTrainer(cell, step_s, shares_of(cell)[soc], meeting, self._model)
        self._state: bytes | None = None
        self._group = next(group for group in prediction.plan.groups if soc in group.members)
        self.leads = self._group.leader == soc
        self._hub: socket.socket | None = None
        self.report: dict[str, Any] = {"soc": soc, "steps": [], "digests": []}

    def connect(self) -> None:
        """Connect to the hub if this SoC sends it a model."""
        cell = self._cell
        self._meeting.together()
        if (
            self.leads
            and cell.strategy != ONE_RING
            and (cell.leaders == "star" or self._group.group_id == 0)
        ):
            self._hub = socket.create_connection(
                (cell.rack.address(cell.hub), _HUB_PORT), _PATIENCE_S
            )

    def interval(self, number: int, *, has_model: bool) -> None:
        """Train an interval, and record its steps and the digest of the weights."""
        group, ring = tasks_of(self._cell, self._prediction, number)[self._soc]
        addresses = [
            f"{self._cell.rack.address(soc)}:{_RING_PORT + number}"
            for soc in range(self._cell.num_socs)
        ]
        token = (self._cell.number * 2 + number + 1).to_bytes(32, "big")
        port = RingPort(
            addresses[self._soc],
            rank=self._soc,
            addresses=addresses,
            token=token,
            tls=None,
            heartbeat_s=_PATIENCE_S,
        )
        try:
            with PreemptionSwitch() as switch:
                end = RingMember(
                    model=self._model,
                    has_model=has_model,
                    data=self._data,
                    group=group,
                    ring=ring,
                    trainer=self._trainer,
                    port=port,
                    switch=switch,
                    state=self._state,
                    on_step=self._applied,
                ).train()
        finally:
            port.close()
        assert end.end is not None
        if end.outcome.recoveries_s or end.outcome.num_steps != group.num_steps:
            raise RuntimeError(f"SoC {self._soc}: the ring did not stay whole: {end.outcome}")
        self._state = end.end.state
        self.note("trained")
        self.report["digests"].append(
            digest_of({name: array.tobytes() for name, array in self._arrays().items()})
        )

    def synchronise(self) -> None:
        if self._hub is None:
            return
        self._hub.settimeout(_PATIENCE_S)
        body = b"".join(pack_arrays(self._arrays()))
        self._hub.sendall(_LENGTH.pack(len(body)) + body)
        if self._cell.leaders == "star":
            mean = _receive(self._hub)
            load_trainable_state(
                self._model, {name: torch.from_numpy(array) for name, array in mean.items()}
            )
        else:
            self._hub.shutdown(socket.SHUT_WR)
            self._hub.recv(1)
        self._hub.close()

    def note(self, name: str) -> None:
        self.report.setdefault(name, []).append(time.monotonic())

    def end(self) -> None:
        self.report["began"] = self._trainer.began_s
        self._meeting.together()

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {name: entry.numpy().copy() for name, entry in trainable_state(self._model).items()}

    def _applied(self, step: AppliedStep) -> None:
        self.report["steps"].append(time.monotonic())


@dataclass
class _NotedTrainer:
    """The trainer of a SoC: waits for the common start, and sleeps if the cell's SoCs sleep."""

    cell: Cell
    step_s: float
    # Samples of a step.
    share: int
    meeting: Meeting
    model: nn.Module
    began_s: list[float] = field(default_factory=list)

    def start(
        self, model: nn.Module, span: TrainingSpan, state: bytes | None = None
    ) -> FP32Session:
        if not self.began_s:
            self._warm_up()
        session = FP32Trainer(optimizer=sgd(0.01, 0.9), device="cpu").start(model, span, state)
        if self.cell.sleeps:
            _Pace(self.cell, self.step_s, model).slow(session)
        if not self.began_s:
            time.sleep(max(self.meeting.start() - time.monotonic(), 0.0))
        self.began_s.append(time.monotonic())
        return session

    def _warm_up(self) -> None:
        """Run the slower first steps of a process beforehand, as the calibration does."""
        trainer = FP32Trainer(optimizer=sgd(0.01, 0.9), device="cpu")
        session = trainer.start(build_model(self.cell.model), TrainingSpan())
        share = 1 if self.cell.sleeps else max(1, self.share)
        batch = build_data(share).batch(torch.arange(share), (0, 0))
        for _ in range(_WARM_UP):
            session.gradients([batch], share)
            session.apply()


class _Pace:
    """Delays the end of each part of a step to its time on a SoC of that speed; layers count by their operations."""

    def __init__(self, cell: Cell, step_s: float, model: nn.Module) -> None:
        profile = model_profile(cell.model)
        self._forward_s, self._backward_s = (
            step_s * profile.forward_share,
            step_s * (1.0 - profile.forward_share),
        )
        self._begins_s = self._backward_begins_s = 0.0
        done = 0.0
        for layer in reversed([layer for layer in profile.layers if layer.forward_flops]):
            done += layer.training_flops
            model.get_submodule(layer.name).register_full_backward_pre_hook(
                self._sleeper(done / profile.training_flops)
            )

    def slow(self, session: FP32Session) -> None:
        gradients, apply = session.gradients, session.apply
        session._model.register_forward_hook(self._forwarded)

        def paced(parts: Any, *arguments: Any) -> torch.Tensor:
            # A step begins at the end of the last one, so that the time in between is part of it.
            self._begins_s = self._applied_s or time.monotonic()
            # With the gradient of one sample, processes hardly compete for cores.
            loss = gradients([_first_sample(parts)], *arguments)
            _sleep_until(self._backward_begins_s + self._backward_s)
            return loss

        def applied() -> None:
            begins_s = time.monotonic()
            apply()
            _sleep_until(begins_s + SLEEPING_UPDATE_S)
            self._applied_s = time.monotonic()

        session.gradients, session.apply = paced, applied  # type: ignore[method-assign]
        self._applied_s = 0.0

    def _forwarded(self, *_: object) -> None:
        self._backward_begins_s = self._begins_s + self._forward_s
        _sleep_until(self._backward_begins_s)

    def _sleeper(self, done: float) -> Callable[..., None]:
        return lambda *_: _sleep_until(self._backward_begins_s + done * self._backward_s)


def _first_sample(parts: Sequence[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    return tuple(each[:1] for each in parts[0])


def _sleep_until(moment_s: float) -> None:
    time.sleep(max(moment_s - time.monotonic(), 0.0))


def _receive(connection: socket.socket) -> dict[str, NDArray[Any]]:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return unpack_arrays(memoryview(_exactly(connection, length)))


def _exactly(connection: socket.socket, length: int) -> bytearray:
    body = bytearray(length)
    view = memoryview(body)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the other end is gone")
        view = view[count:]
    return body
