"""The fault matrix of split training: what may befall link, cloud and edge, and what comes of it.

    python -m tests.edgecloud.cloud.fault_matrix docs/results/split-faults.json

runs all of it over real processes, some ten minutes on two cores, and writes what a user sees and how long it took.
"""

import json
import os
import platform
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import numpy as np
import torch

from socflower.edgecloud.cloud.operator_calls import session_status
from socflower.edgecloud.stream import split_pb2 as wire
from socflower.edgecloud.stream.credentials import new_token, run_caller
from socflower.errors import SocflowerError
from socflower.wire.authentication import ClientAuthentication
from socflower.wire.certificates import HostCertificate, write_certificates
from socflower.wire.framing_pb2 import Part
from socflower.wire.secure_channel import Tls
from socflower.wire.split_message_keys import SplitTask
from tests.edgecloud.cloud.processes import CloudSide, EdgeSide, open_run, undisturbed
from tests.edgecloud.stream.breaking_line import BreakingLine

NUM_BATCHES = 40
STRUCK_AT = 19  # between two checkpoints
SHORT_S = 3.0
GIVE_UP_S = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What came of a fault; seconds are from the strike, or from the first dial where there is no strike."""

    fault: str
    window: int  # K
    outcome: str  # "went on" or "ended": of the edge that was there first
    says: list[
        str
    ]  # what the user sees, a line each; nothing where the fault is made good in silence
    again_s: float  # until the next batch was applied after it was made good, or until the line
    down_s: float | None  # of that, until what was broken was up again
    rollbacks: int  # to the last checkpoint
    streams: int
    weights: str  # compared with an undisturbed training
    once: bool | None  # whether either half's weights have seen each batch exactly once, in order


class Deployed:
    """A cloud, a line to it and one edge, all of which can be struck."""

    def __init__(self, folder: Path, window: int, **of_edge: Any) -> None:
        self._stack = ExitStack()
        self.folder, self.window = folder, window
        self.cloud = self._kept(CloudSide(folder))
        self.line = self._stack.enter_context(closing(GarblingLine(self.cloud.port)))
        self.task = open_run(self.cloud.operator(), window, NUM_BATCHES)
        self.edge = self.start_edge(**of_edge)

    def __enter__(self) -> "Deployed":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _kept(self, side: Any) -> Any:
        self._stack.callback(side.close)
        return side

    def start_edge(self, folder: str = "edge", **settings: Any) -> EdgeSide:
        task = replace(self.task, address=f"127.0.0.1:{self.line.port}")
        side: EdgeSide = self._kept(EdgeSide(self.folder / folder, task, **settings))
        return side

    def restart_cloud(self, **settings: Any) -> None:
        self.cloud = self._kept(CloudSide(self.folder, self.cloud.port, **settings))

    def strike(self, batch: int = STRUCK_AT) -> float:
        """Wait until it is time, and return when."""
        self.edge.wait_batch(batch)
        return time.monotonic()

    def went_on(
        self, fault: str, struck_s: float, mended_s: float, says: list[str] | None = None
    ) -> Row:
        """Wait for the end of the training and check what must hold of it."""
        result = self.edge.end()
        assert "error" not in result, result
        again_s = min(
            (at_s for _, at_s in self.edge.applied if at_s >= mended_s), default=result["at_s"]
        )
        weights, ledger = self.cloud.result(self.task.run)
        assert ledger == result["ledger"] == list(range(NUM_BATCHES)), (ledger, result["ledger"])
        assert result["max_staleness"] <= self.window
        return Row(
            fault=fault,
            window=self.window,
            outcome="went on",
            says=says or [],
            again_s=round(again_s - struck_s, 2),
            down_s=round(mended_s - struck_s, 2),
            rollbacks=result["rollbacks"],
            streams=result["streams"],
            weights=self._compared(weights),
            once=True,
        )

    def ended(self, fault: str, struck_s: float | None = None) -> Row:
        """Wait for the line with which the edge ends."""
        line = self.edge.end()
        assert "error" in line, line
        began_s = self.edge.lines[0]["at_s"] if struck_s is None else struck_s
        return _ended(fault, self.window, [line["error"]], line["at_s"] - began_s)

    def _compared(self, of_cloud: Mapping[str, Any]) -> str:
        if self.window:
            return "not compared: with K > 0 they depend on when gradients come"
        return _as_undisturbed(self.edge, of_cloud)


def _as_undisturbed(edge: EdgeSide, of_cloud: Mapping[str, Any]) -> str:
    with np.load(edge.weights_file) as of_edge:
        found, expected = {**of_edge, **of_cloud}, undisturbed(NUM_BATCHES)
    assert found.keys() == expected.keys()
    different = [name for name in expected if found[name].tobytes() != expected[name].tobytes()]
    assert not different, f"{different} are not those of an undisturbed training"
    return "bit for bit"


class GarblingLine(BreakingLine):
    """A line that can also stand still with all connections open, as behind a router that drops what it gets."""

    def __init__(self, target: int) -> None:
        self._moving = threading.Event()
        self._moving.set()
        self.flips = 0  # how many more bytes are to arrive as others than they were sent
        super().__init__(target)

    def stand_still(self) -> None:
        self._moving.clear()

    def move_on(self) -> None:
        self._moving.set()

    def close(self) -> None:
        self.move_on()
        super().close()

    def passed(self, content: bytes) -> bytes:
        self._moving.wait()
        if len(content) > 1000 and self.flips:
            self.flips -= 1
            at = len(content) // 2
            return content[:at] + bytes([content[at] ^ 0x40]) + content[at + 1 :]
        return content


# ------------------------------------------------------------------------------------------------ faults made good
def link_down(folder: Path, window: int, *, seconds: float) -> Row:
    with Deployed(folder, window) as run:
        struck_s = run.strike()
        run.line.down()
        time.sleep(seconds)
        run.line.up()
        return run.went_on(f"link down for {seconds:g} s", struck_s, time.monotonic())


def link_silent(folder: Path, window: int, *, seconds: float) -> Row:
    with Deployed(folder, window) as run:
        struck_s = run.strike()
        run.line.stand_still()
        time.sleep(seconds)
        run.line.move_on()
        return run.went_on(f"link silent for {seconds:g} s", struck_s, time.monotonic())


def cloud_killed(folder: Path, window: int) -> Row:
    with Deployed(folder, window) as run:
        run.strike()
        struck_s = run.cloud.kill()
        run.restart_cloud()
        return run.went_on("cloud killed, started again", struck_s, time.monotonic())


def edge_killed(folder: Path, window: int) -> Row:
    with Deployed(folder, window) as run:
        run.strike()
        struck_s = run.edge.kill()
        run.edge = run.start_edge()
        run.edge.wait(lambda: bool(run.edge.lines), "its start")
        mended_s = run.edge.lines[0]["at_s"]
        row = run.went_on("edge killed, started again", struck_s, mended_s)
        first = run.edge.lines[-1]["first"]
        assert 0 < first <= STRUCK_AT, "it went on from a checkpoint, not from the beginning"
        return row


def both_killed(folder: Path, window: int) -> Row:
    with Deployed(folder, window) as run:
        run.strike()
        struck_s = run.edge.kill()
        run.cloud.kill()
        run.restart_cloud()
        run.edge = run.start_edge()
        run.edge.wait(lambda: bool(run.edge.lines), "its start")
        return run.went_on("both killed, started again", struck_s, run.edge.lines[0]["at_s"])


def strangers(folder: Path, window: int) -> Row:
    """Some send bytes that no edge sends, with the right token and without, while the edge trains."""
    with Deployed(folder, window) as run:
        struck_s = run.strike()
        says = [
            _dialled(run, name, frames, token) for name, frames, token in _bad_streams(run.task)
        ]
        with socket.create_connection(("127.0.0.1", run.cloud.port), timeout=5) as raw:
            raw.sendall(os.urandom(4096))
        assert all(says), says
        return run.went_on(
            "strangers: garbage, oversized frames, frames out of order, a wrong token",
            struck_s,
            time.monotonic(),
            says,
        )


def _bad_streams(task: SplitTask) -> Iterator[tuple[str, list[bytes], str]]:
    head = wire.Head(mark=wire.Mark(batch=0, cut=1)).SerializeToString()
    part = wire.Frame(part=Part(number=2, head=head)).SerializeToString()
    yield "garbage", [os.urandom(100)], task.token
    yield "oversized frame", [b"\x2a" + b"\0" * (3 << 20)], task.token
    yield "frame beyond what gRPC takes", [b"\0" * (9 << 20)], task.token
    yield "out of order", [part], task.token
    yield "wrong token", [part], new_token()


def _dialled(run: Deployed, name: str, frames: list[bytes], token: str) -> str:
    """Send frames to the cloud on a stream, and return what it says to them."""
    authentication = ClientAuthentication(run_caller(run.task.run), token.encode(), tls=False)
    with authentication.on(grpc.insecure_channel(run.cloud.address)) as channel:
        replies = channel.stream_stream("/socflower.split.Split/Train")(iter(frames), timeout=30)
        try:
            for reply in replies:
                frame = wire.Frame.FromString(reply)
                if frame.WhichOneof("kind") == "refusal":
                    return f"{name}: {frame.refusal.text}"
        except grpc.RpcError as error:
            return f"{name}: {error.details()}"  # type: ignore[attr-defined]
    return ""


def garbled_under_tls(folder: Path, window: int) -> Row:
    """Bytes arrive as others than they were sent: TLS notices, and what was under way is sent again."""
    own = write_certificates(folder / "certificates", ["127.0.0.1"])["127.0.0.1"]
    with ExitStack() as stack:
        cloud = CloudSide(folder, tls=Tls(certificate=own.certificate, key=own.key))
        stack.callback(cloud.close)
        line = stack.enter_context(closing(GarblingLine(cloud.port)))
        task = replace(
            open_run(cloud.operator(own.ca), window, NUM_BATCHES), address=f"127.0.0.1:{line.port}"
        )
        edge = EdgeSide(folder / "edge", task, tls={"ca": str(own.ca)})
        stack.callback(edge.close)
        edge.wait_batch(STRUCK_AT)
        struck_s, line.flips = time.monotonic(), 1
        result = edge.end()
        assert "error" not in result, result
        weights, ledger = cloud.result(task.run, own.ca)
        assert line.flips == 0 and result["streams"] > 1
        assert ledger == result["ledger"] == list(range(NUM_BATCHES))
        compared = _as_undisturbed(edge, weights)
        gaps = [
            later - earlier
            for (_, earlier), (_, later) in zip(edge.applied, edge.applied[1:], strict=False)
            if later >= struck_s
        ]
        return Row(
            fault="a byte garbled on the way, with TLS",
            window=window,
            outcome="went on",
            says=[],
            again_s=round(max(gaps), 2),
            down_s=None,
            rollbacks=result["rollbacks"],
            streams=result["streams"],
            weights=compared,
            once=True,
        )


# --------------------------------------------------------------------------------------------- faults with a line
def cloud_killed_without_folder(folder: Path, window: int) -> Row:
    with Deployed(folder, window) as run:
        run.strike()
        struck_s = run.cloud.kill()
        run.restart_cloud(keeps=False)
        return run.ended("cloud killed, started again without its folder", struck_s)


def edge_killed_without_folder(folder: Path, window: int) -> Row:
    with Deployed(folder, window) as run:
        run.strike()
        run.edge.kill()
        run.edge = run.start_edge("elsewhere")
        return run.ended("edge killed, started again without its folder")


def cloud_gone(folder: Path, window: int) -> Row:
    with Deployed(folder, window, give_up_s=GIVE_UP_S) as run:
        run.strike()
        struck_s = run.cloud.kill()
        return run.ended(f"cloud killed for good (edges give up after {GIVE_UP_S:g} s)", struck_s)


def two_with_one_number(folder: Path, window: int) -> Row:
    """The second one takes the first one's place, which ends with a line; it begins where both it and the cloud can."""
    with Deployed(folder, window, pause_s=2.0) as run:  # so slow that the other one comes in time
        run.strike(3)
        first, run.edge = run.edge, run.start_edge("second")
        run.edge.wait(lambda: bool(run.edge.lines), "its start")
        struck_s = run.edge.lines[0]["at_s"]
        line = first.end()
        assert "error" in line and "\n" not in line["error"], line
        row = run.went_on(
            "two edges with the same party number", struck_s, struck_s, [line["error"]]
        )
        return replace(row, outcome="ended", down_s=None)


