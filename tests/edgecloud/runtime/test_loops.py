"""The two loops over a line in memory with random lags and breaks: staleness, order, exactness."""

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.plan.decision import WindowSchedule
from socflower.edgecloud.runtime.checkpoints import (
    CheckpointStore,
    SavedHalf,
    SplitCheckpoint,
    common_checkpoint,
)
from socflower.edgecloud.runtime.feature_path import FeatureCoding
from socflower.edgecloud.runtime.front_loop import FrontLoop, FrontPlan
from socflower.edgecloud.runtime.half_state import HalfState, mean_loss
from socflower.edgecloud.stream.frames import (
    GradientFrame,
    Mark,
    SplitRefused,
)
from socflower.errors import ConfigError
from socflower.wire.codecs.quantisation import encode
from tests.edgecloud.runtime.loops import channels, plan, run_loops
from tests.edgecloud.runtime.numpy_halves import Back, Front, local_training, same
from tests.one_line import refused
from tests.peers.memory_line import MemoryLine, lags


@settings(max_examples=10)
@given(
    windows=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    seed=st.integers(0, 999),
    breaks=st.lists(st.integers(0, 30), max_size=4),
)
def test_staleness_keeps_to_the_window_with_any_lags_and_breaks(
    windows: list[int], seed: int, breaks: list[int]
) -> None:
    """K changes every five batches; a gradient's staleness is at most the K in force when the newest went forward."""

    def window_of(batch: int) -> int:
        return windows[batch // 5 % len(windows)]

    front, back = Front(), Back()
    lag_s = lags(seed, 0.006)
    report = run_loops(front, back, plan(window_of=window_of), 20, breaks=breaks, lag_s=lag_s)
    assert front.forwards == front.applied == back.steps == list(range(20))
    assert all(late <= window_of(min(19, batch + late)) for batch, late in report.staleness.items())
    if not any(windows):
        assert same(front.weights(), back.weights(), wanted=local_training(20))


@settings(max_examples=10)
@given(window=st.integers(0, 4), seed=st.integers(0, 999))
def test_a_group_begins_when_nothing_is_in_flight(window: int, seed: int) -> None:
    """Gradients are never staler than their group is long; at K = 0 the weights are those of local training."""
    schedule = WindowSchedule(steps=((0.0, window),), grouped=True)
    how = plan(window, in_flight_limit=lambda batch: schedule.limit(batch, 20))
    front, back = Front(), Back()
    report = run_loops(front, back, how, 20, lag_s=lags(seed, 0.006))
    assert front.forwards == front.applied == back.steps == list(range(20))
    for batch, late in report.staleness.items():
        assert (batch + late) // (window + 1) == batch // (window + 1)
    if not window:
        assert same(front.weights(), back.weights(), wanted=local_training(20))


@settings(max_examples=10)
@given(
    cuts=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    breaks=st.lists(st.integers(0, 30), max_size=4),
)
def test_any_moves_of_the_cut_at_k_0_leave_the_weights_of_local_training(
    cuts: list[int], breaks: list[int]
) -> None:
    front, back = Front(), Back()
    how = plan(decide=lambda now: SplitPlan(cut=cuts[now.batch]))
    report = run_loops(front, back, how, 12, breaks=breaks)
    assert same(front.weights(), back.weights(), wanted=local_training(12))
    assert front.cut == back.cut == cuts[-1] and all(move.old != move.new for move in report.moves)


def test_gradients_go_to_the_activations_they_belong_to() -> None:
    """With K > 0 the weights are those that the same order of forwards and applications gives in one place."""
    order: list[tuple[str, int]] = []

    class Noting(Front):
        def forward(self, batch: int, *, keep_graph: bool = False) -> Any:
            order.append(("forward", batch))
            return super().forward(batch, keep_graph=keep_graph)

        def apply(self, batch: int, gradient: Any) -> None:
            order.append(("apply", batch))
            super().apply(batch, gradient)

    front, back = Noting(), Back()
    run_loops(front, back, plan(3), 25, lag_s=lags(4, 0.01))
    alone, behind, gradients = Front(), Back(), {}
    for kind, batch in order:
        if kind == "forward":
            features = alone.forward(batch)
            gradients[batch] = behind.step(batch, [features], alone.labels(batch))[0][0]
        else:
            alone.apply(batch, gradients.pop(batch))
    assert same(front.weights(), back.weights(), wanted={**alone.weights(), **behind.weights()})


class Frozen(Back):
    def step(self, batch: int, features: Any, labels: Any) -> Any:
        gradients, loss = super().step(batch, features, labels)
        return [None for _ in gradients], loss


def test_a_frozen_front_half_is_told_of_its_batches_and_gets_no_gradients() -> None:
    front = Front()
    before = {name: array.copy() for name, array in front.weights().items()}
    how = plan(2, coding=FeatureCoding(feedback="diagonal"))
    report = run_loops(front, Frozen(), how, 10)
    assert same(front.weights(), wanted=before)
    assert len(report.losses) == 10 and mean_loss(report) > 0


def answer_with(message: Any, how: FrontPlan | None = None) -> None:
    """Let a front loop forward a batch and get this as its gradient."""
    near, far = channels()
    line = MemoryLine(near, far)

    def answer() -> None:
        far.send(far.receive())  # the mark
        if how is None:
            far.receive()
            far.send(message)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        FrontLoop(HalfState(Front(), CheckpointStore(None, "test")), near, how or plan()).run(0, 3)
    finally:
        thread.join(20)
        line.close()


def gradient(batch: int, width: int = 5) -> GradientFrame:
    features = Front().forward(0)[:, :width]
    return GradientFrame(batch=batch, encoded=encode(features, 32), loss=0.0)


@pytest.mark.parametrize(
    ("message", "kind", "named"),
    [
        (gradient(1), ConfigError, ["batch 1"]),
        (gradient(0, 2), SplitRefused, ["(8, 2)", "(8, 5)"]),
        (Mark(batch=0, cut=1), SplitRefused, ["mark", "batch 0"]),
    ],
)
def test_a_gradient_that_belongs_to_no_batch_that_is_out_is_never_applied(
    message: Any, kind: type[Exception], named: list[str]
) -> None:
    refused(lambda: answer_with(message), *named, error=kind)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: FrontPlan(split_plan=SplitPlan(cut=None)), "cloud"),
        (lambda: plan(checkpoint_batches=-1), "checkpoint_batches = -1"),
        (lambda: FeatureCoding(gradient_bits=5), "gradient_bits = 5"),
        (lambda: FeatureCoding(delta_bytes=-1), "delta_bytes = -1"),
    ],
)
def test_plans_that_cannot_be_are_refused(call: Any, named: str) -> None:
    refused(call, named)


