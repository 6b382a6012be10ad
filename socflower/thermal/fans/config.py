"""The configuration of `socflower fan` as validated values, and the fans and sources that it describes."""

import math
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from socflower.cluster.toml_file import parse_table, read_toml, reject_unknown_keys, require_tables
from socflower.errors import ConfigError, require_range
from socflower.thermal.fans.hwmon_pwm import HwmonPwm, find_hwmon
from socflower.thermal.fans.ipmi import IpmiCommand
from socflower.thermal.fans.outputs import DutyCurve, FanOutput, SimulatedFan
from socflower.thermal.sensors.reading import HeatSource
from socflower.thermal.sensors.remote import FileSource, HttpSource

_KEYS = ("schema", "status_file", "fan", "policy", "source")


@dataclass(frozen=True, kw_only=True, slots=True)
class FanTable(ABC):
    """`[fan]`: what all outputs have in common."""

    output: str
    min_rpm: float
    max_rpm: float
    failsafe_rpm: float
    period_s: float = 5.0
    max_silence_s: float = 30.0
    stuck_after_s: float = 600.0
    spin_up_s: float = 15.0

    def __post_init__(self) -> None:
        if not 0.0 < self.min_rpm <= self.failsafe_rpm <= self.max_rpm < math.inf or self.min_rpm == self.max_rpm:
            raise ConfigError(f"[fan]: need 0 < min_rpm <= failsafe_rpm <= max_rpm and min_rpm < max_rpm, got "
                              f"{self.min_rpm:g}, {self.failsafe_rpm:g} and {self.max_rpm:g}")
        for key in ("period_s", "max_silence_s", "stuck_after_s", "spin_up_s"):
            _above_zero(f"[fan] {key}", getattr(self, key))

    @abstractmethod
    def outputs(self) -> list[FanOutput]:
        """Return the fans without writing to them. Raises `ConfigError` for fans that do not exist."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _DutyTable(FanTable):
    """Outputs that are set by duty, a fraction of full power."""

    min_duty_percent: float = 20.0
    curve_percent: tuple[int, ...] = ()
    curve_rpm: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # `super()` fails here: slots=True makes a new class, and `super()` still refers to the original one.
        FanTable.__post_init__(self)
        require_range("[fan]", least=1.0, below=100.0, advice="20 suits most fans",
                      min_duty_percent=self.min_duty_percent)
        if len(self.curve_percent) != len(self.curve_rpm):
            raise ConfigError(f"[fan]: curve_percent has {len(self.curve_percent)} numbers and curve_rpm "
                              f"{len(self.curve_rpm)}; give a speed for each")
        self.curve()

    def curve(self) -> DutyCurve | None:
        """Return the measured curve, or None for a straight line."""
        if not self.curve_percent:
            return None
        return DutyCurve(tuple((percent / 100.0, float(rpm))
                               for percent, rpm in zip(self.curve_percent, self.curve_rpm, strict=True)))

    @property
    def duty_settings(self) -> dict[str, Any]:
        """The speed arguments of `HwmonPwm` and `IpmiCommand`."""
        return {"min_rpm": self.min_rpm, "max_rpm": self.max_rpm, "min_duty": self.min_duty_percent / 100.0,
                "curve": self.curve()}


@dataclass(frozen=True, kw_only=True, slots=True)
class HwmonTable(_DutyTable):
    """`[fan] output = "hwmon"`"""

    folder: str
    pwm: tuple[int, ...] = (1,)
    tachometer: tuple[int, ...] = ()
    automatic_mode: int | None = None

    def __post_init__(self) -> None:
        _DutyTable.__post_init__(self)
        if not self.pwm or len(set(self.pwm)) != len(self.pwm) or min(self.pwm) < 1:
            raise ConfigError(f"[fan] pwm = {list(self.pwm)}: list each output once, by its number from 1 on")
        if self.tachometer and len(self.tachometer) != len(self.pwm):
            raise ConfigError(f"[fan] tachometer = {list(self.tachometer)}: needs {len(self.pwm)} numbers, one for "
                              "each of pwm; leave it out where they are the same")

    def outputs(self) -> list[FanOutput]:
        """Return a fan for each PWM output."""
        folder = find_hwmon(self.folder)
        tachometers = self.tachometer or self.pwm
        return [HwmonPwm(folder, pwm, fan=fan, automatic_mode=self.automatic_mode, **self.duty_settings)
                for pwm, fan in zip(self.pwm, tachometers, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class IpmiTable(_DutyTable):
    """`[fan] output = "ipmi"`: arguments of ipmitool."""

    set: str
    begin: str = ""
    restore: str = ""
    sensor: str = ""
    ipmitool: str = "ipmitool"
    timeout_s: float = 10.0

    def outputs(self) -> list[FanOutput]:
        """Return the controller's fans as one."""
        def command(arguments: str) -> str:
            return f"{self.ipmitool} {arguments}" if arguments else ""

        measure = command(f"-c sensor reading {shlex.quote(self.sensor)}") if self.sensor else ""
        return [IpmiCommand(command(self.set), begin=command(self.begin), restore=command(self.restore),
                            measure=measure, timeout_s=self.timeout_s, **self.duty_settings)]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandTable(_DutyTable):
    """`[fan] output = "command"`: any program."""

    set: str
    begin: str = ""
    restore: str = ""
    measure: str = ""
    timeout_s: float = 10.0

    def outputs(self) -> list[FanOutput]:
        """Return the fans behind the program as one."""
        return [IpmiCommand(self.set, begin=self.begin, restore=self.restore, measure=self.measure,
                            timeout_s=self.timeout_s, **self.duty_settings)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedTable(FanTable):
    """`[fan] output = "simulated"`"""

    num_fans: int = 1
    rpm_per_s: float = 2000.0
    failure: str = ""  # of the first fan

    def outputs(self) -> list[FanOutput]:
        """Return the fans, the first of which may be broken."""
        require_range("[fan]", least=1, num_fans=self.num_fans)
        return [SimulatedFan(self.max_rpm, rpm_per_s=self.rpm_per_s, failure="" if index else self.failure)
                for index in range(self.num_fans)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceTable(ABC):
    """`[[source]]`: what all kinds have in common."""

    kind: str
    soc: int | None = None  # default: its place in the list, from 0
    board: int | None = None  # default: all SoCs are on one
    max_age_s: float = 30.0

    def __post_init__(self) -> None:
        _above_zero("[[source]] max_age_s", self.max_age_s)

    @abstractmethod
    def source(self) -> HeatSource:
        """Return the source of readings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalTable(SourceTable):
    """`[[source]] kind = "local"`: this machine's sensors, or those below another root, as in a container."""

    root: str = "/"

    def __post_init__(self) -> None:
        SourceTable.__post_init__(self)
        _absolute("[[source]] root", self.root)

    def source(self) -> HeatSource:
        """Return the machine's sensors."""
        from socflower.thermal.sensors.linux import LinuxSensors

        return LinuxSensors(Path(self.root))


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpTable(SourceTable):
    """`[[source]] kind = "http"`"""

    url: str
    timeout_s: float = 3.0

    def __post_init__(self) -> None:
        SourceTable.__post_init__(self)
        _above_zero("[[source]] timeout_s", self.timeout_s)
        try:
            parts = urlsplit(self.url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and \
                self.url.isascii() and self.url.isprintable() and " " not in self.url
        except ValueError:
            good = False
        if not good:
            raise ConfigError(f"[[source]] url = {self.url!r}: give an address such as http://10.0.0.11:8080/heat")

    def source(self) -> HeatSource:
        """Return the source that reads the machine's answers."""
        return HttpSource(self.url, timeout_s=self.timeout_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileTable(SourceTable):
    """`[[source]] kind = "file"`"""

    path: str

    def __post_init__(self) -> None:
        SourceTable.__post_init__(self)
        _absolute("[[source]] path", self.path)

    def source(self) -> HeatSource:
        """Return the source that reads the file."""
        return FileSource(Path(self.path), max_age_s=self.max_age_s)


_OUTPUTS: Mapping[str, type[FanTable]] = {
    "hwmon": HwmonTable, "ipmi": IpmiTable, "command": CommandTable, "simulated": SimulatedTable}
_SOURCES: Mapping[str, type[SourceTable]] = {"local": LocalTable, "http": HttpTable, "file": FileTable}


@dataclass(frozen=True, kw_only=True, slots=True)
class FanFile:
    """A whole configuration."""

    fan: FanTable
    policy_name: str
    policy_settings: Mapping[str, object]
    sources: Mapping[int, SourceTable]
    status_file: Path | None

    @property
    def boards(self) -> dict[int, int]:
        """Each SoC's board; all are on one where the file names none."""
        return {soc: table.board or 0 for soc, table in self.sources.items()}


def read_fan_file(path: Path) -> FanFile:
    """Return the configuration; `ConfigError` names the file and the invalid value."""
    document = read_toml(path, "fan configuration")
    try:
        return _fan_file(document)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _fan_file(document: Mapping[str, Any]) -> FanFile:
    reject_unknown_keys(document, _KEYS, "the file")
    schema = document.get("schema", 1)
    if schema != 1:
        raise ConfigError(f"schema = {schema!r} is not known to this version; write schema = 1")
    policy = document.get("policy")
    if not isinstance(policy, Mapping) or not isinstance(policy.get("name"), str):
        raise ConfigError('[policy] needs a name, such as name = "passive"')
    status_file = document.get("status_file")
    if status_file is not None and not _absolute("status_file", status_file).parent.is_dir():
        raise ConfigError(f"status_file = {status_file!r}: its folder is not there; make it, or name another")
    fan = _by_kind(_OUTPUTS, document.get("fan", {}), "output", "[fan]")
    sources: dict[int, SourceTable] = {}
    for index, table in enumerate(require_tables(document.get("source", []), "source", "the file")):
        where = f"[[source]] {index + 1}"
        source = _by_kind(_SOURCES, table, "kind", where)
        soc = index if source.soc is None else source.soc
        if source.board is not None and source.board < 0:
            raise ConfigError(f"{where} board = {source.board}: number boards from 0 on")
        if soc < 0 or soc in sources:
            raise ConfigError(f"{where} soc = {soc}: give each source another number, from 0 on")
        sources[soc] = source
    if not sources:
        raise ConfigError('there is no [[source]], so no temperature would be known; add one, such as kind = "local"')
    without = [soc for soc, source in sources.items() if source.board is None]
    if without and len(without) < len(sources):
        raise ConfigError(f"[[source]] soc = {without[0]} has no board, but others have; give all sources their board, "
                          "or none of them")
    return FanFile(fan=fan, policy_name=policy["name"], sources=sources,
                   policy_settings={key: value for key, value in policy.items() if key != "name"},
                   status_file=None if status_file is None else Path(status_file))


def _by_kind(kinds: Mapping[str, type[Any]], table: object, key: str, where: str) -> Any:
    """Return a table as the kind that one of its keys names."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a table, got {table!r}")
    kind = table.get(key)
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError(f"{where} {key} = {kind!r} is unknown; use one of {', '.join(kinds)}")
    return parse_table(kinds[kind], table, where)


def _absolute(where: str, value: object) -> Path:
    if not (isinstance(value, str) and Path(value).is_absolute() and "\0" not in value):
        raise ConfigError(f"{where} = {value!r}: give an absolute path")
    return Path(value)


def _above_zero(where: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise ConfigError(f"{where} = {value:g} must be above 0 and finite")
