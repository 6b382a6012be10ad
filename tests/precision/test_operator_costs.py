"""Profiles of operators and micro-batches: what they measure exists, and what they choose runs."""

import math

import numpy as np
from torch import nn

from socflower.precision import EngineSettings, Int8Model
from socflower.precision.int8.batch_splitting import BlockProfile, best_blocks, profile_batch_blocks
from socflower.precision.operator_costs import profile_operators
from tests.seeded import built

SHAPE = (3, 8, 8)


def network() -> nn.Module:
    return built(
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(256, 4),
        ),
        0,
    )


def test_every_operator_is_timed_on_both_sides_and_what_int8_lacks_runs_in_fp32() -> None:
    profile = profile_operators(network(), SHAPE, 4, repeats=1)
    assert [latency.name for latency in profile.latencies] == ["0", "2", "3", "5"]
    assert all(latency.cpu_s > 0.0 for latency in profile.latencies)
    assert [math.isinf(latency.npu_s) for latency in profile.latencies] == [
        False,
        False,
        True,
        False,
    ]
    assert "3" in profile.placement.on_cpu


def test_the_chosen_placement_trains() -> None:
    module = network()
    profile = profile_operators(module, SHAPE, 8, repeats=1)
    model = Int8Model.from_module(
        module, input_shape=SHAPE, fp32_operators=profile.placement.on_cpu
    )
    random = np.random.default_rng(0)
    labels = random.integers(0, 4, 8, dtype=np.int32)
    images = (0.3 * random.standard_normal((8, *SHAPE)) + labels[:, None, None, None]).astype(
        np.float32
    )
    losses = [
        model.train_step(images, labels, learning_rate=0.02, progress=0.8).loss for _ in range(40)
    ]
    assert min(losses[-5:]) < 0.7 * losses[0]


def test_a_split_is_chosen_only_for_a_clear_gain() -> None:
    profiles = [
        BlockProfile(name="gains", seconds={0: 1.0, 32: 0.9, 16: 0.7, 8: 0.8}),
        BlockProfile(name="noise", seconds={0: 1.0, 32: 0.97, 16: 1.2, 8: 1.3}),
    ]
    assert best_blocks(profiles) == {"gains": 16}


def test_the_profile_covers_every_convolution_and_every_block_smaller_than_the_batch() -> None:
    module = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 4))
    model = Int8Model.from_module(module, input_shape=SHAPE)
    profiles = profile_batch_blocks(model.graph, 12, model.engine, repeats=1)
    assert [profile.name for profile in profiles] == ["0", "3"]
    assert all(set(profile.seconds) == {0, 8} for profile in profiles)


def test_splitting_changes_no_result() -> None:
    random = np.random.default_rng(1)
    images = random.standard_normal((12, *SHAPE), dtype=np.float32)
    labels = random.integers(0, 4, 12, dtype=np.int32)
    states = []
    for blocks in ({}, {"0": 5, "3": 7}):
        module = built(
            lambda: nn.Sequential(
                nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 4)
            ),
            0,
        )
        model = Int8Model.from_module(
            module, input_shape=SHAPE, settings=EngineSettings(batch_blocks=blocks)
        )
        for _ in range(3):
            model.train_step(images, labels, progress=0.0)
        states.append(model.arrays())
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])
