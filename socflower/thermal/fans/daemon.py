"""`socflower fan`: the daemon that sets the fans of a rack by the temperatures of its SoCs."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import (
    AbstractContextManager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from socflower.errors import ConfigError
from socflower.thermal.fans.config import FanFile, HwmonTable, make_policy, read_fan_file
from socflower.thermal.fans.control_loop import (
    MOST_MISSING,
    FanControl,
    FanState,
    StopSignals,
    restore_fans,
)
from socflower.thermal.fans.hwmon_pwm import HwmonPwm
from socflower.thermal.fans.outputs import DutyOutput, FanFailure, FanNotFound, FanOutput, calibrate
from socflower.thermal.fans.policies import FanPolicy
from socflower.thermal.sensors.guarded import GuardedSource
from socflower.thermal.sensors.sysfs import DeviceIdentity
from socflower.wire.folders import FolderLock
from socflower.wire.saved_state import write_atomically

Say = Callable[[str], object]
"""Called with each line of a text."""

_FIRST_ANSWERS_S = 5.0
"""Longest wait for the sources' first answers, before the first step."""

_RESTORE_RETRY_S = 1.0
"""Longest wait before `--restore` looks again for a chip that is not there, as while its driver is loading."""

_NEWS = 0.05
"""A relative change of speed above this is printed."""

_CALIBRATION_DUTIES = tuple(percent / 100.0 for percent in range(100, 0, -10))


def _print(line: str) -> None:
    print(line, flush=True)


def _print_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_fan(
    config: Path,
    *,
    once: bool = False,
    dry_run: bool = False,
    restore: bool = False,
    calibrate_fans: bool = False,
    as_json: bool = False,
    show: Say = _print,
    say: Say = _print_error,
) -> bool:
    """Control the fans until SIGTERM, SIGINT or SIGHUP, then restore their previous control.

    Parameters
    ----------
    config : Path
        The configuration; an invalid one raises `ConfigError` before any fan is touched.
    once : bool
        Do one step: read, set the fans, print the state, and restore the fans.
    dry_run : bool
        Set nothing.
    restore : bool
        Only restore the fans' previous control, as after a daemon that was killed.
    calibrate_fans : bool
        Only measure the fans' speeds by duty, and print the keys of `[fan]` for them.
    as_json : bool
        Print one JSON document per step.
    show, say : Callable
        Called with each line of results and of messages; by default they go to standard output and standard error.

    Returns
    -------
    bool
        False if `once` found too few temperatures or could not set a fan; if `restore` failed for a fan; or if the
        control ended because a fan was not there, or left one that could be neither restored nor set.
    """
    if sum((once, restore, calibrate_fans)) > 1:
        raise ConfigError("--once, --restore and --calibrate: give one of them")
    loaded = read_fan_file(config)
    with StopSignals() as stop, _lock(config, loaded, dry_run=dry_run):
        # After the lock, since the daemon that holds it may be writing to the outputs that are read here.
        try:
            policy = make_policy(loaded.policy_name, loaded.policy_settings)
            outputs = _outputs(loaded, stop, retry=restore)
        except ConfigError as error:
            raise ConfigError(f"{config}: {error}") from None
        chip = _chip_record(loaded, outputs)
        if dry_run:
            outputs = [_DryRun(output) for output in outputs]
        if calibrate_fans:
            _calibrate(outputs, loaded, stop, show, say)
            return True
        if restore:
            return _restore(outputs, loaded, say)
        reporter = _Reporter(loaded, outputs, chip, dry_run, show if as_json else None, say)
        control = _control(outputs, policy, loaded, say)
        if once:
            return _step_once(control, reporter, None if as_json else show)
        return _run(control, stop, reporter, say)


def _control(
    outputs: list[FanOutput],
    policy: FanPolicy,
    loaded: FanFile,
    say: Say,
) -> FanControl:
    """Return the control of the fans, after the first answers of sources that are read in the background."""
    # Each step asks, and gets the answer to the step before, which is therefore a period old.
    least_age_s = 2.0 * loaded.fan.period_s
    sources = {
        soc: GuardedSource(table.source, timeout_s=0.0, max_age_s=max(table.max_age_s, least_age_s))
        for soc, table in loaded.sources.items()
    }
    # Policies see seconds since the daemon started; a planned load in a file uses the same clock.
    began_s = time.monotonic()
    control = FanControl(
        sources,
        policy,
        outputs,
        loaded.fan,
        boards=loaded.boards,
        say=say,
        clock=lambda: time.monotonic() - began_s,
    )
    # All are asked before the first is waited for.
    for source in sources.values():
        source.read()
    for source in sources.values():
        source.wait(began_s + _FIRST_ANSWERS_S - time.monotonic())
    return control


