"""Our strategies inside strategies whose own `start` calls their hooks, as Flower's differential privacy does."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)

from socflower.cluster import parse_cluster
from socflower.engines.local.grid import LocalGrid
from socflower.errors import TrainingFailed
from socflower.strategies.baselines import OrderedFedAvg
from socflower.strategies.group_grid import GroupGrid
from socflower.strategies.methods.local import LocalSchedule
from socflower.strategies.node_registry import QUERY_TYPE
from socflower.strategies.planned_rounds import Resumable
from socflower.strategies.settings import TrainingSchedule
from socflower.strategies.socflow import SoCFlow
from socflower.wire.message_keys import ARRAYS, RESUMED, STATUS, NodeStatus, encode
from tests.one_line import refused
from tests.process_grid import ProcessGrid
from tests.strategies import ring_app
from tests.strategies.fake_messages import NODES, FakeGrid, answer, answer_error, model, values
from tests.strategies.faulty_run import FaultyRun
from tests.strategies.test_split_replay import replay, whole

FAR = 1e9  # a norm that no update reaches


class PassingOn(Strategy):
    """Calls the hooks of the strategy inside and changes nothing; `replies` are what it was given, by round."""

    def __init__(self, inside: Strategy) -> None:
        self.inside = inside
        self.replies: dict[int, list[Message]] = {}

    def summary(self) -> None:
        self.inside.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.inside.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        self.replies[server_round] = list(replies)
        return self.inside.aggregate_train(server_round, self.replies[server_round])

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.inside.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        return self.inside.aggregate_evaluate(server_round, replies)


def private(inside: Strategy) -> Strategy:
    """Return Flower's differential privacy without noise and in effect without clipping."""
    return DifferentialPrivacyServerSideFixedClipping(inside, 0.0, FAR, 2)


def adaptive(inside: Strategy) -> Strategy:
    return DifferentialPrivacyServerSideAdaptiveClipping(inside, 0.0, 2, FAR)


def socflow(**settings: Any) -> SoCFlow:
    return SoCFlow(
        cluster=parse_cluster({"boards": [2, 2]}),
        groups=2,
        schedule=TrainingSchedule(num_samples=400, batch_size=20, num_epochs=2, interval_epochs=1),
        **settings,
    )


def fedavg() -> OrderedFedAvg:
    return OrderedFedAvg(schedule=LocalSchedule(num_rounds=4), num_socs=4)


class ScriptedGrid(FakeGrid):
    """Every client answers with the round's number in its model; those that `raises` names do not."""

    def __init__(
        self,
        raises: Callable[[int, int], bool] = lambda server_round, node: False,
        code: int = 2,
        nodes: tuple[int, ...] = NODES,
    ) -> None:
        super().__init__(nodes)
        self._raises, self._code = raises, code

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        replies = []
        for message in messages:
            server_round = int(message.content["config"]["server-round"])
            raised = self._raises(server_round, message.metadata.dst_node_id)
            replies.append(
                answer_error(message, self._code, "on purpose")
                if raised
                else answer(message, float(server_round))
            )
        return replies


# ----------------------------------------------------------------------------------------------- in one process
@pytest.mark.few_cells(2)
@pytest.mark.parametrize("around", [PassingOn, private, adaptive])
@pytest.mark.parametrize("given", [lambda grid: grid, GroupGrid])
def test_around_groups_in_one_process_it_trains_the_same(around: Any, given: Any) -> None:
    trained = []
    for outer in (lambda strategy: strategy, around):
        strategy = ring_app.strategy(ring_app.cluster(), num_epochs=1)
        with LocalGrid(ring_app.client_app(), 4, num_workers=0) as grid:
            trained.append(
                outer(strategy)
                .start(given(grid), ring_app.initial(), num_rounds=strategy.num_rounds)
                .arrays
            )
        assert [report.events for report in strategy.reports] == [()]
    for name in trained[0]:
        np.testing.assert_allclose(trained[1][name].numpy(), trained[0][name].numpy(), atol=1e-6)


@pytest.mark.parametrize("make", [socflow, fedavg])
def test_a_round_that_is_kept_back_ends_the_training(make: Callable[[], Strategy]) -> None:
    """One client raises in round 2; Flower's differential privacy then gives nothing to the strategy inside."""
    strategy = make()
    refused(
        lambda: private(strategy).start(
            ScriptedGrid(lambda number, node: number == 2 and node == 10), model(), num_rounds=2
        ),
        "round 2",
        error=TrainingFailed,
    )


def test_a_round_of_halves_that_is_kept_back_ends_the_training() -> None:
    class EdgesThatRaise(FakeGrid):
        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> list[Message]:
            return [answer_error(message, 2, "on purpose") for message in messages]

    refused(
        lambda: private(replay()).start(EdgesThatRaise(), whole(), num_rounds=2),
        "SplitReplay",
        "round 1",
        error=TrainingFailed,
    )


