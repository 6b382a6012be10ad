"""Flower's strategies as the outer step of groups: against their arithmetic, written anew in NumPy, and themselves."""

import gc
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import (
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    Strategy,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from socflower.cluster import parse_cluster
from socflower.errors import ConfigError, TrainingFailed
from socflower.flower_adapter import begin_run
from socflower.strategies.baselines import OrderedFedAvg
from socflower.strategies.methods.local import LocalSchedule
from socflower.strategies.outer_momentum import OuterSGD, nesterov
from socflower.strategies.settings import ExchangeSettings, TrainingSchedule
from socflower.strategies.socflow import SoCFlow
from socflower.wire.message_keys import GROUP, UNTRAINED
from tests.one_line import refused
from tests.strategies.fake_messages import FakeGrid, answer_error

Model = dict[str, NDArray[Any]]


@pytest.fixture(autouse=True)
def no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's QFedAvg and Bulyan collect garbage for each model, which takes longer than all else here."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


BUFFERS = ("norm.mean", "norm.count")
NUM_ROUNDS = 4


def first_model() -> Model:
    return {
        "w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
        "norm.mean": np.zeros(2, np.float32),
        "b": np.array([0.5, -0.5], np.float32),
        "norm.count": np.array(3, np.int64),
    }


def record(model: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in model.items()})


def arrays_of(arrays: ArrayRecord | None) -> Model:
    assert arrays is not None
    return {name: array.numpy() for name, array in arrays.items()}


def trained(sent: Model, server_round: int, group: int) -> Model:
    """Return what a group makes of a model: a random update, and one of group 0 that is far from all others."""
    draw = np.random.default_rng([server_round, group])
    scale = 5.0 if group == 0 else 0.1
    return {
        name: (array + draw.normal(0, scale, array.shape)).astype(array.dtype)
        if array.dtype == np.float32
        else np.asarray(array + 2 + group)
        for name, array in sent.items()
    }


class Groups(FakeGrid):
    """Clients that train as groups, by `trained`; `lost` says which fail in a round."""

    def __init__(
        self,
        num_nodes: int,
        lost: Callable[[int, int], bool] = lambda server_round, group: False,
        names: Sequence[str] | None = BUFFERS,
    ) -> None:
        super().__init__(tuple(range(10, 10 + num_nodes)))
        self.tasks: list[ConfigRecord] = []
        self.models: list[list[Model]] = []  # of the groups, by round
        self.sent: list[Model] = []
        self._lost, self._names = lost, names

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        replies, models = [], []
        for message in messages:
            if message.metadata.message_type != "train":
                continue
            server_round = int(message.content["config"]["server-round"])
            task = cast(ConfigRecord, message.content[GROUP])
            self.tasks.append(task)
            group = int(task["group-id"])
            if self._lost(server_round, group):
                replies.append(answer_error(message, 8, "on purpose"))
                continue
            sent = arrays_of(message.content["arrays"])
            models.append(trained(sent, server_round, group))
            content = RecordDict(
                {
                    "arrays": record(models[-1]),
                    "metrics": MetricRecord(
                        {
                            "num-examples": samples(group),
                            "train-loss": 1.0 + group,
                            "socflower-group": group,
                            "list": [1.0],
                        }
                    ),
                }
            )
            if self._names is not None:
                content[UNTRAINED] = ConfigRecord({"names": list(self._names)})
            replies.append(Message(content, reply_to=message))
        if models:
            self.sent.append(sent)
            self.models.append(models)
        return replies


def samples(group: int) -> int:
    return 10 + 7 * group


def socflow(outer: Strategy | None, num_groups: int = 3, **changes: Any) -> SoCFlow:
    return SoCFlow(
        cluster=parse_cluster({"boards": [2] * num_groups}),
        groups=num_groups,
        outer=outer,
        schedule=TrainingSchedule(
            num_samples=400, batch_size=20, num_epochs=NUM_ROUNDS, interval_epochs=1
        ),
        **changes,
    )


def quiet(outer: FedAvg) -> FedAvg:
    """Return the strategy without federated evaluation."""
    outer.fraction_evaluate = 0.0
    return outer


