"""The configuration of `socflower fan` as validated values, and the fans and sources that it describes."""

import shlex
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field

from socflower.errors import ConfigError
from socflower.field_rules import SchemaVersion
from socflower.thermal.fans.hwmon_pwm import HwmonPwm, find_hwmon
from socflower.thermal.fans.ipmi import IpmiCommand
from socflower.thermal.fans.outputs import DutyCurve, FanOutput, SimulatedFan
from socflower.thermal.sensors.reading import HeatSource
from socflower.thermal.sensors.remote import FileSource, HttpSource
from socflower.thermal.sensors.sysfs import DeviceIdentity
from socflower.toml_file import Table, read_table, read_toml

Positive = Annotated[float, Field(gt=0)]
Number = Annotated[int, Field(ge=0)]


class FanTable(Table):
    """`[fan]`: what all outputs have in common."""

    output: str
    min_rpm: Positive
    max_rpm: float
    failsafe_rpm: float
    period_s: Positive = 5.0
    max_silence_s: Positive = 30.0
    stuck_after_s: Positive = 600.0
    spin_up_s: Positive = 15.0

    def check(self) -> None:
        """Refuse speeds in the wrong order."""
        if not self.min_rpm <= self.failsafe_rpm <= self.max_rpm or self.min_rpm == self.max_rpm:
            raise ValueError(
                f"need 0 < min_rpm <= failsafe_rpm <= max_rpm and min_rpm < max_rpm, got "
                f"{self.min_rpm:g}, {self.failsafe_rpm:g} and {self.max_rpm:g}"
            )

    @abstractmethod
    def outputs(self, last: DeviceIdentity | None = None) -> list[FanOutput]:
        """Return the fans without writing to them. Raises `ConfigError` for fans that do not exist.

        `last` is the chip that the daemon drove before with the same configuration, if it is known.
        """


class _DutyTable(FanTable):
    """Outputs that are set by duty, a fraction of full power."""

    min_duty_percent: float = Field(20.0, ge=1, lt=100)
    curve_percent: tuple[int, ...] = ()
    curve_rpm: tuple[int, ...] = ()

    def check(self) -> None:
        """Refuse a curve that is none."""
        super().check()
        if len(self.curve_percent) != len(self.curve_rpm):
            raise ValueError(
                f"curve_percent has {len(self.curve_percent)} numbers and curve_rpm "
                f"{len(self.curve_rpm)}; give a speed for each"
            )
        self.curve()

    def curve(self) -> DutyCurve | None:
        """Return the measured curve, or None for a straight line."""
        if not self.curve_percent:
            return None
        return DutyCurve(
            tuple(
                (percent / 100.0, float(rpm))
                for percent, rpm in zip(self.curve_percent, self.curve_rpm, strict=True)
            )
        )

    @property
    def duty_settings(self) -> dict[str, Any]:
        """The speed arguments of `HwmonPwm` and `IpmiCommand`."""
        return {
            "min_rpm": self.min_rpm,
            "max_rpm": self.max_rpm,
            "min_duty": self.min_duty_percent / 100.0,
            "curve": self.curve(),
        }


class HwmonTable(_DutyTable):
    """`[fan] output = "hwmon"`"""

    folder: str
    pwm: tuple[Annotated[int, Field(ge=1)], ...] = Field((1,), min_length=1)
    tachometer: tuple[int, ...] = ()
    automatic_mode: int | None = None

    def check(self) -> None:
        """Refuse outputs that are listed twice, and tachometers that are not one for each."""
        super().check()
        if len(set(self.pwm)) != len(self.pwm):
            raise ValueError(
                f"pwm = {list(self.pwm)}: list each output once, by its number from 1 on"
            )
        if self.tachometer and len(self.tachometer) != len(self.pwm):
            raise ValueError(
                f"tachometer = {list(self.tachometer)}: needs {len(self.pwm)} numbers, one for each of "
                "pwm; leave it out where they are the same"
            )

    def outputs(self, last: DeviceIdentity | None = None) -> list[FanOutput]:
        """Return a fan for each PWM output."""
        folder = find_hwmon(self.folder, last=last)
        tachometers = self.tachometer or self.pwm
        return [
            HwmonPwm(folder, pwm, fan=fan, automatic_mode=self.automatic_mode, **self.duty_settings)
            for pwm, fan in zip(self.pwm, tachometers, strict=True)
        ]


class IpmiTable(_DutyTable):
    """`[fan] output = "ipmi"`: arguments of ipmitool."""

    set: str
    begin: str = ""
    restore: str = ""
    sensor: str = ""
    ipmitool: str = "ipmitool"
    timeout_s: float = 10.0

    def outputs(self, last: DeviceIdentity | None = None) -> list[FanOutput]:
        """Return the controller's fans as one."""

        def command(arguments: str) -> str:
            return f"{self.ipmitool} {arguments}" if arguments else ""

        measure = command(f"-c sensor reading {shlex.quote(self.sensor)}") if self.sensor else ""
        return [
            IpmiCommand(
                command(self.set),
                begin=command(self.begin),
                restore=command(self.restore),
                measure=measure,
                sensor=self.sensor,
                timeout_s=self.timeout_s,
                **self.duty_settings,
            )
        ]


