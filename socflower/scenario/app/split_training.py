"""A split scenario as an app: the edges' ClientApp, and the ServerApp with cloud, links and strategy."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias, cast

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from torch import nn

from socflower.clients.split.app import make_split_client_app
from socflower.clients.split.cloud_sessions import CloudClient
from socflower.clients.split.in_process import SplitSettings
from socflower.clients.split.remote_cloud import CloudLink, cloud_link
from socflower.edgecloud.cloud.operator_calls import CloudOperator
from socflower.edgecloud.split_program import SplitProgram
from socflower.edgecloud.stream.credentials import read_token
from socflower.engines.run_folder import RunFolder
from socflower.engines.trained_devices import TrainedDevices
from socflower.errors import ConfigError, TrainingFailed
from socflower.scenario.app.round_record import RoundRecord, event_documents
from socflower.scenario.app.split_result import SplitHistory, staleness_of
from socflower.scenario.arithmetic import kernels
from socflower.scenario.heat import heat_document, rack_dynamics, unthrottled_training_s
from socflower.scenario.prepared_run import PreparedRun
from socflower.scenario.schema.config import Scenario
from socflower.scenario.schema.file import from_document
from socflower.scenario.split_setting import SplitSetting
from socflower.scenario.workload import ModelMetrics
from socflower.sim import EventClock, Trace
from socflower.strategies.split_replay import SplitReplay
from socflower.training.model_state import num_bytes_of
from socflower.wire.codecs.error_feedback import Form
from socflower.wire.message_keys import FROZEN_SHA256, PARTITION_ID
from socflower.workloads.data_source import DataSource

FolderOf: TypeAlias = Callable[[Context], RunFolder]

DELTA_BYTES = 512 << 20
"""Memory limit of delta coding for the samples' last features, at each end."""


def split_client_app(folder_of: FolderOf) -> ClientApp:
    """Return the ClientApp of the edges of the scenario in a run's folder."""

    def program(context: Context) -> SplitProgram:
        return _setting(folder_of(context)).workload.program

    def data(context: Context, party: int, num_parties: int) -> DataSource:
        return _setting(folder_of(context)).workload.samples(party)

    def cloud_data(context: Context, party: int, num_parties: int) -> DataSource:
        known = _setting(folder_of(context)).workload.cloud_samples(party)
        if known is None:
            raise ConfigError("split scenario: this workload has nothing in the cloud but features")
        return known

    def settings(context: Context) -> SplitSettings:
        return split_settings(_setting(folder_of(context)))

    def link(context: Context) -> CloudLink:
        folder = folder_of(context)
        setting, edge = _setting(folder), int(context.node_config[PARTITION_ID])
        own = cloud_link(context)
        # On one machine the connection is slowed down to the scenario's link; between machines it is not.
        return replace(
            own,
            decider=setting.decision_engine(edge),
            bandwidth_profile=setting.links[edge] if folder.read_cloud() is not None else None,
        )

    return make_split_client_app(
        program,
        data,
        cloud_data_fn=cloud_data,
        settings_fn=settings,
        link_fn=link,
        state_folder=lambda context: folder_of(context).clients_folder(context),
    )


def split_settings(setting: SplitSetting) -> SplitSettings:
    """Return the scenario's settings for the coding of features and gradients."""
    scenario: Scenario = setting.scenario
    table, ours = scenario.split, scenario.strategy.name == "split-replay"
    feedback = cast(Form, table.error_feedback) if ours and not table.delta else "none"
    return SplitSettings(
        feedback=feedback,
        delta_bytes=DELTA_BYTES if ours and table.delta else 0,
        window=setting.schedule,
    )


@cache
def _setting(folder: RunFolder) -> SplitSetting:
    return SplitSetting(from_document(folder.read_scenario()))


