"""Power meters against a made-up /sys: the first that can be read is taken, and what it says is right."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.profiling.power_meter import EnergyMeter, WattMeter, find_power_meter, mean_watts

Sys = Callable[[dict[str, object]], Path]


@pytest.fixture
def sysfs(tmp_path: Path) -> Sys:
    def write(files: dict[str, object]) -> Path:
        for name, content in files.items():
            path = tmp_path / "sys/class" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n")
        return tmp_path

    return write


def rapl(zone: str, name: str, energy_uj: object, largest_uj: object = 1000) -> dict[str, object]:
    folder = f"powercap/{zone}"
    return {
        f"{folder}/name": name,
        f"{folder}/energy_uj": energy_uj,
        f"{folder}/max_energy_range_uj": largest_uj,
    }


BATTERY: dict[str, object] = {
    "power_supply/BAT0/type": "Battery",
    "power_supply/BAT0/status": "Discharging",
    "power_supply/BAT0/power_now": 7_500_000,
}
JETSON: dict[str, object] = {
    "hwmon/hwmon0/name": "soctherm",
    "hwmon/hwmon1/name": "ina3221",
    "hwmon/hwmon1/in1_label": "VDD_CPU",
    "hwmon/hwmon1/in1_input": 5000,
    "hwmon/hwmon1/curr1_input": 300,
    "hwmon/hwmon1/in2_label": "VDD_IN",
    "hwmon/hwmon1/in2_input": 5000,
    "hwmon/hwmon1/curr2_input": 2000,
}


def watts(root: Path) -> float:
    meter = find_power_meter(root)
    assert isinstance(meter, WattMeter)
    return meter.power_w()


@given(start=st.integers(0, 999), steps=st.lists(st.integers(0, 999), max_size=20))
def test_a_counter_that_wraps_is_summed_rightly(
    tmp_path_factory: pytest.TempPathFactory,
    start: int,
    steps: list[int],
) -> None:
    """Against the sum itself; a step shorter than the range can wrap once at most."""
    root = tmp_path_factory.mktemp("root")
    folder = root / "sys/class/powercap/intel-rapl:0"
    folder.mkdir(parents=True)
    for name, content in (
        ("name", "package-0"),
        ("max_energy_range_uj", 999),
        ("energy_uj", start),
    ):
        (folder / name).write_text(str(content))
    meter = find_power_meter(root)
    assert isinstance(meter, EnergyMeter)
    total = 0
    for step in steps:
        total += step
        (folder / "energy_uj").write_text(str((start + total) % 1000))
        assert meter.energy_j() == total / 1e6


def test_packages_are_added_and_their_parts_are_not(sysfs: Sys) -> None:
    root = sysfs(
        {
            **rapl("intel-rapl:0", "package-0", 10),
            **rapl("intel-rapl:1", "package-1", 20),
            **rapl("intel-rapl:0:0", "core", 5),
        }
    )
    meter = find_power_meter(root)
    assert isinstance(meter, EnergyMeter) and meter.source == "RAPL, package-0 and package-1"
    sysfs(
        {
            **rapl("intel-rapl:0", "package-0", 110),
            **rapl("intel-rapl:1", "package-1", 70),
            **rapl("intel-rapl:0:0", "core", 900),
        }
    )
    assert meter.energy_j() == pytest.approx(150e-6)


def test_the_platform_is_not_added_to_its_packages(sysfs: Sys) -> None:
    meter = find_power_meter(
        sysfs({**rapl("intel-rapl:0", "package-0", 1), **rapl("intel-rapl:1", "psys", 2)})
    )
    assert meter is not None and meter.source == "RAPL, psys"


def test_a_jetson_is_measured_where_all_its_power_comes_in(sysfs: Sys) -> None:
    root = sysfs(JETSON)
    assert watts(root) == pytest.approx(10.0)
    meter = find_power_meter(root)
    assert meter is not None and meter.source == "hwmon ina3221, VDD_IN"


def test_a_sensor_in_microwatts_is_read_but_a_graphics_card_is_not(sysfs: Sys) -> None:
    root = sysfs(
        {
            "hwmon/hwmon2/name": "amdgpu",
            "hwmon/hwmon2/power1_input": 99_000_000,
            "hwmon/hwmon10/name": "ina226",
            "hwmon/hwmon10/power1_input": 4_200_000,
        }
    )
    assert watts(root) == pytest.approx(4.2)


def test_a_battery_counts_only_while_it_discharges(sysfs: Sys) -> None:
    root = sysfs(BATTERY)
    assert watts(root) == pytest.approx(7.5)
    meter = find_power_meter(root)
    sysfs({"power_supply/BAT0/status": "Charging"})
    assert find_power_meter(root) is None
    assert meter is not None and mean_watts(meter, lambda: None) is None  # plugged in meanwhile


def test_a_battery_may_say_current_and_voltage(sysfs: Sys) -> None:
    root = sysfs(
        {
            "power_supply/bms/type": "Battery",
            "power_supply/bms/status": "Discharging",
            "power_supply/bms/current_now": 500_000,
            "power_supply/bms/voltage_now": 4_000_000,
            "power_supply/AC/type": "Mains",
            "power_supply/AC/power_now": 60_000_000,
        }
    )
    assert watts(root) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "broken",
    [
        {**rapl("intel-rapl:0", "package-0", -5)},
        {**rapl("intel-rapl:0", "package-0", "")},
        {**rapl("intel-rapl:0", "package-0", "12 uJ")},
        {**rapl("intel-rapl:0", "package-0", 5, 0)},
        {"powercap/intel-rapl:0/energy_uj": 5},
        {"powercap/intel-rapl:0/energy_uj/is/a/folder": 5},
        {"hwmon/hwmon0/power1_input": -3},
        {"hwmon/hwmon0/power1_input": 0},
        {"hwmon/hwmon0/power1_input": "\xff"},
        {"hwmon/hwmon0/in1_input": 5000},
        {"hwmon": "no folder"},
    ],
)
def test_what_cannot_be_read_is_skipped(sysfs: Sys, broken: dict[str, object]) -> None:
    assert find_power_meter(sysfs(broken)) is None
    if "hwmon" not in broken:
        assert watts(sysfs(BATTERY)) == pytest.approx(7.5)


def test_a_counter_that_only_root_may_read_is_skipped(
    sysfs: Sys, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = sysfs({**rapl("intel-rapl:0", "package-0", 5), **JETSON})
    read_text = Path.read_text

    def closed(path: Path, *arguments: str) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read_text(path, *arguments)

    monkeypatch.setattr(Path, "read_text", closed)
    assert watts(root) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("files", "old", "new"),
    [
        (
            rapl("intel-rapl:0", "package-0", 5, 10**9),
            "powercap/intel-rapl:0",
            "powercap/intel-rapl:1",
        ),
        (JETSON, "hwmon/hwmon1", "hwmon/hwmon4"),
    ],
)
def test_a_meter_whose_number_changes_is_read_where_it_is_and_no_other_for_it(
    sysfs: Sys,
    files: dict[str, object],
    old: str,
    new: str,
) -> None:
    root = sysfs(files)
    meter = find_power_meter(root)
    assert meter is not None
    before = meter.energy_j() if isinstance(meter, EnergyMeter) else meter.power_w()
    (root / "sys/class" / old).rename(root / "sys/class" / new)
    # Another device has its number.
    sysfs(
        {
            f"{old}/name": "other",
            f"{old}/energy_uj": 900,
            f"{old}/in2_input": 1,
            f"{old}/curr2_input": 1,
        }
    )
    assert (meter.energy_j() if isinstance(meter, EnergyMeter) else meter.power_w()) == before
    (root / "sys/class" / new).rename(root / "removed")
    assert mean_watts(meter, lambda: None) is None


def test_a_machine_without_any_has_none(tmp_path: Path) -> None:
    assert find_power_meter(tmp_path) is None


def test_mean_watts_of_a_counter_is_joules_by_seconds(
    sysfs: Sys, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = find_power_meter(sysfs(rapl("intel-rapl:0", "package-0", 5, 10**9)))
    assert meter is not None
    now_s = iter((10.0, 14.0))
    monkeypatch.setattr("socflower.profiling.power_meter.time.perf_counter", lambda: next(now_s))
    mean = mean_watts(meter, lambda: sysfs(rapl("intel-rapl:0", "package-0", 20_000_005, 10**9)))
    assert mean == pytest.approx(5.0)


class Ramp:
    """A sensor that shows 1, 2, 3, ... watts."""

    source = "made up"

    def __init__(self) -> None:
        self.shown = 0.0

    def power_w(self) -> float:
        self.shown += 1.0
        return self.shown


def test_mean_watts_of_a_sensor_is_the_mean_of_its_samples() -> None:
    ramp = Ramp()
    mean = mean_watts(ramp, lambda: time.sleep(0.12))
    assert mean == pytest.approx((1 + ramp.shown) / 2)


def test_a_counter_that_stands_still_measures_nothing(sysfs: Sys) -> None:
    meter = find_power_meter(sysfs(rapl("intel-rapl:0", "package-0", 0)))
    assert meter is not None and mean_watts(meter, lambda: None) is None
