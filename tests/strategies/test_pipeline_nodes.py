"""Stages in processes of their own, against the same plan in one process; and what is left when some are lost."""

from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord
from torch import Tensor

from socflower.engines.local.grid import LocalGrid
from socflower.pipeline.profiler.of_module import pipeline_problem
from socflower.rings.settings import RingSettings
from socflower.strategies.group_grid import GroupGrid
from socflower.strategies.hybrid_pipeline import HybridPipeline
from socflower.strategies.settings import TrainingSchedule
from tests.pipeline.problems import straight_plan
from tests.process_grid import ProcessGrid
from tests.strategies.pipeline_app import BATCH, NUM_SAMPLES, Sentences, client_app, node_configs, shelf, tagger

pytestmark = pytest.mark.timeout(180)

LAYERS = pipeline_problem(tagger(), Sentences().tokens[:1], shelf(), batch_size=BATCH).model.num_layers
PLANS = {"three stages": straight_plan((0, 1, LAYERS - 1), ((6,), (6,), (6,)), 4),
         "a stage of two": straight_plan((0, LAYERS - 1), ((2, 4), (6,)), 4)}


def strategy(plan: str, **settings: Any) -> HybridPipeline:
    return HybridPipeline(
        problem=pipeline_problem(tagger(), Sentences().tokens[:1], shelf(), batch_size=BATCH), plan=PLANS[plan],
        schedule=TrainingSchedule(num_samples=NUM_SAMPLES, batch_size=BATCH, num_epochs=4, interval_epochs=2.0),
        rings=RingSettings(heartbeat_s=2.0, rendezvous_s=20.0, leader_grace_s=5.0), **settings)


def train(grid: Any, plan: str, **settings: Any) -> tuple[dict[str, Tensor], HybridPipeline]:
    own = strategy(plan, **settings)
    result = own.start(GroupGrid(grid), ArrayRecord(tagger().state_dict()), num_rounds=own.num_rounds, timeout=60)
    return dict(result.arrays.to_torch_state_dict()), own


def in_one_process(plan: str) -> dict[str, Tensor]:
    with LocalGrid(client_app(), 3, num_workers=0) as grid:
        return train(grid, plan)[0]


def on_processes(plan: str, of_soc: dict[int, dict[str, Any]] | None = None, **settings: Any) -> tuple[
        dict[str, Tensor], HybridPipeline]:
    with ProcessGrid(client_app, node_configs(of_soc)) as grid:
        return train(grid, plan, **settings)


@pytest.mark.parametrize("plan", PLANS)
def test_stages_in_processes_train_the_bits_of_one_process(plan: str) -> None:
    ours, own = on_processes(plan)
    reference = in_one_process(plan)
    assert [event.text for report in own.reports for event in report.events] == []
    assert own.transport == "gloo"
    assert ours.keys() == reference.keys() and all(torch.equal(ours[name], reference[name]) for name in ours)


@pytest.mark.parametrize(("plan", "soc", "fault", "backup_steps"), [
    ("three stages", 0, {"dies-at-forward": 11}, 2),
    ("three stages", 1, {"dies-at-backward": 14}, 2),
    ("three stages", 2, {"stops-at-backward": 6}, 0),
    ("a stage of two", 1, {"dies-at-forward": 6}, 0),
])
def test_a_lost_device_costs_no_update(plan: str, soc: int, fault: dict[str, Any], backup_steps: int) -> None:
    ours, own = on_processes(plan, {soc: fault}, backup_steps=backup_steps)
    reference = in_one_process(plan)
    assert [event.kind for report in own.reports for event in report.events]
    assert len(own.reports) == own.num_rounds
    assert all(torch.allclose(ours[name], reference[name], atol=1e-5) for name in reference)
