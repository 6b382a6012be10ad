"""Bandwidth profiles in files: a table of rates (CSV), and the packet times that the Mahimahi emulator replays.

    time_s,up_bytes_per_s,down_bytes_per_s
    0,250000,1250000
    10,0,0
    12.5,,                                  a last row with only a time: the profile ends here, and repeats
"""

import csv
import math
from pathlib import Path

from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile, Direction, Steps
from socflower.errors import ConfigError

HEADER = ("time_s", "up_bytes_per_s", "down_bytes_per_s")
PACKET_BYTES = 1500
"""The size of the packet that one line of a Mahimahi file lets pass."""


def read_csv(path: Path, *, latency_s: float = 0.0, repeats: bool = True) -> BandwidthProfile:
    """Return the profile of a CSV file; `ConfigError` names the line that is invalid.

    With `repeats` it begins again at its end: at the time of the row without rates, or else when the last row has
    lasted as long as the one before it (a single row: 1 s). Without `repeats`, the last rates hold for good.
    """
    rows = list(csv.reader(_lines(path)))
    if not rows or tuple(cell.strip() for cell in rows[0]) != HEADER:
        raise ConfigError(f"bandwidth profile {path} line 1: must be the header {','.join(HEADER)}")
    times_s: list[float] = []
    up: list[float] = []
    down: list[float] = []
    end_s: float | None = None
    for number, row in enumerate(rows[1:], start=2):
        cells = [cell.strip() for cell in row]
        if not any(cells):
            continue
        where = f"bandwidth profile {path} line {number}"
        if len(cells) != len(HEADER):
            raise ConfigError(f"{where}: has {len(cells)} values; give {len(HEADER)}: {','.join(HEADER)}")
        if end_s is not None:
            raise ConfigError(f"{where}: follows a row without rates, which only the last one may be")
        time_s = _number(cells[0], HEADER[0], where)
        last_s = times_s[-1] if times_s else None
        if last_s is None and time_s != 0:
            raise ConfigError(f"{where}: the first time is {cells[0]}; it must be 0")
        if last_s is not None and time_s <= last_s:
            raise ConfigError(f"{where}: time {cells[0]} s does not come after {last_s} s; sort the rows")
        if last_s is not None and not cells[1] and not cells[2]:
            end_s = time_s
            continue
        times_s.append(time_s)
        up.append(_number(cells[1], HEADER[1], where))
        down.append(_number(cells[2], HEADER[2], where))
    if not times_s:
        raise ConfigError(f"bandwidth profile {path}: has no rows; give at least the rates at 0 s")
    if not repeats:
        end_s = math.inf
    elif end_s is None:
        end_s = times_s[-1] + (times_s[-1] - times_s[-2] if len(times_s) > 1 else 1.0)
    return BandwidthProfile(
        Steps(tuple(times_s), tuple(up), end_s), Steps(tuple(times_s), tuple(down), end_s), latency_s)


def write_csv(profile: BandwidthProfile, path: Path) -> None:
    """Write a profile as `read_csv` reads it, without latency; `ConfigError` if its directions end at different times.
    """
    end_s = profile.up.end_s
    if profile.down.end_s != end_s:
        raise ConfigError(f"bandwidth profile {path}: the up link ends at {end_s} s, the down link at "
                          f"{profile.down.end_s} s; one table cannot hold both")
    times_s = sorted({*profile.up.times_s, *profile.down.times_s})
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        writer.writerows((repr(time_s), repr(profile.up.rate(time_s)), repr(profile.down.rate(time_s)))
                         for time_s in times_s)
        if math.isfinite(end_s):
            writer.writerow((repr(end_s), "", ""))


def read_mahimahi(up: Path, down: Path, *, latency_s: float = 0.0, bin_s: float = 0.1) -> BandwidthProfile:
    """Return the profile of two Mahimahi files; each repeats after its last packet.

    A line is the millisecond in which a packet of 1500 bytes may pass. Packets are counted in bins of `bin_s`, and pass
    evenly within one. `ConfigError` names the line that is invalid.
    """
    return BandwidthProfile(_read_packets(up, bin_s), _read_packets(down, bin_s), latency_s)


def write_mahimahi(
    profile: BandwidthProfile, direction: Direction, path: Path, duration_s: float | None = None,
) -> None:
    """Write one direction as packet times over `duration_s`, one round of the profile by default.

    A packet is written for every 1500 bytes, at the end of the millisecond in which the last of them passes; the last
    packet is always at the end, since Mahimahi repeats from there. Raises `ConfigError` where a profile without an end
    is given no duration, or nothing passes.
    """
    until_s = profile.steps(direction).end_s if duration_s is None else duration_s
    if not 0.001 <= until_s < math.inf:
        raise ConfigError(f"bandwidth profile {path}: a duration of {until_s} s; give 0.001 s or more, and an end")
    num_packets = math.floor(profile.bytes_between(direction, 0.0, until_s) / PACKET_BYTES + 1e-9)
    if num_packets < 1:
        raise ConfigError(f"bandwidth profile {path}: no packet of {PACKET_BYTES} bytes passes in {until_s} s; give a "
                          "longer profile")
    last_ms = math.ceil(until_s * 1000 - 1e-6)
    with path.open("w", encoding="ascii") as file:
        for packet in range(1, num_packets):
            passed_s = profile.passed_s(direction, 0.0, packet * PACKET_BYTES)
            file.write(f"{min(last_ms, math.ceil(passed_s * 1000 - 1e-6))}\n")
        file.write(f"{last_ms}\n")


def _read_packets(path: Path, bin_s: float) -> Steps:
    bin_ms = round(bin_s * 1000)
    if bin_ms < 1:
        raise ConfigError(f"bandwidth profile {path}: bin_s = {bin_s} must be 0.001 or more")
    counts: dict[int, int] = {}
    last_ms = 0
    for number, line in enumerate(_lines(path), start=1):
        text = line.strip()
        if not text:
            continue
        if not (text.isascii() and text.isdigit()):
            raise ConfigError(f"bandwidth profile {path} line {number}: {text[:40]!r} is no packet time; "
                              "give whole milliseconds")
        at_ms = int(text)
        if at_ms < last_ms:
            raise ConfigError(f"bandwidth profile {path} line {number}: {at_ms} ms comes before {last_ms} ms; "
                              "sort the lines")
        last_ms = at_ms
        counts[max(0, at_ms - 1) // bin_ms] = counts.get(max(0, at_ms - 1) // bin_ms, 0) + 1
    if last_ms == 0:
        raise ConfigError(f"bandwidth profile {path}: has no packet after 0 ms, so it has no length; give packet times")
    num_bins = math.ceil(last_ms / bin_ms)
    starts_ms = [index * bin_ms for index in range(num_bins)]
    rates = [counts.get(index, 0) * PACKET_BYTES * 1000 / (min(start_ms + bin_ms, last_ms) - start_ms)
             for index, start_ms in enumerate(starts_ms)]
    return Steps(tuple(start_ms / 1000 for start_ms in starts_ms), tuple(rates), last_ms / 1000)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"bandwidth profile {path}: cannot be read ({error.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise ConfigError(f"bandwidth profile {path}: is not UTF-8 text; is it a bandwidth profile?") from None


def _number(text: str, name: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{where}: {name} = {text!r} is no number") from None
    if not 0 <= value < math.inf:
        raise ConfigError(f"{where}: {name} = {text} must be 0 or more and finite")
    return value
