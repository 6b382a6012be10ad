"""A device: what one SoC, board computer or server computes per second and draws in watts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from socflower.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Processor:
    """One processor that trains: its sustained rate, not its peak, and the device's watts while it works."""

    name: str
    flops_per_s: float  # sustained over a whole training step; multiply and add are two operations
    active_w: float  # of the whole device while this processor trains
    number_format: str = "fp32"
    flops_per_s_by_model: Mapping[str, float] = field(default_factory=dict)  # measured; wins over `flops_per_s`

    def __post_init__(self) -> None:
        for key, value in (("flops_per_s", self.flops_per_s), ("active_w", self.active_w),
                           *self.flops_per_s_by_model.items()):
            if not value > 0:
                raise ConfigError(f"processor {self.name}: {key} must be above 0, got {value}")

    def rate(self, model_name: str) -> float:
        """Return the sustained FLOP/s on a model, measured where the catalogue has a measurement."""
        return self.flops_per_s_by_model.get(model_name, self.flops_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One kind of machine. Figures with their sources stand in `catalog.toml`."""

    name: str
    processors: Mapping[str, Processor]
    idle_w: float
    network_w: float  # drawn on top of the rest while the network interface is busy
    memory_bytes: float
    memory_bytes_per_s: float  # what a streaming update sees, not the data sheet's peak
    layer_overhead_s: float  # fixed cost of a layer in a training step; why small batches are less efficient

    def __post_init__(self) -> None:
        if not self.processors:
            raise ConfigError(f"device {self.name}: has no processor; give at least [processor.cpu]")
        for key in ("memory_bytes", "memory_bytes_per_s"):
            if not getattr(self, key) > 0:
                raise ConfigError(f"device {self.name}: {key} must be above 0, got {getattr(self, key)}")
        for key in ("idle_w", "network_w", "layer_overhead_s"):
            if not getattr(self, key) >= 0:
                raise ConfigError(f"device {self.name}: {key} must not be negative, got {getattr(self, key)}")

    def processor(self, name: str) -> Processor:
        """Return a processor by name; `ConfigError` lists what the device has."""
        try:
            return self.processors[name]
        except KeyError:
            raise ConfigError(f"device {self.name}: no processor {name!r}; it has "
                              f"{', '.join(sorted(self.processors))}") from None

    @property
    def default_processor(self) -> str:
        """The processor that trains in FP32 when nothing else is said: the first one listed."""
        return next(iter(self.processors))
