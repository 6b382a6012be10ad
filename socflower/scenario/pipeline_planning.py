"""The plan of a `hybrid-pipeline` scenario: stages, devices, shares, and which kind of parallelism pays."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from socflower.errors import ConfigError
from socflower.pipeline.planner.baselines import Compared, compare, laxer
from socflower.pipeline.planner.selection import OnStep, Planned, PlannerSettings, plan_pipeline
from socflower.pipeline.problem import LayerSeconds, PipelineModel, PipelineProblem
from socflower.pipeline.profiler.estimates import Int8Socs, default_micro_batches, estimated_problem
from socflower.pipeline.schedule.run import simulate_schedule
from socflower.quantities import counted
from socflower.scenario.costs import num_samples, optimizer_copies
from socflower.scenario.expectations import check_plan
from socflower.scenario.layer_profiles import measured_seconds
from socflower.scenario.schema.file import num_participants, scenario_cluster
from socflower.scenario.schema.pipeline import INT8, LAXER, PEERS, PipelineConfig
from socflower.scenario.schema.scenario_file import Scenario
from socflower.sim import EventClock, Trace
from socflower.wire.folders import exclusive_folder
from socflower.wire.saved_state import write_atomically
from socflower.workloads.models.built_in import built_in_pieces, model_names
from socflower.workloads.sources import data_names, data_shape

# Plans whose times differ by less than this factor count as equal.
_SAME = 1.005


def plan_of_pipeline(
    scenario: Scenario,
    *,
    on_step: OnStep = lambda text, done, total: None,
) -> tuple[dict[str, Any], Planned]:
    """Return the plan document of `socflower plan`, and the plan itself.

    `pipelines` have each their stages: layers, K, and each device's share, memory and budget; a 2-D plan has several.
    `predicted` has the seconds and joules of an update and of an epoch, `peers` what others would take on the same
    devices, for the same samples: those with `is_equal` sum gradients at every update with the same arithmetic as the
    plan, the others are in int8, or average models after `interval` updates. `verdict` says which kind of parallelism
    pays. `expectations` are the scenario's claims.

    Raises ConfigError for a model that cannot be cut and for one device, and InfeasiblePlan if nothing fits.
    """
    problem, epoch_samples = pipeline_problem(scenario)
    settings = planner_settings(scenario)
    sizes = settings.micro_batch_sizes
    # Asteroid's 2-D plans, whose stages may have several devices, have the same name.
    names = [name for name in PEERS if name != scenario.strategy.name]
    num_steps = 0

    def step(text: str, done: int, total: int) -> None:
        nonlocal num_steps
        num_steps = total
        on_step(text, done, total + len(names))

    planned = plan_pipeline(problem, settings, on_step=step)
    prediction, own = planned.prediction, planned.problem

    def peer_step(text: str, done: int, total: int) -> None:
        on_step(text, num_steps + done, num_steps + total)

    # An epoch has at least one update, also if it has fewer samples than a mini-batch.
    steps = max(1, epoch_samples // scenario.train.batch_size)
    compared = compare(problem, names, micro_batch_sizes=sizes, on_step=peer_step)
    peers = [_peer_document(each, prediction.step_s) for each in compared]
    peers += _laxer_peers(scenario, problem, names, steps, prediction.step_s)
    document = {
        "schema": 1,
        "kind": "pipeline",
        "work": f"{scenario.model.name}, {counted(own.model.num_layers, 'layer')}, "
        f"{counted(scenario.train.epochs, 'epoch')} of {counted(steps, 'update')} of "
        f"{counted(scenario.train.batch_size, 'sample')}",
        **planned.to_document(),
        "predicted": {
            **prediction.to_document(),
            "epoch_s": steps * prediction.step_s,
            "epoch_energy_j": steps * prediction.energy_j,
        },
        "peers": peers,
        "verdict": _verdict(planned, peers),
        "notes": [*_notes(planned), *_notes_of_peers(peers)],
    }
    document["expectations"] = check_plan(scenario.expect, document)
    return document, planned


def _laxer_peers(
    scenario: Scenario,
    problem: PipelineProblem,
    names: Sequence[str],
    steps: int,
    step_s: float,
) -> list[dict[str, Any]]:
    """Return the peers whose exchange or arithmetic is laxer than the plan's: int8, and means of models."""
    sizes = planner_settings(scenario).micro_batch_sizes
    others, peers = [(problem, "")], []
    if in_int8 := _in_int8(scenario, problem):
        others.append((in_int8, INT8))
        peers += [
            _peer_document(each, step_s, end=INT8)
            for each in compare(in_int8, names, micro_batch_sizes=sizes)
        ]
    return peers + [
        _peer_document(each, step_s, end=end, interval=interval)
        for one, end in others
        for each, interval in laxer(one, steps, micro_batch_sizes=sizes)
    ]


