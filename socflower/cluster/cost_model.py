"""The cost model: a model's cost by layer, and the time of a training step on a device.

All planners and the simulator take compute costs from here. `socflower.model_graph.layer_profile`
makes profiles of torch modules.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from socflower.cluster.device import Device
from socflower.cluster.topology import Cluster
from socflower.errors import ConfigError
from socflower.plain_numbers import plain_numbers

BACKWARD_TO_FORWARD = 2.0
"""A backward pass multiplies twice per weight (input gradient, weight gradient) where a forward pass does once."""


def bucket_starts(num_bytes: Sequence[float], num_buckets: int) -> list[int]:
    """Return where buckets of about equal bytes begin in a sequence of tensors; at most one bucket a tensor (F8a).

    Rings and virtual time divide a model by this rule.
    """
    share = sum(num_bytes) / max(1, min(num_buckets, len(num_bytes)))
    starts: list[int] = []
    before = 0.0
    for index, own in enumerate(num_bytes):
        if not starts or before + own / 2 >= share * len(starts):
            starts.append(index)
        before += own
    return starts


def forward_share(forward_flops: float, training_flops: float) -> float:
    """Return the part of the forward pass in training; without operations, that of weights that are trained."""
    return forward_flops / training_flops if training_flops else 1.0 / (1.0 + BACKWARD_TO_FORWARD)


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient:
    """The gradient of one trained tensor."""

    num_bytes: float
    done: float  # the part of the backward pass after which it is complete


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class LayerProfile:
    """One layer, per sample. Multiply and add count as two operations."""

    name: str
    kind: str
    forward_flops: float
    output_bytes: float
    weight_bytes: float  # of the weights that are trained
    num_tensors: int  # that are trained
    frozen_bytes: float = 0.0  # of the weights that are not
    backward_to_forward: float = (
        BACKWARD_TO_FORWARD  # FLOPs of the backward pass for each of the forward pass
    )
    in_backward: bool = True  # whether gradients pass through it, so that its outputs are kept

    @property
    def training_flops(self) -> float:
        """Operations of one sample's forward and backward pass."""
        return self.forward_flops * (1.0 + self.backward_to_forward)

    @property
    def forward_share(self) -> float:
        """The part of the forward pass in them; for a layer without operations, that of one that trains."""
        return forward_share(self.forward_flops, self.training_flops)


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProfile:
    """All layers of a model in the order in which they run."""

    name: str
    layers: tuple[LayerProfile, ...]
    input_bytes: float  # of one sample
    ran_on: str = field(
        default="meta", compare=False
    )  # device of the profiled pass; "meta" computes no values
    gradients: tuple[
        Gradient, ...
    ] = ()  # in the order in which rings send them; empty: of no known sizes

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError(f"model {self.name}: has no layers to profile")

    @property
    def forward_flops(self) -> float:
        """Operations of one sample's forward pass."""
        return sum(layer.forward_flops for layer in self.layers)

    @property
    def training_flops(self) -> float:
        """Operations of one sample's forward and backward pass."""
        return sum(layer.training_flops for layer in self.layers)

    @property
    def forward_share(self) -> float:
        """The part of the forward pass in them."""
        return forward_share(self.forward_flops, self.training_flops)

    @property
    def trained_share(self) -> float:
        """Its training FLOPs as a part of those with all weights trained, which measured timings are of."""
        return (
            self.training_flops / (self.forward_flops * (1.0 + BACKWARD_TO_FORWARD))
            if self.forward_flops
            else 1.0
        )

    @property
    def weight_bytes(self) -> float:
        """Bytes of all trainable weights; also of one gradient exchange."""
        return sum(layer.weight_bytes for layer in self.layers)

    @property
    def frozen_bytes(self) -> float:
        """Bytes of the weights that are not trained (`requires_grad` False): they take memory and stay in place."""
        return sum(layer.frozen_bytes for layer in self.layers)

    @property
    def parameter_bytes(self) -> float:
        """Bytes of all weights, trained or not."""
        return self.weight_bytes + self.frozen_bytes

    @property
    def num_tensors(self) -> int:
        """Number of trainable tensors, each one message in a gradient exchange."""
        return sum(layer.num_tensors for layer in self.layers)

    @property
    def activation_bytes(self) -> float:
        """Bytes of one sample's activations: those kept for the backward pass, and the largest of the others."""
        kept = sum(layer.output_bytes for layer in self.layers if layer.in_backward)
        return (
            self.input_bytes
            + kept
            + max((0.0, *(x.output_bytes for x in self.layers if not x.in_backward)))
        )

    def training_memory_bytes(self, batch_size: int, optimizer_copies: float = 1.0) -> float:
        """Return the peak memory of a training step: weights, gradients, optimiser state, activations.

        `optimizer_copies` of the trained weights: 1 for SGD with momentum, 2 for Adam. Frozen weights have neither
        gradients nor optimiser state.
        """
        trained = self.weight_bytes * (2.0 + optimizer_copies)
        return trained + self.frozen_bytes + self.activation_bytes * batch_size


