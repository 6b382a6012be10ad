"""Processes that are killed, frames that no edge sends, certificates that do not fit: resumption, or one clean line."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from socflower.edgecloud.cloud.operator_calls import CloudOperator, session_status
from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.runtime.feature_path import FeatureCoding
from socflower.edgecloud.stream import split_pb2 as wire
from socflower.edgecloud.stream.credentials import run_caller, run_token
from socflower.edgecloud.stream.frames import PROTOCOL_VERSION, SplitRefused
from socflower.engines.deployment.flower_processes import free_ports
from socflower.peers.resumable_stream import StreamLost, end_frame
from socflower.wire.authentication import ClientAuthentication
from tests.edgecloud.cloud.local import Cloud, plan, train
from tests.edgecloud.runtime.numpy_halves import (
    FINGERPRINT,
    OPERATOR,
    Back,
    Front,
    connect,
    same,
    targets,
)
from tests.one_line import refused
from tests.peers.memory_line import credit_frame, part_frame

ROOT = Path(__file__).parents[3]
PROGRAM = "tests.edgecloud.runtime.numpy_halves"


class Processes:
    """Sides of a training in processes of their own; all are killed at the end."""

    def __init__(self) -> None:
        self._all: list[subprocess.Popen[str]] = []

    def start(self, role: str, port: int, folder: Path, **settings: Any) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM, role, str(port), str(folder), json.dumps(settings)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._all.append(process)
        return process

    def cloud(self, port: int, folder: Path) -> "subprocess.Popen[str]":
        process = self.start("cloud", port, folder)
        assert process.stdout is not None and process.stdout.readline().strip() == str(port)
        return process

    def end(self) -> None:
        for process in self._all:
            kill(process)
            if process.stdout is not None:
                process.stdout.close()


def kill(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    made.end()


class Remote(Cloud):
    """A cloud in a process of its own, with one run open."""

    def __init__(self, processes: Processes, folder: Path) -> None:
        (self.port,) = free_ports(1)
        self._processes, self._folder = processes, folder / "cloud"
        self.process = processes.cloud(self.port, self._folder)
        self.operator = CloudOperator(address=f"127.0.0.1:{self.port}", token=OPERATOR)
        self.open()

    def restart(self) -> None:
        kill(self.process)
        self.process = self._processes.cloud(self.port, self._folder)


def at(batch: int, act: Any) -> Any:
    return lambda done: act() if done.batch == batch else None


def test_a_killed_cloud_continues_from_its_checkpoint_and_nothing_differs(
    processes: Processes, tmp_path: Path
) -> None:
    cloud, front, reached = Remote(processes, tmp_path), Front(pause_s=0.005), threading.Event()

    def restart() -> None:
        reached.wait(30)
        cloud.restart()

    restarter = threading.Thread(target=restart)
    restarter.start()
    how = plan(checkpoint_batches=5, progress=at(12, reached.set))
    report = train(cloud.port, front, 30, how, folder=tmp_path / "edge")
    restarter.join(30)
    assert report.num_rollbacks >= 1 and sorted(report.losses) == list(range(30))
    assert cloud.trained(front, 30)
    assert session_status(cloud.operator)[0]["checkpoints"] == [25, 30]


def test_a_killed_edge_continues_from_its_checkpoint_and_nothing_differs(
    processes: Processes, tmp_path: Path
) -> None:
    settings = {"num_batches": 24, "checkpoint_batches": 5, "pause_s": 0.02}
    with Cloud(folder=tmp_path / "cloud") as cloud:
        cloud.open()
        edge = processes.start("edge", cloud.port, tmp_path / "edge", **settings)
        assert edge.stdout is not None
        while edge.stdout.readline().strip() != "12":
            assert edge.poll() is None
        kill(edge)
        edge = processes.start("edge", cloud.port, tmp_path / "edge", **settings)
        lines, _ = edge.communicate(timeout=60)
        result = json.loads(lines.splitlines()[-1])
        assert result["first"] == 10
        front = Front()
        front.restore(bytes.fromhex(result["saved"]))
        assert cloud.trained(front, 24)


class Restarting(Cloud):
    """A cloud in this process that is closed and started again once, on the same port and folder."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._listen, self._folder = f"127.0.0.1:{free_ports(1)[0]}", folder
        super().__init__(self._listen, folder=folder)
        self._done = False
        self.open(**options)

    def restart(self) -> None:
        if not self._done:
            self._done = True
            self.service.close()
            super().__init__(self._listen, folder=self._folder)


