"""The two loops over a line in memory with random lags and breaks: staleness, order, exactness."""

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.runtime.back_loop import BackLoop
from socflower.edgecloud.runtime.checkpoints import (
    CheckpointStore,
    SavedHalf,
    SplitCheckpoint,
    common_checkpoint,
)
from socflower.edgecloud.runtime.feature_path import FeatureCoding
from socflower.edgecloud.runtime.front_loop import FrontLoop, FrontPlan
from socflower.edgecloud.runtime.half_state import HalfState, LoopReport, mean_loss
from socflower.edgecloud.stream.frames import (
    GradientFrame,
    Limits,
    Mark,
    SplitChannel,
    SplitMessages,
    SplitRefused,
)
from socflower.errors import ConfigError
from socflower.wire.codecs.quantisation import encode
from tests.edgecloud.runtime.numpy_halves import Back, Front, local_training, same
from tests.wire.memory_line import MemoryLine, lags


def channels() -> tuple[SplitChannel, SplitChannel]:
    limits = Limits()
    return (
        SplitChannel("the cloud", SplitMessages(limits), limits=limits, patience_s=20),
        SplitChannel("the edge", SplitMessages(limits), limits=limits, patience_s=20),
    )


def front_loop(
    front: Front, channel: SplitChannel, plan: FrontPlan, store: CheckpointStore | None = None
) -> FrontLoop:
    return FrontLoop(HalfState(front, store or CheckpointStore(None, "test")), channel, plan)


def train(
    front: Front,
    back: Back,
    plan: FrontPlan,
    num_batches: int,
    *,
    breaks: Any = (),
    seed: int = 0,
    longest_s: float = 0.0,
) -> LoopReport:
    near, far = channels()
    line = MemoryLine(near, far, breaks=breaks, lag_s=lags(seed, longest_s))
    loop = front_loop(front, near, plan)
    behind = BackLoop(HalfState(back, CheckpointStore(None, "test")), [far])
    thread = threading.Thread(target=behind.run, args=(0,))
    thread.start()
    loop.run(0, num_batches)
    thread.join(20)
    assert not thread.is_alive()
    line.close()
    return loop._report


@settings(max_examples=10)
@given(
    windows=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    seed=st.integers(0, 999),
    breaks=st.lists(st.integers(0, 30), max_size=4),
)
def test_staleness_keeps_to_the_window_with_any_lags_and_breaks(
    windows: list[int],
    seed: int,
    breaks: list[int],
) -> None:
    """K changes every five batches; a gradient's staleness is at most the K in force when the newest went forward."""

    def window_of(batch: int) -> int:
        return windows[batch // 5 % len(windows)]

    front, back = Front(), Back()
    report = train(
        front,
        back,
        FrontPlan(split_plan=SplitPlan(cut=1), window_of=window_of),
        20,
        breaks=breaks,
        seed=seed,
        longest_s=0.006,
    )
    assert front.forwards == front.applied == back.steps == list(range(20))
    assert all(late <= window_of(min(19, batch + late)) for batch, late in report.staleness.items())
    if not any(windows):
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
    plan = FrontPlan(split_plan=SplitPlan(cut=1), decide=lambda now: SplitPlan(cut=cuts[now.batch]))
    report = train(front, back, plan, 12, breaks=breaks)
    assert same(front.weights(), back.weights(), wanted=local_training(12))
    assert front.cut == back.cut == cuts[-1] and all(move.old != move.new for move in report.moves)


def test_gradients_go_to_the_activations_they_belong_to() -> None:
    """With K > 0 the weights are those that the same order of forwards and applications gives in one place."""
    front, back = Front(), Back()
    order: list[tuple[str, int]] = []
    forward, apply = front.forward, front.apply
    front.forward = lambda batch, **options: (
        order.append(("forward", batch)) or forward(batch, **options)
    )  # type: ignore
    front.apply = lambda batch, gradient: order.append(("apply", batch)) or apply(batch, gradient)  # type: ignore
    train(front, back, FrontPlan(split_plan=SplitPlan(cut=1, window=3)), 25, seed=4, longest_s=0.01)
    alone, behind, gradients = Front(), Back(), {}
    for kind, batch in order:
        if kind == "forward":
            features = alone.forward(batch)
            gradients[batch] = behind.step(batch, [features], alone.labels(batch))[0][0]
        else:
            alone.apply(batch, gradients.pop(batch))
    assert same(front.weights(), back.weights(), wanted={**alone.weights(), **behind.weights()})


def test_a_frozen_front_half_is_told_of_its_batches_and_gets_no_gradients() -> None:
    class Frozen(Back):
        def step(self, batch: int, features: Any, labels: Any) -> Any:
            gradients, loss = super().step(batch, features, labels)
            return [None for _ in gradients], loss

    front, back = Front(), Frozen()
    before = {name: array.copy() for name, array in front.weights().items()}
    report = train(
        front,
        back,
        FrontPlan(split_plan=SplitPlan(cut=1, window=2), coding=FeatureCoding(feedback="diagonal")),
        10,
    )
    assert (
        same(front.weights(), wanted=before) and len(report.losses) == 10 and mean_loss(report) > 0
    )


def answer_with(message: Any) -> None:
    """Let a front loop forward a batch and get this as its gradient."""
    near, far = channels()
    line = MemoryLine(near, far)

    def answer() -> None:
        far.send(far.receive())  # the mark
        far.receive()
        far.send(message)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        front_loop(Front(), near, FrontPlan(split_plan=SplitPlan(cut=1))).run(0, 3)
    finally:
        thread.join(20)
        line.close()


def test_a_gradient_that_belongs_to_no_batch_that_is_out_is_never_applied() -> None:
    gradient = encode(Front().forward(0), 32)
    with pytest.raises(ConfigError, match="batch 1"):
        answer_with(GradientFrame(batch=1, encoded=gradient, loss=0.0))
    with pytest.raises(
        SplitRefused, match=r"a gradient of shape .8, 2. for features of shape .8, 5."
    ):
        answer_with(GradientFrame(batch=0, encoded=encode(Front().forward(0)[:, :2], 32), loss=0.0))
    with pytest.raises(SplitRefused, match="sends a mark where the gradient of batch 0 is next"):
        answer_with(Mark(batch=0, cut=1))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"split_plan": SplitPlan(cut=None)}, "needs no cloud"),
        ({"checkpoint_batches": -1}, "checkpoint_batches = -1"),
    ],
)
def test_plans_that_cannot_be_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        FrontPlan(**{"split_plan": SplitPlan(cut=0), **options})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"gradient_bits": 5}, "gradient_bits = 5"),
        ({"delta_bytes": -1}, "delta_bytes = -1"),
    ],
)
def test_codings_that_cannot_be_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        FeatureCoding(**options)


