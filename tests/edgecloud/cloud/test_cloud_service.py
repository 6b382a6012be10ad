"""Edges and a cloud in one process, over real gRPC: what is trained, what is refused, and what stays bounded."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from socflower.edgecloud.cloud.cloud_service import CloudService
from socflower.edgecloud.cloud.operator_calls import (
    CloudOperator,
    close_session,
    fetch_state,
    fetch_weights,
    open_session,
    session_status,
)
from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.runtime.feature_path import FeatureCoding
from socflower.edgecloud.runtime.front_loop import DecisionInput, FrontPlan
from socflower.edgecloud.runtime.span_training import BatchSpan, train_back, train_front
from socflower.edgecloud.stream.credentials import run_token
from socflower.edgecloud.stream.frames import Limits, SplitRefused
from socflower.errors import ConfigError
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


class Cloud:
    def __init__(self, **options: Any) -> None:
        self.lines: list[str] = []
        self.service = CloudService(
            "127.0.0.1:0", make_half, operator_token=OPERATOR, log=self.lines.append, **options
        )
        self.port = self.service.port
        self.operator = CloudOperator(address=self.service.address, token=OPERATOR)

    def open(self, run_id: str = "run", **options: Any) -> None:
        open_session(self.operator, **{"run_id": run_id, "fingerprint": FINGERPRINT, **options})

    def back(self, run_id: str = "run") -> Any:
        return self.service._sessions.get(run_id)._state.half


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    made = Cloud()
    yield made
    made.service.close()


def plan(window: int = 0, bits: int = 32, cut: int = 1, **options: Any) -> FrontPlan:
    coding = {
        entry.name: options.pop(entry.name)
        for entry in fields(FeatureCoding)
        if entry.name in options
    }
    return FrontPlan(
        split_plan=SplitPlan(cut=cut, bits=bits, window=window),
        coding=FeatureCoding(**coding),
        **options,
    )


def test_without_a_window_the_weights_are_those_of_local_training(cloud: Cloud) -> None:
    cloud.open()
    front = Front()
    report = train_front(
        connect(cloud.port), front, BatchSpan(first_batch=0, num_batches=20), plan()
    )
    batches, weights = fetch_weights(cloud.operator, "run")
    assert batches == 20 and same(front.weights(), weights, wanted=local_training(20))
    assert sorted(report.losses) == list(range(20)) and set(report.staleness.values()) == {0}
    assert report.num_streams == 1 and report.num_rollbacks == 0 and cloud.lines == []


def test_weights_given_at_opening_are_those_that_are_trained(cloud: Cloud) -> None:
    back = Back(seed=5)
    saved = {
        **back.weights(),
        **{f"layer{layer}::speed": back.speed[layer] for layer in back.speed},
    }
    cloud.open(weights=saved)
    front = Front(seed=5)
    train_front(connect(cloud.port), front, BatchSpan(first_batch=0, num_batches=6), plan())
    assert same(
        front.weights(), fetch_weights(cloud.operator, "run")[1], wanted=local_training(6, seed=5)
    )


def test_a_session_lives_over_several_spans_of_several_edges(cloud: Cloud) -> None:
    cloud.open()
    front = Front()
    for first in (0, 4, 8):
        heir = Front(seed=9)
        heir.restore(front.save())
        heir.seed, front = 0, heir
        train_front(connect(cloud.port), front, BatchSpan(first_batch=first, num_batches=4), plan())
        assert fetch_weights(cloud.operator, "run")[0] == first + 4
    assert same(front.weights(), fetch_weights(cloud.operator, "run")[1], wanted=local_training(12))
    state = Back()
    state.restore(fetch_state(cloud.operator, "run")[1])
    assert state.speed.keys() == {2, 3}


@pytest.mark.parametrize("window", [1, 3, 6])
def test_staleness_never_exceeds_the_window(cloud: Cloud, window: int) -> None:
    cloud.open(settings={"pause_s": 0.002})
    front = Front()
    report = train_front(
        connect(cloud.port), front, BatchSpan(first_batch=0, num_batches=40), plan(window)
    )
    assert max(report.staleness.values()) <= window and front.applied == front.forwards == list(
        range(40)
    )
    assert cloud.back().steps == list(range(40))
    # The window's messages and, at the ends, a mark or a goodbye.
    assert report.peak_kept_messages <= window + 1


def test_the_cut_moves_both_ways_and_the_weights_stay_those_of_local_training(cloud: Cloud) -> None:
    cloud.open()
    moves = {3: 2, 5: 0, 8: 1, 9: 2}

    def decide(situation: DecisionInput) -> SplitPlan | None:
        cut = moves.get(situation.batch)
        return None if cut is None else SplitPlan(cut=cut)

    front = Front()
    report = train_front(
        connect(cloud.port),
        front,
        BatchSpan(first_batch=0, num_batches=12),
        plan(decide=decide, checkpoint_batches=4),
    )
    assert [(move.batch, move.old, move.new) for move in report.moves] == [
        (3, 1, 2),
        (5, 2, 0),
        (8, 0, 1),
        (9, 1, 2),
    ]
    assert front.cut == 2 and same(
        front.weights(), fetch_weights(cloud.operator, "run")[1], wanted=local_training(12)
    )


def test_a_move_waits_until_nothing_is_out(cloud: Cloud) -> None:
    cloud.open(settings={"pause_s": 0.005})
    front = Front()

    def decide(situation: DecisionInput) -> SplitPlan | None:
        return (
            SplitPlan(cut=situation.batch % 3, bits=8, window=4)
            if situation.batch % 7 == 0
            else None
        )

    report = train_front(
        connect(cloud.port), front, BatchSpan(first_batch=0, num_batches=30), plan(4, decide=decide)
    )
    assert (
        front.applied == list(range(30))
        and len(report.moves) >= 3
        and report.split_plan is not None
    )
    assert report.split_plan.bits == 8 and max(report.staleness.values()) <= 4


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 8},
        {"bits": 4, "feedback": "diagonal"},
        {"bits": 2, "feedback": "rank-one", "gradient_bits": 8},
        {"bits": 4, "grouping": "sample"},
        {"bits": 4, "delta_bytes": 1 << 20},
        {"bits": 2, "delta_bytes": 1000},
    ],
)
def test_few_bits_cross_and_stay_near_local_training(cloud: Cloud, options: dict[str, Any]) -> None:
    cloud.open()
    front = Front()
    report = train_front(
        connect(cloud.port), front, BatchSpan(first_batch=0, num_batches=15), plan(2, **options)
    )
    wanted = local_training(15)
    found = {**front.weights(), **fetch_weights(cloud.operator, "run")[1]}
    assert not same(found, wanted=wanted)
    assert max(float(abs(found[name] - wanted[name]).max()) for name in wanted) < 1.0
    assert len(report.losses) == 15


def test_delta_coding_survives_a_move_of_the_cut(cloud: Cloud) -> None:
    cloud.open()
    front = Front()
    train_front(
        connect(cloud.port),
        front,
        BatchSpan(first_batch=0, num_batches=12),
        plan(
            1,
            bits=4,
            delta_bytes=1 << 20,
            decide=lambda now: (
                SplitPlan(cut=now.batch // 4, bits=4) if now.batch % 4 == 0 else None
            ),
        ),
    )
    assert front.applied == list(range(12)) and front.cut == 2


def test_in_a_reverse_split_the_same_loops_run_the_other_way_round(cloud: Cloud) -> None:
    cloud.open(reverse=True)
    back = Back(goal=lambda batch: targets(batch, 0))
    for first in (0, 6):
        report = train_back(connect(cloud.port), back, BatchSpan(first_batch=first, num_batches=6))
        assert len(report.losses) == 6
    assert same(fetch_weights(cloud.operator, "run")[1], back.weights(), wanted=local_training(12))


def test_joined_parties_are_stepped_once_with_the_same_samples(cloud: Cloud) -> None:
    cloud.open(num_parties=2, joined=True)
    fronts = [Front(seed=1), Front(seed=2, labels=False)]
    with ThreadPoolExecutor(2) as pool:
        reports = list(
            pool.map(
                lambda party: train_front(
                    connect(cloud.port, party=party),
                    fronts[party],
                    BatchSpan(first_batch=0, num_batches=10),
                    plan(2),
                ),
                range(2),
            )
        )
    assert cloud.back().steps == list(range(10)) and reports[0].losses == reports[1].losses
    assert all(front.applied == list(range(10)) for front in fronts)


def test_joined_parties_with_other_samples_are_refused(cloud: Cloud) -> None:
    cloud.open(num_parties=2, joined=True)

    class Shuffled(Front):
        def sample_ids(self, batch: int) -> Any:
            ids = super().sample_ids(batch)
            return ids[::-1].copy() if batch == 3 else ids

    fronts = [Front(), Shuffled()]

    def train(party: int) -> str:
        with pytest.raises(SplitRefused) as refused:
            train_front(
                connect(cloud.port, party=party),
                fronts[party],
                BatchSpan(first_batch=0, num_batches=10),
                plan(),
            )
        return str(refused.value)

    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(train, range(2)))
    assert all(
        "batch 3: party 1 holds other samples than party 0" in text and "\n" not in text
        for text in texts
    )


def test_parties_that_share_a_half_take_turns(cloud: Cloud) -> None:
    cloud.open(num_parties=3)
    fronts = [Front(seed=party) for party in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(
            pool.map(
                lambda party: train_front(
                    connect(cloud.port, party=party),
                    fronts[party],
                    BatchSpan(first_batch=0, num_batches=6),
                    plan(),
                ),
                range(3),
            )
        )
    assert cloud.back().steps == [batch for batch in range(6) for _ in range(3)]
    # The same in one place.
    alone, back = [Front(seed=party) for party in range(3)], Back()
    for batch in range(6):
        for front in alone:
            gradients, _ = back.step(
                batch, [front.forward(batch, keep_graph=True)], front.labels(batch)
            )
            front.apply(batch, gradients[0])
    assert same(back.weights(), wanted=cloud.back().weights())
    assert all(
        same(ours.weights(), wanted=theirs.weights())
        for ours, theirs in zip(fronts, alone, strict=True)
    )


def test_a_cloud_that_cannot_follow_holds_no_more_than_its_credit() -> None:
    """A fast edge with a wide window, and a slow half behind room for four batches' features."""
    limits = Limits(credit_bytes=6000)
    cloud = Cloud(limits=limits)
    try:
        cloud.open(settings={"pause_s": 0.01})
        front = Front()
        report = train_front(
            connect(cloud.port), front, BatchSpan(first_batch=0, num_batches=50), plan(30)
        )
        status = session_status(cloud.operator, "run")[0]
        assert 0 < status["peak_inbox_bytes"] <= 6000 and status["peak_kept_bytes"] <= 6000
        assert report.peak_kept_messages <= 31 and front.applied == list(range(50))
    finally:
        cloud.service.close()


