"""`socflower status` and `watch` show what runs, what has ended, and say what is not there."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from socflower.engines.run_status import STATUS_FILE, RunStatus
from socflower.scenario import jobs
from socflower.wire.status_port import StatusPort
from tests.command_line import Socflower, is_mistake

ENTRY: dict[str, Any] = {
    "round": 2,
    "num_rounds": 5,
    "accuracy": 0.875,
    "loss": 0.5,
    "events": [{"kind": "member-lost", "text": "SoC 1 was lost"}],
}
SERVER = {
    "state": "training",
    "training_round": 3,
    "groups": [{"id": 0, "leader": 0, "members": [0, 1], "waiting_for": [1]}],
    "nodes": {"connected": 2, "needed": 2},
    "hottest_c": 61.5,
    "waiting_for": "SoC 1",
}


@pytest.fixture
def status(tmp_path: Path) -> RunStatus:
    folder = tmp_path / "out" / "case"
    folder.mkdir(parents=True)
    found = RunStatus(folder / STATUS_FILE, "case", "deployment")
    found.on_round(ENTRY)
    found.on_server(SERVER)
    return found


def test_a_run_is_shown_by_its_folder_its_port_or_by_being_the_newest(
    socflower: Socflower, status: RunStatus
) -> None:
    with StatusPort("127.0.0.1:0", status.port_state) as port:
        for place in ("out/case", port.address, ""):
            ran = socflower(f"status {place}")
            assert ran.status == 0, ran.err
            for shown in (
                "training",
                "2 of 5",
                "0.875",
                "61.5 °C",
                "waiting for 1",
                "SoC 1 was lost",
            ):
                assert shown in ran.out
            document = json.loads(socflower(f"status {place} --json").out)
            assert (document["round"], document["groups"]) == (2, SERVER["groups"])
    status.close()
    is_mistake(socflower("status out/case"), "no run is there")


def test_metrics_of_a_run_name_its_nodes_groups_and_what_is_awaited(status: RunStatus) -> None:
    status.on_notice("the SuperLink ended; continuing after round 2 (restart 1 of at most 3)")
    state = status.port_state()
    lines = [line for each in state.metrics for line in each.lines()]
    for sample in (
        "socflower_round 2.0",
        "socflower_restarts_total 1.0",
        "socflower_events_total 2.0",
        "socflower_waiting_socs 1.0",
        "socflower_hottest_celsius 61.5",
        'socflower_nodes{state="connected"} 2.0',
        'socflower_group_socs{group="0"} 2.0',
    ):
        assert sample in lines
    assert not state.not_ready


def test_a_run_whose_command_was_killed_is_told_from_one_that_trains(
    socflower: Socflower, status: RunStatus, tmp_path: Path
) -> None:
    path = tmp_path / "out" / "case" / STATUS_FILE
    # Above the largest process id of Linux.
    path.write_text(json.dumps({**json.loads(path.read_text()), "pid": 2**22 + 1}))
    assert "killed" in socflower("status out/case").out
    watched = socflower("watch out/case")
    assert watched.status == 1 and "the same command resumes" in watched.err
    assert watched.out.startswith("killed  round 2/5")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("status", "no run is below this folder"),
        ("status nowhere", "nowhere: no run is there"),
        ("status 127.0.0.1:1", "does not answer"),
        ("watch nowhere", "nowhere: no run is there"),
        ("watch nowhere --every 0", "--every 0"),
        ("status damaged", "is no JSON"),
        ("run case.toml --metrics 8.8.8.8:1", "is not private"),
        ("run case.toml --metrics here", "is not host:port"),
        ("run case.toml --log-format xml", "use text or json"),
    ],
)
def test_what_is_not_there_and_what_cannot_be_is_one_line(
    socflower: Socflower, tmp_path: Path, words: str, named: str
) -> None:
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / STATUS_FILE).write_text("{")
    (tmp_path / "case.toml").write_text("[cluster]\nboards = [2]\n")
    is_mistake(socflower(words), named)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("on_few_digits")
def test_without_a_terminal_a_run_prints_each_round_and_keeps_its_status_while_it_trains(
    socflower: Socflower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    taken = RunStatus.on_round

    def on_round(self: RunStatus, entry: dict[str, Any]) -> None:
        taken(self, entry)
        seen.append(json.loads((tmp_path / "out" / "case" / STATUS_FILE).read_text()))

    monkeypatch.setattr(RunStatus, "on_round", on_round)
    monkeypatch.setattr(jobs, "write_report", lambda path, *_, **__: path.touch())
    monkeypatch.setenv("SOCFLOWER_LOG_FORMAT", "text")
    (tmp_path / "case.toml").write_text(
        "[cluster]\nboards = [1]\n[train]\nepochs = 1\n[strategy]\nname = 'sgd'\n"
    )
    as_text = socflower("run case.toml --workers 0 --metrics 127.0.0.1:0")
    assert as_text.status == 0 and "metrics at http://127.0.0.1:" in as_text.err
    *_, last = [line for line in as_text.err.splitlines() if line.startswith("round ")]
    of = f"{seen[-1]['num_rounds']}"
    assert last.startswith(f"round {of} of {of}: accuracy")
    assert [each["round"] for each in seen] == list(range(int(of) + 1))
    assert {each["pid"] for each in seen} == {os.getpid()}
    assert not (tmp_path / "out" / "case" / STATUS_FILE).exists()
    watched = socflower("watch out/case")
    assert watched.status == 0 and watched.out.startswith(f"ended  round {of}")
    as_json = socflower("run case.toml --workers 0 --log-format json")
    lines = [json.loads(line) for line in as_json.err.splitlines()]
    assert [line["round"] for line in lines if line["text"] == "round"] == list(range(int(of) + 1))
    assert all({"at_s", "level", "text"} <= line.keys() for line in lines)