UPDATE_PASSES = 5.0
"""SGD with momentum reads weight, gradient and momentum and writes weight and momentum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorCost:
    """A processor's part of a training step, at speed factor 1."""

    processor: str
    forward_s: float
    backward_s: float

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward pass."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """One device's share of one training step, at speed factor 1."""

    forward_s: float
    backward_s: float
    update_s: float
    processor: str
    concurrent: tuple[
        ProcessorCost, ...
    ] = ()  # processors that compute other samples of the share concurrently
    merge_s: float = 0.0  # of `processor`, to merge its gradients with theirs before the exchange

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward pass of `processor`."""
        return self.forward_s + self.backward_s

    @property
    def processors(self) -> tuple[ProcessorCost, ...]:
        """The cost of each processor that takes part, `processor` first."""
        own = ProcessorCost(
            processor=self.processor, forward_s=self.forward_s, backward_s=self.backward_s
        )
        return tuple(part for part in (own, *self.concurrent) if part.compute_s) or (own,)


class Pricing(Protocol):
    """The cost of an arithmetic on a device: FP32 here, others in `precision`, on which `hierarchy` does not depend."""

    def step_cost(self, model: ModelProfile, device: Device, num_samples: int) -> StepCost:
        """Return a device's cost for `num_samples` of a batch and one update of the weights."""
        ...

    def rate(self, model_name: str, device: Device) -> float:
        """Return the FLOP/s of all processors of a share: the capacity for shares and plans (F4)."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class OneProcessor:
    """Training on one processor of each device: the named one if the device has it, else its default."""

    arithmetic: ClassVar[str] = ""  # as of `DeviceReport`: FP32
    processor: str | None = None

    def step_cost(self, model: ModelProfile, device: Device, num_samples: int) -> StepCost:
        """Return `step_cost` on that processor."""
        return step_cost(model, device, num_samples, self.on(device))

    def rate(self, model_name: str, device: Device) -> float:
        """Return that processor's sustained FLOP/s."""
        return device.processor(self.on(device)).rate(model_name)

    def on(self, device: Device) -> str:
        """Return the processor that trains on a device."""
        if self.processor is not None and self.processor in device.processors:
            return self.processor
        return device.default_processor


FP32 = OneProcessor()
"""Every device on its default processor."""


def step_cost(
    model: ModelProfile, device: Device, num_samples: int, processor: str | None = None
) -> StepCost:
    """Return a device's cost for `num_samples` of a batch and one update of the weights.

    compute = samples x training FLOPs / sustained rate + layers x fixed overhead, so that T_train(BS) of F1 is less
    than proportional in the batch; or, where the device's profile has timings of the model, the measured time, less
    what frozen weights save.
    Either is divided between the passes like the FLOPs. update = passes over the weights / memory bandwidth. A member
    without samples only updates.
    """
    name = processor or device.default_processor
    compute_s = compute_seconds(model, device, num_samples, name)
    return StepCost(
        forward_s=compute_s * model.forward_share,
        backward_s=compute_s * (1.0 - model.forward_share),
        update_s=UPDATE_PASSES * model.weight_bytes / device.memory_bytes_per_s,
        processor=name,
    )


def compute_seconds(model: ModelProfile, device: Device, num_samples: int, processor: str) -> float:
    """Return the seconds of forward and backward pass of `num_samples` on one processor."""
    timings = device.processor(processor).timings.get(model.name)
    if timings is not None:
        return timings.seconds(num_samples) * model.trained_share
    arithmetic_s = num_samples * model.training_flops / device.processor(processor).rate(model.name)
    return arithmetic_s + (len(model.layers) * device.layer_overhead_s if num_samples else 0.0)


def sustained_rates(
    cluster: Cluster, model_name: str = "", pricing: Pricing = FP32
) -> tuple[float, ...]:
    """Return every SoC's FLOP/s on a model, in SoC order: the capacities for shares and plans (F4)."""
    return tuple(
        pricing.rate(model_name, cluster.device_of(soc)) for soc in range(cluster.num_socs)
    )
