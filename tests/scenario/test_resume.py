"""A run that was interrupted after any round and resumed ends as one that was not: weights, rounds, totals, trace."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from socflower.cluster.cluster_file import BoardTable, ClusterTable, SiteTable
from socflower.engines.checkpoint import Checkpoint, CheckpointFolder
from socflower.errors import TrainingFailed
from socflower.scenario import workload
from socflower.scenario.app import main as app
from socflower.scenario.app import strategy as run_strategy
from socflower.scenario.runner import run_to_folder
from socflower.scenario.schema.config import EventConfig, PrecisionConfig
from socflower.scenario.schema.outer import OuterConfig
from socflower.scenario.schema.scenario_file import Scenario
from tests.one_line import one_line, refused
from tests.scenario.small_runs import Reference, small, without_drawing

pytestmark = pytest.mark.usefixtures("on_few_digits")


class Stopped(BaseException):
    """As Ctrl-C: no `except Exception` stops it."""


@contextmanager
def stopping(when: Callable[[int], bool]) -> Iterator[None]:
    write = CheckpointFolder.write

    def write_and_stop(self: CheckpointFolder, checkpoint: Checkpoint, *arguments: Any) -> None:
        write(self, checkpoint, *arguments)
        if when(checkpoint.server_round):
            raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFolder, "write", write_and_stop)
        yield


def stop_after(scenario: Scenario, out: Path, server_round: int, **settings: Any) -> None:
    with stopping(server_round.__eq__), pytest.raises(Stopped):
        run_to_folder(scenario, out, resumable=True, **{"num_workers": 0, **settings})
    assert not (out / "result.json").exists()


def resume(scenario: Scenario, out: Path, **settings: Any) -> dict[str, Any]:
    return without_drawing(scenario, out, resumable=True, **settings)


def same_training(result: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in result.items()
        if key not in ("wall_s", "resumed_from", "engine")
    }


def assert_ends_as(reference: Path, out: Path) -> dict[str, Any]:
    files = {path.name for path in out.iterdir()}
    assert files == {"report.html", "result.json", "trace.json"}
    ours, theirs = (json.loads((folder / "result.json").read_text()) for folder in (out, reference))
    assert same_training(ours) == same_training(theirs)
    assert (out / "trace.json").read_bytes() == (reference / "trace.json").read_bytes()
    return dict(ours)


def with_precision(scenario: Scenario, **precision: Any) -> Scenario:
    return scenario.replaced(precision=PrecisionConfig(**precision))


def with_outer(scenario: Scenario, name: str, **arguments: float) -> Scenario:
    return scenario.replaced(
        strategy=scenario.strategy.replaced(outer=OuterConfig(name=name, arguments=arguments))
    )


CASES: dict[str, Scenario] = {
    "socflow": small(interval=0.25),
    "socflow without reshuffling": small(interval=0.5, reshuffle=False, epochs=2),
    "preempted": small(
        epochs=3,
        events=(
            EventConfig(kind="preempt", soc=1, round=2, rounds=2),
            EventConfig(kind="preempt", soc=0, round=3),
        ),
    ),
    "outer moments": with_outer(small(interval=0.5), name="fedadam", eta=0.01),
    "outer momentum, preempted": with_outer(
        small(epochs=3, events=(EventConfig(kind="preempt", soc=1, round=2, rounds=1),)),
        name="fedavgm",
        server_momentum=0.5,
    ),
    "servers": small(
        interval=0.25,
        groups=4,
        server_interval=3,
        boards=(2,),
        site=SiteTable(servers=2),
    ),
    "leaders in eight bits, one preempted": small(
        interval=1.0,
        epochs=2,
        leaders="ring",
        leader_compression="int8",
        events=(EventConfig(kind="preempt", soc=0, round=2, rounds=1),),
    ),
    "gradients in eight bits, one preempted": small(
        interval=1.0,
        epochs=2,
        groups=1,
        compression="int8",
        events=(EventConfig(kind="preempt", soc=2, round=2, rounds=1),),
    ),
    "largest gradients": small(interval=0.5, epochs=2, groups=1, compression="dgc"),
    "low rank at a server": small(
        interval=0.5, epochs=2, groups=1, exchange="server", compression="powersgd rank=2"
    ),
    "hipress": small("hipress", epochs=2),
    "late group": small(groups=3, epochs=2, interval=0.5, quorum=0.6).replaced(
        cluster=ClusterTable(),
        boards=(BoardTable(socs=2), BoardTable(device="raspberry-pi-4b")),
    ),
    "ring": small("ring", epochs=3),
    "sgd": small("sgd", epochs=3),
    "diloco": small("diloco", groups="auto", epochs=2),
    "post-local-sgd": small("post-local-sgd", groups="auto", epochs=2),
    "streaming-diloco, one preempted": small(
        "streaming-diloco",
        groups="auto",
        interval=1.0,
        epochs=2,
        events=(EventConfig(kind="preempt", soc=0, round=2, rounds=1),),
    ),
    "spare SoCs": small(
        boards=(3, 3),
        socs=4,
        use_spares=True,
        epochs=2,
        events=(
            EventConfig(kind="preempt", soc=0, round=1, rounds=2),
            EventConfig(kind="preempt", soc=3, round=3, rounds=1),
        ),
    ),
    "tree-fedavg": small("tree-fedavg", groups="auto", epochs=2),
    "fedavg": small("fedavg", epochs=3),
    "int8": with_precision(small(), arithmetic="int8"),
    "adaptive fixed point": with_precision(
        small(), arithmetic="int8", algorithm="adaptive-fixed-point"
    ),
    "mixed": with_precision(small(interval=0.25), arithmetic="mixed"),
    "mixed fedavg": with_precision(small("fedavg", epochs=2), arithmetic="mixed"),
}

# What another case keeps in the same files: gradients' residuals, leaders' models, and the strategy's state.
SLOW = (
    "largest gradients",
    "low rank at a server",
    "hipress",
    "diloco",
    "post-local-sgd",
    "tree-fedavg",
    "ring",
    "preempted",
    "outer momentum, preempted",
    "socflow without reshuffling",
    "adaptive fixed point",
    "sgd",
    "mixed",
    "mixed fedavg",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES]
)
def test_resuming_after_every_single_round_changes_nothing(
    name: str, reference: Reference, tmp_path: Path
) -> None:
    """The k-th process does round k alone: nothing but the files can have carried anything over."""
    scenario, out = CASES[name], tmp_path / "out"
    undisturbed = json.loads((reference(scenario) / "result.json").read_text())
    last = len(undisturbed["rounds"]) - 1
    for server_round in range(1, last + 1):
        stop_after(scenario, out, server_round)
    result = resume(scenario, out)
    assert result["resumed_from"] == list(range(1, last + 1))
    assert undisturbed["resumed_from"] == []
    assert_ends_as(reference(scenario), out)


def test_a_run_without_interruption_leaves_no_checkpoint(
    reference: Reference, tmp_path: Path
) -> None:
    """Nor does more than without checkpoints cross the hub, which is in the result."""
    resume(small(), tmp_path / "out")
    assert assert_ends_as(reference(small()), tmp_path / "out")["resumed_from"] == []


def test_a_resumed_run_draws_its_report(tmp_path: Path) -> None:
    """From its result, which is compared in the tests above."""
    stop_after(small(), tmp_path, 1)
    run_to_folder(small(), tmp_path, num_workers=0, resumable=True)
    assert (tmp_path / "report.html").read_text("utf-8").startswith("<!DOCTYPE html>")


def test_each_round_is_told_once_those_before_included(tmp_path: Path) -> None:
    stop_after(small(interval=0.25), tmp_path, 2)
    told: list[dict[str, Any]] = []
    said: list[str] = []
    result = resume(small(interval=0.25), tmp_path, on_round=told.append, on_notice=said.append)
    assert [entry["round"] for entry in told] == [0, 1, 2, 3, 4]
    assert told == [{**entry, "num_rounds": 4} for entry in result["rounds"]]
    (line,) = said
    one_line(line, tmp_path, "after round 2 of 4", "--fresh")


def test_a_damaged_checkpoint_costs_one_round_and_no_exactness(
    reference: Reference, tmp_path: Path
) -> None:
    scenario, out = small(interval=0.25), tmp_path / "out"
    stop_after(scenario, out, 3)
    newest = out / "checkpoint" / "round-000003.ckpt"
    newest.write_bytes(newest.read_bytes()[:-1])
    said: list[str] = []
    resume(scenario, out, on_notice=said.append)
    assert assert_ends_as(reference(scenario), out)["resumed_from"] == [2]
    assert len(said) == 2 and "round-000003.ckpt" in said[0] and "after round 2 of 4" in said[1]


def test_clients_may_be_two_rounds_ahead_of_the_checkpoint_that_is_used(
    reference: Reference, tmp_path: Path
) -> None:
    """Killed when the clients had done round 4 and the server had not kept it; then round 3 is found damaged."""
    scenario, out = small(interval=0.25), tmp_path / "out"
    write = CheckpointFolder.write

    def stop_before_writing(
        self: CheckpointFolder, checkpoint: Checkpoint, *arguments: Any
    ) -> None:
        if checkpoint.server_round == 4:
            raise Stopped
        write(self, checkpoint, *arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(CheckpointFolder, "write", stop_before_writing)
        run_to_folder(scenario, out, resumable=True, num_workers=0)
    newest = out / "checkpoint" / "round-000003.ckpt"
    newest.write_bytes(newest.read_bytes() + b"?")
    assert resume(scenario, out)["resumed_from"] == [2]
    assert_ends_as(reference(scenario), out)


# ------------------------------------------------------------------------------------------- what clients keep
def test_a_group_whose_state_is_lost_is_named_and_not_trained_without_it(tmp_path: Path) -> None:
    scenario = small(
        interval=0.25, tolerate_client_errors=True
    )  # which must not let it pass either
    stop_after(scenario, tmp_path, 2)
    for path in (tmp_path / "checkpoint" / "clients").glob("group-1-*"):
        path.unlink()
    named = ("group 1", "no trainer state", "--fresh")
    refused(lambda: resume(scenario, tmp_path), *named, error=TrainingFailed)
    # What was there is still there.
    assert (tmp_path / "checkpoint" / "round-000002.ckpt").exists()


def test_a_groups_damaged_state_is_told(tmp_path: Path) -> None:
    stop_after(small(), tmp_path, 1)
    for path in (tmp_path / "checkpoint" / "clients").glob("group-0-*"):
        path.write_bytes(path.read_bytes()[:-1])
    refused(lambda: resume(small(), tmp_path), "group 0", "digest", error=TrainingFailed)


def test_clients_keep_three_states_of_each_group(tmp_path: Path) -> None:
    stop_after(small(interval=0.125), tmp_path, 7)
    states = [path.name for path in (tmp_path / "checkpoint" / "clients").iterdir()]
    for group in (0, 1):
        assert sum(name.startswith(f"group-{group}-") for name in states) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["socflow", "fedavg"])
def test_a_model_with_dropout_repeats(
    name: str,
    reference: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = app.initial_model

    def with_dropout(scenario: Scenario) -> nn.Module:
        return nn.Sequential(nn.Dropout(0.3), plain(scenario))

    monkeypatch.setattr(app, "initial_model", with_dropout)
    monkeypatch.setattr(workload, "initial_model", with_dropout)
    scenario = small(name, interval=0.5) if name == "socflow" else small(name, epochs=2)
    torch.manual_seed(1)
    undisturbed = without_drawing(scenario, tmp_path / "reference")
    before = torch.random.get_rng_state()
    stop_after(scenario, tmp_path / "out", 1)
    torch.manual_seed(2)  # another process has other random numbers
    resume(scenario, tmp_path / "out")
    assert_ends_as(tmp_path / "reference", tmp_path / "out")
    assert torch.equal(before, torch.random.get_rng_state()) is False
    monkeypatch.undo()
    plain_weights = json.loads((reference(scenario) / "result.json").read_text())["weights_sha256"]
    assert plain_weights != undisturbed["weights_sha256"]


# ---------------------------------------------------------------------------------------------------- groups
@pytest.mark.slow
def test_groups_auto_is_tried_out_once(
    reference: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario = small(groups="auto", epochs=2, batch_size=8, interval=0.0625)
    undisturbed, out = reference(scenario), tmp_path / "out"
    warm_up = json.loads((undisturbed / "result.json").read_text())["warm_up"]
    last = warm_up["num_rounds"]
    assert last > 0
    # Killed in the middle of the warm-up, it is tried out from the beginning.
    calls: list[int] = []
    score = run_strategy._score

    def score_or_stop(metrics: Any) -> float:
        calls.append(1)
        if len(calls) == 4:
            raise Stopped
        return score(metrics)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(run_strategy, "_score", score_or_stop)
        run_to_folder(scenario, out, resumable=True, num_workers=0)
    stop_after(scenario, out, last)  # at once after the warm-up
    monkeypatch.setattr(run_strategy, "warm_up", lambda *_, **__: pytest.fail("tried out again"))
    stop_after(scenario, out, last + 1)
    resume(scenario, out)
    assert assert_ends_as(undisturbed, out)["resumed_from"] == [last, last + 1]


# ---------------------------------------------------------------------------------------------------- faults
def test_faults_strike_once_and_dropped_groups_go_on_as_they_would(
    reference: Reference, tmp_path: Path
) -> None:
    scenario = small(
        interval=0.25,
        tolerate_client_errors=True,
        events=(
            EventConfig(kind="nan", soc=0, round=1),
            EventConfig(kind="raise", soc=2, round=2),
            EventConfig(kind="raise", soc=0, round=3),
        ),
    )
    for server_round in (1, 2, 3):
        stop_after(scenario, tmp_path / "out", server_round)
    resume(scenario, tmp_path / "out")
    rounds = assert_ends_as(reference(scenario), tmp_path / "out")["rounds"]
    kinds = [[event["kind"] for event in entry["events"]] for entry in rounds]
    assert kinds == [[], ["not-finite"], ["client-raised"], ["client-raised"], []]


def test_a_training_that_fails_later_says_what_is_kept(tmp_path: Path) -> None:
    scenario = small(events=(EventConfig(kind="raise", soc=0, round=2),))
    named = ("fault on purpose in round 2", "round 1", "the same command")
    refused(lambda: resume(scenario, tmp_path), *named, error=TrainingFailed)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    refused(lambda: resume(scenario, tmp_path), *named, error=TrainingFailed)


def test_a_training_that_fails_at_once_leaves_nothing(tmp_path: Path) -> None:
    scenario = small(events=(EventConfig(kind="raise", soc=0, round=1),))
    line = refused(lambda: resume(scenario, tmp_path / "deep" / "out"), error=TrainingFailed)
    assert "kept" not in line
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------------------------------- other runs
def test_a_checkpoint_of_another_scenario_is_refused_and_stays(tmp_path: Path) -> None:
    stop_after(small(), tmp_path, 1)
    refused(lambda: resume(small(seed=2), tmp_path), "seed was 1", "2 now", "--fresh")
    refused(lambda: resume(small(groups=4), tmp_path), "strategy.groups was 2", "4 now")
    assert resume(small().replaced(expect={"min_accuracy": 0.1}, question="Other?"), tmp_path)[
        "resumed_from"
    ] == [1]


def test_fresh_starts_anew_whatever_is_there(reference: Reference, tmp_path: Path) -> None:
    stop_after(small(), tmp_path / "out", 1)
    resume(small(seed=2), tmp_path / "out", fresh=True)
    assert assert_ends_as(reference(small(seed=2)), tmp_path / "out")["resumed_from"] == []