class CommandTable(_DutyTable):
    """`[fan] output = "command"`: any program."""

    set: str
    begin: str = ""
    restore: str = ""
    measure: str = ""
    timeout_s: float = 10.0

    def outputs(self, last: DeviceIdentity | None = None) -> list[FanOutput]:
        """Return the fans behind the program as one."""
        return [
            IpmiCommand(
                self.set,
                begin=self.begin,
                restore=self.restore,
                measure=self.measure,
                timeout_s=self.timeout_s,
                **self.duty_settings,
            )
        ]


class SimulatedTable(FanTable):
    """`[fan] output = "simulated"`"""

    num_fans: int = Field(1, ge=1)
    rpm_per_s: float = 2000.0
    failure: str = ""  # of the first fan

    def outputs(self, last: DeviceIdentity | None = None) -> list[FanOutput]:
        """Return the fans, the first of which may be broken."""
        return [
            SimulatedFan(
                self.max_rpm, rpm_per_s=self.rpm_per_s, failure="" if index else self.failure
            )
            for index in range(self.num_fans)
        ]


class SourceTable(Table):
    """`[[source]]`: what all kinds have in common."""

    kind: str
    soc: Number | None = None  # default: its place in the list, from 0
    board: Number | None = None  # default: all SoCs are on one
    max_age_s: Positive = 30.0

    @abstractmethod
    def source(self) -> HeatSource:
        """Return the source of readings."""


class LocalTable(SourceTable):
    """`[[source]] kind = "local"`: this machine's sensors, or those below another root, as in a container."""

    root: str = "/"

    def check(self) -> None:
        """Refuse a relative path."""
        _absolute("root", self.root)

    def source(self) -> HeatSource:
        """Return the machine's sensors."""
        from socflower.thermal.sensors.linux import LinuxSensors

        return LinuxSensors(Path(self.root))


class HttpTable(SourceTable):
    """`[[source]] kind = "http"`"""

    url: str
    timeout_s: Positive = 3.0

    def check(self) -> None:
        """Refuse what is no address."""
        try:
            parts = urlsplit(self.url)
            good = (
                parts.scheme in ("http", "https")
                and bool(parts.hostname)
                and parts.port != 0
                and self.url.isascii()
                and self.url.isprintable()
                and " " not in self.url
            )
        except ValueError:
            good = False
        if not good:
            raise ValueError(
                f"url = {self.url!r}: give an address such as http://10.0.0.11:8080/heat"
            )

    def source(self) -> HeatSource:
        """Return the source that reads the machine's answers."""
        return HttpSource(self.url, timeout_s=self.timeout_s)


class FileTable(SourceTable):
    """`[[source]] kind = "file"`"""

    path: str

    def check(self) -> None:
        """Refuse a relative path."""
        _absolute("path", self.path)

    def source(self) -> HeatSource:
        """Return the source that reads the file."""
        return FileSource(Path(self.path), max_age_s=self.max_age_s)


_OUTPUTS: Mapping[str, type[FanTable]] = {
    "hwmon": HwmonTable,
    "ipmi": IpmiTable,
    "command": CommandTable,
    "simulated": SimulatedTable,
}
_SOURCES: Mapping[str, type[SourceTable]] = {
    "local": LocalTable,
    "http": HttpTable,
    "file": FileTable,
}


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


class _Document(Table):
    """A configuration whose tables are not read yet: their keys depend on their kinds."""

    schema_version: SchemaVersion = Field(1, alias="schema")
    status_file: str | None = None
    fan: dict[str, Any] = Field({})
    policy: dict[str, Any] = Field({})
    source: tuple[dict[str, Any], ...] = ()


def _fan_file(content: Mapping[str, Any]) -> FanFile:
    document = read_table(_Document, content, "")
    name = document.policy.get("name")
    if not isinstance(name, str):
        raise ConfigError('[policy] needs a name, such as name = "passive"')
    status_file = document.status_file
    if status_file is not None and not _absolute("status_file", status_file).parent.is_dir():
        raise ConfigError(
            f"status_file = {status_file!r}: its folder is not there; make it, or name another"
        )
    fan = _by_kind(_OUTPUTS, document.fan, "output", "[fan]")
    sources: dict[int, SourceTable] = {}
    for index, table in enumerate(document.source):
        where = f"[[source]] {index + 1}"
        source = _by_kind(_SOURCES, table, "kind", where)
        soc = index if source.soc is None else source.soc
        if soc in sources:
            raise ConfigError(f"{where} soc = {soc}: give each source another number, from 0 on")
        sources[soc] = source
    if not sources:
        raise ConfigError(
            'there is no [[source]], so no temperature would be known; add one, such as kind = "local"'
        )
    without = [soc for soc, source in sources.items() if source.board is None]
    if without and len(without) < len(sources):
        raise ConfigError(
            f"[[source]] soc = {without[0]} has no board, but others have; give all sources their board, "
            "or none of them"
        )
    return FanFile(
        fan=fan,
        policy_name=name,
        sources=sources,
        policy_settings={key: value for key, value in document.policy.items() if key != "name"},
        status_file=None if status_file is None else Path(status_file),
    )


def _by_kind(kinds: Mapping[str, type[Any]], table: Mapping[str, Any], key: str, where: str) -> Any:
    """Return a table as the kind that one of its keys names."""
    kind = table.get(key)
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError(f"{where} {key} = {kind!r} is unknown; use one of {', '.join(kinds)}")
    return read_table(kinds[kind], table, where)


def _absolute(where: str, path: str) -> Path:
    if not Path(path).is_absolute() or "\0" in path:
        raise ConfigError(f"{where} = {path!r}: give an absolute path")
    return Path(path)
