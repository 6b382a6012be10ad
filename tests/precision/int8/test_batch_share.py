"""Members of a ring with a share of the batch each train what one model trains with the whole batch, bit for bit."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from socflower.errors import TrainingFailed
from socflower.peers.collective import RingPeers
from socflower.peers.transports.in_process import in_process_rings
from socflower.precision import EngineSettings, Int8Model, RescalingPolicy, int8_algorithm
from socflower.precision.int8.batch_share import BatchPeers, JointShare
from tests.one_line import refused
from tests.precision import networks
from tests.precision.networks import assert_same
from tests.seeded import built

STEPS = 6
BATCH = 7
SHAPE = (2, 6, 6)
LOUD = 4  # in this step inputs are so large that known exponents saturate


class Residual(nn.Module):
    """Everything that joins a batch: BatchNorm, additions of different exponents, averages, overlapping windows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 1))
        self.branch = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Dropout2d(0.2)
        )
        self.head = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(32, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        stem = self.stem(inputs)
        return self.head(torch.relu(stem + self.branch(stem)))


def made(name: str, module: nn.Module | None = None, **options: object) -> Int8Model:
    algorithm = int8_algorithm(name, None if name == "niti" else 0.5)
    if algorithm.backward.wide_above is not None:
        # Almost every gradient that may be int16 is, then.
        algorithm = replace(algorithm, backward=replace(algorithm.backward, wide_above=0.0))
    return Int8Model.from_module(
        module or built(Residual, 3),
        input_shape=SHAPE,
        algorithm=algorithm,
        settings=EngineSettings(rescaling=RescalingPolicy(warm_up_batches=2)),
        **options,
    )  # type: ignore[arg-type]


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(4)
    images = random.normal(0.0, 1.0, (STEPS, BATCH, *SHAPE)).astype(np.float32)
    images[LOUD] *= 60.0
    return list(zip(images, random.integers(0, 4, (STEPS, BATCH)), strict=True))


def on_ring(size: int, train: Callable[[BatchPeers], object]) -> list[Any]:
    peers = [RingPeers(ring, lambda: None, nullcontext) for ring in in_process_rings(size)]
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(train, peers))


def joint(model: Int8Model, peers: BatchPeers, splits: Sequence[Sequence[int]]) -> list[float]:
    losses = []
    for step, ((images, labels), sizes) in enumerate(zip(batches(), splits, strict=True)):
        own = slice(sum(sizes[: peers.rank]), sum(sizes[: peers.rank + 1]))
        begun = model.begin_joint_step(
            images[own], labels[own], peers, learning_rate=0.05, progress=step / STEPS, seed=step
        )
        begun.exchange()
        begun.apply()
        losses.append(begun.loss)
    return losses


def alone(model: Int8Model) -> list[float]:
    return [
        model.train_step(images, labels, learning_rate=0.05, progress=step / STEPS, seed=step).loss
        for step, (images, labels) in enumerate(batches())
    ]


def require_same(ours: Int8Model, reference: Int8Model) -> None:
    assert_same(ours.arrays(), reference.arrays())
    known, expected = (sorted(map(str, each.trackers.to_json())) for each in (ours, reference))
    assert known == expected


splits_of_three = st.lists(
    st.sampled_from([(2, 2, 3), (0, 7, 0), (1, 0, 6), (7, 0, 0), (0, 3, 4)]),
    min_size=STEPS,
    max_size=STEPS,
)


