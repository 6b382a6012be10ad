"""Profiles of operators and micro-batches: what they measure exists, and what they choose runs."""

import math

from torch import Tensor, nn

from socflower.precision.int8.batch_splitting import BlockProfile, best_blocks, profile_batch_blocks
from socflower.precision.operator_costs import profile_operators
from tests.one_line import refused
from tests.precision.networks import batches, int8, train
from tests.seeded import built

SHAPE = (3, 8, 8)


def network() -> nn.Module:
    return built(
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Tanhshrink(),
            nn.Dropout2d(0.5),
            nn.Flatten(),
            nn.Linear(256, 4),
        ),
        0,
    )


def test_every_operator_is_timed_on_both_sides_and_what_int8_lacks_runs_in_fp32() -> None:
    """What it chooses trains."""
    module = network()
    profile = profile_operators(module, SHAPE, 4, repeats=1)
    assert [latency.name for latency in profile.latencies] == ["0", "2", "3", "4", "6"]
    assert all(latency.cpu_s > 0.0 for latency in profile.latencies)
    missing = [latency.name for latency in profile.latencies if math.isinf(latency.npu_s)]
    assert missing == ["3"]
    on_cpu = profile.placement.on_cpu
    assert "3" in on_cpu and len(profile.switches_s) == 4 and profile.batch == 4
    options = {"fp32_operators": on_cpu}
    train(int8(module, shape=SHAPE, options=options), batches(1, image=SHAPE, classes=4))


def test_any_placement_trains_functions_between_modules_included() -> None:
    """Each operator that is timed may be placed on the CPU side, alone and with its neighbours."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
            self.last = nn.Linear(3, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            between = self.first(inputs).relu()
            return self.last((self.second(between) + between).mean((2, 3)))

    module = built(Residual, 0)
    names = [each.name for each in profile_operators(module, SHAPE, 4, repeats=1).latencies]
    assert names == ["first", "second", "add", "mean", "last"]
    for placed in [[name] for name in names] + [["second", "add"], names]:
        model = int8(module, shape=SHAPE, options={"fp32_operators": placed})
        assert set(placed) <= set(model.islands)
        train(model, batches(1, image=SHAPE, classes=4))
    refused(lambda: int8(module, shape=SHAPE, options={"fp32_operators": ["sub"]}), "sub", "add")


def test_a_split_is_chosen_only_for_a_clear_gain() -> None:
    profiles = [
        BlockProfile(name="gains", seconds={0: 1.0, 32: 0.9, 16: 0.7, 8: 0.8}),
        BlockProfile(name="noise", seconds={0: 1.0, 32: 0.97, 16: 1.2, 8: 1.3}),
    ]
    assert best_blocks(profiles) == {"gains": 16}


def test_the_profile_covers_every_convolution_and_every_block_smaller_than_the_batch() -> None:
    model = int8(
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 4)), shape=SHAPE
    )
    profiles = profile_batch_blocks(model.graph, 12, model.engine, repeats=1)
    assert [profile.name for profile in profiles] == ["0", "3"]
    assert all(set(profile.seconds) == {0, 8} for profile in profiles)
