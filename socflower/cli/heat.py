"""`socflower heat`: this machine's heat sensors and their recording."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from socflower.cli.options import Json
from socflower.cli.terminal import OUT, print_json, print_line
from socflower.quantities import counted, percent
from socflower.thermal.sensors.linux import LinuxSensors, SensorKind, SensorsFound
from socflower.thermal.sensors.reading import Reading
from socflower.thermal.sensors.recording import Recorder, as_object, readings_of

_KINDS = {SensorKind.SOC: "soc", SensorKind.UNNAMED: "unnamed", SensorKind.OTHER: "beside"}
_SAMPLE_INTERVAL_S = 0.6
"""Load and event counters are differences, so that one reading takes two samples."""


def show_heat(
    console: Console,
    *,
    watch_s: float | None = None,
    record_to: Path | None = None,
    as_json: bool = False,
    source: LinuxSensors | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Print the sensors of this machine and their readings; a machine without sensors is no error.

    Parameters
    ----------
    watch_s : float, optional
        Print a line at this interval until Ctrl-C, which is a normal end.
    record_to : Path, optional
        Also write the readings to this new file, .csv or .jsonl, which `RecordedSource` replays.
    as_json : bool
        Print one JSON document instead of text; with `watch_s`, one per line.

    Raises `ConfigError` for a file that exists or cannot be written, and for an invalid interval.
    """
    sensors, is_watching = source or LinuxSensors(), watch_s is not None
    # Created before the recording, so that an invalid interval leaves no empty file.
    readings = readings_of(
        sensors,
        interval_s=1.0 if watch_s is None else watch_s,
        num_readings=None if is_watching else 1,
        sleep=sleep,
    )
    with nullcontext() if record_to is None else Recorder(record_to) as recorder:
        try:
            found = sensors.found
            if not as_json:
                _print_found(console, found)
            sleep(_SAMPLE_INTERVAL_S)
            for reading in readings:
                if recorder is not None:
                    recorder.write(reading)
                if as_json:
                    print_json(heat_document(sensors.found, reading), one_line=is_watching)
                else:
                    _print_reading(console, reading, timed=is_watching)
        except KeyboardInterrupt:
            if not is_watching:
                raise
    if record_to is not None and not as_json:
        print_line(f"recording: {record_to}", console)


def heat_document(found: SensorsFound, reading: Reading) -> dict[str, Any]:
    """Return the document that `heat --json` prints."""
    return {
        "schema": 1,
        "sensors": {
            "temperatures": [
                {
                    "name": sensor.name,
                    "kind": _KINDS[sensor.kind],
                    "temperature_c": sensor.temperature_c,
                    "trouble": sensor.rejection,
                }
                for sensor in found.temperatures
            ],
            "num_clock_policies": found.num_clock_policies,
            "throttle_sources": list(found.throttle_sources),
            "batteries": list(found.batteries),
            "load_known": found.load_known,
        },
        "reading": as_object(reading),
    }


def sensors_line(found: SensorsFound) -> str:
    """Return the available sensors as one line."""
    number = len(found.temperatures)
    plausible = sum(sensor.temperature_c is not None for sensor in found.temperatures)
    temperatures = counted(number, "temperature") if number else "no temperatures"
    if plausible < number:
        temperatures = f"{plausible} of {number} temperatures make sense"
    clocks, throttled = found.num_clock_policies, " and ".join(found.throttle_sources)
    batteries = ", ".join(found.batteries)
    return "; ".join(
        (
            temperatures,
            counted(clocks, "clock") if clocks else "no clocks",
            f"throttling by {throttled}" if throttled else "no throttle states",
            f"battery {batteries}" if batteries else "no battery",
        )
    )


def reading_line(reading: Reading) -> str:
    """Return a reading as one line, without values that the device does not report."""
    parts: list[str] = []
    if reading.temperature_c is not None:
        parts.append(f"{reading.temperature_c:.1f} °C")
    if reading.clock_factor is not None:
        parts.append(f"clock at {percent(reading.clock_factor, 0)} of the highest")
    if reading.throttled is not None:
        parts.append("throttled" if reading.throttled else "not throttled")
    if reading.battery_fraction is not None:
        parts.append(f"battery {percent(reading.battery_fraction, 0)}")
    if reading.on_battery is not None:
        parts.append("on battery" if reading.on_battery else "on mains")
    if reading.user_load is not None:
        parts.append(f"others use {percent(reading.user_load, 0)} of the processors")
    return ", ".join(parts) or "nothing is known"


def _print_found(console: Console, found: SensorsFound) -> None:
    print_line(sensors_line(found), console)
    for sensor in found.temperatures:
        known = sensor.temperature_c is not None
        shown = f"{sensor.temperature_c:6.1f} °C" if known else f"{'–':>6}   "
        reason = f": {sensor.rejection}" if sensor.rejection else ""
        print_line(f"  {shown}  {_KINDS[sensor.kind]:8}{sensor.name}{reason}", console)


def _print_reading(console: Console, reading: Reading, *, timed: bool) -> None:
    for note in reading.notes:
        print_line(f"note: {note}", console)
    at = f"{time.strftime('%H:%M:%S')}  " if timed else ""
    print_line(f"{at}{reading_line(reading)}", console)


def heat(
    watch: Annotated[
        float | None, typer.Option(help="Print a line every so many seconds, until Ctrl-C.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Write the readings to this new file, .csv or .jsonl.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show this machine's heat sensors and their readings."""
    show_heat(OUT, watch_s=watch, record_to=record, as_json=as_json)
