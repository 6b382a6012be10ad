"""Pipeline plans: stages of layers on groups of devices, and the samples that each device takes of a micro-batch.

A plan can be executed without its problem: which layers, which samples, from whom to whom, and in which order.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

from socflower.errors import ConfigError, InfeasiblePlan, require_range
from socflower.pipeline.problem import PipelineProblem


class Policy(StrEnum):
    """The order of a stage's forward and backward passes."""

    ONE_FORWARD_ONE_BACKWARD = (
        "1f1b"  # K_p forward passes, then alternately a backward and a forward pass
    )
    BACKWARD_AFTER_FORWARD = "gpipe"  # all forward passes, then all backward passes


class Slice(NamedTuple):
    """Samples `first` up to, without, `stop` of a micro-batch, from one device of a stage to one of the next.

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
    """Return the samples (first, stop) of a micro-batch that each device of a stage takes: contiguous, in order."""
    ends = list(accumulate(shares, initial=0))
    return tuple(pairwise(ends))


def slices_between(senders: Sequence[int], receivers: Sequence[int]) -> tuple[Slice, ...]:
    """Return what each device of a stage sends to each device of the next: where their intervals of samples meet.

    The backward pass sends gradients of the same samples the other way, so both passes of a sample in one stage are on
    one device. Each sample crosses once, whatever the widths of the stages: 2β·a bytes a cut, as in the paper's Eq. 2.
    """
    if sum(senders) != sum(receivers):
        raise ConfigError(
            f"pipeline: stages of {sum(senders)} and {sum(receivers)} samples a micro-batch cannot be "
            "joined; shares of all stages have one sum"
        )
    found = []
    for sender, (first, stop) in enumerate(intervals(senders)):
        for receiver, (begin, end) in enumerate(intervals(receivers)):
            if max(first, begin) < min(stop, end):
                found.append(Slice(sender, receiver, max(first, begin), min(stop, end)))
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Consecutive layers on a group of devices, which share the samples of every micro-batch."""

    first_layer: int
    last_layer: int
    devices: tuple[int, ...]  # SoCs, in the order of their samples
    shares: tuple[int, ...]  # samples of each micro-batch
    in_flight: int  # K_p: forward passes before the first backward pass, the most whose activations are kept

    def __post_init__(self) -> None:
        if not 0 <= self.first_layer <= self.last_layer:
            raise ConfigError(f"stage: layers {self.first_layer} to {self.last_layer} are none")
        if (
            not self.devices
            or len(self.devices) != len(self.shares)
            or len(set(self.devices)) != len(self.devices)
        ):
            raise ConfigError(
                f"stage: needs different devices and as many shares, got devices {list(self.devices)} "
                f"and shares {list(self.shares)}"
            )
        if min(self.shares) < 1:
            raise ConfigError(
                f"stage: shares {list(self.shares)} must be 1 or more; leave out devices without "
                "samples"
            )
        require_range("stage", least=1, in_flight=self.in_flight)

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch."""
        return sum(self.shares)

    def weights(self) -> tuple[float, ...]:
        """Return each device's weight in the mean of gradients: its part of the samples."""
        return tuple(share / self.micro_batch_size for share in self.shares)

    def memory_bytes(self, problem: PipelineProblem, share: int) -> float:
        """Return `MOD + OPT + K_p·ACT(β)` of a device with a share of β samples (F28, Eq. 3).

        What has arrived and waits for its forward pass is not counted, as in the paper.
        """
        model = problem.model
        return model.state_bytes(
            self.first_layer, self.last_layer, problem.optimizer_copies
        ) + self.in_flight * share * model.kept_bytes(self.first_layer, self.last_layer)


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePlan:
    """A hybrid pipeline: data parallelism inside each stage, a pipeline across stages."""

    stages: tuple[Stage, ...]
    micro_batch_size: int
    num_micro_batches: int
    policy: Policy = Policy.ONE_FORWARD_ONE_BACKWARD
    samples_on: int | None = (
        None  # the SoC that has samples and labels; None: each device that needs them has them
    )
    planner: str = "asteroid"  # whose plan it is

    def __post_init__(self) -> None:
        require_range(
            "pipeline",
            least=1,
            micro_batch_size=self.micro_batch_size,
            num_micro_batches=self.num_micro_batches,
        )
        if not self.stages or self.stages[0].first_layer != 0:
            raise ConfigError("pipeline: needs a stage that begins with layer 0")
        for before, after in pairwise(self.stages):
            if after.first_layer != before.last_layer + 1:
                raise ConfigError(
                    f"pipeline: a stage begins with layer {after.first_layer}, and the one before ends "
                    f"with layer {before.last_layer}; stages follow each other without gap"
                )
            # A stage that waits for more forward passes than the one before may do would wait for ever.
            if after.in_flight > before.in_flight:
                raise ConfigError(
                    f"pipeline: in_flight {before.in_flight} of a stage is below {after.in_flight} of "
                    "the next, which would wait for ever; it must not rise from stage to stage"
                )
        if len(set(self.socs)) != len(self.socs):
            raise ConfigError(
                f"pipeline: a SoC is in two stages of {list(self.socs)}; each takes one"
            )
        for stage in self.stages:
            if stage.micro_batch_size != self.micro_batch_size:
                raise ConfigError(
                    f"pipeline: shares {list(stage.shares)} do not add up to the micro-batch of "
                    f"{self.micro_batch_size} samples"
                )
            if stage.in_flight > self.num_micro_batches:
                raise ConfigError(
                    f"pipeline: in_flight = {stage.in_flight} is more than all "
                    f"{self.num_micro_batches} micro-batches"
                )
            if (
                self.policy == Policy.BACKWARD_AFTER_FORWARD
                and stage.in_flight != self.num_micro_batches
            ):
                raise ConfigError(
                    f"pipeline: backward after forward keeps all {self.num_micro_batches} micro-batches, "
                    f"but in_flight = {stage.in_flight}"
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
        """What kind of parallelism it is."""
        if len(self.stages) == 1:
            return "single device" if len(self.socs) == 1 else "data parallelism"
        return "pipeline" if len(self.socs) == len(self.stages) else "hybrid pipeline"

    def slices(self, stage: int) -> tuple[Slice, ...]:
        """Return what the devices of a stage send to those of the next one for each micro-batch."""
        return slices_between(self.stages[stage].shares, self.stages[stage + 1].shares)

    def communication_bytes(self, problem: PipelineProblem) -> float:
        """Return the bytes of one update: `Σ 2(|g| − 1)·P_g + 2β·Σ a` (paper Eq. 2), and inputs from `samples_on`.

        Of what is coded, less.
        """
        model, total = problem.model, 0.0
        for stage in self.stages:
            total += (
                2.0
                * (len(stage.devices) - 1)
                * model.weight_bytes(stage.first_layer, stage.last_layer)
            )
        for stage in self.stages[:-1]:
            total += (
                problem.sent_part * self.num_samples * model.layers[stage.last_layer].output_bytes
            )
        return total + self._source_bytes(problem)

    def _source_bytes(self, problem: PipelineProblem) -> float:
        if self.samples_on is None:
            return 0.0
        ends = (
            (self.stages[0], problem.model.input_bytes),
            (self.stages[-1], problem.model.label_bytes),
        )
        return float(
            sum(
                num_bytes * share * self.num_micro_batches
                for stage, num_bytes in ends
                for soc, share in zip(stage.devices, stage.shares, strict=True)
                if soc != self.samples_on
            )
        )

    def check(self, problem: PipelineProblem) -> None:
        """Raise `ConfigError` if the plan is not of this problem's model, `InfeasiblePlan` if it exceeds a budget."""
        check_layers(self, problem)
        for stage in self.stages:
            for soc, share in zip(stage.devices, stage.shares, strict=True):
                device, needed = problem.device(soc), stage.memory_bytes(problem, share)
                if needed > device.memory_bytes * (1.0 + 1e-12):
                    raise InfeasiblePlan(
                        f"pipeline: layers {stage.first_layer} to {stage.last_layer} with {share} samples, "
                        f"{stage.in_flight} in flight, need {needed / 1e6:.1f} MB on {device.name} (SoC {soc}), whose "
                        f"budget is {device.memory_bytes / 1e6:.1f} MB; use smaller micro-batches or more devices"
                    )

    def to_document(
        self, problem: PipelineProblem, prediction: "Prediction | None" = None
    ) -> dict[str, Any]:
        """Return the plan as plain values for JSON, with each device's memory against its budget."""
        names = [layer.name for layer in problem.model.layers]
        stages = [
            {
                "layers": [stage.first_layer, stage.last_layer],
                "first_layer": names[stage.first_layer],
                "last_layer": names[stage.last_layer],
                "in_flight": stage.in_flight,
                "weight_bytes": problem.model.weight_bytes(stage.first_layer, stage.last_layer),
                "devices": [
                    {
                        "soc": soc,
                        "device": problem.device(soc).name,
                        "share": share,
                        "samples": list(interval),
                        "processor": problem.device(soc).int8_processor
                        or problem.kind(soc).default_processor,
                        "memory_bytes": stage.memory_bytes(problem, share),
                        "budget_bytes": problem.device(soc).memory_bytes,
                    }
                    for soc, share, interval in zip(
                        stage.devices, stage.shares, intervals(stage.shares), strict=True
                    )
                ],
            }
            for stage in self.stages
        ]
        return {
            "kind": "pipeline",
            "architecture": self.architecture,
            "planner": self.planner,
            "model": problem.model.name,
            "policy": self.policy.value,
            "micro_batch_size": self.micro_batch_size,
            "num_micro_batches": self.num_micro_batches,
            "samples_on": self.samples_on,
            "stages": stages,
            "communication_bytes": self.communication_bytes(problem),
            "predicted": None if prediction is None else prediction.to_document(),
        }


class Sync(StrEnum):
    """How pipelines of a 2-D plan exchange their gradients."""

    RING = "ring"  # each part of the model in a ring of the devices that hold it
    SERVER = "server"  # through a parameter server, as in HetPipe


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoDPlan:
    """Pipelines inside groups, data parallelism across them: each group trains its own samples on the whole model."""

    groups: tuple[PipelinePlan, ...]
    sync: Sync = Sync.RING
    server: int | str = "hub"  # where the parameter server is: a SoC or the hub
    planner: str = "2d"

    def __post_init__(self) -> None:
        if not self.groups:
            raise ConfigError("2-D plan: needs at least one group")
        if len(set(self.socs)) != len(self.socs):
            raise ConfigError(
                f"2-D plan: a SoC is in two groups of {list(self.socs)}; each takes one"
            )
        if len({group.num_layers for group in self.groups}) > 1:
            raise ConfigError("2-D plan: its groups train models of different numbers of layers")

    @property
    def socs(self) -> tuple[int, ...]:
        """All SoCs that take part, by group and stage."""
        return tuple(soc for group in self.groups for soc in group.socs)

    @property
    def pipelines(self) -> tuple[PipelinePlan, ...]:
        """The pipelines of the plan: one a group."""
        return self.groups

    @property
    def num_samples(self) -> int:
        """Samples of one update of the weights."""
        return sum(group.num_samples for group in self.groups)

    @property
    def architecture(self) -> str:
        """What kind of parallelism it is."""
        if len(self.groups) == 1:
            return self.groups[0].architecture
        return "data parallelism" if all(len(group.stages) == 1 for group in self.groups) else "2-D"

    def communication_bytes(self, problem: PipelineProblem) -> float:
        """Return the bytes of one update.

        With a server `2GP + Σ_i 2β_i·Σ_j a_ij` for G > 1 groups (paper Eq. 1; less for a server that is itself a device
        of a group); with rings `2(n − 1)` times each part of the model that n devices hold.
        """
        crossing = sum(
            group.communication_bytes(problem) - own_ring_bytes(group, problem)
            for group in self.groups
        )
        return crossing + sum(part.num_bytes(problem, self) for part in synchronised_parts(self))

    def check(self, problem: PipelineProblem) -> None:
        """Raise what `PipelinePlan.check` does for any of the groups."""
        for group in self.groups:
            group.check(problem)

    def to_document(
        self, problem: PipelineProblem, prediction: "Prediction | None" = None
    ) -> dict[str, Any]:
        """Return the plan as plain values for JSON."""
        return {
            "kind": "2d",
            "architecture": self.architecture,
            "planner": self.planner,
            "model": problem.model.name,
            "sync": self.sync.value,
            "server": self.server if self.sync == Sync.SERVER else None,
            "groups": [group.to_document(problem) for group in self.groups],
            "communication_bytes": self.communication_bytes(problem),
            "predicted": None if prediction is None else prediction.to_document(),
        }


Plan: TypeAlias = PipelinePlan | TwoDPlan


def with_samples_on(plan: Plan, soc: int | None) -> Plan:
    """Return the plan with samples and labels on a device; None: where they are needed."""
    if isinstance(plan, TwoDPlan):
        return replace(plan, groups=tuple(replace(group, samples_on=soc) for group in plan.groups))
    return replace(plan, samples_on=soc)


@dataclass(frozen=True, kw_only=True, slots=True)
class SynchronisedPart:
    """Layers whose gradients the same devices exchange."""

    first_layer: int
    last_layer: int
    devices: tuple[int, ...]

    def num_bytes(self, problem: PipelineProblem, plan: Plan) -> float:
        """Return the bytes of the exchange among its devices: `2(n − 1)·P` in a ring, `2P` a device with a server."""
        weight_bytes = problem.model.weight_bytes(self.first_layer, self.last_layer)
        if isinstance(plan, TwoDPlan) and plan.sync == Sync.SERVER:
            clients = sum(soc != plan.server for soc in self.devices) if len(plan.groups) > 1 else 0
            return 2.0 * clients * weight_bytes
        return 2.0 * (len(self.devices) - 1) * weight_bytes


def synchronised_parts(plan: Plan) -> tuple[SynchronisedPart, ...]:
    """Return the parts of the model that one set of devices exchanges the gradients of, in layer order.

    In a single pipeline these are the stages; groups of a 2-D plan may be cut in different places.
    """
    starts = sorted({stage.first_layer for pipeline in plan.pipelines for stage in pipeline.stages})
    ends = [*starts[1:], plan.pipelines[0].num_layers]
    return tuple(
        SynchronisedPart(
            first_layer=first,
            last_layer=end - 1,
            devices=tuple(
                soc
                for pipeline in plan.pipelines
                for stage in pipeline.stages
                if stage.first_layer <= first <= stage.last_layer
                for soc in stage.devices
            ),
        )
        for first, end in zip(starts, ends, strict=True)
    )


def own_ring_bytes(plan: PipelinePlan, problem: PipelineProblem) -> float:
    """Return the bytes of the all-reduces inside the stages of a pipeline."""
    return sum(part.num_bytes(problem, plan) for part in synchronised_parts(plan))


def check_layers(plan: PipelinePlan, problem: PipelineProblem) -> None:
    """Raise `ConfigError` if a plan does not cover the problem's model."""
    if plan.num_layers != problem.model.num_layers:
        raise ConfigError(
            f"pipeline: the plan has {plan.num_layers} layers, and model {problem.model.name} has "
            f"{problem.model.num_layers}; plan it for this model"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a plan costs: by the closed form, and in virtual time."""

    formula_s: float  # seconds of one update by F29, which adds the two directions of a transfer
    duplex_s: float  # by F29 with both directions of a transfer at once, as the links of `cluster` carry them
    step_s: float  # in the simulator
    energy_j: float  # of all devices of the problem, one update
    num_samples: int  # of one update
    num_bytes: Mapping[str, float]  # of one update, by tier

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
    """Return the plan of `to_json`; `ConfigError` where it is none."""
    try:
        values = json.loads(text)
        if "groups" in values:
            return TwoDPlan(
                groups=tuple(map(_pipeline, values["groups"])),
                sync=Sync(values["sync"]),
                server=values["server"],
                planner=values["planner"],
            )
        return _pipeline(values)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"pipeline record: is no plan ({error}); server and client run different versions of "
            "socflower"
        ) from None


def _pipeline(values: dict[str, Any]) -> PipelinePlan:
    stages = tuple(
        Stage(**{**stage, "devices": tuple(stage["devices"]), "shares": tuple(stage["shares"])})
        for stage in values["stages"]
    )
    return PipelinePlan(**{**values, "stages": stages, "policy": Policy(values["policy"])})
