"""Pipelines over unequal devices in real processes: our plans against peers, predictions against measurements.

Four processes with quotas of 0.5, 0.35, 0.25 and 0.15 cores are the devices, each in a network namespace behind a link
of 20, 100 or 1000 Mbit/s. All at once measure the seconds of their layers, and what a byte of messages costs a
processor that computes. From these and the links' rates `plan_pipeline` makes our plan. Virtual time predicts each
plan's update, at the devices' speeds just before and after it. All train a VGG of half width on images of 64 x 64 in
mini-batches of 64 from the same weights.

Peers: the fastest device alone; data parallelism with samples by speed (Algorithm 1), and FedAvg with samples by speed
that averages after the samples of 8 updates, both in our ring; an even pipeline, whose layers are divided as for equal
devices; torch's 1F1B on the even pipeline and on one divided by speed (torch cannot replicate stages).

`ok`: the weights equal those of the same plan in one process, bit for bit (torch's within 1e-4; FedAvg's are the same
on all devices). The overlap row has two stages whose passes take as long as their transfers, and 64 micro-batches, so
that filling and draining take little of the time.
"""

import os
import statistics
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.harness import Row, less_is_better, more_is_better, note, peer_notes
from benchmarks.pipeline_contest.launch import Devices
from benchmarks.pipeline_contest.work import (
    CORES,
    MINI_BATCH,
    SPAN,
    VGG,
    WIDE,
    Carry,
    Federated,
    Passes,
    Profile,
    Profiled,
    Speed,
    Train,
    Trained,
    Transfers,
    Workload,
    has_devices,
    minis,
    rack,
)
from socflower.hierarchy import split_batch
from socflower.pipeline.plan import PipelinePlan, Plan, Policy, Stage
from socflower.pipeline.planner.baselines import (
    data_parallel,
    fastest_device,
    gpipe,
    pipeline_parallel,
)
from socflower.pipeline.planner.pruning import seconds_of
from socflower.pipeline.planner.selection import (
    PlannerSettings,
    micro_batch_choices,
    plan_pipeline,
    with_in_flight,
)
from socflower.pipeline.problem import LayerSeconds, PipelineDevice, PipelineModel, PipelineProblem
from socflower.pipeline.runtime.member import Member
from socflower.pipeline.runtime.payloads import EXACT, ActivationCoding
from socflower.pipeline.runtime.together import Mail, run_together
from socflower.pipeline.schedule.order import ASTEROID
from socflower.pipeline.schedule.run import simulate_schedule
from tests.testbed.topology import GOODPUT

RATES_MBIT = (20, 100, 1000)
MICRO_BATCHES = (4, 8, 16)
EIGHT_BITS = ActivationCoding(bits=8, gradient_bits=8)
OVERLAP_AIM = 1.2
BATCHES = (1, 2, 4, 8, 16)
# About how long a measured entry takes.
_ENTRY_S = 5.0
_NUM_UPDATES = (2, 6)
_WARM_UP = 1
_CARRIED_BYTES, _CARRIED_S, _CARRIED_TIMES = 1 << 18, 2.5, 2
# Samples of a batch, and how long the devices' speeds are measured.
_PROBED, _PROBE_S = 4, 2.0
# FedAvg averages after the samples of as many updates.
_ROUND_UPDATES = 8
_TOLERANCE = 1e-4
_MEMORY_BYTES = 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """A plan, how it is run, and the predicted seconds of an update."""

    name: str
    problem: PipelineProblem
    plan: Plan
    predicted_s: float
    coding: ActivationCoding = EXACT
    by_torch: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The measured speed of a contestant; `predicted_s` is by the devices' speeds around the measurement."""

    samples_per_s: float
    update_s: float
    ok: bool
    predicted_s: float = 0.0


def run(quick: bool = False) -> list[Row]:
    """Return rows of samples per second, predictions and overlap; none if the testbed cannot be built."""
    peer_notes["torch"] = (
        f"torch {torch.__version__}, Schedule1F1B of distributed.pipelining over gloo, same optimiser"
    )
    peer_notes["load_before"] = list(os.getloadavg())
    if not has_devices():
        return []
    # As on the devices: another number of threads rounds differently.
    torch.set_num_threads(1)
    rows: list[Row] = []
    # Answers must be checked in time on a busy machine, too.
    with suppress(PermissionError):
        os.nice(-10)
    for mbit in RATES_MBIT[1:2] if quick else RATES_MBIT:
        rows += _contest(mbit)
    rows.append(_overlap(quick))
    peer_notes["load_after"] = list(os.getloadavg())
    return rows


# ---------------------------------------------------------------------------------------------------------- contest