def _step_once(control: FanControl, reporter: "_Reporter", show: Say | None) -> bool:
    """Do one step; return whether enough temperatures are known and all fans were set."""
    with control:
        state = control.step()
        document = reporter.note(state)
        if show is not None:
            for line in _lines(document):
                show(line)
    is_known = state.hottest_c is not None and not state.failsafe
    return is_known and not state.num_output_errors


def _run(
    control: FanControl,
    stop: StopSignals,
    reporter: "_Reporter",
    say: Say,
) -> bool:
    """Step until a signal; return False if a fan was not there, or could neither be restored nor set."""

    def on_step(state: FanState) -> None:
        # Without this systemd's watchdog restarts the daemon.
        _notify("READY=1\nWATCHDOG=1")
        reporter.note(state)

    is_there = True
    with control:
        try:
            control.run(stop.wait, on_step)
        except FanNotFound as error:
            say(str(error))
            is_there = False
        _notify("STOPPING=1")
    return is_there and not control.uncontrolled


def _restore(outputs: list[FanOutput], loaded: FanFile, say: Say) -> bool:
    """Restore the fans' previous control; return whether no fan failed."""
    lines: list[str] = []
    restore_fans(outputs, loaded.fan, lines.append)
    for line in lines:
        say(line)
    return not lines


class _Reporter:
    """Writes the status file, and prints a line when the speed changes."""

    def __init__(
        self,
        loaded: FanFile,
        outputs: list[FanOutput],
        chip: Mapping[str, object] | None,
        dry_run: bool,
        show_json: Say | None,
        say: Say,
    ) -> None:
        self._loaded = loaded
        self._outputs = outputs
        self._chip = chip
        self._dry_run = dry_run
        self._show_json = show_json
        self._say = say
        self._said_rpm: float | None = None
        self._has_failed = False

    def note(self, state: FanState) -> dict[str, Any]:
        """Report the state of a step; return it as a document."""
        document = self._document(state)
        before_rpm = self._said_rpm
        if before_rpm is None or abs(state.rpm - before_rpm) > _NEWS * before_rpm:
            self._say(_speed_line(state))
            self._said_rpm = state.rpm
        if self._loaded.status_file is not None:
            self._write(self._loaded.status_file, document)
        if self._show_json is not None:
            self._show_json(json.dumps(document))
        return document

    def _write(self, status_file: Path, document: dict[str, Any]) -> None:
        """Write the status file; the first of several failures in succession is reported."""
        try:
            write_atomically(status_file, (json.dumps(document, indent=1).encode(), b"\n"))
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                self._say(
                    f"{status_file}: cannot be written ({error.strerror}); fan control continues"
                )
            self._has_failed = True

    def _document(self, state: FanState) -> dict[str, Any]:
        speeds = zip(self._outputs, state.set_rpm, state.measured_rpm, strict=True)
        fans = [
            {"name": output.describe(), "set_rpm": set_rpm, "measured_rpm": measured_rpm}
            for output, set_rpm, measured_rpm in speeds
        ]
        return {
            "schema": 1,
            "unix_s": round(time.time(), 3),
            "policy": self._loaded.policy_name,
            "dry_run": self._dry_run,
            "temperatures_c": {str(soc): value for soc, value in state.temperatures_c.items()},
            "hottest_c": state.hottest_c,
            "num_unknown": state.num_unknown,
            "rpm": state.rpm,
            "failsafe": state.failsafe,
            "chip": self._chip,
            "fans": fans,
            "num_output_errors": state.num_output_errors,
            "notes": list(state.notes),
        }


def _speed_line(state: FanState) -> str:
    speed = f"{state.rpm:.0f} rpm{', the fail-safe speed' if state.failsafe else ''}"
    hottest = "no SoC's temperature is known"
    if state.hottest_c is not None:
        hottest = f"the hottest SoC has {state.hottest_c:.1f} °C"
    num_failed = state.set_rpm.count(None)
    if num_failed:
        return f"{num_failed} of {len(state.set_rpm)} fans cannot be set to {speed}: {hottest}"
    return f"fans at {speed}: {hottest}"


