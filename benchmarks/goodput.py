"""Goodput over a day of other users and failures: how much of the work that a cluster could do a method does.

32 Snapdragon 865 on 7 boards train VGG-11 from midnight to midnight. Games come and go in the daily pattern of
SoCFlow+'s users and take half of a SoC; SoCs fail on average every two days and are away for half an hour. All methods
meet the same trace, with the settings at which an undisturbed epoch of theirs is shortest at equal samples a step. They
may re-balance shares, and SoCs that a method leaves idle stand in for busy ones. Real strategies plan, address and
price every round by the clock; nodes answer without training.

Goodput is the samples that a method trained, as a part of those that it trains in an undisturbed day. Users and
failures leave a part of the processors' time (`limit`): who trains on all SoCs and is bound by processors cannot do
better, one that is bound by its links can. The samples of the day stand beside it.
"""

import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import cast

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from benchmarks.harness import Row, more_is_better
from benchmarks.methods import OTHERS, OURS, STEP_SAMPLES, scenario
from socflower.cluster import ModelProfile
from socflower.errors import TrainingFailed
from socflower.flower_adapter import begin_run
from socflower.scenario.app.strategy import strategy_in_groups
from socflower.scenario.costs import model_profile
from socflower.scenario.heat import rack_dynamics
from socflower.scenario.predicted_epochs import best_epoch
from socflower.scenario.schema.file import scenario_cluster
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.schema.thermal import BackgroundLoadConfig
from socflower.sim import EventClock
from socflower.strategies.presets import group_strategy
from socflower.strategies.settings import Costs
from socflower.wire.message_keys import ARRAYS, GROUP, GROUP_ID, METRICS, NUM_EXAMPLES, GroupTask

DAY_S = 24 * 3600.0
NUM_SAMPLES = 50_000
MEAN_BETWEEN_FAILURES_S, REPAIR_S = 2 * DAY_S, 1800.0
USERS = BackgroundLoadConfig(games="tidal")
# Nodes that answer without training keep no fragments, and the first half of post-local SGD is a ring.
METHODS = tuple(name for name in OTHERS if name not in ("streaming-diloco", "post-local-sgd"))


def run(seed: int = 41) -> list[Row]:
    """Return SoCFlow's goodput and samples a day against each other method's."""
    found = {name: Day.of(name, seed) for name in (OURS, *METHODS)}
    ours = found.pop(OURS)
    return [row for name, theirs in found.items() for row in _rows(name, ours, theirs, seed)]