def test_the_manager_sees_what_is_there(cloud: Cloud) -> None:
    cloud.open("one")
    cloud.open("two")
    assert [status["run_id"] for status in session_status(cloud.operator)] == ["one", "two"]
    close_session(cloud.operator, "one")
    assert [status["run_id"] for status in session_status(cloud.operator)] == ["two"]
    with pytest.raises(SplitRefused, match="is open already"):
        cloud.open("two")
    cloud.open("two", replace=True)


def test_a_service_that_is_started_anew_has_its_runs_and_leaves_out_what_is_damaged(
    tmp_path: Path,
) -> None:
    first = Cloud(folder=tmp_path)
    first.open("one")
    first.open("two")
    train_front(
        connect(first.port, "one"), Front(), BatchSpan(first_batch=0, num_batches=4), plan()
    )
    first.service.close()
    assert (
        run_token(OPERATOR, "one").encode()
        not in (tmp_path / "one" / "session.sealed").read_bytes()
    )
    (tmp_path / "two" / "session.sealed").write_bytes(b"torn")
    again = Cloud(folder=tmp_path)
    try:
        assert [status["run_id"] for status in session_status(again.operator)] == ["one"]
        assert (
            len(again.lines) == 1
            and "the run in" in again.lines[0]
            and "two is left out" in again.lines[0]
        )
        # A new edge stands where the manager says, and the cloud goes there from its checkpoint.
        front = Front(seed=3)
        train_front(
            connect(again.port, "one"), front, BatchSpan(first_batch=4, num_batches=1), plan()
        )
        assert fetch_weights(again.operator, "one")[0] == 5
        close_session(again.operator, "one")
        assert not (tmp_path / "one").exists()
    finally:
        again.service.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        Cloud(folder=tmp_path / "file")


