"""Makes the strategy of a scenario: the preset of its name, with the scenario's settings."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower_strategies
from flwr.serverapp.strategy import Strategy as OuterStrategy
from torch import nn

from socflower.clients.split.cloud_sessions import CloudClient
from socflower.cluster import Cluster
from socflower.edgecloud.cloud.operator_calls import CloudOperator
from socflower.edgecloud.stream.credentials import TokenFile
from socflower.engines.local.virtual_time_grid import VirtualTimeGrid
from socflower.engines.run_folder import RunFolder
from socflower.errors import InfeasiblePlan
from socflower.hierarchy import default_candidates
from socflower.hierarchy.exchange.collective_tasks import BUCKETS
from socflower.pipeline.runtime.payloads import ActivationCoding
from socflower.scenario.app.round_record import RoundRecord, round_end_of
from socflower.scenario.app.split_calibration import calibrated_split, undisturbed_s
from socflower.scenario.app.split_result import split_document
from socflower.scenario.arithmetic import training_data
from socflower.scenario.costs import model_profile, num_training_samples, pricing
from socflower.scenario.pipeline_planning import pipeline_problem, planner_settings
from socflower.scenario.planning import rebalancing
from socflower.scenario.prepared_run import PreparedRun
from socflower.scenario.schema.outer import OUTER_STRATEGIES, OuterConfig
from socflower.scenario.schema.pipeline import PipelineConfig
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.split_setting import SplitSetting
from socflower.scenario.workload import ModelMetrics, scenario_data
from socflower.sim import EventClock
from socflower.strategies.baselines import OrderedFedAvg
from socflower.strategies.hybrid_pipeline import HybridPipeline
from socflower.strategies.methods.local import LocalSchedule
from socflower.strategies.presets import group_strategy
from socflower.strategies.round_strategy import RoundStrategy
from socflower.strategies.settings import Costs, Grouping
from socflower.strategies.socflow import SoCFlow
from socflower.strategies.split_replay import SplitReplay
from socflower.strategies.warm_up import warm_up
from socflower.wire.message_keys import TRAIN_LOSS
from socflower.workloads.dataset import LabelledData


@dataclass(frozen=True, kw_only=True, slots=True)
class RunParts:
    """What a run has before its strategy is made."""

    run: PreparedRun
    folder: RunFolder
    grid: Grid
    clock: EventClock
    record: RoundRecord
    # What nodes train from: initial weights, or those of a checkpoint.
    arrays: ArrayRecord
    # The entries of the train config about frozen parameters.
    frozen: Mapping[str, str]
    model: nn.Module
    score: Callable[[ArrayRecord], ModelMetrics]

    @property
    def scenario(self) -> Scenario:
        """The scenario of the run."""
        return self.run.scenario

    @property
    def has_heat(self) -> bool:
        """Whether devices get hot, or are used by others."""
        return self.clock.changes


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A strategy, the grid that it is started on, and what the result has only because of it."""

    strategy: RoundStrategy[Any, Any]
    grid: Grid
    # What it starts from after a warm-up; None: the arrays of the run.
    arrays: ArrayRecord | None = None
    # The virtual seconds without heat, users and events; None: as they are planned for its kind.
    undisturbed_s: float | None = None
    # (rounds, virtual seconds) -> more entries of the result.
    summary: Callable[[Sequence[Mapping[str, Any]], float], dict[str, Any]] = lambda rounds, now_s: {}


def preset_of(parts: RunParts) -> Preset:
    """Return the strategy that the scenario names, ready to start."""
    scenario = parts.scenario
    if scenario.kind.uses_cloud:
        return _split(parts)
    if scenario.kind.is_pipeline:
        return _pipeline(parts)
    if scenario.kind.has_groups:
        return _in_groups(parts)
    return _local(parts)