@pytest.mark.few_cells(2)
@pytest.mark.parametrize(
    "name", ["niti", "adaptive-fixed-point", "adaptive-int16", "real-scales", "mls-format"]
)
@settings(max_examples=2, deadline=None)
@given(splits=splits_of_three)
def test_any_shares_give_the_step_of_the_whole_batch(
    name: str, splits: list[tuple[int, int, int]]
) -> None:
    """Members without samples included, and a step whose values saturate at exponents that are known."""
    reference = made(name)
    models = [made(name) for _ in range(3)]
    losses = alone(reference)
    parts = on_ring(3, lambda peers: joint(models[peers.rank], peers, splits))
    for model in models:
        require_same(model, reference)
    np.testing.assert_allclose(np.sum(parts, axis=0), losses, rtol=1e-12)


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("name", ["squeezed", "decoded", "attentive", "sequence"])
@pytest.mark.parametrize("sizes", [(2, 2, 3), (0, 7, 0)])
def test_any_shares_of_the_operators_in_numpy_give_the_step_of_the_whole_batch(
    name: str, sizes: tuple[int, int, int]
) -> None:
    data = networks.batches(3, size=BATCH)
    reference, *models = (networks.int8(name, rescaling=networks.SELDOM) for _ in range(4))

    def member(peers: BatchPeers) -> None:
        own = slice(sum(sizes[: peers.rank]), sum(sizes[: peers.rank + 1]))
        for images, labels in data:
            begun = models[peers.rank].begin_joint_step(
                images[own], labels[own], peers, learning_rate=0.05, progress=0.0
            )
            begun.exchange()
            begun.apply()

    for images, labels in data:
        reference.train_step(images, labels, learning_rate=0.05, progress=0.0)
    on_ring(3, member)
    for model in models:
        require_same(model, reference)


def test_members_search_again_together_where_one_of_them_saturates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes: list[bool] = []
    held = JointShare.held
    monkeypatch.setattr(JointShare, "held", lambda share: passes.append(held(share)) or passes[-1])
    models = [made("niti") for _ in range(2)]
    on_ring(2, lambda peers: joint(models[peers.rank], peers, [(6, 1)] * STEPS))
    assert passes.count(False) >= 2  # both members, in the loud step at least
    assert passes.count(True) == 2 * STEPS


def test_a_step_that_is_not_applied_changes_nothing() -> None:
    model = made("niti")
    reference = made("niti")
    (images, labels), *_ = batches()

    def abandoned(peers: BatchPeers) -> None:
        model.begin_joint_step(images, labels, peers, progress=0.0, seed=9).exchange()

    on_ring(1, abandoned)
    require_same(model, reference)


def test_members_run_operators_of_the_fp32_side_on_the_same_weights() -> None:
    """Their gradients are sums of floats, so they equal those of the whole batch up to rounding."""

    def module() -> nn.Module:
        layers = [nn.Conv2d(2, 4, 3), nn.Tanhshrink(), nn.Flatten(), nn.Linear(64, 4)]
        return nn.Sequential(*layers)

    options = {"fp32_operators": ["3"], "unsupported": "fp32"}
    reference, *models = (
        made("adaptive-fixed-point", built(module, 3), **options) for _ in range(4)
    )
    alone(reference)
    on_ring(3, lambda peers: joint(models[peers.rank], peers, [(3, 0, 4)] * STEPS))
    for model in models[1:]:
        require_same(model, models[0])
    for name, array in reference.arrays().items():
        np.testing.assert_allclose(models[0].arrays()[name], array, atol=0.02, err_msg=name)


def test_sums_beyond_int32_end_the_step_at_every_member() -> None:
    def over(peers: BatchPeers) -> None:
        share = JointShare(peers, [1, 1], cautious=False)
        largest = share.overflowed(OverflowError("own")) if peers.rank else 7
        share.add_integers(np.full(3, 7, np.int32), largest, lambda total, most: None)
        refused(share.exchange, "int32", "smaller batch", error=OverflowError)

    on_ring(2, over)


def test_a_mistake_or_failure_of_one_member_ends_the_step_at_all() -> None:
    def bad(peers: BatchPeers) -> None:
        images = np.full((1, *SHAPE), np.nan if peers.rank else 1.0, np.float32)
        model = made("niti")
        labels = np.zeros(1, int)
        refused(lambda: model.begin_joint_step(images, labels, peers, progress=0.0), "NaN")
        model.parameters.vectors["stem.0.bias"].data[0] = 1e30
        begin = partial(model.begin_joint_step, *batches()[0], peers, progress=0.0)
        refused(begin, "stem.0", "int32", error=TrainingFailed)

    on_ring(2, bad)
