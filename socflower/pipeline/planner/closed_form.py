"""The time of one update by the closed form of Asteroid (paper Eqs. 4 to 6, F29), from a plan alone.

Execution steps (stages) and communication steps alternate. With E_i = E_f + E_b of step i, C_i = Σ_{j<i} E_j, and the
dominant step dm, the one whose M·E_i + C_i is greatest (F30), the three phases of step s are

    T_w = Σ_{i<s} E_f^i,    T_e = M·E_dm + C_dm − C_s,    T_a = 2(n − 1)/n · weight bytes / least bandwidth,

in one line for s on either side of dm. Their sum is (M·E_dm + C_dm) + (T_a − Σ_{i<s} E_b^i), so the latency, its
greatest value over s, is the sum D + A of two numbers:

    D = max_i (M·E_i + C_i),    A = max_s (T_a^s − Σ_{i<s} E_b^i).

Prepending a step changes each by itself, which makes the dynamic programme of Algorithm 2 exact on pairs (D, A).

The formula counts both directions of a communication step one after the other, M·(E_f + E_b). On links that carry both
at once, as those of `cluster` do, the dominant one of a pipeline bound by a link takes about half of that. With
`duplex`, a communication step counts (M − 1)·max(E_f, E_b) + E_f + E_b in D; the planner ranks candidates by that, and
reports the formula of the paper as well. For the 2-D plan of ResNet-50 on five boards at 100 Mbps, whose cut dominates,
the paper's formula is 26 % above the simulator, and 4 % below it with `duplex`; the exchange among groups is equal in
all three, since it begins when passes have ended.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from socflower.cluster import Cluster, Endpoint
from socflower.pipeline.plan import (
    PipelinePlan,
    Plan,
    Policy,
    Slice,
    Stage,
    Sync,
    SynchronisedPart,
    TwoDPlan,
    synchronised_parts,
)
from socflower.pipeline.problem import PipelineProblem


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineStep:
    """An execution or communication step: seconds of one micro-batch, and of what follows the last one."""

    name: str
    forward_s: float
    backward_s: float
    after_s: float = 0.0  # all-reduce and update
    transfers: bool = False  # a communication step

    def all_s(self, num_micro_batches: int, duplex: bool) -> float:
        """Return the seconds of all micro-batches, M·(E_f + E_b) unless the directions of a transfer are concurrent."""
        once_s = self.forward_s + self.backward_s
        if duplex and self.transfers:
            return (num_micro_batches - 1) * max(self.forward_s, self.backward_s) + once_s
        return num_micro_batches * once_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """The closed form of a plan."""

    steps: tuple[PipelineStep, ...]
    dominant: int  # index of the dominant step
    aligned_s: float  # D
    tail_s: float  # A

    @property
    def seconds(self) -> float:
        """Seconds of one update."""
        return self.aligned_s + self.tail_s


def update_latency(problem: PipelineProblem, plan: Plan, *, duplex: bool = False) -> float:
    """Return the seconds of one update of the weights by the closed form.

    The groups of a 2-D plan run side by side, without all-reduces of their own; the exchange among groups follows the
    slowest.
    """
    if isinstance(plan, PipelinePlan):
        return latency(problem, plan, duplex=duplex).seconds
    alone = len(plan.groups) == 1 and plan.sync == Sync.SERVER
    slowest_s = max(
        latency(problem, group, reduces=False, duplex=duplex).seconds for group in plan.groups
    )
    return slowest_s + (0.0 if alone else _exchange_s(problem, plan))


def latency(
    problem: PipelineProblem, plan: PipelinePlan, *, reduces: bool = True, duplex: bool = False
) -> Latency:
    """Return the steps of a pipeline and its seconds; without `reduces`, stages only update after the last pass.

    In backward-after-forward order all forward passes end before the first backward pass, so that
    D = Σ (E_f + E_b) + (M − 1)·(max E_f + max E_b).
    """
    steps = steps_of(problem, plan, reduces=reduces)
    before_s, aligned_s = 0.0, []
    before_b, tail_s = 0.0, -inf
    for step in steps:
        aligned_s.append(step.all_s(plan.num_micro_batches, duplex) + before_s)
        before_s += step.forward_s + step.backward_s
        tail_s = max(tail_s, step.after_s - before_b)
        before_b += step.backward_s
    most_s = max(aligned_s)
    dominant = aligned_s.index(most_s)
    if plan.policy == Policy.BACKWARD_AFTER_FORWARD:
        widest_s = max(step.forward_s for step in steps) + max(step.backward_s for step in steps)
        most_s = before_s + (plan.num_micro_batches - 1) * widest_s
    return Latency(steps=steps, dominant=dominant, aligned_s=most_s, tail_s=tail_s)


def steps_of(
    problem: PipelineProblem, plan: PipelinePlan, *, reduces: bool = True
) -> tuple[PipelineStep, ...]:
    """Return execution and communication steps in order; samples that are sent from elsewhere are a first step."""
    steps = []
    if plan.samples_on is not None:
        steps.append(_supply_step(problem, plan, plan.samples_on))
    for index, stage in enumerate(plan.stages):
        steps.append(execution_step(problem, stage, reduces=reduces, name=f"stage {index}"))
        if index + 1 < len(plan.stages):
            following = plan.stages[index + 1]
            num_bytes = problem.model.layers[stage.last_layer].output_bytes
            steps.append(
                communication_step(
                    problem,
                    stage.devices,
                    following.devices,
                    plan.slices(index),
                    num_bytes,
                    f"cut {index}",
                )
            )
    return tuple(steps)


def execution_step(
    problem: PipelineProblem, stage: Stage, *, reduces: bool = True, name: str = "stage"
) -> PipelineStep:
    """Return a stage's step: the slowest device's passes (Eq. 8), then all-reduce (Eq. 5) and update."""
    first, last = stage.first_layer, stage.last_layer
    devices = [problem.device(soc) for soc in stage.devices]
    weight_bytes = problem.model.weight_bytes(first, last)
    members = list(zip(devices, stage.shares, strict=True))
    ring_s = all_reduce_s(problem, stage.devices, weight_bytes) if reduces else 0.0
    passes_s = [problem.pass_s(each, first, last, share) for each, share in members]
    return PipelineStep(
        name=name,
        forward_s=max(forward_s for forward_s, _ in passes_s),
        backward_s=max(backward_s for _, backward_s in passes_s),
        after_s=ring_s + max(each.update_s(weight_bytes) for each in devices),
    )


def all_reduce_s(problem: PipelineProblem, socs: Sequence[int], weight_bytes: float) -> float:
    """Return T_a of a ring: 2(n − 1) rounds of 1/n of the weights over the least bandwidth, a message each."""
    size = len(socs)
    if size == 1 or not weight_bytes:
        return 0.0
    slowest, byte_s = problem.least_bandwidth(socs), max(problem.device(soc).byte_s for soc in socs)
    return (
        2.0
        * (size - 1)
        * (weight_bytes / size * (1.0 / slowest + 2.0 * byte_s) + problem.cluster.message_s)
    )


def communication_step(
    problem: PipelineProblem,
    senders: Sequence[int],
    receivers: Sequence[int],
    pieces: Sequence[Slice],
    output_bytes: float,
    name: str,
) -> PipelineStep:
    """Return the step of a cut: the time of the busiest link of all transfers of a micro-batch, in either direction."""
    crossing = [
        (senders[piece.sender], receivers[piece.receiver], piece.num_samples * output_bytes)
        for piece in pieces
    ]
    there = [
        (source, target, num_bytes * problem.activation_part)
        for source, target, num_bytes in crossing
    ]
    back = [
        (target, source, num_bytes * problem.gradient_part)
        for source, target, num_bytes in crossing
    ]
    return PipelineStep(
        name=name,
        forward_s=concurrent_s(problem.cluster, there),
        backward_s=concurrent_s(problem.cluster, back),
        transfers=True,
    )


def concurrent_s(cluster: Cluster, transfers: Sequence[tuple[Endpoint, Endpoint, float]]) -> float:
    """Return the seconds of transfers side by side: handling at the busiest end, then the bytes of the busiest link."""
    load: dict[str, float] = {}
    messages: Counter[tuple[Endpoint, str]] = Counter()
    for source, target, num_bytes in transfers:
        messages[source, "send"] += 1
        messages[target, "receive"] += 1
        for link in cluster.path(source, target):
            load[link] = load.get(link, 0.0) + num_bytes
    capacity = cluster.link_bytes_per_s
    busiest_s = max((num_bytes / capacity[link] for link, num_bytes in load.items()), default=0.0)
    return busiest_s + cluster.message_s * max(messages.values(), default=0)


def _supply_step(problem: PipelineProblem, plan: PipelinePlan, source: int) -> PipelineStep:
    """Return the step in which a device sends samples to the first stage and labels to the last."""
    model = problem.model
    ends = ((plan.stages[0], model.input_bytes), (plan.stages[-1], model.label_bytes))
    transfers = [
        (source, soc, num_bytes * share)
        for stage, num_bytes in ends
        if num_bytes
        for soc, share in zip(stage.devices, stage.shares, strict=True)
        if soc != source
    ]
    return PipelineStep(
        name="samples",
        forward_s=concurrent_s(problem.cluster, transfers),
        backward_s=0.0,
        transfers=True,
    )


def _exchange_s(problem: PipelineProblem, plan: TwoDPlan) -> float:
    """Return the seconds of the exchange among groups: rings of each device in turn, or the server's busiest link."""
    parts = synchronised_parts(plan)
    if plan.sync == Sync.RING:
        return max(
            (
                sum(
                    all_reduce_s(problem, part.devices, _weight_bytes(problem, part))
                    for part in parts
                    if soc in part.devices
                )
                for soc in plan.socs
            ),
            default=0.0,
        )
    uploads = [
        (soc, plan.server, _weight_bytes(problem, part))
        for part in parts
        for soc in part.devices
        if soc != plan.server
    ]
    handling_s = max(
        (2.0 * problem.device(soc).byte_s * num_bytes for soc, _, num_bytes in uploads), default=0.0
    )
    return (
        handling_s
        + concurrent_s(problem.cluster, uploads)
        + concurrent_s(
            problem.cluster, [(server, soc, num_bytes) for soc, server, num_bytes in uploads]
        )
    )


def _weight_bytes(problem: PipelineProblem, part: SynchronisedPart) -> float:
    return problem.model.weight_bytes(part.first_layer, part.last_layer)
