"""Runs on one rack's nodes, which keep states beside each other, and what such a run sends back."""

import itertools
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict, UserConfig

from socflower.engines.deployment.outcome_lines import LineReader, ReceivedFile
from socflower.engines.local.grid import LocalGrid
from socflower.scenario.app import remote_main
from socflower.scenario.app.deployed import app_in_bundle
from socflower.scenario.schema.scenario_file import Scenario
from tests.one_line import one_line
from tests.scenario.small_runs import small, without_drawing
from tests.scenario.test_resume import Stopped, stopping
from tests.scenario.test_split_runs import split

pytestmark = pytest.mark.usefixtures("on_few_digits")


class Rack:
    """A SuperLink's machine and its nodes; each run has a process of its own on a real one."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        self._run_ids = itertools.count(2**63 + 1)

    def run(
        self, scenario: Scenario, checkpoints: str = "", **config: Any
    ) -> list[tuple[str, Any]]:
        """Return the documents in the run's log; after a `Stopped`, those until then."""
        run_id = next(self._run_ids)
        app = self.folder / f"app-{run_id}"
        app_in_bundle(scenario).write(app, {})
        run_config: UserConfig = {
            "checkpoint-folder": checkpoints and str(self.folder / checkpoints),
            **config,
        }
        with LocalGrid(
            remote_main.bundled_client_app(app), 4, run_config=run_config, num_workers=0
        ) as grid:
            for node, context in grid._contexts.items():
                context.node_config["state-folder"] = str(self.folder / f"node-{node}")
            with suppress(Stopped):
                context = Context(run_id, 0, {}, RecordDict(), run_config)
                remote_main.bundled_server_app(app)(grid, context)
        reader, lines = LineReader(), self._capsys.readouterr().out.splitlines()
        return [found for line in lines for found in reader.feed(line)]

    def states(self) -> set[str]:
        """The nodes' folders of trainings."""
        return {path.name for path in self.folder.glob("node-*/*") if path.is_dir()}


@pytest.fixture
def rack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Rack]:
    yield Rack(tmp_path, capsys)
    remote_main._checkpoints.cache_clear()


def outcome(documents: list[tuple[str, Any]]) -> dict[str, Any]:
    (found,) = [document for kind, document in documents if kind == "outcome"]
    assert "error" not in found, found
    return dict(found)


@pytest.mark.parametrize(
    ("name", "between"),
    [
        ("socflow", {"checkpoints": "second"}),
        ("edge-only", {"checkpoints": "second"}),
        ("edge-only", {}),
    ],
)
def test_a_second_run_of_a_scenario_leaves_the_states_of_an_interrupted_one(
    rack: Rack,
    tmp_path: Path,
    name: str,
    between: dict[str, Any],
) -> None:
    scenario = small(epochs=2, interval=1.0) if name == "socflow" else split(name)
    with stopping((1).__eq__):
        assert "outcome" not in dict(rack.run(scenario, "first"))
    second = outcome(rack.run(scenario, **between))
    first = outcome(rack.run(scenario, "first"))
    assert (first["resumed_from"], second["resumed_from"]) == ([1], [])
    assert first["weights_sha256"] == second["weights_sha256"]
    assert len(rack.states()) == (2 if between else 1), (
        "a run that cannot be resumed keeps no states"
    )
    assert not list(tmp_path.glob("first/*")) and not list(tmp_path.glob("second/*"))


def test_a_training_that_starts_anew_in_the_folder_of_another_does_not_find_its_states(
    rack: Rack,
) -> None:
    scenario = small(epochs=2, interval=1.0)
    for fresh in (False, True):
        with stopping((1).__eq__):
            rack.run(scenario, "kept", fresh=fresh)
    assert len(rack.states()) == 2
    outcome(rack.run(scenario, "kept"))
    assert len(rack.states()) == 2, "resumed, it goes on in the folder of the second"


@pytest.mark.slow
def test_of_a_series_one_trains_and_the_next_goes_on_until_the_end(rack: Rack) -> None:
    """What is fresh is so once; and one that gets the lock after the end does nothing."""
    scenario, series = small(epochs=2, interval=1.0), {"series": "a", "fresh": True}
    with stopping((1).__eq__):
        rack.run(scenario, "kept")
    with stopping((1).__eq__):
        begun = dict(rack.run(scenario, "kept", **series))
    taken_over = rack.run(scenario, "kept", **series)
    assert (begun["resumed"], dict(taken_over)["resumed"]) == (
        {"after_round": 0},
        {"after_round": 1},
    )
    assert outcome(taken_over)["resumed_from"] == [1]
    assert [kind for kind, _ in rack.run(scenario, "kept", **series)] == ["scenario", "ready"]
    assert outcome(rack.run(scenario, "kept", series="b"))["resumed_from"] == []


def test_a_run_that_is_stopped_is_not_taken_over(rack: Rack) -> None:
    """SIGINT is how Flower's process learns of `flwr stop`; it comes here at the end of a round."""
    scenario = small(epochs=2, interval=1.0)

    def stop(server_round: int) -> bool:
        if server_round == 1:
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        return server_round == 1

    with stopping(stop):
        rack.run(scenario, "kept", series="a")
    assert [kind for kind, _ in rack.run(scenario, "kept", series="a")] == ["scenario", "ready"]
    assert outcome(rack.run(scenario, "kept", series="b"))["resumed_from"] == [1]


def test_the_model_comes_back_if_it_is_asked_for(rack: Rack, tmp_path: Path) -> None:
    here = tmp_path / "here.npz"
    without_drawing(small(), tmp_path / "out", save_model=here)
    documents = rack.run(small(), **{"send-model": True})
    received = ReceivedFile(tmp_path / "model.npz")
    for kind, document in documents:
        if kind == "model":
            received.add(document)
    outcome(documents)
    assert received.is_whole
    with np.load(here) as own, np.load(tmp_path / "model.npz") as sent:
        assert own.files == sent.files
        for key in own.files:
            np.testing.assert_array_equal(own[key], sent[key])
    assert "model" not in dict(rack.run(small()))


def test_a_model_that_no_log_carries_is_refused_before_anything_is_trained(
    rack: Rack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_main, "MAX_FILE_BYTES", 2**20 + 200_000)
    _, (kind, error) = rack.run(small(), **{"send-model": True})
    assert kind == "outcome" and error["kind"] == "ConfigError"
    one_line(error["error"], "--save-model", "247 kB", "--superlink")
