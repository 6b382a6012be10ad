"""The warm-up of a number of groups by an app's strategies (F2)."""

from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ArrayRecord

from socflower import SoCFlow, TrainingSchedule, profile_group_count
from socflower.cluster import Cluster, parse_cluster
from socflower.errors import TrainingFailed
from socflower.strategies import warm_up
from tests.one_line import refused

RACK = parse_cluster({"boards": [4, 4]})
SECONDS = {1: 8.0, 2: 4.0, 4: 2.0, 8: 1.0}
GAIN = {1: 0.1, 2: 0.03, 4: 0.03, 8: 0.001}


class Scripted(SoCFlow):
    """A strategy without virtual time, whose rounds take `SECONDS` and gain `GAIN`; with 8 groups it diverges."""

    now_s = 0.0
    rounds: list[tuple[int, int]]

    def train_round(self, server_round: int, *_: Any, **__: Any) -> ArrayRecord:
        number = len(self.plan.groups)
        type(self).now_s += SECONDS[number]
        type(self).rounds.append((number, server_round))
        if number == 8 and server_round == 2:
            raise TrainingFailed("not finite")
        self.resumed_after = server_round
        return ArrayRecord({})


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    monkeypatch.setattr(warm_up, "GroupGrid", lambda grid: grid)
    monkeypatch.setattr(warm_up, "time", SimpleNamespace(monotonic=lambda: Scripted.now_s))
    monkeypatch.setattr(Scripted, "now_s", 0.0)
    monkeypatch.setattr(Scripted, "rounds", [], raising=False)
    return Scripted


def chosen(kind: type[Scripted], cluster: Cluster = RACK, **settings: Any) -> warm_up.WarmUp:
    def accuracy_of(arrays: ArrayRecord) -> float:
        return 0.1 + GAIN[kind.rounds[-1][0]] * kind.rounds[-1][1] if kind.rounds else 0.1

    def make(number: int) -> Scripted:
        schedule = TrainingSchedule(num_samples=640, batch_size=8, num_epochs=30, interval_epochs=1)
        return kind(cluster=cluster, groups=number, schedule=schedule)

    grid: Any = SimpleNamespace()
    return warm_up.profile_group_count(
        grid, ArrayRecord({}), accuracy_of, make, (1, 2, 4, 8), **settings
    )


def test_a_grid_without_virtual_time_is_measured_and_the_chosen_strategy_goes_on(
    scripted: type[Scripted],
) -> None:
    found = chosen(scripted)
    # After 2 s, 4 groups are ahead of 2 after 4 s and of 1 after 8 s; 8 diverge in their second round.
    assert found.num_groups == len(found.strategy.plan.groups) == 4
    own = [number for groups, number in scripted.rounds if groups == 4]
    assert own == [*range(1, len(own) + 1)] and found.strategy.resumed_after == len(own)
    assert found.accuracies[4] == pytest.approx(0.1 + 0.03 * len(own))
    assert (8, 3) not in scripted.rounds
    assert profile_group_count is warm_up.profile_group_count


def test_the_paper_s_rule_tries_few_groups_first_and_other_rules_are_refused(
    scripted: type[Scripted],
) -> None:
    assert chosen(scripted, rule="paper").num_groups == 1
    assert scripted.rounds == [(1, 1), (2, 1)]
    refused(lambda: chosen(scripted, rule="quickest"), "'quickest'", "time")
