"""The Flower app of every scenario. All engines run these two objects; the run config names the run's folder."""

import traceback
from functools import cache
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid, ServerApp
from torch import nn

from socflower.clients import FP32Trainer, Int8Trainer, Trainer, cosine_annealing, make_client_app, sgd
from socflower.clients.faults import Fault, suffer
from socflower.errors import SocflowerError
from socflower.precision import EngineSettings, RescalingPolicy, int8_algorithm
from socflower.scenario.config import Scenario
from socflower.scenario.model import initial_model
from socflower.scenario.run_folder import RunFolder
from socflower.scenario.training import train
from socflower.workloads import LabelledData, load_data, partition

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
    scenario = _scenario(context)
    data = load_data(scenario.data.name).train
    if num_partitions == 1:
        return data
    return _part(scenario.data.name, scenario.data.partition, scenario.data.alpha, scenario.seed, partition_id,
                 num_partitions)


@cache
def _part(name: str, scheme: str, alpha: float, seed: int, partition_id: int, num_partitions: int) -> LabelledData:
    data = load_data(name).train
    return data.select(partition(data.labels.numpy(), num_partitions, scheme, alpha, seed)[partition_id])


def _trainer(context: Context) -> Trainer:
    settings, precision = _scenario(context).train, _scenario(context).precision
    if precision.arithmetic == "int8":
        return Int8Trainer(
            algorithm=int8_algorithm(precision.algorithm, settings.momentum, precision.gradient_bits),
            learning_rate=settings.learning_rate,
            schedule=settings.schedule,
            settings=EngineSettings(rescaling=RescalingPolicy(adaptive=precision.adaptive_rescaling)),
        )
    return FP32Trainer(
        optimizer=sgd(settings.learning_rate, settings.momentum, settings.weight_decay),
        scheduler=cosine_annealing if settings.schedule == "cosine" else None,
        member_passes=settings.member_passes,
    )


def _faults(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    events = _scenario(context).events
    faults = [Fault(kind=event.kind, soc=event.soc, server_round=event.round) for event in events]
    return suffer(faults, message, context, call_next)


def _folder(context: Context) -> RunFolder:
    return RunFolder(Path(str(context.run_config[RUN_FOLDER_KEY])))


def _scenario(context: Context) -> Scenario:
    return _read(_folder(context))


@cache
def _read(folder: RunFolder) -> Scenario:
    return folder.read_scenario()


client_app: ClientApp = make_client_app(_model, _data, _trainer, mods=[_faults])
