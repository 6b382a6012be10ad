"""Several fronts hold different features of the same samples: together they are one model with several inputs."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from socflower.edgecloud.plan.timeline_actions import Action, ActionKind
from socflower.edgecloud.runtime.back import TorchBack
from socflower.edgecloud.runtime.front import TorchFront
from socflower.edgecloud.runtime.in_process import run_actions
from socflower.errors import ConfigError
from socflower.model_graph.cut_points import SplitModel, whole_back, whole_front
from tests.edgecloud.runtime.split_training import LOSS, adam, falling
from tests.seeded import built

NUM_BATCHES, SIZES = 6, (3, 5)


def parts(batch: int) -> tuple[list[torch.Tensor], np.ndarray]:
    rng = np.random.default_rng(batch)
    features = [torch.from_numpy(rng.normal(size=(4, size)).astype(np.float32)) for size in SIZES]
    return features, rng.integers(0, 3, 4)


def build(top: Callable[[], nn.Module]) -> tuple[list[nn.Module], nn.Module]:
    return built(
        lambda: (
            [nn.Sequential(nn.Linear(size, 4), nn.BatchNorm1d(4), nn.ReLU()) for size in SIZES],
            top(),
        ),
        2,
    )


def jointly(num_batches: int) -> list[Action]:
    return [
        Action(kind, party, batch, 0)
        for batch in range(num_batches)
        for kind in (ActionKind.FORWARD, ActionKind.STEP, ActionKind.APPLY)
        for party in range(len(SIZES))
    ]


def test_joined_parties_with_window_0_are_one_model() -> None:
    bottoms, last = build(lambda: nn.Linear(8, 3))
    local = nn.ModuleList([*bottoms, last])
    fronts = [
        TorchFront(
            whole_front(bottom, (size,)).copy(),
            0,
            lambda batch, party=party: (parts(batch)[0][party], parts(batch)[1], np.arange(4)),
            adam,
            schedule=falling,
        )
        for party, (bottom, size) in enumerate(zip(bottoms, SIZES, strict=True))
    ]
    back = TorchBack(whole_back(last).copy(), 0, adam, LOSS, schedule=falling)
    reports = run_actions(jointly(NUM_BATCHES), fronts, [back], joined=True)
    optimizer = adam(local.parameters())
    for batch in range(NUM_BATCHES):
        features, labels = parts(batch)
        optimizer.param_groups[0]["lr"] = 0.01 * falling(batch)
        optimizer.zero_grad()
        outputs = [bottom(part) for bottom, part in zip(bottoms, features, strict=True)]
        loss = LOSS(last(torch.cat(outputs, dim=1)), torch.from_numpy(labels))
        loss.backward()
        optimizer.step()
        assert all(report.losses[batch] == loss.item() for report in reports)
    for module, half in zip([*bottoms, last], [*fronts, back], strict=True):
        weights = half.weights()
        assert all(
            np.array_equal(weights[name], value.numpy())
            for name, value in module.state_dict().items()
        )


def test_parts_of_different_numbers_of_samples_are_refused() -> None:
    split: SplitModel = whole_back(nn.Linear(8, 3))
    with pytest.raises(ConfigError, match="3, 4 samples"):
        TorchBack(split, 0, adam, LOSS).step(
            0, [np.ones((4, 3), np.float32), np.ones((3, 5), np.float32)], np.zeros(4, np.int64)
        )
