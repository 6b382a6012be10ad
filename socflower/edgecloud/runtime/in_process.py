"""A split training in one process: real halves execute a list of actions, one by one.

Weights are a function of the actions alone, and equal those of the same halves over a network in that order.
"""

from collections.abc import Iterable, Sequence
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
from socflower.edgecloud.runtime.in_flight_window import ReplayWindow
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

    `backs` holds one half per party, or one for all: it takes turns, or with `joined` does one step for all parties'
    features of a batch. Features and gradients pass through the codec (F24), and gradients through error feedback
    (F25). With delta coding a party's STEPs must come in the order of its FORWARDs, as over a network.

    Raises `ConfigError` if the actions are in no possible order, do not fit the halves, or end with batches in flight,
    and for features that are not finite; the actions before it have been done.
    """
    if len(backs) not in (1, 1 if joined else len(fronts)):
        raise ConfigError(
            f"split training: {len(backs)} back halves for {len(fronts)} parties; give one for each, or one for all"
        )
    lanes = [_Party(front, coding, party) for party, front in enumerate(fronts)]
    runner = _Runner(lanes, backs, joined, coding.gradient_bits)
    for action in actions:
        runner.do(action)
    runner.finish()
    return tuple(lane.report for lane in lanes)


class _Party:
    """One party: its front half and the state between the halves."""

    def __init__(
        self,
        front: FrontHalf,
        coding: FeatureCoding,
        party: int,
    ) -> None:
        self.front = front
        self.sender = FeatureSender(coding)
        largest_bytes = coding.delta_bytes
        self.receiver = FeatureReceiver(f"party {party}", largest_delta_bytes=largest_bytes)
        # Whether features are coded as changes since the last ones of each sample.
        self.by_sample = largest_bytes > 0
        self.report = LoopReport()
        self.features: dict[int, Features] = {}
        self.gradients: dict[int, Array | None] = {}
        self.window = ReplayWindow(0)


class _Runner:
    def __init__(
        self, lanes: Sequence[_Party], backs: Sequence[BackHalf], joined: bool, gradient_bits: int
    ) -> None:
        self._lanes = lanes
        self._backs = backs
        self._joined = joined
        self._gradient_bits = gradient_bits
        # The STEPs so far of a joined step.
        self._gathered: list[Action] = []

    def do(self, action: Action) -> None:
        """Do one action; `ConfigError` if it cannot be the next."""
        if not 0 <= action.party < len(self._lanes):
            raise _wrong(action, f"has a party that is not among 0 to {len(self._lanes) - 1}")
        lane = self._lanes[action.party]
        if action.kind is ActionKind.RECUT:
            self._move_cut(lane, action)
        elif action.cut is None:
            self._alone(lane, action)
        elif action.cut != lane.front.cut:
            raise _wrong(
                action, f"is for cut {action.cut}, not {lane.front.cut}; a RECUT must come before"
            )
        elif action.kind is ActionKind.FORWARD:
            self._forward(lane, action)
        elif action.kind is ActionKind.STEP:
            self._step(lane, action)
        else:
            self._apply(lane, action)

    def finish(self) -> None:
        """Raise `ConfigError` if batches are in flight."""
        for party, lane in enumerate(self._lanes):
            if not lane.window.drained:
                in_flight = list(lane.window.in_flight)
                raise ConfigError(
                    f"split training: the actions end while batches {in_flight} of party {party} are in flight"
                )

    def _forward(self, lane: _Party, action: Action) -> None:
        batch = action.batch
        front = lane.front
        lane.window.resize(action.window)
        lane.window.forward(batch)
        features = front.forward(batch, keep_graph=action.window == 0)
        sample_ids = front.sample_ids(batch) if lane.by_sample else np.empty(0, np.int64)
        quantum = front.feature_quantum
        encoded = lane.sender.encode(batch, features, sample_ids, action.bits, quantum)
        lane.report.feature_bytes[batch] = encoded.num_bytes
        lane.features[batch] = Features(
            batch=batch,
            cut=front.cut,
            encoded=encoded,
            labels=front.labels(batch),
            # Digests are only compared between processes.
            ids_digest=b"",
        )

    def _step(self, lane: _Party, action: Action) -> None:
        if action.batch not in lane.features:
            raise _wrong(action, "comes before its FORWARD, or twice")
        parties = [action.party]
        if self._joined:
            batch = self._gathered[0].batch if self._gathered else action.batch
            if (action.party, action.batch) != (len(self._gathered), batch):
                raise _wrong(
                    action, "is out of turn; a joined step takes one batch of all, in party order"
                )
            self._gathered.append(action)
            if len(self._gathered) < len(self._lanes):
                return
            parties = list(range(len(self._lanes)))
            self._gathered = []
        lanes = [self._lanes[party] for party in parties]
        taken = [each.features.pop(action.batch) for each in lanes]
        features = [
            each.receiver.decode(part)
            for each, part in zip(
                lanes,
                taken,
                strict=True,
            )
        ]
        back = self._backs[action.party if len(self._backs) > 1 else 0]
        # Joined parties have the same samples: the first party's labels are taken.
        gradients, loss = back.step(action.batch, features, taken[0].labels)
        for each, gradient in zip(lanes, gradients, strict=True):
            if gradient is not None and self._gradient_bits != 32:
                gradient = decode(
                    encode(
                        gradient,
                        self._gradient_bits,
                        what="gradient",
                    )
                )
            each.gradients[action.batch] = gradient
            each.report.losses[action.batch] = loss

    def _apply(self, lane: _Party, action: Action) -> None:
        if action.batch not in lane.gradients:
            raise _wrong(action, "comes before its STEP, or twice")
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
        batch = action.batch
        if not isinstance(front, WholeModelFront) or front.cut != front.all_layers_cut:
            raise _wrong(
                action,
                f"is for the edge alone, but the cut is {front.cut}; a RECUT must come before",
            )
        if action.kind is ActionKind.FORWARD:
            lane.window.forward(batch)
        elif action.kind is ActionKind.STEP:
            lane.report.losses[batch] = front.train_alone(batch)
        else:
            lane.report.staleness[batch] = lane.window.close(batch)

    def _move_cut(self, lane: _Party, action: Action) -> None:
        front = lane.front
        cut = action.cut
        if not lane.window.drained:
            raise _wrong(action, f"must wait for batches {list(lane.window.in_flight)} in flight")
        if cut is None:
            if not isinstance(front, WholeModelFront):
                raise _wrong(action, "gives the edge all layers, which this front half cannot have")
            cut = front.all_layers_cut
        if cut == front.cut:
            return
        if len(self._backs) < len(self._lanes):
            raise _wrong(action, "moves layers of a back half that parties share; keep the cut")
        back = self._backs[action.party]
        # Changes per sample would refer to features of another layer.
        lane.sender.reset()
        lane.receiver.reset()
        if cut < front.cut:
            back.import_layers(cut, front.export_layers(cut))
        else:
            front.import_layers(cut, back.export_layers(cut))


def _wrong(action: Action, text: str) -> ConfigError:
    name = f"{action.kind.name} of batch {action.batch}, party {action.party}"
    return ConfigError(f"split training: {name}, {text}")
