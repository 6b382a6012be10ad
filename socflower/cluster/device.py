"""A device: compute rates and power of one SoC, board computer or server."""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from socflower.errors import ConfigError, require_range
from socflower.plain_numbers import plain_numbers


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimings:
    """Measured seconds of forward and backward pass, without the update, at several batch sizes."""

    batches: tuple[int, ...]  # samples, rising
    step_s: tuple[float, ...]  # of the whole batch

    def __post_init__(self) -> None:
        if not self.batches or len(self.batches) != len(self.step_s):
            raise ConfigError(
                f"timings: need as many step_s as batches and at least one, got {len(self.step_s)} "
                f"for {len(self.batches)}"
            )
        if self.batches[0] < 1 or any(after <= before for before, after in pairwise(self.batches)):
            raise ConfigError(
                f"timings: batches must rise from 1 or more, got {list(self.batches)}"
            )
        if not all(0.0 < seconds < math.inf for seconds in self.step_s):
            raise ConfigError(
                f"timings: step_s must be above 0 and finite, got {list(self.step_s)}"
            )

    def seconds(self, num_samples: float) -> float:
        """Return the seconds of a batch; 0.0 for no samples. More samples never take less.

        Between two measured batches: linear interpolation. Above the largest: extrapolation with the slope of the last
        segment (with one measurement, or where noise leaves no slope: with the seconds per sample). Below the smallest:
        extrapolation of the first segment, whose value at 0 is the fixed cost of a step, but at least in proportion;
        with one measurement, which has no fixed cost, in proportion. Where a larger batch was measured faster than a
        smaller one, which is noise, the smaller one's seconds are used for both.
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
            slope_s = (rising_s[-1] - rising_s[-2]) / (batches[-1] - batches[-2]) or rising_s[
                -1
            ] / batches[-1]
            return rising_s[-1] + slope_s * (num_samples - batches[-1])
        share = (num_samples - batches[right - 1]) / (batches[right] - batches[right - 1])
        return rising_s[right - 1] + share * (rising_s[right] - rising_s[right - 1])


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTimings:
    """Measured seconds of one layer's forward and backward pass."""

    name: str
    kind: str
    timings: StepTimings


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class Processor:
    """One processor that trains: its sustained rate, not its peak, and the device's watts while it works."""

    name: str
    flops_per_s: float  # sustained over a whole training step; multiply and add are two operations
    active_w: float  # of the whole device while this processor trains
    number_format: str = "fp32"
    flops_per_s_by_model: Mapping[str, float] = field(
        default_factory=dict
    )  # measured; overrides `flops_per_s`
    timings: Mapping[str, StepTimings] = field(
        default_factory=dict
    )  # by model; measured, overrides all rates
    layer_timings: Mapping[str, tuple[LayerTimings, ...]] = field(
        default_factory=dict
    )  # by model, in running order
    shares: str = ""  # the processor with the same silicon; the two cannot run at the same time

    def __post_init__(self) -> None:
        require_range(
            f"processor {self.name}", above=0, flops_per_s=self.flops_per_s, active_w=self.active_w
        )
        for model, rate in self.flops_per_s_by_model.items():
            require_range(f"processor {self.name}, model {model}", above=0, flops_per_s=rate)

    def rate(self, model_name: str) -> float:
        """Return the sustained FLOP/s on a model, measured where the catalogue has a measurement."""
        return self.flops_per_s_by_model.get(model_name, self.flops_per_s)


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One kind of machine. Values with their sources are in `catalog.toml` and in device profiles."""

    name: str
    processors: Mapping[str, Processor]
    idle_w: float
    network_w: float  # drawn on top of the rest while the network interface is busy
    memory_bytes: float
    memory_bytes_per_s: float  # of a streaming update, not the data sheet's peak
    layer_overhead_s: (
        float  # fixed cost of a layer in a training step; why small batches are less efficient
    )

    def __post_init__(self) -> None:
        if not self.processors:
            raise ConfigError(
                f"device {self.name}: has no processor; give at least [processor.cpu]"
            )
        require_range(
            f"device {self.name}",
            above=0,
            memory_bytes=self.memory_bytes,
            memory_bytes_per_s=self.memory_bytes_per_s,
        )
        require_range(
            f"device {self.name}",
            least=0,
            idle_w=self.idle_w,
            network_w=self.network_w,
            layer_overhead_s=self.layer_overhead_s,
        )
        for name, processor in self.processors.items():
            if not processor.shares:
                continue
            others = [
                other
                for other, entry in self.processors.items()
                if other != name and not entry.shares
            ]
            if processor.shares not in others:
                raise ConfigError(
                    f"device {self.name}: processor {name} shares = {processor.shares!r} must name "
                    f"another processor that has silicon of its own: {', '.join(others) or 'none here'}"
                )

    def processor(self, name: str) -> Processor:
        """Return a processor by name; `ConfigError` lists what the device has."""
        try:
            return self.processors[name]
        except KeyError:
            raise ConfigError(
                f"device {self.name}: no processor {name!r}; it has "
                f"{', '.join(sorted(self.processors))}"
            ) from None

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
        return self._fastest_int8(
            lambda name: self.silicon(name) != self.silicon(self.default_processor)
        )

    def silicon(self, name: str) -> str:
        """Return the processor whose silicon a processor uses: its own name if it shares none."""
        return self.processor(name).shares or name

    def _fastest_int8(self, suits: Callable[[str], bool]) -> str | None:
        names = [
            name
            for name, processor in self.processors.items()
            if processor.number_format == "int8" and suits(name)
        ]
        return max(names, key=lambda name: self.processors[name].flops_per_s, default=None)
