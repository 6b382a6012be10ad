"""Edges, ServerApp and a cloud that listens, in one process: the weights of training in one place, and refusals."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message
from numpy.typing import NDArray

from socflower.clients.split.cloud_sessions import CloudClient
from socflower.clients.split.remote_cloud import CloudLink
from socflower.edgecloud.cloud.operator_calls import (
    CloudOperator,
    fetch_weights,
    open_session,
    session_status,
)
from socflower.edgecloud.links.bandwidth_profile import LinkRates
from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.split_program import SplitProgram
from socflower.edgecloud.stream.credentials import new_token
from socflower.edgecloud.stream.frames import SplitRefused
from socflower.errors import TrainingFailed
from socflower.peers.resumable_stream import StreamLost
from socflower.strategies.split_replay import SplitReplay
from socflower.wire.split_message_keys import SPLIT, SplitTask
from tests.clients.split.clouds import Cloud, edge_app, start, strategy_of
from tests.clients.split.models import (
    BATCHES_PER_EPOCH,
    ThreadGrid,
    differing,
    generator,
    joined,
    layered,
    local_training,
    task_settings,
)
from tests.one_line import refused

NUM_BATCHES = 2 * BATCHES_PER_EPOCH

pytestmark = pytest.mark.usefixtures("one_run_and_thread")


def train(
    program: SplitProgram, num_parties: int = 1, *, here: bool = False, **settings: Any
) -> tuple[dict[str, NDArray[Any]], SplitReplay]:
    """Train by Flower's messages with a cloud, or with `here` without one."""
    with Cloud(program) as cloud:
        client = None if here else cloud.client()
        strategy = strategy_of(program, num_parties, client, **settings)
        arrays = start(
            strategy, program, ThreadGrid([edge_app(program) for _ in range(num_parties)])
        )
        if client is not None:
            assert len(session_status(cloud.operator)) == (
                num_parties if settings.get("mode", "own") == "own" else 1
            )
            client.close()
        assert session_status(cloud.operator) == [] and cloud.lines == []
    return arrays, strategy


# ----------------------------------------------------------------------------------------- weights, whatever the way
@pytest.mark.parametrize(("name", "cut"), [("lenet5", 0), ("resnet8", 2)])
def test_at_k_0_uncompressed_weights_through_the_cloud_are_those_of_local_training(
    name: str, cut: int
) -> None:
    """Two rounds, with a session that goes on, momentum and all."""
    program = layered(name)
    arrays, strategy = train(program, cut=cut)
    assert differing(arrays, local_training(program, NUM_BATCHES)) == []
    assert differing(arrays, train(program, cut=cut, here=True)[0]) == []
    for report in strategy.reports:
        (measured,) = report.measured
        assert (
            measured.staleness == (BATCHES_PER_EPOCH,)
            and measured.reconnects == 0
            and measured.up_bytes > 0
        )


def test_joined_parties_through_the_cloud_are_the_undivided_model() -> None:
    program = joined()
    arrays, strategy = train(program, 2, mode="joined")
    assert differing(arrays, local_training(program, NUM_BATCHES)) == []
    assert [len(report.measured) for report in strategy.reports] == [2, 2]


def test_a_reverse_split_through_the_cloud_is_the_undivided_model() -> None:
    program = generator()
    arrays, _ = train(program, cut=1)
    assert differing(arrays, local_training(program, NUM_BATCHES)) == []


@pytest.mark.parametrize("mode", ["own", "turns"])
def test_several_edges_through_the_cloud_train_as_in_one_process(mode: str) -> None:
    """SplitFed: with halves of their own sessions begin anew each round, with the mean; a shared one goes on."""
    program = layered()
    arrays, _ = train(program, 2, mode=mode)
    assert differing(arrays, train(program, 2, mode=mode, here=True)[0]) == []


def test_with_a_window_no_gradient_comes_back_staler_than_k() -> None:
    _, strategy = train(layered(), window=2)
    for report in strategy.reports:
        assert (
            len(report.measured[0].staleness) <= 3
            and sum(report.measured[0].staleness) == BATCHES_PER_EPOCH
        )


