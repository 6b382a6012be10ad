"""The Flower app of every scenario. All engines run these two objects; the run config names the run's folder."""

import traceback
from functools import cache
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid, ServerApp
from torch import nn

from socflower.clients import Trainer, make_client_app
from socflower.clients.faults import Fault, suffer
from socflower.cluster.protocol import PARTITION_ID
from socflower.errors import SocflowerError
from socflower.scenario.arithmetic import trainer, training_data
from socflower.scenario.checkpoint import CheckpointFolder
from socflower.scenario.config import Scenario
from socflower.scenario.model import initial_model
from socflower.scenario.run_folder import RunFolder
from socflower.scenario.training import train
from socflower.workloads import LabelledData, partition

RUN_FOLDER_KEY = "run-folder"

server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Train as the scenario says; leave the outcome, or the one line that says why there is none."""
    folder = _folder(context)
    try:
        folder.write_outcome(train(folder.read_scenario(), grid, folder))
    except SocflowerError as error:
        folder.write_outcome({"error": str(error)})
    except Exception as error:
        # A bug of ours; on the simulation engine nobody else would see where it happened.
        folder.write_outcome({"error": f"{type(error).__name__}: {error}", "bug": traceback.format_exc()})
        raise


def _model(context: Context) -> nn.Module:
    return initial_model(_scenario(context))


def _data(context: Context, partition_id: int, num_partitions: int) -> LabelledData:
    if num_partitions == 1:
        return training_data(_scenario(context))
    return _part(_folder(context), partition_id, num_partitions)


@cache
def _part(folder: RunFolder, partition_id: int, num_partitions: int) -> LabelledData:
    scenario = _read(folder)
    data, settings = training_data(scenario), scenario.data
    parts = partition(data.labels.numpy(), num_partitions, settings.partition, settings.alpha, scenario.seed)
    return data.select(parts[partition_id])


def _trainer(context: Context) -> Trainer:
    return trainer(_scenario(context), soc=int(context.node_config[PARTITION_ID]))


def _faults(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    events = _scenario(context).events
    faults = [Fault(kind=event.kind, soc=event.soc, server_round=event.round) for event in events]
    return suffer(faults, message, context, call_next)


def _folder(context: Context) -> RunFolder:
    return RunFolder(Path(str(context.run_config[RUN_FOLDER_KEY])))


def _scenario(context: Context) -> Scenario:
    return _read(_folder(context))


def _state_folder(context: Context) -> Path | None:
    return _clients_folder(_folder(context))


@cache
def _clients_folder(folder: RunFolder) -> Path | None:
    # Read once: Flower's processes may outlive the run's folder for some rounds, of which the server keeps checkpoints.
    checkpointing = folder.read_checkpointing()
    return None if checkpointing is None else CheckpointFolder(checkpointing.folder).clients


@cache
def _read(folder: RunFolder) -> Scenario:
    return folder.read_scenario()


client_app: ClientApp = make_client_app(_model, _data, _trainer, mods=[_faults],
                                        state_folder=_state_folder)
