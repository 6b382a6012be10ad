"""Fans set by a command: a baseboard controller through ipmitool, or any other program."""

import math
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from socflower.errors import ConfigError, require_range
from socflower.thermal.fans.outputs import (
    MIN_DUTY,
    DutyCurve,
    FanFailure,
    checked_speed,
    duty_curve,
    measured_speed,
)
from socflower.thermal.sensors.sysfs import reason

_PLACEHOLDER = re.compile(r"\{(\w*)\}")
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


class IpmiCommand:
    """A fan set by a command, such as `ipmitool raw 0x30 0x70 0x66 0x01 0x00 {percent}`; no shell is involved.

    Parameters
    ----------
    template : str
        The command; `{percent}` stands for the duty, `{rpm}` for the speed, both as whole numbers.
    begin, restore : str
        Commands that take control from the firmware, before the first speed, and return it.
    measure : str
        A command; the last number that it prints is the speed.
    sensor : str
        The sensor's name, if `measure` prints it before the speed: a number in the name does not count.
    timeout_s : float
        Timeout of a command; after it the command and all its child processes are killed, which counts as a failure.
    """

    def __init__(
        self,
        template: str,
        *,
        min_rpm: float,
        max_rpm: float,
        begin: str = "",
        restore: str = "",
        measure: str = "",
        sensor: str = "",
        curve: DutyCurve | None = None,
        min_duty: float = MIN_DUTY,
        timeout_s: float = 10.0,
    ) -> None:
        self.curve = duty_curve(
            curve,
            min_rpm=min_rpm,
            max_rpm=max_rpm,
            min_duty=min_duty,
        )
        require_range("fan", above=0.0, timeout_s=timeout_s)
        self._min_duty = min_duty
        self._timeout_s = timeout_s
        self._set = _words(template, "set", ("percent", "rpm"))
        if not _PLACEHOLDER.search(template):
            raise ConfigError(f"fan command set = {template!r}: needs {{percent}} or {{rpm}}")
        self._begin = _words(begin, "begin")
        self._restore = _words(restore, "restore")
        self._measure = _words(measure, "measure")
        self._sensor = sensor
        self._begun = False

    def set_rpm(self, rpm: float) -> None:
        """Run the command for this speed. Raises `FanFailure` with its output."""
        rpm = checked_speed(rpm)
        self._run_for(self.curve.duty(rpm), rpm)

    def set_duty(self, duty: float) -> None:
        """Run the command for a fraction of full power. Raises `FanFailure`."""
        self._run_for(duty, self.curve.points[-1][1] * duty)

    def measured_rpm(self) -> float | None:
        """Return the last number that the command prints; None if it fails or prints none."""
        if not self._measure:
            return None
        try:
            printed = self._run(self._measure)
        except FanFailure:
            return None
        numbers = _NUMBER.findall(printed.strip().removeprefix(self._sensor))
        return measured_speed(float(numbers[-1])) if numbers else None

    def restore(self) -> None:
        """Run the restore command. Raises `FanFailure` if it fails or none was given."""
        self._begun = False
        if not self._restore:
            raise FanFailure(f"{self.describe()}: has no restore command")
        self._run(self._restore)

    def describe(self) -> str:
        """Return the command."""
        return " ".join(self._set)

    def _run_for(self, duty: float, rpm: float) -> None:
        duty = max(duty, self._min_duty)
        # Rounded up: never slower than requested. The small subtraction keeps 0.29 * 100 at 29.
        percent = math.ceil(100.0 * duty - 1e-9)
        percent = min(max(percent, 1), 100)
        values = {"percent": str(percent), "rpm": str(math.ceil(rpm))}

        def value_of(found: re.Match[str]) -> str:
            return values[found[1]]

        if self._begin and not self._begun:
            self._run(self._begin)
        # A controller that failed may have restarted, and needs the `begin` command again.
        self._begun = False
        self._run([_PLACEHOLDER.sub(value_of, word) for word in self._set])
        self._begun = True

    def _run(self, words: Sequence[str]) -> str:
        """Return the command's output."""
        name = " ".join(words)
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                # A process group of its own, so that its children can be killed with it.
                start_new_session=True,
            )
        except OSError as error:
            raise FanFailure(f"{name}: cannot be run ({reason(error)})") from None
        try:
            printed, errors = process.communicate(timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            raise FanFailure(f"{name}: did not end within {self._timeout_s:g} s") from None
        finally:
            if process.returncode is None:
                # With its children: one that keeps the pipe open would block this process.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        if process.returncode != 0:
            text = " ".join((errors or printed).split())[:200]
            raise FanFailure(f"{name}: ended with status {process.returncode} ({text})")
        return printed


def _words(
    template: str,
    key: str,
    placeholders: Sequence[str] = (),
) -> list[str]:
    """Return the words of a command; only "set" must have some. `ConfigError` if it is invalid."""
    where = f"fan command {key} = {template!r}"
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise ConfigError(f"{where}: cannot be split into words ({error})") from None
    if not words and key != "set":
        return words
    unknown = set(_PLACEHOLDER.findall(template)) - set(placeholders)
    if unknown:
        raise ConfigError(f"{where}: unknown placeholder {{{min(unknown)}}}")
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(f"{where}: the program is not found; give its path")
    return words