@pytest.mark.parametrize(
    ("bits", "coding"),
    [(32, {}), (8, {"feedback": "rank-one"}), (4, {"delta_bytes": 1 << 20})],
)
def test_with_any_codec_a_restart_leaves_no_trace_in_the_weights(
    tmp_path: Path, bits: int, coding: dict[str, Any]
) -> None:
    found = []
    for disturbed in (False, True):
        folder = tmp_path / str(disturbed)
        with Restarting(folder / "cloud") as cloud:
            front, progress = Front(), at(8, cloud.restart) if disturbed else None
            coded = {"coding": FeatureCoding(**coding), "progress": progress}
            how = plan(0, bits, checkpoint_batches=5, **coded)
            report = train(cloud.port, front, 14, how, folder=folder / "edge")
            found.append({**front.weights(), **cloud.weights()})
        assert report.num_rollbacks == disturbed
    assert same(found[1], wanted=found[0])


def test_a_reverse_split_continues_after_a_restart_of_the_cloud(tmp_path: Path) -> None:
    settings = {"checkpoint_batches": 5}
    with Restarting(tmp_path / "cloud", reverse=True, settings=settings) as cloud:

        class Watching(Back):
            def step(self, batch: int, features: Any, labels: Any) -> Any:
                if batch == 8:
                    cloud.restart()
                return super().step(batch, features, labels)

        back = Watching(goal=lambda batch: targets(batch, 0))
        report = train(cloud.port, back, 14, folder=tmp_path / "edge")
        assert report.num_rollbacks == 1 and back.steps == [*range(9), *range(5, 14)]
        assert cloud.trained(back, 14)


def test_after_a_move_of_the_cut_a_restart_goes_back_to_the_cut_of_the_checkpoint(
    tmp_path: Path,
) -> None:
    cuts = {2: 2, 7: 0, 11: 1}
    with Restarting(tmp_path / "cloud") as cloud:
        front = Front()
        how = plan(
            checkpoint_batches=5,
            decide=lambda now: SplitPlan(cut=cuts[now.batch]) if now.batch in cuts else None,
            progress=at(8, cloud.restart),
        )
        report = train(cloud.port, front, 14, how, folder=tmp_path / "edge")
        assert [move.new for move in report.moves] == [2, 0, 0, 1] and front.cut == 1
        assert cloud.trained(front, 14)


def test_a_killed_cloud_and_an_edge_without_a_folder_end_in_a_line(
    processes: Processes, tmp_path: Path
) -> None:
    cloud = Remote(processes, tmp_path)
    how = plan(progress=at(5, cloud.restart))
    refused(lambda: train(cloud.port, Front(), 30, how), "checkpoint", "folder", error=SplitRefused)


def test_a_cloud_that_hangs_is_noticed_by_its_heartbeat(
    processes: Processes, tmp_path: Path
) -> None:
    cloud = Remote(processes, tmp_path)
    how = plan(progress=at(3, lambda: cloud.process.send_signal(signal.SIGSTOP)))
    options = {"heartbeat_s": 0.8, "give_up_s": 0.5}
    refused(
        lambda: train(cloud.port, Front(), 3000, how, **options), "out of reach", error=StreamLost
    )
    cloud.process.send_signal(signal.SIGCONT)