def run(
    outer: FedAvg | None, num_groups: int = 3, leaders: str = "auto", **grid: Any
) -> tuple[Groups, list[Model], SoCFlow]:
    """Return the grid, the model after each round, and the strategy."""
    strategy = socflow(
        outer and quiet(outer), num_groups, exchange=ExchangeSettings(leaders=leaders)
    )
    nodes, after = Groups(2 * num_groups, **grid), list[Model]()
    strategy.start(
        nodes,
        record(first_model()),
        num_rounds=NUM_ROUNDS,
        evaluate_fn=lambda number, arrays: after.append(arrays_of(arrays)),
    )
    return nodes, after[1:], strategy


# ------------------------------------------------------------------------------------------- written anew in NumPy
def mean(models: Sequence[Model], name: str) -> NDArray[Any]:
    weights = np.array([samples(group) for group in range(len(models))], np.float64)
    return np.asarray(
        np.average([model[name].astype(np.float64) for model in models], axis=0, weights=weights)
    )


class Reference:
    """An outer step in float64, kept for one tensor."""

    def __init__(self, rule: str) -> None:
        self.rule, self.m, self.v = rule, 0.0 * np.zeros(1), 0.0 * np.zeros(1)
        self.rounds = 0

    def step(self, old: NDArray[Any], models: Sequence[Model], name: str) -> NDArray[Any]:
        self.rounds += 1
        delta = mean(models, name) - old
        if self.rule in ("FedAvgM", "heavy ball", "Nesterov"):
            self.m = 0.6 * self.m - delta
            ahead = 0.6 * self.m - delta if self.rule == "Nesterov" else self.m
            return np.asarray(old - 0.7 * ahead)
        if self.rule == "FedMedian":
            return np.asarray(np.median([model[name] for model in models], axis=0))
        if self.rule == "Krum":
            flat = [np.concatenate([model[key].ravel() for key in ("w", "b")]) for model in models]
            distances = np.array([[np.square(one - other).sum() for other in flat] for one in flat])
            closest = np.sort(distances, axis=1)[
                :, 1:2
            ]  # n - f - 2 = 5 - 1 - 2 = 2 without itself; see below
            closest = np.sort(distances, axis=1)[:, 1:3] if len(flat) == 5 else closest
            return models[int(np.argmin(closest.sum(axis=1)))][name]
        self.m = 0.9 * self.m + 0.1 * delta
        if self.rule == "FedAdam":
            self.v = 0.99 * self.v + 0.01 * delta**2
            rate = 0.1 * np.sqrt(1 - 0.99 ** (self.rounds + 1)) / (1 - 0.9 ** (self.rounds + 1))
        else:
            self.v = self.v - 0.01 * delta**2 * np.sign(self.v - delta**2)
            rate = 0.1
        return np.asarray(old + rate * self.m / (np.sqrt(self.v) + 1e-3))


