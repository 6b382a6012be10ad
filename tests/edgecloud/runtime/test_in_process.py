"""Lists of actions done by real halves: the staleness that is asked for, and nothing done out of order."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.split_accuracy_runs.training import constant_staleness
from socflower.edgecloud.half_protocols import Array, BackHalf, FrontHalf
from socflower.edgecloud.plan.timeline_actions import Action, ActionKind
from socflower.edgecloud.runtime.feature_path import FeatureCoding
from socflower.edgecloud.runtime.front import Samples
from socflower.edgecloud.runtime.half_state import LoopReport
from socflower.edgecloud.runtime.in_process import run_actions
from socflower.edgecloud.stream.frames import SplitRefused
from socflower.errors import ConfigError
from socflower.wire.codecs.error_feedback import Form
from tests.edgecloud.runtime.split_training import (
    BATCH_SIZE,
    Source,
    adam,
    assert_same,
    chain_split,
    halves,
    sgd,
    train_locally,
)

SPLIT = chain_split()
FORWARD, STEP, APPLY, RECUT = (
    ActionKind.FORWARD,
    ActionKind.STEP,
    ActionKind.APPLY,
    ActionKind.RECUT,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Diary:
    """Both halves at once: notes what happens, and turns features that say which batch they are of into gradients."""

    feature_quantum = None

    def __init__(self) -> None:
        self.cut = 0
        self.notes: list[tuple[Any, ...]] = []

    def forward(self, batch: int, *, keep_graph: bool = False) -> Array:
        self.notes.append(("forward", batch, keep_graph))
        return np.full((2, 1), batch, np.float32)

    def labels(self, batch: int) -> np.ndarray:
        return np.full(2, batch)

    def step(
        self, batch: int, features: Sequence[Array], labels: np.ndarray
    ) -> tuple[list[Array | None], float]:
        assert all((part == batch).all() for part in features) and (labels == batch).all()
        self.notes.append(("step", batch, len(features)))
        return [part * 10 for part in features], float(batch)

    def apply(self, batch: int, gradient: Array | None) -> None:
        assert gradient is not None and (gradient == 10 * batch).all()  # never another batch's
        self.notes.append(("apply", batch))

    def save(self) -> bytes:
        return b""

    def unused(self, *arguments: object) -> Any:
        raise AssertionError("nothing moves here")

    export_layers = import_layers = weights = restore = sample_ids = unused


@given(num_batches=st.integers(0, 20), window=st.integers(0, 6), first=st.integers(0, 5))
def test_constant_staleness_is_the_window_for_all_but_the_last(
    num_batches: int, window: int, first: int
) -> None:
    front, back = Diary(), Diary()
    (report,) = run_actions(
        constant_staleness(num_batches, window, first_batch=first), [front], [back]
    )
    last = first + num_batches - 1
    assert report.staleness == {
        batch: min(window, last - batch) for batch in range(first, first + num_batches)
    }
    assert report.losses == {batch: float(batch) for batch in report.staleness}
    assert all(
        kept == (window == 0)
        for kind, _, *rest in front.notes
        if kind == "forward"
        for kept in rest
    )


@settings(max_examples=10)
@given(
    cuts=st.lists(st.one_of(st.none(), st.integers(0, SPLIT.num_cuts - 1)), min_size=1, max_size=5)
)
def test_window_0_through_actions_is_local_training(cuts: list[int | None]) -> None:
    """Also where the cut moves, and where the edge trains alone for a while (None)."""
    losses, expected = train_locally(SPLIT, len(cuts), adam)
    front, back = halves(SPLIT, 0, adam)
    actions = [
        Action(kind, 0, batch, cut)
        for batch, cut in enumerate(cuts)
        for kind in (RECUT, FORWARD, STEP, APPLY)
    ]
    (report,) = run_actions(actions, [front], [back])
    assert [report.losses[batch] for batch in range(len(cuts))] == losses
    assert_same({**front.weights(), **back.weights()}, expected)


def test_a_window_changes_weights_and_learning_goes_on() -> None:
    results = []
    for window in (0, 4):
        front, back = halves(SPLIT, 2, sgd)
        (report,) = run_actions(constant_staleness(10, window, cut=2), [front], [back])
        assert all(np.isfinite(loss) for loss in report.losses.values())
        results.append(front.weights())
    assert any(not np.array_equal(results[0][name], results[1][name]) for name in results[0])


def test_few_bits_and_error_feedback_change_what_is_learned() -> None:
    def train(bits: int, feedback: Form, gradient_bits: int = 32) -> np.ndarray:
        front, back = halves(SPLIT, 2, sgd)
        run_actions(
            constant_staleness(5, 1, cut=2, bits=bits),
            [front],
            [back],
            coding=FeatureCoding(feedback=feedback, gradient_bits=gradient_bits),
        )
        return front.weights()["0.weight"]

    exact = train(32, "none")
    assert np.array_equal(train(32, "diagonal"), exact)  # nothing is lost, nothing is corrected
    different = [
        train(8, "none"),
        train(8, "diagonal"),
        train(8, "rank-one"),
        train(4, "none"),
        train(32, "none", 8),
    ]
    for place, weights in enumerate(different):
        assert not any(np.array_equal(weights, other) for other in [exact, *different[:place]])
    assert np.abs(different[0] - exact).max() < np.abs(different[3] - exact).max() < 0.5


def repeating(batch: int) -> Samples:
    """Return one of two batches, in turns, so that every sample comes again."""
    return Source()(batch % 2)


def test_ranges_per_sample_scale_and_changes_reach_the_halves() -> None:
    def train(bits: int, **how: Any) -> tuple[np.ndarray, LoopReport]:
        front, back = halves(SPLIT, 2, sgd, repeating)
        (report,) = run_actions(
            constant_staleness(6, 1, cut=2, bits=bits), [front], [back], coding=FeatureCoding(**how)
        )
        return front.weights()["0.weight"], report

    exact, plain = train(32)
    others = [
        train(4, **how)[0]
        for how in (
            {},
            {"grouping": "sample"},
            {"delta_bytes": 1 << 20},
            {"feedback": "diagonal"},
            {"feedback": "diagonal", "scale": "mean-loss"},
        )
    ]
    for place, weights in enumerate(others):
        assert not any(np.array_equal(weights, other) for other in [exact, *others[:place]])
    assert np.array_equal(
        train(32, grouping="sample", delta_bytes=1 << 20, scale="mean-loss", feedback="rank-one")[
            0
        ],
        exact,
    )  # nothing is lost, whatever is made of it
    elements = BATCH_SIZE * SPLIT.cuts[2].feature_elements
    assert set(plain.feature_bytes.values()) == {4 * elements}
    assert set(train(4)[1].feature_bytes.values()) == {elements // 2 + 8}


def test_changes_take_fewer_bytes_once_all_samples_are_known() -> None:
    front, back = halves(SPLIT, 2, sgd, repeating)
    (report,) = run_actions(
        constant_staleness(6, 1, cut=2, bits=2),
        [front],
        [back],
        coding=FeatureCoding(delta_bytes=1 << 20),
    )
    elements = BATCH_SIZE * SPLIT.cuts[2].feature_elements
    first, later = (
        elements + 8 + 16,
        elements // 4 + 8 + 16,
    )  # 8 bits, then 2; a range, and what keeps both ends alike
    assert report.feature_bytes == {batch: first if batch < 2 else later for batch in range(6)}


def test_changes_that_arrive_out_of_order_are_refused() -> None:
    front, back = halves(SPLIT, 2, sgd, repeating)
    actions = [
        act(FORWARD, cut=2, window=1),
        act(FORWARD, 1, cut=2, window=1),
        act(STEP, 1, cut=2, window=1),
    ]
    with pytest.raises(
        SplitRefused, match="batch 1 of party 0: delta coding: message 1 was made in another state"
    ):
        run_actions(actions, [front], [back], coding=FeatureCoding(delta_bytes=1 << 20))


def test_a_recut_forgets_what_was_sent_of_other_layers() -> None:
    front, back = halves(SPLIT, 2, sgd, repeating)
    actions = [
        Action(kind, 0, batch, cut, 4)
        for batch, cut in enumerate([2, 2, 3, 3, 2, 2])
        for kind in (RECUT, FORWARD, STEP, APPLY)
    ]
    (report,) = run_actions(actions, [front], [back], coding=FeatureCoding(delta_bytes=1 << 20))
    in_full = BATCH_SIZE * SPLIT.cuts[2].feature_elements + 8 + 16
    assert report.feature_bytes[4] == report.feature_bytes[5] == in_full == report.feature_bytes[0]
    assert all(np.isfinite(loss) for loss in report.losses.values())


def test_features_that_are_not_finite_end_the_training() -> None:
    front, back = halves(
        SPLIT, 2, sgd, lambda batch: (Source()(batch)[0] * float("nan"), *Source()(batch)[1:])
    )
    with pytest.raises(
        ConfigError, match="features of batch 0: hold NaN, so the training has diverged"
    ):
        run_actions([act(FORWARD, cut=2)], [front], [back])


def test_parties_share_a_back_half_in_turns_or_in_one_step() -> None:
    fronts, back = [Diary(), Diary()], Diary()
    turns = [
        Action(kind, party, batch, 0)
        for batch in range(3)
        for party in range(2)
        for kind in (FORWARD, STEP, APPLY)
    ]
    run_actions(turns, fronts, [back])
    assert back.notes == [("step", batch, 1) for batch in range(3) for _ in range(2)]
    back.notes.clear()
    joined = [
        Action(kind, party, batch, 0)
        for batch in range(3)
        for kind in (FORWARD, STEP, APPLY)
        for party in range(2)
    ]
    run_actions(joined, fronts, [back], joined=True)
    assert back.notes == [("step", batch, 2) for batch in range(3)]


def act(
    kind: ActionKind, batch: int = 0, party: int = 0, cut: int | None = 0, window: int = 0
) -> Action:
    return Action(kind, party, batch, cut, 32, window)


@pytest.mark.parametrize(
    ("actions", "match"),
    [
        ([act(STEP)], "STEP of batch 0, party 0, comes before its FORWARD"),
        ([act(FORWARD), act(APPLY)], "APPLY of batch 0, party 0, comes before its STEP"),
        (
            [act(FORWARD), act(STEP), act(STEP)],
            "STEP of batch 0, party 0, comes before its FORWARD, or twice",
        ),
        ([act(FORWARD)], r"the actions end while batches \[0\] of party 0 are in flight"),
        (
            [act(FORWARD), act(RECUT, 1, cut=1)],
            r"RECUT of batch 1, party 0, comes while batches \[0\] are in flight",
        ),
        ([act(FORWARD, cut=1)], "is for cut 1, the model is cut at 0; a RECUT must come before"),
        ([act(FORWARD, party=2)], "is of a party that is not there; they are 0 to 1"),
        ([act(FORWARD, cut=None)], "is to be done at the edge alone, but the model is cut at 0"),
        ([act(RECUT, cut=None)], "which this front half cannot have"),
        ([act(RECUT, cut=1)], "a back half that other parties share"),
    ],
)
def test_actions_in_no_possible_order_are_refused(actions: list[Action], match: str) -> None:
    fronts, backs = [Diary(), Diary()], [Diary()]
    with pytest.raises(ConfigError, match=match):
        run_actions(actions, fronts, backs)


def test_joined_steps_are_in_party_order_and_of_one_batch() -> None:
    fronts: list[FrontHalf] = [Diary(), Diary()]
    backs: list[BackHalf] = [Diary()]
    both = [act(FORWARD), act(FORWARD, party=1)]
    with pytest.raises(ConfigError, match="out of turn in a joined step"):
        run_actions([*both, act(STEP, party=1)], fronts, backs, joined=True)
    ahead = [act(FORWARD, window=1), act(FORWARD, 1, window=1), act(FORWARD, 1, party=1, window=1)]
    with pytest.raises(ConfigError, match="STEP of batch 1, party 1, is out of turn"):
        run_actions(
            [*ahead, act(STEP, 0, window=1), act(STEP, 1, party=1)], fronts, backs, joined=True
        )
    with pytest.raises(ConfigError, match="3 back halves for 2 parties"):
        run_actions([], fronts, [Diary(), Diary(), Diary()])
    with pytest.raises(ConfigError, match="2 back halves for 2 parties"):
        run_actions([], fronts, [Diary(), Diary()], joined=True)
