"""Pipeline problems with round numbers, and random ones."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from socflower.cluster import Board, Cluster, Device, Processor
from socflower.cluster.cost_model import LayerProfile
from socflower.pipeline.plan import PipelinePlan, Policy, staged
from socflower.pipeline.problem import (
    LayerSeconds,
    PipelineDevice,
    PipelineModel,
    PipelineProblem,
)
from socflower.pipeline.schedule.order import ASTEROID, InFlight

KIND = Device(
    name="toy",
    idle_w=1.0,
    network_w=0.5,
    memory_bytes=1e12,
    memory_bytes_per_s=1e9,
    layer_overhead_s=0.0,
    processors={"cpu": Processor(name="cpu", flops_per_s=1e9, active_w=5.0)},
)


def cluster(num_socs: int, *, link: float = 100.0, message_s: float = 0.0) -> Cluster:
    board = Board(num_slots=num_socs, device=KIND, soc_bytes_per_s=link, uplink_bytes_per_s=link)
    return Cluster(name="toy", boards=(board,), hub_bytes_per_s=link, message_s=message_s)


def layer(
    name: str = "layer",
    *,
    weight: float = 0.0,
    activation: float = 0.0,
    output: float = 0.0,
    flops: float = 1.0,
) -> LayerProfile:
    return LayerProfile(
        name=name,
        forward_flops=flops,
        weight_bytes=weight,
        output_bytes=activation,
        crossing_bytes=output,
        num_tensors=1,
    )


def linear_seconds(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    fixed_s: float = 0.0,
    device: str = "toy",
) -> LayerSeconds:
    """Return seconds in proportion to the samples, plus `fixed_s` a pass of a layer."""
    batches = (1, 2)
    return LayerSeconds(
        device=device,
        batches=batches,
        forward_s=np.array([[fixed_s + each * n for n in batches] for each in forward_s]),
        backward_s=np.array([[fixed_s + each * n for n in batches] for each in backward_s]),
    )


def problem(
    layers: Sequence[LayerProfile],
    seconds: Sequence[LayerSeconds],
    *,
    link: float = 100.0,
    memory: float | Sequence[float] = 1e9,
    micro_batch_size: int = 4,
    num_micro_batches: int = 4,
    message_s: float = 0.0,
    input_bytes: float = 0.0,
    byte_s: float = 0.0,
) -> PipelineProblem:
    budgets = [memory] * len(seconds) if isinstance(memory, int | float) else memory
    return PipelineProblem(
        model=PipelineModel(name="toy", layers=tuple(layers), input_bytes=input_bytes),
        devices=tuple(
            PipelineDevice(
                soc=soc, name=f"toy {soc}", seconds=each, memory_bytes=budget, byte_s=byte_s
            )
            for soc, (each, budget) in enumerate(zip(seconds, budgets, strict=True))
        ),
        cluster=cluster(len(seconds), link=link, message_s=message_s),
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
    )


def even(
    num_layers: int,
    num_devices: int,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    *,
    weight: float = 0.0,
    activation: float = 0.0,
    output: float = 0.0,
    **options: Any,
) -> PipelineProblem:
    """Return the problem of equal layers, with these seconds a sample, on equal devices."""
    layers = [layer(weight=weight, activation=activation, output=output)] * num_layers
    seconds = linear_seconds([forward_s] * num_layers, [backward_s] * num_layers)
    return problem(layers, [seconds] * num_devices, **options)


def straight_plan(
    cuts: Sequence[int],
    shares: Sequence[Sequence[int]],
    num_micro_batches: int,
    *,
    rule: InFlight = ASTEROID,
    policy: Policy = Policy.ONE_FORWARD_ONE_BACKWARD,
    samples_on: int | None = None,
    first_soc: int = 0,
) -> PipelinePlan:
    """Return a plan whose stages end with the layers `cuts` and whose devices are numbered through."""
    counts = rule.counts(len(cuts), num_micro_batches)
    if policy == Policy.BACKWARD_AFTER_FORWARD:
        counts = (num_micro_batches,) * len(cuts)
    members, soc = [], first_soc
    for own in shares:
        members.append(list(enumerate(own, soc)))
        soc += len(own)
    plan = staged(cuts, members, counts, num_micro_batches, policy)
    return replace(plan, samples_on=samples_on)


@st.composite
def problems(
    draw: st.DrawFn, *, max_devices: int = 4, max_layers: int = 5, memory: bool = False
) -> PipelineProblem:
    """Draw a problem of a few layers on devices of up to three kinds."""
    num_layers, num_devices = draw(st.integers(1, max_layers)), draw(st.integers(1, max_devices))
    seed = draw(st.integers(0, 2**32 - 1))
    return random_problem(np.random.default_rng(seed), num_layers, num_devices, memory=memory)


def random_problem(
    rng: np.random.Generator,
    num_layers: int,
    num_devices: int,
    *,
    memory: bool = False,
    micro_batch_size: int | None = None,
    num_micro_batches: int | None = None,
    message_s: float | None = None,
) -> PipelineProblem:
    kinds = []
    base_f = rng.uniform(0.01, 0.1, num_layers)
    for _ in range(int(rng.integers(1, min(3, num_devices) + 1))):
        speed, fixed = rng.uniform(0.3, 3.0), rng.choice([0.0, 0.02])
        own = base_f / speed * rng.uniform(0.8, 1.2, num_layers)
        kinds.append(linear_seconds(own, own * rng.uniform(1.0, 3.0), fixed))
    layers = [
        layer(
            f"layer {index}",
            weight=float(rng.integers(0, 100)),
            activation=float(rng.integers(0, 30)),
            output=float(rng.integers(1, 30)),
        )
        for index in range(num_layers)
    ]
    seconds = [kinds[int(rng.integers(len(kinds)))] for _ in range(num_devices)]
    budget: float | list[float] = 1e9
    if memory:
        whole = (
            sum(each.weight_bytes for each in layers) * 3.0
            + sum(each.kept_bytes for each in layers) * 4
        )
        budget = [float(whole * rng.uniform(0.3, 3.0)) + 1.0 for _ in range(num_devices)]
    return problem(
        layers,
        seconds,
        link=float(rng.choice([20.0, 100.0, 1000.0, 1e5])),
        memory=budget,
        micro_batch_size=micro_batch_size or int(rng.integers(1, 7)),
        num_micro_batches=num_micro_batches or int(rng.integers(1, 9)),
        message_s=float(rng.choice([0.0, 0.01])) if message_s is None else message_s,
        byte_s=float(rng.choice([0.0, 0.0, 1e-4, 2e-3])),
    )


def parts(total: int, count: int) -> st.SearchStrategy[list[int]]:
    """Draw `count` numbers of 1 or more with this sum."""
    inner = st.just(set[int]())
    if count > 1:
        inner = st.sets(st.integers(1, total - 1), min_size=count - 1, max_size=count - 1)
    return inner.map(lambda ends: [b - a for a, b in pairwise([0, *sorted(ends), total])])


@st.composite
def pipelines(
    draw: st.DrawFn,
    num_layers: int,
    num_devices: int,
    size: int,
    num_micro_batches: int,
    rules: st.SearchStrategy[InFlight],
    policies: Sequence[Policy] = (Policy.ONE_FORWARD_ONE_BACKWARD,),
    first_soc: int = 0,
) -> PipelinePlan:
    """Draw a plan of up to `num_devices`: any cuts, groups and shares."""
    num_stages = draw(st.integers(1, min(num_devices, num_layers)))
    cuts = [stop - 1 for stop in accumulate(draw(parts(num_layers, num_stages)))]
    left, shares = num_devices, []
    for behind in reversed(range(num_stages)):
        width = draw(st.integers(1, min(left - behind, size)))
        shares.append(draw(parts(size, width)))
        left -= width
    policy, rule = draw(st.sampled_from(policies)), draw(rules)
    return straight_plan(
        cuts, shares, num_micro_batches, policy=policy, rule=rule, first_soc=first_soc
    )


def plans(problem: PipelineProblem) -> st.SearchStrategy[PipelinePlan]:
    """Draw a plan of a problem: any cuts, groups, shares, rule for K and policy."""
    return pipelines(
        problem.model.num_layers,
        len(problem.devices),
        problem.micro_batch_size,
        problem.num_micro_batches,
        st.builds(InFlight, st.integers(0, 3), st.integers(-1, 4)),
        list(Policy),
    )