def _in_int8(scenario: Scenario, problem: PipelineProblem) -> PipelineProblem | None:
    """Return the problem with int8 on all devices that have a processor for it; None if none has, or all use theirs."""
    try:
        devices = estimated_problem(
            problem.model,
            problem.cluster,
            measured_int8=measured_seconds(scenario, problem.model)["int8"],
            socs=[device.soc for device in problem.devices],
            int8_socs="auto",
            micro_batch_size=1,
            num_micro_batches=1,
        ).devices
    except ConfigError:
        return None
    own = {device.soc for device in devices if device.int8_processor}
    if own <= {*problem.int8_socs}:
        return None
    # Devices without such a processor keep their own seconds.
    kept = [new if new.soc in own else problem.device(new.soc) for new in devices]
    return replace(problem, devices=tuple(kept))


def _peer_document(
    peer: Compared, own_step_s: float, *, end: str = "", interval: int = 1
) -> dict[str, Any]:
    """Return a row of `peers`; models are averaged after `interval` updates, gradients after each."""
    predicted = peer.prediction
    return {
        "name": f"{peer.name}{end}",
        "is_equal": not end and peer.name not in LAXER,
        "interval": interval,
        "fits": peer.fits,
        "why_not": peer.why_not,
        "step_s": predicted.step_s if predicted else None,
        "energy_j": predicted.energy_j if predicted else None,
        "over_ours": predicted.step_s / own_step_s if predicted and peer.fits else None,
    }


def write_plan(
    scenario: Scenario, document: dict[str, Any], planned: Planned, folder: Path
) -> None:
    """Write `plan.json`, `trace.json` and `report.html` with one update of the plan, executed in virtual time."""
    from socflower.report.pipeline_report import DrawnPass, write_pipeline_report

    trace, problem = Trace(), planned.problem
    run = simulate_schedule(problem, planned.plan, clock=EventClock(problem.cluster, trace=trace))
    names = {device.soc: f"SoC {device.soc}, {device.name}" for device in problem.devices}
    with exclusive_folder(folder, f"--out {folder}"):
        write_atomically(folder / "plan.json", json.dumps(document, indent=2) + "\n")
        trace.write(folder / "trace.json")
        write_pipeline_report(
            folder / "report.html",
            document,
            [
                DrawnPass(
                    names[each.soc], each.kind.value, each.micro_batch, each.start_s, each.end_s
                )
                for each in run.passes
            ],
            title=scenario.name,
            question=scenario.question,
        )


def pipeline_problem(scenario: Scenario) -> tuple[PipelineProblem, int]:
    """Return the problem of a scenario in micro-batches of its first size, and the samples of an epoch."""
    cluster = scenario_cluster(scenario)
    socs = num_participants(scenario, cluster)
    if socs == 1:
        key = "[strategy] socs = 1" if scenario.strategy.socs else "[cluster]"
        raise ConfigError(
            f"{scenario.name} {key}: one device, {cluster.device_of(0).name}, and a pipeline needs 2; give "
            "more SoCs, or use strategy.name = 'sgd'"
        )
    model, epoch_samples = _model_by_layers(scenario)
    table = scenario.pipeline or PipelineConfig()
    size = micro_batch_sizes(scenario)[0]
    measured = measured_seconds(scenario, model)
    problem = estimated_problem(
        model,
        cluster,
        measured=measured["fp32"],
        measured_int8=measured["int8"],
        socs=range(socs),
        int8_socs=cast(Int8Socs, table.int8_socs),
        micro_batch_size=size,
        num_micro_batches=scenario.train.batch_size // size,
        optimizer_copies=optimizer_copies(scenario),
    )
    _require_read(measured, problem)
    return replace(
        problem, activation_part=table.activation_bits / 32, gradient_part=table.gradient_bits / 32
    ), epoch_samples


def _model_by_layers(scenario: Scenario) -> tuple[PipelineModel, int]:
    """Return the layers of the model, and the samples of an epoch; those of a built-in model need no torch."""
    table, name = scenario.pipeline or PipelineConfig(), scenario.model.name
    is_as_shipped = name in model_names() and scenario.data.name in data_names()
    if not (scenario.factories or table.sample or table.int8_socs) and is_as_shipped:
        shape = data_shape(scenario.data.name)
        layers = built_in_pieces(name, table.cuts, shape.channels, shape.size)
        if layers:
            sizes = (shape.channels, shape.size, shape.size)
            return PipelineModel(
                name=name,
                layers=layers,
                input_bytes=4.0 * math.prod(sizes),
                label_bytes=8.0,
                cuts=table.cuts,
                sample_shape=sizes,
            ), num_samples(scenario)
    from socflower.pipeline.profiler.int8_parts import require_int8
    from socflower.pipeline.profiler.layers import Granularity, read_model
    from socflower.scenario.pipeline_workload import pipeline_workload

    module, example, epoch_samples = pipeline_workload(scenario)
    read = read_model(module, example, name, granularity=Granularity(table.cuts))
    # Planning would otherwise price kernels that do not exist for this model.
    if table.int8_socs:
        require_int8(read, module)
    return read.model, epoch_samples


