"""Power meters against a made-up /sys: the first that can be read is taken, and what it says is right."""

import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.profiling.power_meter import EnergyMeter, PowerMeter, find_power_meter, mean_watts

Sys = Callable[[dict[str, object]], Path]


def write(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        path = root / "sys/class" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


@pytest.fixture
def sysfs(tmp_path: Path) -> Sys:
    def written(files: dict[str, object]) -> Path:
        write(tmp_path, files)
        return tmp_path

    return written


def rapl(zone: str, name: str, energy_uj: object, largest_uj: object = 1000) -> dict[str, object]:
    folder = f"powercap/{zone}"
    return {
        f"{folder}/name": name,
        f"{folder}/energy_uj": energy_uj,
        f"{folder}/max_energy_range_uj": largest_uj,
    }


RAPL = rapl("intel-rapl:0", "package-0", 5, 10**9)
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


def read(meter: PowerMeter | None) -> float:
    """Return joules of a counter, or watts of a sensor."""
    assert meter is not None
    return meter.energy_j() if isinstance(meter, EnergyMeter) else meter.power_w()


@given(start=st.integers(0, 999), steps=st.lists(st.integers(0, 999), max_size=20))
def test_a_counter_that_wraps_is_summed_rightly(
    tmp_path_factory: pytest.TempPathFactory,
    start: int,
    steps: list[int],
) -> None:
    """Against the sum itself; a step shorter than the range can wrap once at most."""
    root = tmp_path_factory.mktemp("root")
    write(root, rapl("intel-rapl:0", "package-0", start, 999))
    meter = find_power_meter(root)
    for total in accumulate(steps):
        write(root, {"powercap/intel-rapl:0/energy_uj": (start + total) % 1000})
        assert read(meter) == total / 1e6


def test_packages_are_added_and_their_parts_are_not(sysfs: Sys) -> None:
    root = sysfs(
        {**RAPL, **rapl("intel-rapl:1", "package-1", 20), **rapl("intel-rapl:0:0", "core", 5)}
    )
    meter = find_power_meter(root)
    assert meter is not None and meter.source == "RAPL, package-0 and package-1"
    for zone, energy_uj in (("0", 110), ("1", 70), ("0:0", 900)):
        sysfs({f"powercap/intel-rapl:{zone}/energy_uj": energy_uj})
    assert read(meter) == pytest.approx((105 + 50) * 1e-6)


@pytest.mark.parametrize(
    ("files", "source", "power_w"),
    [
        # Where all power of a Jetson comes in, though another rail comes first.
        (JETSON, "hwmon ina3221, VDD_IN", 10.0),
        # In microwatts; a graphics card is not the machine.
        (
            {
                "hwmon/hwmon2/name": "amdgpu",
                "hwmon/hwmon2/power1_input": 99_000_000,
                "hwmon/hwmon10/name": "ina226",
                "hwmon/hwmon10/power1_input": 4_200_000,
            },
            "hwmon ina226, channel 1",
            4.2,
        ),
        (BATTERY, "battery BAT0", 7.5),
        # Current and voltage; what mains deliver is not counted.
        (
            {
                "power_supply/bms/type": "Battery",
                "power_supply/bms/status": "Discharging",
                "power_supply/bms/current_now": 500_000,
                "power_supply/bms/voltage_now": 4_000_000,
                "power_supply/AC/type": "Mains",
                "power_supply/AC/power_now": 60_000_000,
            },
            "battery bms",
            2.0,
        ),
        # The platform has its packages in it.
        ({**RAPL, **rapl("intel-rapl:1", "psys", 2)}, "RAPL, psys", None),
        # RAPL comes before rails, rails before batteries.
        ({**RAPL, **JETSON}, "RAPL, package-0", None),
        ({**JETSON, **BATTERY}, "hwmon ina3221, VDD_IN", 10.0),
    ],
)
def test_the_first_meter_is_taken(
    sysfs: Sys, files: dict[str, object], source: str, power_w: float | None
) -> None:
    meter = find_power_meter(sysfs(files))
    assert meter is not None and meter.source == source
    if power_w is not None:
        assert read(meter) == pytest.approx(power_w)


def test_a_battery_counts_only_while_it_discharges(sysfs: Sys) -> None:
    root = sysfs(BATTERY)
    meter = find_power_meter(root)
    sysfs({"power_supply/BAT0/status": "Charging"})
    assert find_power_meter(root) is None
    assert meter is not None and mean_watts(meter, lambda: None) is None


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
    assert find_power_meter(sysfs({})) is None is find_power_meter(sysfs(broken))
    if "hwmon" not in broken:
        assert read(find_power_meter(sysfs(BATTERY))) == pytest.approx(7.5)


def test_a_counter_that_only_root_may_read_is_skipped(
    sysfs: Sys, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = sysfs({**RAPL, **JETSON})
    read_text = Path.read_text

    def closed(path: Path, *arguments: str) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read_text(path, *arguments)

    monkeypatch.setattr(Path, "read_text", closed)
    assert read(find_power_meter(root)) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("files", "old", "new"),
    [
        (RAPL, "powercap/intel-rapl:0", "powercap/intel-rapl:1"),
        (JETSON, "hwmon/hwmon1", "hwmon/hwmon4"),
    ],
)
def test_a_meter_whose_number_changes_is_read_where_it_is_and_no_other_for_it(
    sysfs: Sys, files: dict[str, object], old: str, new: str
) -> None:
    root = sysfs(files)
    meter = find_power_meter(root)
    before = read(meter)
    moved = (root / "sys/class" / old).rename(root / "sys/class" / new)
    # Another device has its number.
    others = {"name": "other", "energy_uj": 900, "in2_input": 1, "curr2_input": 1}
    sysfs({f"{old}/{name}": content for name, content in others.items()})
    assert read(meter) == before
    moved.rename(root / "removed")
    assert meter is not None and mean_watts(meter, lambda: None) is None


def test_mean_watts_of_a_counter_is_joules_by_seconds(
    sysfs: Sys, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = find_power_meter(sysfs(RAPL))
    assert meter is not None
    now_s = iter((10.0, 14.0))
    monkeypatch.setattr("socflower.profiling.power_meter.time.perf_counter", lambda: next(now_s))
    after = {"powercap/intel-rapl:0/energy_uj": 20_000_005}
    assert mean_watts(meter, lambda: sysfs(after)) == pytest.approx(5.0)


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


def test_a_counter_that_does_not_count_measures_nothing(sysfs: Sys) -> None:
    meter = find_power_meter(sysfs(RAPL))
    assert meter is not None and mean_watts(meter, lambda: None) is None