def test_a_cloud_that_takes_but_never_answers_ends_in_a_line(cloud: Cloud) -> None:
    cloud.open(settings={"pause_s": 1.5})
    refused(
        lambda: train(cloud.port, Front(), 2, patience_s=0.5), "batch 0", "0.5 s", error=StreamLost
    )


# ---------------------------------------------------------------------------------------------------------- frames


def hello(**changes: Any) -> wire.Frame:
    settings = {
        "version": PROTOCOL_VERSION,
        "fingerprint": FINGERPRINT,
        "connection_id": "x",
        "front": True,
        "num_batches": 5,
        "credit_bytes": 1 << 20,
        "checkpoints": [wire.Checkpoint(batch=0)],
    }
    return wire.Frame(hello=wire.Hello(**settings | changes))


def part(head: wire.Head | None = None, **changes: Any) -> bytes:
    content = (head or wire.Head(mark=wire.Mark(batch=0, cut=1))).SerializeToString()
    return part_frame(**{"number": 1, "head": content, **changes})


def tensor(body: bytes = b"\0" * 24, plain: Any = (), **changes: Any) -> bytes:
    encoded = wire.Encoded(**{"bits": 32, "shape": [2, 3], "num_bytes": 24, **dict(plain)})
    labels = [wire.Block(dtype="float32", shape=[0])]
    fields = {"plain": encoded, "cut": 1, "answer_bits": 32, "labels": labels, **changes}
    return part(wire.Head(tensor=wire.Tensor(**fields)), num_bytes=24, body=body)


def converse(port: int, frames: list[Any], *, token: str = run_token(OPERATOR, "run")) -> str:
    """Send these, and return what the cloud refuses them with."""
    done = threading.Event()

    def messages() -> Iterator[bytes]:
        for frame in frames:
            yield frame if isinstance(frame, bytes) else frame.SerializeToString()
        done.wait(20)

    authentication = ClientAuthentication(run_caller("run"), token.encode(), tls=False)
    with authentication.on(grpc.insecure_channel(f"127.0.0.1:{port}")) as channel:
        replies = channel.stream_stream("/socflower.split.Split/Train")(messages(), timeout=30)
        try:
            for reply in replies:
                frame = wire.Frame.FromString(bytes(reply).removeprefix(end_frame()))
                if frame.WhichOneof("kind") == "refusal":
                    return frame.refusal.text
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"  # type: ignore[attr-defined]
        finally:
            done.set()
    return "no refusal"