def _require_read(
    measured: Mapping[str, Mapping[str, LayerSeconds]], problem: PipelineProblem
) -> None:
    """Raise ConfigError for a profile that no device of the problem uses."""
    used = {id(device.seconds) for device in problem.devices}
    for arithmetic, profiles in measured.items():
        for name, seconds in profiles.items():
            if id(seconds) not in used:
                raise ConfigError(
                    f"[pipeline] profiles: no {name} computes in {arithmetic}; leave its profile out"
                )


def planner_settings(scenario: Scenario) -> PlannerSettings:
    """Return what the planner searches: any plan, or with `2d` pipelines of groups."""
    groups, is_grid = scenario.strategy.groups, scenario.kind.is_grid
    number = groups if isinstance(groups, int) else 0
    return PlannerSettings(
        micro_batch_sizes=tuple(micro_batch_sizes(scenario)), grid=number if is_grid else None
    )


def micro_batch_sizes(scenario: Scenario) -> Sequence[int]:
    """Return the sizes of micro-batches to try, which divide the mini-batch."""
    own = scenario.pipeline.micro_batch_sizes if scenario.pipeline else ()
    batch = scenario.train.batch_size
    return own or default_micro_batches(batch)


def _notes(planned: Planned) -> list[str]:
    """Return what limits the plan."""
    kinds = dict.fromkeys(device.seconds for device in planned.problem.devices)
    estimated, measured = (
        [kind.device for kind in kinds if kind.estimated == wanted] for wanted in (True, False)
    )
    notes = []
    if estimated:
        which = f" on {', '.join(estimated)}" if measured else ""
        notes.append(
            f"the seconds of layers{which} are estimated from the devices' rates, not measured"
        )
    if measured:
        notes.append(
            f"the seconds of layers on {', '.join(measured)} are those measured in [pipeline] profiles"
        )
    if in_int8 := planned.problem.int8_socs:
        notes.append(
            f"stages compute in int8 on SoCs {', '.join(map(str, in_int8))}; their memory is counted as in "
            "FP32, and checked when they run"
        )
    if not planned.exact:
        notes.append(
            "the search was pruned: it looked at likely cuts and even groups of devices first, then at all "
            "near the best, so that another plan may be quicker"
        )
    return notes


def _notes_of_peers(peers: Sequence[dict[str, Any]]) -> list[str]:
    """Return what the verdict leaves out, and the quickest of it."""
    others = [row for row in peers if not row["is_equal"]]
    fitting = [row for row in others if row["over_ours"] is not None]
    if not fitting:
        return []
    best = min(fitting, key=lambda row: float(row["over_ours"]))
    after = (
        f"models average every {counted(best['interval'], 'update')}"
        if best["interval"] > 1
        else ""
    )
    notes = [
        "the verdict compares trainings with equal arithmetic that sum gradients at every update; of the others, whose "
        f"accuracy may differ, {best['name']} is quickest: {best['over_ours']:.2f} of our time"
        + (f", {after}" if after else "")
    ]
    if any(row["name"].endswith(INT8) for row in others):
        notes.append("int8 rows are prices; int8_socs checks that each layer has int8 kernels")
    return notes


def _verdict(planned: Planned, peers: Sequence[dict[str, Any]]) -> str:
    """Return which kind of parallelism pays, and how much longer others take, the next best first."""
    peers = [row for row in peers if row["is_equal"]]
    fitting = [row for row in peers if row["over_ours"] is not None]
    best = min(fitting, key=lambda row: float(row["over_ours"]), default=None)
    # A plan of one kind alone may be slower than others.
    if best is not None and best["over_ours"] < 1 / _SAME:
        times = 1 / best["over_ours"]
        return (
            f"{best['name']} pays here: {planned.plan.architecture} takes {times:.2f} times as long"
        )
    slower = sorted(
        (row for row in fitting if row["over_ours"] > _SAME),
        key=lambda row: float(row["over_ours"]),
    )
    others = [f"{row['name']} takes {row['over_ours']:.2f} times as long" for row in slower]
    others += [f"{row['name']} does not fit" for row in peers if row["over_ours"] is None]
    return f"{planned.plan.architecture} pays here" + (f": {', '.join(others)}" if others else "")
