"""Real rings between network namespaces: right sums, times as simulated, and nothing left behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.testbed.cases import SMALL_BYTES, VGG11_BYTES
from tests.testbed.comparison import gains
from tests.testbed.measure import line, measured_rows
from tests.testbed.prediction import predicted_steps_s
from tests.testbed.ring_driver import Run
from tests.testbed.testbed import REPOSITORY, TestbedError, measure, missing
from tests.testbed.topology import Rack

SMALL = Rack(slots_per_board=(2, 2))
DEADLINE_S = 100.0
ASLEEP = Run(transport="torch", rings=((0, 1),), num_bytes=4, num_steps=2, compute_s=1000.0)


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that marks this test's testbeds: processes name it, and so does what they leave in it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def processes_of(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        alive = process.info["status"] != psutil.STATUS_ZOMBIE
        if alive and any(str(folder) in word for word in process.info["cmdline"] or ()):
            found.append(int(process.info["pid"]))
    return found


def wait_until_gone(folder: Path) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while processes_of(folder):
        assert time.monotonic() < end_s, f"still there: {processes_of(folder)}"
        time.sleep(0.05)


def test_the_probe_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    missing.cache_clear()
    try:
        assert missing() == "the testbed needs the command unshare"
    finally:
        missing.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
def test_small_rings_sum_right_and_leave_nothing(
    left: Path, record_property: Callable[[str, object], None]
) -> None:
    """Two groups over two boards, freely and in turn; how long they took is recorded and decides nothing."""
    named = Path("/run/netns")
    before = sorted(named.iterdir()) if named.exists() else []
    runs = [
        Run(
            transport=transport,
            rings=((0, 2), (1, 3)),
            num_bytes=SMALL_BYTES,
            num_steps=2,
            in_turn=in_turn,
        )
        for transport, in_turn in (("gloo", False), ("grpc", True))
    ]
    for run, result in zip(runs, measure(SMALL, runs, timeout_s=DEADLINE_S), strict=True):
        assert result.right, result
        assert [soc["ring"] for soc in result.socs] == [0, 1, 0, 1]
        record_property(
            f"measured_s of {run.transport}", [result.median_s(ring) for ring in range(2)]
        )
        record_property(
            f"simulated_s of {run.transport}", [steps[0] for steps in predicted_steps_s(SMALL, run)]
        )
        # Rates are limited at all: nothing is faster than the uplink that both groups share, but for what its bucket
        # saved.
        taken_s = max(soc["ends_s"][-1] for soc in result.socs) - min(
            soc["begins_s"][0] for soc in result.socs
        )
        assert taken_s > 0.95 * 2 * 2 * SMALL_BYTES / (SMALL.uplink_bit_per_s / 8)
    assert (sorted(named.iterdir()) if named.exists() else []) == before
    wait_until_gone(left)
    assert not list(left.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
def test_a_soc_that_fails_ends_the_testbed_with_its_words(left: Path) -> None:
    run = Run(transport="pigeons", rings=((0, 1),), num_bytes=4, num_steps=2)
    with pytest.raises(
        TestbedError, match=r"(?s)KeyError: 'pigeons'.*SoC [01] ended with 1 during run 0"
    ):
        list(measure(SMALL, [run], timeout_s=DEADLINE_S))
    wait_until_gone(left)


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
def test_a_testbed_that_is_late_is_ended(left: Path) -> None:
    with pytest.raises(TestbedError, match="not done after 12 s"):
        list(measure(SMALL, [ASLEEP], timeout_s=12.0))
    wait_until_gone(left)


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
def test_a_testbed_ends_with_whoever_started_it(left: Path) -> None:
    program = (
        "from tests.testbed.test_testbed import ASLEEP, SMALL; from tests.testbed.testbed import measure; "
        "list(measure(SMALL, [ASLEEP], timeout_s=1000))"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPOSITORY, env={**os.environ, "TMPDIR": str(left)}
    )
    try:
        end_s = time.monotonic() + DEADLINE_S
        # All SoCs, the first process, and what made the namespaces.
        while len(processes_of(left)) < SMALL.num_socs + 2:
            assert time.monotonic() < end_s and starter.poll() is None
            time.sleep(0.05)
    finally:
        starter.send_signal(signal.SIGKILL)
        starter.wait()
    wait_until_gone(left)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("transport", ["gloo", "grpc"])
@pytest.mark.parametrize("num_bytes", [SMALL_BYTES, VGG11_BYTES])
def test_the_simulator_is_within_five_percent(transport: str, num_bytes: int) -> None:
    """Of the median step of every ring; groups that drift must lie within their bracket, and taking turns must gain."""
    rows = list(measured_rows([transport], [num_bytes]))
    gained = gains(rows)
    print(*map(line, rows), *gained, sep="\n")
    assert [line(row) for row in rows if not row.ok] == []
    assert len(gained) == 1 and gained[0].ok, gained
