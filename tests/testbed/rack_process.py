"""The first process inside the testbed: builds the rack, forks a process into each SoC's namespace, hands on results.

Runs as `python -m tests.testbed.rack_process FILE` in fresh user, network, mount and process namespaces; FILE has the
rack and the runs as JSON, and each line of standard output the results of one run. It is the namespace's process 1, so
whatever it started ends with it; it ends when its standard input is closed.
"""

import ctypes
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.testbed.ring_driver import Run, drive
from tests.testbed.topology import Rack

_HEAD_START_S = 0.5  # on a busy machine it takes a while until all have been woken up
_NETWORK_NAMESPACE = 0x40000000  # CLONE_NEWNET


def main(path: str) -> int:
    """Build the rack, do all runs one after the other, print their results; 0 if every SoC came to the end."""
    document = json.loads(Path(path).read_text("utf-8"))
    rack = Rack(
        **{**document["rack"], "slots_per_board": tuple(document["rack"]["slots_per_board"])}
    )
    runs = [Run.from_document(run) for run in document["runs"]]
    rack.build()
    _import_once({run.transport for run in runs})
    fork = multiprocessing.get_context("fork")
    start_s = fork.Value("d", 0.0)

    def together() -> None:
        start_s.value = time.monotonic() + _HEAD_START_S

    barrier = fork.Barrier(rack.num_socs, action=together)

    def meet() -> float:
        barrier.wait()
        return start_s.value

    receivers, processes = [], []
    for soc in range(rack.num_socs):
        receiver, sender = fork.Pipe(duplex=False)
        process = fork.Process(
            target=_live_on, args=(soc, rack, runs, meet, sender), name=f"SoC {soc}", daemon=True
        )
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    threading.Thread(
        target=_end_with_stdin, daemon=True
    ).start()  # after the forks, which threads do not survive
    for number in range(len(runs)):
        print(
            json.dumps([_receive(receiver, processes, number) for receiver in receivers]),
            flush=True,
        )
    for process in processes:
        process.join()
    return max(abs(process.exitcode or 0) for process in processes)


def _import_once(transports: set[str]) -> None:
    """Import what the forked processes need, which takes each of them as long as it takes this one."""
    import torch.distributed  # noqa: F401

    if transports & {"gloo", "grpc"}:
        import socflower.peers.ring.member  # noqa: F401


def _live_on(
    soc: int, rack: Rack, runs: Sequence[Run], meet: Callable[[], float], sender: Connection
) -> None:
    """Be a SoC: enter its namespace and do its part of every run."""
    enter_network(Path(f"/run/netns/soc{soc}"))
    for number, run in enumerate(runs):
        sender.send(drive(soc, rack, run, number, meet))


def enter_network(path: Path) -> None:
    """Move this process into the network namespace of that name."""
    library = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as namespace:
        if library.setns(namespace.fileno(), _NETWORK_NAMESPACE):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))


def _receive(receiver: Connection, processes: Sequence[BaseProcess], number: int) -> dict[str, Any]:
    """Return a SoC's results of a run; end everything if any SoC failed, which the others would wait for for ever."""
    while True:
        ready = wait(
            [receiver, *(process.sentinel for process in processes if process.exitcode is None)]
        )
        for process in processes:
            if process.exitcode:
                print(
                    f"{process.name} ended with {process.exitcode} during run {number}",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)  # and the kernel ends the other SoCs
        if receiver in ready:
            # Of a process that is about to be known as ended.
            with suppress(EOFError):
                return dict(receiver.recv())


def _end_with_stdin() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