def test_to_train_at_the_edge_alone_is_no_deployment_of_a_stream() -> None:
    how = plan(decide=lambda now: SplitPlan(cut=None))
    refused(lambda: answer_with(None, how), "edge-only")


# -------------------------------------------------------------------------------------------------------- checkpoints


PLACES = st.builds(
    SplitCheckpoint, batch=st.integers(0, 4), epoch_id=st.sampled_from(["", "a", "b"])
)


@given(
    offers=st.lists(st.lists(PLACES, max_size=5), min_size=2, max_size=4), last=st.integers(0, 4)
)
def test_the_common_checkpoint_is_the_latest_that_all_have(
    offers: list[list[SplitCheckpoint]], last: int
) -> None:
    """Against a search over all batches and epochs."""

    def all_have(place: SplitCheckpoint) -> bool:
        any_epoch = SplitCheckpoint(batch=place.batch)
        return all(any_epoch in offer or place in offer for offer in offers)

    places = [
        SplitCheckpoint(batch=batch, epoch_id=epoch_id)
        for batch in range(last + 1)
        for epoch_id in ("a", "b")
    ]
    found = common_checkpoint(offers, last)
    latest = max((place.batch for place in places if all_have(place)), default=None)
    assert (found.batch if found else None) == latest
    assert found is None or all_have(found)


def place(batch: int) -> SplitCheckpoint:
    return SplitCheckpoint(batch=batch, epoch_id="ab")


def test_the_last_two_checkpoints_are_kept_whole(tmp_path: Path) -> None:
    store, again = (CheckpointStore(tmp_path, "mine") for _ in range(2))
    saved = {
        batch: SavedHalf(half=b"h%d" % batch, codec=b"c", split_plan=SplitPlan(cut=1))
        for batch in (0, 5, 10)
    }
    files = set(tmp_path.iterdir())
    for batch, half in saved.items():
        store.save(place(batch), half)
    assert [checkpoint.batch for checkpoint in store.checkpoints()] == [5, 10]
    assert again.load(place(10)) == saved[10]
    newest = max(set(tmp_path.iterdir()) - files)
    newest.write_bytes(newest.read_bytes()[:-1])
    assert [checkpoint.batch for checkpoint in again.checkpoints()] == [5]
    for batch in (10, 7):
        refused(lambda batch=batch: again.load(place(batch)), f"batch {batch}")  # type: ignore[misc]
    refused(CheckpointStore(tmp_path, "yours").checkpoints, "mine", "yours")
    (tmp_path / "file").write_text("")
    refused(lambda: CheckpointStore(tmp_path / "file", "mine"), str(tmp_path / "file"))
