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
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import numpy as np
import pytest
import torch

from socflower.edgecloud.cloud.operator_calls import session_status
from socflower.edgecloud.stream import split_pb2 as wire
from socflower.edgecloud.stream.credentials import new_token, run_caller
from socflower.errors import SocflowerError
from socflower.peers.resumable_stream import end_frame
from socflower.wire.authentication import ClientAuthentication
from socflower.wire.certificates import HostCertificate, write_certificates
from socflower.wire.secure_channel import Tls
from socflower.wire.split_message_keys import SplitTask
from tests.edgecloud.cloud.processes import (
    CloudSide,
    EdgeSide,
    open_run,
    task_of,
    undisturbed,
)
from tests.edgecloud.runtime.numpy_halves import same
from tests.edgecloud.stream.breaking_line import BreakingLine
from tests.peers.memory_line import part_frame

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
    # What the user sees, a line each; nothing if the fault is made good in silence.
    says: list[str]
    again_s: float  # until the next batch was applied after it was made good, or until the line
    down_s: float | None  # of that, until what was broken was up again
    rollbacks: int  # to the last checkpoint
    streams: int
    weights: str  # compared with an undisturbed training
    once: bool | None  # whether either half's weights have seen each batch exactly once, in order


class Deployed:
    """A cloud, a line to it and one edge, all of which can be struck; with TLS if it has a certificate."""

    def __init__(
        self, folder: Path, window: int, own: HostCertificate | None = None, **of_edge: Any
    ) -> None:
        self._stack = ExitStack()
        self.folder, self.window = folder, window
        self._ca = None if own is None else own.ca
        tls = None if own is None else Tls(certificate=own.certificate, key=own.key)
        self.cloud = self._kept(CloudSide(folder, tls=tls))
        self.line = self._kept(GarblingLine(self.cloud.port))
        self.task = open_run(self.cloud.operator(self._ca), window, NUM_BATCHES)
        self.edge = self.start_edge(**of_edge)
        self.is_first = True

    def __enter__(self) -> "Deployed":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _kept(self, side: Any) -> Any:
        return self._stack.enter_context(closing(side))

    def start_edge(self, folder: str = "edge", **settings: Any) -> EdgeSide:
        task = replace(self.task, address=f"127.0.0.1:{self.line.port}")
        if self._ca is not None:
            settings["tls"] = {"ca": str(self._ca)}
        side: EdgeSide = self._kept(EdgeSide(self.folder / folder, task, **settings))
        return side

    def restart_cloud(self, **settings: Any) -> None:
        self.cloud.kill()
        self.cloud = self._kept(CloudSide(self.folder, self.cloud.port, **settings))

    def restart_edge(self, folder: str = "edge") -> None:
        self.edge.kill()
        self.edge, self.is_first = self.start_edge(folder), False
        self.edge.wait(lambda: bool(self.edge.lines), "its start")

    def strike(self, batch: int = STRUCK_AT) -> float:
        """Wait until it is time, and return when."""
        self.edge.wait_batch(batch)
        return time.monotonic()

    def went_on(self, fault: str, struck_s: float, says: list[str] | None = None) -> Row:
        """Wait for the end of the training and check what must hold of it."""
        mended_s = time.monotonic()
        result = self.edge.end()
        assert "error" not in result, result
        # A new edge continues from a checkpoint, not from the beginning.
        assert self.is_first or 0 < result["first"] <= STRUCK_AT
        later_s = [at_s for _, at_s in self.edge.applied if at_s >= mended_s]
        weights, ledger = self.cloud.result(self.task.run, self._ca)
        assert ledger == result["ledger"] == list(range(NUM_BATCHES)), (ledger, result["ledger"])
        assert result["max_staleness"] <= self.window
        compared = "not compared: with K > 0 they depend on when gradients come"
        return Row(
            fault=fault,
            window=self.window,
            outcome="went on",
            says=says or [],
            again_s=round(min(later_s, default=result["at_s"]) - struck_s, 2),
            down_s=round(mended_s - struck_s, 2),
            rollbacks=result["rollbacks"],
            streams=result["streams"],
            weights=compared if self.window else _as_undisturbed(self.edge, weights),
            once=True,
        )

    def ended(self, fault: str, struck_s: float) -> Row:
        """Wait for the line with which the edge ends."""
        line = self.edge.end()
        assert "error" in line, line
        return _ended(fault, self.window, [line["error"]], line["at_s"] - struck_s)


