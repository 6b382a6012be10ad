"""`socflower heat` against made-up machines and this one."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from socflower.cli import diagnosis
from socflower.cli.heat import show_heat
from socflower.thermal.sensors.linux import LinuxSensors
from socflower.thermal.sensors.recording import RecordedSource, load_recording
from tests.one_line import refused
from tests.thermal.fake_machines import JETSON, PHONE, VIRTUAL, Machine, zone


class Shown:
    """A machine, and what `heat` prints of it; time passes only where `heat` sleeps."""

    def __init__(self, root: Path, *trees: dict[str, object]) -> None:
        self.machine = Machine(root / "machine", *trees)
        self.sensors = LinuxSensors(self.machine.root, clock=self.machine.clock, pid=1)
        self.slept_s: list[float] = []
        self.interrupted_after = 10**9

    def sleep(self, seconds: float) -> None:
        self.machine.now_s += seconds
        self.slept_s.append(seconds)
        if len(self.slept_s) > self.interrupted_after:
            raise KeyboardInterrupt

    def heat(self, **options: Any) -> str:
        out = io.StringIO()
        show_heat(Console(file=out, width=40), source=self.sensors, sleep=self.sleep, **options)
        return out.getvalue()


def test_a_phone_is_described_and_read(tmp_path: Path) -> None:
    lines = Shown(tmp_path, PHONE).heat().splitlines()
    assert lines[0] == "7 temperatures; 3 clocks; throttling by cooling devices; battery battery"
    assert "    43.7 °C  soc     cpu-1-0-usr (thermal_zone1)" in lines
    assert "    61.0 °C  beside  skin-therm (thermal_zone6)" in lines
    assert (
        lines[-1] == "43.7 °C, clock at 90% of the highest, not throttled, battery 83%, on battery"
    )


def test_a_sensor_that_lies_is_shown_with_its_reason(tmp_path: Path) -> None:
    text = Shown(tmp_path, JETSON, zone(2, "tj-thermal", "-256000")).heat()
    assert text.startswith("5 of 6 temperatures make sense; ")
    assert (
        "       –     soc     tj-thermal (thermal_zone2): shows an impossible temperature" in text
    )
    assert "note: sensor tj-thermal (thermal_zone2): shows an impossible temperature" in text
    assert text.splitlines()[-1].startswith("63.5 °C")


def test_a_machine_without_sensors_is_told_so_and_no_mistake(tmp_path: Path) -> None:
    assert Shown(tmp_path, VIRTUAL).heat().splitlines() == [
        "no temperatures; no clocks; no throttle states; no battery",
        "note: no temperature sensor here: only slow steps can show heat",
        "nothing is known",
    ]


def test_markup_in_a_name_is_printed_as_it_is(tmp_path: Path) -> None:
    assert "[red]cpu[/] (thermal_zone0)" in Shown(tmp_path, zone(0, "[red]cpu[/]", 50_000)).heat()


def test_one_document_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = Shown(tmp_path, PHONE)
    assert shown.heat(as_json=True) == ""
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1 and document["sensors"]["num_clock_policies"] == 3
    assert document["sensors"]["temperatures"][0] == {
        "name": "tsens_tz_sensor5 (thermal_zone0)",
        "kind": "soc",
        "temperature_c": 41.2,
        "trouble": "",
    }
    assert document["reading"]["temperature_c"] == 43.7 and document["reading"]["notes"] == []


def test_watching_goes_on_until_interrupted_and_ends_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = Shown(tmp_path, JETSON)
    shown.interrupted_after = 3
    lines = [
        line
        for line in shown.heat(watch_s=2.5).splitlines()
        if "64.2 °C" in line and "clock at" in line
    ]
    assert len(lines) == 3 and shown.slept_s == [0.6, 2.5, 2.5, 2.5]
    shown.slept_s, shown.interrupted_after = [], 2
    shown.heat(watch_s=1.0, as_json=True)
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [document["reading"]["temperature_c"] for document in documents] == [64.25, 64.25]


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_what_is_watched_is_recorded_and_replays(tmp_path: Path, suffix: str) -> None:
    shown = Shown(tmp_path, JETSON)
    shown.interrupted_after = 4
    path = tmp_path / f"heat.{suffix}"
    assert f"recording: {path}" in shown.heat(watch_s=2.0, record_to=path)
    readings = load_recording(path)
    assert [reading.at_s - readings[0].at_s for reading in readings] == pytest.approx(
        [0.0, 2.0, 4.0, 6.0]
    )
    assert RecordedSource(path, clock=lambda: 0.0).read().temperature_c == 64.25


def test_without_watching_an_interrupt_is_one(tmp_path: Path) -> None:
    shown = Shown(tmp_path, JETSON)
    shown.interrupted_after = 0
    with pytest.raises(KeyboardInterrupt):
        shown.heat()


@pytest.mark.parametrize(
    ("watch_s", "name", "named"),
    [
        (0.0, None, "above 0"),
        (float("nan"), None, "above 0"),
        (None, "a.txt", ".csv or .jsonl"),
        (None, "there.csv", "there.csv"),
        (None, "no/a.csv", "cannot be written"),
        (-1.0, "new.csv", "above 0"),
    ],
)
def test_mistakes_are_told_in_one_line_and_leave_no_file(
    tmp_path: Path, watch_s: float | None, name: str | None, named: str
) -> None:
    (tmp_path / "there.csv").write_text("precious")
    record_to = tmp_path / name if name else None
    refused(lambda: Shown(tmp_path, JETSON).heat(watch_s=watch_s, record_to=record_to), named)
    assert not (tmp_path / "new.csv").exists()
    assert (tmp_path / "there.csv").read_text() == "precious"


def test_this_machine_is_shown() -> None:
    out = io.StringIO()
    show_heat(Console(file=out))
    assert out.getvalue().strip()


@pytest.mark.parametrize(
    ("tree", "status", "words"),
    [
        (PHONE, "ok", "7 temperatures; 3 clocks"),
        (VIRTUAL, "missing", "no temperatures"),
        (zone(0, "cpu-thermal", "nan"), "missing", "0 of 1 temperatures make sense"),
    ],
)
def test_the_doctor_says_what_sensors_there_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tree: dict[str, object],
    status: str,
    words: str,
) -> None:
    machine = Machine(tmp_path, tree)
    monkeypatch.setattr(diagnosis, "LinuxSensors", lambda: LinuxSensors(machine.root))
    finding = diagnosis._sensors()
    assert finding["status"] == status and words in finding["detail"]
    assert bool(finding["remedy"]) == (status != "ok")