GARBAGE = b"\xff\xfe\xfd garbage"
LARGE = b"\x2a" + b"\0" * (3 << 20)
RANGE = {"bits": 8, "num_bytes": 24, "shape": [24], "low": [2.0], "high": [1.0]}
WEIGHTS = wire.Head(recut=wire.Recut(cut=0, gives=True))
# Frames instead of a greeting, and what the refusal names.
BEFORE: dict[str, tuple[Any, list[str]]] = {
    "garbage": (GARBAGE, ["frame", "11"]),
    "empty": (b"", ["unknown", "greeting"]),
    "no hello": (part(), ["frame"]),
    "older version": (hello(version=1), [f"version {PROTOCOL_VERSION}", "edge 1"]),
    "newer version": (hello(version=7), [f"version {PROTOCOL_VERSION}", "edge 7"]),
    "span": (hello(first_batch=1 << 60), ["span", str((1 << 60) + 5)]),
}
# Frames after a greeting.
AFTER: dict[str, tuple[list[Any], list[str]]] = {
    "later garbage": ([GARBAGE], ["frame", "255"]),
    "second hello": ([hello()], ["frame", "kind 10"]),
    "large frame": ([LARGE], ["frame", str(len(LARGE))]),
    "large part": ([part(body=b"\0" * ((1 << 20) + 1))], ["part", "1048577"]),
    "out of order": ([part(number=2)], ["part", "message 2", "1"]),
    "middle first": ([part(index=1)], ["part 1", "message 1"]),
    "parts swapped": (
        [tensor(body=b"\0" * 4), part_frame(1, body=b"\0" * 4, index=2)],
        ["part 2", "message 1", "part 1"],
    ),
    "too much": ([tensor(body=b"\0" * 25)], ["24 bytes"]),
    "too large a tensor": (
        [part(wire.Head(tensor=wire.Tensor()), num_bytes=1 << 50)],
        ["tensor", str(1 << 50), str(1 << 28)],
    ),
    "too large weights": (
        [part(wire.Head(recut=wire.Recut()), num_bytes=1 << 50)],
        ["recut", str(1 << 50)],
    ),
    "a mark with a body": ([part(wire.Head(mark=wire.Mark()), num_bytes=9)], ["mark", "9"]),
    "no kind": ([part(wire.Head())], ["message", "unknown"]),
    "shape": ([tensor(plain={"shape": [2, 4]})], ["24 bytes", "payload"]),
    "huge shape": ([tensor(plain={"shape": [0, 1 << 60]})], ["shape", str(1 << 60)]),
    "short": ([tensor(plain={"num_bytes": 99})], ["24 bytes", "short"]),
    "long": ([tensor(plain={"num_bytes": 16, "shape": [4]})], ["8 bytes"]),
    "bits": ([tensor(plain={"bits": 7})], ["bits = 7"]),
    "answer bits": ([tensor(answer_bits=3)], ["3 bits"]),
    "low above high": ([tensor(plain=RANGE)], ["range"]),
    "labels of objects": ([tensor(labels=[wire.Block(dtype="object")])], ["'object'"]),
    "labels that are not there": ([tensor(labels_form='{"a": 7}')], ["labels", '{"a": 7}']),
    "labels in no form": ([tensor(labels_form="[")], ["labels", "'['"]),
    "weights": ([part(WEIGHTS, num_bytes=4, body=b"\xff\xff\xff\x7f")], ["index"]),
    "credit": ([credit_frame(5, 5)], ["credit", "5"]),
}
BAD = {name: ([first], named) for name, (first, named) in BEFORE.items()} | {
    name: ([hello(), *frames], named) for name, (frames, named) in AFTER.items()
}


@pytest.fixture(scope="module")
def attacked() -> Iterator[Cloud]:
    with Cloud() as made:
        made.open()
        yield made


def test_a_manager_of_an_older_version_is_refused_in_one_line(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = PROTOCOL_VERSION - 1
    monkeypatch.setattr("socflower.edgecloud.cloud.operator_calls.PROTOCOL_VERSION", older)
    refused(cloud.open, f"version {PROTOCOL_VERSION}", f"manager {older}", error=SplitRefused)


@pytest.mark.parametrize("name", BAD)
def test_a_frame_that_no_edge_sends_ends_its_stream_with_a_line(attacked: Cloud, name: str) -> None:
    # Of one peer and minute only a few refusals are logged, and all come from here.
    attacked.service._refusals.flush(everything=True)
    frames, named = BAD[name]
    before = len(attacked.lines)
    text = converse(attacked.port, frames)
    assert all(part in text for part in named), text
    deadline_s = time.monotonic() + 60
    while len(attacked.lines) == before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    (line,) = attacked.lines[before:]
    assert "\n" not in line and len(line) < 400


def test_after_all_that_the_rightful_edge_trains_as_if_nothing_had_been(attacked: Cloud) -> None:
    for name in ("garbage", "large frame", "shape"):
        converse(attacked.port, BAD[name][0])
    wrong = converse(attacked.port, [hello()], token="wrong-token-0123456")
    assert "UNAUTHENTICATED" in wrong
    # Beyond what gRPC itself takes.
    converse(attacked.port, [hello(), b"\0" * (9 << 20)])
    front = Front()
    train(connect(attacked.port), front, 6)
    assert attacked.trained(front, 6)
