"""Whose processor time it is: ours up to the SuperNode, or others'."""

import multiprocessing
import os
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.thermal.sensors.other_load import OtherLoad
from socflower.thermal.sensors.sysfs import NoteLog
from tests.thermal.fake_machines import Machine

SUPERNODE = ["/usr/bin/python", "/home/a/.venv/bin/flower-supernode", "--insecure"]


class Proc:
    """A made-up /proc of four processors: what each process spent, and idle time to fill up."""

    def __init__(self, root: Path) -> None:
        self.machine = Machine(root)
        self.parents: dict[int, int] = {}
        self.spent: dict[int, int] = {}  # in hundredths of a second
        self.reaped: dict[int, int] = {}
        self.unseen = 0  # by processes that are not listed
        self.names: dict[int, str] = {}

    def add(self, pid: int, parent: int, command: list[str], name: str = "a process") -> None:
        self.parents[pid], self.spent[pid], self.reaped[pid], self.names[pid] = parent, 0, 0, name
        self.machine.write({f"proc/{pid}/cmdline": "\0".join(command).encode()})

    def end(self, pid: int) -> None:
        """Let a process end and its parent wait for it."""
        parent = self.parents.pop(pid)
        self.reaped[parent] += self.spent.pop(pid) + self.reaped.pop(pid)
        (self.machine.root / f"proc/{pid}/stat").unlink(missing_ok=True)

    def pass_time(self, seconds: float) -> None:
        self.machine.now_s += seconds
        busy = sum(self.spent.values()) + sum(self.reaped.values()) + self.unseen
        total = round((self.machine.now_s - 100.0) * 400)
        assert busy <= total
        cpus = "\n".join(f"cpu{number} 0 0 0 0" for number in range(4))
        self.machine.write(
            {"proc/stat": f"cpu  {busy} 0 0 {total - busy} 0 0 0 0 0 0\n{cpus}\nintr 5"}
        )
        for pid, parent in self.parents.items():
            self.machine.write(
                {
                    f"proc/{pid}/stat": f"{pid} ({self.names[pid]}) S {parent} 0 0 0 0 0 0 0 0 0 "
                    f"{self.spent[pid]} 0 {self.reaped[pid]} 0 20 0 1 0 {pid} 0 0"
                }
            )

    def load(
        self, pid: int, also_ours: tuple[str, ...] = (), notes: NoteLog | None = None
    ) -> OtherLoad:
        return OtherLoad(
            self.machine.root,
            notes or NoteLog(),
            clock=self.machine.clock,
            pid=pid,
            also_ours=also_ours,
        )


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    """A SuperNode with a ClientApp and its worker, a second SuperNode, and a game under a shell."""
    proc = Proc(tmp_path)
    proc.add(1, 0, ["/sbin/init"])
    proc.add(10, 1, ["-bash"])
    proc.add(20, 10, SUPERNODE, name="flower-supernod")
    proc.add(21, 20, ["/usr/bin/python", "/x/flwr-clientapp"])
    proc.add(22, 21, ["python", "-c", "worker"], name="odd) name (")
    proc.add(30, 10, SUPERNODE)
    proc.add(40, 10, ["game"])
    return proc


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
def test_all_that_is_not_below_our_supernode_is_others(
    proc,
    pid,
    also_ours,
    others,
):
    load = proc.load(pid, also_ours)
    proc.pass_time(10.0)
    assert load.read().user is None  # nothing to compare with
    for process, share in ((20, 0.05), (21, 0.2), (22, 0.1), (40, 0.30), (30, 0.10), (1, 0.04)):
        proc.spent[process] += round(share * 4000)
    proc.pass_time(10.0)
    seen = load.read()
    assert (
        seen.user == pytest.approx(others)
        and seen.total == pytest.approx(0.79)
        and seen.num_processors == 4
    )
    assert seen.busy


STEPS = st.lists(st.tuples(st.sampled_from([20, 21, 22, 30, 40]), st.integers(0, 150)), max_size=8)


@settings(max_examples=50)
@given(
    rounds=st.lists(st.tuples(STEPS, st.booleans(), st.integers(0, 100)), min_size=1, max_size=6)
)
def test_others_part_is_exact_whatever_starts_and_ends(
    tmp_path_factory,
    rounds,
):
    """Against bookkeeping: children of ours start, work and are waited for, others appear in no list at all."""
    proc = Proc(tmp_path_factory.mktemp("root"))
    for pid, parent in ((1, 0), (20, 1), (21, 20), (22, 21), (30, 1), (40, 1)):
        proc.add(pid, parent, SUPERNODE if pid == 20 else ["x"])
    load = proc.load(21)
    proc.pass_time(1.0)
    load.read()
    child = 100
    for steps, ends, unseen in rounds:
        others = unseen
        proc.unseen += unseen
        proc.add(child, 21, ["python"])
        for pid, spent in (*steps, (child, 30)):
            proc.spent[pid] += spent
            others += spent if pid in (30, 40) else 0
        if ends:
            proc.end(child)
        child += 1
        proc.pass_time(10.0)
        assert load.read().user == pytest.approx(others / 4000)


def test_a_process_of_ours_that_init_adopts_does_not_make_others_of_the_rest(proc):
    load = proc.load(21)
    proc.spent[22] = 2000
    proc.pass_time(10.0)
    load.read()
    proc.parents[22] = 1  # its parent ended without waiting
    proc.spent[21] += 1000
    proc.spent[40] += 400
    proc.pass_time(10.0)
    assert load.read().user == pytest.approx(400 / 4000)


