"""The record of a run after each round, for all strategies: evaluation, progress, checkpoint and resume."""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import metadata
from typing import Any, TypeAlias

from flwr.app import ArrayRecord, MetricRecord

from socflower import __version__
from socflower.engines.checkpoint import Checkpoint
from socflower.engines.ending import Ending
from socflower.engines.run_folder import ENDING, RunFolder
from socflower.engines.trained_devices import TrainedDevices
from socflower.report.quality import final_figures
from socflower.scenario.schema.file import to_document
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.search import is_over
from socflower.scenario.workload import ModelMetrics
from socflower.sim import EventClock, Trace
from socflower.strategies.planned_rounds import EvaluateFn
from socflower.strategies.records import array_views, to_array_record
from socflower.strategies.reply_events import ReplyEvent
from socflower.strategies.round_strategy import RoundStrategy
from socflower.wire.message_keys import TRAINING

RoundEnd: TypeAlias = Callable[[int], dict[str, Any]]


class Ended(Exception):
    """A run ends after a round that is not its last, with the model of that round."""

    def __init__(self, server_round: int, arrays: ArrayRecord) -> None:
        super().__init__(f"ended after round {server_round}")
        self.server_round, self.arrays = server_round, arrays


class RoundRecord:
    """The rounds of one run so far, with clock and trace: a checkpoint's content besides the strategy's own state."""

    def __init__(
        self,
        scenario: Scenario,
        folder: RunFolder,
        clock: EventClock,
        trace: Trace,
        devices: TrainedDevices,
        evaluate: Callable[[ArrayRecord], ModelMetrics],
        extra_figures: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """`extra_figures` returns figures that are known in round 0 as well."""
        self.rounds: list[dict[str, Any]] = []
        self.warm_up: dict[str, Any] | None = None
        self.resumed_from: list[int] = []
        self._scenario, self._folder, self._clock, self._trace = scenario, folder, clock, trace
        self._devices, self._evaluate = devices, evaluate
        self._extra_figures = extra_figures
        self._checkpointing = folder.read_checkpointing()
        self._training = folder.training
        ending = folder.read(ENDING)
        self._ending = None if ending is None else Ending(**ending)
        self._longest_round_s, self._round_began_s = 0.0, time.time()
        self._trace_parts: list[int] = []
        self._num_spans_kept = 0

    def resume(self) -> tuple[Checkpoint, ArrayRecord] | None:
        """Restore rounds, clock and trace from the run's checkpoint and return it; None for a new run."""
        if self._checkpointing is None or self._checkpointing.resume_after is None:
            return None
        checkpoint = self._checkpointing.kept.read(self._checkpointing.resume_after)
        self.rounds = list(checkpoint.rounds)
        self.warm_up = None if checkpoint.warm_up is None else dict(checkpoint.warm_up)
        self._clock.restore(checkpoint.clock)
        self._devices.restore(checkpoint.trained_on)
        for part in self._checkpointing.kept.trace_parts(checkpoint):
            self._trace.restore(part)
        self._num_spans_kept = self._trace.num_spans
        self._trace_parts = list(checkpoint.trace_parts)
        self.resumed_from = [*checkpoint.resumed_from, checkpoint.server_round]
        self._training = checkpoint.training
        for entry in self.rounds:
            self._folder.append_progress({**entry, "num_rounds": checkpoint.num_rounds})
        return checkpoint, to_array_record(checkpoint.arrays)

    @property
    def train_config(self) -> dict[str, str]:
        """Entries of the train config by which nodes find the states of this training; known after `resume`."""
        return {TRAINING: self._training} if self._training else {}

    def evaluation(
        self,
        round_end: RoundEnd,
        num_rounds: int,
        own_state: Callable[[], Mapping[str, Any]] = dict,
    ) -> EvaluateFn:
        """Return the evaluate function of `Strategy.start`; it also records the round and writes a checkpoint of it.

        It raises `Ended` after a round with which the run is over.

        `round_end` returns a round's `epoch`, `events` and further entries; `own_state` that from which the strategy
        resumes.
        """

        def evaluate_round(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            # A resumed run evaluates its first model again.
            if server_round < len(self.rounds):
                return None
            entry, outcome = self.entry(server_round, arrays, round_end if server_round else None)
            self.rounds.append(entry)
            if server_round:
                self._write_checkpoint(server_round, num_rounds, arrays, own_state())
            self._folder.append_progress({**self.rounds[-1], "num_rounds": num_rounds})
            if server_round < num_rounds and self._is_over():
                raise Ended(server_round, arrays)
            scores: dict[str, int | float | list[int] | list[float]] = {"loss": outcome.loss}
            if outcome.accuracy is not None:
                scores["accuracy"] = outcome.accuracy
            return MetricRecord(scores)

        return evaluate_round

    def _is_over(self) -> bool:
        """Whether the run ends after the latest round, which is timed."""
        # The deadline is one of the clock on the wall.
        now_s = time.time()
        self._longest_round_s = max(self._longest_round_s, now_s - self._round_began_s)
        self._round_began_s = now_s
        ending = self._ending
        return ending is not None and (
            is_over(ending, self.rounds[-1]) or ending.leaves_no_round(now_s, self._longest_round_s)
        )

    def entry(
        self, server_round: int, arrays: ArrayRecord, round_end: RoundEnd | None
    ) -> tuple[dict[str, Any], ModelMetrics]:
        """Evaluate a model; return the round's entry of the result, and the metrics."""
        outcome = self._evaluate(arrays)
        training = {"epoch": 0.0, "events": []} if round_end is None else round_end(server_round)
        return {
            "round": server_round,
            "epoch": training.pop("epoch"),
            "accuracy": outcome.accuracy,
            "loss": outcome.loss if math.isfinite(outcome.loss) else None,
            "virtual_s": self._clock.now_s,
            "energy_j": self._clock.usage.total_energy_j,
            "bytes": self._clock.usage.bytes_by_tier,
            **training,
            **self._extra_figures(),
        }, outcome

    def begin_with(
        self,
        rounds: list[dict[str, Any]],
        warm_up: dict[str, Any],
        num_rounds: int,
        arrays: ArrayRecord,
        own_state: Mapping[str, Any],
    ) -> None:
        """Take over the rounds that a warm-up has trained, with a checkpoint of the last of them."""
        self.rounds, self.warm_up = rounds, warm_up
        self._write_checkpoint(len(rounds) - 1, num_rounds, arrays, own_state)
        for entry in rounds:
            self._folder.append_progress({**entry, "num_rounds": num_rounds})

    def totals(self, final: ArrayRecord, whole: ArrayRecord | None = None) -> dict[str, Any]:
        """Write trace and model; return the part of the outcome that follows from clock and weights.

        `whole` is the model with its frozen parameters, if `final` is without them.
        """
        self._trace.write(self._folder.trace)
        self._folder.write_model(array_views(whole or final))
        usage = self._clock.usage
        return {
            "seed": self._scenario.seed,
            "trained_on": self._devices.document(),
            "rounds": self.rounds,
            "warm_up": self.warm_up,
            **final_figures(self.rounds[-1]),
            "virtual_s": self._clock.now_s,
            "energy_j": usage.total_energy_j,
            "bytes": usage.bytes_by_tier,
            "breakdown": {
                "soc_seconds": {key.value: value for key, value in usage.soc_seconds.items()},
                "energy_j": {key.value: value for key, value in usage.energy_j.items()},
            },
            "weights_sha256": weights_sha256(final),
            "resumed_from": self.resumed_from,
            "versions": versions(),
        }

    def _write_checkpoint(
        self,
        server_round: int,
        num_rounds: int,
        arrays: ArrayRecord,
        own_state: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint of the round that just ended, if the run keeps any."""
        if self._checkpointing is None:
            return
        self._trace_parts.append(server_round)
        self._checkpointing.kept.write(
            Checkpoint(
                server_round=server_round,
                num_rounds=num_rounds,
                scenario=to_document(self._scenario),
                engine=self._checkpointing.engine,
                versions=versions(),
                rounds=self.rounds,
                clock=self._clock.state(),
                arrays=array_views(arrays),
                warm_up=self.warm_up,
                resumed_from=self.resumed_from,
                trained_on=self._devices.document(),
                training=self._training,
                trace_parts=self._trace_parts,
                strategy=own_state,
            ),
            self._trace.state(self._num_spans_kept),
        )
        self._num_spans_kept = self._trace.num_spans


@cache
def versions() -> dict[str, str]:
    """Return the versions of the packages that compute weights; a run resumes only from checkpoints with the same."""
    return {
        "socflower": __version__,
        **{name: metadata.version(name) for name in ("flwr", "torch", "numpy")},
    }


def weights_sha256(arrays: ArrayRecord) -> str:
    """Return the digest of all tensors: names, shapes, types and values, in order."""
    digest = hashlib.sha256()
    for name, array in array_views(arrays).items():
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def round_end_of(strategy: RoundStrategy[Any, Any]) -> RoundEnd:
    """Return what reads a strategy's latest report: a round's `epoch`, `events` and further entries."""

    def round_end(server_round: int) -> dict[str, Any]:
        report = strategy.reports[-1]
        events = event_documents(report.events)
        return {"epoch": report.epoch, "events": events, **report.entry()}

    return round_end


def event_documents(events: Iterable[ReplyEvent]) -> list[dict[str, str]]:
    """Return events as documents of a result."""
    return [{"kind": event.kind, "text": event.text} for event in events]
