"""Faults on purpose: what is dropped is reported, what remains is averaged, and a client's mistake ends the run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord

from socflower.engines.local.grid import LocalGrid
from socflower.engines.local.workers import AppReference
from socflower.engines.run_folder import RunFolder
from socflower.errors import InfeasiblePlan, TrainingFailed
from socflower.hierarchy import group_steps_per_epoch, plan_groups
from socflower.scenario.app.round_record import weights_sha256
from socflower.scenario.app.training import train
from socflower.scenario.prepared_run import PreparedRun
from socflower.scenario.runner import run_scenario, run_to_folder
from socflower.scenario.schema.config import EventConfig, TrainConfig
from socflower.scenario.schema.file import scenario_cluster
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.workload import initial_model
from socflower.strategies.records import aggregate_records
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.training.group import train_group
from socflower.training.schedules import cosine_annealing
from socflower.wire.message_keys import GroupTask
from socflower.workloads.sources import load_data
from tests.one_line import one_line, refused
from tests.scenario.small_runs import small, small_result

pytestmark = pytest.mark.usefixtures("on_few_digits")


def event(kind: str, soc: int, server_round: int = 1) -> EventConfig:
    return EventConfig(kind=kind, soc=soc, round=server_round)


def events_by_round(result: dict[str, Any]) -> dict[int, list[dict[str, str]]]:
    return {entry["round"]: entry["events"] for entry in result["rounds"] if entry["events"]}


def failure(scenario: Scenario, out: Path) -> str:
    """Return the one line with which a run fails; it must leave nothing behind."""
    line = refused(lambda: run_to_folder(scenario, out, num_workers=0), error=TrainingFailed)
    assert not out.exists()
    return line


def trained_by_hand(scenario: Scenario, group_id: int, num_groups: int) -> tuple[ArrayRecord, int]:
    """Return what one group makes of the first weights in an epoch, and its samples: no Flower in between."""
    data, settings = load_data(scenario.data.name).train, scenario.train
    group = plan_groups(scenario_cluster(scenario), num_groups).groups[group_id]
    num_steps = group_steps_per_epoch(len(data), num_groups, settings.batch_size)
    task = GroupTask(
        group_id=group_id,
        num_groups=num_groups,
        members=group.members,
        leader=group.leader,
        partitions=group.members,
        num_partitions=6,
        capacities=(1.0,) * len(group.members),
        first_step=0,
        num_steps=num_steps,
        steps_per_epoch=num_steps,
        total_steps=num_steps,
        batch_size=settings.batch_size,
        reshuffle=True,
        deal_epoch=0,
        seed=scenario.seed,
        num_samples=len(data),
    )
    trainer = FP32Trainer(
        optimizer=sgd(settings.learning_rate, scenario.momentum),
        scheduler=cosine_annealing,
        channels_last=True,
    )
    model, num_threads = initial_model(scenario), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        num_samples = train_group(model, data, task, trainer).num_samples
    finally:
        torch.set_num_threads(num_threads)
    return ArrayRecord(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    ), num_samples


def test_a_group_that_answers_nan_is_left_out_of_the_average_and_reported_once() -> None:
    scenario = small(
        boards=(2, 2, 2), groups=3, interval=1.0, leaders="star", events=(event("nan", soc=3),)
    )
    result = run_scenario(scenario, num_workers=0)
    assert list(events_by_round(result)) == [1]
    (report,) = events_by_round(result)[1]
    assert report["kind"] == "not-finite"
    # SoC 3 is a member; its leader, SoC 2, speaks for the group.
    assert all(part in report["text"] for part in ("group 1", "SoC 2", "0.weight", "NaN"))
    others = [trained_by_hand(scenario, group_id, 3) for group_id in (0, 2)]
    expected = aggregate_records(
        [arrays for arrays, _ in others], [float(samples) for _, samples in others]
    )
    assert result["weights_sha256"] == weights_sha256(expected)
    assert result["final_accuracy"] > 0.3


def test_without_the_fault_the_average_is_of_all_groups() -> None:
    """The reference of the test above is a reference."""
    scenario = small(boards=(2, 2, 2), groups=3, interval=1.0, leaders="star")
    parts = [trained_by_hand(scenario, group_id, 3) for group_id in range(3)]
    expected = aggregate_records(
        [arrays for arrays, _ in parts], [float(samples) for _, samples in parts]
    )
    assert run_scenario(scenario, num_workers=0)["weights_sha256"] == weights_sha256(expected)


def test_a_group_that_was_dropped_is_back_in_the_next_round() -> None:
    result = run_scenario(
        small(interval=0.25, events=(event("nan", 0, 2), event("nan", 2, 3))), num_workers=0
    )
    found = [(number, event["text"]) for number, (event,) in events_by_round(result).items()]
    assert [number for number, _ in found] == [2, 3]
    assert found[0][1].startswith("group 0, SoC 0 (node 1000)")
    assert found[1][1].startswith("group 1, SoC 2 (node 1002)")


def test_if_all_groups_answer_nan_the_run_fails_with_the_first_cause(tmp_path: Path) -> None:
    text = failure(small(events=(event("nan", 0, 2), event("nan", 3, 2))), tmp_path / "out")
    one_line(text, "first cause: group 0, SoC 0", "0.weight")


def test_training_that_diverges_everywhere_fails_with_advice(tmp_path: Path) -> None:
    scenario = small().replaced(train=TrainConfig(epochs=1, batch_size=128, learning_rate=1e9))
    assert "lower learning rate" in failure(scenario, tmp_path / "out")


def test_a_client_that_raises_ends_the_run_with_its_words(tmp_path: Path) -> None:
    text = failure(small(events=(event("raise", soc=3, server_round=2),)), tmp_path / "out")
    one_line(text, "group 1", "SoC 2", "RuntimeError", "fault on purpose in round 2")


def test_a_client_that_raises_is_dropped_and_reported_where_that_is_tolerated() -> None:
    scenario = small(events=(event("raise", soc=3, server_round=2),), tolerate_client_errors=True)
    reports = events_by_round(run_scenario(scenario, num_workers=0))
    assert list(reports) == [2]
    (report,) = reports[2]
    assert report["kind"] == "client-raised"
    assert "group 1, SoC 2" in report["text"] and "fault on purpose in round 2" in report["text"]


@pytest.mark.parametrize("kind", ["die", "hang"])
def test_what_would_take_this_process_with_it_needs_workers(kind: str) -> None:
    scenario = small(events=(event(kind, soc=0),))
    refused(lambda: run_scenario(scenario, num_workers=0), "--workers")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_event_for_a_soc_that_does_not_exist_is_refused(
    num_workers: int, tmp_path: Path
) -> None:
    scenario, out = small(events=(event("nan", soc=4),)), tmp_path / "out"
    refused(lambda: run_to_folder(scenario, out, num_workers=num_workers), "soc = 4", "0 to 3")
    assert not out.exists()


def test_fedavg_reports_a_client_that_raises_if_that_is_tolerated() -> None:
    scenario = small("fedavg", events=(event("raise", soc=3),), tolerate_client_errors=True)
    result = run_scenario(scenario, num_workers=0)
    (report,) = events_by_round(result)[1]
    assert report["kind"] == "client-raised" and report["text"].startswith("SoC 3 (node 1003)")
    assert result["weights_sha256"] != small_result("fedavg")["weights_sha256"]


def test_fedavg_of_clients_that_all_raise_fails(tmp_path: Path) -> None:
    scenario = small("fedavg", events=tuple(event("raise", soc) for soc in range(4)))
    one_line(failure(scenario, tmp_path / "out"), "SoC 0 (node 1000)", "raised")


def test_fedavg_never_averages_nan_in() -> None:
    result = run_scenario(small("fedavg", events=(event("nan", soc=2),)), num_workers=0)
    assert [report["kind"] for report in events_by_round(result)[1]] == ["not-finite"]
    assert result["final_accuracy"] > 0.2  # an average with NaN guesses one class: 0.1


@pytest.mark.slow
def test_events_strike_every_number_of_groups_that_a_warm_up_tries() -> None:
    scenario = small("socflow", groups="auto", epochs=2, batch_size=8, interval=0.0625)
    result = run_scenario(scenario.replaced(events=(event("nan", soc=0),)), num_workers=0)
    assert result["warm_up"]["num_rounds"] > 0 and result["warm_up"]["num_groups"] >= 2
    assert [report["kind"] for report in events_by_round(result)[1]] == ["not-finite"]


@pytest.mark.parametrize("strategy", ["socflow", "fedavg"])
def test_an_event_that_could_never_strike_is_refused(strategy: str) -> None:
    late = small(strategy, events=(event("nan", soc=0, server_round=99),))
    refused(lambda: run_scenario(late, num_workers=0), "[[event]] round = 99")
    idle = small(strategy, socs=2, events=(event("nan", soc=3),))
    refused(lambda: run_scenario(idle, num_workers=0), "[[event]] soc = 3", "0, 1")


@pytest.mark.parametrize("num_nodes", [3, 5])
def test_fedavg_on_more_or_fewer_nodes_than_the_scenario_has_socs_is_refused(
    num_nodes: int, tmp_path: Path
) -> None:
    client_app = AppReference(target="socflower.scenario.app.main:client_app")
    with LocalGrid(client_app, num_nodes, num_workers=0) as grid:
        run = RunFolder(tmp_path)
        refused(
            lambda: train(PreparedRun(small("fedavg")), grid, run),
            "4 SoCs",
            f"{num_nodes} nodes",
            error=InfeasiblePlan,
        )