def _as_undisturbed(edge: EdgeSide, of_cloud: Mapping[str, Any]) -> str:
    with np.load(edge.weights_file) as of_edge:
        assert same(of_edge, of_cloud, wanted=undisturbed(NUM_BATCHES))
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
Strike: TypeAlias = Callable[[Deployed], list[str] | None]


def made_good(folder: Path, window: int, fault: str, strike: Strike) -> Row:
    with Deployed(folder, window) as run:
        struck_s = run.strike()
        says = strike(run)
        return run.went_on(fault, struck_s, says)


def link_down(run: Deployed, seconds: float = SHORT_S) -> None:
    run.line.down()
    time.sleep(seconds)
    run.line.up()


def link_silent(run: Deployed) -> None:
    run.line.stand_still()
    time.sleep(8.0)
    run.line.move_on()


def both_killed(run: Deployed) -> None:
    run.restart_cloud()
    run.restart_edge()


def strangers(run: Deployed) -> list[str]:
    """Some send bytes that no edge sends, with the right token and without, while the edge trains."""
    says = [_dialled(run, name, frames, token) for name, frames, token in _bad_streams(run.task)]
    with socket.create_connection(("127.0.0.1", run.cloud.port), timeout=5) as raw:
        raw.sendall(os.urandom(4096))
    assert all(says), says
    return says


def _bad_streams(task: SplitTask) -> Iterator[tuple[str, list[bytes], str]]:
    head = wire.Head(mark=wire.Mark(batch=0, cut=1)).SerializeToString()
    part = part_frame(2, head)
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
                frame = wire.Frame.FromString(reply.removeprefix(end_frame()))
                if frame.WhichOneof("kind") == "refusal":
                    return f"{name}: {frame.refusal.text}"
        except grpc.RpcError as error:
            return f"{name}: {error.details()}"  # type: ignore[attr-defined]
    return ""


def garbled_under_tls(folder: Path, window: int) -> Row:
    """Bytes arrive as others than they were sent: TLS notices, and what was under way is sent again."""
    own = write_certificates(folder / "certificates", ["127.0.0.1"])["127.0.0.1"]
    with Deployed(folder, window, own) as run:
        struck_s, run.line.flips = run.strike(), 1
        row = run.went_on("a byte garbled on the way, with TLS", struck_s)
        assert run.line.flips == 0 and row.streams > 1
        times_s = [at_s for _, at_s in run.edge.applied]
        gaps_s = [later - at_s for at_s, later in pairwise(times_s) if later >= struck_s]
        return replace(row, again_s=round(max(gaps_s), 2), down_s=None)


# --------------------------------------------------------------------------------------------- faults with a line
def fatal(folder: Path, window: int, fault: str, strike: Strike, **of_edge: Any) -> Row:
    with Deployed(folder, window, **of_edge) as run:
        struck_s = run.strike()
        strike(run)
        return run.ended(fault, struck_s)


def two_with_one_number(folder: Path, window: int) -> Row:
    """The second one takes the first one's place, which ends with a line; it begins where both it and the cloud can."""
    # So slow that the other one comes in time.
    with Deployed(folder, window, pause_s=2.0) as run:
        run.strike(3)
        first, run.edge = run.edge, run.start_edge("second")
        run.edge.wait(lambda: bool(run.edge.lines), "its start")
        struck_s, line = time.monotonic(), first.end()
        row = run.went_on("two edges with the same party number", struck_s, [line["error"]])
        return replace(row, outcome="ended", down_s=None)


def refused(
    folder: Path,
    window: int,
    fault: str,
    *,
    served: str = "",
    mutual: bool = False,
    of_edge: str = "",
    **changes: Any,
) -> Row:
    """Dial a cloud with what does not fit: certificates by whose they are, or changes of the task."""
    certificates = _certificates(folder)
    with ExitStack() as stack:
        tls = None
        if served:
            own = certificates[served]
            tls = Tls(ca=own.ca if mutual else None, certificate=own.certificate, key=own.key)
        cloud = stack.enter_context(closing(CloudSide(folder, tls=tls)))
        address = cloud.address
        if served:
            task = replace(
                task_of(window, NUM_BATCHES), address=address, run="run", token=new_token()
            )
        else:
            task = open_run(cloud.operator(), window, NUM_BATCHES)
        settings = {"tls": {"ca": str(certificates[of_edge].ca)} if of_edge else {}}
        edge = EdgeSide(folder / "edge", replace(task, **changes), give_up_s=GIVE_UP_S, **settings)
        line = stack.enter_context(closing(edge)).end()
        assert "error" in line, line
        return _ended(fault, window, [line["error"]], line["at_s"] - edge.lines[0]["at_s"])


