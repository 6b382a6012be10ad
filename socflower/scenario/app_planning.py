"""The plan of a Flower app folder: its ServerApp runs up to the start of its strategy, and nothing is trained."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from flwr.app import ArrayRecord, Context, Message, RecordDict

from socflower.cluster import Cluster, ModelProfile
from socflower.cluster.cluster_file import load_cluster
from socflower.engines.local.grid import EngineGrid
from socflower.engines.local.run_app import load_flower_app, require_server_app
from socflower.errors import ConfigError
from socflower.flower_adapter import STRATEGY_STARTS, flower_quiet, followed_log
from socflower.hierarchy import IntervalCosts
from socflower.hierarchy.quorum import training_usage
from socflower.quantities import counted
from socflower.scenario.app.own_app import training_profile
from socflower.scenario.app_folder import run_config
from socflower.scenario.planning import model_document, predicted_costs
from socflower.sim import EventClock
from socflower.sim.event_clock import at_start
from socflower.strategies.group_grid import GroupGrid
from socflower.strategies.planned_rounds import PlannedRounds
from socflower.strategies.records import with_weights
from socflower.strategies.socflow import SoCFlow
from socflower.user_code import forgotten_modules


class _Started(BaseException):
    """A strategy was started; no `Exception`, since an app may catch those."""

    def __init__(self, strategy: PlannedRounds, arrays: ArrayRecord) -> None:
        self.strategy, self.arrays = strategy, arrays


class _PlanningGrid(EngineGrid):
    """Has nodes and sends nothing; ends the app when a strategy of socflower's starts."""

    # The class of a strategy that started and has said no more.
    started = ""

    def on_strategy(self, strategy: PlannedRounds, arrays: ArrayRecord) -> NoReturn:
        """Raise `_Started`."""
        raise _Started(strategy, arrays)

    def on_start(self, name: str) -> None:
        """Remember the class of a strategy that starts."""
        self.started = name

    def _accept(self, message_id: str, message: Message) -> NoReturn:
        if self.started:
            raise _no_groups(self.started)
        raise ConfigError(
            f"plan: the app sends {message.metadata.message_type} messages before its strategy starts, as a "
            "warm-up does; set the number of groups with --set, or run the app"
        )

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return nothing, as nothing was sent."""
        return []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Refuse any message."""
        self.push_messages(messages)
        return []


def plan_app_folder(
    folder: Path,
    cluster_file: Path,
    overrides: Iterable[str] = (),
    training_flops: float | None = None,
) -> tuple[Cluster, dict[str, Any]]:
    """Return the cluster and the plan document of the app's SoCFlow, as `plan_scenario` does.

    `predicted` and `model` are None if the cost of a step is unknown; `notes` then says what is missing. Raises
    `ConfigError` for an app whose strategy is another one, or that sends messages before it starts one.
    """
    own = training_profile(training_flops)
    app, cluster = load_flower_app(folder), load_cluster(cluster_file)
    config = run_config(app, tuple(overrides))
    # Another app may have modules of the same names.
    with forgotten_modules(folder), flower_quiet():
        grid = _PlanningGrid([{}] * cluster.num_socs, config)
        started = _start_of(require_server_app(app.server_app), grid, config)
    strategy = started.strategy
    name = type(strategy).__name__
    if not isinstance(strategy, SoCFlow):
        raise _no_groups(name)
    last = max(strategy.plan.participants, default=0)
    if last >= cluster.num_socs:
        raise ConfigError(
            f"{folder}: {name} plans SoC {last}, of another cluster than {cluster_file}; use one file"
        )
    profile = None if own is None else with_weights(own, started.arrays)
    clock = EventClock(cluster)
    exchanges, work = strategy.predicted(clock, profile)
    schedule = strategy.method.sync.schedule
    return cluster, {
        "schema": 1,
        "work": f"{name} of {folder.resolve().name}, {counted(schedule.num_epochs, 'epoch')} of "
        f"{counted(strategy.method.sync.steps_per_epoch, 'step')}, batches of {schedule.batch_size} a group",
        "model": None if work is None else model_document(work.profile),
        **strategy.plan.to_document(),
        **exchanges.to_document(),
        "predicted": None if work is None else _predicted(strategy, work, clock),
        "one_soc": None,
        "verdict": None,
        "notes": _pricing_notes(name, profile, work),
    }


def _predicted(strategy: SoCFlow, work: IntervalCosts, clock: EventClock) -> dict[str, Any]:
    """Return what the training costs."""
    schedule, late = strategy.method.sync.schedule, strategy.method.late
    shapes = schedule.shapes(strategy.method.sync.steps_per_epoch)
    training = None
    if late is not None:
        training = training_usage(
            work, strategy.method.sync.intervals, at_start(clock), late.quorum
        )
    return predicted_costs(
        work,
        clock,
        shapes,
        schedule.num_epochs,
        in_servers=schedule.server_interval > 1,
        training=training,
    )


def _pricing_notes(name: str, given: ModelProfile | None, work: IntervalCosts | None) -> list[str]:
    """Return a note if no time is predicted, or if --training-flops (the profile `given`) was used or not needed."""
    if work is None:
        return [
            f"no time is predicted: give --training-flops, or {name} a model_profile in its Costs"
        ]
    if given is None:
        return []
    if work.profile is given:
        return ["priced by --training-flops and the bytes of the arrays"]
    return [f"--training-flops was not needed: {name} has a model_profile of its own"]


def _no_groups(name: str) -> ConfigError:
    """Return the error of a strategy without a plan."""
    return ConfigError(
        f"plan: the app's strategy is {name}, which has no groups to plan; run it with --training-flops"
    )


def _start_of(app: Any, grid: _PlanningGrid, config: Any) -> _Started:
    """Run the ServerApp until it starts a strategy, and return that strategy and its first arrays."""
    context = Context(
        run_id=grid.run.run_id, node_id=0, node_config={}, state=RecordDict(), run_config=config
    )
    try:
        with followed_log({STRATEGY_STARTS: grid.on_start}):
            app(GroupGrid(grid), context)
    except _Started as started:
        return started
    except SystemExit as end:
        raise ConfigError(f"plan: the ServerApp ended with sys.exit({end.code!r})") from end
    raise ConfigError("plan: the app started no strategy of Flower's message API; run it")
