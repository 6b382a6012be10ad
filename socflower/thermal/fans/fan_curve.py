"""Power and thermal conductance of a rack's fans by speed."""

import math
from dataclasses import fields
from functools import cache

from socflower.errors import require_order
from socflower.field_rules import NotNegative, Positive, checked
from socflower.thermal.model.constants import constant


@checked
class FanCurve:
    """The fans of a rack, all at one speed.

    Conductance to the ambient air: `still + flow * sqrt(rpm^2 - threshold^2)`, only `still` below the threshold. The
    pressure of a fan grows with the square of its speed. Pressure above the back pressure drives a flow whose
    resistance grows with the square of the flow; heat is proportional to flow. The threshold follows from SoCFlow+
    Table 2, where nothing changes up to 5,700 rpm. Watts: `drag * rpm + air * rpm^3`, the cube of the fan laws.
    """

    still_w_per_k: Positive
    threshold_rpm: NotNegative
    flow_w_per_k_rpm: NotNegative
    drag_w_per_rpm: NotNegative
    air_w_per_rpm3: NotNegative
    min_rpm: Positive
    max_rpm: float

    def check(self) -> None:
        """Refuse speeds in the wrong order."""
        require_order(min_rpm=self.min_rpm, max_rpm=self.max_rpm)

    def conductance_w_per_k(self, rpm: float, working: float = 1.0) -> float:
        """Return W/K from the chassis to the ambient air; `working` is the fraction of fans that turn."""
        above_threshold = max(0.0, rpm * rpm - self.threshold_rpm * self.threshold_rpm)
        flow_w_per_k = self.flow_w_per_k_rpm * math.sqrt(above_threshold)
        return self.still_w_per_k + working * flow_w_per_k

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


@cache
def rack_fans() -> FanCurve:
    """Return the fans of the SoC-Cluster, from `constants.toml`."""
    names = [entry.name for entry in fields(FanCurve)]
    return FanCurve(**{name: constant("fan", name) for name in names})
