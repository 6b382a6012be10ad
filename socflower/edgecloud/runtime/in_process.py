"""A split training in one process: real halves execute a list of actions, one by one.

Weights are a function of the actions alone, and equal those of the same halves over a network in that order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from socflower.edgecloud.half_protocols import Array, BackHalf, FrontHalf
from socflower.edgecloud.plan.timeline_actions import Action, ActionKind
from socflower.edgecloud.runtime.feature_path import (
    EXACT,
    FeatureCoding,
    FeatureReceiver,
    FeatureSender,
)
from socflower.edgecloud.runtime.half_state import LoopReport
from socflower.edgecloud.runtime.replay_window import ReplayWindow
from socflower.edgecloud.stream.frames import Features
from socflower.errors import ConfigError
from socflower.wire.codecs.quantisation import decode, encode


@runtime_checkable
class WholeModelFront(Protocol):
    """A front half that can have all layers, for an edge that trains alone."""

    @property
    def all_layers_cut(self) -> int:
        """The cut after the last layer."""
        ...

    def train_alone(self, batch: int) -> float:
        """Do a whole training step; return the loss."""
        ...


def run_actions(
    actions: Iterable[Action],
    fronts: Sequence[FrontHalf],
    backs: Sequence[BackHalf],
    *,
    joined: bool = False,
    coding: FeatureCoding = EXACT,
) -> tuple[LoopReport, ...]:
    """Do all actions with a front half per party; return a report per party, in their order.

    `backs` holds one half per party, or one for all: which takes turns, or with `joined` does one step for all parties'
    features of a batch. Features and gradients pass through the codec (F24), and gradients through error feedback
    (F25). With delta coding a party's STEPs must come in the order of its FORWARDs, as over a network. Raises
    ConfigError where the actions are in no possible order, do not fit the halves, or end with batches in flight, and
    for features that are not finite; what was done up to there stays done.
    """
    if len(backs) not in (1, len(fronts)) or (joined and len(backs) != 1):
        raise ConfigError(
            f"split training: {len(backs)} back halves for {len(fronts)} parties; give one for each, or "
            "one for all"
        )
    lanes = [
        _Party(
            front,
            FeatureSender(coding),
            FeatureReceiver(f"party {party}", largest_delta_bytes=coding.delta_bytes),
            coding.delta_bytes > 0,
        )
        for party, front in enumerate(fronts)
    ]
    runner = _Runner(lanes, backs, joined, coding.gradient_bits)
    for action in actions:
        runner.do(action)
    runner.finish()
    return tuple(lane.report for lane in runner.lanes)


@dataclass(slots=True)
class _Party:
    """One party: its front half and the state between the halves."""

    front: FrontHalf
    sender: FeatureSender
    receiver: FeatureReceiver
    by_sample: bool  # whether features are coded by what was last sent of each sample
    report: LoopReport = field(default_factory=LoopReport)
    features: dict[int, Features] = field(default_factory=dict)
    gradients: dict[int, Array | None] = field(default_factory=dict)
    window: ReplayWindow = field(default_factory=lambda: ReplayWindow(0))


class _Runner:
    def __init__(
        self, lanes: Sequence[_Party], backs: Sequence[BackHalf], joined: bool, gradient_bits: int
    ) -> None:
        self.lanes = lanes
        self._backs = backs
        self._joined = joined
        self._gradient_bits = gradient_bits
        self._gathered: list[Action] = []  # parts of a joined step that have been named

    def do(self, action: Action) -> None:
        if not 0 <= action.party < len(self.lanes):
            raise ConfigError(
                f"split training: {_text(action)} is of a party that is not there; they are 0 to "
                f"{len(self.lanes) - 1}"
            )
        lane = self.lanes[action.party]
        if action.kind is ActionKind.RECUT:
            self._move_cut(lane, action)
        elif action.cut is None:
            self._alone(lane, action)
        else:
            if action.cut != lane.front.cut:
                raise ConfigError(
                    f"split training: {_text(action)} is for cut {action.cut}, the model is cut at "
                    f"{lane.front.cut}; a RECUT must come before"
                )
            {
                ActionKind.FORWARD: self._forward,
                ActionKind.STEP: self._step,
                ActionKind.APPLY: self._apply,
            }[action.kind](lane, action)

    def finish(self) -> None:
        for party, lane in enumerate(self.lanes):
            if not lane.window.drained:
                raise ConfigError(
                    f"split training: the actions end while batches {list(lane.window.in_flight)} of "
                    f"party {party} are in flight"
                )

    def _forward(self, lane: _Party, action: Action) -> None:
        lane.window.resize(action.window)
        lane.window.forward(action.batch)
        features = lane.front.forward(action.batch, keep_graph=action.window == 0)
        sample_ids = (
            lane.front.sample_ids(action.batch) if lane.by_sample else np.empty(0, np.int64)
        )
        encoded = lane.sender.encode(
            action.batch, features, sample_ids, action.bits, lane.front.feature_quantum
        )
        lane.report.feature_bytes[action.batch] = encoded.num_bytes
        # The digest of the sample ids is only compared between processes.
        lane.features[action.batch] = Features(
            batch=action.batch,
            cut=lane.front.cut,
            encoded=encoded,
            labels=lane.front.labels(action.batch),
            ids_digest=b"",
        )

    def _step(self, lane: _Party, action: Action) -> None:
        if action.batch not in lane.features:
            raise ConfigError(f"split training: {_text(action)} comes before its FORWARD, or twice")
        parties = [action.party]
        if self._joined:
            if (action.party, action.batch) != self._next_part(action.batch):
                raise ConfigError(
                    f"split training: {_text(action)} is out of turn in a joined step; all parties' "
                    "STEPs of a batch follow one another, in party order"
                )
            self._gathered.append(action)
            if len(self._gathered) < len(self.lanes):
                return
            parties, self._gathered = list(range(len(self.lanes))), []
        taken = [self.lanes[party].features.pop(action.batch) for party in parties]
        features = [
            self.lanes[party].receiver.decode(message)
            for party, message in zip(parties, taken, strict=True)
        ]
        back = self._backs[action.party if len(self._backs) > 1 else 0]
        # The labels of joined parties are the same samples'; the first party's are taken.
        gradients, loss = back.step(action.batch, features, taken[0].labels)
        for party, gradient in zip(parties, gradients, strict=True):
            if gradient is not None and self._gradient_bits != 32:
                gradient = decode(encode(gradient, self._gradient_bits, what="gradient"))
            self.lanes[party].gradients[action.batch] = gradient
            self.lanes[party].report.losses[action.batch] = loss

    def _next_part(self, batch: int) -> tuple[int, int]:
        """Return which party's STEP comes next in a joined step, and of which batch, any if it is the first."""
        return len(self._gathered), self._gathered[0].batch if self._gathered else batch

    def _apply(self, lane: _Party, action: Action) -> None:
        if action.batch not in lane.gradients:
            raise ConfigError(f"split training: {_text(action)} comes before its STEP, or twice")
        staleness = lane.window.close(action.batch)
        gradient = lane.gradients.pop(action.batch)
        if gradient is None:
            lane.sender.forget(action.batch)
        else:
            gradient = lane.sender.correct(action.batch, gradient)
        lane.front.apply(action.batch, gradient)
        lane.report.staleness[action.batch] = staleness

    def _alone(self, lane: _Party, action: Action) -> None:
        front = lane.front
        if not isinstance(front, WholeModelFront) or front.cut != front.all_layers_cut:
            raise ConfigError(
                f"split training: {_text(action)} is to be done at the edge alone, but the model is cut "
                f"at {front.cut}; a RECUT must come before"
            )
        if action.kind is ActionKind.FORWARD:
            lane.window.forward(action.batch)
        elif action.kind is ActionKind.STEP:
            lane.report.losses[action.batch] = front.train_alone(action.batch)
        else:
            lane.report.staleness[action.batch] = lane.window.close(action.batch)

    def _move_cut(self, lane: _Party, action: Action) -> None:
        front = lane.front
        if not lane.window.drained:
            raise ConfigError(
                f"split training: {_text(action)} comes while batches {list(lane.window.in_flight)} are "
                "in flight; it must wait for them"
            )
        cut = action.cut
        if cut is None:
            if not isinstance(front, WholeModelFront):
                raise ConfigError(
                    f"split training: {_text(action)} gives the edge all layers, which this front half "
                    "cannot have"
                )
            cut = front.all_layers_cut
        if cut == front.cut:
            return
        if len(self._backs) < len(self.lanes):
            raise ConfigError(
                f"split training: {_text(action)} would move layers of a back half that other parties "
                "share; keep the cut, or give each party its own"
            )
        back = self._backs[action.party]
        lane.sender.reset()
        lane.receiver.reset()
        if cut < front.cut:
            back.import_layers(cut, front.export_layers(cut))
        else:
            front.import_layers(cut, back.export_layers(cut))


def _text(action: Action) -> str:
    return f"{action.kind.name} of batch {action.batch}, party {action.party},"
