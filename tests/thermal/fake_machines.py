"""Made-up machines: what /sys and /proc of a Jetson, a Raspberry Pi, a phone, a server and a virtual machine hold."""

from collections.abc import Mapping
from pathlib import Path

THERMAL, HWMON, CPU, POWER = (
    "sys/class/thermal",
    "sys/class/hwmon",
    "sys/devices/system/cpu",
    "sys/class/power_supply",
)
PI_THROTTLED = "sys/devices/platform/soc/soc:firmware/get_throttled"

Files = dict[str, object]


def write_files(root: Path, files: Mapping[str, object]) -> None:
    """Write files as the kernel shows them, one line each; bytes as they are. None removes a file."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Clock:
    """Seconds that change only when a test sets them."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class Machine:
    """A folder with files, a clock that is set, and processors whose work is set."""

    def __init__(self, root: Path, *trees: Mapping[str, object]) -> None:
        self.root = root
        self.now_s = 100.0
        for tree in trees:
            self.write(tree)

    def write(self, files: Mapping[str, object]) -> None:
        write_files(self.root, files)

    def clock(self) -> float:
        return self.now_s

    def work(self, busy_s: float, idle_s: float, num_processors: int = 4) -> None:
        """Set what the processors did since start-up, in all."""
        lines = [f"cpu{number} 0 0 0 0 0 0 0 0 0 0" for number in range(num_processors)]
        self.write(
            {
                "proc/stat": "\n".join(
                    (f"cpu  {busy_s * 100:.0f} 0 0 {idle_s * 100:.0f} 0 0 0 0 0 0", *lines)
                )
            }
        )


def zone(number: int, name: str, temp: object) -> Files:
    return {
        f"{THERMAL}/thermal_zone{number}/type": name,
        f"{THERMAL}/thermal_zone{number}/temp": temp,
    }


def cooling(number: int, name: str, state: object) -> Files:
    return {
        f"{THERMAL}/cooling_device{number}/type": name,
        f"{THERMAL}/cooling_device{number}/cur_state": state,
    }


def policy(
    first: int,
    num_cpus: int,
    present_khz: object,
    highest_khz: object,
    cap_khz: object = None,
    capacity: int | None = None,
) -> Files:
    folder = f"{CPU}/cpufreq/policy{first}"
    cpus = range(first, first + num_cpus)
    files: Files = {
        f"{folder}/scaling_cur_freq": present_khz,
        f"{folder}/cpuinfo_max_freq": highest_khz,
        f"{folder}/scaling_max_freq": highest_khz if cap_khz is None else cap_khz,
        f"{folder}/affected_cpus": " ".join(map(str, cpus)),
    }
    if capacity is not None:
        files.update({f"{CPU}/cpu{cpu}/cpu_capacity": capacity for cpu in cpus})
    return files


JETSON: Files = {
    **zone(0, "cpu-thermal", 61_000),
    **zone(1, "gpu-thermal", 63_500),
    **zone(2, "tj-thermal", 64_250),
    **zone(3, "PMIC-Die", 100_000),
    **zone(4, "Tboard_tegra", 48_000),
    **zone(5, "thermal-fan-est", 55_000),
    **cooling(0, "pwm-fan", 3),
    **cooling(1, "cpufreq-cpu0", 0),
    **cooling(2, "devfreq-17000000.gpu", 0),
    **policy(0, 4, 1_344_000, 1_344_000),
    **policy(4, 2, 672_000, 1_344_000),
    f"{HWMON}/hwmon0/name": "pwmfan",
    f"{HWMON}/hwmon3/name": "soctherm_oc",
    **{f"{HWMON}/hwmon3/oc{number}_event_cnt": 7 for number in (1, 2, 3)},
    f"{HWMON}/hwmon3/oc1_throt_en": 1,
}
RASPBERRY_PI: Files = {
    **zone(0, "cpu-thermal", 54_530),
    **cooling(0, "pwm-fan", 2),
    **policy(0, 4, 1_500_000, 1_500_000),
    f"{HWMON}/hwmon0/name": "cpu_thermal",
    f"{HWMON}/hwmon0/temp1_input": 54_530,
    f"{HWMON}/hwmon1/name": "rpi_volt",
    f"{HWMON}/hwmon1/in0_lcrit_alarm": 0,
    PI_THROTTLED: "0",
}
PHONE: Files = {  # three units side by side, and charge among the thermal zones, as Snapdragons have them
    **zone(0, "tsens_tz_sensor5", 412),
    **zone(1, "cpu-1-0-usr", 43_700),
    **zone(2, "xo_therm", 36),
    **zone(3, "battery", 33_000),
    **zone(4, "soc", 97),
    **zone(5, "pm8998-vbat-lvl0", 4_100),
    **zone(6, "skin-therm", 61_000),
    **zone(7, "pa_therm1", -40),
    **policy(0, 4, 900_000, 1_800_000, capacity=256),
    **policy(4, 3, 2_400_000, 2_400_000, capacity=1000),
    **policy(7, 1, 2_840_000, 2_840_000, capacity=1024),
    **cooling(0, "thermal-cpufreq-0", 0),
    **cooling(1, "thermal-devfreq-0", 0),
    f"{POWER}/battery/type": "Battery",
    f"{POWER}/battery/capacity": 83,
    f"{POWER}/battery/status": "Discharging",
    f"{POWER}/battery/temp": 331,
    f"{POWER}/usb/type": "USB",
    f"{POWER}/usb/temp": 300,
}
SERVER: Files = {
    **zone(0, "acpitz", 27_800),
    **zone(1, "x86_pkg_temp", 71_000),
    **cooling(0, "Processor", 0),
    **cooling(1, "intel_powerclamp", -1),
    **cooling(2, "Fan", 1),
    f"{HWMON}/hwmon0/name": "coretemp",
    f"{HWMON}/hwmon0/temp1_input": 71_000,
    f"{HWMON}/hwmon0/temp1_label": "Package id 0",
    f"{HWMON}/hwmon0/temp2_input": 73_000,
    f"{HWMON}/hwmon0/temp2_label": "Core 0",
    f"{HWMON}/hwmon1/name": "nvme",
    f"{HWMON}/hwmon1/temp1_input": 79_850,
    f"{HWMON}/hwmon1/temp1_label": "Composite",
    **policy(0, 1, 4_100_000, 3_600_000),
    **policy(1, 1, 1_800_000, 3_600_000),
    f"{CPU}/cpu0/thermal_throttle/core_throttle_count": 5,
    f"{CPU}/cpu0/thermal_throttle/package_throttle_count": 9,
}
VIRTUAL: Files = {f"{CPU}/cpufreq/boost": 1, f"{CPU}/cpu0/cpu_capacity": 1024}
