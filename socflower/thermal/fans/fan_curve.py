"""Power and thermal conductance of a rack's fans by speed."""

import math
from dataclasses import dataclass

from socflower.errors import ConfigError, require_range
from socflower.thermal.model.constants import constant


@dataclass(frozen=True, kw_only=True, slots=True)
class FanCurve:
    """The fans of a rack, all at one speed.

    Conductance to the ambient air: `still + flow * sqrt(rpm^2 - threshold^2)`, only `still` below the threshold. The
    pressure of a fan grows with the square of its speed. Pressure above the back pressure drives a flow whose
    resistance grows with the square of the flow; heat is proportional to flow. The threshold follows from SoCFlow+
    Table 2, where nothing changes up to 5,700 rpm. Watts: `drag * rpm + air * rpm^3`, the cube of the fan laws.
    """

    still_w_per_k: float
    threshold_rpm: float
    flow_w_per_k_rpm: float
    drag_w_per_rpm: float
    air_w_per_rpm3: float
    min_rpm: float
    max_rpm: float

    def __post_init__(self) -> None:
        require_range(
            "fan",
            least=0.0,
            threshold_rpm=self.threshold_rpm,
            flow_w_per_k_rpm=self.flow_w_per_k_rpm,
            drag_w_per_rpm=self.drag_w_per_rpm,
            air_w_per_rpm3=self.air_w_per_rpm3,
        )
        require_range("fan", above=0.0, still_w_per_k=self.still_w_per_k)
        if not 0.0 < self.min_rpm < self.max_rpm < math.inf:
            raise ConfigError(
                f"fan: need 0 < min_rpm < max_rpm, got {self.min_rpm} and {self.max_rpm}"
            )

    def conductance_w_per_k(self, rpm: float, working: float = 1.0) -> float:
        """Return W/K from the chassis to the ambient air; `working` is the fraction of fans that turn."""
        return self.still_w_per_k + working * self.flow_w_per_k_rpm * math.sqrt(
            max(0.0, rpm * rpm - self.threshold_rpm * self.threshold_rpm)
        )

    def power_w(self, rpm: float, working: float = 1.0) -> float:
        """Return the watts of all fans together."""
        return working * (self.drag_w_per_rpm * rpm + self.air_w_per_rpm3 * rpm**3)

    def rpm_for(self, conductance_w_per_k: float) -> float:
        """Return the lowest speed with at least this conductance, within the fans' limits."""
        flow = max(0.0, conductance_w_per_k - self.still_w_per_k)
        if not flow:
            return self.min_rpm
        if not self.flow_w_per_k_rpm:
            return self.max_rpm
        rpm = math.hypot(flow / self.flow_w_per_k_rpm, self.threshold_rpm)
        return min(max(rpm, self.min_rpm), self.max_rpm)


def rack_fans() -> FanCurve:
    """Return the fans of the SoC-Cluster, from `constants.toml`."""
    names = (
        "still_w_per_k",
        "threshold_rpm",
        "flow_w_per_k_rpm",
        "drag_w_per_rpm",
        "air_w_per_rpm3",
        "min_rpm",
        "max_rpm",
    )
    return FanCurve(**{name: constant("fan", name) for name in names})
