"""The Flower app of every scenario: all engines run these two objects; the run config names the run's folder."""

import os
import time
import traceback
from collections.abc import Callable
from functools import cache, partial
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, TypeAlias

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid, ServerApp
from torch import nn

from socflower.allocator import keep_freed_memory
from socflower.clients.app import make_client_app
from socflower.clients.fault_injection import Fault, inject
from socflower.clients.heat_mod import node_heat_mod
from socflower.engines.app_files import NUM_NODES_KEY, RUN_FOLDER_KEY
from socflower.engines.run_folder import OUTCOME, SERVER, STATUS, RunFolder
from socflower.engines.run_status import OnStatus, WatchedGrid, waiting_for_nodes
from socflower.errors import SocflowerError
from socflower.flower_adapter import log
from socflower.scenario.app.split_client import split_client_app
from socflower.scenario.app.training import train
from socflower.scenario.arithmetic import trainer, training_data
from socflower.scenario.prepared_run import PreparedRun
from socflower.scenario.schema.file import from_document
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.workload import initial_model, partitions
from socflower.strategies.group_grid import GroupGrid
from socflower.strategies.node_registry import half_of
from socflower.training.trainer import Trainer
from socflower.wire.message_keys import PARTITION_ID
from socflower.wire.split_message_keys import SPLIT
from socflower.workloads.data_source import DataSource

FolderOf: TypeAlias = Callable[[Context], RunFolder]

_NODES_TIMEOUT_S = 120.0
_OTHERS_S = 5.0


def scenario_server_app(
    folder_of: FolderOf, prepared: PreparedRun | None = None, *, others_s: float = _NODES_TIMEOUT_S
) -> ServerApp:
    """Return the ServerApp that trains the scenario in a run's folder and writes the outcome there.

    `prepared` is the run's prepared scenario if it was built in this process. Once half of the nodes are connected, the
    others are waited for only `others_s`.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        keep_freed_memory()
        folder = folder_of(context)

        on_status = partial(folder.write, STATUS)

        def outcome() -> dict[str, Any]:
            num_nodes = int(context.run_config.get(NUM_NODES_KEY, 0))
            run = prepared or PreparedRun(from_document(folder.read_scenario()))
            min_nodes = run.scenario.ring.min_nodes
            by_default = half_of(num_nodes) if run.scenario.kind.has_groups else None
            await_nodes(
                grid,
                num_nodes,
                on_status=on_status,
                least=by_default if min_nodes is None else min_nodes,
                others_s=others_s if min_nodes is None else _OTHERS_S,
            )
            return train(run, GroupGrid(WatchedGrid(grid, on_status)), folder)

        report_outcome(folder, outcome)

    return app


def report_outcome(folder: RunFolder, outcome: Callable[[], dict[str, Any]]) -> None:
    """Write a ServerApp's outcome or error to the run's folder; errors that are bugs are raised too."""
    folder.write(SERVER, {"pid": os.getpid()})
    try:
        folder.write(OUTCOME, outcome())
    except SocflowerError as error:
        folder.write(OUTCOME, {"error": str(error), "kind": type(error).__name__})
    except Exception as error:
        # If Flower runs the app, only this traceback shows where it happened.
        folder.write(
            OUTCOME, {"error": f"{type(error).__name__}: {error}", "bug": traceback.format_exc()}
        )
        raise


def scenario_client_app(folder_of: FolderOf) -> ClientApp:
    """Return the ClientApp that trains the scenario in a run's folder."""

    def scenario_of(context: Context) -> Scenario:
        return _read(folder_of(context))

    def model(context: Context) -> nn.Module:
        return initial_model(scenario_of(context))

    def data(context: Context, partition_id: int, num_partitions: int) -> DataSource:
        if num_partitions == 1:
            return training_data(scenario_of(context))
        return _part(folder_of(context), partition_id, num_partitions)

    def trainer_of(context: Context) -> Trainer:
        return trainer(scenario_of(context), soc=int(context.node_config[PARTITION_ID]))

    def faults(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        return inject(
            [
                Fault(
                    kind=event.kind,
                    soc=event.soc,
                    server_round=event.round,
                    num_rounds=event.rounds,
                    at=event.at,
                )
                for event in scenario_of(context).events
            ],
            message,
            context,
            call_next,
        )

    def state_folder(context: Context) -> Path | None:
        return folder_of(context).clients_folder(context)

    grouped = make_client_app(
        model, data, trainer_of, mods=[faults, node_heat_mod], state_folder=state_folder
    )
    return _DispatchingApp(scenario_of, grouped, split_client_app(folder_of))


class _DispatchingApp(ClientApp):
    """Passes each message to the ClientApp for its kind of work, or for the scenario's kind of strategy."""

    def __init__(
        self, scenario_of: Callable[[Context], Scenario], grouped: ClientApp, split: ClientApp
    ) -> None:
        super().__init__()
        self._scenario_of, self._grouped, self._split = scenario_of, grouped, split

    def __call__(self, message: Message, context: Context) -> Message:
        is_split = self._scenario_of(context).kind.uses_cloud or (
            message.has_content() and SPLIT in message.content.config_records
        )
        return (self._split if is_split else self._grouped)(message, context)


def await_nodes(
    grid: Grid,
    num_nodes: int,
    timeout_s: float = _NODES_TIMEOUT_S,
    on_status: OnStatus = lambda document: None,
    least: int | None = None,
    others_s: float = _OTHERS_S,
) -> None:
    """Wait until `num_nodes` SuperNodes are connected; after `timeout_s` log a warning and continue with fewer.

    Once `least` of them are connected, the others are waited for only `others_s`.
    """
    deadline = time.monotonic() + timeout_s
    has_enough = False
    num_logged = -1
    while (connected := len(list(grid.get_node_ids()))) < num_nodes:
        if not has_enough and least is not None and connected >= least:
            has_enough = True
            deadline = min(deadline, time.monotonic() + others_s)
        if time.monotonic() >= deadline:
            log(
                WARNING,
                "Only %d of %d SuperNodes are connected; continuing",
                connected,
                num_nodes,
            )
            return
        if connected != num_logged:
            log(INFO, "Waiting for %d SuperNodes, %d connected", num_nodes, connected)
            on_status(waiting_for_nodes(connected, num_nodes))
            num_logged = connected
        time.sleep(0.5)


@cache
def _part(folder: RunFolder, partition_id: int, num_partitions: int) -> DataSource:
    scenario = _read(folder)
    data = training_data(scenario)
    return data.select(partitions(scenario, data, num_partitions)[partition_id])


@cache
def _read(folder: RunFolder) -> Scenario:
    return from_document(folder.read_scenario())


def folder_of_run_config(context: Context) -> RunFolder:
    """Return the folder that the run config names."""
    return RunFolder(Path(str(context.run_config[RUN_FOLDER_KEY])))


server_app: ServerApp = scenario_server_app(folder_of_run_config)
client_app: ClientApp = scenario_client_app(folder_of_run_config)
