"""What training in int8, and on CPU and NPU at once, costs a device in virtual time; joules follow from its watts."""

from dataclasses import dataclass, replace

from socflower.cluster import Device, ModelProfile, OneProcessor, ProcessorCost, StepCost, step_cost
from socflower.errors import ConfigError
from socflower.precision.mixed_precision import (
    RULES_BY_THROUGHPUT,
    accuracy_floor,
    compute_power_ratio,
    cpu_samples,
    cpu_share,
)

MERGE_PASSES = 3.0
"""Merging reads two gradients and writes one, before they are exchanged."""

REQUANTISE_PASSES = 1.25
"""Rounding the masters anew reads float32 and writes int8, after the update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Pricing:
    """Training in int8 on a device's fastest int8 processor; in FP32 where the catalogue knows of none."""

    def step_cost(self, model: ModelProfile, device: Device, num_samples: int) -> StepCost:
        """Return the cost on that processor."""
        return OneProcessor(processor=device.int8_processor).step_cost(model, device, num_samples)

    def rate(self, model_name: str, device: Device) -> float:
        """Return that processor's sustained FLOP/s."""
        return OneProcessor(processor=device.int8_processor).rate(model_name, device)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedPricing:
    """A share of a batch on the CPU and, at the same time, on the device's accelerator (F10, F11).

    `alpha` is what the clients measured; 1, before they have, is the most that the rule can gain. `cpu_share`, if
    given, is the share of a CPU beside an accelerator whatever the rule says: that of a group whose accelerators
    failed. A device without an accelerator trains in FP32 under the rules that follow throughput, and is refused
    under the others.
    """

    rule: str = "paper"
    alpha: float = 1.0
    cpu_share: float | None = None

    def with_alpha(self, alpha: float) -> "MixedPricing":
        """Return the same rule at another confidence."""
        return replace(self, alpha=alpha)

    def npu_ratio(self, model_name: str, device: Device) -> float:
        """Return beta from the catalogue's rates (F10); 0 without an accelerator."""
        if device.accelerator is None:
            if self.rule not in (*RULES_BY_THROUGHPUT, "fp32"):
                raise ConfigError(f"mixed precision: device {device.name} has no int8 processor beside its "
                                  f"{device.default_processor}, which rule = {self.rule!r} needs; use rule = 'paper'")
            return 0.0
        cpu, npu = device.processor(device.default_processor), device.processor(device.accelerator)
        return compute_power_ratio(npu.rate(model_name), cpu.rate(model_name))

    def share(self, model_name: str, device: Device) -> float:
        """Return gamma, the CPU's share of a device's samples."""
        ratio = self.npu_ratio(model_name, device)
        if self.cpu_share is not None and device.accelerator is not None:
            return self.cpu_share
        return cpu_share(self.rule, self.alpha, ratio)

    def step_cost(self, model: ModelProfile, device: Device, num_samples: int) -> StepCost:
        """Return the cost of both processors, split as the trainer splits samples, and of merging."""
        floor = accuracy_floor(self.rule, self.alpha) if self.cpu_share is None else 0.0
        on_cpu = cpu_samples(num_samples, self.share(model.name, device), floor)
        cost = step_cost(model, device, on_cpu)
        if on_cpu == num_samples or device.accelerator is None:
            return cost
        npu = step_cost(model, device, num_samples - on_cpu, device.accelerator)
        pass_s = model.weight_bytes / device.memory_bytes_per_s
        return replace(
            cost,
            # One processor's gradient has nothing to merge with.
            merge_s=MERGE_PASSES * pass_s if on_cpu else 0.0,
            beside=(ProcessorCost(processor=npu.processor, forward_s=npu.forward_s, backward_s=npu.backward_s),),
            update_s=cost.update_s + REQUANTISE_PASSES * pass_s,
        )

    def rate(self, model_name: str, device: Device) -> float:
        """Return the FLOP/s of both together under the rule: the slower of the two ends a step."""
        gamma = self.share(model_name, device)
        cpu_s = gamma / device.processor(device.default_processor).rate(model_name)
        if device.accelerator is None:
            return 1.0 / cpu_s
        return 1.0 / max(cpu_s, (1.0 - gamma) / device.processor(device.accelerator).rate(model_name))
