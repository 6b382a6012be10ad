"""Fans at the PWM outputs of monitoring chips, through the Linux kernel's hwmon files."""

import math
import os
import re
from contextlib import suppress
from pathlib import Path

from socflower.errors import ConfigError
from socflower.plain_numbers import plain_numbers
from socflower.thermal.fans.outputs import (
    MIN_DUTY,
    DutyCurve,
    FanFailure,
    FanNotFound,
    checked_speed,
    duty_curve,
    measured_speed,
)
from socflower.thermal.sensors.sysfs import (
    DeviceFolder,
    DeviceIdentity,
    OpenFolder,
    identity_of,
    matching_paths,
    reason,
)

_FULL_PWM = 255
_MANUAL_MODE = 1


def find_hwmon(
    name: str,
    root: Path = Path("/"),
    *,
    last: DeviceIdentity | None = None,
) -> Path:
    """Return the folder of a monitoring chip by its name ("nct6798"), number ("hwmon3") or path.

    Numbers may change between boots, names do not. `last` is the chip that was meant before: if it has another number
    now, its present folder is returned, and it is preferred to others of its name. `ConfigError` if no chip or several
    chips match.
    """
    hwmon = root / "sys/class/hwmon"
    is_path = "/" in name
    if last is not None and (is_path or re.fullmatch(r"hwmon\d+", name)):
        path = Path(name) if is_path else hwmon / name
        try:
            with DeviceFolder(path, last).open() as folder:
                return folder.path
        except FileNotFoundError as error:
            where = f"fan folder = {name!r}"
            raise ConfigError(f"{where}: was {last.name}; {error.strerror}") from None
    if is_path:
        return Path(name)
    names = {folder: _chip(folder) for folder in matching_paths(hwmon, "hwmon*")}
    found = [folder for folder, chip in names.items() if name in (folder.name, chip)]
    if len(found) > 1 and last is not None:
        found = [folder for folder in found if identity_of(folder) == last] or found
    if len(found) == 1:
        return found[0]
    listed = ", ".join(f"{chip} ({folder.name})" for folder, chip in names.items())
    problem = "several chips match" if found else "no chip matches"
    raise ConfigError(f"fan folder = {name!r}: {problem}; {hwmon} has {listed or 'none'}")


