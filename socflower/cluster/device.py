"""A device: compute rates and power of one SoC, board computer or server."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Annotated

from pydantic import Field

from socflower.errors import ConfigError
from socflower.field_rules import OneOf, checked

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
NumberFormat = Annotated[str, OneOf(("fp32", "int8"))]


@checked
class StepTimings:
    """Measured seconds of forward and backward pass, without the update, at several batch sizes."""

    # In samples, ascending.
    batches: tuple[Annotated[int, Field(ge=1)], ...]
    # Of the whole batch.
    step_s: tuple[Positive, ...]

    def check(self) -> None:
        """Refuse batches that do not ascend or have no time each."""
        if not self.batches or len(self.batches) != len(self.step_s):
            raise ConfigError(f"need one step_s for each of batches = {list(self.batches)}")
        if any(after <= before for before, after in pairwise(self.batches)):
            raise ConfigError(f"batches = {list(self.batches)} must ascend")

    def seconds(self, num_samples: float) -> float:
        """Return the seconds of a batch; 0.0 for no samples. More samples never take less.

        Between two measured batches it interpolates linearly. Above the largest it extrapolates with the slope of the
        last segment, or with the seconds per sample if there is only one measurement or noise leaves no slope. Below
        the smallest it extrapolates the first segment, whose value at 0 is the fixed cost of a step, but not below
        proportion; one measurement, which shows no fixed cost, is scaled in proportion. If a larger batch was measured
        faster than a smaller one, which is noise, both take the smaller one's seconds.
        """
        if num_samples <= 0:
            return 0.0
        batches, rising_s = self.batches, tuple(accumulate(self.step_s, max))
        right = bisect_left(batches, num_samples)
        if right < len(batches) and batches[right] == num_samples:
            return rising_s[right]
        if len(batches) == 1:
            return rising_s[0] * num_samples / batches[0]
        if num_samples < batches[0]:
            slope_s = (rising_s[1] - rising_s[0]) / (batches[1] - batches[0])
            line_s = rising_s[0] - slope_s * (batches[0] - num_samples)
            return max(line_s, rising_s[0] * num_samples / batches[0])
        if num_samples > batches[-1]:
            slope_s = (rising_s[-1] - rising_s[-2]) / (batches[-1] - batches[-2])
            sample_s = slope_s or rising_s[-1] / batches[-1]
            return rising_s[-1] + sample_s * (num_samples - batches[-1])
        share = (num_samples - batches[right - 1]) / (batches[right] - batches[right - 1])
        return rising_s[right - 1] + share * (rising_s[right] - rising_s[right - 1])


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTimings:
    """Measured seconds of one layer's forward and backward pass."""

    name: str
    kind: str
    timings: StepTimings


@checked
class Processor:
    """One processor that trains: its sustained rate, not its peak, and the device's watts while it works."""

    name: str
    # Sustained over a whole training step; multiply and add are two operations.
    flops_per_s: Positive
    # Of the whole device while this processor trains.
    active_w: Positive
    number_format: NumberFormat = "fp32"
    # Measured rates by model; they override `flops_per_s`.
    flops_per_s_by_model: dict[str, Positive] = field(default_factory=dict)
    # Measured times by model; they override all rates.
    timings: Mapping[str, StepTimings] = field(default_factory=dict)
    # By model, in running order.
    layer_timings: Mapping[str, tuple[LayerTimings, ...]] = field(default_factory=dict)
    # The processor with the same silicon; the two cannot run at the same time.
    shares: str = ""

    def rate(self, model_name: str) -> float:
        """Return the sustained FLOP/s on a model, the measured one if there is one."""
        return self.flops_per_s_by_model.get(model_name, self.flops_per_s)


@checked
class Device:
    """One kind of machine. Values with their sources are in `catalog.toml` and in device profiles."""

    name: str
    processors: Mapping[str, Processor]
    idle_w: NotNegative
    # Drawn on top of the rest while the network interface is busy.
    network_w: NotNegative
    memory_bytes: Positive
    # Of a streaming update, not the data sheet's peak.
    memory_bytes_per_s: Positive
    # Fixed cost of a layer in a training step: it makes small batches less efficient.
    layer_overhead_s: NotNegative

    def check(self) -> None:
        """Refuse a device without processors, or with one that shares silicon with an unfit one."""
        if not self.processors:
            raise ConfigError(f"device {self.name}: has no processor; give [processor.cpu]")
        owners = {name for name, processor in self.processors.items() if not processor.shares}
        for name, processor in self.processors.items():
            if processor.shares and processor.shares not in owners:
                raise ConfigError(
                    f"processor {name} shares = {processor.shares!r} must be one that shares none: "
                    f"{', '.join(sorted(owners))}"
                )

    def processor(self, name: str) -> Processor:
        """Return a processor by name; `ConfigError` lists what the device has."""
        if name not in self.processors:
            known = ", ".join(sorted(self.processors))
            raise ConfigError(f"device {self.name}: no processor {name!r}; it has {known}")
        return self.processors[name]

    @property
    def default_processor(self) -> str:
        """The default processor for FP32 training: the first one listed."""
        return next(iter(self.processors))

    @property
    def int8_processor(self) -> str | None:
        """The fastest int8 processor by `flops_per_s`, the first listed of equals; None if there is none."""
        return self._fastest_int8(lambda _: True)

    @property
    def accelerator(self) -> str | None:
        """The fastest int8 processor that can run concurrently with the default one; None if there is none."""
        own = self.silicon(self.default_processor)
        return self._fastest_int8(lambda name: self.silicon(name) != own)

    def silicon(self, name: str) -> str:
        """Return the name of the processor whose silicon a processor uses: its own name if it shares none."""
        return self.processor(name).shares or name

    def _fastest_int8(self, suits: Callable[[str], bool]) -> str | None:
        names = [
            name
            for name, processor in self.processors.items()
            if processor.number_format == "int8" and suits(name)
        ]
        return max(names, key=lambda name: self.processors[name].flops_per_s, default=None)
