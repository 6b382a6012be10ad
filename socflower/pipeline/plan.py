"""Pipeline plans: stages of layers on groups of devices, and the samples that each device takes of a micro-batch.

A plan is complete without its problem: it has the layers, samples, transfers and order of all devices.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Annotated, Any, NamedTuple, TypeAlias

from pydantic import Field

from socflower.errors import ConfigError, InfeasiblePlan, require_range
from socflower.field_rules import checked
from socflower.pipeline.problem import PipelineDevice, PipelineModel, PipelineProblem, Tie

_Positive = Annotated[int, Field(ge=1)]

Members: TypeAlias = tuple[tuple[int, int], ...]
"""The SoC and the share of each device of a stage, in the order of their samples."""


class Policy(StrEnum):
    """The order of a stage's forward and backward passes."""

    # K_p forward passes, then alternately a backward and a forward pass.
    ONE_FORWARD_ONE_BACKWARD = "1f1b"
    # All forward passes, then all backward passes.
    BACKWARD_AFTER_FORWARD = "gpipe"


class Slice(NamedTuple):
    """Samples `first` to `stop` - 1 of a micro-batch, sent from a device of a stage to a device of the next.

    `sender` and `receiver` are positions in the stages' `devices`.
    """

    sender: int
    receiver: int
    first: int
    stop: int

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self.stop - self.first


