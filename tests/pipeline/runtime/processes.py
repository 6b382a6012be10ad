"""Devices of a plan as processes of their own, with messages over gloo."""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from socflower.engines.local.workers import _end_with_parent as end_with_parent
from socflower.engines.local.workers import _start_method as start_method
from socflower.peers.collective import PeerLost
from socflower.peers.transports.port import RingPort
from socflower.pipeline.plan import Plan
from socflower.pipeline.runtime.channels import run_script
from socflower.pipeline.runtime.gloo_channels import GlooChannels
from socflower.pipeline.runtime.member import Mini
from socflower.pipeline.runtime.payloads import EXACT, ActivationCoding
from socflower.pipeline.runtime.trained_model import TrainedModel
from socflower.pipeline.schedule.order import ScheduledPass
from tests.peers.peers import START_S, TOKEN, free_addresses, wait_for_peers
from tests.pipeline.runtime.training import member, model, socs_of

HEARTBEAT_S = 60.0  # so that no silence explains what a test sees
_THREADS_END_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """The moment at which a device kills its process."""

    soc: int
    pass_number: int  # of the device's passes, from the start of training
    after_s: float = 0.0  # since the beginning of that pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What all devices of a plan do together."""

    plan: Plan
    minis: tuple[Mini, ...]
    model: Mapping[str, Any] = field(default_factory=dict)  # options
    # Returns module, reading, trainer and data of another model than that of these options.
    make: Callable[[], dict[str, Any]] | None = None
    coding: ActivationCoding = EXACT
    int8_socs: tuple[int, ...] = ()
    death: Death | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What one device says of a training."""

    end: TrainedModel | None = None  # of the first device, with arrays as weights
    sent_bytes: int = 0  # in all updates
    end_bytes: int = 0  # after the last one
    lost: str | None = None  # why it could not go on
    moment_s: float = 0.0  # of the loss or of its own death, by the machine's monotonic clock
    threads_left: tuple[str, ...] = ()


class Devices:
    """One process a device, SoCs 0 to `count` - 1; ended on leaving the `with` block."""

    def __init__(self, count: int) -> None:
        processes, addresses = start_method(), free_addresses(count)
        self._pipes: list[Connection] = []
        self._processes = []
        self._generation = 0
        for rank in range(count):
            here, there = processes.Pipe()
            process = processes.Process(target=live, args=(there, rank, addresses), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def __enter__(self) -> "Devices":
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()

    def train(self, training: Training) -> dict[int, Report]:
        """Do a training and return the reports, by SoC."""
        self._generation += 1
        socs = socs_of(training.plan)
        for soc in socs:
            self._pipes[soc].send((training, self._generation))
        reports = {}
        for soc in socs:
            assert self._pipes[soc].poll(START_S), f"SoC {soc} does not end"
            reports[soc] = self._pipes[soc].recv()
        return reports


def live(pipe: Connection, rank: int, addresses: list[str]) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    port = RingPort(
        addresses[rank],
        rank=rank,
        addresses=addresses,
        token=TOKEN,
        tls=None,
        heartbeat_s=HEARTBEAT_S,
    )
    wait_for_peers(port, list(range(len(addresses))))
    while True:
        try:
            training, generation = pipe.recv()
        except EOFError:
            return
        pipe.send(_train(training, rank, port, generation, pipe))


def _train(
    training: Training, soc: int, port: RingPort, generation: int, pipe: Connection
) -> Report:
    socs = socs_of(training.plan)
    channels = GlooChannels(port, socs, socs, generation, HEARTBEAT_S)
    given = training.make() if training.make else {"module": model(**training.model)}
    num_passes = 0

    def die() -> None:
        pipe.send(Report(lost="killed", moment_s=time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def on_pass(_: int, operation: ScheduledPass) -> None:
        nonlocal num_passes
        death = training.death
        if death is not None and death.soc == soc and death.pass_number == num_passes:
            if death.after_s:
                threading.Timer(death.after_s, die).start()
            else:
                die()
        num_passes += 1

    options = {"coding": training.coding, "int8_socs": training.int8_socs, "on_pass": on_pass}
    own = member(plan=training.plan, soc=soc, send=channels.send, **given, **options)
    report = Report()
    try:
        channels.join()
        for mini in training.minis:
            run_script(own.update(mini), channels)
        channels.flush()
        sent_bytes = channels.sent_bytes
        end = run_script(own.finish(), channels)
        channels.flush()
        report = Report(
            end=None if end is None else replace(end, weights=_arrays(end.weights)),
            sent_bytes=sent_bytes,
            end_bytes=channels.sent_bytes - sent_bytes,
        )
    except PeerLost as lost:
        report = Report(lost=str(lost), moment_s=time.monotonic())
    channels.close()
    return replace(report, threads_left=_threads_left())


def _arrays(tensors: Mapping[str, Tensor]) -> Any:
    """Return tensors in a form whose memory does not end with this process."""
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _threads_left() -> tuple[str, ...]:
    """Return the threads of a pipeline that run though it has been left."""
    end_s = time.monotonic() + _THREADS_END_S
    while True:
        left = tuple(
            thread.name for thread in threading.enumerate() if thread.name.startswith("pipeline-")
        )
        if not left or time.monotonic() > end_s:
            return left
        time.sleep(0.01)
