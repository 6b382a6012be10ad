"""THE cost model: every planner and every simulated second takes its compute costs from here."""

from dataclasses import dataclass
from typing import Protocol

from socflower.cluster.device import Device
from socflower.cluster.profile import BACKWARD_TO_FORWARD, ModelProfile
from socflower.cluster.topology import Cluster

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
    beside: tuple[ProcessorCost, ...] = ()  # processors that do further samples of the share at the same time
    merge_s: float = 0.0  # of `processor`, to join its gradients with theirs before they are exchanged

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward pass of `processor`."""
        return self.forward_s + self.backward_s

    @property
    def processors(self) -> tuple[ProcessorCost, ...]:
        """The work of each processor that has any, `processor` first."""
        own = ProcessorCost(processor=self.processor, forward_s=self.forward_s, backward_s=self.backward_s)
        return tuple(part for part in (own, *self.beside) if part.compute_s) or (own,)


class Pricing(Protocol):
    """What an arithmetic costs on a device: FP32 here, others in `precision`, which `hierarchy` need not know."""

    def step_cost(self, model: ModelProfile, device: Device, num_samples: int) -> StepCost:
        """Return what a device needs for `num_samples` of a batch and one update of the weights."""
        ...

    def rate(self, model_name: str, device: Device) -> float:
        """Return the FLOP/s of all that works on a share: the capacity that shares and plans go by (F4)."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class OneProcessor:
    """Training on one processor of each device: the named one where a device has it, else its default one."""

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


def step_cost(model: ModelProfile, device: Device, num_samples: int, processor: str | None = None) -> StepCost:
    """Return what a device needs for `num_samples` of a batch and one update of the weights.

    compute = samples x training FLOPs / sustained rate + layers x fixed overhead, so that T_train(BS) of F1 is less
    than proportional in the batch; or, where the device's profile has timings of the model, what was measured.
    Either is halved between the passes like the FLOPs. update = passes over the weights / memory bandwidth. No
    samples, no compute: such a member only updates.
    """
    name = processor or device.default_processor
    compute_s = compute_seconds(model, device, num_samples, name)
    forward_share = 1.0 / (1.0 + BACKWARD_TO_FORWARD)
    return StepCost(
        forward_s=compute_s * forward_share,
        backward_s=compute_s * (1.0 - forward_share),
        update_s=UPDATE_PASSES * model.weight_bytes / device.memory_bytes_per_s,
        processor=name,
    )


def compute_seconds(model: ModelProfile, device: Device, num_samples: int, processor: str) -> float:
    """Return the seconds of forward and backward pass of `num_samples` on one processor."""
    timings = device.processor(processor).timings.get(model.name)
    if timings is not None:
        return timings.seconds(num_samples)
    arithmetic_s = num_samples * model.training_flops / device.processor(processor).rate(model.name)
    return arithmetic_s + (len(model.layers) * device.layer_overhead_s if num_samples else 0.0)


def sustained_rates(cluster: Cluster, model_name: str = "", pricing: Pricing = FP32) -> tuple[float, ...]:
    """Return every SoC's FLOP/s on a model, in SoC order: the capacities that shares and plans go by (F4)."""
    return tuple(pricing.rate(model_name, cluster.device_of(soc)) for soc in range(cluster.num_socs))
