"""The ServerApp of a split scenario: builds edges, cloud, links and strategy, and returns the outcome."""

from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from socflower.clients.split.cloud_sessions import CloudClient
from socflower.edgecloud.cloud.operator_calls import CloudOperator
from socflower.edgecloud.stream.credentials import read_token
from socflower.engines.run_folder import RunFolder
from socflower.errors import TrainingFailed
from socflower.scenario.app.round_record import RoundRecord, event_documents
from socflower.scenario.app.split_result import SplitHistory, cut_text, staleness_of
from socflower.scenario.prepared_run import PreparedRun
from socflower.scenario.split_models import Score
from socflower.scenario.split_setting import SplitSetting
from socflower.sim import EventClock, Trace
from socflower.strategies.split_replay import SplitReplay
from socflower.wire.secure_channel import Tls


def train_split(run: PreparedRun, grid: Grid, folder: RunFolder) -> dict[str, Any]:
    """Train and return the outcome: the part of the result document that does not depend on the caller.

    Both halves train in the clients' processes unless the run's folder names a cloud.
    """
    started_s = perf_counter()
    scenario, setting = run.scenario, run.split_setting
    cloud = _cloud(folder, setting)
    workload, model = setting.workload, setting.workload.program.model()
    trace = Trace()
    clock = EventClock(setting.cluster, trace=trace)

    def evaluate(arrays: ArrayRecord) -> Score:
        model.load_state_dict(arrays.to_torch_state_dict())
        return workload.evaluate(model)

    record = RoundRecord(scenario, folder, clock, trace, evaluate)
    strategy = SplitReplay(
        cluster=setting.cluster, parties=setting.parties(), edge_names=workload.program.edge_names, mode=setting.mode,
        batches_per_epoch=workload.batches_per_epoch, num_epochs=scenario.train.epochs, clock=clock, cloud=cloud,
        reverse=workload.program.is_reverse, round_epochs=scenario.split.round_epochs, seed=scenario.seed,
        fingerprint=workload.program.fingerprint(), tolerate_client_errors=scenario.strategy.tolerate_client_errors)
    arrays = ArrayRecord(model.state_dict())
    resumed = record.resume()
    if resumed is not None:
        checkpoint, arrays = resumed
        strategy.resume_from(checkpoint.server_round, state=checkpoint.balance)
    history = SplitHistory(setting.links, strategy.parties, resumed[0].balance.get("story") if resumed else None)

    def round_end(server_round: int) -> dict[str, Any]:
        report = strategy.reports[-1]
        history.add(report, clock.now_s - report.timeline.duration_s)
        stale = staleness_of(report)
        entry = {"epoch": report.epoch, "events": event_documents(report.events),
                 "mean_staleness": sum(value * count for value, count in stale.items()) / max(1, stale.total()),
                 "cuts": [cut_text(party.split_plan, party.costs) for party in strategy.parties]}
        if report.measured:
            entry["links"] = [asdict(each) for each in report.measured]
        return entry

    def own_state() -> dict[str, Any]:
        return {"balance": {**strategy.state, "story": history.state()}}

    try:
        final = strategy.start(
            grid, arrays, num_rounds=strategy.num_rounds, timeout=scenario.train.reply_timeout_s,
            evaluate_fn=record.evaluation(round_end, strategy.num_rounds, own_state)).arrays
    finally:  # otherwise a cloud that serves other runs too would keep this run's sessions
        if cloud is not None:
            cloud.close()
    if resumed is not None:
        final = final or arrays  # no round was left
    if not final:
        raise TrainingFailed("Flower returned no model: every client failed; see the log for the first cause")
    return {
        "strategy": scenario.strategy.name,
        "kernels": {"fp32": f"torch {torch.__version__}", "aggregation": "native weighted sum, float32"},
        "transports": {"edge and cloud": strategy.transport, "hub": "Flower messages"},
        "data_source": workload.source,
        **record.totals(final),
        "wall_s": perf_counter() - started_s, "heat": None, "plan": None,
        "split": history.document(strategy.parties, setting.mode, clock.now_s),
    }


def _cloud(folder: RunFolder, setting: SplitSetting) -> CloudClient | None:
    address = folder.read_cloud()
    if address is None:
        return None
    tls = Tls(ca=Path(address.ca)) if address.ca else None
    operator = CloudOperator(address=address.address, token=read_token(Path(address.token_file)), tls=tls)
    return CloudClient(operator, setting.workload.program)