def test_an_edge_that_trained_a_round_alone_begins_a_new_session_from_what_it_has() -> None:
    program = layered()
    with Cloud(program) as cloud:
        client = cloud.client()
        strategy = strategy_of(program, 1, client, num_epochs=3)
        names = []
        inner = client.open

        def opened(task: SplitTask, weights: Any) -> SplitTask:
            names.append(inner(task, weights))
            return names[-1]

        client.open = opened  # type: ignore[method-assign]
        grid = ThreadGrid([edge_app(program)])
        arrays: Any = ArrayRecord(program.model().state_dict())
        for server_round, cut in ((1, 0), (2, None), (3, 0)):
            strategy.method.parties = (replace(strategy.parties[0], split_plan=SplitPlan(cut=cut)),)
            messages = strategy.configure_train(server_round, arrays, ConfigRecord({}), grid)  # type: ignore[arg-type]
            arrays, _ = strategy.aggregate_train(server_round, grid.send_and_receive(messages))
        assert [(task.first_batch, task.session_first) for task in names] == [(0, 0), (8, 8)]
        assert [
            [event.text.partition(";")[0].partition(",")[0] for event in report.events]
            for report in strategy.reports
        ] == [
            [],
            ["edge 0: nothing is left of the optimisers before batch 4"],
            [
                "edge 0: nothing is left of the optimiser before batch 8",
                "edge 0: the cloud's half begins a new session before batch 8",
            ],
        ]
        assert all(np.isfinite(array.numpy()).all() for array in arrays.values())


# -------------------------------------------------------------------------------------------- a manager that dies
def test_after_a_managers_restart_training_goes_on_with_the_weights_of_the_last_round_and_new_optimisers() -> (
    None
):
    program = layered()
    with Cloud(program) as cloud:
        grid = ThreadGrid([edge_app(program)])
        first = strategy_of(program, 1, cloud.client(), num_epochs=2)
        messages = first.configure_train(
            1, ArrayRecord(program.model().state_dict()), ConfigRecord({}), grid
        )  # type: ignore[arg-type]
        after_one, _ = first.aggregate_train(1, grid.send_and_receive(messages))
        assert after_one is not None
        # The manager is gone without closing anything; another one has its checkpoint.
        client = cloud.client()
        second = strategy_of(program, 1, client, num_epochs=2)
        second.resume_from(1, **first.state)
        whole = start(
            second, program, grid, {name: array.numpy() for name, array in after_one.items()}
        )
        assert set(whole) == set(program.model().state_dict())
        assert differing(whole, {name: array.numpy() for name, array in after_one.items()})
        assert [event.text for event in second.reports[-1].events] == [
            "edge 0: the cloud's half begins a new session before batch 4, with the last round's weights and a new "
            "optimiser"
        ]
        tasks = [
            SplitTask.decode(message.content.config_records[SPLIT])
            for message in grid.asked
            if SPLIT in message.content.config_records
        ]
        assert [(task.first_batch, task.session_first) for task in tasks] == [(0, 0), (4, 4)]
        assert tasks[0].run != tasks[1].run and tasks[0].token != tasks[1].token
        client.close()


# -------------------------------------------------------------------------------------- a cloud that is started anew
class RestartingGrid(ThreadGrid):
    """The cloud is started anew when the edges of a round have answered, and before the manager asks it for weights."""

    def __init__(self, cloud: Cloud, program: SplitProgram, *, at_once: bool = True) -> None:
        super().__init__([edge_app(program)])
        self._cloud, self._at_once, self.restarter = cloud, at_once, threading.Thread()

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        asked = list(messages)
        replies = super().send_and_receive(asked, timeout=timeout)
        if all(SPLIT in message.content.config_records for message in asked):
            if self._at_once:
                self._cloud.restart()
            else:
                self._cloud.service.close()
                self.restarter = threading.Timer(1.0, self._cloud.restart)
                self.restarter.start()
        return replies


@pytest.mark.parametrize("at_once", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reverse", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_cloud_that_is_started_anew_between_two_rounds_leaves_no_trace_in_the_weights(
    tmp_path: Path, reverse: bool, at_once: bool
) -> None:
    program = generator() if reverse else layered()
    with Cloud(program, folder=tmp_path) as cloud:
        grid = RestartingGrid(cloud, program, at_once=at_once)
        strategy = strategy_of(program, 1, cloud.client(), cut=1 if reverse else 0)
        arrays = start(strategy, program, grid)
        if not at_once:
            grid.restarter.join(30)
    assert differing(arrays, local_training(program, NUM_BATCHES)) == []
    assert [report.events for report in strategy.reports] == [(), ()]


