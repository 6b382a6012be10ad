"""Fans at the PWM outputs of monitoring chips, by the Linux kernel's hwmon files."""

import math
import os
from contextlib import suppress
from pathlib import Path

from socflower.errors import ConfigError
from socflower.thermal.fans.outputs import MIN_DUTY, DutyCurve, FanFailure, checked_min_duty, checked_speed, reason
from socflower.thermal.sensors.sysfs import matches, text_of, whole_number

_FULL_PWM = 255
_MANUAL_MODE = 1


def find_hwmon(name: str, root: Path = Path("/")) -> Path:
    """Return the folder of a monitoring chip by its name ("nct6798"), number ("hwmon3") or path.

    The numbers may change from boot to boot, names do not. `ConfigError` if there is none, or several.
    """
    if "/" in name:
        return Path(name)
    folders = matches(root / "sys/class/hwmon", "hwmon*")
    found = [folder for folder in folders if name in (folder.name, _chip(folder))]
    if len(found) == 1:
        return found[0]
    there = ", ".join(f"{_chip(folder)} ({folder.name})" for folder in folders) or "no chip"
    say = "there are several such chips" if found else "there is no such chip"
    raise ConfigError(f"fan folder = {name!r}: {say}; below {root / 'sys/class/hwmon'} is {there}")


class HwmonPwm:
    """A PWM output of a monitoring chip: `pwmN`, `pwmN_enable` and `fanN_input` of the kernel's hwmon interface.

    Parameters
    ----------
    folder : Path
        The chip's folder, as of `find_hwmon`.
    pwm, fan : int and int, optional
        Numbers of the output and of the tachometer that shows its fan; by default the same.
    min_rpm, max_rpm : float
        Speeds at `min_duty` and at full power, where there is no `curve`.
    curve : DutyCurve, optional
        Speeds by duty, as `calibrate` measures them.
    automatic_mode : int, optional
        What to write to `pwmN_enable` at the end; by default what stands there now. Give it where a program that was
        killed may have left the output in manual mode.
    """

    def __init__(
        self, folder: Path, pwm: int = 1, *, min_rpm: float, max_rpm: float, curve: DutyCurve | None = None,
        min_duty: float = MIN_DUTY, fan: int | None = None, automatic_mode: int | None = None,
    ) -> None:
        self.curve = curve or DutyCurve.linear(min_rpm, max_rpm, min_duty)
        self._least_pwm = _pwm_of(checked_min_duty(min_duty))
        self._pwm, self._enable = folder / f"pwm{pwm}", folder / f"pwm{pwm}_enable"
        self._tachometer = folder / f"fan{pwm if fan is None else fan}_input"
        self._chip = _chip(folder)
        try:
            whole_number(self._pwm)
            self._found_mode = whole_number(self._enable) if self._enable.exists() else None
        except (OSError, ValueError) as error:
            raise ConfigError(f"fan {self._pwm}: cannot be read ({reason(error)}); name a chip and an output that are "
                              "there") from None
        for path in (self._pwm, self._enable) if self._found_mode is not None else (self._pwm,):
            if not os.access(path, os.W_OK):
                raise ConfigError(f"fan {path}: cannot be written; run as root, or let a udev rule give the file to "
                                  "this user")
        if automatic_mode is not None and not self._is_automatic(automatic_mode):
            raise ConfigError(f"fan automatic_mode = {automatic_mode}: is no automatic mode of {self._chip}; 2 or more "
                              "as a rule")
        self._mode_after = self._found_mode if automatic_mode is None else automatic_mode

    def set_rpm(self, rpm: float) -> None:
        """Write the duty for this speed, rounded up. Raises `FanFailure`; the mode is automatic again then."""
        self.set_duty(self.curve.duty(checked_speed(rpm)))

    def set_duty(self, duty: float) -> None:
        """Write a part of full power, `min_duty` at least. Raises `FanFailure`."""
        wanted = max(_pwm_of(duty), self._least_pwm)
        try:
            # Firmware takes an output back now and then, after suspending for one: so it is looked at every time.
            if self._found_mode is not None and whole_number(self._enable) != _MANUAL_MODE:
                _write(self._enable, _MANUAL_MODE)
                if whole_number(self._enable) != _MANUAL_MODE:
                    raise ValueError("the firmware does not let go of it")
            _write(self._pwm, wanted)
            if whole_number(self._pwm) == 0:
                raise ValueError("it shows 0 after the duty was written")
        except (OSError, ValueError) as error:
            # In manual mode and without a duty of ours the fan might stand still.
            with suppress(FanFailure):
                self.restore()
            raise FanFailure(f"{self._pwm}: cannot be set ({reason(error)})") from None

    def measured_rpm(self) -> float | None:
        """Return what the tachometer shows; None where there is none."""
        try:
            rpm = whole_number(self._tachometer)
        except (OSError, ValueError):
            return None
        return float(rpm) if rpm >= 0 else None

    def restore(self) -> None:
        """Write the mode that was found. Raises `FanFailure` if that cannot be, or was not automatic."""
        if self._mode_after is None or not self._is_automatic(self._mode_after):
            raise FanFailure(f"{self._pwm}: nothing controlled it before")
        try:
            _write(self._enable, self._mode_after)
        except OSError as error:
            raise FanFailure(f"{self._enable}: cannot be set to {self._mode_after} ({reason(error)})") from None

    def describe(self) -> str:
        """Return chip and output."""
        return f"{self._pwm.name} of {self._chip}"

    def _is_automatic(self, mode: int) -> bool:
        # By the kernel's convention 0 is full speed and 2 or more the chip's own control. The driver "pwmfan" is no
        # chip: its 0 to 3 say what becomes of the fan's power, and 0 cuts it off.
        return mode != _MANUAL_MODE and self._chip != "pwmfan" and mode >= 0


def _pwm_of(duty: float) -> int:
    # Rounded up: never slower than asked for. The small step back keeps 0.2 * 255 at 51.
    return min(max(math.ceil(_FULL_PWM * duty - 1e-9), 1), _FULL_PWM)


def _chip(folder: Path) -> str:
    try:
        return text_of(folder / "name")
    except (OSError, ValueError):
        return folder.name


def _write(path: Path, value: int) -> None:
    # Not by `Path.write_text`, which would make a file where the kernel has taken it away.
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(descriptor, f"{value}\n".encode())
    finally:
        os.close(descriptor)
