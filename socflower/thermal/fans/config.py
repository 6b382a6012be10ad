"""The configuration of `socflower fan` as validated values, and the fans and sources that it describes."""

import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field

from socflower.errors import ConfigError
from socflower.field_rules import Positive, SchemaVersion, checked
from socflower.thermal.fans.control_loop import FanSettings
from socflower.thermal.fans.hwmon_pwm import HwmonPwm, find_hwmon
from socflower.thermal.fans.ipmi import IpmiCommand
from socflower.thermal.fans.objectives import ObjectiveCooling
from socflower.thermal.fans.outputs import DutyCurve, FanOutput, SimulatedFan
from socflower.thermal.fans.policies import (
    FanPolicy,
    FixedSpeed,
    PassiveCooling,
    PlannedLoad,
    PredictiveCooling,
)
from socflower.thermal.sensors.linux import LinuxSensors
from socflower.thermal.sensors.reading import HeatSource
from socflower.thermal.sensors.remote import FileSource, HttpSource
from socflower.thermal.sensors.sysfs import DeviceIdentity
from socflower.toml_file import Table, read_table, read_toml

_Number = Annotated[int, Field(ge=0)]
_Output = Annotated[int, Field(ge=1)]


@checked
class FanTable(FanSettings, ABC):
    """`[fan]`: what all outputs have in common."""

    @abstractmethod
    def outputs(self, last: DeviceIdentity | None = None) -> list[FanOutput]:
        """Return the fans without writing to them. Raises `ConfigError` for fans that do not exist.

        `last` is the chip that the daemon drove before with the same configuration, if it is known.
        """


@checked
class _DutyTable(FanTable):
    """Outputs that are set by duty, a fraction of full power."""

    min_duty_percent: Annotated[float, Field(ge=1, lt=100)] = 20.0
    curve_percent: tuple[int, ...] = ()
    curve_rpm: tuple[int, ...] = ()

    def check(self) -> None:
        """Refuse an invalid curve."""
        FanTable.check(self)
        self.curve()

    def curve(self) -> DutyCurve | None:
        """Return the measured curve, or None for a straight line."""
        if len(self.curve_percent) != len(self.curve_rpm):
            raise ConfigError("curve_percent and curve_rpm must be equally long")
        if not self.curve_percent:
            return None
        duties = [percent / 100.0 for percent in self.curve_percent]
        return DutyCurve(tuple(zip(duties, map(float, self.curve_rpm), strict=True)))

    @property
    def duty_settings(self) -> dict[str, Any]:
        """The speed arguments of `HwmonPwm` and `IpmiCommand`."""
        return {
            "min_rpm": self.min_rpm,
            "max_rpm": self.max_rpm,
            "min_duty": self.min_duty_percent / 100.0,
            "curve": self.curve(),
        }


@checked
class HwmonTable(_DutyTable):
    """`[fan] output = "hwmon"`"""

    folder: str
    pwm: Annotated[tuple[_Output, ...], Field(min_length=1)] = (1,)
    tachometer: tuple[int, ...] = ()
    automatic_mode: int | None = None

    def check(self) -> None:
        """Refuse outputs that are listed twice, and another number of tachometers than of outputs."""
        _DutyTable.check(self)
        if len(set(self.pwm)) != len(self.pwm):
            raise ConfigError(f"pwm = {list(self.pwm)} has an output twice")
        if self.tachometer and len(self.tachometer) != len(self.pwm):
            raise ConfigError(f"tachometer = {list(self.tachometer)} must have one number per pwm")

    def outputs(self, last: DeviceIdentity | None = None) -> list[FanOutput]:
        """Return a fan for each PWM output."""
        folder = find_hwmon(self.folder, last=last)
        settings = {**self.duty_settings, "automatic_mode": self.automatic_mode}
        tachometers = self.tachometer or self.pwm
        return [
            HwmonPwm(folder, pwm, fan=fan, **settings)
            for pwm, fan in zip(self.pwm, tachometers, strict=True)
        ]


@checked
class _ProgramTable(_DutyTable):
    """Outputs that are set by commands."""

    set: str
    begin: str = ""
    restore: str = ""
    timeout_s: float = 10.0

    def command(
        self,
        measure: str,
        *,
        program: str = "",
        sensor: str = "",
    ) -> IpmiCommand:
        """Return the fans behind the commands as one; with a program these are its arguments."""
        commands = (self.set, self.begin, self.restore, measure)
        template, begin, restore, measure = (
            text and f"{program} {text}".strip() for text in commands
        )
        return IpmiCommand(
            template,
            begin=begin,
            restore=restore,
            measure=measure,
            sensor=sensor,
            timeout_s=self.timeout_s,
            **self.duty_settings,
        )


@checked
class CommandTable(_ProgramTable):
    """`[fan] output = "command"`: any program."""

    measure: str = ""

    def outputs(self, last: DeviceIdentity | None = None) -> list[FanOutput]:
        """Return the fans behind the program as one."""
        return [self.command(self.measure)]


@checked
class IpmiTable(_ProgramTable):
    """`[fan] output = "ipmi"`: arguments of ipmitool."""

    sensor: str = ""
    ipmitool: str = "ipmitool"

    def outputs(self, last: DeviceIdentity | None = None) -> list[FanOutput]:
        """Return the controller's fans as one."""
        measure = f"-c sensor reading {shlex.quote(self.sensor)}" if self.sensor else ""
        return [self.command(measure, program=self.ipmitool, sensor=self.sensor)]


