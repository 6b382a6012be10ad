"""Runs a plain torch loop, without Flower in it, in groups on a cluster."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from socflower.clients.app import make_client_app
from socflower.cluster import Cluster, ModelProfile
from socflower.cluster.cluster_file import load_cluster
from socflower.engines.local.run_app import run_app
from socflower.engines.names import require_engine
from socflower.errors import ConfigError
from socflower.flower_adapter import flower_quiet
from socflower.model_graph.layer_profile import profile_module
from socflower.plain_numbers import plain_numbers
from socflower.strategies.group_grid import GroupGrid
from socflower.strategies.settings import Costs, IntervalEpochs, TrainingSchedule
from socflower.strategies.socflow import SoCFlow
from socflower.training.fp32 import FP32Trainer
from socflower.training.loop import LoopFn, LoopTrainer, prepared_by, started_model
from socflower.training.model_state import trainable_state
from socflower.training.schedules import SchedulerFn
from socflower.workloads.data_source import DataSource
from socflower.workloads.map_dataset import as_data_source


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """The trained weights, by the names of the state dict, and what the training took on the cluster."""

    state_dict: dict[str, Tensor]
    # Virtual time and energy; None for a model whose layers could not be read.
    virtual_s: float | None
    energy_j: float | None


@plain_numbers
def make_loop_apps(
    train_fn: LoopFn,
    *,
    cluster: Cluster | str | Path,
    epochs: int,
    groups: int = 1,
    interval_epochs: IntervalEpochs = "decay",
    seed: int = 1,
    scheduler: SchedulerFn | None = None,
    max_grad_norm: float | None = None,
    on_end: Callable[[dict[str, Tensor]], None] = lambda state_dict: None,
) -> tuple[ServerApp, ClientApp]:
    """Return the apps that train with a plain loop, for a Flower app's folder, which every engine runs.

    `train_fn(group)` builds model, optimiser and DataLoader, passes them through `group.prepare`, and loops over
    `group.epochs` and the batches, with `group.backward(loss)` in place of `loss.backward()`; members meet at
    `optimizer.step`. It runs again for each interval between synchronisations, and ends in it
    where it asks for a further batch. The weights are
    those of `make_client_app` with the same model, optimiser, data, seed and plan. The DataLoader's batch size is that
    of a group, its order that of `TrainingSchedule(seed=...)`. `scheduler` and `max_grad_norm` are those of
    `FP32Trainer`; `on_end` gets the trained weights. Raises `ConfigError`, also for what a loop cannot be: several
    models, closures, a scheduler of its own, batches without a loss.
    """
    rack = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    base = FP32Trainer(scheduler=scheduler, max_grad_norm=max_grad_norm)
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        torch.manual_seed(seed)
        prepared = prepared_by(train_fn)
        if not prepared.batches.batch_size:
            raise ConfigError(
                "launch: give the DataLoader a batch_size; a batch_sampler's order is not followed"
            )
        data = _data_of(train_fn)
        strategy = SoCFlow(
            cluster=rack,
            groups=groups,
            schedule=TrainingSchedule(
                num_samples=len(data),
                batch_size=prepared.batches.batch_size,
                num_epochs=epochs,
                interval_epochs=interval_epochs,
                seed=seed,
            ),
            costs=Costs(model_profile=_profile(prepared.model, data)),
        )
        trained = strategy.start(
            grid=GroupGrid(grid),
            initial_arrays=ArrayRecord(trainable_state(prepared.model)),
            num_rounds=strategy.num_rounds,
        )
        on_end(dict(trained.arrays.to_torch_state_dict()))

    return server_app, _client_app(train_fn, base)


def _client_app(train_fn: LoopFn, base: FP32Trainer) -> ClientApp:
    return make_client_app(
        lambda context: started_model(train_fn),
        lambda context, part, num_parts: _data_of(train_fn),
        LoopTrainer(base=base),
    )


@cache
def _data_of(train_fn: LoopFn) -> DataSource:
    """Return the samples of a loop's DataLoader, once a process."""
    return as_data_source(prepared_by(train_fn).batches)


def _profile(model: nn.Module, data: DataSource) -> ModelProfile | None:
    """Return the model's layers; None if they cannot be read by the form of its batches."""
    first: Any = data.batch(torch.arange(1), (0,))
    inputs = first[0] if isinstance(first, tuple | list) else first
    try:
        return profile_module(model, inputs, type(model).__name__)
    except ConfigError:
        return None


@plain_numbers
def launch(
    train_fn: LoopFn,
    *,
    cluster: Cluster | str | Path,
    engine: str = "local",
    num_workers: int | None = None,
    **settings: Any,
) -> Launched:
    """Run a plain loop in groups and return the trained weights; see `make_loop_apps`, which has the settings.

    `cluster` is a cluster or its file. `num_workers` are the processes of groups that train at the same time, 0 for
    none; with processes `train_fn` must be a function of a module. Raises `ConfigError` for another engine than
    "local": the others start from a Flower app's folder, with the apps of `make_loop_apps`.
    """
    require_engine(engine)
    if engine != "local":
        raise ConfigError(
            f"launch: engine = {engine!r} starts from a folder: put `server_app, client_app = make_loop_apps(...)` "
            f"into a Flower app and use `socflower run FOLDER --engine {engine}`"
        )
    rack = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    ended: list[dict[str, Tensor]] = []
    server_app, client_app = make_loop_apps(train_fn, cluster=rack, on_end=ended.append, **settings)
    kept = ("scheduler", "max_grad_norm")
    base = FP32Trainer(**{key: settings[key] for key in kept if key in settings})
    source = client_app if num_workers == 0 else partial(_client_app, train_fn, base)
    # A plain loop's user reads warnings about clients, and not Flower's account of each round.
    with flower_quiet(logging.WARNING):
        clock = run_app(server_app, source, cluster=rack, num_workers=num_workers)
    usage = clock.usage
    is_priced = usage.total_energy_j > 0
    return Launched(
        state_dict=ended[0],
        virtual_s=clock.now_s if is_priced else None,
        energy_j=usage.total_energy_j if is_priced else None,
    )
