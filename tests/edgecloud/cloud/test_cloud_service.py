"""Edges and a cloud in one process, over real gRPC: what is trained, what is refused, and what stays bounded."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from socflower.edgecloud.cloud.cloud_service import CloudService
from socflower.edgecloud.cloud.operator_calls import (
    CloudOperator,
    close_session,
    fetch_state,
    fetch_weights,
    session_status,
)
from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.runtime.feature_path import FeatureCoding
from socflower.edgecloud.runtime.front_loop import DecisionInput, FrontPlan
from socflower.edgecloud.runtime.half_state import LoopReport
from socflower.edgecloud.stream.credentials import run_token
from socflower.edgecloud.stream.frames import Limits, SplitRefused
from socflower.peers.resumable_stream import StreamLost
from tests.edgecloud.cloud.local import Cloud, plan, train
from tests.edgecloud.runtime.numpy_halves import (
    OPERATOR,
    Back,
    Front,
    connect,
    local_training,
    make_half,
    same,
    targets,
)
from tests.one_line import refused


def test_without_a_window_the_weights_are_those_of_local_training(cloud: Cloud) -> None:
    cloud.open()
    front = Front()
    report = train(cloud.port, front, 20)
    assert fetch_weights(cloud.operator, "run")[0] == 20 and cloud.trained(front, 20)
    assert sorted(report.losses) == list(range(20)) and set(report.staleness.values()) == {0}
    assert (report.num_streams, report.num_rollbacks, cloud.lines) == (1, 0, [])


def test_weights_given_at_opening_are_those_that_are_trained(cloud: Cloud) -> None:
    back, front = Back(seed=5), Front(seed=5)
    speeds = {f"layer{layer}::speed": speed for layer, speed in back.speed.items()}
    cloud.open(weights={**back.weights(), **speeds})
    train(cloud.port, front, 6)
    assert cloud.trained(front, 6, seed=5)


def test_a_session_serves_several_spans_of_several_edges(cloud: Cloud) -> None:
    cloud.open()
    front = Front()
    for first in (0, 4, 8):
        heir = Front(seed=9)
        heir.restore(front.save())
        heir.seed, front = 0, heir
        train(cloud.port, front, 4, first=first)
        assert fetch_weights(cloud.operator, "run")[0] == first + 4
    assert cloud.trained(front, 12)
    state = Back()
    state.restore(fetch_state(cloud.operator, "run")[1])
    assert state.speed.keys() == {2, 3}


@pytest.mark.parametrize("window", [1, 6])
def test_staleness_never_exceeds_the_window(cloud: Cloud, window: int) -> None:
    cloud.open(settings={"pause_s": 0.002})
    front = Front()
    report = train(cloud.port, front, 40, plan(window))
    assert max(report.staleness.values()) <= window
    assert front.applied == front.forwards == cloud.half().steps == list(range(40))
    # The window's messages and, at the ends, a mark or a goodbye.
    assert report.peak_kept_messages <= window + 1


def test_the_cut_moves_both_ways_and_the_weights_stay_those_of_local_training(cloud: Cloud) -> None:
    cloud.open()
    front, moves = Front(), {3: 2, 5: 0, 8: 1, 9: 2}

    def decide(now: DecisionInput) -> SplitPlan | None:
        return SplitPlan(cut=moves[now.batch]) if now.batch in moves else None

    report = train(cloud.port, front, 12, plan(decide=decide, checkpoint_batches=4))
    made = [(move.batch, move.old, move.new) for move in report.moves]
    assert made == [(3, 1, 2), (5, 2, 0), (8, 0, 1), (9, 1, 2)]
    assert front.cut == 2 and cloud.trained(front, 12)


def test_a_move_waits_until_nothing_is_out(cloud: Cloud) -> None:
    cloud.open(settings={"pause_s": 0.005})
    front = Front()

    def decide(now: DecisionInput) -> SplitPlan | None:
        return None if now.batch % 7 else SplitPlan(cut=now.batch % 3, bits=8, window=4)

    report = train(cloud.port, front, 30, plan(4, decide=decide))
    assert front.applied == list(range(30)) and len(report.moves) >= 3
    assert report.split_plan is not None and report.split_plan.bits == 8
    assert max(report.staleness.values()) <= 4


@pytest.mark.few_cells(2)
@pytest.mark.parametrize(
    ("bits", "options"),
    [
        (8, {}),
        (4, {"feedback": "diagonal"}),
        (2, {"feedback": "rank-one", "gradient_bits": 8}),
        (4, {"grouping": "sample"}),
        (4, {"delta_bytes": 1 << 20}),
        (2, {"delta_bytes": 1000}),
    ],
)
def test_few_bits_cross_and_stay_near_local_training(
    cloud: Cloud, bits: int, options: dict[str, Any]
) -> None:
    cloud.open()
    front, wanted = Front(), local_training(15)
    report = train(cloud.port, front, 15, plan(2, bits, coding=FeatureCoding(**options)))
    found = {**front.weights(), **cloud.weights()}
    assert not same(found, wanted=wanted) and len(report.losses) == 15
    assert max(float(abs(found[name] - wanted[name]).max()) for name in wanted) < 1.0


def test_delta_coding_survives_a_move_of_the_cut(cloud: Cloud) -> None:
    cloud.open()
    front = Front()

    def decide(now: DecisionInput) -> SplitPlan | None:
        return None if now.batch % 4 else SplitPlan(cut=now.batch // 4, bits=4)

    coding = FeatureCoding(delta_bytes=1 << 20)
    train(cloud.port, front, 12, plan(1, 4, coding=coding, decide=decide))
    assert front.applied == list(range(12)) and front.cut == 2


def test_in_a_reverse_split_the_same_loops_run_the_other_way_round(cloud: Cloud) -> None:
    cloud.open(reverse=True)
    back = Back(goal=lambda batch: targets(batch, 0))
    for first in (0, 6):
        assert len(train(cloud.port, back, 6, first=first).losses) == 6
    assert cloud.trained(back, 12)


# ------------------------------------------------------------------------------------------- several parties


def train_all(
    cloud: Cloud, fronts: list[Front], num_batches: int, how: FrontPlan
) -> list[LoopReport]:
    with ThreadPoolExecutor(len(fronts)) as pool:

        def one(party: int) -> LoopReport:
            return train(cloud.port, fronts[party], num_batches, how, party=party)

        return list(pool.map(one, range(len(fronts))))


def test_joined_parties_are_stepped_once_with_the_same_samples(cloud: Cloud) -> None:
    cloud.open(num_parties=2, joined=True)
    fronts = [Front(seed=1), Front(seed=2, labels=False)]
    one, other = train_all(cloud, fronts, 10, plan(2))
    assert one.losses == other.losses
    assert cloud.half().steps == fronts[0].applied == fronts[1].applied == list(range(10))


def test_joined_parties_with_other_samples_are_refused(cloud: Cloud) -> None:
    cloud.open(num_parties=2, joined=True)

    class Shuffled(Front):
        def sample_ids(self, batch: int) -> Any:
            ids = super().sample_ids(batch)
            return ids[::-1].copy() if batch == 3 else ids

    def one(party: int) -> str:
        half = [Front(), Shuffled()][party]
        named = ("batch 3", "party 0", "party 1", "samples")
        return refused(lambda: train(cloud.port, half, 10, party=party), *named, error=SplitRefused)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(2)))


def test_parties_that_share_a_half_take_turns(cloud: Cloud) -> None:
    cloud.open(num_parties=3)
    fronts, alone = ([Front(seed=party) for party in range(3)] for _ in range(2))
    train_all(cloud, fronts, 6, plan())
    assert cloud.half().steps == [batch for batch in range(6) for _ in range(3)]
    back = Back()
    for batch in range(6):
        for front in alone:
            features = front.forward(batch, keep_graph=True)
            front.apply(batch, back.step(batch, [features], front.labels(batch))[0][0])
    assert same(cloud.half().weights(), wanted=back.weights())
    for ours, theirs in zip(fronts, alone, strict=True):
        assert same(ours.weights(), wanted=theirs.weights())


# ---------------------------------------------------------------------------------------- bounds, and the manager


def test_a_cloud_that_cannot_follow_holds_no_more_than_its_credit() -> None:
    """A fast edge with a wide window, and a slow half behind room for four batches' features."""
    with Cloud(limits=Limits(credit_bytes=6000)) as cloud:
        cloud.open(settings={"pause_s": 0.01})
        front = Front()
        report = train(cloud.port, front, 50, plan(30))
        (status,) = session_status(cloud.operator, "run")
        assert 0 < status["peak_inbox_bytes"] <= 6000 and status["peak_kept_bytes"] <= 6000
        assert report.peak_kept_messages <= 31 and front.applied == list(range(50))