@checked
class SimulatedTable(FanTable):
    """`[fan] output = "simulated"`; `failure` is that of the first fan."""

    num_fans: Annotated[int, Field(ge=1)] = 1
    rpm_per_s: float = 2000.0
    failure: str = ""

    def outputs(self, last: DeviceIdentity | None = None) -> list[FanOutput]:
        """Return the fans, the first of which may be broken."""
        failures = [self.failure] + [""] * (self.num_fans - 1)
        return [
            SimulatedFan(self.max_rpm, rpm_per_s=self.rpm_per_s, failure=failure)
            for failure in failures
        ]


@checked
class SourceTable(ABC):
    """`[[source]]`: what all kinds have in common."""

    # By default its place in the list, from 0.
    soc: _Number | None = None
    # By default all SoCs are on one.
    board: _Number | None = None
    max_age_s: Positive = 30.0

    @abstractmethod
    def source(self) -> HeatSource:
        """Return the source of readings."""


@checked
class LocalTable(SourceTable):
    """`[[source]] kind = "local"`: this machine's sensors, or those below another root, as in a container."""

    root: str = "/"

    def check(self) -> None:
        """Refuse a relative path."""
        _absolute("root", self.root)

    def source(self) -> HeatSource:
        """Return the machine's sensors."""
        return LinuxSensors(Path(self.root))


@checked
class HttpTable(SourceTable):
    """`[[source]] kind = "http"`"""

    url: str
    timeout_s: Positive = 3.0

    def check(self) -> None:
        """Refuse an invalid address."""
        try:
            parts = urlsplit(self.url)
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            good = False
        # Printable ASCII without spaces.
        if not good or not re.fullmatch("[!-~]+", self.url):
            raise ConfigError(f"url = {self.url!r} must be like http://10.0.0.11:8080/heat")

    def source(self) -> HeatSource:
        """Return the source that reads the machine's answers."""
        return HttpSource(self.url, timeout_s=self.timeout_s)


@checked
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
        """Each SoC's board; all are on one if the file names none."""
        return {soc: table.board or 0 for soc, table in self.sources.items()}


class _Document(Table):
    """A configuration whose tables are not read yet: their keys depend on their kinds."""

    schema_version: SchemaVersion = Field(1, alias="schema")
    status_file: str | None = None
    fan: dict[str, Any] = Field({})
    policy: dict[str, Any] = Field({})
    source: tuple[dict[str, Any], ...] = ()


def read_fan_file(path: Path) -> FanFile:
    """Return the configuration; `ConfigError` names the file and the invalid value."""
    content = read_toml(path, "fan configuration")
    try:
        return _fan_file(read_table(_Document, content, ""))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _fan_file(document: _Document) -> FanFile:
    policy = dict(document.policy)
    name = policy.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError('[policy] needs a name, such as name = "passive"')
    status_file = None
    if document.status_file is not None:
        status_file = _absolute("status_file", document.status_file)
        if not status_file.parent.is_dir():
            raise ConfigError(f"status_file = {str(status_file)!r}: its folder does not exist")
    return FanFile(
        fan=_by_kind(_OUTPUTS, document.fan, "output", "[fan]"),
        policy_name=name,
        policy_settings=policy,
        sources=_sources(document.source),
        status_file=status_file,
    )


def _sources(tables: tuple[dict[str, Any], ...]) -> dict[int, SourceTable]:
    """Return the sources by SoC."""
    sources: dict[int, SourceTable] = {}
    for index, table in enumerate(tables):
        where = f"[[source]] {index + 1}"
        source: SourceTable = _by_kind(_SOURCES, table, "kind", where)
        soc = index if source.soc is None else source.soc
        if soc in sources:
            raise ConfigError(f"{where} soc = {soc}: another source has this number")
        sources[soc] = source
    if not sources:
        raise ConfigError('[[source]] is missing; add one, such as kind = "local"')
    # A SoC without a board would count for board 0, and hide that no other SoC of board 0 is known.
    without = [soc for soc, source in sources.items() if source.board is None]
    if without and len(without) < len(sources):
        raise ConfigError(f"[[source]] soc = {without[0]} has no board; others have")
    return sources


def _by_kind(
    kinds: Mapping[str, type[Any]],
    table: Mapping[str, Any],
    key: str,
    where: str,
) -> Any:
    """Return a table as the kind that one of its keys names."""
    kind = table.get(key)
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError(f"{where} {key} = {kind!r}: use one of {', '.join(kinds)}")
    # The kinds have no field for the key that names them.
    others = {name: value for name, value in table.items() if name != key}
    return read_table(kinds[kind], others, where)


def _absolute(key: str, path: str) -> Path:
    if not Path(path).is_absolute() or "\0" in path:
        raise ConfigError(f"{key} = {path!r} must be an absolute path")
    return Path(path)


class _Fixed(Table):
    """Keys of the policy "fixed"."""

    rpm: Positive


def make_policy(name: str, settings: Mapping[str, object]) -> FanPolicy:
    """Return a policy of a configuration file; `ConfigError` for an unknown name or key, or an invalid value.

    Keys are the classes' fields; `rpm` for "fixed", and for "predictive" and "objective" also those of their load.
    """
    where = f"policy {name}"
    if name == "fixed":
        return FixedSpeed(fixed_rpm=read_table(_Fixed, settings, where).rpm)
    if name == "passive":
        return read_table(PassiveCooling, settings, where)
    planned: dict[str, type[PredictiveCooling | ObjectiveCooling]] = {
        "predictive": PredictiveCooling,
        "objective": ObjectiveCooling,
    }
    if name not in planned:
        raise ConfigError(f"policy: name = {name!r}: use fixed, passive, predictive or objective")
    of_load = {entry.name for entry in fields(PlannedLoad)}
    load = {key: value for key, value in settings.items() if key in of_load}
    others = {key: value for key, value in settings.items() if key not in of_load}
    return read_table(planned[name], {"load": load, **others}, where)
