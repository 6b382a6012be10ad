"""The edge's half on CPU and NPU at once: gradients add up, and only the optimiser changes weights."""

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.split_accuracy_runs.training import constant_staleness
from socflower.edgecloud.runtime.front import TorchFront
from socflower.edgecloud.runtime.in_process import run_actions
from socflower.edgecloud.runtime.mixed_front import MixedEdge, MixedFront
from socflower.edgecloud.runtime.torch_half import Passes
from socflower.model_graph.cut_points import SplitModel, capture_split
from tests.edgecloud.runtime.split_training import LOSS, sgd
from tests.edgecloud.runtime.test_int8_front import (
    BATCH,
    IMAGE,
    TOTAL,
    back_of,
    differing,
    network,
    source,
    split_of,
)
from tests.one_line import refused


def front_of(split: SplitModel, cut: int, rule: str, optimizer: Any = sgd) -> MixedFront:
    mixed, passes = MixedEdge(npu_ratios=(0.8,), rule=rule), Passes(loss=LOSS)
    return MixedFront(split.copy(), cut, source, optimizer, mixed, passes=passes)


def fp32_of(split: SplitModel, cut: int, optimizer: Any = sgd) -> TorchFront:
    return TorchFront(split.copy(), cut, source, optimizer, loss=LOSS)


def plain(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.05)


@pytest.mark.parametrize("window", [0, 3])
def test_without_a_part_for_the_npu_the_half_is_that_in_fp32(window: int) -> None:
    split, weights = split_of(), []
    for front in (front_of(split, 2, "fp32"), fp32_of(split, 2)):
        run_actions(constant_staleness(TOTAL, window, cut=2), [front], [back_of(split, 2)])
        weights.append(front.weights())
    assert differing(*weights) == []


def test_the_gradient_is_the_sum_of_that_of_the_cpus_rows_and_that_of_the_npus() -> None:
    split = capture_split(network(norm=False), IMAGE)
    gradient = np.random.default_rng(3).normal(size=(BATCH, 6, 4, 4)).astype(np.float32) / BATCH
    of_cpu, of_npu = gradient.copy(), gradient.copy()
    of_cpu[BATCH // 2 :], of_npu[: BATCH // 2] = 0.0, 0.0

    def change(front: TorchFront, by: Any) -> Any:
        before = front.weights()
        front.forward(0)
        front.apply(0, by)
        changes = [after - before[name] for name, after in front.weights().items()]
        return np.concatenate([each.ravel() for each in changes])

    cpu, npu, both = (
        change(front_of(split, 1, "half", plain), each) for each in (of_cpu, of_npu, gradient)
    )
    assert np.allclose(cpu, change(fp32_of(split, 1, plain), of_cpu), atol=1e-7)
    assert np.allclose(both, cpu + npu, atol=1e-7)
    exact = change(fp32_of(split, 1, plain), of_npu)
    norms = np.linalg.norm(npu), np.linalg.norm(exact)
    assert npu @ exact / norms[0] / norms[1] > 0.98 and 0.9 < norms[0] / norms[1] < 1.1


@pytest.mark.parametrize("rule", ["half", "int8"])
def test_running_statistics_and_batches_count_both_parts_once(rule: str) -> None:
    split, states = split_of(), []
    for front in (front_of(split, 2, rule), fp32_of(split, 2)):
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
    fronts = front_of(split, split.num_cuts, "half"), fp32_of(split, split.num_cuts)
    one, other = ([front.train_alone(batch) for batch in range(3)] for front in fronts)
    assert one == pytest.approx(other, rel=0.05)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("rule", "most", ["'most'", "paper"]),
        ("npu_ratios", (), ["npu_ratios"]),
        ("npu_ratios", (1.5,), ["1.5"]),
    ],
)
def test_settings_that_cannot_be_are_refused(key: str, value: Any, named: list[str]) -> None:
    refused(lambda: MixedEdge(**{"npu_ratios": (0.5,), key: value}), *named)