def check_refused(cloud: Cloud, match: str, front: Front | None = None, **options: Any) -> None:
    with pytest.raises(SplitRefused, match=match) as refused:
        train_front(
            connect(cloud.port, **options),
            front or Front(),
            BatchSpan(first_batch=0, num_batches=2),
            plan(),
        )
    assert "\n" not in str(refused.value)


def test_what_does_not_belong_is_refused_in_a_line_and_harms_nobody(cloud: Cloud) -> None:
    cloud.open()
    check_refused(cloud, "a 'Train' call with a wrong token", token="another-token-0123")
    check_refused(cloud, "run away is not open at this cloud", run_id="away")
    check_refused(cloud, "model .* is not the cloud's", fingerprint="another-model")
    check_refused(cloud, "there is no party 3 among 1", party=3)
    check_refused(cloud, "cut at 2, the cloud's at 1", front=Front(cut=2))
    with pytest.raises(
        SplitRefused, match=r"no checkpoint in common up to batch 9 .cloud: 0; party 0: 7"
    ):
        train_front(connect(cloud.port), Front(), BatchSpan(first_batch=7, num_batches=2), plan())
    with pytest.raises(SplitRefused, match="the edge has the back half, and so has the cloud"):
        train_back(connect(cloud.port), Back(), BatchSpan(first_batch=0, num_batches=2))
    front = Front()
    train_front(connect(cloud.port), front, BatchSpan(first_batch=0, num_batches=5), plan())
    assert same(front.weights(), fetch_weights(cloud.operator, "run")[1], wanted=local_training(5))
    assert all("\n" not in line and len(line) < 400 for line in cloud.lines) and cloud.lines