@plain_numbers
class HwmonPwm:
    """A PWM output of a monitoring chip: `pwmN`, `pwmN_enable` and `fanN_input` of the kernel's hwmon interface.

    Parameters
    ----------
    folder : Path
        The chip's folder, as returned by `find_hwmon`.
    pwm, fan : int and int, optional
        Numbers of the output and of its fan's tachometer; by default the same.
    min_rpm, max_rpm : float
        Speeds at `min_duty` and at full power, without a `curve`.
    curve : DutyCurve, optional
        Speeds by duty, as `calibrate` measures them.
    automatic_mode : int, optional
        Value to write to `pwmN_enable` at the end; by default its present value. Needed if a killed program may have
        left the output in manual mode.
    """

    def __init__(
        self,
        folder: Path,
        pwm: int = 1,
        *,
        min_rpm: float,
        max_rpm: float,
        curve: DutyCurve | None = None,
        min_duty: float = MIN_DUTY,
        fan: int | None = None,
        automatic_mode: int | None = None,
    ) -> None:
        self.curve = duty_curve(
            curve,
            min_rpm=min_rpm,
            max_rpm=max_rpm,
            min_duty=min_duty,
        )
        self._least_pwm = _pwm_of(min_duty)
        self._pwm = f"pwm{pwm}"
        self._enable = f"pwm{pwm}_enable"
        self._tachometer = f"fan{pwm if fan is None else fan}_input"
        try:
            with OpenFolder(folder) as opened:
                self._chip = DeviceFolder(folder, opened.identity())
                opened.read_integer(self._pwm)
                has_mode = (folder / self._enable).exists()
                self._found_mode = opened.read_integer(self._enable) if has_mode else None
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"fan {folder / self._pwm}: cannot be read ({reason(error)})"
            ) from None
        # Checked now, so that a daemon without permission ends before it controls anything.
        for file in (self._pwm, self._enable) if has_mode else (self._pwm,):
            if not os.access(folder / file, os.W_OK):
                raise ConfigError(f"fan {folder / file}: cannot be written; run as root")
        if automatic_mode is not None and not self._is_automatic(automatic_mode):
            raise ConfigError(f"fan automatic_mode = {automatic_mode} is not automatic")
        self._mode_after = self._found_mode if automatic_mode is None else automatic_mode

    @property
    def identity(self) -> DeviceIdentity:
        """What the chip keeps when its number changes."""
        return self._chip.identity

    @plain_numbers
    def set_rpm(self, rpm: float) -> None:
        """Write the duty for this speed, rounded up. Raises `FanFailure`, after setting the mode back to automatic.

        Before each access the chip is compared with the one found at first. It is looked for if its number has changed;
        `FanNotFound` is raised if it is not there.
        """
        self.set_duty(self.curve.duty(checked_speed(rpm)))

    @plain_numbers
    def set_duty(self, duty: float) -> None:
        """Write a fraction of full power, at least `min_duty`. Raises `FanFailure`."""
        # Below the lowest duty the fan might stop.
        wanted = max(_pwm_of(duty), self._least_pwm)
        try:
            with self._chip.open() as chip:
                # Firmware may take an output back, for example after suspend, so the mode is checked every time.
                if self._found_mode is not None and chip.read_integer(self._enable) != _MANUAL_MODE:
                    chip.write(self._enable, _MANUAL_MODE)
                    if chip.read_integer(self._enable) != _MANUAL_MODE:
                        raise ValueError("the firmware keeps control of it")
                chip.write(self._pwm, wanted)
                if chip.read_integer(self._pwm) == 0:
                    raise ValueError("it shows 0 after the duty was written")
        except (OSError, ValueError) as error:
            # In manual mode without a valid duty the fan might stop.
            with suppress(FanFailure):
                self.restore()
            raise self._failure(self._pwm, "cannot be set", error) from None

    def measured_rpm(self) -> float | None:
        """Return the tachometer's speed; None without a tachometer or a valid speed."""
        try:
            with self._chip.open() as chip:
                return measured_speed(chip.read_integer(self._tachometer))
        except (OSError, ValueError):
            return None

    def restore(self) -> None:
        """Write the original mode. Raises `FanFailure` if that fails, or if that mode was not automatic."""
        if self._mode_after is None or not self._is_automatic(self._mode_after):
            raise FanFailure(f"{self._chip.path / self._pwm}: nothing controlled it before")
        try:
            with self._chip.open() as chip:
                chip.write(self._enable, self._mode_after)
        except OSError as error:
            problem = f"cannot be set to {self._mode_after}"
            raise self._failure(self._enable, problem, error) from None

    def describe(self) -> str:
        """Return the names of chip and output."""
        return f"{self._pwm} of {self._name}"

    @property
    def _name(self) -> str:
        return self._chip.identity.name or self._chip.path.name

    def _failure(
        self,
        file: str,
        what: str,
        error: Exception,
    ) -> FanFailure:
        kind = FanNotFound if isinstance(error, FileNotFoundError) else FanFailure
        return kind(f"{self._chip.path / file}: {what} ({reason(error)})")

    def _is_automatic(self, mode: int) -> bool:
        # By the kernel's convention 0 is full speed, and 2 or more is control by the chip. The driver "pwmfan" is not a
        # chip: its modes 0 to 3 control the fan's power supply, and 0 turns it off.
        return mode != _MANUAL_MODE and self._name != "pwmfan" and mode >= 0


def _pwm_of(duty: float) -> int:
    # Rounded up: never slower than requested. The small subtraction keeps 0.2 * 255 at 51.
    return min(max(math.ceil(_FULL_PWM * duty - 1e-9), 1), _FULL_PWM)


def _chip(folder: Path) -> str:
    return identity_of(folder).name or folder.name