def intervals(shares: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the consecutive ranges (first, stop) of a micro-batch that the devices of a stage take."""
    return tuple(pairwise(accumulate(shares, initial=0)))


def slices_between(senders: Sequence[int], receivers: Sequence[int]) -> tuple[Slice, ...]:
    """Return the samples that devices of a stage send to devices of the next: the overlaps of their ranges.

    The backward pass sends gradients of the same samples the other way, so both passes of a sample in one stage are on
    one device. Each sample crosses once, whatever the widths of the stages: 2β·a bytes a cut, as in the paper's Eq. 2.
    Both stages have the same number of samples.
    """
    found = []
    for sender, (first, stop) in enumerate(intervals(senders)):
        for receiver, (begin, end) in enumerate(intervals(receivers)):
            if max(first, begin) < min(stop, end):
                found.append(Slice(sender, receiver, max(first, begin), min(stop, end)))
    return tuple(found)


@checked
class Stage:
    """Consecutive layers on a group of devices, which share the samples of every micro-batch."""

    first_layer: Annotated[int, Field(ge=0)]
    last_layer: int
    # SoCs, in the order of their samples.
    devices: tuple[int, ...]
    # Samples of each micro-batch, by device.
    shares: Annotated[tuple[_Positive, ...], Field(min_length=1)]
    # K_p: the forward passes before the first backward pass, which is also the most kept activations.
    in_flight: _Positive

    def check(self) -> None:
        """Refuse layers in reverse order, a device twice, and a device without a share."""
        if self.last_layer < self.first_layer:
            raise ConfigError(f"last_layer = {self.last_layer} is before {self.first_layer}")
        if not len(set(self.devices)) == len(self.devices) == len(self.shares):
            raise ConfigError(
                f"devices = {list(self.devices)} must differ and have a share each of {self.shares}"
            )

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch."""
        return sum(self.shares)

    @property
    def layers(self) -> tuple[int, int]:
        """The first and the last layer."""
        return self.first_layer, self.last_layer

    @property
    def members(self) -> Members:
        """The SoC and the share of each device, in the order of their samples."""
        return tuple(zip(self.devices, self.shares, strict=True))

    def memory_bytes(self, problem: PipelineProblem, share: int) -> float:
        """Return `MOD + OPT + K_p·ACT(β)` of a device with a share of β samples (F28, Eq. 3).

        As in the paper, activations that have arrived and wait for their forward pass are not counted.
        """
        kept = self.in_flight * share * problem.model.kept_bytes(*self.layers)
        return problem.model.state_bytes(*self.layers, problem.optimizer_copies) + kept


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePlan:
    """A hybrid pipeline: data parallelism inside each stage, a pipeline across stages."""

    stages: tuple[Stage, ...]
    micro_batch_size: int
    num_micro_batches: int
    policy: Policy = Policy.ONE_FORWARD_ONE_BACKWARD
    # The SoC that has samples and labels; None: each device that needs them has them.
    samples_on: int | None = None
    # The planner that made the plan.
    planner: str = "asteroid"

    def __post_init__(self) -> None:
        require_range("pipeline", least=1, num_stages=len(self.stages))
        _require_different(self.socs)
        next_layer, most = 0, self.num_micro_batches
        for stage in self.stages:
            if stage.first_layer != next_layer:
                raise ConfigError(
                    f"pipeline: a stage begins with layer {stage.first_layer}, not {next_layer}"
                )
            if stage.micro_batch_size != self.micro_batch_size:
                raise ConfigError(
                    f"pipeline: shares {list(stage.shares)} must add up to "
                    f"micro_batch_size = {self.micro_batch_size}"
                )
            # A stage that waits for more forward passes than the stage before may do would never continue.
            if stage.in_flight > most:
                raise ConfigError(
                    f"pipeline: in_flight = {stage.in_flight} must be at most {most}, the number of the "
                    "stage before, or num_micro_batches"
                )
            next_layer, most = stage.last_layer + 1, stage.in_flight
        if self.policy == Policy.BACKWARD_AFTER_FORWARD and most < self.num_micro_batches:
            raise ConfigError(
                f"pipeline: in_flight = {most} must be {self.num_micro_batches} for this policy"
            )

    @property
    def socs(self) -> tuple[int, ...]:
        """All SoCs that take part, by stage."""
        return tuple(soc for stage in self.stages for soc in stage.devices)

    @property
    def pipelines(self) -> "tuple[PipelinePlan, ...]":
        """The pipelines of the plan: this one."""
        return (self,)

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return self.stages[-1].last_layer + 1

    @property
    def num_samples(self) -> int:
        """Samples of one update of the weights."""
        return self.micro_batch_size * self.num_micro_batches

    @property
    def architecture(self) -> str:
        """The kind of parallelism: "single device", "data parallelism", "pipeline", "hybrid pipeline" or "2-D"."""
        if len(self.stages) == 1:
            return "single device" if len(self.socs) == 1 else "data parallelism"
        return "pipeline" if len(self.socs) == len(self.stages) else "hybrid pipeline"

    def slices(self, stage: int) -> tuple[Slice, ...]:
        """Return the samples of a micro-batch that devices of a stage send to devices of the next stage."""
        return slices_between(self.stages[stage].shares, self.stages[stage + 1].shares)

    def communication_bytes(self, problem: PipelineProblem) -> float:
        """Return the bytes of one update, `Σ 2(|g| − 1)·P_g + 2β·Σ a` (paper Eq. 2), and of inputs from `samples_on`.

        Coded activations and gradients count with their part (`PipelineProblem.activation_part`).
        """
        rings = sum(
            part.num_bytes(problem, self) for part in synchronised_parts(self, problem.model.ties)
        )
        return rings + self.crossing_bytes(problem)

    def crossing_bytes(self, problem: PipelineProblem) -> float:
        """Return the bytes of one update that cross cuts, and of inputs from `samples_on`."""
        model, total = problem.model, 0.0
        for stage in self.stages[:-1]:
            output_bytes = model.layers[stage.last_layer].crossing_bytes
            total += problem.sent_part * self.num_samples * output_bytes
        if self.samples_on is None:
            return total
        ends = ((self.stages[0], model.input_bytes), (self.stages[-1], model.label_bytes))
        for stage, num_bytes in ends:
            for soc, share in stage.members:
                if soc != self.samples_on:
                    total += num_bytes * share * self.num_micro_batches
        return total

    def check(self, problem: PipelineProblem) -> None:
        """Raise `ConfigError` for another model's plan, `InfeasiblePlan` for a plan that exceeds a budget."""
        model = problem.model
        if self.num_layers != model.num_layers:
            raise ConfigError(
                f"pipeline: the plan has {self.num_layers} layers, {model.name} has {model.num_layers}"
            )
        for stage in self.stages:
            for soc, share in stage.members:
                device, needed = problem.device(soc), stage.memory_bytes(problem, share)
                if needed > device.memory_bytes * (1.0 + 1e-12):
                    raise _exceeds(stage, device, share, needed)

    def to_document(self, problem: PipelineProblem) -> dict[str, Any]:
        """Return the plan as plain values for JSON, with each device's memory against its budget."""
        return {
            "kind": "pipeline",
            "architecture": self.architecture,
            "planner": self.planner,
            "model": problem.model.name,
            "policy": self.policy.value,
            "micro_batch_size": self.micro_batch_size,
            "num_micro_batches": self.num_micro_batches,
            "samples_on": self.samples_on,
            "stages": [_stage_document(stage, problem) for stage in self.stages],
            "communication_bytes": self.communication_bytes(problem),
        }


def _exceeds(
    stage: Stage,
    device: PipelineDevice,
    share: int,
    needed_bytes: float,
) -> InfeasiblePlan:
    first, last = stage.layers
    return InfeasiblePlan(
        f"pipeline: layers {first} to {last} with {share} samples, {stage.in_flight} in flight, need "
        f"{needed_bytes / 1e6:.1f} MB on {device.name} (SoC {device.soc}), whose budget is "
        f"{device.memory_bytes / 1e6:.1f} MB; use smaller micro-batches or more devices"
    )


def _require_different(socs: Sequence[int]) -> None:
    if len(set(socs)) != len(socs):
        raise ConfigError(f"pipeline: SoCs {list(socs)} must differ; each takes one stage")


def _stage_document(stage: Stage, problem: PipelineProblem) -> dict[str, Any]:
    model, devices = problem.model, []
    samples = intervals(stage.shares)
    for (soc, share), interval in zip(stage.members, samples, strict=True):
        device = problem.device(soc)
        devices.append(
            {
                "soc": soc,
                "device": device.name,
                "share": share,
                "samples": list(interval),
                "processor": device.int8_processor or problem.kind(soc).default_processor,
                "memory_bytes": stage.memory_bytes(problem, share),
                "budget_bytes": device.memory_bytes,
            }
        )
    return {
        "layers": list(stage.layers),
        "first_layer": model.layers[stage.first_layer].name,
        "last_layer": model.layers[stage.last_layer].name,
        "in_flight": stage.in_flight,
        "weight_bytes": model.weight_bytes(*stage.layers),
        "devices": devices,
    }


def staged(
    ends: Sequence[int],
    members: Sequence[Sequence[tuple[int, int]]],
    in_flight: Sequence[int],
    num_micro_batches: int,
    policy: Policy = Policy.ONE_FORWARD_ONE_BACKWARD,
) -> PipelinePlan:
    """Return the plan whose stages end with the layers `ends`; `members` are (SoC, share), by stage."""
    stages, first = [], 0
    for last, own, count in zip(ends, members, in_flight, strict=True):
        devices, shares = zip(*own, strict=True)
        stages.append(
            Stage(
                first_layer=first,
                last_layer=last,
                devices=devices,
                shares=shares,
                in_flight=count,
            )
        )
        first = last + 1
    return PipelinePlan(
        stages=tuple(stages),
        micro_batch_size=stages[0].micro_batch_size,
        num_micro_batches=num_micro_batches,
        policy=policy,
    )


class Sync(StrEnum):
    """How the pipelines of a 2-D plan exchange their gradients."""

    # Each part of the model is summed in a ring of the devices that hold it.
    RING = "ring"
    # Gradients go through a parameter server, as in HetPipe.
    SERVER = "server"


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoDPlan:
    """Pipelines inside groups, data parallelism across them: each group trains its own samples on the whole model."""

    groups: tuple[PipelinePlan, ...]
    sync: Sync = Sync.RING
    # The place of the parameter server: a SoC or the hub.
    server: int | str = "hub"
    planner: str = "2d"

    def __post_init__(self) -> None:
        require_range("2-D plan", least=1, num_groups=len(self.groups))
        _require_different(self.socs)
        num_layers = {group.num_layers for group in self.groups}
        if len(num_layers) > 1:
            raise ConfigError(f"2-D plan: groups have {num_layers} layers; give all one model")

    @property
    def socs(self) -> tuple[int, ...]:
        """All SoCs that take part, by group and stage."""
        return tuple(soc for group in self.groups for soc in group.socs)

    @property
    def pipelines(self) -> tuple[PipelinePlan, ...]:
        """The pipelines of the plan: one per group."""
        return self.groups

    @property
    def num_samples(self) -> int:
        """Samples of one update of the weights."""
        return sum(group.num_samples for group in self.groups)

    @property
    def architecture(self) -> str:
        """The kind of parallelism: "single device", "data parallelism", "pipeline", "hybrid pipeline" or "2-D"."""
        if len(self.groups) == 1:
            return self.groups[0].architecture
        return "data parallelism" if all(len(group.stages) == 1 for group in self.groups) else "2-D"

    def communication_bytes(self, problem: PipelineProblem) -> float:
        """Return the bytes of one update.

        With a server `2GP + Σ_i 2β_i·Σ_j a_ij` for G > 1 groups (paper Eq. 1; less for a server that is itself a device
        of a group); with rings `2(n − 1)` times each part of the model that n devices hold.
        """
        crossing = sum(group.crossing_bytes(problem) for group in self.groups)
        return crossing + sum(
            part.num_bytes(problem, self) for part in synchronised_parts(self, problem.model.ties)
        )

    def check(self, problem: PipelineProblem) -> None:
        """Raise what `PipelinePlan.check` does for any of the groups."""
        for group in self.groups:
            group.check(problem)


Plan: TypeAlias = PipelinePlan | TwoDPlan


class Place(NamedTuple):
    """A device's position in a plan: its pipeline, its stage there and its rank among the stage's devices."""

    pipeline: int
    stage: int
    rank: int


def places(plan: Plan) -> dict[int, Place]:
    """Return the place of each SoC, in the order of the plan."""
    return {
        soc: Place(number, index, rank)
        for number, pipeline in enumerate(plan.pipelines)
        for index, stage in enumerate(pipeline.stages)
        for rank, soc in enumerate(stage.devices)
    }


def with_samples_on(plan: Plan, soc: int | None) -> Plan:
    """Return the plan with all samples and labels on one device; None: each device has those that it needs."""
    if isinstance(plan, TwoDPlan):
        return replace(plan, groups=tuple(replace(group, samples_on=soc) for group in plan.groups))
    return replace(plan, samples_on=soc)


@dataclass(frozen=True, kw_only=True, slots=True)
class SynchronisedPart:
    """Layers whose gradients the same devices exchange."""

    first_layer: int
    last_layer: int
    devices: tuple[int, ...]
    # Exchanged apart from the layers' other parameters, since other devices have them too.
    apart: tuple[Tie, ...] = ()
    # Only these parameters of the layers; None: all but those that are `apart`.
    tie: Tie | None = None

    def weight_bytes(self, model: PipelineModel) -> float:
        """Return the trained bytes that it has."""
        if self.tie is not None:
            return self.tie.weight_bytes
        own = model.weight_bytes(self.first_layer, self.last_layer)
        return own - sum(tie.weight_bytes for tie in self.apart)

    def num_bytes(self, problem: PipelineProblem, plan: Plan) -> float:
        """Return the bytes of the exchange among its devices: `2(n − 1)·P` in a ring, `2P` a device with a server."""
        weight_bytes = self.weight_bytes(problem.model)
        if isinstance(plan, TwoDPlan) and plan.sync == Sync.SERVER:
            clients = sum(soc != plan.server for soc in self.devices) if len(plan.groups) > 1 else 0
            return 2.0 * clients * weight_bytes
        return 2.0 * (len(self.devices) - 1) * weight_bytes


def synchronised_parts(plan: Plan, ties: Sequence[Tie] = ()) -> tuple[SynchronisedPart, ...]:
    """Return, in layer order, the parts of the model whose gradients the same devices exchange.

    In a single pipeline these are the stages. Groups of a 2-D plan may be cut in different places. Parameters that
    layers of several parts use come first: all devices that have one of these layers exchange them, since the gradient
    of such a parameter is the sum over the layers.
    """
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    starts = sorted({stage.first_layer for stage in stages})
    ends = [*starts[1:], plan.pipelines[0].num_layers]
    found, spanning = [], dict[Tie, None]()
    for first, end in zip(starts, ends, strict=True):
        holding = [stage for stage in stages if stage.first_layer <= first <= stage.last_layer]
        devices = tuple(soc for stage in holding for soc in stage.devices)
        apart = []
        for tie in ties:
            inside = [first <= layer < end for layer in tie.layers]
            if any(inside) and not all(inside):
                apart.append(tie)
        spanning |= dict.fromkeys(apart)
        found.append(
            SynchronisedPart(
                first_layer=first, last_layer=end - 1, devices=devices, apart=tuple(apart)
            )
        )
    return (*(_tied_part(tie, stages) for tie in spanning), *found)


def _tied_part(tie: Tie, stages: Sequence[Stage]) -> SynchronisedPart:
    users = [
        stage
        for stage in stages
        if any(stage.first_layer <= layer <= stage.last_layer for layer in tie.layers)
    ]
    return SynchronisedPart(
        first_layer=tie.layers[0],
        last_layer=tie.layers[-1],
        devices=tuple(soc for stage in users for soc in stage.devices),
        tie=tie,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Costs of one update of a plan: by the closed form, and in virtual time."""

    # By F29, which adds the two directions of a transfer.
    formula_s: float
    # By F29 with both directions of a transfer at once, as the links of `cluster` carry them.
    duplex_s: float
    # In the simulator.
    step_s: float
    # Of all devices of the problem.
    energy_j: float
    num_samples: int
    # By tier of links.
    num_bytes: Mapping[str, float]

    @property
    def samples_per_s(self) -> float:
        """Throughput."""
        return self.num_samples / self.step_s

    def to_document(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "step_s": self.step_s,
            "formula_s": self.formula_s,
            "duplex_s": self.duplex_s,
            "energy_j": self.energy_j,
            "samples_per_s": self.samples_per_s,
            "energy_j_per_sample": self.energy_j / self.num_samples,
            "bytes": dict(self.num_bytes),
        }


def to_json(plan: Plan) -> str:
    """Return a plan as JSON, for messages between processes of one version."""
    return json.dumps(asdict(plan))


def from_json(text: str) -> Plan:
    """Return the plan of `to_json`; `ConfigError` if another version of socflower wrote the text."""
    try:
        values = json.loads(text)
        if "groups" not in values:
            return _pipeline(values)
        groups = tuple(map(_pipeline, values["groups"]))
        return TwoDPlan(
            **{
                **values,
                "groups": groups,
                "sync": Sync(values["sync"]),
            }
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"pipeline: a plan cannot be read ({error}); use one version of socflower everywhere"
        ) from None


def _pipeline(values: dict[str, Any]) -> PipelinePlan:
    stages = [
        Stage(
            **{
                **stage,
                "devices": tuple(stage["devices"]),
                "shares": tuple(stage["shares"]),
            }
        )
        for stage in values["stages"]
    ]
    return PipelinePlan(
        **{
            **values,
            "stages": tuple(stages),
            "policy": Policy(values["policy"]),
        }
    )
