"""Processes that are killed, frames that no edge sends, certificates that do not fit: resumption, or one clean line."""

import json
import os
import re
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

from socflower.edgecloud.cloud.cloud_service import CloudService
from socflower.edgecloud.cloud.operator_calls import (
    CloudOperator,
    fetch_weights,
    open_session,
    session_status,
)
from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.runtime.feature_path import FeatureCoding
from socflower.edgecloud.runtime.front_loop import FrontPlan
from socflower.edgecloud.runtime.span_training import BatchSpan, train_back, train_front
from socflower.edgecloud.stream import split_pb2 as wire
from socflower.edgecloud.stream.credentials import run_caller, run_token
from socflower.edgecloud.stream.frames import PROTOCOL_VERSION, SplitRefused
from socflower.engines.deployment.flower_processes import free_ports
from socflower.wire.authentication import ClientAuthentication
from socflower.wire.frame_channel import StreamLost
from socflower.wire.framing_pb2 import Credit, Part
from tests.edgecloud.runtime.numpy_halves import (
    FINGERPRINT,
    OPERATOR,
    Back,
    Front,
    connect,
    local_training,
    make_half,
    same,
    targets,
)

ROOT = Path(__file__).parents[3]
PLAN = FrontPlan(split_plan=SplitPlan(cut=1))


def free_port() -> int:
    return free_ports(1)[0]


class Processes:
    """Sides of a training in processes of their own; all are killed at the end."""

    def __init__(self) -> None:
        self._all: list[subprocess.Popen[str]] = []

    def start(self, role: str, port: int, folder: Path, **settings: Any) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.edgecloud.runtime.numpy_halves",
                role,
                str(port),
                str(folder),
                json.dumps(settings),
            ],
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
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    made.end()


def open_run(operator: CloudOperator, **options: Any) -> None:
    open_session(operator, **{"run_id": "run", "fingerprint": FINGERPRINT, **options})


def kill(process: "subprocess.Popen[str]") -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def test_a_killed_cloud_goes_on_from_its_checkpoint_and_nothing_differs(
    processes: Processes, tmp_path: Path
) -> None:
    port = free_port()
    first_cloud = processes.cloud(port, tmp_path / "cloud")
    operator = CloudOperator(address=f"127.0.0.1:{port}", token=OPERATOR)
    open_run(operator)
    front, reached = Front(pause_s=0.005), threading.Event()

    def restart() -> None:
        reached.wait(30)
        kill(first_cloud)
        processes.cloud(port, tmp_path / "cloud")

    restarter = threading.Thread(target=restart)
    restarter.start()
    report = train_front(
        connect(port),
        front,
        BatchSpan(first_batch=0, num_batches=30),
        FrontPlan(
            split_plan=SplitPlan(cut=1),
            checkpoint_batches=5,
            progress=lambda done: reached.set() if done.batch == 12 else None,
        ),
        folder=tmp_path / "edge",
    )
    restarter.join(30)
    assert report.num_rollbacks >= 1 and sorted(report.losses) == list(range(30))
    assert same(front.weights(), fetch_weights(operator, "run")[1], wanted=local_training(30))
    assert session_status(operator)[0]["barriers"] == [25, 30]


def test_a_killed_edge_goes_on_from_its_checkpoint_and_nothing_differs(
    processes: Processes, tmp_path: Path
) -> None:
    service = CloudService(
        "127.0.0.1:0", make_half, operator_token=OPERATOR, folder=tmp_path / "cloud"
    )
    operator = CloudOperator(address=service.address, token=OPERATOR)
    try:
        open_run(operator)
        settings = {"num_batches": 24, "checkpoint_batches": 5, "pause_s": 0.02}
        edge = processes.start("edge", service.port, tmp_path / "edge", **settings)
        assert edge.stdout is not None
        while edge.stdout.readline().strip() != "12":
            assert edge.poll() is None
        kill(edge)
        edge = processes.start("edge", service.port, tmp_path / "edge", **settings)
        lines, _ = edge.communicate(timeout=60)
        result = json.loads(lines.splitlines()[-1])
        assert result["first"] == 10
        front = Front()
        front.restore(bytes.fromhex(result["saved"]))
        assert same(front.weights(), fetch_weights(operator, "run")[1], wanted=local_training(24))
    finally:
        service.close()