def _contest(mbit: int) -> list[Row]:
    place = f"{mbit} Mbit/s"
    with Devices(rack(mbit * 1_000_000), CORES) as devices:
        profiled: dict[int, Profiled] = devices.do(
            Profile(workload=VGG, batches=BATCHES, repeats=3)
        )
        problem = with_messages(devices, VGG, problem_of(VGG, profiled, mbit), mbit)
        peer_notes[f"seconds of a core for a megabyte at {place}"] = [
            round(1e6 * each.byte_s * CORES[each.soc], 4) for each in problem.devices
        ]
        entries = _entries(problem, coded=mbit == min(RATES_MBIT))
        peer_notes[f"cores got at {place}"] = [round(each.cores, 3) for each in profiled.values()]
        peer_notes[f"plans at {place}"] = {entry.name: text_of(entry.plan) for entry in entries}
        found = {entry.name: _measured(devices, entry) for entry in entries}
        federated = _federated(devices, problem)
    ours = found["ours"]
    rows = [
        _speed_row(place, "ours", ours, name, result)
        for name, result in {**found, "FedAvg": federated}.items()
        if name != "ours" and name != "ours, 8 bits"
    ]
    if "ours, 8 bits" in found:
        rows.append(_speed_row(place, "ours, 8 bits", found["ours, 8 bits"], "ours, exact", ours))
    return rows + [
        less_is_better(
            f"{place}: {entry.name}, {text_of(entry.plan)}: an update",
            found[entry.name].update_s,
            "predicted",
            found[entry.name].predicted_s,
            "s",
            ok=found[entry.name].ok,
        )
        for entry in entries
        if not entry.by_torch
    ]


def _speed_row(place: str, name: str, ours: Result, peer: str, theirs: Result) -> Row:
    return more_is_better(
        f"{place}: {name}",
        ours.samples_per_s,
        peer,
        theirs.samples_per_s,
        "samples/s",
        ok=ours.ok and theirs.ok,
    )


def problem_of(
    workload: Workload,
    profiled: Mapping[int, Profiled],
    mbit: int,
    batches: tuple[int, ...] = BATCHES,
) -> PipelineProblem:
    """Return the planning problem, from the devices' measurements at these micro-batch sizes."""
    model = workload.read(workload.build()).model
    weight_bytes = model.weight_bytes(0, model.num_layers - 1)
    devices = tuple(
        PipelineDevice(
            soc=soc,
            name=f"{CORES[soc]} cores",
            memory_bytes=_MEMORY_BYTES,
            update_bytes_per_s=5.0 * weight_bytes / own.update_s,
            seconds=LayerSeconds(
                device=f"{CORES[soc]} cores",
                batches=batches,
                forward_s=own.forward_s,
                backward_s=own.backward_s,
            ),
        )
        for soc, own in profiled.items()
    )
    return PipelineProblem(
        model=model,
        devices=devices,
        cluster=rack(mbit * 1_000_000).cluster(),
        micro_batch_size=8,
        num_micro_batches=MINI_BATCH // 8,
    )


def _entries(problem: PipelineProblem, *, coded: bool) -> list[Contestant]:
    settings = PlannerSettings(micro_batch_sizes=MICRO_BATCHES)
    planned = plan_pipeline(problem, settings)
    even, by_speed = _best(problem, _even), _best(problem, pipeline_parallel)
    entries = [
        _entry("ours", planned.problem, planned.plan),
        _best(problem, fastest_device, "one device"),
        _best(problem, data_parallel, "data parallelism"),
        replace(even, name="even pipeline"),
        replace(even, name="torch 1F1B, even", by_torch=True),
        replace(by_speed, name="torch 1F1B, by speed", by_torch=True),
    ]
    if coded:
        smaller = replace(problem, model=_eight_bits(problem.model))
        chosen = plan_pipeline(smaller, settings)
        entries.append(_entry("ours, 8 bits", chosen.problem, chosen.plan, coding=EIGHT_BITS))
    return entries


def _best(
    problem: PipelineProblem, planner: Callable[[PipelineProblem], Plan], name: str = ""
) -> Contestant:
    """Return a planner's plan with its best micro-batch size."""
    sizes = micro_batch_choices(problem, (*MICRO_BATCHES, MINI_BATCH))
    return min(
        (_entry(name, sized, planner(sized)) for sized in sizes),
        key=lambda entry: entry.predicted_s,
    )


def _even(problem: PipelineProblem) -> PipelinePlan:
    """Return a plan with one stage per device, of equal times on the mean device, in 1F1B order."""
    plan = replace(gpipe(problem), policy=Policy.ONE_FORWARD_ONE_BACKWARD)
    return with_in_flight(problem, plan, ASTEROID.counts(len(plan.stages), plan.num_micro_batches))


