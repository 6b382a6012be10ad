"""Which temperature is the SoC's: told from the names that kernels and vendors give their sensors."""

import re
from enum import IntEnum


class SensorKind(IntEnum):
    """How much a sensor says of the processor that trains; lower is better."""

    SOC = 0  # on the die: CPU, GPU, NPU, junction
    UNNAMED = 1  # a name that says nothing, such as acpitz
    BESIDE = 2  # battery, skin, board, power chip, radio, disk: warm late, or for reasons of their own


# Qualcomm lists charge, voltage and current of the battery among its thermal zones; "soc" is the state of charge.
_NO_TEMPERATURE = re.compile(r"^soc$|[iv]bat|bcl|[-_]lvl\d|current|volt|power$")
_BESIDE = re.compile(
    r"batt|^bat\d*\b|bms|skin|shell|case|quiet|xo[-_]?therm|pa[-_]?therm|mmw|pmic|^pm[a-z]?\d|mtktspmic|chg|charg|usb|conn"
    r"|wifi|wlan|iwl|wmt|wcn|modem|mdm|sdr|nvme|drivetemp|^sd[a-z]\b|disk|board|ambient|flash|cam|lcd|display|panel"
    r"|fan[-_]?est|tdiode|mtktsap|mtktspa|btsmdpa|^rf|emmc|ufs|amdgpu|radeon|nouveau|nvidia|^i915|^xe\b|pch|jc42|spd5118"
    r"|nct\d|it87|^w83|^lm\d|^tmp\d|mlx|i350|bnxt|ixgbe|^eth|sfp|dimm|vrm|systin|auxtin")
_SOC = re.compile(
    r"cpu|gpu|npu|tpu|dsp|soc|tsens|^tj|junction|cluster|core|pkg|k10temp|zenpower|apss|aoss|kryo|cvp?\d|pll|aux|^ao[-_]|"
    r"^big$|^mid$|^little$|^g3d$|^isp$|^ddr|exynos|bcm2\d{3}|tsadc|package|tctl|tdie|tccd|thermal_sys|imx|sunxi|a5\d|a7\d")


def kind_of(name: str) -> SensorKind | None:
    """Return what a sensor of this name measures the heat of; None where it is no temperature at all."""
    plain = name.strip().lower()
    if _NO_TEMPERATURE.search(plain):
        return None
    if _BESIDE.search(plain):
        return SensorKind.BESIDE
    return SensorKind.SOC if _SOC.search(plain) else SensorKind.UNNAMED