# ------------------------------------------------------------------------------------------------- groups
def _in_groups(parts: RunParts) -> Preset:
    """Return training in groups; with groups = "auto" several numbers train the first rounds (F2)."""
    settings, record = parts.scenario.strategy, parts.record
    num_socs = settings.socs or parts.run.cluster.num_socs
    number = settings.num_groups(num_socs)
    # A resumed run has its warm-up in the checkpoint.
    if record.warm_up is not None:
        number = record.warm_up["num_groups"]
    if not isinstance(number, str):
        return Preset(strategy=_groups(parts, int(number)), grid=parts.grid)
    initial, metrics = record.entry(0, parts.arrays, None)
    rounds: dict[int, list[dict[str, Any]]] = {}

    def score(number: int, strategy: SoCFlow, arrays: ArrayRecord) -> float:
        own = rounds.setdefault(number, [initial])
        entry, metrics = record.entry(len(own), arrays, round_end_of(strategy))
        own.append(entry)
        return _score(metrics)

    found = warm_up(
        parts.grid,
        parts.arrays,
        score,
        lambda number: _groups(parts, number),
        default_candidates(num_socs),
        _score(metrics),
        rule=settings.group_rule,
        timeout_s=parts.scenario.train.reply_timeout_s,
        train_config={**parts.frozen, **record.train_config},
    )
    strategy, choice, own = found.strategy, found.choice, rounds.get(found.num_groups, [initial])
    document = {
        "num_groups": choice.num_groups,
        "rule": settings.group_rule,
        "accuracy": {str(number): _finite(score) for number, score in choice.accuracies.items()},
        "seconds": {str(number): each.seconds for number, each in choice.measured.items()},
        "untried": list(choice.untried),
        "num_rounds": len(own) - 1,
        "virtual_s": parts.clock.now_s,
        "energy_j": parts.clock.usage.total_energy_j,
    }
    record.begin_with(own, document, strategy.num_rounds, found.arrays, strategy.state)
    return Preset(strategy=strategy, grid=parts.grid, arrays=found.arrays)


def _score(metrics: ModelMetrics) -> float:
    """Return the score by which the number of groups is chosen: accuracy, or exp(-loss) for models without; or NaN."""
    if not math.isfinite(metrics.loss):
        return math.nan
    return metrics.likelihood if metrics.accuracy is None else metrics.accuracy


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _groups(parts: RunParts, num_groups: int) -> SoCFlow:
    scenario = parts.scenario
    costs = Costs(
        model_profile=model_profile(scenario, parts.model),
        pricing=pricing(scenario),
        clock=parts.clock,
    )
    num_samples = _num_samples(scenario)
    return strategy_in_groups(scenario, parts.run.cluster, num_groups, costs, num_samples)


def strategy_in_groups(
    scenario: Scenario, cluster: Cluster, num_groups: int, costs: Costs, num_samples: int
) -> SoCFlow:
    """Return the strategy that a scenario names, in so many groups, for a training set of so many samples."""
    settings = scenario.strategy
    kind = group_strategy(settings.name)
    module, _, name = kind.target.partition(":")
    strategy: type[SoCFlow] = getattr(import_module(module), name)
    own: dict[str, Any] = {}
    if scenario.synchronous_epochs:
        own["synchronous_epochs"] = scenario.synchronous_epochs
    if kind.is_streaming:
        own["streaming"] = settings.fragments
    if kind.has_local_epochs:
        own["local_epochs"] = scenario.train.local_epochs
    return strategy(
        **own,
        preset=kind,
        cluster=cluster,
        groups=Grouping(
            num_groups=num_groups, num_socs=settings.socs, use_spares=settings.use_spares
        ),
        schedule=scenario.schedule(num_samples),
        costs=costs,
        exchange=scenario.exchange,
        rings=scenario.ring,
        rebalancing=rebalancing(scenario),
        outer=None if settings.outer is None else _outer(settings.outer),
        quorum=settings.waits_for,
        preemption=settings.preemption,
        dispatch=cast(LabelledData, training_data(scenario)) if settings.dispatch else None,
        tolerate_client_errors=settings.tolerate_client_errors,
    )


def _num_samples(scenario: Scenario) -> int:
    return num_training_samples(scenario, len(scenario_data(scenario).train))


def _outer(settings: OuterConfig) -> OuterStrategy:
    """Return the outer strategy; nodes do not evaluate, as a scenario is evaluated on the server."""
    more = {"train_loss_key": TRAIN_LOSS} if settings.name == "qfedavg" else {}
    module, _, name = OUTER_STRATEGIES[settings.name][0].rpartition(":")
    make = getattr(import_module(module) if module else flower_strategies, name)
    outer: OuterStrategy = make(**settings.arguments, **more, fraction_evaluate=0.0)
    return outer


