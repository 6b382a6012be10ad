"""Names and units of temperature sensors, as kernels and phones have them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.thermal.sensors.linux import SensorKind, kind_of
from socflower.thermal.sensors.plausibility import TemperatureUnit


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            SensorKind.SOC,
            [
                "cpu-thermal",
                "CPU-therm",
                "x86_pkg_temp",
                "coretemp Core 0",
                "coretemp Package id 0",
                "tj-thermal",
                "k10temp Tctl",
                "tsens_tz_sensor5",
                "mtktscpu",
                "BIG",
                "soc-thermal",
                "SOC0-therm",
                "cpu_thermal",
                "bcm2835_thermal",
                "cv0-thermal",
                "PLL-therm",
                "aoss0-usr",
                "gpuss-0",
                "GPU-therm",
            ],
        ),
        (SensorKind.UNNAMED, ["acpitz", "acpitz temp1", "", "INT3400 Thermal"]),
        (
            SensorKind.OTHER,
            [
                "battery",
                "bms",
                "PMIC-Die",
                "pm8150b_tz",
                "skin-therm",
                "xo_therm",
                "quiet-therm-adc",
                "BAT0",
                "nvme Composite",
                "iwlwifi_1",
                "Tboard_tegra",
                "Tdiode_tegra",
                "thermal-fan-est",
                "mtktspmic",
                "mtktsAP",
                "modem0-usr",
                "usb",
                "chg_temp",
                "nct6775 SYSTIN",
                "amdgpu edge",
                "pa_therm0",
                "case_therm",
                "thermistor_board",
            ],
        ),
        (None, ["soc", "pm8998-vbat-lvl0", "ibat-high", "pm6150l-bcl-lvl0", "vbat"]),
    ],
)
def test_names_tell_what_a_sensor_measures(kind, names):
    assert {name: kind_of(name) for name in names} == dict.fromkeys(names, kind)


@given(
    per_degree=st.sampled_from([1, 10, 1000]),
    path_c=st.lists(st.integers(20, 145), min_size=1, max_size=30),
)
def test_a_unit_once_clear_is_kept_so_that_every_temperature_is_right(per_degree, path_c):
    unit = TemperatureUnit()
    assert unit.degrees(40 * per_degree) == 40.0
    assert [unit.degrees(value_c * per_degree) for value_c in path_c] == [
        float(value_c) for value_c in path_c
    ]


@given(raw=st.floats(allow_nan=False, allow_infinity=False))
def test_a_first_number_is_taken_in_a_unit_that_makes_it_a_temperature_or_not_at_all(
    raw,
):
    try:
        value_c = TemperatureUnit().degrees(raw)
    except ValueError:
        return
    assert -40.0 <= value_c <= 150.0 and any(
        value_c == raw / per_degree for per_degree in (1, 10, 1000)
    )


@pytest.mark.parametrize(
    "raw", [100, 101.5, 150, 1000, 1200, 1500, -41, -128, -999, -128_000, 150_001]
)
def test_a_first_number_of_two_meanings_or_none_decides_nothing(raw):
    unit = TemperatureUnit()
    with pytest.raises(ValueError, match="unit that is not clear"):
        unit.degrees(raw)
    assert unit.degrees(412) == 41.2


def test_zero_is_zero_in_every_unit_and_decides_none():
    unit = TemperatureUnit()
    assert unit.degrees(0) == 0.0
    assert unit.degrees(45_000) == 45.0


@pytest.mark.parametrize(
    ("garbage", "raw", "true_c"), [(65_535, 45, 45.0), (45, 45_000, 45.0), (65_535, 412, 41.2)]
)
def test_a_unit_learnt_from_garbage_is_learnt_anew(garbage, raw, true_c):
    unit = TemperatureUnit()
    unit.degrees(garbage)
    for _ in range(4):  # nothing wrong is said meanwhile
        with pytest.raises(ValueError, match="cannot be"):
            unit.degrees(raw)
    assert unit.degrees(raw) == true_c
