"""`socflower fan`: the daemon that sets the fans of a rack by the temperatures of its SoCs."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from socflower.errors import ConfigError
from socflower.thermal.fans.config import FanFile, HwmonTable, read_fan_file
from socflower.thermal.fans.control_loop import MOST_MISSING, FanControl, FanState, StopSignals
from socflower.thermal.fans.hwmon_pwm import HwmonPwm
from socflower.thermal.fans.outputs import DutyOutput, FanFailure, FanNotFound, FanOutput, calibrate
from socflower.thermal.fans.policies import FanPolicy
from socflower.thermal.sensors.remote import BackgroundSource
from socflower.thermal.sensors.sysfs import DeviceIdentity
from socflower.wire.folders import FolderLock
from socflower.wire.saved_state import write_atomically

PolicyMaker = Callable[[str, Mapping[str, object]], FanPolicy]

_FIRST_ANSWERS_S = 5.0
"""Longest wait for the sources' first answers, before the first step."""

_RESTORE_RETRY_S = 1.0
"""Longest wait before `--restore` looks again for a chip that is not there, as while its driver is loaded again."""

_NEWS = 0.05
"""A relative change of speed above this is printed."""

_CALIBRATION_DUTIES = tuple(percent / 100.0 for percent in range(100, 0, -10))