def _rows(name: str, ours: "Day", theirs: "Day", seed: int) -> Iterator[Row]:
    ok = 0 < theirs.samples <= theirs.undisturbed and 0 < ours.samples <= ours.undisturbed
    case = f"VGG-11, seed {seed}"
    left = 100 * part_left(seed)
    yield more_is_better(
        f"{case}, goodput", 100 * ours.goodput, name, 100 * theirs.goodput, "%", ok=ok, limit=left
    )
    yield more_is_better(
        f"{case}, samples", ours.samples / 1e6, name, theirs.samples / 1e6, "million", ok=ok
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Day:
    """The samples of a method's day, and of one without users and failures."""

    samples: int
    undisturbed: int

    @classmethod
    def of(cls, name: str, seed: int) -> "Day":
        """Return the day of a method."""
        return cls(
            samples=_samples_in_a_day(name, seed, is_disturbed=True),
            undisturbed=_samples_in_a_day(name, seed, is_disturbed=False),
        )

    @property
    def goodput(self) -> float:
        """The part of the undisturbed day's samples."""
        return self.samples / self.undisturbed


@dataclass(frozen=True, kw_only=True, slots=True)
class Outages:
    """When SoCs are away: for each the times at which it leaves and returns, in turn."""

    turns: tuple[tuple[float, ...], ...]

    def present(self, now_s: float) -> list[int]:
        """Return the SoCs that are there at a time."""
        return [soc for soc, turns in enumerate(self.turns) if not bisect_right(turns, now_s) % 2]


@cache
def outages(num_socs: int, seed: int) -> Outages:
    """Draw the failures of a day."""
    draws = np.random.default_rng((seed, 24))
    turns = []
    for _ in range(num_socs):
        own: list[float] = []
        while (gone := sum(own[-1:]) + draws.exponential(MEAN_BETWEEN_FAILURES_S)) < DAY_S:
            own += [gone, gone + REPAIR_S]
        turns.append(tuple(own))
    return Outages(turns=tuple(turns))


@cache
def part_left(seed: int) -> float:
    """Return the part of all processors' time in the day that users and failures leave."""
    setting = scenario("vgg11", "buckets")
    num_socs = scenario_cluster(setting).num_socs
    away = outages(num_socs, seed)
    loads = USERS.tide.loads(num_socs, DAY_S, USERS.start_hour, seed)
    moments = np.arange(0.0, DAY_S, 10.0)
    left = [1.0 - loads[soc].at(moment).share for moment in moments for soc in away.present(moment)]
    return sum(left) / (len(moments) * num_socs)


class _Over(Exception):
    """The day is over."""


class _AnsweringGrid:
    """A cluster whose present SoCs answer at once, with the model that they got."""

    in_one_process = True

    def __init__(
        self, clock: EventClock, profile: ModelProfile, num_socs: int, away: Outages | None
    ) -> None:
        self.clock, self.model_profile = clock, profile
        self._away, self._num_socs = away, num_socs
        self.samples = 0
        self._pushed: dict[str, Message] = {}

    def get_node_ids(self) -> list[int]:
        """Return the nodes that are there now; node n + 1 is SoC n."""
        socs = range(self._num_socs) if self._away is None else self._away.present(self.clock.now_s)
        return [soc + 1 for soc in socs]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Return a reply to each message."""
        return [self._answer(message) for message in messages]

    def _answer(self, message: Message) -> Message:
        task = GroupTask.decode(message.content.config_records[GROUP])
        samples = task.num_steps * task.batch_size
        self.samples += samples
        metrics: dict[str, int | float] = {NUM_EXAMPLES: samples, GROUP_ID: task.group_id}
        content = RecordDict({METRICS: MetricRecord({**metrics, "train_loss": 0.0})})
        content[ARRAYS] = message.content.array_records[ARRAYS]
        return Message(content, reply_to=message)


def _samples_in_a_day(name: str, seed: int, *, is_disturbed: bool) -> int:
    # Undisturbed, one hour is as the next one.
    end_s = DAY_S if is_disturbed else 3600.0
    setting = _setting(name, seed)
    cluster = scenario_cluster(setting)
    rack = rack_dynamics(setting, cluster) if is_disturbed else None
    clock = EventClock(cluster, dynamics=rack)
    profile = model_profile(setting)
    away = outages(cluster.num_socs, seed) if is_disturbed else None
    grid = _AnsweringGrid(clock, profile, cluster.num_socs, away)
    costs = Costs(model_profile=profile, clock=clock)
    strategy = strategy_in_groups(setting, cluster, _num_groups(setting), costs, NUM_SAMPLES)

    def stop_at_the_end(server_round: int, arrays: ArrayRecord) -> None:
        if clock.now_s >= end_s:
            raise _Over

    logging.disable(logging.CRITICAL)
    begin_run(1)
    try:
        strategy.start(
            cast(Grid, grid),
            ArrayRecord({"w": Array(np.zeros(1, np.float32))}),
            num_rounds=strategy.num_rounds,
            evaluate_fn=stop_at_the_end,
        )
    except _Over:
        return int(grid.samples * DAY_S / clock.now_s)
    finally:
        logging.disable(logging.NOTSET)
    raise TrainingFailed(f"{name}: its rounds ended before the day did")


@cache
def _setting(name: str, seed: int) -> Scenario:
    """Return the scenario of a method with the settings of its shortest undisturbed epoch."""
    asked = scenario("vgg11", "buckets").under(name)
    settings, _ = best_epoch(asked, scenario_cluster(asked), STEP_SAMPLES)
    changed = asked.replaced(seed=seed, strategy=asked.strategy.replaced(**settings))
    batch_size = max(1, STEP_SAMPLES // _num_groups(changed))
    num_socs, num_slots = settings.get("socs"), scenario_cluster(changed).num_socs
    takes_one = group_strategy(name).num_socs == 1
    has_spares = takes_one or (num_socs is not None and num_socs < num_slots)
    return changed.replaced(
        # More than any day has.
        train=changed.train.replaced(batch_size=batch_size, epochs=5000),
        strategy=changed.strategy.replaced(rebalance="both", use_spares=has_spares),
        background_load=USERS,
    )


def _num_groups(setting: Scenario) -> int:
    return int(setting.strategy.num_groups(scenario_cluster(setting).num_socs))