def refused(
    folder: Path, window: int, fault: str, *, served: str = "", of_edge: str = "", **changes: Any
) -> Row:
    """Dial a cloud with what does not fit: certificates by whose they are, or changes of the task."""
    certificates = _certificates(folder)
    with ExitStack() as stack:
        own = certificates[served.removesuffix(", mutual")] if served else None
        cloud = CloudSide(
            folder,
            tls=None
            if own is None
            else Tls(
                ca=own.ca if served.endswith("mutual") else None,
                certificate=own.certificate,
                key=own.key,
            ),
        )
        stack.callback(cloud.close)
        task = SplitTask(
            parties=(0,),
            num_parties=1,
            mode="own",
            reverse=False,
            first_batch=0,
            num_batches=NUM_BATCHES,
            total_batches=NUM_BATCHES,
            batches_per_epoch=20,
            seed=1,
            cuts=(1,),
            bits=(32,),
            windows=(window,),
            gradient_bits=32,
            address=cloud.address,
            run="run",
            token=new_token(),
        )
        if own is None:
            task = open_run(cloud.operator(), window, NUM_BATCHES)
        tls = {} if not of_edge else {"ca": str(certificates[of_edge].ca)}
        edge = EdgeSide(folder / "edge", replace(task, **changes), tls=tls, give_up_s=GIVE_UP_S)
        stack.callback(edge.close)
        line = edge.end()
        assert "error" in line, line
        return _ended(fault, window, [line["error"]], line["at_s"] - edge.lines[0]["at_s"])