@dataclass(frozen=True, slots=True)
class _DryRun:
    """A fan that is measured and never set."""

    output: FanOutput

    def set_rpm(self, rpm: float) -> None:
        """Do nothing."""

    def measured_rpm(self) -> float | None:
        """Return the measured speed."""
        return self.output.measured_rpm()

    def restore(self) -> None:
        """Do nothing."""

    def describe(self) -> str:
        """Return the fan's description."""
        return f"{self.output.describe()}, not touched"


def _calibrate(
    outputs: list[FanOutput],
    loaded: FanFile,
    stop: StopSignals,
    show: Say,
    say: Say,
) -> None:
    """Print each fan's curve as keys of `[fan]`. Every fan is restored, or left at full power."""

    def sleep(seconds: float) -> None:
        if stop.wait(seconds):
            raise KeyboardInterrupt

    least = getattr(loaded.fan, "min_duty_percent", 100.0) / 100.0
    duties = [duty for duty in _CALIBRATION_DUTIES if duty >= least]
    for output in outputs:
        if not isinstance(output, DutyOutput):
            raise ConfigError(
                f"--calibrate: {output.describe()} has no duty; use hwmon, ipmi or command, and no --dry-run"
            )
        try:
            curve = calibrate(output, duties=duties, sleep=sleep)
        except FanFailure as error:
            raise ConfigError(f"--calibrate: {error}") from None
        finally:
            try:
                output.restore()
            except FanFailure as error:
                say(f"{error}; it turns at full power now")
        show(f"# {output.describe()}")
        percent = [round(100 * duty) for duty, _ in curve.points]
        rpm = [round(rpm) for _, rpm in curve.points]
        show(f"curve_percent = {percent}")
        show(f"curve_rpm = {rpm}")


def _chip_record(loaded: FanFile, outputs: list[FanOutput]) -> dict[str, object] | None:
    """Return the chip for the status file: a later process finds it there, even if its number has changed."""
    if isinstance(loaded.fan, HwmonTable):
        for output in outputs:
            if isinstance(output, HwmonPwm):
                return {"folder": loaded.fan.folder, **output.identity._asdict()}
    return None


def _last_chip(loaded: FanFile) -> DeviceIdentity | None:
    """Return the chip of the status file's last step, if it was for the same `folder`."""
    if loaded.status_file is None or not isinstance(loaded.fan, HwmonTable):
        return None
    try:
        chip = json.loads(loaded.status_file.read_bytes())["chip"]
        folder, *identity = chip["folder"], chip["name"], chip["device"]
    # There is no file, or it was not written by this daemon.
    except (OSError, ValueError, TypeError, LookupError):
        return None
    are_texts = all(isinstance(part, str | None) for part in identity)
    if not are_texts or not any(identity) or folder != loaded.fan.folder:
        return None
    return DeviceIdentity(*identity)


def _outputs(
    loaded: FanFile,
    stop: StopSignals,
    *,
    retry: bool,
) -> list[FanOutput]:
    """Return the fans. With `retry` a chip that is not there is looked for three times: its driver may be loading."""
    for _ in range(MOST_MISSING - 1 if retry else 0):
        try:
            return loaded.fan.outputs(_last_chip(loaded))
        except ConfigError:
            if stop.wait(min(loaded.fan.period_s, _RESTORE_RETRY_S)):
                break
    # The last attempt raises.
    return loaded.fan.outputs(_last_chip(loaded))


def _lock(config: Path, loaded: FanFile, *, dry_run: bool) -> AbstractContextManager[object]:
    """Lock the fans against a second daemon, by a file beside the status file or else the configuration."""
    if dry_run:
        return nullcontext()
    beside = loaded.status_file or config
    return FolderLock(beside.with_name(f".{beside.name}.lock"), f"{config}: fans")


def _lines(document: Mapping[str, Any]) -> list[str]:
    """Return the state of a step as readable lines."""
    lines: list[str] = []
    for soc, value in document["temperatures_c"].items():
        temperature = "not known" if value is None else f"{value:.1f} °C"
        lines.append(f"SoC {soc}: {temperature}")
    for fan in document["fans"]:
        set_rpm = fan["set_rpm"]
        measured_rpm = fan["measured_rpm"]
        speed = "not set" if set_rpm is None else f"{set_rpm:.0f} rpm"
        before = "" if measured_rpm is None else f", turned at {measured_rpm:.0f} rpm before"
        lines.append(f"fan {fan['name']}: {speed}{before}")
    return [*lines, *document["notes"]]


def _notify(state: str) -> None:
    """Send a state to systemd if it started this process with a notify socket (sd_notify)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address.startswith("@"):
        address = f"\0{address[1:]}"
    if address:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.sendto(state.encode(), address)