def run_fan(
    config: Path,
    *,
    once: bool = False,
    dry_run: bool = False,
    restore: bool = False,
    calibrate_fans: bool = False,
    as_json: bool = False,
    make_policy: PolicyMaker | None = None,
    show: Callable[[str], object] | None = None,
    say: Callable[[str], object] | None = None,
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
    make_policy : Callable, optional
        Makes the policy of `[policy]`; by default `socflower.thermal.fans.policies.make_policy`.
    show, say : Callable, optional
        Called with each line of results and of messages; by default they print to standard output and standard error.

    Returns
    -------
    bool
        False if `once` found too few temperatures or could not set a fan; if `restore` failed for a fan; or if the
        control ended because a fan was not there, or left one that could be neither restored nor set.
    """
    show, say = show or _print, say or _print_error
    if sum((once, restore, calibrate_fans)) > 1:
        raise ConfigError("--once, --restore and --calibrate: give one of them")
    loaded = read_fan_file(config)
    with (
        StopSignals() as stop,
        nullcontext() if dry_run else FolderLock(_lock_file(config, loaded), f"{config}: fans"),
    ):
        # After the lock, since the daemon that holds it may be writing to the outputs that are read here.
        try:
            policy = (make_policy or _policy_maker())(loaded.policy_name, loaded.policy_settings)
            outputs = (
                _restorable_outputs(loaded, stop)
                if restore
                else loaded.fan.outputs(_last_chip(loaded))
            )
        except ConfigError as error:
            raise ConfigError(f"{config}: {error}") from None
        chip = _chip_record(loaded, outputs)
        if dry_run:
            outputs = [_DryRun(output) for output in outputs]
        if calibrate_fans:
            _calibrate(outputs, loaded, stop, show, say)
            return True
        with ExitStack() as stack:
            sources = (
                {
                    soc: _in_background(table.source(), table.max_age_s, loaded, stack)
                    for soc, table in loaded.sources.items()
                }
                if not restore
                else {}
            )
            settings = loaded.fan
            alert_lines: list[str] = []

            def tell(line: str) -> None:
                alert_lines.append(line)
                say(line)

            # Policies see seconds since the daemon started; a planned load in a file uses the same clock.
            began_s = time.monotonic()
            control = FanControl(
                sources or {0: _NoSource()},
                policy,
                outputs,
                min_rpm=settings.min_rpm,
                max_rpm=settings.max_rpm,
                failsafe_rpm=settings.failsafe_rpm,
                boards=loaded.boards if sources else None,
                period_s=settings.period_s,
                max_silence_s=settings.max_silence_s,
                stuck_after_s=settings.stuck_after_s,
                spin_up_s=settings.spin_up_s,
                say=tell,
                clock=lambda: time.monotonic() - began_s,
            )
            if restore:
                with control:
                    pass
                return not alert_lines
            deadline_s = time.monotonic() + _FIRST_ANSWERS_S
            for source in sources.values():
                source.wait_for_first(deadline_s - time.monotonic())
            is_there = True
            with control:
                reporter = _Reporter(loaded, outputs, chip, dry_run, show if as_json else None, say)
                if once:
                    state = control.step()
                    document = reporter.note(state)
                    if not as_json:
                        for line in _lines(document):
                            show(line)
                    return (
                        not state.num_output_errors
                        and not state.failsafe
                        and state.hottest_c is not None
                    )

                def on_step(state: FanState) -> None:
                    _notify("READY=1\nWATCHDOG=1")  # resets the watchdog's timeout
                    reporter.note(state)

                try:
                    control.run(stop.wait, on_step)
                except FanNotFound as error:
                    say(str(error))
                    is_there = False
                _notify("STOPPING=1")
    return is_there and not control.uncontrolled


class _Reporter:
    """Writes the status file, and prints a line when the speed changes."""

    def __init__(
        self,
        loaded: FanFile,
        outputs: list[FanOutput],
        chip: Mapping[str, object] | None,
        dry_run: bool,
        show: Callable[[str], object] | None,
        say: Callable[[str], object],
    ) -> None:
        self._loaded, self._outputs, self._chip, self._dry_run = loaded, outputs, chip, dry_run
        self._show, self._say = show, say
        self._said_rpm: float | None = None
        self._complained = False

    def note(self, state: FanState) -> dict[str, Any]:
        """Report the state of a step; return it as a document."""
        document = self._document(state)
        if self._said_rpm is None or abs(state.rpm - self._said_rpm) > _NEWS * self._said_rpm:
            hottest = (
                "no SoC's temperature is known"
                if state.hottest_c is None
                else f"the hottest SoC has {state.hottest_c:.1f} °C"
            )
            speed = f"{state.rpm:.0f} rpm{', the fail-safe speed' if state.failsafe else ''}"
            num_failed = sum(rpm is None for rpm in state.set_rpm)
            self._say(
                f"{num_failed} of {len(state.set_rpm)} fans cannot be set to {speed}: {hottest}"
                if num_failed
                else f"fans at {speed}: {hottest}"
            )
            self._said_rpm = state.rpm
        if self._loaded.status_file is not None:
            try:
                write_atomically(
                    self._loaded.status_file, (json.dumps(document, indent=1).encode(), b"\n")
                )
                self._complained = False
            except OSError as error:
                if not self._complained:
                    self._say(
                        f"{self._loaded.status_file}: cannot be written ({error.strerror}); fan control goes on"
                    )
                self._complained = True
        if self._show is not None:
            self._show(json.dumps(document))
        return document

    def _document(self, state: FanState) -> dict[str, Any]:
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
            "fans": [
                {"name": output.describe(), "set_rpm": set_rpm, "measured_rpm": measured_rpm}
                for output, set_rpm, measured_rpm in zip(
                    self._outputs, state.set_rpm, state.measured_rpm, strict=True
                )
            ],
            "num_output_errors": state.num_output_errors,
            "notes": list(state.notes),
        }


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


class _NoSource:
    """Placeholder source for `restore`, which reads nothing."""

    def read(self) -> Any:
        """Refuse."""
        raise AssertionError("only restoring fans")


def _calibrate(
    outputs: list[FanOutput],
    loaded: FanFile,
    stop: StopSignals,
    show: Callable[[str], object],
    say: Callable[[str], object],
) -> None:
    """Print each fan's curve as keys of `[fan]`. Every fan is restored, or left at full power."""

    def sleep(seconds: float) -> None:
        if stop.wait(seconds):
            raise KeyboardInterrupt

    least = getattr(loaded.fan, "min_duty_percent", 100.0) / 100.0
    for output in outputs:
        if not isinstance(output, DutyOutput):
            raise ConfigError(
                f"--calibrate: {output.describe()} has no duty to set; it is for hwmon, ipmi and "
                "command, without --dry-run"
            )
        try:
            curve = calibrate(
                output, duties=[duty for duty in _CALIBRATION_DUTIES if duty >= least], sleep=sleep
            )
        except FanFailure as error:
            raise ConfigError(f"--calibrate: {error}") from None
        finally:
            try:
                output.restore()
            except FanFailure as error:
                say(f"{error}; it turns at full power now")
        show(f"# {output.describe()}")
        show(f"curve_percent = {[round(100 * duty) for duty, _ in curve.points]}")
        show(f"curve_rpm = {[round(rpm) for _, rpm in curve.points]}")


def _chip_record(loaded: FanFile, outputs: list[FanOutput]) -> dict[str, object] | None:
    """Return what the status file keeps of the chip, so that a later process knows it though its number has changed."""
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
        if chip["folder"] != loaded.fan.folder:
            return None
        identity = DeviceIdentity(chip["name"], chip["device"])
    except (
        OSError,
        ValueError,
        TypeError,
        LookupError,
    ):  # there was none, or an earlier version wrote it
        return None
    return (
        identity
        if all(isinstance(part, str | None) for part in identity) and any(identity)
        else None
    )


def _restorable_outputs(loaded: FanFile, stop: StopSignals) -> list[FanOutput]:
    """Return the fans; a chip that is not there is looked for three times, since its driver may be loaded just now."""
    for _ in range(MOST_MISSING - 1):
        try:
            return loaded.fan.outputs(_last_chip(loaded))
        except ConfigError:
            if stop.wait(min(loaded.fan.period_s, _RESTORE_RETRY_S)):
                break
    return loaded.fan.outputs(_last_chip(loaded))


def _lock_file(config: Path, loaded: FanFile) -> Path:
    """Return the lock file against a second daemon on the same fans; it lies in the status file's folder, if any."""
    beside = loaded.status_file or config
    return beside.with_name(f".{beside.name}.lock")


def _in_background(
    source: Any, max_age_s: float, loaded: FanFile, stack: ExitStack
) -> BackgroundSource:
    background = BackgroundSource(source, period_s=loaded.fan.period_s, max_age_s=max_age_s)
    stack.callback(background.close)
    return background


def _lines(document: Mapping[str, Any]) -> list[str]:
    """Return the state of a step as readable lines."""
    lines = [
        f"SoC {soc}: {'not known' if value is None else f'{value:.1f} °C'}"
        for soc, value in document["temperatures_c"].items()
    ]
    for fan in document["fans"]:
        measured = (
            ""
            if fan["measured_rpm"] is None
            else f", turned at {fan['measured_rpm']:.0f} rpm before"
        )
        speed = "not set" if fan["set_rpm"] is None else f"{fan['set_rpm']:.0f} rpm"
        lines.append(f"fan {fan['name']}: {speed}{measured}")
    return lines + list(document["notes"])


def _policy_maker() -> PolicyMaker:
    from socflower.thermal.fans.policies import make_policy

    return make_policy


def _notify(state: str) -> None:
    """Send a state to systemd if it started this process with a notify socket (sd_notify)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.sendto(
                state.encode(), f"\0{address[1:]}" if address.startswith("@") else address
            )


def _print(line: str) -> None:
    print(line, flush=True)


def _print_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
