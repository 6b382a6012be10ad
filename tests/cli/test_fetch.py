"""`socflower fetch` makes of a run's log what the command that submitted it would have written."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from socflower.engines.deployment import remote_superlink
from socflower.engines.deployment.outcome_lines import to_lines
from socflower.engines.deployment.submitted_run import FlwrClient, RunLog
from tests.command_line import Socflower, is_mistake
from tests.one_line import one_line
from tests.scenario.app.test_remote_main import Rack
from tests.scenario.small_runs import small, without_drawing

pytestmark = pytest.mark.usefixtures("on_few_digits")
SUPERLINK = ("--superlink", "127.0.0.1:1")


@pytest.fixture
def logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that `flwr log` prints, of a run that has ended."""
    log = tmp_path / "log"

    class Client(FlwrClient):
        def _follow(self, command: list[str]) -> RunLog:
            assert command[:3] == ["flwr", "log", "7"], "nothing is submitted"
            shown = self._folder / "shown"
            with shown.open("wb") as stream:
                program = "import sys; sys.stdout.write(open(sys.argv[1]).read())"
                process = subprocess.Popen([sys.executable, "-c", program, log], stdout=stream)
            return RunLog(process, shown)

        def status(self, run_id: int) -> str:
            return "finished:completed"

        def stop(self, run_id: int) -> None:
            raise AssertionError("a run that is only read is not stopped")

    monkeypatch.setattr(remote_superlink, "FlwrClient", Client)
    return log


@pytest.fixture
def rack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Rack]:
    yield Rack(tmp_path, capsys)


def write(log: Path, documents: list[tuple[str, Any]]) -> None:
    lines = [line for kind, document in documents for line in to_lines(kind, document)]
    log.write_text("".join(f"{line}\n" for line in ["something of Flower", *lines]))


def test_results_and_model_of_a_run_come_from_its_log(
    rack: Rack, logged: Path, socflower: Socflower, tmp_path: Path
) -> None:
    write(logged, rack.run(small(), **{"send-model": True}))
    ran = socflower("fetch 7", *SUPERLINK, "--out", "got", "--save-model", "model.npz", "--json")
    assert ran.status == 0, ran.err[-2000:]
    here = without_drawing(small(), tmp_path / "here", save_model=tmp_path / "here.npz")
    result = json.loads(ran.out)
    assert result == json.loads((tmp_path / "got" / "result.json").read_text())
    for key in ("weights_sha256", "scenario", "final_accuracy", "energy_j"):
        assert result[key] == here[key], key
    with np.load(tmp_path / "model.npz") as got, np.load(tmp_path / "here.npz") as own:
        assert got.files == own.files
        assert all(np.array_equal(got[name], own[name]) for name in own.files)
    assert {path.name for path in (tmp_path / "got").iterdir()} >= {"result.json", "report.html"}


def test_what_cannot_be_fetched_is_a_line(rack: Rack, logged: Path, socflower: Socflower) -> None:
    documents = rack.run(small())
    logged.write_text("something of Flower\n")
    is_mistake(socflower("fetch 7", *SUPERLINK, "--out", "got"), "run 7", "no scenario")
    write(logged, documents)
    ran = socflower("fetch 7", *SUPERLINK, "--out", "got", "--save-model", "model.npz")
    # Its rounds are shown before.
    assert ran.status == 2
    one_line(ran.err.splitlines()[-1], "error: ", "run 7", "--save-model")
    write(logged, [found for found in documents if found[0] != "outcome"])
    ran = socflower("fetch 7", *SUPERLINK, "--out", "got")
    assert ran.status == 1 and "run 7" in ran.err and "finished:completed" in ran.err
    is_mistake(socflower("fetch 7"), "--superlink")
