"""Lists of actions done by real halves: the staleness that is asked for, and nothing done out of order."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.split_accuracy_runs.training import constant_staleness
from socflower.edgecloud.half_protocols import Array
from socflower.edgecloud.plan.timeline_actions import Action, ActionKind
from socflower.edgecloud.runtime.feature_path import FeatureCoding
from socflower.edgecloud.runtime.front import Samples
from socflower.edgecloud.runtime.half_state import LoopReport
from socflower.edgecloud.runtime.in_process import run_actions
from socflower.edgecloud.stream.frames import SplitRefused
from tests.edgecloud.runtime.split_training import (
    BATCH_SIZE,
    Source,
    adam,
    assert_together,
    chain_split,
    halves,
    sgd,
    train_locally,
)
from tests.one_line import refused

SPLIT = chain_split()
FORWARD, STEP, APPLY, RECUT = (
    ActionKind.FORWARD,
    ActionKind.STEP,
    ActionKind.APPLY,
    ActionKind.RECUT,
)


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
    front, last = Diary(), first + num_batches - 1
    actions = constant_staleness(num_batches, window, first_batch=first)
    (report,) = run_actions(actions, [front], [Diary()])
    batches = range(first, first + num_batches)
    assert report.staleness == {batch: min(window, last - batch) for batch in batches}
    assert report.losses == {batch: float(batch) for batch in batches}
    forwards = [note for note in front.notes if note[0] == "forward"]
    assert all(kept == (window == 0) for _, _, kept in forwards)


CUTS = st.none() | st.integers(0, SPLIT.num_cuts - 1)


def in_turns(cuts: list[int | None], bits: int = 32) -> list[Action]:
    kinds = (RECUT, FORWARD, STEP, APPLY)
    return [Action(kind, 0, batch, cut, bits) for batch, cut in enumerate(cuts) for kind in kinds]


@settings(max_examples=10)
@given(cuts=st.lists(CUTS, min_size=1, max_size=5))
def test_window_0_through_actions_is_local_training(cuts: list[int | None]) -> None:
    """Also if the cut moves, and if the edge trains alone for a while (None)."""
    losses, expected = train_locally(SPLIT, len(cuts), adam)
    pair = front, back = halves(SPLIT, 0, adam)
    (report,) = run_actions(in_turns(cuts), [front], [back])
    assert [report.losses[batch] for batch in range(len(cuts))] == losses
    assert_together(pair, expected)


def learned(
    bits: int, window: int = 1, num_batches: int = 5, source: Any = None, **coding: Any
) -> tuple[np.ndarray, LoopReport]:
    front, back = halves(SPLIT, 2, sgd, source or Source())
    actions = constant_staleness(num_batches, window, cut=2, bits=bits)
    (report,) = run_actions(actions, [front], [back], coding=FeatureCoding(**coding))
    assert np.isfinite(list(report.losses.values())).all()
    return front.weights()["0.weight"], report


def assert_all_differ(weights: list[np.ndarray]) -> None:
    for one, other in combinations(weights, 2):
        assert not np.array_equal(one, other)


def test_windows_few_bits_and_error_feedback_change_what_is_learned() -> None:
    exact = learned(32)[0]
    # Nothing is lost, nothing is corrected.
    assert np.array_equal(learned(32, feedback="diagonal")[0], exact)
    eight, four = learned(8)[0], learned(4)[0]
    fed = [learned(8, feedback=feedback)[0] for feedback in ("diagonal", "rank-one")]
    windows = [learned(32, window)[0] for window in (0, 4)]
    assert_all_differ([exact, eight, four, *fed, *windows, learned(32, gradient_bits=8)[0]])
    assert np.abs(eight - exact).max() < np.abs(four - exact).max() < 0.5


def repeating(batch: int) -> Samples:
    """Return one of two batches, in turns, so that every sample comes again."""
    return Source()(batch % 2)


ELEMENTS = BATCH_SIZE * SPLIT.cuts[2].feature_elements
DELTAS = {"delta_bytes": 1 << 20}
ALL_OF_IT = {"grouping": "sample", "feedback": "rank-one", **DELTAS}


def test_ranges_per_sample_and_changes_reach_the_halves() -> None:
    exact, plain = learned(32, 1, 6, repeating)
    fed = {"feedback": "diagonal"}
    hows: tuple[dict[str, Any], ...] = ({}, {"grouping": "sample"}, DELTAS, fed)
    others = [learned(4, 1, 6, repeating, **how) for how in hows]
    assert_all_differ([exact, *(weights for weights, _ in others)])
    # Nothing is lost, whatever is made of it.
    assert np.array_equal(learned(32, 1, 6, repeating, **ALL_OF_IT)[0], exact)
    assert set(plain.feature_bytes.values()) == {4 * ELEMENTS}
    assert set(others[0][1].feature_bytes.values()) == {ELEMENTS // 2 + 8}


def test_changes_take_fewer_bytes_once_all_samples_are_known() -> None:
    _, report = learned(2, 1, 6, repeating, **DELTAS)
    # 8 bits, then 2; a range, and what keeps both ends alike.
    first, later = (ELEMENTS // part + 8 + 16 for part in (1, 4))
    assert report.feature_bytes == {batch: first if batch < 2 else later for batch in range(6)}


def test_changes_that_arrive_out_of_order_are_refused() -> None:
    front, back = halves(SPLIT, 2, sgd, repeating)
    steps = [(FORWARD, 0), (FORWARD, 1), (STEP, 1)]
    actions = [act(kind, batch, cut=2, window=1) for kind, batch in steps]
    refused(
        lambda: run_actions(actions, [front], [back], coding=FeatureCoding(**DELTAS)),
        "batch 1",
        "party 0",
        "message 1",
        error=SplitRefused,
    )


def test_a_recut_forgets_what_was_sent_of_other_layers() -> None:
    front, back = halves(SPLIT, 2, sgd, repeating)
    actions = in_turns([2, 2, 3, 3, 2, 2], 4)
    (report,) = run_actions(actions, [front], [back], coding=FeatureCoding(**DELTAS))
    assert [report.feature_bytes[batch] for batch in (0, 4, 5)] == [ELEMENTS + 8 + 16] * 3
    assert np.isfinite(list(report.losses.values())).all()


def test_features_that_are_not_finite_end_the_training() -> None:
    def source(batch: int) -> Samples:
        inputs, labels, ids = Source()(batch)
        return inputs * float("nan"), labels, ids

    front, back = halves(SPLIT, 2, sgd, source)
    refused(lambda: run_actions([act(FORWARD, cut=2)], [front], [back]), "batch 0", "NaN")


@pytest.mark.parametrize("joined", [False, True])
def test_parties_share_a_back_half_in_turns_or_in_one_step(joined: bool) -> None:
    kinds, parties = (FORWARD, STEP, APPLY), range(2)
    turns = [(kind, party) for party in parties for kind in kinds]
    together = [(kind, party) for kind in kinds for party in parties]
    order = together if joined else turns
    actions = [Action(kind, party, batch, 0) for batch in range(3) for kind, party in order]
    back = Diary()
    run_actions(actions, [Diary(), Diary()], [back], joined=joined)
    parts = 2 if joined else 1
    assert back.notes == [("step", batch, parts) for batch in range(3) for _ in range(2 // parts)]


def act(
    kind: ActionKind, batch: int = 0, party: int = 0, cut: int | None = 0, window: int = 0
) -> Action:
    return Action(kind, party, batch, cut, 32, window)


BOTH = [act(FORWARD), act(FORWARD, party=1)]
AHEAD = [act(FORWARD, batch, party, window=1) for batch, party in ((0, 0), (1, 0), (1, 1))]


@pytest.mark.parametrize(
    ("actions", "joined", "named"),
    [
        ([act(STEP)], False, ["STEP of batch 0, party 0", "FORWARD"]),
        ([act(FORWARD), act(APPLY)], False, ["APPLY of batch 0, party 0", "STEP"]),
        ([act(FORWARD), act(STEP), act(STEP)], False, ["STEP of batch 0, party 0", "FORWARD"]),
        ([act(FORWARD)], False, ["[0]", "party 0"]),
        ([act(FORWARD), act(RECUT, 1, cut=1)], False, ["RECUT of batch 1, party 0", "[0]"]),
        ([act(FORWARD, cut=1)], False, ["cut 1", "0", "RECUT"]),
        ([act(FORWARD, party=2)], False, ["party 2", "0 to 1"]),
        ([act(FORWARD, cut=None)], False, ["edge alone", "0"]),
        ([act(RECUT, cut=None)], False, ["RECUT"]),
        ([act(RECUT, cut=1)], False, ["back half", "share"]),
        ([*BOTH, act(STEP, party=1)], True, ["STEP of batch 0, party 1", "joined"]),
        ([*AHEAD, act(STEP, 0, window=1), act(STEP, 1, 1)], True, ["STEP of batch 1, party 1"]),
    ],
)
def test_actions_in_no_possible_order_are_refused(
    actions: list[Action], joined: bool, named: list[str]
) -> None:
    fronts, backs = [Diary(), Diary()], [Diary()]
    refused(lambda: run_actions(actions, fronts, backs, joined=joined), *named)


@pytest.mark.parametrize(("count", "joined"), [(3, False), (2, True)])
def test_as_many_back_halves_as_parties_or_one(count: int, joined: bool) -> None:
    fronts, backs = [Diary(), Diary()], [Diary() for _ in range(count)]
    named = f"{count} back halves", "2 parties"
    refused(lambda: run_actions([], fronts, backs, joined=joined), *named)