def _entry(
    name: str,
    problem: PipelineProblem,
    plan: Plan,
    *,
    coding: ActivationCoding = EXACT,
    by_torch: bool = False,
) -> Contestant:
    return Contestant(
        name=name,
        problem=problem,
        plan=plan,
        coding=coding,
        by_torch=by_torch,
        predicted_s=predicted_s(problem, plan),
    )


def predicted_s(problem: PipelineProblem, plan: Plan) -> float:
    """Return an update's virtual seconds, without the first update, which measurements leave out as well."""
    ends_s = simulate_schedule(problem, plan, num_steps=4).step_ends_s
    return (ends_s[-1] - ends_s[_WARM_UP - 1]) / (len(ends_s) - _WARM_UP)


def _eight_bits(model: PipelineModel) -> PipelineModel:
    return replace(
        model,
        layers=tuple(
            replace(layer, crossing_bytes=layer.crossing_bytes / 4) for layer in model.layers
        ),
    )


def trained_and_predicted(
    devices: Devices, work: Train, problem: PipelineProblem
) -> tuple[dict[int, Trained], float]:
    """Train on devices; return their answers and the predicted seconds of an update.

    The prediction uses the devices' speeds just before and after, while all compute: the share that they get of a
    shared machine differs from minute to minute.
    """
    probe, socs = (
        Speed(workload=work.workload, batch_size=_PROBED, seconds=_PROBE_S),
        work.plan.socs,
    )
    before: dict[int, float] = devices.do(probe, socs)
    answers: dict[int, Trained] = devices.do(work, socs)
    after: dict[int, float] = devices.do(probe, socs)
    last, changed = problem.model.num_layers - 1, []
    for device in problem.devices:
        own = device.seconds
        if device.soc in before:
            part = (
                (before[device.soc] + after[device.soc])
                / 2
                / (own.forward(0, last, _PROBED) + own.backward(0, last, _PROBED))
            )
            own = replace(own, forward_s=own.forward_s * part, backward_s=own.backward_s * part)
        changed.append(replace(device, seconds=own))
    return answers, predicted_s(replace(problem, devices=tuple(changed)), work.plan)


def with_messages(
    devices: Devices, workload: Workload, problem: PipelineProblem, mbit: int
) -> PipelineProblem:
    """Return the problem with what a byte costs the devices' processors, which compute meanwhile.

    It is the median over the devices of what it takes of a core, since one device alone is measured too roughly.
    """
    num_messages = max(4, round(_CARRIED_S * mbit * 1e6 / 8 / _CARRIED_BYTES))
    found = []
    for pair in ((0, 1), (2, 3)):
        for _ in range(_CARRIED_TIMES):
            pass_s = devices.do(Speed(workload=workload, batch_size=1, seconds=_PROBE_S), pair)
            carried = devices.do(
                Carry(
                    workload=workload,
                    batch_size=1,
                    pass_s=pass_s,
                    num_bytes=_CARRIED_BYTES,
                    num_messages=num_messages,
                ),
                pair,
            )
            found += [byte_s * CORES[soc] for soc, byte_s in carried.items()]
    core_s = max(0.0, statistics.median(found))
    note(
        f"a megabyte: {1e6 * core_s:.4f} s of a core, of {[round(1e6 * each, 4) for each in found]}"
    )
    return replace(
        problem,
        devices=tuple(
            replace(device, byte_s=core_s / CORES[device.soc]) for device in problem.devices
        ),
    )


def _measured(devices: Devices, entry: Contestant) -> Result:
    least, most = _NUM_UPDATES
    num_updates = _WARM_UP + min(most, max(least, round(_ENTRY_S / entry.predicted_s)))
    work = Train(
        workload=VGG,
        plan=entry.plan,
        num_updates=num_updates,
        coding=entry.coding,
        by_torch=entry.by_torch,
    )
    answers, said_s = trained_and_predicted(devices, work, entry.problem)
    update_s = interval_s(answers)
    result = Result(
        samples_per_s=entry.plan.num_samples / update_s,
        update_s=update_s,
        ok=is_right(work, answers),
        predicted_s=said_s,
    )
    note(
        f"{entry.name}: {text_of(entry.plan)}: {update_s:.3f} s, predicted {result.predicted_s:.3f} "
        f"({100 * (result.predicted_s / update_s - 1):+.1f} %; planned with {entry.predicted_s:.3f}), {result.ok}"
    )
    return result


def interval_s(answers: Mapping[int, Trained]) -> float:
    """Return the mean seconds of an update or round, which ends when all devices have done it."""
    ends_s = [max(ends) for ends in zip(*(each.ends_s for each in answers.values()), strict=True)]
    return (ends_s[-1] - ends_s[_WARM_UP - 1]) / (len(ends_s) - _WARM_UP)