def test_a_cloud_that_is_started_anew_without_its_checkpoints_ends_the_training_with_a_line(
    tmp_path: Path,
) -> None:
    program = layered()
    with Cloud(program, folder=tmp_path) as cloud:
        inner, restart = cloud.service, cloud.restart

        def forget_and_restart() -> None:
            inner.close()
            for checkpoint in tmp_path.glob("*/checkpoint-*"):
                checkpoint.unlink()
            restart()

        cloud.restart = forget_and_restart  # type: ignore[method-assign]
        refused(
            lambda: start(
                strategy_of(program, 1, cloud.client()), program, RestartingGrid(cloud, program)
            ),
            "batch 0",
            error=SplitRefused,
        )


def test_closing_does_not_need_the_cloud(tmp_path: Path) -> None:
    program = layered()
    with Cloud(program) as cloud:
        client = cloud.client()
        client.open(SplitTask(**task_settings(fingerprint=program.fingerprint())), {})
    client.close()


# --------------------------------------------------------------------------------------------------------- refusals
def run_refused(cloud: Cloud, edge: SplitProgram | None = None, **changes: Any) -> str:
    """Return the line with which a training fails whose messages are changed on their way."""
    program = cloud.program
    app = edge_app(edge or program, link=CloudLink(give_up_s=3.0))

    def altered(message: Message, context: Any) -> Message:
        task = SplitTask.decode(message.content.config_records[SPLIT])
        message.content.config_records[SPLIT].update(replace(task, **changes).encode())
        return app(message, context)

    strategy = strategy_of(program, 1, cloud.client())
    with pytest.raises(TrainingFailed) as caught:
        start(strategy, program, ThreadGrid([altered]))  # type: ignore[list-item]
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_an_edge_with_a_wrong_token_is_refused() -> None:
    with Cloud(layered()) as cloud:
        assert "a 'Train' call with a wrong token" in run_refused(cloud, token=new_token())


def test_an_edge_of_a_run_that_is_not_open_is_refused() -> None:
    with Cloud(layered()) as cloud:
        # Whether the run exists is told to nobody without its token.
        assert "a 'Train' call with a wrong token" in run_refused(cloud, run="other")


def test_an_edge_that_cuts_elsewhere_than_the_cloud_is_refused() -> None:
    """The edge is sent what belongs to cut 0, so it finds out by itself; a pooling's weights are those before it."""
    with Cloud(layered()) as cloud:
        assert "the front half needs" in run_refused(cloud, cuts=(2,))
    with Cloud(layered()) as cloud:
        assert "the edge cuts at 1, the cloud at 0" in run_refused(cloud, cuts=(1,))


def test_a_cloud_with_another_model_refuses_to_open() -> None:
    with Cloud(layered("resnet8")) as cloud:
        program = layered()
        client = CloudClient(cloud.operator, program)
        refused(
            lambda: start(
                strategy_of(program, 1, client), program, ThreadGrid([edge_app(program)])
            ),
            program.fingerprint()[:12],
            error=SplitRefused,
        )


def test_an_edge_with_another_model_is_refused_by_itself() -> None:
    with Cloud(layered()) as cloud:
        assert "the server cut another model" in run_refused(cloud, edge=layered("resnet8"))


def test_a_reverse_split_needs_a_cloud_that_knows_the_samples() -> None:
    program = generator()
    with (
        Cloud(program, knows_samples=False) as cloud,
        pytest.raises(
            SplitRefused, match="a reverse split, and this cloud knows nothing of its samples"
        ) as caught,
    ):
        start(strategy_of(program, 1, cloud.client()), program, ThreadGrid([edge_app(program)]))
    assert "\n" not in str(caught.value)


def test_a_manager_without_the_operators_token_opens_nothing() -> None:
    program = layered()
    with Cloud(program) as cloud:
        stranger = CloudClient(replace(cloud.operator, token=new_token()), program)
        refused(
            lambda: start(
                strategy_of(program, 1, stranger), program, ThreadGrid([edge_app(program)])
            ),
            "wrong token",
            error=SplitRefused,
        )
        assert session_status(cloud.operator) == []


