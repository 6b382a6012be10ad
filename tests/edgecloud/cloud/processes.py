"""The two sides of a split training as processes that can be struck at, with halves that keep a ledger.

What a half applied is saved and restored with its weights, so at the end each half's ledger is the history of the
weights that it ended with: a batch that was lost is missing in it, one that was repeated is there twice.

    python -m tests.edgecloud.cloud.processes '{"address": ...}'

is an edge; the cloud is `socflower cloud serve tests.edgecloud.cloud.processes:program`.
"""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from socflower.clients.split.cloud_sessions import CloudClient
from socflower.edgecloud.cloud.operator_calls import CloudOperator, fetch_state, fetch_weights
from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.runtime.edge_connection import EdgeConnection
from socflower.edgecloud.runtime.front_loop import FrontPlan
from socflower.edgecloud.runtime.span_training import BatchSpan, train_front
from socflower.edgecloud.samples import BatchOrder, PartyBatches
from socflower.edgecloud.split_program import LayeredProgram, PlacedHalf
from socflower.errors import SocflowerError
from socflower.training.fp32 import sgd
from socflower.training.hang_watch import HangLimits, end_process, watch_hangs
from socflower.wire.secure_channel import Tls
from socflower.wire.split_message_keys import OWN, SplitTask
from socflower.workloads.models.classifiers import build_model
from socflower.workloads.sources import load_data

ROOT = Path(__file__).parents[3]
WAIT_S = 120.0  # for anything that must come at last, on a loaded machine
BATCHES_PER_EPOCH = 20
NUM_SAMPLES = 16 * BATCHES_PER_EPOCH
CHECKPOINT_BATCHES = 8
CUT = 1
SEED = 11


class Ledgered:
    """A half that remembers which batches its weights have seen."""

    def __init__(self, half: Any, pause_s: float = 0.0) -> None:
        self._half, self._pause_s, self.applied = half, pause_s, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._half, name)

    def forward(self, batch: int, *, keep_graph: bool = False) -> Any:
        time.sleep(self._pause_s)
        return self._half.forward(batch, keep_graph=keep_graph)

    def apply(self, batch: int, gradient: Any) -> None:
        self._half.apply(batch, gradient)
        self.applied.append(batch)

    def step(self, batch: int, features: Any, labels: Any) -> Any:
        outcome = self._half.step(batch, features, labels)
        self.applied.append(batch)
        return outcome

    def save(self) -> bytes:
        return json.dumps(self.applied).encode() + b"\n" + self._half.save()

    def restore(self, saved: bytes) -> None:
        ledger, _, half = saved.partition(b"\n")
        self._half.restore(half)
        self.applied = json.loads(ledger)


@dataclass(frozen=True, kw_only=True)
class LedgeredProgram(LayeredProgram):
    """A layered program whose halves keep ledgers."""

    def front(self, party: int, cut: int | None, batches: PartyBatches) -> PlacedHalf[Any]:
        return PlacedHalf(Ledgered(super().front(party, cut, batches).half))

    def back(self, cut: int | None, batches: PartyBatches | None = None) -> PlacedHalf[Any]:
        return PlacedHalf(Ledgered(super().back(cut, batches).half))


def program() -> LedgeredProgram:
    """Return LeNet-5 for digits, as edge and cloud make it."""
    return LedgeredProgram(
        model_fn=lambda: build_model(
            "lenet5", in_channels=1, image_size=28, num_classes=10, seed=SEED
        ),
        example=(1, 28, 28),
        optimizer=sgd(0.05),
        seed=SEED,
    )


class HangingOnce(Ledgered):
    """A half whose sixth step never ends while the file `HANGS` is there, which it removes."""

    def step(self, batch: int, features: Any, labels: Any) -> Any:
        flag = Path(os.environ["HANGS"])
        if batch == 5 and flag.exists():
            flag.unlink()
            threading.Event().wait()
        return super().step(batch, features, labels)