def test_what_a_manager_asks_in_vain_is_refused_in_a_line(cloud: Cloud) -> None:
    stranger = CloudOperator(address=cloud.service.address, token="a-stranger-0123456")
    with pytest.raises(SplitRefused, match="call with a wrong token"):
        session_status(stranger)
    with pytest.raises(SplitRefused, match="call with a wrong token"):
        fetch_weights(stranger, "run")
    with pytest.raises(SplitRefused, match="run nobody is not open here"):
        fetch_weights(cloud.operator, "nobody")
    with pytest.raises(SplitRefused, match="is not open here"):
        close_session(cloud.operator, "nobody")
    with pytest.raises(SplitRefused, match="refuse is set"):
        cloud.open(settings={"refuse": 1})
    with pytest.raises(SplitRefused, match="its name may have"):
        cloud.open("../up")
    with pytest.raises(SplitRefused, match="num_parties = 2"):
        cloud.open(num_parties=2, reverse=True)
    with pytest.raises(ConfigError, match="a token has at least 16"):
        connect(cloud.port, token="short")
    with pytest.raises(ConfigError, match="is not private"):
        CloudOperator(address="8.8.8.8:1", token=OPERATOR)
    with pytest.raises(ConfigError, match="means every interface"):
        CloudService("0.0.0.0:0", make_half, operator_token=OPERATOR)
    nobody = CloudOperator(address="127.0.0.1:9", token=OPERATOR, timeout_s=2.0)
    with pytest.raises(StreamLost, match="cannot be reached"):
        session_status(nobody)