def train_split(run: PreparedRun, grid: Grid, folder: RunFolder) -> dict[str, Any]:
    """Train and return the outcome: the part of the result document that does not depend on the caller.

    Both halves train in the clients' processes unless the run's folder names a cloud.
    """
    started_s = perf_counter()
    scenario, setting = run.scenario, run.split_setting
    cloud = _cloud(folder, setting)
    workload, model = setting.workload, setting.workload.program.model()
    folder.require_room_for_model(num_bytes_of(model))
    trace = Trace()
    rack = rack_dynamics(scenario, setting.cluster)
    clock = EventClock(setting.cluster, dynamics=rack, trace=trace)

    def whole(arrays: ArrayRecord) -> nn.Module:
        """Return the model with what was trained; frozen parameters are those that it begins with."""
        model.load_state_dict(arrays.to_torch_state_dict(), strict=False)
        return model

    def evaluate(arrays: ArrayRecord) -> ModelMetrics:
        return workload.evaluate(whole(arrays))

    grid = devices = TrainedDevices(grid)
    record = RoundRecord(scenario, folder, clock, trace, devices, evaluate)
    strategy = _strategy(setting, clock, cloud)
    arrays = ArrayRecord(workload.program.trainable_state())
    resumed = record.resume()
    if resumed is not None:
        checkpoint, arrays = resumed
        own = {key: checkpoint.balance[key] for key in strategy.state}
        strategy.resume_from(checkpoint.server_round, **own)
    history = SplitHistory(
        setting.links, strategy.parties, resumed[0].balance.get("history") if resumed else None
    )

    def round_end(server_round: int) -> dict[str, Any]:
        report = strategy.reports[-1]
        history.add(report, clock.now_s - report.timeline.duration_s)
        entry = {
            "epoch": report.epoch,
            "events": event_documents(report.events),
            **_cuts_and_staleness(strategy),
        }
        if report.measured:
            entry["links"] = [asdict(each) for each in report.measured]
        return entry

    def own_state() -> dict[str, Any]:
        return {"balance": {**strategy.state, "history": history.state()}}

    frozen = {FROZEN_SHA256: digest} if (digest := workload.program.frozen_sha256) else {}
    try:
        final = strategy.start(
            grid,
            arrays,
            num_rounds=strategy.num_rounds,
            timeout=scenario.train.reply_timeout_s,
            train_config=ConfigRecord({**frozen, **record.train_config}),
            evaluate_fn=record.evaluation(round_end, strategy.num_rounds, own_state),
        ).arrays
    finally:
        # A cloud that also serves other runs would otherwise keep this run's sessions.
        if cloud is not None:
            cloud.close()
    if resumed is not None:
        # A resumed run may have no round left.
        final = final or arrays
    if not final:
        raise TrainingFailed(
            "Flower returned no model: every client failed; see the log for the first cause"
        )
    return {
        "strategy": scenario.strategy.name,
        "kernels": kernels(scenario),
        "transports": {"edge and cloud": strategy.transport, "hub": "Flower messages"},
        "data_source": workload.source,
        **record.totals(ArrayRecord(whole(final).state_dict())),
        "wall_s": perf_counter() - started_s,
        "plan": None,
        "heat": None
        if rack is None
        else heat_document(
            scenario, rack, clock.now_s, unthrottled_training_s(scenario, setting.cluster)
        ),
        "split": history.document(strategy.parties, setting.mode, clock.now_s),
    }


def _strategy(setting: SplitSetting, clock: EventClock, cloud: CloudClient | None) -> SplitReplay:
    scenario, program = setting.scenario, setting.workload.program
    return SplitReplay(
        cluster=setting.cluster,
        parties=setting.parties(),
        edge_names=program.edge_names,
        mode=setting.mode,
        batches_per_epoch=setting.batches_per_epoch,
        num_epochs=scenario.train.epochs,
        clock=clock,
        cloud=cloud,
        reverse=program.is_reverse,
        round_epochs=scenario.split.round_epochs,
        seed=scenario.seed,
        uplink=setting.uplink,
        cloud_processors=scenario.split.cloud_processors,
        fingerprint=program.fingerprint(),
        tolerate_client_errors=scenario.strategy.tolerate_client_errors,
    )


def _cuts_and_staleness(strategy: SplitReplay) -> dict[str, Any]:
    """Return the mean staleness of the latest round's gradients, and each edge's cut at its end."""
    stale = staleness_of(strategy.reports[-1])
    return {
        "mean_staleness": sum(value * count for value, count in stale.items())
        / max(1, stale.total()),
        "cuts": [party.costs.text_of(party.split_plan) for party in strategy.parties],
    }


def _cloud(folder: RunFolder, setting: SplitSetting) -> CloudClient | None:
    address = folder.read_cloud()
    if address is None:
        return None
    token = read_token(Path(address.token_file))
    operator = CloudOperator(address=address.address, token=token, tls=address.tls)
    return CloudClient(operator, setting.workload.program)