class HangingProgram(LedgeredProgram):
    """The program whose back half hangs once."""

    def back(self, cut: int | None, batches: PartyBatches | None = None) -> PlacedHalf[Any]:
        return PlacedHalf(HangingOnce(LayeredProgram.back(self, cut, batches).half))


def hanging_program() -> HangingProgram:
    """Return the program above, for the cloud, whose process looks out for hangs impatiently."""
    watch_hangs(end_process, HangLimits(least_s=2.0, idle_s=1.0))
    return HangingProgram(
        **{each.name: getattr(program(), each.name) for each in fields(program())}
    )


def party_batches() -> PartyBatches:
    digits = load_data("digits").train.select(np.arange(NUM_SAMPLES))
    return PartyBatches(digits, BatchOrder(NUM_SAMPLES, BATCHES_PER_EPOCH, SEED))


@cache
def undisturbed(num_batches: int) -> Mapping[str, NDArray[Any]]:
    """Return the weights of the same training in one place."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    half = program().front(0, None, party_batches()).half
    for batch in range(num_batches):
        half.train_alone(batch)
    torch.set_num_threads(before)
    return dict(half.weights())


class Side:
    """A process whose lines of JSON are collected."""

    def __init__(self, command: list[str], errors: Path) -> None:
        self.lines: list[dict[str, Any]] = []
        self._errors = errors
        with errors.open("ab") as stream:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # The last one of a process that was killed may be half a line.
            if line.endswith("\n"):
                self.lines.append(json.loads(line))

    def wait(self, found: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + WAIT_S
        while not found():
            ended = self.process.poll() is not None
            if ended or time.monotonic() > end_s:
                self._reader.join(WAIT_S if ended else 0.0)
                said = self._errors.read_text("utf-8", "replace")[-500:]
                assert found(), f"never came: {what}; {self.lines[-1:]}; {said}"
                return
            time.sleep(0.005)

    def kill(self) -> float:
        """Kill it as a power cut would, and return when."""
        self.process.send_signal(signal.SIGKILL)
        at_s = time.monotonic()
        self.process.wait()
        return at_s

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


class CloudSide(Side):
    """`socflower cloud serve` of the program above."""

    def __init__(
        self,
        folder: Path,
        port: int = 0,
        *,
        keeps: bool = True,
        tls: Tls | None = None,
        program: str = "program",
    ) -> None:
        self._folder, self._tls = folder, tls
        script = Path(sysconfig.get_path("scripts")) / "socflower"
        serve = f"cloud serve tests.edgecloud.cloud.processes:{program} --threads 1 --json"
        options: dict[str, Any] = {
            "listen": f"127.0.0.1:{port}",
            "token-file": folder / "token",
            "folder": folder / "sessions" if keeps else None,
            **{name: getattr(tls, name, None) for name in ("ca", "certificate", "key")},
        }
        command = [str(script), *serve.split()]
        for name, value in options.items():
            command += [] if value is None else [f"--{name}", str(value)]
        super().__init__(command, folder / "cloud-errors")
        self.wait(lambda: bool(self.lines), "the cloud's address")
        self.address: str = self.lines[0]["address"]
        self.port = int(self.address.rpartition(":")[2])

    def operator(self, ca: Path | None = None) -> CloudOperator:
        token = (self._folder / "token").read_text("utf-8").strip()
        return CloudOperator(
            address=self.address,
            token=token,
            timeout_s=30.0,
            tls=None if ca is None else Tls(ca=ca),
        )

    def result(self, run: str, ca: Path | None = None) -> tuple[dict[str, NDArray[Any]], list[int]]:
        """Return the weights of its half, and the half's ledger."""
        operator = self.operator(ca)
        ledger = json.loads(fetch_state(operator, run)[1].partition(b"\n")[0])
        return dict(fetch_weights(operator, run)[1]), ledger


