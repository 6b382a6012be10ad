"""Stages in processes of their own, against the same plan in one process; and what is left when some are lost."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord
from torch import Tensor

from socflower.engines.local.grid import LocalGrid
from socflower.errors import SocflowerError
from socflower.hierarchy import Rebalancing
from socflower.peers.ring.settings import RingSettings
from socflower.pipeline.plan import Policy
from socflower.pipeline.profiler.module_problem import pipeline_problem
from socflower.pipeline.replanning import recovered
from socflower.pipeline.runtime.group import train_pipeline
from socflower.strategies.group_grid import GroupGrid
from socflower.strategies.hybrid_pipeline import HybridPipeline
from socflower.strategies.settings import TrainingSchedule
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.wire.certificates import write_certificates
from socflower.workloads.map_dataset import as_data_source
from tests.pipeline.problems import straight_plan
from tests.process_grid import ProcessGrid
from tests.strategies.pipeline_app import (
    BATCH,
    NUM_SAMPLES,
    Sentences,
    client_app,
    node_configs,
    shelf,
    tagger,
)

pytestmark = pytest.mark.timeout(180)

LAYERS = pipeline_problem(
    tagger(), Sentences().tokens[:1], shelf(), batch_size=BATCH
).model.num_layers
PLANS = {
    "three stages": straight_plan((0, 1, LAYERS - 1), ((6,), (6,), (6,)), 4),
    "a stage of two": straight_plan((0, LAYERS - 1), ((2, 4), (6,)), 4),
    # Its order of passes stays after a loss if it fits, so that the whole planner finds a quicker plan.
    "all forward first": straight_plan(
        (0, 1, LAYERS - 1), ((6,), (6,), (6,)), 4, policy=Policy.BACKWARD_AFTER_FORWARD
    ),
}


def strategy(
    plan: str,
    num_epochs: int = 4,
    transport: str = "auto",
    interval_epochs: float = 2.0,
    **settings: Any,
) -> HybridPipeline:
    return HybridPipeline(
        problem=pipeline_problem(tagger(), Sentences().tokens[:1], shelf(), batch_size=BATCH),
        plan=PLANS[plan],
        schedule=TrainingSchedule(
            num_samples=NUM_SAMPLES,
            batch_size=BATCH,
            num_epochs=num_epochs,
            interval_epochs=interval_epochs,
        ),
        rings=RingSettings(
            transport=transport, heartbeat_s=2.0, rendezvous_s=20.0, leader_grace_s=5.0
        ),
        **settings,
    )


def train(grid: Any, plan: str, **settings: Any) -> tuple[dict[str, Tensor], HybridPipeline]:
    own = strategy(plan, **settings)
    result = own.start(
        GroupGrid(grid), ArrayRecord(tagger().state_dict()), num_rounds=own.num_rounds, timeout=60
    )
    return dict(result.arrays.to_torch_state_dict()), own


def in_one_process(plan: str, **settings: Any) -> dict[str, Tensor]:
    with LocalGrid(client_app(), 3, num_workers=0) as grid:
        return train(grid, plan, **settings)[0]


def on_processes(
    plan: str, of_soc: dict[int, dict[str, Any]] | None = None, **settings: Any
) -> tuple[dict[str, Tensor], HybridPipeline]:
    with ProcessGrid(client_app, node_configs(of_soc)) as grid:
        return train(grid, plan, **settings)


@pytest.mark.parametrize(
    ("plan", "transport"),
    [
        ("a stage of two", "gloo"),
        pytest.param("a stage of two", "grpc", marks=pytest.mark.slow),
        pytest.param("three stages", "gloo", marks=pytest.mark.slow),
        pytest.param("three stages", "grpc", marks=pytest.mark.slow),
    ],
)
def test_stages_in_processes_train_the_bits_of_one_process(plan: str, transport: str) -> None:
    ours, own = on_processes(plan, transport=transport)
    reference = in_one_process(plan)
    assert [event.text for report in own.reports for event in report.events] == []
    assert own.method.describe().transports()["inside groups"] == transport
    assert ours.keys() == reference.keys() and all(
        torch.equal(ours[name], reference[name]) for name in ours
    )


def test_nodes_without_data_get_their_samples_from_another_one() -> None:
    PLANS["samples on 1"] = replace(PLANS["a stage of two"], samples_on=1)
    others = {0: {"no-data": True}, 2: {"no-data": True}}
    ours, own = on_processes("samples on 1", others, num_epochs=2)
    assert [event.text for report in own.reports for event in report.events] == []
    reference = in_one_process("a stage of two", num_epochs=2)
    assert all(torch.equal(ours[name], reference[name]) for name in reference)


@pytest.mark.slow
def test_the_loss_of_the_only_samples_ends_the_training() -> None:
    PLANS["samples on 1"] = replace(PLANS["three stages"], samples_on=1)
    nodes: dict[int, dict[str, Any]] = {0: {"no-data": True}, 2: {"no-data": True}}
    with pytest.raises(SocflowerError, match="no group sent a usable model"):
        on_processes("samples on 1", {**nodes, 1: {"dies-at-forward": 6}}, num_epochs=2)


@pytest.mark.parametrize(
    ("plan", "soc", "fault", "backup_steps", "transport"),
    [
        ("three stages", 1, {"dies-at-backward": 14}, 2, "gloo"),
        pytest.param(
            "three stages", 1, {"dies-at-backward": 14}, 2, "grpc", marks=pytest.mark.slow
        ),
        pytest.param(
            "a stage of two", 1, {"stops-at-forward": 6}, 0, "grpc", marks=pytest.mark.slow
        ),
        pytest.param("three stages", 0, {"dies-at-forward": 16}, 2, "gloo", marks=pytest.mark.slow),
        pytest.param("three stages", 2, {"dies-at-forward": 18}, 1, "gloo", marks=pytest.mark.slow),
        pytest.param(
            "three stages", 2, {"stops-at-backward": 6}, 0, "gloo", marks=pytest.mark.slow
        ),
        pytest.param(
            "a stage of two", 1, {"dies-at-forward": 6}, 0, "gloo", marks=pytest.mark.slow
        ),
    ],
)
def test_a_lost_device_leaves_the_bits_of_a_run_that_was_planned_so(
    plan: str,
    soc: int,
    fault: dict[str, Any],
    backup_steps: int,
    transport: str,
) -> None:
    ours, own = on_processes(
        plan, {soc: fault}, backup_steps=backup_steps, num_epochs=2, transport=transport
    )
    (report,) = own.reports
    said = " ".join(event.text for event in report.events)
    step = int(re.search(r"continues from update (\d+)", said)[1])  # type: ignore[index]
    assert step % max(1, backup_steps) == 0 and (not backup_steps or step)
    planned = planned_so(plan, soc, step, own)
    assert all(torch.equal(ours[name], planned[name]) for name in planned)
    undisturbed = in_one_process(plan, num_epochs=2)
    assert all(torch.allclose(ours[name], undisturbed[name], atol=1e-5) for name in undisturbed)


def planned_so(plan: str, soc: int, step: int, own: HybridPipeline) -> dict[str, Tensor]:
    """Return the weights of a run that was planned to lose a device before an update."""
    model, trainer = tagger(), FP32Trainer(optimizer=sgd(0.2), device="cpu")
    task = own.method.messages.task(own.plan.groups[0], own.method.sync.intervals[0])
    data = as_data_source(Sentences())
    state = (
        train_pipeline(model, data, replace(task, num_steps=step), PLANS[plan], trainer).end.state
        if step
        else None
    )
    present = {*PLANS[plan].socs} - {soc}
    planned = own.method.work.latest
    assert planned is not None
    train_pipeline(
        model,
        data,
        replace(task, first_step=step, num_steps=task.num_steps - step),
        recovered(PLANS[plan], planned.problem, present),
        trainer,
        state,
    )
    return dict(model.state_dict())


@pytest.mark.slow
def test_a_device_that_is_slower_gets_fewer_samples_within_the_round_and_a_plan_of_its_own_in_the_next() -> (
    None
):
    ours, own = on_processes(
        "a stage of two",
        {0: {"sample-s": 0.002}, 1: {"sample-s": 0.008}, 2: {"sample-s": 0.002}},
        rebalancing=Rebalancing(steps=2),
    )
    said = [event.text for report in own.reports for event in report.events]
    assert any("new shares after 2 updates" in text for text in said), said
    assert own.pipeline.plan != PLANS["a stage of two"]  # device 1 measured a fraction of its speed
    reference = in_one_process("a stage of two")
    assert all(torch.allclose(ours[name], reference[name], atol=1e-5) for name in reference)


@pytest.mark.slow
def test_layers_leave_a_device_that_is_slow_alone_in_its_stage_within_the_round() -> None:
    slow = {0: {"sample-s": 0.002}, 1: {"sample-s": 0.03}, 2: {"sample-s": 0.002}}
    ours, own = on_processes("three stages", slow, rebalancing=Rebalancing(steps=2), num_epochs=2)
    said = [event.text for report in own.reports for event in report.events]
    assert any("another plan after 2 updates, for the measured speeds" in text for text in said)
    reference = in_one_process("three stages", num_epochs=2)
    assert all(torch.allclose(ours[name], reference[name], atol=1e-5) for name in reference)


@pytest.mark.slow
def test_the_whole_planner_s_plan_replaces_the_light_one_within_the_round() -> None:
    settings: dict[str, Any] = {"num_epochs": 12, "interval_epochs": 12.0}
    # Passes are slow, so that planning ends within the round.
    nodes: dict[int, dict[str, Any]] = {soc: {"sample-s": 0.005} for soc in range(3)}
    nodes[1]["dies-at-forward"] = 14
    ours, own = on_processes("all forward first", nodes, backup_steps=2, **settings)
    (report,) = own.reports
    said = " ".join(event.text for event in report.events)
    light, heavy = (
        re.search(rf"{text} (\d+)", said)
        for text in ("continues from update", "another plan after")
    )
    assert light and heavy and "for the whole planner" in said, said
    assert int(heavy[1]) - int(light[1]) >= 4 and (int(heavy[1]) - int(light[1])) % 4 == 0
    reference = in_one_process("all forward first", **settings)
    assert all(torch.allclose(ours[name], reference[name], atol=1e-5) for name in reference)


@pytest.mark.slow
def test_of_two_devices_that_are_lost_together_the_leader_has_what_the_round_began_with() -> None:
    ours, own = on_processes("three stages", {1: {"dies-at-forward": 9}, 2: {"dies-at-forward": 9}})
    reference = in_one_process("three stages")
    assert (
        sum(event.kind == "member-lost" for report in own.reports for event in report.events) == 2
    )
    assert all(torch.allclose(ours[name], reference[name], atol=1e-5) for name in reference)


@pytest.mark.slow
def test_a_leader_that_is_lost_with_the_only_copy_is_answered_by_asking_the_others_again() -> None:
    """Before the first parts have moved, nobody else has any of the model."""
    ours, own = on_processes("three stages", {0: {"dies-at-start": 1}})
    reference = in_one_process("three stages")
    assert "the others are asked again" in " ".join(
        event.text for report in own.reports for event in report.events
    )
    assert all(torch.allclose(ours[name], reference[name], atol=1e-5) for name in reference)


@pytest.mark.slow
def test_nodes_with_certificates_train_over_encrypted_streams_and_go_on_without_one_that_dies(
    tmp_path: Path,
) -> None:
    own = write_certificates(tmp_path, ["127.0.0.1"])["127.0.0.1"]
    paths = {
        "ring-ca": str(own.ca),
        "ring-certificate": str(own.certificate),
        "ring-key": str(own.key),
    }
    ours, strategy = on_processes(
        "three stages", {0: paths, 1: paths, 2: {**paths, "dies-at-forward": 14}}, backup_steps=1
    )
    assert strategy.method.describe().transports()["inside groups"] == "grpc+tls"
    assert any(
        "the pipeline continues from update" in event.text for event in strategy.reports[0].events
    )
    reference = in_one_process("three stages")
    assert all(torch.allclose(ours[name], reference[name], atol=1e-5) for name in reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "faults"),
    [
        ("a stage of two", {1: {"dies-at-sum": 2}}),
        ("a stage of two", {0: {"stops-at-sum": 3}}),
        ("three stages", {1: {"dies-at-backup": 2}}),
        ("three stages", {0: {"stops-at-backup": 1}}),
        ("three stages", {2: {"dies-at-move": 1}}),
        ("three stages", {1: {"dies-at-forward": 14}, 2: {"dies-at-move": 2}}),
        ("three stages", {1: {"stops-at-forward": 14}, 0: {"dies-at-move": 2}}),
        ("a stage of two", {0: {"dies-at-backward": 7}, 1: {"dies-at-forward": 9}}),
    ],
    ids=str,
)
def test_faults_in_sums_backups_and_moves_lose_nothing(
    plan: str, faults: dict[int, dict[str, Any]]
) -> None:
    ours, own = on_processes(plan, faults, backup_steps=1)
    reference = in_one_process(plan)
    assert any(
        event.kind in ("member-lost", "pipeline")
        for report in own.reports
        for event in report.events
    )
    assert len(own.reports) == own.num_rounds
    assert all(torch.allclose(ours[name], reference[name], atol=1e-5) for name in reference)