def wrong_operator_token(folder: Path, window: int) -> Row:
    cloud = CloudSide(folder)
    with closing(cloud):
        began_s = time.monotonic()
        try:
            session_status(replace(cloud.operator(), token=new_token()))
        except SocflowerError as error:
            return _ended("wrong operator token", window, [str(error)], time.monotonic() - began_s)
    raise AssertionError("a stranger was told of the sessions")


def _certificates(folder: Path) -> Mapping[str, HostCertificate]:
    own = write_certificates(folder / "own", ["127.0.0.1", "other.example"])
    return {
        "own": own["127.0.0.1"],
        "other name": own["other.example"],
        "stranger": write_certificates(folder / "stranger", ["127.0.0.1"])["127.0.0.1"],
    }


def _ended(fault: str, window: int, says: list[str], seconds: float) -> Row:
    assert all(line and "\n" not in line for line in says), says
    return Row(
        fault=fault,
        window=window,
        outcome="ended",
        says=says,
        again_s=round(seconds, 2),
        down_s=None,
        rollbacks=0,
        streams=0,
        weights="none",
        once=None,
    )


Cell: TypeAlias = Callable[[Path], Row]


def cells() -> Iterator[tuple[str, Cell]]:
    """Yield all cells by name."""
    for window in (0, 5):
        yield f"link-down-k{window}", partial(link_down, window=window, seconds=SHORT_S)
        yield f"link-silent-k{window}", partial(link_silent, window=window, seconds=8.0)
        yield f"cloud-killed-k{window}", partial(cloud_killed, window=window)
        yield f"edge-killed-k{window}", partial(edge_killed, window=window)
        yield f"both-killed-k{window}", partial(both_killed, window=window)
        yield f"strangers-k{window}", partial(strangers, window=window)
    yield "link-down-30s", partial(link_down, window=0, seconds=30.0)
    yield "garbled-under-tls", partial(garbled_under_tls, window=0)
    yield "cloud-without-folder", partial(cloud_killed_without_folder, window=0)
    yield "edge-without-folder", partial(edge_killed_without_folder, window=0)
    yield "cloud-gone", partial(cloud_gone, window=0)
    yield "same-party-number", partial(two_with_one_number, window=0)
    yield "wrong-token", partial(refused, window=0, fault="wrong token", token=new_token())
    yield "wrong-run", partial(refused, window=0, fault="a run that is not open", run="other")
    yield "wrong-operator-token", partial(wrong_operator_token, window=0)
    yield (
        "strange-authority",
        partial(
            refused,
            window=0,
            fault="certificate of another authority",
            served="own",
            of_edge="stranger",
        ),
    )
    yield (
        "strange-name",
        partial(
            refused,
            window=0,
            fault="certificate for another name",
            served="other name",
            of_edge="own",
        ),
    )
    yield (
        "no-client-certificate",
        partial(
            refused,
            window=0,
            fault="no certificate where the cloud asks for one",
            served="own, mutual",
            of_edge="own",
        ),
    )
    yield (
        "tls-edge-plain-cloud",
        partial(refused, window=0, fault="TLS edge, plain cloud", of_edge="own"),
    )
    yield (
        "plain-edge-tls-cloud",
        partial(refused, window=0, fault="plain edge, TLS cloud", served="own"),
    )


def main(target: Path, *names: str) -> None:
    """Run all cells, or those named, whose rows are then put in place of those of before."""
    rows: dict[str, dict[str, Any]] = {}
    if names and target.exists():
        rows = {row["name"]: row for row in json.loads(target.read_text("utf-8"))["rows"]}
    for name, cell in cells():
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            row = cell(Path(folder))
        rows[name] = {"name": name, **asdict(row)}
        print(
            f"{name:22} K={row.window} {row.outcome:8} {row.again_s:6.2f} s  {' | '.join(row.says)}",
            flush=True,
        )
        target.write_text(
            json.dumps(
                {
                    "schema": 1,
                    "command": f"python -m tests.edgecloud.cloud.fault_matrix {target}",
                    "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
                    "num_batches": NUM_BATCHES,
                    "struck_at_batch": STRUCK_AT,
                    "rows": [rows[each] for each, _ in cells() if each in rows],
                },
                indent=1,
            )
            + "\n",
            "utf-8",
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
