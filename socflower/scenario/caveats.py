"""What a comparison of strategies leaves out, in sentences that are printed below its result."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from socflower.edgecloud.plan.baselines import BASELINES
from socflower.errors import InfeasiblePlan
from socflower.quantities import human_joules, human_seconds
from socflower.scenario.planning import PlannedTraining, planned_training
from socflower.scenario.schema.file import scenario_cluster
from socflower.scenario.schema.scenario_file import Scenario
from socflower.strategies.presets import STRATEGIES, GroupStrategy


def caveats_of(compared: Mapping[str, Scenario]) -> list[str]:
    """Return what the first strategy was given and the others were not, a sentence for each; nothing is trained.

    `compared` is the scenario under each strategy, with the strategy's own settings.
    """
    subject, *others = compared
    sentences: list[str] = []
    for name in others:
        sentences += _number_of_socs(name, compared[name])
    sentences += _widths(subject, compared[subject], others)
    return sentences


def _number_of_socs(name: str, planned: Scenario) -> Iterator[str]:
    """Yield a sentence if a strategy with one group of SoCs is predicted to be quicker on fewer of them.

    A step of one group is the same whatever the number of its members, up to rounding and statistics of BatchNorm; so
    its time to an accuracy follows the time of its epoch.
    """
    kind = STRATEGIES[name]
    if not isinstance(kind, GroupStrategy) or kind.num_groups != 1 or kind.num_socs is not None:
        return
    cluster = scenario_cluster(planned)
    used = planned.strategy.socs or cluster.num_socs
    # Powers of two suffice to show that fewer SoCs are quicker.
    counts, power = [used], 1
    while power < used:
        counts.append(power)
        power *= 2
    found: dict[int, PlannedTraining] = {}
    for count in counts:
        strategy = planned.strategy.replaced(socs=count)
        # A larger share may not fit a device's memory.
        with suppress(InfeasiblePlan):
            found[count] = planned_training(planned.replaced(strategy=strategy), cluster)
    best = min(found, key=lambda count: found[count].duration_s)
    if best != used:
        yield (
            f"{name} ran on {used} SoCs, and no other number was tried: for the same steps, "
            f"{_cost(found[best])} are predicted on {best}, instead of {_cost(found[used])} "
            f"(strategy.socs = {best})"
        )


def _cost(training: PlannedTraining) -> str:
    time, energy = human_seconds(training.duration_s), human_joules(training.energy_j)
    return f"{time} and {energy.partition(' (')[0]}"


def _widths(subject: str, scenario: Scenario, others: Sequence[str]) -> Iterator[str]:
    """Yield a sentence if only the first strategy sends features or gradients in fewer than 32 bits."""
    peers = [name for name in others if name in BASELINES and BASELINES[name].edge_alone != "only"]
    if subject in BASELINES or not STRATEGIES[subject].uses_cloud or not peers:
        return
    if scenario.split.codec_for == "all":
        return
    widths, gradients = scenario.split.widths(subject)
    features = min(widths)
    if min(features, gradients) < 32:
        yield (
            f"{subject} sends features in {features} bits and gradients in {gradients}; "
            f"{', '.join(peers)} send both in 32"
        )
