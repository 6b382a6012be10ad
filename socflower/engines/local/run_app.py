"""The `local` engine: one call that runs an unmodified ServerApp and ClientApp in virtual time."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict, UserConfig
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy

from socflower.cluster import Cluster, ModelProfile
from socflower.engines.app_metrics import MeteredGrid, RoundLog
from socflower.engines.local.exchange_record import ExchangeRecord
from socflower.engines.local.grid import LocalGrid
from socflower.engines.local.message_log import MessageLog
from socflower.engines.local.virtual_time_grid import VirtualTimeGrid, require_socs
from socflower.engines.local.workers import AppReference, ClientAppSource, require_app
from socflower.errors import ConfigError, SocflowerError, TrainingFailed
from socflower.flower_adapter import (
    STRATEGY_ENDS,
    STRATEGY_STARTS,
    bounded_waits,
    flower_quiet,
    followed_log,
    messages_together,
    noticed_records,
)
from socflower.plain_numbers import plain_numbers
from socflower.sim.event_clock import EventClock
from socflower.strategies.group_grid import GroupGrid
from socflower.strategies.planned_rounds import no_component
from socflower.toml_file import read_toml


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowerApp:
    """A Flower app folder: references to its two apps, and its run config."""

    server_app: AppReference
    client_app: AppReference
    run_config: UserConfig


def load_flower_app(folder: Path) -> FlowerApp:
    """Return the app of a folder with a Flower `pyproject.toml`; `ConfigError` names what it lacks."""
    path = folder / "pyproject.toml"
    document = read_toml(path, "Flower app")
    try:
        app = document["tool"]["flwr"]["app"]
        components = app["components"]
        server, client = (
            AppReference(target=components[key], folder=folder.resolve())
            for key in ("serverapp", "clientapp")
        )
    except KeyError as error:
        raise ConfigError(
            f"{path}: lacks {error} of [tool.flwr.app.components]; see `flwr new`"
        ) from None
    except TypeError:
        raise ConfigError(
            f"{path}: [tool.flwr.app.components] must be a table with serverapp and clientapp; see "
            "`flwr new`"
        ) from None
    return FlowerApp(server_app=server, client_app=client, run_config=_flat(app.get("config", {})))


@plain_numbers
def run_app(
    server_app: ServerApp | AppReference,
    client_app: ClientAppSource,
    *,
    cluster: Cluster,
    num_nodes: int | None = None,
    run_config: UserConfig | None = None,
    num_workers: int | None = None,
    model_profile: ModelProfile | None = None,
    batch_size: int = 32,
    clock: EventClock | None = None,
    messages: MessageLog | None = None,
    rounds: RoundLog | None = None,
    record: ExchangeRecord | None = None,
) -> EventClock:
    """Run the app on `num_nodes` nodes (default: every SoC) and return the clock, with the virtual time it took.

    An exception of the client reaches the strategy as an error reply. An exception of the ServerApp is raised here;
    its `sys.exit` ends it normally with status 0 and raises `TrainingFailed` with any other. Strategies may drop failed
    replies and keep their weights: if no client succeeded in a round of a strategy, or none of those that trained last,
    this raises `TrainingFailed` with the first cause, even if the ServerApp ended normally. `messages` records the
    result of each message, `rounds` the metrics of each round. With `record`, an interrupted run resumes from it.
    """
    app = require_server_app(server_app)
    num_nodes = cluster.num_socs if num_nodes is None else num_nodes
    require_socs(cluster, num_nodes)
    clock = clock or EventClock(cluster)
    config = dict(run_config or {})
    messages, rounds = messages or MessageLog(), rounds or RoundLog(clock)
    with LocalGrid(
        client_app,
        num_nodes,
        run_config=config,
        num_workers=num_workers,
        messages=messages,
        record=record,
    ) as grid:
        priced = VirtualTimeGrid(
            grid, clock, cluster, model_profile=model_profile, batch_size=batch_size
        )
        context = Context(
            run_id=grid.run.run_id, node_id=0, node_config={}, state=RecordDict(), run_config=config
        )
        if record is not None:
            record.begin()
        try:
            run_server_app(app, MeteredGrid(priced, rounds), context, messages, rounds)
        except TrainingFailed:
            if record is not None:
                record.forget_failures()
            raise
    return clock


def require_server_app(source: object) -> ServerApp:
    """Return the ServerApp that `source` is or refers to; `ConfigError` if that is another object."""
    app = source.load() if isinstance(source, AppReference) else source
    return require_app(source, app, ServerApp)


def run_server_app(
    app: ServerApp, grid: Grid, context: Context, messages: MessageLog, rounds: RoundLog
) -> None:
    """Run a ServerApp to its end; see `run_app` for what it raises."""

    def starts(name: str) -> None:
        rounds.begin(name)
        messages.ends_failed_rounds = True

    def ends(duration_s: float) -> None:
        messages.ends_failed_rounds = False

    try:
        num_nodes = len(list(grid.get_node_ids()))
        with (
            followed_log({STRATEGY_STARTS: starts, STRATEGY_ENDS: ends}),
            noticed_records(rounds.follow),
            bounded_waits(num_nodes),
            messages_together(),
        ):
            app(GroupGrid(grid), context)
    except SystemExit as end:
        # With 0 or None the app has finished; the command's own exit status reports the result of the run.
        if end.code is not None and end.code != 0:
            _raise_first_cause(messages, end)
            raise TrainingFailed(f"the ServerApp ended with sys.exit({end.code!r})") from end
    except Exception as error:
        if (
            isinstance(error, AttributeError)
            and error.name == "initialize_parameters"
            and isinstance(error.obj, Strategy)
        ):
            raise no_component(error.obj) from error
        _raise_first_cause(messages, error)
        raise
    messages.require_success()


def run_on_local_grid(
    server_app: ServerApp,
    client_app: ClientAppSource,
    *,
    num_nodes: int,
    run_config: UserConfig,
    num_workers: int,
    record: ExchangeRecord | None = None,
) -> None:
    """Run an app that keeps its virtual time itself, with Flower's log lines below errors suppressed.

    With `record`, an interrupted run resumes from it.
    """
    with (
        flower_quiet(),
        LocalGrid(
            client_app, num_nodes, run_config=run_config, num_workers=num_workers, record=record
        ) as grid,
    ):
        if record is not None:
            record.begin()
        server_app(
            GroupGrid(grid),
            Context(
                run_id=grid.run.run_id,
                node_id=0,
                node_config={},
                state=RecordDict(),
                run_config=run_config,
            ),
        )


def _raise_first_cause(messages: MessageLog, error: Exception | SystemExit) -> None:
    """Raise `TrainingFailed` if a ServerApp failed after all clients had, unless its error names their cause."""
    failure = messages.failure
    mistake = isinstance(error, SocflowerError) and not isinstance(error, TrainingFailed)
    text = " ".join(str(error).split())
    if failure is None or mistake or messages.first_cause.partition(": ")[2] in text:
        return
    raise TrainingFailed(
        f"{failure}; then the ServerApp raised {type(error).__name__}: {text}"
    ) from error


def _flat(table: Mapping[str, Any], prefix: str = "") -> UserConfig:
    """Return nested tables as dotted keys, as Flower passes a run config to apps."""
    flat: UserConfig = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