class Restarting:
    """A cloud in this process that is closed and started anew, on the same port and folder, at a given batch."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._folder, self._port = folder, free_port()
        self.service = self._start()
        self.operator = CloudOperator(address=self.service.address, token=OPERATOR)
        open_run(self.operator, **options)
        self._done = False

    def _start(self) -> CloudService:
        return CloudService(
            f"127.0.0.1:{self._port}",
            make_half,
            operator_token=OPERATOR,
            folder=self._folder,
            log=lambda line: None,
        )

    def restart(self) -> None:
        if not self._done:
            self._done = True
            self.service.close()
            self.service = self._start()


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 32},
        {"bits": 8, "feedback": "rank-one"},
        {"bits": 4, "delta_bytes": 1 << 20},
    ],
)
def test_with_any_codec_a_restart_leaves_no_trace_in_the_weights(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    found = []
    bits = options.pop("bits")
    for disturbed in (False, True):
        folder = tmp_path / str(disturbed)
        cloud, front = Restarting(folder / "cloud"), Front()
        try:
            report = train_front(
                connect(cloud.service.port),
                front,
                BatchSpan(first_batch=0, num_batches=14),
                FrontPlan(
                    split_plan=SplitPlan(cut=1, bits=bits),
                    checkpoint_batches=5,
                    coding=FeatureCoding(**options),
                    progress=lambda done, cloud=cloud, on=disturbed: (
                        cloud.restart() if on and done.batch == 8 else None
                    ),
                ),
                folder=folder / "edge",
            )
            found.append({**front.weights(), **fetch_weights(cloud.operator, "run")[1]})
            assert report.num_rollbacks == disturbed
        finally:
            cloud.service.close()
    assert same(found[1], wanted=found[0])


def test_a_reverse_split_goes_on_after_a_restart_of_the_cloud(tmp_path: Path) -> None:
    cloud = Restarting(tmp_path / "cloud", reverse=True, settings={"checkpoint_batches": 5})

    class Watching(Back):
        def step(self, batch: int, features: Any, labels: Any) -> Any:
            if batch == 8:
                cloud.restart()
            return super().step(batch, features, labels)

    back = Watching(goal=lambda batch: targets(batch, 0))
    try:
        report = train_back(
            connect(cloud.service.port),
            back,
            BatchSpan(first_batch=0, num_batches=14),
            folder=tmp_path / "edge",
        )
        assert report.num_rollbacks == 1 and back.steps == [*range(9), *range(5, 14)]
        assert same(
            fetch_weights(cloud.operator, "run")[1], back.weights(), wanted=local_training(14)
        )
    finally:
        cloud.service.close()


def test_after_a_move_of_the_cut_a_restart_goes_back_to_the_cut_of_the_checkpoint(
    tmp_path: Path,
) -> None:
    cloud, front = Restarting(tmp_path / "cloud"), Front()
    cuts = {2: 2, 7: 0, 11: 1}
    try:
        report = train_front(
            connect(cloud.service.port),
            front,
            BatchSpan(first_batch=0, num_batches=14),
            FrontPlan(
                split_plan=SplitPlan(cut=1),
                checkpoint_batches=5,
                decide=lambda now: SplitPlan(cut=cuts[now.batch]) if now.batch in cuts else None,
                progress=lambda done: cloud.restart() if done.batch == 8 else None,
            ),
            folder=tmp_path / "edge",
        )
        assert [move.new for move in report.moves] == [2, 0, 0, 1] and front.cut == 1
        assert same(
            front.weights(), fetch_weights(cloud.operator, "run")[1], wanted=local_training(14)
        )
    finally:
        cloud.service.close()


def test_a_killed_cloud_without_checkpoints_ends_in_a_line(
    processes: Processes, tmp_path: Path
) -> None:
    """The cloud has its checkpoints, the edge, which was given no folder, has none."""
    port = free_port()
    first_cloud = processes.cloud(port, tmp_path / "cloud")
    open_run(CloudOperator(address=f"127.0.0.1:{port}", token=OPERATOR))

    def restart(done: Any) -> None:
        if done.batch == 5:
            kill(first_cloud)
            processes.cloud(port, tmp_path / "cloud")

    no_folder = r"no checkpoint in common .*; give both a folder for checkpoints"
    with pytest.raises(SplitRefused, match=no_folder) as refused:
        train_front(
            connect(port),
            Front(),
            BatchSpan(first_batch=0, num_batches=30),
            FrontPlan(split_plan=SplitPlan(cut=1), progress=restart),
        )
    assert "\n" not in str(refused.value)


def test_a_cloud_that_hangs_is_noticed_by_its_heartbeat(
    processes: Processes, tmp_path: Path
) -> None:
    port = free_port()
    cloud = processes.cloud(port, tmp_path / "cloud")
    open_run(CloudOperator(address=f"127.0.0.1:{port}", token=OPERATOR))
    try:
        with pytest.raises(StreamLost, match="out of reach"):
            train_front(
                connect(port, heartbeat_s=0.8, give_up_s=0.5),
                Front(),
                BatchSpan(first_batch=0, num_batches=3000),
                FrontPlan(
                    split_plan=SplitPlan(cut=1),
                    progress=lambda done: (
                        os.kill(cloud.pid, signal.SIGSTOP) if done.batch == 3 else None
                    ),
                ),
            )
    finally:
        os.kill(cloud.pid, signal.SIGCONT)


def test_a_cloud_that_takes_but_never_answers_ends_in_a_line() -> None:
    service = CloudService("127.0.0.1:0", make_half, operator_token=OPERATOR)
    try:
        open_run(CloudOperator(address=service.address, token=OPERATOR), settings={"pause_s": 1.5})
        with pytest.raises(StreamLost, match=r"sends no gradient of batch 0 for 0.5 s") as lost:
            train_front(
                connect(service.port, patience_s=0.5),
                Front(),
                BatchSpan(first_batch=0, num_batches=2),
                PLAN,
            )
        assert "\n" not in str(lost.value)
    finally:
        service.close()


# ---------------------------------------------------------------------------------------------------------- frames


def hello(**changes: Any) -> wire.Frame:
    settings = {
        "version": PROTOCOL_VERSION,
        "fingerprint": FINGERPRINT,
        "incarnation": "x",
        "front": True,
        "num_batches": 5,
        "credit_bytes": 1 << 20,
        "barriers": [wire.Barrier(batch=0)],
        **changes,
    }
    return wire.Frame(hello=wire.Hello(**settings))


def part(**changes: Any) -> wire.Frame:
    head = changes.pop("head", wire.Head(mark=wire.Mark(batch=0, cut=1)))
    content = head.SerializeToString() if head is not None else None
    return wire.Frame(part=Part(**{"number": 1, "head": content, **changes}))


def tensor(body: bytes = b"\0" * 24, **changes: Any) -> wire.Frame:
    plain = wire.Encoded(
        **{"bits": 32, "shape": [2, 3], "num_bytes": 24, **changes.pop("plain", {})}
    )
    return part(
        num_bytes=24,
        body=body,
        head=wire.Head(
            tensor=wire.Tensor(
                **{
                    "plain": plain,
                    "cut": 1,
                    "answer_bits": 32,
                    "labels": [wire.Block(dtype="float32", shape=[0])],
                    **changes,
                }
            )
        ),
    )


def converse(port: int, frames: list[Any], *, token: str = run_token(OPERATOR, "run")) -> str:
    """Send these, and return what the cloud refuses them with."""
    authentication = ClientAuthentication(run_caller("run"), token.encode(), tls=False)
    with authentication.on(grpc.insecure_channel(f"127.0.0.1:{port}")) as channel:
        done = threading.Event()

        def messages() -> Iterator[bytes]:
            for frame in frames:
                yield frame if isinstance(frame, bytes) else frame.SerializeToString()
            done.wait(20)

        replies = channel.stream_stream("/socflower.split.Split/Train")(messages(), timeout=30)
        try:
            for reply in replies:
                frame = wire.Frame.FromString(reply)
                if frame.WhichOneof("kind") == "refusal":
                    return frame.refusal.text
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"  # type: ignore[attr-defined]
        finally:
            done.set()
    return "no refusal"


WEIGHTS = wire.Head(recut=wire.Recut(cut=0, gives=True))
BAD: dict[str, tuple[list[Any], str]] = {
    "garbage": ([b"\xff\xfe\xfd garbage"], "bytes that are no frame"),
    "empty": ([b""], "a frame of an unknown kind instead of a greeting"),
    "no hello": ([part()], "a part instead of a greeting"),
    "older version": (
        [hello(version=1)],
        "the cloud speaks version 3 of the split protocol, the edge 1; install",
    ),
    "newer version": (
        [hello(version=7)],
        "the cloud speaks version 3 of the split protocol, the edge 7",
    ),
    "span": ([hello(first_batch=1 << 60)], "a span up to batch"),
    "later garbage": ([hello(), b"\xff\xfe\xfd garbage"], "bytes that are no frame"),
    "second hello": ([hello(), hello()], "a hello in the middle of a stream"),
    "large frame": ([hello(), b"\x2a" + b"\0" * (3 << 20)], "a frame of .* bytes, where"),
    "large part": ([hello(), part(body=b"\0" * ((1 << 20) + 1))], "a part of 1048577 bytes, where"),
    "out of order": ([hello(), part(number=2)], "a part of message 2, where 1 is next"),
    "middle first": ([hello(), part(index=1)], "part 1 of message 1 before its beginning"),
    "parts swapped": (
        [hello(), tensor(body=b"\0" * 4), part(index=2, head=None, body=b"\0" * 4)],
        "part 2 of message 1, where part 1 is next",
    ),
    "too much": ([hello(), tensor(body=b"\0" * 25)], "do not make up its 24 bytes"),
    "too large a tensor": (
        [hello(), part(num_bytes=1 << 50, head=wire.Head(tensor=wire.Tensor()))],
        "a tensor of 1125899906842624 bytes, where 268435456 are the limit",
    ),
    "too large weights": (
        [hello(), part(num_bytes=1 << 50, head=wire.Head(recut=wire.Recut()))],
        "a recut of",
    ),
    "a mark with a body": (
        [hello(), part(num_bytes=9, head=wire.Head(mark=wire.Mark()))],
        "a mark of 9 bytes",
    ),
    "no kind": ([hello(), part(head=wire.Head())], "a message of an unknown kind"),
    "shape": ([hello(), tensor(plain={"shape": [2, 4]})], "24 bytes of payload"),
    "huge shape": ([hello(), tensor(plain={"shape": [0, 1 << 60]})], "a tensor of shape"),
    "short": ([hello(), tensor(plain={"num_bytes": 99})], "too short for what it says"),
    "long": ([hello(), tensor(plain={"num_bytes": 16, "shape": [4]})], "8 bytes too many"),
    "bits": ([hello(), tensor(plain={"bits": 7})], "bits = 7 is unknown"),
    "answer bits": ([hello(), tensor(answer_bits=3)], "want a gradient at 3 bits"),
    "low above high": (
        [
            hello(),
            tensor(plain={"bits": 8, "num_bytes": 24, "shape": [24], "low": [2.0], "high": [1.0]}),
        ],
        "are no range",
    ),
    "labels of objects": (
        [hello(), tensor(labels=[wire.Block(dtype="object", shape=[0])])],
        "an array of type 'object'",
    ),
    "labels that are not there": (
        [hello(), tensor(labels_form='{"a": 7}')],
        "arrays of labels in the form",
    ),
    "labels in no form": ([hello(), tensor(labels_form="[")], r"arrays of labels in the form '\['"),
    "weights": (
        [hello(), part(num_bytes=4, head=WEIGHTS, body=b"\xff\xff\xff\x7f")],
        "arrays without an index",
    ),
    "credit": (
        [hello(), wire.Frame(credit=Credit(received=5, used=5))],
        "a credit for 5 messages received",
    ),
}


@pytest.fixture
def attacked() -> Iterator[tuple[CloudService, list[str]]]:
    lines: list[str] = []
    service = CloudService("127.0.0.1:0", make_half, operator_token=OPERATOR, log=lines.append)
    open_run(CloudOperator(address=service.address, token=OPERATOR))
    yield service, lines
    service.close()


def test_a_manager_of_an_older_version_is_refused_in_one_line(
    attacked: tuple[CloudService, list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "socflower.edgecloud.cloud.operator_calls.PROTOCOL_VERSION", PROTOCOL_VERSION - 1
    )
    with pytest.raises(
        SplitRefused,
        match=rf"speaks version {PROTOCOL_VERSION} of .*, the manager "
        rf"{PROTOCOL_VERSION - 1}; install the same socflower on both$",
    ) as refused:
        open_run(CloudOperator(address=attacked[0].address, token=OPERATOR), run_id="another")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", BAD)
def test_a_frame_that_no_edge_sends_ends_its_stream_with_a_line(
    attacked: tuple[CloudService, list[str]],
    name: str,
) -> None:
    service, lines = attacked
    service._refusals.flush(
        everything=True
    )  # of one peer and minute few are logged, and all come from here
    frames, match = BAD[name]
    before = len(lines)
    text = converse(service.port, frames)
    assert re.search(match, text), text
    deadline_s = time.monotonic() + 60
    while len(lines) == before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert len(lines) == before + 1 and "\n" not in lines[-1] and len(lines[-1]) < 400


def test_after_all_that_the_rightful_edge_trains_as_if_nothing_had_been(
    attacked: tuple[CloudService, list[str]],
) -> None:
    service, _ = attacked
    for name in ("garbage", "large frame", "shape"):
        converse(service.port, BAD[name][0])
    assert "UNAUTHENTICATED" in converse(service.port, [hello()], token="wrong-token-0123456")
    converse(service.port, [hello(), b"\0" * (9 << 20)])  # beyond what gRPC itself takes
    front = Front()
    train_front(connect(service.port), front, BatchSpan(first_batch=0, num_batches=6), PLAN)
    weights = fetch_weights(CloudOperator(address=service.address, token=OPERATOR), "run")[1]
    assert same(front.weights(), weights, wanted=local_training(6))