def test_through_the_group_grid_the_client_that_raised_is_named() -> None:
    strategy, grid = socflow(), ScriptedGrid(lambda number, node: number == 2 and node == 10)
    refused(
        lambda: private(strategy).start(GroupGrid(grid), model(), num_rounds=2),
        "10",
        "group 0",
        "on purpose",
        "client raised",
        "SoC 0",
        error=TrainingFailed,
    )


@pytest.mark.parametrize("around", [PassingOn, private, adaptive])
def test_through_the_group_grid_a_client_that_died_is_left_out_and_told_of(around: Any) -> None:
    strategy, grid = (
        socflow(),
        ScriptedGrid(lambda number, node: number == 1 and node == 10, code=8),
    )
    arrays = around(strategy).start(GroupGrid(grid), model(), num_rounds=2).arrays
    assert values(arrays) == pytest.approx([2.0] * 3)
    assert [[event.kind for event in report.events] for report in strategy.reports] == [
        ["no-reply"],
        [],
    ]
    assert "SoC 0 (node 10): failed: on purpose" in strategy.reports[0].events[0].text


@pytest.mark.parametrize("around", [PassingOn, private, adaptive])
def test_a_round_in_which_all_clients_died_ends_with_the_first_cause(around: Any) -> None:
    strategy, grid = socflow(), ScriptedGrid(lambda number, node: True, code=8)
    refused(
        lambda: around(strategy).start(GroupGrid(grid), model(), num_rounds=2),
        "no group",
        "on purpose",
        error=TrainingFailed,
    )


class AskedGrid(ScriptedGrid):
    """Nodes that answer a status query when its answer is pulled."""

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        self.asked = list(messages)
        return [f"query {number}" for number, _ in enumerate(self.asked)]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = []
        for message_id in message_ids:
            replies.append(
                Message(
                    RecordDict({STATUS: ConfigRecord(encode(NodeStatus()))}),
                    reply_to=self.asked[int(message_id.split()[1])],
                )
            )
            replies[-1].metadata.__dict__["_reply_to_message_id"] = message_id
        return replies


@pytest.mark.parametrize("around", [lambda strategy: strategy, PassingOn, private])
def test_nodes_that_are_away_are_asked_in_a_round_and_back_in_the_next(around: Any) -> None:
    strategy, grid = socflow(), AskedGrid()
    strategy.resume_from(0, away=[1])
    around(strategy).start(GroupGrid(grid), model(), num_rounds=2)
    assert [message.metadata.dst_node_id for message in grid.asked] == [20]
    assert strategy.state["away"] == []
    assert [[event.kind for event in report.events] for report in strategy.reports] == [
        ["replanned", "returned"],
        ["replanned"],
    ]


# --------------------------------------------------------------------------------------------------- resuming
@pytest.mark.parametrize("around", [PassingOn, private])
@pytest.mark.parametrize("make", [socflow, fedavg])
def test_a_strategy_around_a_resumed_one_goes_on_with_the_true_rounds(
    around: Any, make: Any
) -> None:
    strategy = make()
    strategy.resume_from(1)
    sent: list[tuple[int, object]] = []

    class Noting(ScriptedGrid):
        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> list[Message]:
            messages = list(messages)
            sent.extend(
                (message.content["config"]["server-round"], message.content["config"].get(RESUMED))
                for message in messages
            )
            return super().send_and_receive(messages, timeout=timeout)

    evaluated: list[int] = []
    result = around(strategy).start(
        GroupGrid(Noting()),
        model(),
        num_rounds=2,
        evaluate_fn=strategy.skip_done_rounds(lambda number, arrays: evaluated.append(number)),
    )
    assert sent == ([(2, True)] * 2 if make is socflow else [(2, None)] * 4)
    assert list(result.train_metrics_clientapp) == evaluated == [2]
    assert values(result.arrays) == pytest.approx([2.0] * 3)


def test_a_strategy_around_that_cannot_take_an_empty_round_is_resumed_too() -> None:
    """Flower's adaptive clipping divides by the number of replies."""

    class Adaptive(Resumable, DifferentialPrivacyServerSideAdaptiveClipping):
        pass

    strategy = socflow()
    outer = Adaptive(strategy, 0.0, 2, FAR)
    strategy.resume_from(1)
    outer.resume_from(1)
    result = outer.start(GroupGrid(ScriptedGrid()), model(), num_rounds=2)
    assert list(result.train_metrics_clientapp) == [2] and values(result.arrays) == pytest.approx(
        [2.0] * 3
    )


