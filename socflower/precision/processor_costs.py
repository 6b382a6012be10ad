"""Virtual time of training in int8, and on CPU and NPU at once, on a device; its watts then give the joules."""

from dataclasses import dataclass, replace
from typing import ClassVar

from socflower.cluster import Device, ModelProfile, OneProcessor, ProcessorCost, StepCost, step_cost
from socflower.errors import ConfigError
from socflower.plain_numbers import plain_numbers
from socflower.precision.cpu_share import (
    RULES_BY_THROUGHPUT,
    accuracy_floor,
    compute_power_ratio,
    cpu_samples,
    cpu_share,
)

MERGE_PASSES = 3.0
"""Merging reads two gradients and writes one, before the gradient exchange."""

REQUANTISE_PASSES = 1.25
"""Rounding the masters again, after the update, reads float32 and writes int8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Pricing:
    """Training in int8 on a device's fastest int8 processor; in FP32 if the catalogue lists none."""

    arithmetic: ClassVar[str] = "int8"

    def step_cost(self, model: ModelProfile, device: Device, num_samples: int) -> StepCost:
        """Return the cost on that processor."""
        return OneProcessor(processor=device.int8_processor).step_cost(model, device, num_samples)

    def rate(self, model_name: str, device: Device) -> float:
        """Return that processor's sustained FLOP/s."""
        return OneProcessor(processor=device.int8_processor).rate(model_name, device)


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class MixedPricing:
    """A share of a batch on the CPU and, at the same time, on the device's accelerator (F10, F11).

    `alpha` is the confidence that the clients measured. Before a measurement it is 1, which gives the rule's largest
    speedup. `cpu_share`, if given, replaces the rule's CPU share on devices with an accelerator: it is used for a group
    whose accelerators failed. A device without an accelerator trains in FP32 under the rules that depend on throughput
    and is refused under the others.

    With `merge` "weights" nothing is merged in a step, but at every synchronisation: `at_synchronisation`.
    """

    arithmetic: ClassVar[str] = "mixed"
    rule: str = "paper"
    merge: str = "gradients"
    alpha: float = 1.0
    cpu_share: float | None = None

    def with_alpha(self, alpha: float) -> "MixedPricing":
        """Return the same rule with another confidence."""
        return replace(self, alpha=alpha)

    def npu_ratio(self, model_name: str, device: Device) -> float:
        """Return beta from the catalogue's rates (F10); 0 without an accelerator."""
        if device.accelerator is None:
            if self.rule not in (*RULES_BY_THROUGHPUT, "fp32"):
                raise ConfigError(
                    f"mixed precision: device {device.name} has only a {device.default_processor}, and "
                    f"rule = {self.rule!r} needs an int8 processor; use rule = 'paper'"
                )
            return 0.0
        cpu = device.processor(device.default_processor)
        npu = device.processor(device.accelerator)
        return compute_power_ratio(npu.rate(model_name), cpu.rate(model_name))

    def share(self, model_name: str, device: Device) -> float:
        """Return gamma, the CPU's share of a device's samples."""
        ratio = self.npu_ratio(model_name, device)
        if self.cpu_share is not None and device.accelerator is not None:
            return self.cpu_share
        return cpu_share(self.rule, self.alpha, ratio)

    def samples(self, model_name: str, device: Device, num_samples: int) -> dict[str, int]:
        """Return how many of a device's samples each of its processors takes."""
        floor = accuracy_floor(self.rule, self.alpha) if self.cpu_share is None else 0.0
        on_cpu = cpu_samples(num_samples, self.share(model_name, device), floor)
        beside = {} if device.accelerator is None else {device.accelerator: num_samples - on_cpu}
        return {device.default_processor: on_cpu, **beside}

    def step_cost(self, model: ModelProfile, device: Device, num_samples: int) -> StepCost:
        """Return the cost of both processors, split as the trainer splits samples, and of merging."""
        on_cpu = self.samples(model.name, device, num_samples)[device.default_processor]
        cost = step_cost(model, device, on_cpu)
        if on_cpu == num_samples or device.accelerator is None:
            return cost
        npu = step_cost(model, device, num_samples - on_cpu, device.accelerator)
        per_step = self.merge == "gradients"
        beside = ProcessorCost(
            processor=npu.processor, forward_s=npu.forward_s, backward_s=npu.backward_s
        )
        pass_s = model.weight_bytes / device.memory_bytes_per_s
        return replace(
            cost,
            # With a single processor there is nothing to merge.
            merge_s=MERGE_PASSES * pass_s if on_cpu and per_step else 0.0,
            concurrent=(beside,),
            update_s=cost.update_s + REQUANTISE_PASSES * pass_s * per_step,
        )

    def rate(self, model_name: str, device: Device) -> float:
        """Return the FLOP/s of both processors together under the rule: a step ends with the slower one."""
        gamma = self.share(model_name, device)
        cpu_s = gamma / device.processor(device.default_processor).rate(model_name)
        if device.accelerator is None:
            return 1.0 / cpu_s
        npu_s = (1.0 - gamma) / device.processor(device.accelerator).rate(model_name)
        return 1.0 / max(cpu_s, npu_s)

    @property
    def at_synchronisation(self) -> "WeightMerge | None":
        """The pricing of a step in which members merge weights and exchange them; None if gradients are merged."""
        return None if self.merge == "gradients" or self.rule == "fp32" else WeightMerge()


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightMerge:
    """Merging each member's int8 model with the FP32 one, and rounding the group's mean (Eq. 5)."""

    def step_cost(self, model: ModelProfile, device: Device, num_samples: int) -> StepCost:
        """Return the memory passes over the weights, without any samples; nothing without an accelerator."""
        cost = replace(step_cost(model, device, 1), forward_s=0.0, backward_s=0.0)
        passes = MERGE_PASSES + REQUANTISE_PASSES if device.accelerator else 0.0
        return replace(cost, update_s=passes * model.weight_bytes / device.memory_bytes_per_s)

    def rate(self, model_name: str, device: Device) -> float:
        """Return the rate of the default processor, which merges."""
        return device.processor(device.default_processor).rate(model_name)