def names(cloud: Cloud) -> list[str]:
    return [status["run_id"] for status in session_status(cloud.operator)]


def test_the_manager_sees_what_is_there(cloud: Cloud) -> None:
    cloud.open("one")
    cloud.open("two")
    assert names(cloud) == ["one", "two"]
    close_session(cloud.operator, "one")
    assert names(cloud) == ["two"]
    refused(lambda: cloud.open("two"), "two", "replace", error=SplitRefused)
    cloud.open("two", replace=True)


def test_a_restarted_service_has_its_runs_and_leaves_out_what_is_damaged(tmp_path: Path) -> None:
    sealed = [tmp_path / run_id / "session.sealed" for run_id in ("one", "two")]
    with Cloud(folder=tmp_path) as first:
        first.open("one")
        first.open("two")
        train(first.port, Front(), 4, run_id="one")
    assert run_token(OPERATOR, "one").encode() not in sealed[0].read_bytes()
    sealed[1].write_bytes(b"torn")
    with Cloud(folder=tmp_path) as again:
        assert names(again) == ["one"]
        (line,) = again.lines
        assert str(sealed[1].parent) in line
        # The edge begins at batch 4, where the cloud has a checkpoint.
        train(again.port, Front(seed=3), 1, first=4, run_id="one")
        assert fetch_weights(again.operator, "one")[0] == 5
        close_session(again.operator, "one")
        assert not sealed[0].parent.exists()
    (tmp_path / "file").write_text("")
    refused(lambda: Cloud(folder=tmp_path / "file"), "folder", str(tmp_path / "file"))


