"""The ServerApp of every scenario: trains, evaluates, records and resumes the scenario's strategy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import WARNING
from time import perf_counter
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from torch import nn

from socflower.engines.run_folder import RunFolder
from socflower.engines.trained_devices import TrainedDevices
from socflower.errors import ConfigError, TrainingFailed
from socflower.flower_adapter import log
from socflower.scenario.app.round_record import Ended, RoundRecord, round_end_of
from socflower.scenario.app.strategy import Preset, RunParts, preset_of
from socflower.scenario.arithmetic import evaluation_device, kernels
from socflower.scenario.heat import heat_document, rack_dynamics, unthrottled_training_s
from socflower.scenario.prepared_run import PreparedRun
from socflower.scenario.priced_processors import priced_line, priced_processors
from socflower.scenario.workload import ModelMetrics, scenario_data
from socflower.sim import EventClock, Trace
from socflower.thermal.model.dynamics import RackDynamics
from socflower.training.model_state import (
    frozen_digest,
    load_trainable_state,
    num_bytes_of,
    trainable_state,
)
from socflower.wire.message_keys import FROZEN_SHA256
from socflower.workloads.evaluation import evaluate


@dataclass(frozen=True, kw_only=True, slots=True)
class _ServerModel:
    """The model of a run as the server has it."""

    module: nn.Module
    # What nodes train, at the start.
    initial: ArrayRecord
    # The digest of what they do not; empty if they train everything.
    frozen_sha256: str
    data_source: str
    score: Callable[[nn.Module], ModelMetrics]

    def with_arrays(self, arrays: ArrayRecord) -> nn.Module:
        """Return the model with what was trained; frozen parameters are those that it begins with."""
        load_trainable_state(self.module, arrays.to_torch_state_dict())
        return self.module


def train(run: PreparedRun, grid: Grid, folder: RunFolder) -> dict[str, Any]:
    """Train and return the outcome: the part of the result document that does not depend on the caller.

    Both halves of a split model train in the clients' processes unless the run's folder names a cloud.
    """
    started_s = perf_counter()
    scenario = run.scenario
    model = _split_model(run) if scenario.kind.uses_cloud else _model(run)
    folder.require_room_for_model(num_bytes_of(model.module))
    devices, trace = TrainedDevices(grid), Trace()
    rack = rack_dynamics(scenario, run.cluster)
    clock = EventClock(run.cluster, dynamics=rack, trace=trace)

    def score(arrays: ArrayRecord) -> ModelMetrics:
        return model.score(model.with_arrays(arrays))

    def heat() -> Mapping[str, float]:
        if rack is None or scenario.thermal is None:
            return {}
        now = rack.present
        return {"hottest_c": now.hottest_c, "mean_clock": now.mean_clock, "fan_rpm": now.rpm}

    record = RoundRecord(scenario, folder, clock, trace, devices, score, heat)
    resumed = record.resume()
    parts = RunParts(
        run=run,
        grid=devices,
        clock=clock,
        record=record,
        arrays=model.initial if resumed is None else resumed[1],
        # Frozen parameters stay at the nodes, which make them by the model's function and compare the digest.
        frozen={FROZEN_SHA256: model.frozen_sha256} if model.frozen_sha256 else {},
        model=model.module,
        score=score,
        folder=folder,
    )
    preset = preset_of(parts)
    strategy, plan = preset.strategy, preset.strategy.method.describe().document()
    if not scenario.kind.uses_cloud:
        _require_reachable_events(preset, parts)
    if resumed is not None:
        strategy.resume_from(resumed[0].server_round, **resumed[0].strategy)

    final, ended_after = _trained(preset, parts)
    if line := priced_line(priced_processors(scenario, devices.document())):
        log(WARNING, "time and energy are those of %s", line)
    whole = ArrayRecord(model.with_arrays(final).state_dict())
    return {
        "strategy": scenario.strategy.name,
        "kernels": kernels(scenario),
        "transports": {**strategy.method.describe().transports(), "hub": "Flower messages"},
        "data_source": model.data_source,
        **record.totals(whole if scenario.kind.uses_cloud else final, whole),
        "wall_s": perf_counter() - started_s,
        "heat": _heat_document(parts, rack, preset),
        "plan": plan,
        "ended_after": ended_after,
        **preset.summary(record.rounds, clock.now_s),
    }


def _trained(preset: Preset, parts: RunParts) -> tuple[ArrayRecord, int | None]:
    """Run the strategy's rounds; return what was trained, and the round at which a deadline ended it."""
    strategy, record = preset.strategy, parts.record
    arrays = preset.arrays or parts.arrays
    ended_after: int | None = None
    try:
        final: ArrayRecord | None = strategy.start(
            preset.grid,
            arrays,
            num_rounds=strategy.num_rounds,
            timeout=parts.scenario.train.reply_timeout_s,
            train_config=ConfigRecord({**parts.frozen, **record.train_config}),
            evaluate_fn=record.evaluation(
                round_end_of(strategy), strategy.num_rounds, lambda: strategy.state
            ),
        ).arrays
    except Ended as ended:
        final, ended_after = ended.arrays, ended.server_round
    finally:
        strategy.method.close()
    # A resumed run, or one after a warm-up, may have no round left.
    if strategy.resumed_after:
        final = final or arrays
    if not final:
        raise TrainingFailed(
            "Flower returned no model: every client failed; see the log for the first cause"
        )
    return final, ended_after


def _heat_document(
    parts: RunParts, rack: RackDynamics | None, preset: Preset
) -> dict[str, Any] | None:
    if rack is None:
        return None
    undisturbed_s = preset.undisturbed_s
    if undisturbed_s is None:
        undisturbed_s = unthrottled_training_s(parts.scenario, parts.run.cluster)
    return heat_document(parts.scenario, rack, parts.clock.now_s, undisturbed_s)


def _model(run: PreparedRun) -> _ServerModel:
    """Return the model of a scenario without a cloud, judged on the test data."""
    scenario = run.scenario
    data, module = scenario_data(scenario), run.take_model()

    def score(model: nn.Module) -> ModelMetrics:
        outcome = evaluate(model, data.test, device=evaluation_device(scenario))
        return ModelMetrics(outcome.metrics.get("accuracy"), outcome.loss)

    return _ServerModel(
        module=module,
        initial=ArrayRecord(trainable_state(module)),
        frozen_sha256=frozen_digest(module),
        data_source=data.source,
        score=score,
    )


def _split_model(run: PreparedRun) -> _ServerModel:
    """Return the model of a scenario with a cloud, which its workload judges."""
    workload = run.split_setting.workload
    return _ServerModel(
        module=workload.program.frozen_model(),
        initial=ArrayRecord(workload.program.trainable_state()),
        frozen_sha256=workload.program.frozen_sha256,
        data_source=workload.source,
        score=workload.evaluate,
    )


def _require_reachable_events(preset: Preset, parts: RunParts) -> None:
    """Raise `ConfigError` for an event that can never happen, since the scenario would not test its claim."""
    num_rounds, socs = preset.strategy.num_rounds, preset.strategy.method.socs
    if parts.scenario.strategy.use_spares:
        socs = range(parts.run.cluster.num_socs)
    for event in parts.scenario.events:
        if event.round > num_rounds:
            raise ConfigError(
                f"[[event]] round = {event.round}, but the run has {num_rounds} rounds"
            )
        if event.soc not in socs:
            taking_part = ", ".join(map(str, socs))
            raise ConfigError(
                f"[[event]] soc = {event.soc} takes no part; use one of {taking_part}"
            )