OUTER: dict[str, tuple[Callable[[], FedAvg], int]] = {
    "FedAdam": (lambda: FedAdam(eta=0.1), 3),
    "FedYogi": (lambda: FedYogi(eta=0.1), 3),
    "FedAvgM": (lambda: FedAvgM(server_learning_rate=0.7, server_momentum=0.6), 3),
    "heavy ball": (lambda: OuterSGD(0.7, 0.6), 3),
    "Nesterov": (lambda: nesterov(0.7, 0.6), 3),
    "FedMedian": (FedMedian, 3),
    "Krum": (lambda: Krum(num_malicious_nodes=1), 5),
}


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("rule", OUTER)
def test_the_outer_step_is_the_formula_on_what_trains_and_the_mean_of_buffers(rule: str) -> None:
    make, num_groups = OUTER[rule]
    grid, after, _ = run(make(), num_groups)
    expected, references = (
        {name: array.astype(np.float64) for name, array in first_model().items()},
        {name: Reference(rule) for name in ("w", "b")},
    )
    for models, model in zip(grid.models, after, strict=True):
        for name, reference in references.items():
            expected[name] = reference.step(expected[name], models, name)
            np.testing.assert_allclose(model[name], expected[name], rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(model["norm.mean"], mean(models, "norm.mean"), rtol=1e-6)
        assert model["norm.count"] == max(each["norm.count"] for each in models)
        assert {name: array.dtype for name, array in model.items()} == {
            name: array.dtype for name, array in first_model().items()
        }
        assert list(model) == list(first_model())


class Sampled(FakeGrid):
    """Nodes that a strategy of Flower's finds when it samples them."""


@pytest.mark.parametrize("rule", OUTER)
def test_the_outer_step_is_what_flowers_strategy_makes_of_the_same_models(rule: str) -> None:
    """To the bit: Flower's strategy, driven by hand, gets what trains of the groups' models of each round."""
    make, num_groups = OUTER[rule]
    grid, after, _ = run(make(), num_groups, "star")
    own, nodes = make(), cast(Grid, Sampled(tuple(range(num_groups))))
    for number, (sent, models, model) in enumerate(
        zip(grid.sent, grid.models, after, strict=True), 1
    ):
        messages = list(
            own.configure_train(
                number, record({name: sent[name] for name in ("w", "b")}), ConfigRecord(), nodes
            )
        )
        replies = [
            Message(
                RecordDict(
                    {
                        "arrays": record({name: each[name] for name in ("w", "b")}),
                        "metrics": MetricRecord({"num-examples": samples(group)}),
                    }
                ),
                reply_to=message,
            )
            for group, (message, each) in enumerate(zip(messages, models, strict=True))
        ]
        made = arrays_of(own.aggregate_train(number, replies)[0])
        for name in ("w", "b"):
            np.testing.assert_array_equal(model[name], made[name].astype(np.float32))


@pytest.mark.few_cells(3)
@pytest.mark.parametrize("leaders", ["star", "ring", "tree"])
@pytest.mark.parametrize("make", [FedAvg, OuterSGD])
@pytest.mark.parametrize("names", [BUFFERS, None])
def test_with_the_mean_or_a_whole_step_of_sgd_the_bits_are_those_without_an_outer_strategy(
    names: Sequence[str] | None, make: Callable[[], FedAvg], leaders: str
) -> None:
    _, plain, without = run(None, leaders=leaders, names=names)
    _, outer, around = run(make(), leaders=leaders, names=names)
    for ours, reference in zip(outer, plain, strict=True):
        for name in reference:
            np.testing.assert_array_equal(ours[name], reference[name])
    assert without.state["outer"] == around.state["outer"] == {}


class Given(FakeGrid):
    """Groups that answer with given models and samples."""

    def __init__(self, models: Sequence[Model], weights: Sequence[int]) -> None:
        super().__init__(tuple(range(2 * len(models))))
        self._given = list(zip(models, weights, strict=True))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        replies = []
        for group, (message, (model, weight)) in enumerate(
            zip(messages, self._given, strict=False)
        ):
            metrics = {"num-examples": weight, "train-loss": 0.5, "socflower-group": group}
            content = {"arrays": record(model), "metrics": MetricRecord(metrics)}
            content[UNTRAINED] = ConfigRecord({"names": list(BUFFERS)})
            replies.append(Message(RecordDict(content), reply_to=message))
        return replies


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), weights=st.lists(st.integers(1, 10**6), min_size=1, max_size=5)
)
def test_fedavg_is_the_mean_by_samples_whatever_models_and_samples(
    seed: int, weights: list[int]
) -> None:
    begin_run(1)
    draw = np.random.default_rng(seed)
    models = [
        {
            name: draw.normal(0, 10, array.shape).astype(array.dtype)
            for name, array in first_model().items()
        }
        for _ in weights
    ]
    plain, ours = (
        socflow(outer, len(weights)).start(
            cast(Grid, Given(models, weights)), record(first_model()), num_rounds=1
        )
        for outer in (None, quiet(FedAvg()))
    )
    assert {name: array.data for name, array in ours.arrays.items()} == {
        name: array.data for name, array in plain.arrays.items()
    }
    assert ours.train_metrics_clientapp == plain.train_metrics_clientapp