# --------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "half", "first", "named"),
    [
        ({"token": "another-token-0123"}, Front(), 0, ["'Train'", "token"]),
        ({"run_id": "away"}, Front(), 0, ["run away"]),
        ({"fingerprint": "another-model"}, Front(), 0, ["another-model", "model-of-the-te"]),
        ({"party": 3}, Front(), 0, ["party 3", "1"]),
        ({}, Front(cut=2), 0, ["cut", "2", "1"]),
        ({}, Front(), 7, ["checkpoint", "batch 9", "cloud: 0", "party 0: 7"]),
        ({}, Back(), 0, ["back half"]),
    ],
)
def test_an_edge_that_does_not_belong_is_refused_and_harms_nobody(
    cloud: Cloud, options: dict[str, Any], half: Any, first: int, named: list[str]
) -> None:
    cloud.open()
    refused(lambda: train(cloud.port, half, 2, first=first, **options), *named, error=SplitRefused)
    front = Front()
    train(cloud.port, front, 3)
    assert cloud.trained(front, 3)
    assert cloud.lines and all("\n" not in line and len(line) < 400 for line in cloud.lines)


STRANGER = "a-stranger-0123456"


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda cloud: session_status(stranger(cloud)), ["'Status'", "token"]),
        (lambda cloud: fetch_weights(stranger(cloud), "run"), ["'Fetch'", "token"]),
        (lambda cloud: fetch_weights(cloud.operator, "nobody"), ["run nobody", "open"]),
        (lambda cloud: close_session(cloud.operator, "nobody"), ["run nobody", "open"]),
        (lambda cloud: cloud.open(settings={"refuse": 1}), ["refuse"]),
        (lambda cloud: cloud.open("../up"), ["'../up'", "64"]),
        (lambda cloud: cloud.open(num_parties=2, reverse=True), ["num_parties = 2"]),
    ],
)
def test_what_a_cloud_refuses_its_manager(cloud: Cloud, call: Any, named: list[str]) -> None:
    refused(lambda: call(cloud), *named, error=SplitRefused)


