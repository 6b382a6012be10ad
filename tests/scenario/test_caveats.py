"""What a comparison says that it leaves out."""

from pathlib import Path
from typing import Any

import pytest

from socflower.errors import InfeasiblePlan
from socflower.scenario.caveats import caveats_of
from socflower.scenario.planning import plan_scenario
from socflower.scenario.schema.file import load_scenario
from socflower.scenario.schema.scenario_file import Scenario

SCENARIOS = Path(__file__).parents[2] / "scenarios"


def compared(name: str, *settings: str, strategies: tuple[str, ...] = ()) -> dict[str, Scenario]:
    scenario = load_scenario(SCENARIOS / f"{name}.toml", settings)
    return {
        strategy: scenario.under(strategy) for strategy in strategies or scenario.compare.strategies
    }


def epoch(scenario: Scenario, socs: int) -> dict[str, Any]:
    predicted: dict[str, Any] = plan_scenario(
        scenario.replaced(strategy=scenario.strategy.replaced(socs=socs))
    )["predicted"]
    return predicted


def test_a_ring_that_is_quicker_on_fewer_socs_is_said_to_be() -> None:
    """By brute force over the powers of two: of the demonstration, on 8 of 32."""
    own = "compare.train.ring={batch_size = 64, epochs = 5, sync_interval_epochs = 0.1}"
    runs = compared("digits_demo", own)
    (said,) = caveats_of(runs)
    ring = runs["ring"]
    seconds = {
        socs: epoch(ring, socs)["epoch_s"] * ring.train.epochs for socs in (1, 2, 4, 8, 16, 32)
    }
    assert min(seconds, key=lambda socs: seconds[socs]) == 8
    joules = epoch(ring, 8)["epoch_energy_j"] * ring.train.epochs
    assert said.startswith("ring ran on 32 SoCs, and no other number was tried")
    assert (
        f"{seconds[8]:.2f} s and {joules:.0f} J are predicted on 8, instead of {seconds[32]:.1f} s"
        in said
    )
    assert said.endswith("(strategy.socs = 8)")


@pytest.mark.parametrize(
    ("settings", "strategies"),
    [
        (("strategy.socs=8", "strategy.groups=2"), ("socflow", "ring")),  # its quickest number
        ((), ("socflow", "sgd", "fedavg")),  # nothing to choose
        ((), ("ring", "socflow")),  # it is the first one's own handicap
    ],
)
def test_nothing_is_said_of_what_was_not_withheld(
    settings: tuple[str, ...], strategies: tuple[str, ...]
) -> None:
    assert caveats_of(compared("digits_demo", *settings, strategies=strategies)) == []


def test_numbers_of_socs_with_too_little_memory_are_left_out() -> None:
    """A batch of 50,000 images needs the memory of more than four SoCs."""
    runs = compared(
        "digits_demo", "model.name=vgg11", "data.name=cifar10", strategies=("socflow", "ring")
    )
    ring = runs["ring"].replaced(train=runs["ring"].train.replaced(batch_size=50_000))
    with pytest.raises(InfeasiblePlan):
        epoch(ring, 4)
    assert caveats_of({**runs, "ring": ring}) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((), []),
        (
            ("edgecloud.codec_for=ours",),
            [
                "split-replay sends features in 8 bits and gradients in 8; joint-dnn, split send both in 32"
            ],
        ),
        (
            ("edgecloud.gradient_bits=32", "edgecloud.codec_for=ours"),
            [
                "split-replay sends features in 8 bits and gradients in 32; joint-dnn, split send both in 32"
            ],
        ),
        (("edgecloud.gradient_bits=32", "edgecloud.bits=[32]"), []),
    ],
)
def test_a_codec_that_the_others_do_not_have_is_named(
    settings: tuple[str, ...], said: list[str]
) -> None:
    assert caveats_of(compared("split_against_edge", *settings)) == said
