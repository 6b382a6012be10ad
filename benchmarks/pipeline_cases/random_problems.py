"""Random pipeline problems from a seed: layers, devices of up to three kinds, and links."""

from dataclasses import replace

import numpy as np

from socflower.cluster import Board, Cluster, Device, Processor
from socflower.cluster.cost_model import LayerProfile
from socflower.pipeline.plan import PipelinePlan
from socflower.pipeline.planner.selection import PlannerSettings, plan_pipeline
from socflower.pipeline.problem import (
    Floats,
    LayerSeconds,
    PipelineDevice,
    PipelineModel,
    PipelineProblem,
)
from tests.pipeline.problems import random_problem

KIND = Device(
    name="board",
    idle_w=2.0,
    network_w=0.5,
    memory_bytes=8e9,
    memory_bytes_per_s=2e10,
    layer_overhead_s=0.0,
    processors={"gpu": Processor(name="gpu", flops_per_s=1e11, active_w=10.0)},
)


def tight_problem(seed: int) -> PipelineProblem:
    """Return a problem for brute force whose memory limits cuts, shares and K: 3 or 4 devices, 4 to 8 layers."""
    rng = np.random.default_rng([seed, 1])
    problem = random_problem(
        rng,
        int(rng.integers(4, 9)),
        int(rng.integers(3, 5)),
        micro_batch_size=int(rng.integers(1, 5)),
        num_micro_batches=int(rng.integers(4, 13)),
    )
    model, whole = problem.model, (0, problem.model.num_layers - 1)
    kept_bytes = 4.0 * problem.micro_batch_size * model.kept_bytes(*whole)
    needed = model.state_bytes(*whole, problem.optimizer_copies) + kept_bytes
    least, most = rng.choice([(0.15, 0.6), (0.25, 0.7), (0.3, 0.6)])
    budgets = rng.uniform(least, most, len(problem.devices)) * needed
    devices = zip(problem.devices, budgets.tolist(), strict=True)
    return replace(
        problem, devices=tuple(replace(each, memory_bytes=budget) for each, budget in devices)
    )


def unequal_links_problem(seed: int) -> PipelineProblem:
    """Return a problem for brute force of 3 or 4 devices of one kind, each behind a link of its own bandwidth."""
    rng = np.random.default_rng([seed, 2])
    num_devices = int(rng.integers(3, 5))
    problem = _problem(
        rng,
        int(rng.integers(4, 9)),
        num_devices,
        micro_batch_size=int(rng.integers(1, 5)),
        num_micro_batches=int(rng.integers(3, 9)),
    )
    rates = [float(rate) for rate in rng.choice([1e6, 3e6, 1e7, 3e7], num_devices)]
    boards = tuple(
        Board(num_slots=1, device=KIND, soc_bytes_per_s=rate, uplink_bytes_per_s=rate)
        for rate in rates
    )
    one = problem.devices[0]
    devices = tuple(replace(one, soc=device.soc) for device in problem.devices)
    return replace(problem, devices=devices, cluster=replace(problem.cluster, boards=boards))


def drawn_loss(seed: int) -> tuple[PipelineProblem, PipelinePlan, frozenset[int]]:
    """Return a problem with its plan, and the SoCs that are left after one or two devices were lost.

    Each budget is 1.05 times what the plan needs of a device, or, of a device that it leaves out, of any.
    """
    rng = np.random.default_rng([seed, 3])
    problem = random_problem(
        rng,
        int(rng.integers(6, 11)),
        int(rng.integers(3, 6)),
        micro_batch_size=int(rng.choice([2, 3, 4])),
        num_micro_batches=int(rng.integers(4, 13)),
    )
    plan = plan_pipeline(problem, PlannerSettings(two_d=False)).plan.pipelines[0]
    peaks = {
        soc: stage.memory_bytes(problem, share)
        for stage in plan.stages
        for soc, share in stage.members
    }
    budgets = {device.soc: max(peaks.values()) for device in problem.devices} | peaks
    devices = tuple(
        replace(device, memory_bytes=1.05 * budgets[device.soc]) for device in problem.devices
    )
    socs = [device.soc for device in problem.devices]
    num_lost = int(rng.integers(1, min(3, len(socs) - 1)))
    lost = {int(rng.choice(plan.socs)), *rng.choice(socs, num_lost - 1).tolist()}
    return replace(problem, devices=devices), plan, frozenset(socs) - lost


def _problem(
    rng: np.random.Generator,
    num_layers: int,
    num_devices: int,
    *,
    micro_batch_size: int,
    num_micro_batches: int,
) -> PipelineProblem:
    """Return a problem whose weights grow and whose outputs shrink with depth, as in convolutional networks."""
    depth = np.linspace(0.0, 1.0, num_layers)
    weights = rng.uniform(0.5, 1.5, num_layers) * 4e6 * (0.05 + depth) / num_layers * 4
    outputs = rng.uniform(0.2, 1.5, num_layers) * 1e5 * (1.1 - depth)
    layers = tuple(
        LayerProfile(
            name=f"layer {index}",
            forward_flops=0.0,
            weight_bytes=float(weights[index]),
            output_bytes=float(3.0 * outputs[index]),
            crossing_bytes=float(outputs[index]),
        )
        for index in range(num_layers)
    )
    base_s = rng.uniform(0.5, 2.0, num_layers) * 2e-2 / num_layers
    kinds = [_kind(rng, base_s, speed) for speed in (2.4, 1.6, 1.0)[: min(3, num_devices)]]
    chosen = sorted(int(rng.integers(len(kinds))) for _ in range(num_devices))
    board = Board(num_slots=num_devices, device=KIND, soc_bytes_per_s=1e6, uplink_bytes_per_s=1e6)
    return PipelineProblem(
        model=PipelineModel(name="random", layers=layers, input_bytes=12288.0),
        devices=tuple(replace(kinds[kind], soc=soc) for soc, kind in enumerate(chosen)),
        cluster=Cluster(name="random", boards=(board,), hub_bytes_per_s=1e6, message_s=1e-4),
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
    )


def _kind(rng: np.random.Generator, base_s: Floats, speed: float) -> PipelineDevice:
    """Return a device with about these seconds a sample and layer at speed 1."""
    own_s = base_s / speed * rng.uniform(0.8, 1.2, len(base_s))
    fixed_s = 2e-3 / len(base_s)
    sizes = np.array([1.0, 1024.0])
    seconds = LayerSeconds(
        device=f"kind {speed}",
        batches=(1, 1024),
        forward_s=np.outer(own_s, sizes) + fixed_s,
        backward_s=np.outer(own_s, 2.0 * sizes) + 2.0 * fixed_s,
    )
    return PipelineDevice(
        soc=0,
        name=seconds.device,
        seconds=seconds,
        memory_bytes=4e9 * speed,
        update_bytes_per_s=KIND.memory_bytes_per_s,
    )