def stranger(cloud: Cloud) -> CloudOperator:
    return CloudOperator(address=cloud.service.address, token=STRANGER)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: connect(1, token="short"), ["token", "16"]),
        (lambda: CloudOperator(address="8.8.8.8:1", token=OPERATOR), ["8.8.8.8"]),
        (lambda: CloudService("0.0.0.0:0", make_half, operator_token=OPERATOR), ["0.0.0.0"]),
    ],
)
def test_addresses_and_tokens_are_refused_before_anything_is_sent(
    call: Any, named: list[str]
) -> None:
    refused(call, *named)


def test_a_cloud_that_is_not_there_is_named() -> None:
    nobody = CloudOperator(address="127.0.0.1:9", token=OPERATOR, timeout_s=2.0)
    refused(lambda: session_status(nobody), "127.0.0.1:9", error=StreamLost)


def test_a_flood_of_refusals_neither_fills_the_log_nor_silences_it() -> None:
    """After 200 refused calls nothing was logged any more, not even the cloud's own messages."""
    now_s = [0.0]
    with Cloud(clock=lambda: now_s[0]) as cloud:
        for _ in range(50):
            refused(lambda: session_status(stranger(cloud)), error=SplitRefused)
        assert len(cloud.lines) == 5
        cloud.open(settings={"fails_at": 3})
        refused(lambda: train(cloud.port, Front(), 9), "a half that breaks", error=SplitRefused)
        assert any("a half that breaks" in line for line in cloud.lines[5:])
        now_s[0], told = 60.0, len(cloud.lines)
        refused(lambda: session_status(stranger(cloud)), error=SplitRefused)
        counted, last = cloud.lines[told:]
        assert "split cloud" in counted and "60 s" in counted and "127.0.0.1" in counted
        assert "split cloud" in last and "'Status'" in last and "127.0.0.1:" in last


def test_a_half_that_fails_fails_the_edge_in_a_line_and_nothing_else(cloud: Cloud) -> None:
    cloud.open(settings={"fails_at": 3})
    named = ("ValueError", "a half that breaks")
    refused(lambda: train(cloud.port, Front(), 9), *named, error=SplitRefused)
    assert named[1] in session_status(cloud.operator, "run")[0]["error"]
    refused(lambda: cloud.weights(), "run", named[1], error=SplitRefused)


def test_weights_are_refused_in_the_middle_of_a_span(cloud: Cloud) -> None:
    cloud.open()
    asked = []

    def decide(now: DecisionInput) -> None:
        if now.batch == 3:
            asked.append(refused(cloud.weights, "run", "checkpoints", error=SplitRefused))

    train(cloud.port, Front(), 5, plan(decide=decide))
    assert asked


def test_a_second_edge_takes_the_place_of_the_first_which_does_not_fight_for_it(
    cloud: Cloud,
) -> None:
    cloud.open(settings={"pause_s": 0.02})
    texts: list[str] = []
    started = threading.Event()
    how = plan(progress=lambda done: started.set())

    def first() -> None:
        named = ("another edge", "party 0")
        texts.append(
            refused(lambda: train(cloud.port, Front(), 500, how), *named, error=SplitRefused)
        )

    thread = threading.Thread(target=first)
    thread.start()
    assert started.wait(20)
    # The second one has no checkpoint in common with a cloud that keeps none.
    refused(lambda: train(cloud.port, Front(), 500), "checkpoint", error=SplitRefused)
    thread.join(20)
    assert texts
