"""The edge's half on CPU and NPU at once: gradients add up, and only the optimiser changes weights."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.split_accuracy_runs.training import constant_staleness
from socflower.edgecloud.runtime.front import TorchFront
from socflower.edgecloud.runtime.in_process import run_actions
from socflower.edgecloud.runtime.mixed_front import MixedEdge, MixedFront
from socflower.edgecloud.runtime.torch_half import Passes
from socflower.errors import ConfigError
from socflower.model_graph.cut_points import SplitModel, capture_split
from tests.edgecloud.runtime.split_training import LOSS, sgd
from tests.edgecloud.runtime.test_int8_front import (
    BATCH,
    IMAGE,
    TOTAL,
    back_of,
    differing,
    one_thread,  # noqa: F401  a fixture
    source,
    split_of,
)
from tests.seeded import built


def front_of(split: SplitModel, cut: int, rule: str, optimizer: Any = sgd) -> MixedFront:
    return MixedFront(
        split.copy(),
        cut,
        source,
        optimizer,
        MixedEdge(npu_ratios=(0.8,), rule=rule),
        passes=Passes(loss=LOSS),
    )


def plain(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.05)


@pytest.mark.parametrize("window", [0, 3])
def test_without_a_part_for_the_npu_the_half_is_that_in_fp32(window: int) -> None:
    split, weights = split_of(), []
    for front in (front_of(split, 2, "fp32"), TorchFront(split.copy(), 2, source, sgd, loss=LOSS)):
        run_actions(constant_staleness(TOTAL, window, cut=2), [front], [back_of(split, 2)])
        weights.append(front.weights())
    assert differing(*weights) == []


def test_the_gradient_is_the_sum_of_that_of_the_cpus_rows_and_that_of_the_npus() -> None:
    split = capture_split(
        built(
            lambda: nn.Sequential(
                nn.Conv2d(2, 6, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(6, 8, 3),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(32, 5),
            ),
            0,
        ),
        IMAGE,
    )
    gradient = np.random.default_rng(3).normal(size=(BATCH, 6, 4, 4)).astype(np.float32) / BATCH
    of_cpu, of_npu = gradient.copy(), gradient.copy()
    of_cpu[BATCH // 2 :], of_npu[: BATCH // 2] = 0.0, 0.0

    def change(front: TorchFront, by: Any) -> Any:
        before = front.weights()
        front.forward(0)
        front.apply(0, by)
        return np.concatenate(
            [(after - before[name]).ravel() for name, after in front.weights().items()]
        )

    fp32 = TorchFront(split.copy(), 1, source, plain, loss=LOSS)
    cpu = change(front_of(split, 1, "half", plain), of_cpu)
    npu = change(front_of(split, 1, "half", plain), of_npu)
    assert np.allclose(cpu, change(fp32, of_cpu), atol=1e-7)
    assert np.allclose(change(front_of(split, 1, "half", plain), gradient), cpu + npu, atol=1e-7)
    exact = change(TorchFront(split.copy(), 1, source, plain, loss=LOSS), of_npu)
    assert npu @ exact / np.linalg.norm(npu) / np.linalg.norm(exact) > 0.98
    assert 0.9 < np.linalg.norm(npu) / np.linalg.norm(exact) < 1.1


@pytest.mark.parametrize("rule", ["half", "int8"])
def test_running_statistics_and_batches_count_both_parts_once(rule: str) -> None:
    split, states = split_of(), []
    for front in (front_of(split, 2, rule), TorchFront(split.copy(), 2, source, sgd, loss=LOSS)):
        run_actions(constant_staleness(2, 1, cut=2), [front], [back_of(split, 2)])
        states.append(front.weights())
    one, other = states
    assert one["1.num_batches_tracked"] == other["1.num_batches_tracked"] == 2
    for name in ("1.running_mean", "1.running_var"):
        assert np.allclose(one[name], other[name], atol=0.03), name


def test_a_restored_half_continues_with_the_same_weights_and_the_same_alpha() -> None:
    split = split_of(dropout=0.25)

    def after(stop: int | None) -> Any:
        front, back = front_of(split, 3, "paper"), back_of(split, 3)
        for first in range(0, TOTAL, 4):
            if first == stop:
                saved = front.save()
                front = front_of(split, 0, "paper")
                front.restore(saved)
            run_actions(constant_staleness(4, 2, cut=3, first_batch=first), [front], [back])
        return front

    one, other = after(None), after(4)
    assert differing(one.weights(), other.weights()) == [] and one.alpha == other.alpha > 0.9


def test_an_edge_alone_trains_with_any_loss() -> None:
    split = split_of()
    fronts = (
        front_of(split, split.num_cuts, "half"),
        TorchFront(split.copy(), split.num_cuts, source, sgd, loss=LOSS),
    )
    one, other = ([front.train_alone(batch) for batch in range(3)] for front in fronts)
    assert one == pytest.approx(other, rel=0.05)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"rule": "most"}, "MixedEdge: rule = 'most'; use one of paper"),
        ({"npu_ratios": ()}, "npu_ratios is empty"),
        ({"npu_ratios": (1.5,)}, "beta = 1.5 lie in"),
    ],
)
def test_bad_settings_are_one_line(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        MixedEdge(**{"npu_ratios": (0.5,), **settings})