def test_metrics_are_those_of_the_outer_strategy() -> None:
    def largest(contents: list[RecordDict], key: str) -> MetricRecord:
        return MetricRecord(
            {"most": max(float(content["metrics"]["train-loss"]) for content in contents)}
        )

    cases = (
        (Krum(num_malicious_nodes=1), None),
        (FedAvg(train_metrics_aggr_fn=largest), {"most": 5.0}),
    )
    for outer, expected in cases:
        strategy = socflow(quiet(outer), 5)
        result = strategy.start(Groups(10), record(first_model()), num_rounds=NUM_ROUNDS)
        metrics = dict(result.train_metrics_clientapp[1])
        # The loss of the group that was chosen.
        if expected is None:
            assert metrics["train-loss"] in (2.0, 3.0, 4.0, 5.0) and set(metrics) == {
                "train-loss",
                "num-examples",
            }
        else:
            assert metrics == expected


def test_most_groups_decide_what_the_outer_step_leaves_out() -> None:
    """A malicious group that calls its weights buffers would have them averaged, past the median."""

    class Liar(Groups):
        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> list[Message]:
            replies = super().send_and_receive(messages, timeout=timeout)
            if replies:
                replies[0].content[UNTRAINED] = ConfigRecord({"names": ["w", "b"]})
            return replies

    strategy, after = socflow(quiet(FedMedian())), list[Model]()
    grid = Liar(6)
    strategy.start(
        grid,
        record(first_model()),
        num_rounds=1,
        evaluate_fn=lambda number, arrays: after.append(arrays_of(arrays)),
    )
    np.testing.assert_array_equal(
        after[1]["w"], np.median([each["w"] for each in grid.models[0]], axis=0)
    )
    np.testing.assert_allclose(after[1]["norm.mean"], mean(grid.models[0], "norm.mean"), rtol=1e-6)


def test_a_group_that_is_lost_is_left_out_of_the_outer_step() -> None:
    def second(server_round: int, group: int) -> bool:
        return server_round == 2 and group == 2

    grid, after, strategy = run(FedMedian(), 3, lost=second)
    assert [len(models) for models in grid.models] == [3, 2, 3, 3]
    np.testing.assert_allclose(
        after[1]["w"], np.mean([each["w"] for each in grid.models[1]], axis=0), rtol=1e-6
    )
    assert [event.kind for event in strategy.reports[1].events] == ["no-reply"]


def test_too_few_groups_for_the_rule_are_told_and_bulyan_keeps_the_model() -> None:
    def first(server_round: int, group: int) -> bool:
        return server_round == 1 and group == 6

    _, after, strategy = run(flower.Bulyan(num_malicious_nodes=1), 7, lost=first)
    for name, array in first_model().items():
        np.testing.assert_array_equal(after[0][name], array)
    assert [event.kind for event in strategy.reports[0].events] == [
        "no-reply",
        "outer-step",
        "outer-step",
    ]
    assert "4 · 1 + 3 = 7 groups, and there are 6 groups" in strategy.reports[0].events[1].text
    assert "the global model stays" in strategy.reports[0].events[2].text
    assert strategy.reports[1].events == ()


@pytest.mark.parametrize(
    "outer", [None, FedAvg, FedAdam, FedMedian, lambda: Krum(num_malicious_nodes=0)]
)
@pytest.mark.parametrize("number", [1, 2, NUM_ROUNDS])
def test_a_round_in_which_no_group_succeeded_ends_the_training(outer: Any, number: int) -> None:
    refused(
        lambda: run(outer and outer(), 3, lost=lambda server_round, group: server_round == number),
        "no group",
        "on purpose",
        error=TrainingFailed,
    )


def test_an_outer_step_that_makes_nan_ends_the_training_with_its_name() -> None:
    refused(lambda: run(FedAdam(eta=1e39), 3), "FedAdam", "NaN", "round 1", error=TrainingFailed)