def test_to_train_at_the_edge_alone_is_no_deployment_of_a_stream() -> None:
    with pytest.raises(ConfigError, match="leave edge-only out"):
        near, far = channels()
        line = MemoryLine(near, far)
        far.send(Mark(batch=0, cut=1))
        try:
            front_loop(
                Front(),
                near,
                FrontPlan(split_plan=SplitPlan(cut=1), decide=lambda now: SplitPlan(cut=None)),
            ).run(0, 3)
        finally:
            line.close()


# -------------------------------------------------------------------------------------------------------- checkpoints


PLACES = st.builds(
    lambda batch, epoch_id: SplitCheckpoint(batch=batch, epoch_id=epoch_id),
    st.integers(0, 4),
    st.sampled_from(["", "a", "b"]),
)


@given(
    offers=st.lists(st.lists(PLACES, max_size=5), min_size=2, max_size=4), last=st.integers(0, 4)
)
def test_the_common_checkpoint_is_the_latest_that_all_have(
    offers: list[list[SplitCheckpoint]], last: int
) -> None:
    """Against a search over all batches and lineages."""
    possible = [
        batch
        for batch in range(last + 1)
        for epoch_id in ("a", "b")
        if all(
            SplitCheckpoint(batch=batch) in offer
            or SplitCheckpoint(batch=batch, epoch_id=epoch_id) in offer
            for offer in offers
        )
    ]
    found = common_checkpoint(offers, last)
    assert (found.batch if found else None) == max(possible, default=None)
    if found is not None:
        assert all(
            SplitCheckpoint(batch=found.batch) in offer or found in offer for offer in offers
        )


def test_the_last_two_checkpoints_are_kept_whole(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, "mine")
    for batch in (0, 5, 10):
        store.save(
            SplitCheckpoint(batch=batch, epoch_id="ab"),
            SavedHalf(half=b"h%d" % batch, codec=b"c", split_plan=SplitPlan(cut=1)),
        )
    assert [checkpoint.batch for checkpoint in store.checkpoints()] == [5, 10]
    again = CheckpointStore(tmp_path, "mine")
    assert again.load(SplitCheckpoint(batch=10, epoch_id="ab")) == SavedHalf(
        half=b"h10", codec=b"c", split_plan=SplitPlan(cut=1)
    )
    newest = max(tmp_path.glob("barrier-*"))
    newest.write_bytes(newest.read_bytes()[:-1])
    assert [checkpoint.batch for checkpoint in again.checkpoints()] == [5]
    with pytest.raises(ConfigError, match=r"none of batch 10 is whole"):
        again.load(SplitCheckpoint(batch=10, epoch_id="ab"))
    with pytest.raises(ConfigError, match="none of batch 7"):
        again.load(SplitCheckpoint(batch=7, epoch_id="ab"))
    with pytest.raises(ConfigError, match="belongs to mine, not to yours"):
        CheckpointStore(tmp_path, "yours").checkpoints()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        CheckpointStore(tmp_path / "file", "mine")
