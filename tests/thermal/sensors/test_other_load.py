"""Whose processor time it is: ours up to the SuperNode, or others'."""

import multiprocessing
import os
import time
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.thermal.sensors.other_load import OtherLoad
from socflower.thermal.sensors.sysfs import NoteLog
from tests.thermal.fake_machines import Machine

SUPERNODE = "/usr/bin/python\0/home/a/.venv/bin/flower-supernode\0--insecure"


class Proc:
    """A fake /proc of four processors: what each process spent, and idle time for the rest.

    It has a SuperNode with a ClientApp and its worker, a second SuperNode, and a game under a shell.
    """

    def __init__(self, root: Path) -> None:
        self.machine = Machine(root)
        self.parents: dict[int, int] = {}
        self.spent: dict[int, int] = {}  # in hundredths of a second
        self.reaped: dict[int, int] = {}
        self.unlisted = 0  # spent by processes that are not listed
        self.names = {22: "odd) name ("}
        self.add(1, 0, "/sbin/init")
        self.add(10, 1, "-bash")
        self.add(20, 10, SUPERNODE)
        self.add(21, 20, "/usr/bin/python\0/x/flwr-clientapp")
        self.add(22, 21, "python\0-c\0worker")
        self.add(30, 10, SUPERNODE)
        self.add(40, 10, "game")

    def add(self, pid: int, parent: int, command: str) -> None:
        self.parents[pid], self.spent[pid], self.reaped[pid] = parent, 0, 0
        self.machine.write({f"proc/{pid}/cmdline": command.encode()})

    def end(self, pid: int) -> None:
        """Let a process end and its parent wait for it."""
        self.reaped[self.parents.pop(pid)] += self.spent.pop(pid) + self.reaped.pop(pid)
        self.machine.write({f"proc/{pid}/stat": None})

    def pass_time(self, seconds: float) -> None:
        self.machine.now_s += seconds
        spent = sum(self.spent.values()) + sum(self.reaped.values()) + self.unlisted
        self.machine.work(spent / 100, (self.machine.now_s - 100.0) * 4 - spent / 100)
        for pid, parent in self.parents.items():
            times = f"{self.spent[pid]} 0 {self.reaped[pid]} 0"
            stat = f"({self.names.get(pid, 'a process')}) S {parent} 0 0 0 0 0 0 0 0 0 {times}"
            self.machine.write({f"proc/{pid}/stat": f"{pid} {stat} 20 0 1 0 {pid} 0 0"})

    def load(self, pid: int = 21, also_ours: tuple[str, ...] = ()) -> OtherLoad:
        root, clock = self.machine.root, self.machine.clock
        return OtherLoad(root, NoteLog(), clock=clock, pid=pid, also_ours=also_ours)


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


@pytest.mark.parametrize(
    ("pid", "also_ours", "others"),
    [
        (21, (), 0.30 + 0.10 + 0.04),
        (22, (), 0.30 + 0.10 + 0.04),
        (20, (), 0.30 + 0.10 + 0.04),
        (21, ("flower-supernode",), 0.30 + 0.04),
        (40, (), 0.05 + 0.2 + 0.1 + 0.10 + 0.04),
    ],
)
def test_all_processes_outside_our_supernode_are_others(proc, pid, also_ours, others):
    load = proc.load(pid, also_ours)
    proc.pass_time(10.0)
    assert load.read().user is None  # there is nothing to compare with
    for process, percent in ((20, 5), (21, 20), (22, 10), (40, 30), (30, 10), (1, 4)):
        proc.spent[process] += percent * 40
    proc.pass_time(10.0)
    seen = load.read()
    assert (seen.user, seen.total) == (pytest.approx(others), pytest.approx(0.79))
    assert seen.num_processors == 4 and seen.busy


STEPS = st.lists(st.tuples(st.sampled_from([20, 21, 22, 30, 40]), st.integers(0, 150)), max_size=8)


@settings(max_examples=12)
@given(
    rounds=st.lists(st.tuples(STEPS, st.booleans(), st.integers(0, 100)), min_size=1, max_size=5)
)
def test_the_part_of_others_is_exact_whatever_starts_and_ends(tmp_path_factory, rounds):
    """Against bookkeeping: children of ours start, work and are waited for, some of the others are not listed."""
    proc = Proc(tmp_path_factory.mktemp("root"))
    load = proc.load()
    proc.pass_time(1.0)
    load.read()
    for child, (steps, ends, unlisted) in enumerate(rounds, 100):
        proc.unlisted += unlisted
        proc.add(child, 21, "python")
        for pid, spent in (*steps, (child, 30)):
            proc.spent[pid] += spent
        if ends:
            proc.end(child)
        proc.pass_time(10.0)
        others = unlisted + sum(spent for pid, spent in steps if pid in (30, 40))
        assert load.read().user == pytest.approx(others / 4000)