# ------------------------------------------------------------------------------------------------- pipelines
def _pipeline(parts: RunParts) -> Preset:
    """Return one model over all SoCs, in stages."""
    scenario = parts.scenario
    settings, table = scenario.strategy, scenario.pipeline or PipelineConfig()
    if settings.rebalance == "shares" and parts.has_heat:
        why = "in virtual time a pipeline keeps its shares within a round; use 'groups'"
        raise scenario.mistake("strategy", "rebalance", why)
    problem, _ = pipeline_problem(scenario)
    strategy = HybridPipeline(
        problem=problem,
        planner=planner_settings(scenario),
        schedule=scenario.schedule(_num_samples(scenario)),
        coding=ActivationCoding(
            bits=table.activation_bits,
            gradient_bits=table.gradient_bits,
            feedback=table.activation_feedback,
        ),
        rings=scenario.ring,
        backup_steps=table.backup_steps,
        rebalancing=rebalancing(scenario),
        clock=parts.clock,
        tolerate_client_errors=settings.tolerate_client_errors,
    )
    return Preset(
        strategy=strategy,
        grid=parts.grid,
        undisturbed_s=strategy.undisturbed_s() if parts.has_heat else None,
    )


# ------------------------------------------------------------------------------------------------- FedAvg
def _local(parts: RunParts) -> Preset:
    """Return FedAvg over all nodes; the grid prices its messages."""
    scenario = parts.scenario
    train, settings = scenario.train, scenario.strategy
    num_socs, wanted = (
        len(list(parts.grid.get_node_ids())),
        settings.socs or parts.run.cluster.num_socs,
    )
    if num_socs != wanted:
        raise InfeasiblePlan(
            f"[strategy] fedavg trains on {wanted} SoCs and Flower has {num_socs} nodes; set socs = "
            f"{num_socs}"
        )
    grid = VirtualTimeGrid(
        parts.grid,
        parts.clock,
        parts.run.cluster,
        model_profile=model_profile(scenario, parts.model),
        batch_size=train.batch_size,
        pricing=pricing(scenario),
        fused=settings.fusion == BUCKETS,
    )
    strategy = OrderedFedAvg(
        schedule=LocalSchedule(
            num_rounds=train.epochs // train.local_epochs,
            local_epochs=train.local_epochs,
            batch_size=train.batch_size,
            seed=scenario.seed + 1,
        ),
        num_socs=num_socs,
        outer=None if settings.outer is None else _outer(settings.outer),
        tolerate_client_errors=settings.tolerate_client_errors,
        wire=scenario.precision.wire,
    )
    return Preset(strategy=strategy, grid=grid)


# ------------------------------------------------------------------------------------------------- split training
def _split(parts: RunParts) -> Preset:
    """Return training between edges and a cloud, after a calibration of what is "auto"."""
    found = calibrated_split(parts, partial(_split_strategy, parts))
    setting = found.setting
    start = setting.parties()
    calibration = parts.record.warm_up
    return Preset(
        strategy=found.strategy,
        grid=parts.grid,
        arrays=found.arrays,
        undisturbed_s=None
        if calibration is None or not parts.has_heat
        else undisturbed_s(setting, calibration),
        summary=lambda rounds, now_s: {
            "split": split_document(start, setting.links[0], setting.mode, rounds, now_s)
        },
    )


def _split_strategy(parts: RunParts, setting: SplitSetting, trial: str) -> SplitReplay:
    scenario, program = setting.scenario, setting.workload.program
    return SplitReplay(
        cluster=setting.cluster,
        parties=setting.parties(),
        edge_names=program.edge_names,
        mode=setting.mode,
        batches_per_epoch=setting.batches_per_epoch,
        num_epochs=scenario.train.epochs,
        clock=parts.clock,
        cloud=cloud_of(parts.folder, setting),
        reverse=program.is_reverse,
        round_epochs=[end / setting.batches_per_epoch for end in setting.round_ends()],
        seed=scenario.seed,
        uplink=setting.uplink,
        cloud_processors=scenario.split.cloud_processors,
        fingerprint=program.fingerprint(),
        tolerate_client_errors=scenario.strategy.tolerate_client_errors,
        trial=trial,
    )


def cloud_of(folder: RunFolder, setting: SplitSetting) -> CloudClient | None:
    """Return the cloud that the run's folder names, if it names one."""
    address = folder.read_cloud()
    if address is None:
        return None
    token = TokenFile(Path(address.token_file))
    operator = CloudOperator(address=address.address, token=token, tls=address.tls)
    return CloudClient(operator, setting.workload.program)