def test_a_flood_of_refusals_neither_fills_the_log_nor_silences_it() -> None:
    """After 200 refused calls nothing was logged any more, not even the cloud's own messages."""
    now_s = [0.0]
    cloud = Cloud(clock=lambda: now_s[0])
    try:
        stranger = CloudOperator(address=cloud.service.address, token="a-stranger-0123456")
        for _ in range(250):
            with pytest.raises(SplitRefused, match="call with a wrong token"):
                session_status(stranger)
        assert len(cloud.lines) == 5 and "only counted" in cloud.lines[-1]
        cloud.open(settings={"fails_at": 3})
        with pytest.raises(SplitRefused, match="a half that breaks"):
            train_front(
                connect(cloud.port), Front(), BatchSpan(first_batch=0, num_batches=9), plan()
            )
        assert any("a span of run run ended" in line for line in cloud.lines[5:])
        now_s[0], told = 60.0, len(cloud.lines)
        with pytest.raises(SplitRefused, match="call with a wrong token"):
            session_status(stranger)
        counted, refused = cloud.lines[told:]
        assert (
            counted.startswith("split cloud: ")
            and "more refusals of ipv4:127.0.0.1 within 60 s" in counted
        )
        assert refused.startswith(
            "split cloud: refused a 'Status' call with a wrong token from ipv4:127.0.0.1:"
        )
    finally:
        cloud.service.close()


def test_a_half_that_fails_fails_the_edge_in_a_line_and_nothing_else(cloud: Cloud) -> None:
    cloud.open(settings={"fails_at": 3})
    with pytest.raises(
        SplitRefused, match="the cloud's half failed: ValueError: a half that breaks"
    ):
        train_front(connect(cloud.port), Front(), BatchSpan(first_batch=0, num_batches=9), plan())
    assert "a half that breaks" in session_status(cloud.operator, "run")[0]["error"]
    with pytest.raises(SplitRefused, match="is between two checkpoints"):
        fetch_weights(cloud.operator, "run")


def test_an_edge_that_is_refused_weights_in_the_middle_of_a_span(cloud: Cloud) -> None:
    cloud.open()
    asked = []

    def decide(situation: DecisionInput) -> None:
        if situation.batch == 3:
            with pytest.raises(SplitRefused, match="is between two checkpoints"):
                fetch_weights(cloud.operator, "run")
            asked.append(True)

    train_front(
        connect(cloud.port), Front(), BatchSpan(first_batch=0, num_batches=5), plan(decide=decide)
    )
    assert asked


def test_a_second_edge_takes_the_place_of_the_first_which_does_not_fight_for_it(
    cloud: Cloud,
    tmp_path: Path,
) -> None:
    cloud.open(settings={"pause_s": 0.02})
    texts = []
    started = threading.Event()

    def first() -> None:
        try:
            train_front(
                connect(cloud.port),
                Front(),
                BatchSpan(first_batch=0, num_batches=500),
                plan(progress=lambda done: started.set()),
            )
        except SplitRefused as refused:
            texts.append(str(refused))

    thread = threading.Thread(target=first)
    thread.start()
    assert started.wait(20)
    # The second one has no checkpoint in common with a cloud that keeps none.
    with pytest.raises(SplitRefused, match="no checkpoint in common"):
        train_front(connect(cloud.port), Front(), BatchSpan(first_batch=0, num_batches=500), plan())
    thread.join(20)
    assert len(texts) == 1 and "another edge has taken the place of party 0" in texts[0]