def test_pythons_random_numbers_are_not_touched() -> None:
    random.seed(3)
    before = random.getstate()
    run(FedAdam(), 3)
    assert random.getstate() == before


# ---------------------------------------------------------------------------------------------------------- resuming
@pytest.mark.few_cells(5)
@pytest.mark.parametrize(
    "make",
    [
        lambda: FedAdam(eta=0.1),
        lambda: FedAvgM(server_momentum=0.6),
        nesterov,
        FedYogi,
        FedMedian,
        lambda: flower.QFedAvg(0.1, train_loss_key="train-loss"),
        flower.FedAdagrad,
    ],
)
@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_resumed_training_has_the_bits_of_an_uninterrupted_one(
    make: Callable[[], FedAvg], done: int
) -> None:
    states: list[tuple[ArrayRecord, Mapping[str, Any]]] = []
    whole = socflow(quiet(make()))

    def keep(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        states.append(
            (
                record(arrays_of(arrays)),
                {
                    key: dict(value) if key == "outer" else value
                    for key, value in whole.state.items()
                },
            )
        )
        return None

    reference = whole.start(
        Groups(6), record(first_model()), num_rounds=NUM_ROUNDS, evaluate_fn=keep
    ).arrays
    strategy = socflow(quiet(make()))
    arrays, state = states[done]
    strategy.resume_from(done, **state)
    resumed = strategy.start(Groups(6), arrays, num_rounds=NUM_ROUNDS).arrays
    assert {name: array.data for name, array in resumed.items()} == {
        name: array.data for name, array in reference.items()
    }


def test_the_state_is_the_moments_without_what_every_round_sets() -> None:
    assert {name.split("/")[0] for name in run(FedAdam())[2].state["outer"]} == {"m_t", "v_t"}
    assert {name.split("/")[0] for name in run(FedAvgM(server_momentum=0.6))[2].state["outer"]} == {
        "momentum_vector",
        "current_arrays",
    }
    assert (
        run(FedMedian())[2].state["outer"]
        == run(flower.QFedAvg(0.1, train_loss_key="train-loss"))[2].state["outer"]
        == {}
    )


class Counting(FedAvg):
    """A user's own: a number that counts rounds, and an array that it changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds_seen, self.total, self.label = 0, np.zeros(2), "mine"

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        self.rounds_seen += 1
        self.total += self.rounds_seen
        return super().aggregate_train(server_round, replies)


def test_the_state_of_a_users_own_strategy_is_kept_too() -> None:
    strategy = run(Counting())[2]
    other = Counting()
    resumed = socflow(quiet(other))
    resumed.resume_from(2, outer=strategy.state["outer"])
    assert (other.rounds_seen, other.total.tolist(), other.label) == (4, [10.0, 10.0], "mine")


def test_moments_of_another_strategy_are_refused() -> None:
    moments = run(FedAdam())[2].state["outer"]
    refused(lambda: socflow(FedAvgM()).resume_from(2, outer=moments), "m_t", "FedAvgM")
    refused(lambda: socflow(None).resume_from(2, outer=moments), "SoCFlow", "outer")


# ------------------------------------------------------------------------------------------- what is refused, and when
class Adding(FedAvg):
    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Any:
        config["temperature"] = 0.5
        return super().configure_train(server_round, arrays, config, grid)


class Raising(FedAvg):
    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        raise ValueError("I need\nmore")


class Shrinking(FedAvg):
    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        del arrays["w"]
        return arrays, metrics


class Locked(FedAvg):
    def __init__(self) -> None:
        super().__init__()
        self.sockets = (each for each in "12")


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: "fedadam", "outer = 'fedadam' must be a strategy of Flower's, such as"),
    (
        lambda: OrderedFedAvg(schedule=LocalSchedule(num_rounds=1), num_socs=1),
        r"outer = OrderedFedAvg\(…\) makes groups or rounds of its own; give a strategy of",
    ),
    (lambda: socflow(None), r"outer = SoCFlow\(…\) makes groups or rounds of its own"),
    (
        lambda: flower.DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.1, 1.0, 2),
        r"wraps another strategy; put it around: DifferentialPrivacyServerSideFixedClipping\(SoCFlow\(…\), …\)",
    ),
    (
        lambda: flower.FedXgbBagging(),
        r"outer = FedXgbBagging\(…\) collects trees, and groups train the weights",
    ),
    (lambda: flower.FedXgbCyclic(), r"outer = FedXgbCyclic\(…\) collects trees"),
    (
        lambda: FedAvg(fraction_train=0.5),
        r"FedAvg\(fraction_train=0.5\) must be 1.0: every group trains in every",
    ),
    (lambda: FedAvg(weighted_by_key="loss"), r"weighted_by_key='loss'\) must be 'num-examples'"),
    (lambda: FedAvg(arrayrecord_key="model"), r"arrayrecord_key='model'\) must be 'arrays'"),
    (
        lambda: FedAvg(min_train_nodes=4),
        r"min_train_nodes=4\), and there are 3 groups to train; leave it out",
    ),
    (
        lambda: FedAvg(min_evaluate_nodes=7),
        r"min_evaluate_nodes=7\), and there are 6 nodes; give 6 at most",
    ),
    (lambda: FedAvg(min_available_nodes=7), r"min_available_nodes=7\), and there are 6 nodes"),
    (
        lambda: Krum(num_malicious_nodes=1),
        r"Krum: num_malicious_nodes = 1 needs 2 · 1 \+ 3 = 5 groups, and there are",
    ),
    (
        lambda: flower.MultiKrum(num_nodes_to_select=4),
        "MultiKrum: num_nodes_to_select = 4 needs 4 groups, and there",
    ),
    (
        lambda: flower.Bulyan(num_malicious_nodes=1),
        r"Bulyan: .* needs 4 · 1 \+ 3 = 7 groups, and there are 3 groups;",
    ),
    (
        lambda: FedTrimmedAvg(beta=0.2),
        "FedTrimmedAvg: beta = 0.2 trims nobody of fewer than 5 groups, and there are 3",
    ),
    (
        lambda: flower.QFedAvg(0.1),
        r"QFedAvg\(train_loss_key='train_loss'\), and groups report their loss as",
    ),
    (
        Adding,
        r"Adding\(…\) sets 'temperature' in the train config, which groups do not get from it; give it as",
    ),
    (Raising, r"Raising\(…\) cannot take groups as clients: I need more$"),
    (Shrinking, r"Shrinking\(…\) makes no model of 3 groups: it has no tensor 'w'"),
    (Locked, r"Locked\(…\) cannot be copied to be tried before round 1 \("),
]


@pytest.mark.parametrize(("make", "text"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_what_cannot_be_an_outer_strategy_is_refused_in_one_line_before_round_1(
    make: Callable[[], Any], text: str
) -> None:
    grid = Groups(6)
    with pytest.raises(ConfigError, match=text) as caught:
        socflow(make()).start(grid, record(first_model()), num_rounds=NUM_ROUNDS)
    assert grid.tasks == [] and "\n" not in str(caught.value)


def test_a_rule_of_ones_own_and_an_outer_strategy_are_refused_together() -> None:
    schedule = TrainingSchedule(num_samples=4, batch_size=2, num_epochs=1)
    refused(
        lambda: SoCFlow(
            cluster=parse_cluster({"boards": [2]}),
            schedule=schedule,
            outer=FedAvg(),
            average=lambda models, samples: models[0],
        ),
        "average",
        "FedAvg",
    )


def test_fedproxs_weight_is_part_of_the_groups_task() -> None:
    grid, _, _ = run(FedProx(proximal_mu=0.25), 3)
    assert {task["proximal-mu"] for task in grid.tasks} == {0.25}
    assert {task["proximal-mu"] for task in run(FedAdam())[0].tasks} == {0.0}


def test_nothing_is_logged_as_a_failure_of_flowers_sampling(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Flower waits, in its log, for nodes that are not there: groups are enough for any strategy's sample."""
    with caplog.at_level(logging.INFO):
        run(FedAvg(min_available_nodes=6), 3)
    assert "Waiting for nodes" not in caplog.text