def test_a_look_too_soon_gives_the_load_before(proc):
    load = proc.load(21)
    proc.pass_time(1.0)
    load.read()
    proc.spent[40] += 400
    proc.pass_time(1.0)
    assert load.read().user == pytest.approx(1.0)
    proc.pass_time(0.3)
    assert load.read().user == pytest.approx(1.0)
    proc.pass_time(0.3)
    assert load.read().user == 0.0


def test_what_a_hypervisor_takes_away_is_others(tmp_path):
    machine = Machine(tmp_path)
    load = OtherLoad(tmp_path, NoteLog(), clock=machine.clock, pid=1)
    for idle, steal in ((400, 0), (700, 100)):
        machine.write({"proc/stat": f"cpu  0 0 0 {idle} 0 0 0 {steal} 50 0\ncpu0 0 0 0 0"})
        machine.now_s += 1.0
        load.read()
    assert load.read().user == pytest.approx(100 / 400)


def test_waiting_for_a_disk_is_no_load(tmp_path):
    machine = Machine(tmp_path)
    load = OtherLoad(tmp_path, NoteLog(), clock=machine.clock, pid=1)
    for idle, waiting, user in ((100, 0, 0), (300, 100, 100)):
        machine.write({"proc/stat": f"cpu  {user} 0 0 {idle} {waiting} 0 0 0 0 0\ncpu0 0 0 0 0"})
        machine.now_s += 1.0
        load.read()
    assert load.read().total == pytest.approx(100 / 400)


@pytest.mark.parametrize(
    "text", ["", "cpu", "cpu  1 2", "cpu  a b c d", "cpu  -1 0 0 5", "cpu0 1 2 3 4"]
)
def test_times_that_cannot_be_are_told_of_once(tmp_path, text):
    machine, notes = Machine(tmp_path, {"proc/stat": text}), NoteLog()
    load = OtherLoad(tmp_path, notes, clock=machine.clock, pid=1)
    for _ in range(3):
        machine.now_s += 1.0
        assert load.read().user is None
    assert len(notes.drain()) == 1


def test_counters_that_go_back_give_a_load_that_can_be(proc):
    load = proc.load(21)
    proc.spent[40] = 300
    proc.pass_time(1.0)
    load.read()
    proc.spent[40] = 0
    proc.pass_time(1.0)
    assert load.read().user == 0.0


def test_a_circle_of_parents_ends(proc):
    proc.parents[20], proc.parents[21] = (
        21,
        20,
    )  # a snapshot torn between two processes of one number
    load = proc.load(21)
    proc.pass_time(1.0)
    load.read()
    proc.pass_time(1.0)
    assert load.read().user == 0.0


def test_where_there_is_no_proc_psutil_is_asked(monkeypatch):
    """A process without parents that works a second of two processors; others take half a second."""
    now_s, round_ = [0.0], [0]
    spent = [(0.0, 0.0), (1.0, 0.5)]

    def cpu_times():
        ours, others = spent[round_[0]]
        return CpuTimes(user=ours + others, system=0.0, idle=10.0 + 2.0 * round_[0] - ours - others)

    def process_iter(_):
        ours, others = spent[round_[0]]
        return [
            Listed(
                pid,
                {
                    "ppid": 1,
                    "cpu_times": CpuTimes(user=time_s, system=0.0, idle=0.0),
                    "create_time": 1.0,
                    "cmdline": None,
                },
            )
            for pid, time_s in ((7, ours), (8, others))
        ] + [Listed(9, {"ppid": None, "cpu_times": None, "create_time": None, "cmdline": None})]

    class Missing(type(Path())):  # type: ignore[misc]
        def read_text(self, *_):
            raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(psutil, "cpu_times", cpu_times)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(psutil, "process_iter", process_iter)
    load = OtherLoad(Missing("/"), NoteLog(), clock=lambda: now_s[0], pid=7)
    assert load.read().user is None
    now_s[0], round_[0] = 1.0, 1
    assert (load.read().user, load.read().total) == (pytest.approx(0.25), pytest.approx(0.75))

    def refused(_):
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "process_iter", refused)
    now_s[0] = 2.0
    assert load.read().user is None


class CpuTimes(NamedTuple):
    user: float
    system: float
    idle: float


class Listed(NamedTuple):
    pid: int
    info: dict[str, object]


def spin(seconds: float) -> None:
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass


def test_our_own_children_are_not_others_on_this_machine():
    """Against what the process itself knows it spent; a loaded machine only adds to what others have."""
    load = OtherLoad(Path("/"), NoteLog())
    if load.read().total is None and not Path("/proc/stat").exists():
        pytest.skip("no /proc/stat here")
    before, start = os.times(), time.monotonic()
    child = multiprocessing.get_context("fork").Process(target=spin, args=(1.0,))
    child.start()
    child.join(60.0)
    assert child.exitcode == 0
    while time.monotonic() - start < 0.6:
        time.sleep(0.1)
    seen, after = load.read(), os.times()
    ours_s = sum(after[:4]) - sum(before[:4])
    assert seen.user is not None and seen.total is not None
    ours = (seen.total - seen.user) * seen.num_processors * (time.monotonic() - start)
    assert ours == pytest.approx(ours_s, rel=0.3, abs=0.3)