def test_a_session_of_another_version_names_what_is_missing() -> None:
    program = layered()
    with Cloud(program) as cloud:
        with pytest.raises(SplitRefused, match="split record: missing") as caught:
            open_session(
                cloud.operator,
                run_id="run",
                fingerprint=program.fingerprint(),
                settings={"task": {"mode": "own"}},
            )
        assert "\n" not in str(caught.value)
        refused(
            lambda: open_session(cloud.operator, run_id="run", fingerprint=program.fingerprint()),
            "split task",
            error=SplitRefused,
        )


def test_weights_that_do_not_fit_the_clouds_half_are_refused() -> None:
    program = layered()
    with Cloud(program) as cloud:
        task = SplitTask(**task_settings(fingerprint=program.fingerprint()))
        refused(
            lambda: cloud.client().open(task, {"nothing": np.zeros(3, np.float32)}),
            "back half",
            error=SplitRefused,
        )


def test_a_cloud_that_is_not_there_is_one_line() -> None:
    program = layered()
    with Cloud(program) as cloud:
        client = cloud.client(patience_s=1.0)
    with pytest.raises(StreamLost, match="cannot be reached") as caught:
        client.open(SplitTask(**task_settings(fingerprint=program.fingerprint())), {})
    assert "\n" not in str(caught.value)


def test_while_a_span_runs_the_clouds_weights_cannot_be_fetched_and_then_they_can() -> None:
    """Half of a step would be neither the one model nor the other."""
    program, seen, go_on = layered(), threading.Event(), threading.Event()

    class Slow:
        def decide(
            self, batch: int, rates: LinkRates, current: SplitPlan, window: int
        ) -> SplitPlan | None:
            if batch == 2:
                seen.set()
                assert go_on.wait(30)
            return None

    with Cloud(program) as cloud:
        client = cloud.client(name="mine")
        strategy = strategy_of(program, 1, client, num_epochs=1)
        grid = ThreadGrid([edge_app(program, link=CloudLink(give_up_s=20.0, decider=Slow()))])
        done = threading.Thread(target=start, args=(strategy, program, grid), daemon=True)
        done.start()
        assert seen.wait(30)
        try:
            refused(
                lambda: fetch_weights(cloud.operator, "mine-0"),
                "between two checkpoints",
                error=SplitRefused,
            )
        finally:
            go_on.set()
        done.join(30)
        assert fetch_weights(cloud.operator, "mine-0")[0] == BATCHES_PER_EPOCH


def test_a_decision_to_train_at_the_edge_alone_within_a_span_is_refused_with_a_line() -> None:
    """Only between rounds can an edge leave the cloud."""

    class Leaver:
        def decide(
            self, batch: int, rates: LinkRates, current: SplitPlan, window: int
        ) -> SplitPlan | None:
            return SplitPlan(cut=None)

    program = layered()
    with Cloud(program) as cloud:
        strategy = strategy_of(program, 1, cloud.client())
        grid = ThreadGrid([edge_app(program, link=CloudLink(give_up_s=20.0, decider=Leaver()))])
        refused(lambda: start(strategy, program, grid), "edge-only", error=TrainingFailed)


def test_a_cut_that_moves_by_a_decision_gives_the_weights_of_local_training() -> None:
    class Mover:
        def __init__(self) -> None:
            self.cuts = {2: 2, 6: 1}

        def decide(
            self, batch: int, rates: LinkRates, current: SplitPlan, window: int
        ) -> SplitPlan | None:
            cut = self.cuts.get(batch)
            return None if cut is None else SplitPlan(cut=cut, window=window)

    program = layered()
    with Cloud(program) as cloud:
        client = cloud.client()
        strategy = strategy_of(program, 1, client)
        grid = ThreadGrid([edge_app(program, link=CloudLink(give_up_s=20.0, decider=Mover()))])
        arrays = start(strategy, program, grid)
        assert differing(arrays, local_training(program, NUM_BATCHES)) == []
        assert [report.measured[0].cut for report in strategy.reports] == [2, 1]
        assert [
            event.text.partition(",")[0] for report in strategy.reports for event in report.events
        ] == [
            "edge 0: moved the cut from 0 to 2 before batch 2",
            "edge 0: moved the cut from 2 to 1 before batch 6",
        ]


def test_plain_text_to_a_cloud_far_away_is_refused_before_it_is_dialled() -> None:
    refused(
        lambda: CloudClient(CloudOperator(address="8.8.8.8:1", token=new_token()), layered()), "TLS"
    )
