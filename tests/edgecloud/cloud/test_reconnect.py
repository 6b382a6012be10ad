"""Lines that break at any byte, and lines that are down for a while: no batch is lost, none is done twice."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from socflower.edgecloud.cloud.cloud_service import CloudService
from socflower.edgecloud.cloud.operator_calls import CloudOperator, fetch_weights, open_session
from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.runtime.front_loop import DecisionInput, FrontPlan
from socflower.edgecloud.runtime.span_training import BatchSpan, train_back, train_front
from socflower.edgecloud.stream.frames import SplitRefused
from socflower.wire.frame_channel import StreamLost
from tests.edgecloud.runtime.numpy_halves import (
    FINGERPRINT,
    OPERATOR,
    Back,
    Front,
    connect,
    local_training,
    make_half,
    same,
    targets,
)
from tests.edgecloud.stream.breaking_line import BreakingLine


@pytest.fixture(scope="module")
def service() -> Iterator[CloudService]:
    made = CloudService("127.0.0.1:0", make_half, operator_token=OPERATOR, log=lambda line: None)
    yield made
    made.close()


def open_run(service: CloudService, run_id: str, **options: Any) -> CloudOperator:
    operator = CloudOperator(address=service.address, token=OPERATOR)
    open_session(operator, run_id=run_id, fingerprint=FINGERPRINT, **options)
    return operator


@pytest.mark.parametrize("seed", range(20))
def test_whenever_the_line_breaks_the_weights_are_those_of_local_training(
    service: CloudService, seed: int
) -> None:
    """With K = 0; half of the lines move the cut meanwhile, and every fourth is a reverse split."""
    reverse = seed % 4 == 3
    operator = open_run(service, f"line{seed}", reverse=reverse)
    # A greeting and what gRPC says itself are below 1 kB: every connection brings something, most break.
    line = BreakingLine(service.port, seed=seed, mean_bytes=6000)
    connection = connect(line.port, f"line{seed}", give_up_s=60.0)
    span = BatchSpan(first_batch=0, num_batches=15)

    def decide(situation: DecisionInput) -> SplitPlan | None:
        return SplitPlan(cut=situation.batch // 2 % 3) if seed % 2 == 0 else None

    try:
        if reverse:
            half: Any = Back(goal=lambda batch: targets(batch, 0))
            report = train_back(connection, half, span)
        else:
            half = Front()
            report = train_front(
                connection, half, span, FrontPlan(split_plan=SplitPlan(cut=1), decide=decide)
            )
            assert half.applied == half.forwards == list(range(15))
    finally:
        line.close()
    assert same(
        half.weights(), fetch_weights(operator, f"line{seed}")[1], wanted=local_training(15)
    )
    assert report.num_rollbacks == 0 and line.num_connections >= report.num_streams


@pytest.mark.parametrize("seed", [1, 2])
def test_with_a_window_each_batch_is_done_once_in_order_on_a_breaking_line(
    service: CloudService, seed: int
) -> None:
    open_run(service, f"window{seed}")
    line = BreakingLine(service.port, seed=seed, mean_bytes=8000)
    front = Front()
    try:
        report = train_front(
            connect(line.port, f"window{seed}", give_up_s=60.0),
            front,
            BatchSpan(first_batch=0, num_batches=40),
            FrontPlan(split_plan=SplitPlan(cut=1, window=4)),
        )
    finally:
        line.close()
    back: Any = service._sessions.get(f"window{seed}")._state.half
    assert front.applied == front.forwards == back.steps == list(range(40))
    assert max(report.staleness.values()) <= 4 and report.peak_kept_messages <= 5


def test_a_line_that_is_down_for_a_while_is_waited_for(service: CloudService) -> None:
    operator = open_run(service, "down", settings={"pause_s": 0.01})
    line = BreakingLine(service.port)
    front, begun = Front(), threading.Event()

    def interrupt() -> None:
        begun.wait(20)
        line.down()
        time.sleep(1.0)
        line.up()

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        report = train_front(
            connect(line.port, "down"),
            front,
            BatchSpan(first_batch=0, num_batches=40),
            FrontPlan(split_plan=SplitPlan(cut=1), progress=lambda done: begun.set()),
        )
    finally:
        line.close()
    assert report.num_streams == 2 and report.wait_s > 0.5
    assert same(front.weights(), fetch_weights(operator, "down")[1], wanted=local_training(40))


def test_a_line_that_stays_down_ends_in_a_line(service: CloudService) -> None:
    open_run(service, "gone", settings={"pause_s": 0.01})
    line = BreakingLine(service.port)
    with pytest.raises(
        StreamLost, match=r"run gone: the cloud at .* is out of reach, after trying"
    ) as lost:
        train_front(
            connect(line.port, "gone", give_up_s=0.5),
            Front(),
            BatchSpan(first_batch=0, num_batches=4000),
            FrontPlan(
                split_plan=SplitPlan(cut=1),
                progress=lambda done: line.down() if done.batch == 3 else None,
            ),
        )
    line.close()
    assert "\n" not in str(lost.value)
    with pytest.raises(StreamLost, match="out of reach"):
        train_front(
            connect(line.port, "gone", give_up_s=0.3),
            Front(),
            BatchSpan(first_batch=0, num_batches=4),
            FrontPlan(split_plan=SplitPlan(cut=1)),
        )


def test_a_session_that_is_closed_meanwhile_is_not_dialled_again(service: CloudService) -> None:
    open_run(service, "closed", settings={"pause_s": 0.01})
    with pytest.raises(SplitRefused, match="run closed was closed by its manager"):
        train_front(
            connect(service.port, "closed"),
            Front(),
            BatchSpan(first_batch=0, num_batches=4000),
            FrontPlan(
                split_plan=SplitPlan(cut=1),
                progress=lambda done: (
                    service._sessions.end("closed", forget=True) if done.batch == 3 else None
                ),
            ),
        )


def test_a_joined_party_that_falls_out_brings_all_back_to_a_checkpoint(tmp_path: Path) -> None:
    """Party 1's edge is replaced by a new one, as after a crash: both go back, and end as if nothing had been."""
    made = CloudService(
        "127.0.0.1:0",
        make_half,
        operator_token=OPERATOR,
        log=lambda line: None,
        folder=tmp_path / "c",
    )
    operator = open_run(made, "pair", num_parties=2, joined=True)
    fronts = [Front(seed=1), Front(seed=2, labels=False)]
    span, failed = BatchSpan(first_batch=0, num_batches=12), threading.Event()
    reports: dict[int, Any] = {}

    def plan(*progress: Any) -> FrontPlan:
        return FrontPlan(
            split_plan=SplitPlan(cut=1),
            checkpoint_batches=4,
            progress=progress[0] if progress else None,
        )

    class Crash(Exception):
        pass

    def crash(done: Any) -> None:
        if done.batch == 6:
            raise Crash

    def first_party() -> None:
        reports[0] = train_front(
            connect(made.port, "pair", party=0), fronts[0], span, plan(), folder=tmp_path / "p0"
        )

    thread = threading.Thread(target=first_party)
    thread.start()
    try:
        with pytest.raises(Crash):
            train_front(
                connect(made.port, "pair", party=1),
                fronts[1],
                span,
                plan(crash),
                folder=tmp_path / "p1",
            )
        failed.set()
        fronts[1] = Front(seed=2, labels=False)
        reports[1] = train_front(
            connect(made.port, "pair", party=1), fronts[1], span, plan(), folder=tmp_path / "p1"
        )
        thread.join(30)
        assert reports[1].first_batch == 4 and reports[0].num_rollbacks >= 1
        alone, back = [Front(seed=1), Front(seed=2)], Back()
        for batch in range(12):
            parts = [front.forward(batch, keep_graph=True) for front in alone]
            for front, gradient in zip(
                alone, back.step(batch, parts, alone[0].labels(batch))[0], strict=True
            ):
                front.apply(batch, gradient)
        assert same(fetch_weights(operator, "pair")[1], wanted=back.weights())
        assert all(
            same(ours.weights(), wanted=theirs.weights())
            for ours, theirs in zip(fronts, alone, strict=True)
        )
    finally:
        made.close()
        thread.join(30)