def wrong_operator_token(folder: Path, window: int) -> Row:
    with closing(CloudSide(folder)) as cloud:
        began_s, stranger = time.monotonic(), replace(cloud.operator(), token=new_token())
        with pytest.raises(SocflowerError) as caught:
            session_status(stranger)
        says = [str(caught.value)]
        return _ended("wrong operator token", window, says, time.monotonic() - began_s)


def _certificates(folder: Path) -> Mapping[str, HostCertificate]:
    own = write_certificates(folder / "own", ["127.0.0.1", "other.example"])
    strange = write_certificates(folder / "stranger", ["127.0.0.1"])
    return {
        "own": own["127.0.0.1"],
        "other name": own["other.example"],
        "stranger": strange["127.0.0.1"],
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
MADE_GOOD: Mapping[str, tuple[str, Strike]] = {
    "link-down": (f"link down for {SHORT_S:g} s", link_down),
    "link-silent": ("link silent for 8 s", link_silent),
    "cloud-killed": ("cloud killed, started again", Deployed.restart_cloud),
    "edge-killed": ("edge killed, started again", Deployed.restart_edge),
    "both-killed": ("both killed, started again", both_killed),
    "strangers": (
        "strangers: garbage, oversized frames, frames out of order, a wrong token",
        strangers,
    ),
}
FATAL: Mapping[str, tuple[str, Strike, dict[str, Any]]] = {
    "cloud-without-folder": (
        "cloud killed, started again without its folder",
        lambda run: run.restart_cloud(keeps=False),
        {},
    ),
    "edge-without-folder": (
        "edge killed, started again without its folder",
        lambda run: run.restart_edge("elsewhere"),
        {},
    ),
    "cloud-gone": (
        f"cloud killed for good (edges give up after {GIVE_UP_S:g} s)",
        lambda run: run.cloud.kill(),
        {"give_up_s": GIVE_UP_S},
    ),
}
REFUSED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "wrong-token": ("wrong token", {"token": new_token()}),
    "wrong-run": ("a run that is not open", {"run": "other"}),
    "strange-authority": (
        "certificate of another authority",
        {"served": "own", "of_edge": "stranger"},
    ),
    "strange-name": ("certificate for another name", {"served": "other name", "of_edge": "own"}),
    "no-client-certificate": (
        "no certificate where the cloud asks for one",
        {"served": "own", "mutual": True, "of_edge": "own"},
    ),
    "tls-edge-plain-cloud": ("TLS edge, plain cloud", {"of_edge": "own"}),
    "plain-edge-tls-cloud": ("plain edge, TLS cloud", {"served": "own"}),
}


def cells() -> Iterator[tuple[str, Cell]]:
    """Yield all cells by name."""
    for window in (0, 5):
        for name, (fault, strike) in MADE_GOOD.items():
            cell = partial(made_good, window=window, fault=fault, strike=strike)
            yield f"{name}-k{window}", cell
    long = partial(link_down, seconds=30.0)
    yield "link-down-30s", partial(made_good, window=0, fault="link down for 30 s", strike=long)
    yield "garbled-under-tls", partial(garbled_under_tls, window=0)
    for name, (fault, strike, of_edge) in FATAL.items():
        yield name, partial(fatal, window=0, fault=fault, strike=strike, **of_edge)
    yield "same-party-number", partial(two_with_one_number, window=0)
    for name, (fault, changes) in REFUSED.items():
        yield name, partial(refused, window=0, fault=fault, **changes)
    yield "wrong-operator-token", partial(wrong_operator_token, window=0)


def main(target: Path, *names: str) -> None:
    """Run all cells, or those named, whose rows then replace the earlier ones."""
    document: dict[str, Any] = {
        "schema": 1,
        "command": f"python -m tests.edgecloud.cloud.fault_matrix {target}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "num_batches": NUM_BATCHES,
        "struck_at_batch": STRUCK_AT,
    }
    rows: dict[str, dict[str, Any]] = {}
    if names and target.exists():
        rows = {row["name"]: row for row in json.loads(target.read_text("utf-8"))["rows"]}
    for name, cell in cells():
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = {"name": name, **asdict(cell(Path(folder)))}
        print(rows[name], flush=True)
        document["rows"] = [rows[each] for each, _ in cells() if each in rows]
        target.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