def test_a_process_of_ours_adopted_by_init_leaves_the_others_exact(proc):
    load = proc.load()
    proc.spent[22] = 2000
    proc.pass_time(10.0)
    load.read()
    proc.parents[22] = 1  # its parent ended without waiting
    proc.spent[21] += 1000
    proc.spent[40] += 400
    proc.pass_time(10.0)
    assert load.read().user == pytest.approx(400 / 4000)


def test_a_read_too_soon_gives_the_load_before(proc):
    load = proc.load()
    proc.pass_time(1.0)
    load.read()
    proc.spent[40] += 400
    found = []
    for seconds in (1.0, 0.3, 0.3):
        proc.pass_time(seconds)
        found.append(load.read().user)
    assert found == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("before", "after", "user", "total"),
    [
        ("0 0 0 400 0 0 0 0 50", "0 0 0 700 0 0 0 100 50", 0.25, 0.25),  # a hypervisor's steal
        ("0 0 0 100 0 0 0 0", "100 0 0 300 100 0 0 0", 0.25, 0.25),  # waiting for a disk is idle
        ("300 0 0 100 0 0 0 0", "0 0 0 500 0 0 0 0", 0.0, 0.0),  # a counter that falls
    ],
)
def test_the_load_follows_from_two_lines_of_times(tmp_path, before, after, user, total):
    machine = Machine(tmp_path)
    load = OtherLoad(tmp_path, NoteLog(), clock=machine.clock, pid=1)
    for times in (before, after):
        machine.write({"proc/stat": f"cpu  {times} 0\ncpu0 0 0 0 0"})
        machine.now_s += 1.0
        seen = load.read()
    assert (seen.user, seen.total) == (user, total)


@pytest.mark.parametrize(
    "text", ["", "cpu", "cpu  1 2", "cpu  a b c d", "cpu  -1 0 0 5", "cpu0 1 2 3 4"]
)
def test_invalid_times_are_reported_once(tmp_path, text):
    machine, notes = Machine(tmp_path, {"proc/stat": text}), NoteLog()
    load = OtherLoad(tmp_path, notes, clock=machine.clock, pid=1)
    for _ in range(3):
        machine.now_s += 1.0
        assert load.read().user is None
    assert len(notes.drain()) == 1


def test_a_cycle_of_parents_ends(proc):
    # A snapshot may be torn between two processes of one number.
    proc.parents[20], proc.parents[21] = 21, 20
    load = proc.load()
    for _ in range(2):
        proc.pass_time(1.0)
        seen = load.read()
    assert seen.user == 0.0


CpuTimes = namedtuple("CpuTimes", "user system idle")
Listed = namedtuple("Listed", "pid info")


def test_without_proc_psutil_is_asked(monkeypatch):
    """A process that works a second of two processors; others take half a second."""
    ours = others = now_s = 0.0

    def process_iter(_):
        for pid, spent in (
            (7, CpuTimes(ours, 0.0, 0.0)),
            (8, CpuTimes(others, 0.0, 0.0)),
            (9, None),
        ):
            info = {"ppid": 1, "cpu_times": spent, "create_time": 1.0, "cmdline": None}
            yield Listed(pid, info)

    class Missing(type(Path())):
        def read_text(self, *_):
            raise FileNotFoundError(2, "No such file or directory")

    def cpu_times():
        return CpuTimes(ours + others, 0.0, 10.0 + 2.0 * now_s - ours - others)

    monkeypatch.setattr(psutil, "cpu_times", cpu_times)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(psutil, "process_iter", process_iter)
    load = OtherLoad(Missing("/"), NoteLog(), clock=lambda: now_s, pid=7)
    assert load.read().user is None
    ours, others, now_s = 1.0, 0.5, 1.0
    seen = load.read()
    assert (seen.user, seen.total) == (pytest.approx(0.25), pytest.approx(0.75))

    def refused(_):
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "process_iter", refused)
    now_s = 2.0
    assert load.read().user is None


def spin(seconds: float) -> None:
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc/stat here")
def test_our_own_children_are_not_others_on_this_machine():
    """Against what the process itself knows it spent; a loaded machine only adds to what others have."""
    load = OtherLoad(Path("/"), NoteLog())
    load.read()
    before, start_s = sum(os.times()[:4]), time.monotonic()
    child = multiprocessing.get_context("fork").Process(target=spin, args=(0.6,))
    child.start()
    child.join(60.0)
    assert child.exitcode == 0
    time.sleep(max(0.0, 0.6 - (time.monotonic() - start_s)))
    seen, ours_s = load.read(), sum(os.times()[:4]) - before
    ours = (seen.total - seen.user) * seen.num_processors * (time.monotonic() - start_s)
    assert ours == pytest.approx(ours_s, rel=0.3, abs=0.3)