# ------------------------------------------------------------------------------------------------------ rings
class RingNodes(FakeGrid):
    """Four nodes that say that they have rings, and note what else they are asked for."""

    in_one_process = False

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[Message] = []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        replies = []
        for message in messages:
            if message.metadata.message_type != QUERY_TYPE:
                self.trained.append(message)
                continue
            node = message.metadata.dst_node_id
            status = NodeStatus(
                ring=f"127.0.0.1:{node}",
                board=node // 30,
                slot=node // 10 % 2,
                transports=("grpc",),
            )
            replies.append(
                Message(RecordDict({STATUS: ConfigRecord(encode(status))}), reply_to=message)
            )
        return replies

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        pushed = list(messages)
        self.trained.extend(each for each in pushed if each.metadata.message_type != QUERY_TYPE)
        assert not self.trained, "sent"
        return super().push_messages(pushed)


def test_clipping_at_the_clients_is_refused_in_rings_before_anything_is_trained() -> None:
    grid, strategy = RingNodes(), socflow()
    refused(
        lambda: strategy.start(
            grid, model(), num_rounds=2, train_config=ConfigRecord({"clipping_norm": 1.0})
        ),
        "clipping_norm",
    )
    assert grid.trained == []


def test_around_rings_every_group_has_one_reply_and_a_death_is_told(tmp_path: Path) -> None:
    """Two rings of two processes; nothing happens in round 1, and a member is killed in round 2."""
    outer: list[PassingOn] = []

    def around(strategy: SoCFlow) -> Strategy:
        outer.append(PassingOn(strategy))
        return outer[0]

    with FaultyRun(
        tmp_path,
        boards=2,
        socs_per_board=2,
        num_groups=2,
        num_epochs=1,
        interval_epochs=0.5,
        step_s=0.05,
        around=around,
    ) as run:
        run.wait_steps(1, 2, 2)
        run.kill(1)
        run.check_weights()
        run.check_ledger({2: (1,)})
    first, second = run.strategy.reports
    assert first.events == ()
    assert {"member-lost", "ring-formed-again"} <= {event.kind for event in second.events}
    assert {event.group_id for event in second.events} == {0}
    for replies in outer[0].replies.values():
        assert len(replies) == 2 and all(ARRAYS in reply.content.array_records for reply in replies)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("around", [private, adaptive])
@pytest.mark.parametrize("transport", ["gloo", "grpc"])
def test_differential_privacy_around_rings_clips_each_groups_update_once(
    around: Any, transport: str
) -> None:
    def trained(outer: Callable[[SoCFlow], Strategy]) -> tuple[ArrayRecord, Any]:
        strategy = ring_app.strategy(ring_app.cluster(), rings={"transport": transport})
        with ProcessGrid(ring_app.client_app, ring_app.node_configs(ring_app.cluster())) as grid:
            started = outer(strategy)
            result = started.start(
                GroupGrid(grid), ring_app.initial(), num_rounds=strategy.num_rounds, timeout=120
            )
        assert [report.events for report in strategy.reports] == [
            (),
            (),
        ] and strategy.method.describe().transports()["inside groups"] == transport
        return result.arrays, started

    reference, _ = trained(lambda strategy: strategy)
    ours, outer = trained(around)
    for name in reference:
        np.testing.assert_allclose(
            ours[name].numpy(), reference[name].numpy(), atol=1e-5, rtol=1e-4
        )
    # No update was clipped, by the count over groups and not over members.
    if around is adaptive:
        assert outer.clipping_norm == pytest.approx(FAR * np.exp(0.2 * 0.5) ** 2)
    clipped = trained(
        lambda strategy: DifferentialPrivacyServerSideFixedClipping(strategy, 0.0, 0.01, 2)
    )[0]
    first = ring_app.initial()
    update = np.sqrt(
        sum(((clipped[name].numpy() - first[name].numpy()) ** 2).sum() for name in first)
    )
    assert 0.0 < update <= 2 * 0.01 * (1 + 1e-4)


@pytest.mark.parametrize("gone", [None, 20, 40])
def test_whoever_has_a_groups_momentum_reads_it_after_a_resume_without_its_leader(
    gone: int | None,
) -> None:
    """Nodes 20 and 40 are the leaders. Where one is gone its group's other member may have the momentum."""

    class WithoutOne(RingNodes):
        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> list[Message]:
            asked = {message.metadata.dst_node_id: message for message in messages}
            lost = [asked.pop(gone)] if gone in asked else []
            errors = [answer_error(each, 3, "gone") for each in lost]
            return [*errors, *super().send_and_receive(asked.values())]

    strategy = socflow()
    strategy.resume_from(1, without_state=[])
    sent = strategy.configure_train(2, model(), ConfigRecord(), WithoutOne())
    leaders = {each.metadata.dst_node_id for each in sent if "arrays" in each.content}
    assert len(leaders) == 2 and gone not in leaders
    expected = {10: gone != 20, 20: True, 30: gone != 40, 40: True}
    if gone is not None:
        del expected[gone]
    asked = {each.metadata.dst_node_id: each.content["config"][RESUMED] for each in sent}
    assert asked == expected
