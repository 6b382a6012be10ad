"""The time of one update by the closed form of Asteroid (paper Eqs. 4 to 6, F29), from a plan alone.

Execution steps (stages) and communication steps alternate. Let E_i = E_f + E_b of step i and C_i = Σ_{j<i} E_j. The
dominant step dm is the one with the greatest M·E_i + C_i (F30). For step s on either side of dm the three phases are

    T_w = Σ_{i<s} E_f^i,    T_e = M·E_dm + C_dm − C_s,    T_a = 2(n − 1)/n · weight bytes / least bandwidth.

Their sum is (M·E_dm + C_dm) + (T_a − Σ_{i<s} E_b^i). The latency is the greatest sum over s, so it is D + A with

    D = max_i (M·E_i + C_i),    A = max_s (T_a^s − Σ_{i<s} E_b^i).

Prepending a step changes D and A independently, so the dynamic programme of Algorithm 2 is exact on pairs (D, A).

The formula counts the two directions of a communication step one after the other, M·(E_f + E_b). The links of `cluster`
carry both at once, which halves the dominant step of a pipeline bound by a link. With `duplex`, a communication step
counts (M − 1)·max(E_f, E_b) + E_f + E_b in D. The planner ranks candidates by that, and reports the formula as well.
For the 2-D plan of ResNet-50 on five boards at 100 Mbps, whose cut dominates, the paper's formula is 26 % above the
simulator, and with `duplex` 4 % below it. The exchange among groups starts after all passes and is equal in all three.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from socflower.cluster import Cluster, Endpoint
from socflower.pipeline.plan import (
    Members,
    PipelinePlan,
    Plan,
    Policy,
    Stage,
    Sync,
    TwoDPlan,
    slices_between,
    synchronised_parts,
)
from socflower.pipeline.problem import PipelineProblem


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineStep:
    """An execution or communication step: seconds of one micro-batch, and seconds after the last one."""

    name: str
    forward_s: float
    backward_s: float
    # All-reduce and update.
    after_s: float = 0.0
    # Whether it is a communication step.
    transfers: bool = False

    def all_s(self, num_micro_batches: int, duplex: bool) -> float:
        """Return the seconds of all micro-batches; with `duplex` the directions of a transfer are concurrent."""
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

    The groups of a 2-D plan run side by side without all-reduces of their own. The exchange among groups follows the
    slowest group.
    """
    if isinstance(plan, PipelinePlan):
        tied = (part for part in synchronised_parts(plan, problem.model.ties) if part.tie)
        tied_s = sum(
            all_reduce_s(problem, part.devices, part.weight_bytes(problem.model)) for part in tied
        )
        return latency(problem, plan, duplex=duplex).seconds + tied_s
    alone = len(plan.groups) == 1 and plan.sync == Sync.SERVER
    slowest_s = max(
        latency(problem, group, reduces=False, duplex=duplex).seconds for group in plan.groups
    )
    return slowest_s + (0.0 if alone else _exchange_s(problem, plan))


def latency(
    problem: PipelineProblem,
    plan: PipelinePlan,
    *,
    reduces: bool = True,
    duplex: bool = False,
) -> Latency:
    """Return the steps of a pipeline and its seconds (F29); without `reduces` stages exchange no gradients.

    In backward-after-forward order all forward passes end before the first backward pass, so that
    D = Σ (E_f + E_b) + (M − 1)·(max E_f + max E_b).
    """
    steps = steps_of(problem, plan, reduces=reduces)
    before_s, aligned_s = 0.0, []
    backward_s, tail_s = 0.0, -inf
    for step in steps:
        aligned_s.append(step.all_s(plan.num_micro_batches, duplex) + before_s)
        before_s += step.forward_s + step.backward_s
        tail_s = max(tail_s, step.after_s - backward_s)
        backward_s += step.backward_s
    most_s = max(aligned_s)
    dominant = aligned_s.index(most_s)
    if plan.policy == Policy.BACKWARD_AFTER_FORWARD:
        widest_s = max(step.forward_s for step in steps) + max(step.backward_s for step in steps)
        most_s = before_s + (plan.num_micro_batches - 1) * widest_s
    return Latency(
        steps=steps,
        dominant=dominant,
        aligned_s=most_s,
        tail_s=tail_s,
    )


def steps_of(
    problem: PipelineProblem, plan: PipelinePlan, *, reduces: bool = True
) -> tuple[PipelineStep, ...]:
    """Return execution and communication steps in order; the transfer of samples from one device is the first."""
    steps = []
    if plan.samples_on is not None:
        steps.append(_supply_step(problem, plan, plan.samples_on))
    for index, stage in enumerate(plan.stages):
        if index:
            steps.append(communication_step(problem, plan, index - 1))
        steps.append(execution_step(problem, stage, reduces=reduces, name=f"stage {index}"))
    return tuple(steps)