def is_right(work: Train, answers: Mapping[int, Trained]) -> bool:
    reference = _together(work)
    weights = {name: array for each in answers.values() for name, array in each.weights.items()}
    return weights.keys() == reference.keys() and all(
        np.allclose(weights[name], array, rtol=0.0, atol=_TOLERANCE)
        if work.by_torch
        else np.array_equal(weights[name], array)
        for name, array in reference.items()
    )


def _together(work: Train) -> dict[str, np.ndarray]:
    mail, workload = Mail(), work.workload
    members = []
    for soc in work.plan.socs:
        module = workload.build()
        members.append(
            Member(
                work.plan,
                soc,
                workload.read(module),
                module,
                workload.trainer,
                SPAN,
                data=workload.data(),
                send=mail.sender(soc),
                coding=work.coding,
            )
        )
    for mini in minis(work):
        run_together({member.soc: member.update(mini) for member in members}, mail)
    ends = run_together({member.soc: member.finish() for member in members}, mail)
    return {
        name: tensor.numpy()
        for end in ends.values()
        if end is not None
        for name, tensor in end.weights.items()
    }


def _federated(devices: Devices, problem: PipelineProblem) -> Result:
    """Measure FedAvg: a round has the samples of `_ROUND_UPDATES` updates, divided by speed."""
    samples = split_batch(
        _ROUND_UPDATES * MINI_BATCH, [1.0 / seconds_of(device) for device in problem.devices]
    )
    answers: dict[int, Trained] = devices.do(
        Federated(samples=samples, batch_size=MINI_BATCH // len(CORES), num_rounds=_WARM_UP + 1)
    )
    first, *others = (each.weights for each in answers.values())
    round_s = interval_s(answers)
    note(f"FedAvg: {samples}: {round_s:.3f} s")
    return Result(
        samples_per_s=sum(samples) / round_s,
        update_s=round_s,
        ok=all(
            np.array_equal(other[name], array) for other in others for name, array in first.items()
        ),
    )


def text_of(plan: Plan) -> str:
    return "; ".join(
        " | ".join(
            f"{stage.first_layer}-{stage.last_layer} on {'+'.join(map(str, stage.devices))} x "
            f"{'+'.join(map(str, stage.shares))} K{stage.in_flight}"
            for stage in pipeline.stages
        )
        for pipeline in plan.pipelines
    )


# ---------------------------------------------------------------------------------------------------------- overlap


def _overlap(quick: bool) -> Row:
    """Measure passes alone, choose the rate at which transfers take as long, then measure transfers alone and both."""
    plan, cores = _overlap_plan(), (0.6, 0.6)
    first = WIDE.read(WIDE.build()).model.layers[plan.stages[0].last_layer]
    message_bytes = int(plan.micro_batch_size * first.crossing_bytes)
    updates = 2
    with Devices(rack(1_000_000_000, 2), cores) as devices:
        passes_s = (
            _slowest_s(devices.do(Passes(workload=WIDE, plan=plan, num_updates=updates))) / updates
        )
    rate = message_bytes * plan.num_micro_batches / passes_s / GOODPUT * 8
    with Devices(rack(int(rate), 2), cores) as devices:
        transfers_s = _slowest_s(
            devices.do(Transfers(num_bytes=message_bytes, num_messages=plan.num_micro_batches))
        )
        both = []
        alone = []
        for _ in range(1 if quick else 2):
            alone.append(
                _slowest_s(devices.do(Passes(workload=WIDE, plan=plan, num_updates=updates)))
                / updates
            )
            both.append(
                interval_s(
                    devices.do(Train(workload=WIDE, plan=plan, num_updates=_WARM_UP + updates))
                )
            )
    longer_s = max(statistics.median(alone), transfers_s)
    both_s = statistics.median(both)
    note(f"overlap: passes {alone}, transfers {transfers_s}, both {both}")
    return less_is_better(
        f"overlap, {plan.num_micro_batches} micro-batches between 2 devices at {rate / 1e6:.0f} Mbit/s: "
        f"passes alone {statistics.median(alone):.2f} s, transfers alone {transfers_s:.2f} s, both",
        both_s,
        "the longer one",
        longer_s,
        "s",
        limit=OVERLAP_AIM * longer_s,
        ok=both_s < OVERLAP_AIM * longer_s,
    )


def _overlap_plan() -> PipelinePlan:
    last = WIDE.read(WIDE.build()).model.num_layers - 1
    half = last // 2
    return PipelinePlan(
        stages=(
            Stage(first_layer=0, last_layer=half, devices=(0,), shares=(2,), in_flight=6),
            Stage(first_layer=half + 1, last_layer=last, devices=(1,), shares=(2,), in_flight=3),
        ),
        micro_batch_size=2,
        num_micro_batches=64,
    )


def _slowest_s(answers: Mapping[int, Trained]) -> float:
    return max(each.ends_s[-1] - each.began_s for each in answers.values())
