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
"""A backward pass multiplies twice per weight (input gradient, weight gradient), a forward pass once."""


def bucket_starts(num_bytes: Sequence[float], num_buckets: int) -> list[int]:
    """Return the index of the first tensor of each bucket of about equal bytes; at most one bucket per tensor (F8a).

    Rings and virtual time divide a model by this rule.
    """
    share = sum(num_bytes) / max(1, min(num_buckets, len(num_bytes)))
    starts: list[int] = []
    before = 0.0
    for index, own in enumerate(num_bytes):
        # A tensor begins a bucket if its middle is past the bytes of the buckets so far.
        if not starts or before + own / 2 >= share * len(starts):
            starts.append(index)
        before += own
    return starts


def forward_share(forward_flops: float, training_flops: float) -> float:
    """Return the forward pass's fraction of the training FLOPs; for no FLOPs, that of a layer whose weights train."""
    return forward_flops / training_flops if training_flops else 1.0 / (1.0 + BACKWARD_TO_FORWARD)


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient:
    """The gradient of one trained tensor."""

    num_bytes: float
    # The fraction of the backward pass after which it is complete.
    done: float
    # Of the tensor; empty if it is not known, or is a single number.
    shape: tuple[int, ...] = ()


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class LayerProfile:
    """One layer, per sample: a module, or operations of a graph. Multiply and add count as two operations."""

    name: str
    forward_flops: float
    # Results that it makes; if gradients pass through some of its operations only, the results of these.
    output_bytes: float
    # Bytes and number of the weights that are trained.
    weight_bytes: float = 0.0
    num_tensors: int = 0
    # The type of a module.
    kind: str = ""
    # Of the weights that are not trained.
    frozen_bytes: float = 0.0
    # FLOPs of the backward pass for each of the forward pass.
    backward_to_forward: float = BACKWARD_TO_FORWARD
    # Whether gradients pass through it, so that its outputs are kept.
    in_backward: bool = True
    # All tensors that cross a cut behind it, if it is a layer of a chain; a cut may follow any but the last.
    crossing_bytes: float = 0.0
    # Primitive operations, each of which has a fixed cost.
    num_operations: int = 1

    @property
    def backward_flops(self) -> float:
        """Operations of one sample's backward pass."""
        return self.forward_flops * self.backward_to_forward

    @property
    def kept_bytes(self) -> float:
        """Results that it keeps from its forward to its backward pass."""
        return self.output_bytes if self.in_backward else 0.0

    @property
    def training_flops(self) -> float:
        """Operations of one sample's forward and backward pass."""
        return self.forward_flops * (1.0 + self.backward_to_forward)

    @property
    def forward_share(self) -> float:
        """The forward pass's fraction of the training FLOPs; without FLOPs, that of a layer that trains."""
        return forward_share(self.forward_flops, self.training_flops)


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProfile:
    """All layers of a model in the order in which they run."""

    name: str
    layers: tuple[LayerProfile, ...]
    # Of one sample.
    input_bytes: float
    # The device of the profiled pass; "meta" computes no values.
    ran_on: str = field(default="meta", compare=False)
    # In the order in which rings send them; empty if their sizes are not known.
    gradients: tuple[Gradient, ...] = ()

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
        """The forward pass's fraction of the training FLOPs."""
        return forward_share(self.forward_flops, self.training_flops)

    @property
    def trained_share(self) -> float:
        """Training FLOPs, relative to those with all weights trained, for which timings were measured."""
        if not self.forward_flops:
            return 1.0
        return self.training_flops / (self.forward_flops * (1.0 + BACKWARD_TO_FORWARD))

    @property
    def weight_bytes(self) -> float:
        """Bytes of all trainable weights; also of one gradient exchange."""
        return sum(layer.weight_bytes for layer in self.layers)

    @property
    def int8_bytes(self) -> float:
        """The same with a byte for each value of tensors of two and more dimensions, as int8 weights travel."""
        coded = sum(each.num_bytes for each in self.gradients if len(each.shape) > 1)
        return self.weight_bytes - 0.75 * coded

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
        kept = sum(layer.kept_bytes for layer in self.layers)
        passing = [layer.output_bytes for layer in self.layers if not layer.in_backward]
        return self.input_bytes + kept + max(passing, default=0.0)

    def training_memory_bytes(self, batch_size: int, optimizer_copies: float = 1.0) -> float:
        """Return the peak memory of a training step: weights, gradients, optimiser state, activations.

        `optimizer_copies` of the trained weights: 1 for SGD with momentum, 2 for Adam. Frozen weights have neither
        gradients nor optimiser state.
        """
        # Weights, gradients and optimiser state.
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
    # Processors that compute other samples of the share at the same time.
    concurrent: tuple[ProcessorCost, ...] = ()
    # On `processor`, to merge its gradients with theirs before the exchange.
    merge_s: float = 0.0

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
    """What training in an arithmetic costs on a device: FP32 below, others in `socflower.precision`."""

    def step_cost(self, model: ModelProfile, device: Device, num_samples: int) -> StepCost:
        """Return a device's cost for `num_samples` of a batch and one update of the weights."""
        ...

    def rate(self, model_name: str, device: Device) -> float:
        """Return the FLOP/s of all processors of a share: the capacity for shares and plans (F4)."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class OneProcessor:
    """Training on one processor of each device: the named one if the device has it, else its default."""

    # As in `DeviceReport`: empty means FP32.
    arithmetic: ClassVar[str] = ""
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
    """Return a device's cost for `num_samples` of a batch and one update of the weights (F1).

    compute = samples x training FLOPs / sustained rate + layers x fixed overhead, so T_train(BS) of F1 grows less than
    in proportion to the batch. If the device's profile has timings of the model, compute is the measured time, less
    what frozen weights save. It is divided between the passes in proportion to their FLOPs.
    update = passes over the weights / memory bandwidth. A member without samples only updates.
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
    own = device.processor(processor)
    timings = own.timings.get(model.name)
    if timings is not None:
        return timings.seconds(num_samples) * model.trained_share
    if not num_samples:
        return 0.0
    arithmetic_s = num_samples * model.training_flops / own.rate(model.name)
    return arithmetic_s + len(model.layers) * device.layer_overhead_s


def sustained_rates(
    cluster: Cluster, model_name: str = "", pricing: Pricing = FP32
) -> tuple[float, ...]:
    """Return every SoC's FLOP/s on a model, in SoC order: the capacities for shares and plans (F4)."""
    devices = map(cluster.device_of, range(cluster.num_socs))
    return tuple(pricing.rate(model_name, device) for device in devices)