def execution_step(
    problem: PipelineProblem,
    stage: Stage,
    *,
    reduces: bool = True,
    name: str = "stage",
) -> PipelineStep:
    """Return a stage's step: the slowest device's passes (Eq. 8), then all-reduce (Eq. 5) and update."""
    forward_s, backward_s, after_s = stage_seconds(
        problem, stage.layers, stage.members, reduces=reduces
    )
    return PipelineStep(name=name, forward_s=forward_s, backward_s=backward_s, after_s=after_s)


def stage_seconds(
    problem: PipelineProblem,
    layers: tuple[int, int],
    members: Members,
    *,
    reduces: bool = True,
) -> tuple[float, float, float]:
    """Return a stage's E_f and E_b (Eq. 8), and the seconds of all-reduce (Eq. 5) and update."""
    weight_bytes = problem.model.weight_bytes(*layers)
    forward_s = backward_s = update_s = 0.0
    for soc, share in members:
        device = problem.device(soc)
        there_s, back_s = problem.pass_s(device, *layers, share)
        forward_s, backward_s = max(forward_s, there_s), max(backward_s, back_s)
        update_s = max(update_s, device.update_s(weight_bytes))
    socs = [soc for soc, _ in members]
    ring_s = all_reduce_s(problem, socs, weight_bytes) if reduces else 0.0
    return forward_s, backward_s, ring_s + update_s


def all_reduce_s(problem: PipelineProblem, socs: Sequence[int], weight_bytes: float) -> float:
    """Return T_a of a ring (F29): 2(n − 1) rounds of a message with 1/n of the weights over the least bandwidth."""
    size = len(socs)
    if size == 1 or not weight_bytes:
        return 0.0
    slowest = problem.least_bandwidth(socs)
    byte_s = max(problem.device(soc).byte_s for soc in socs)
    round_s = weight_bytes / size * (1.0 / slowest + 2.0 * byte_s) + problem.cluster.message_s
    return 2.0 * (size - 1) * round_s


def communication_step(problem: PipelineProblem, plan: PipelinePlan, index: int) -> PipelineStep:
    """Return the step of the cut behind a stage: the busiest link's time of a micro-batch, in either direction."""
    stage, following = plan.stages[index : index + 2]
    there_s, back_s = cut_seconds(problem, stage.last_layer, stage.members, following.members)
    return PipelineStep(name=f"cut {index}", forward_s=there_s, backward_s=back_s, transfers=True)


def cut_seconds(
    problem: PipelineProblem, last_layer: int, senders: Members, receivers: Members
) -> tuple[float, float]:
    """Return the busiest link's seconds of a micro-batch's activations and gradients between two stages."""
    output_bytes = problem.model.layers[last_layer].crossing_bytes
    there, back = [], []
    shares = [[share for _, share in members] for members in (senders, receivers)]
    for piece in slices_between(*shares):
        source, target = senders[piece.sender][0], receivers[piece.receiver][0]
        num_bytes = piece.num_samples * output_bytes
        there.append((source, target, num_bytes * problem.activation_part))
        back.append((target, source, num_bytes * problem.gradient_part))
    return concurrent_s(problem.cluster, there), concurrent_s(problem.cluster, back)


def concurrent_s(cluster: Cluster, transfers: Sequence[tuple[Endpoint, Endpoint, float]]) -> float:
    """Return the seconds of simultaneous transfers: handling at the busiest end, then the busiest link's bytes."""
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
        for soc, share in stage.members
        if soc != source
    ]
    return PipelineStep(
        name="samples",
        forward_s=concurrent_s(problem.cluster, transfers),
        backward_s=0.0,
        transfers=True,
    )


def _exchange_s(problem: PipelineProblem, plan: TwoDPlan) -> float:
    """Return the seconds of the exchange among groups: each device's rings in turn, or the server's busiest link."""
    parts = [
        (part, part.weight_bytes(problem.model))
        for part in synchronised_parts(plan, problem.model.ties)
    ]
    if plan.sync == Sync.RING:
        rings_s = dict.fromkeys(plan.socs, 0.0)
        for part, weight_bytes in parts:
            ring_s = all_reduce_s(problem, part.devices, weight_bytes)
            for soc in part.devices:
                rings_s[soc] += ring_s
        return max(rings_s.values())
    uploads, downloads, handling_s = [], [], 0.0
    for part, weight_bytes in parts:
        for soc in part.devices:
            if soc != plan.server:
                uploads.append((soc, plan.server, weight_bytes))
                downloads.append((plan.server, soc, weight_bytes))
                byte_s = problem.device(soc).byte_s
                handling_s = max(handling_s, 2.0 * byte_s * weight_bytes)
    moved_s = concurrent_s(problem.cluster, uploads) + concurrent_s(problem.cluster, downloads)
    return handling_s + moved_s