def task_of(window: int, num_batches: int) -> SplitTask:
    """Return one edge's task, before its run is open."""
    return SplitTask(
        parties=(0,),
        num_parties=1,
        mode=OWN,
        reverse=False,
        first_batch=0,
        num_batches=num_batches,
        total_batches=num_batches,
        batches_per_epoch=BATCHES_PER_EPOCH,
        seed=SEED,
        cuts=(CUT,),
        bits=(32,),
        windows=(window,),
        gradient_bits=32,
        fingerprint=program().fingerprint(),
    )


def open_run(operator: CloudOperator, window: int, num_batches: int) -> SplitTask:
    """Have the cloud make its half, and return how edges find it."""
    return CloudClient(operator, program()).open(task_of(window, num_batches), {})


class EdgeSide(Side):
    """A process that trains the span of a task, and says every batch that it applied."""

    def __init__(self, folder: Path, task: SplitTask, **settings: Any) -> None:
        self.weights_file = folder / "edge.npz"
        folder.mkdir(exist_ok=True)
        document = {
            "address": task.address,
            "run": task.run,
            "token": task.token,
            "window": task.windows[0],
            "num_batches": task.num_batches,
            "folder": str(folder / "checkpoints"),
            "pause_s": 0.02,
            "weights": str(self.weights_file),
            "heartbeat_s": 4.0,
            "give_up_s": 60.0,
            **settings,
        }
        super().__init__(
            [sys.executable, "-m", "tests.edgecloud.cloud.processes", json.dumps(document)],
            folder / "edge-errors",
        )

    @property
    def applied(self) -> list[tuple[int, float]]:
        """Batches and the times at which they were applied, as said so far, whatever became of them later."""
        return [(line["batch"], line["at_s"]) for line in list(self.lines) if "batch" in line]

    def wait_batch(self, batch: int) -> None:
        self.wait(lambda: any(done >= batch for done, _ in self.applied), f"batch {batch}")

    def end(self) -> dict[str, Any]:
        """Return its last line: the result, or the error."""
        self.wait(
            lambda: any("error" in line or "ledger" in line for line in list(self.lines)),
            "the edge's result",
        )
        return self.lines[-1]


def train_as_edge(settings: Mapping[str, Any]) -> None:
    """Train and print what happens, a line of JSON each."""

    def say(**line: Any) -> None:
        print(json.dumps({**line, "at_s": time.monotonic()}), flush=True)

    torch.set_num_threads(1)
    made = program()
    half = made.front(0, CUT, party_batches()).half
    half._pause_s = settings["pause_s"]
    plan = FrontPlan(
        split_plan=SplitPlan(cut=CUT, window=settings["window"]),
        checkpoint_batches=CHECKPOINT_BATCHES,
        progress=lambda done: say(batch=done.batch, staleness=done.staleness),
    )
    tls = {name: Path(value) for name, value in settings.get("tls", {}).items()}
    say(dials=settings["address"])
    try:
        connection = EdgeConnection(
            settings["address"],
            run_id=settings["run"],
            token=settings["token"],
            fingerprint=made.fingerprint(),
            tls=Tls(**tls) if tls else None,
            heartbeat_s=settings["heartbeat_s"],
            give_up_s=settings["give_up_s"],
            patience_s=60.0,
        )
        report = train_front(
            connection,
            half,
            BatchSpan(first_batch=0, num_batches=settings["num_batches"]),
            plan,
            folder=Path(settings["folder"]),
        )
    except SocflowerError as error:
        say(error=str(error), kind=type(error).__name__)
        sys.exit(1)
    np.savez(settings["weights"], **half.weights())
    say(
        ledger=half.applied,
        first=report.first_batch,
        rollbacks=report.num_rollbacks,
        streams=report.num_streams,
        max_staleness=max(report.staleness.values(), default=0),
    )


if __name__ == "__main__":
    train_as_edge(json.loads(sys.argv[1]))
