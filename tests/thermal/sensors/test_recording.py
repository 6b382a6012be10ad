"""Recordings: what was written is read, at the time it belongs to, and a bad file is told of by its line."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.thermal.sensors.reading import Reading
from socflower.thermal.sensors.recording import (
    RecordedSource,
    Recorder,
    load_recording,
    readings_of,
    record,
)

FRACTION = st.one_of(st.none(), st.floats(0.0, 1.0))
FLAG = st.one_of(st.none(), st.booleans())
NOTE = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
READINGS = st.lists(
    st.builds(
        Reading,
        at_s=st.floats(-1e6, 1e9),
        temperature_c=st.one_of(st.none(), st.floats(-40.0, 150.0)),
        clock_factor=FRACTION,
        throttled=FLAG,
        battery_fraction=FRACTION,
        on_battery=FLAG,
        user_load=FRACTION,
        notes=st.lists(NOTE, max_size=2).map(tuple),
    ),
    min_size=1,
    max_size=12,
).map(lambda readings: sorted(readings, key=lambda reading: reading.at_s))


class Replay:
    """A source that gives readings in turn."""

    def __init__(self, readings: list[Reading]) -> None:
        self.readings = iter(readings)

    def read(self) -> Reading:
        return next(self.readings)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
@given(readings=READINGS)
def test_what_is_recorded_is_what_is_replayed(
    tmp_path_factory,
    suffix,
    readings,
):
    path = tmp_path_factory.mktemp("recordings") / f"a.{suffix}"
    record(Replay(readings), path, num_readings=len(readings), sleep=lambda _: None)
    assert load_recording(path) == tuple(readings)


@given(readings=READINGS, looks=st.lists(st.floats(0.0, 1e5), max_size=20).map(sorted))
def test_a_replay_gives_the_latest_reading_of_its_time_and_every_note_once(
    readings,
    looks,
):
    """Against a search of the whole recording at each read."""
    now_s = [0.0]
    source = RecordedSource(readings, clock=lambda: now_s[0])
    told = []
    for elapsed_s in (0.0, *looks):
        now_s[0] = 0.0 + elapsed_s
        seen = source.read()
        due = [
            reading
            for number, reading in enumerate(readings)
            if number == 0 or reading.at_s - readings[0].at_s <= elapsed_s
        ]
        assert (seen.at_s, seen.temperature_c, seen.user_load) == (
            now_s[0],
            due[-1].temperature_c,
            due[-1].user_load,
        )
        told.extend(seen.notes)
        assert told == [note for reading in due for note in reading.notes]


def test_the_last_reading_is_held():
    now_s = [50.0]
    source = RecordedSource(
        [Reading(at_s=7.0, temperature_c=40.0), Reading(at_s=8.0, temperature_c=41.0)],
        clock=lambda: now_s[0],
    )
    seen = []
    for now_s[0] in (50.0, 50.9, 51.0, 9999.0):
        seen.append(source.read().temperature_c)
    assert seen == [40.0, 40.0, 41.0, 41.0]


def test_a_table_written_by_hand_is_read(tmp_path):
    path = tmp_path / "phone.csv"
    path.write_text(
        "\ufeffat_s, temperature_c, on_battery, notes\r\n0, 41.5, TRUE, the fan stopped\r\n\r\n60,,,\r\n",
        encoding="utf-8",
    )
    assert load_recording(path) == (
        Reading(at_s=0.0, temperature_c=41.5, on_battery=True, notes=("the fan stopped",)),
        Reading(at_s=60.0),
    )


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.csv", "", "no reading"),
        ("a.csv", "at_s,temperature_c\n", "no reading"),
        ("a.jsonl", "\n\n", "no reading"),
        ("a.csv", "at_s,heat\n1,2\n", "line 2: heat is no field"),
        ("a.csv", "at_s,at_s\n1,2\n", "line 1: a column name"),
        ("a.csv", "at_s,temperature_c\n1,40\n2\n", "line 3: 1 cells under 2 columns"),
        ("a.csv", "at_s,temperature_c\n1,hot\n", "line 2: temperature_c = 'hot' is no number"),
        ("a.csv", "at_s,temperature_c\n1,nan\n", "line 2: temperature_c = nan is no number"),
        (
            "a.csv",
            "at_s,temperature_c\n1,-128\n",
            "line 2: reading: temperature_c = -128.0 cannot be",
        ),
        ("a.csv", "at_s,user_load\n1,1.5\n", "line 2: reading: user_load = 1.5 must be"),
        ("a.csv", "at_s,throttled\n1,2\n", "line 2: throttled = '2' must be true or false"),
        ("a.csv", "at_s,temperature_c\n,40\n", "line 2: at_s is missing"),
        ("a.csv", "at_s\n5\n4\n", "line 3: at_s = 4.0 comes after 5.0"),
        ("a.csv", 'at_s,notes\n1,"open\n', "line 2: unexpected end"),
        ("a.csv", 'at_s,notes\n1,"[1]"\n', "line 2: notes = \\[1\\] must be a list of texts"),
        ("a.csv", "at_s,notes\n1,[x\n", "line 2: notes = '\\[x' must be a list"),
        ("a.jsonl", "{}\n", "line 1: at_s is missing"),
        ("a.jsonl", '{"at_s": 1}\n[]\n', "line 2: is no JSON object"),
        ("a.jsonl", '{"at_s": 1}\n{"at_s": 2, "temp', "line 2: is no JSON object"),
        ("a.jsonl", '{"at_s": "now"}', "line 1: at_s = 'now' is no number"),
        ("a.jsonl", '{"at_s": true}', "line 1: at_s = True is no number"),
        ("a.jsonl", '{"at_s": 1' + 400 * "0" + "}", "line 1: at_s = .* is no number"),
        ("a.jsonl", '{"at_s": 1, "on_battery": 1}', "line 1: on_battery = 1 must be true or false"),
        ("a.jsonl", "[" * 100_000, "line 1: is no JSON object"),
        ("a.txt", "at_s\n1\n", "name a recording .csv or .jsonl"),
        ("a.csv", b"\xff\xfe", "is no text in UTF-8"),
    ],
)
def test_a_bad_recording_is_a_mistake_of_one_line(tmp_path, name, text, complaint):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=complaint) as caught:
        RecordedSource(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_readings_that_cannot_be_replayed_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no reading"):
        RecordedSource([])
    with pytest.raises(ConfigError, match=r"at_s = 1\.0 comes after 2\.0"):
        RecordedSource([Reading(at_s=2.0), Reading(at_s=1.0)])
    with pytest.raises(ConfigError, match="cannot be read"):
        RecordedSource(tmp_path / "missing.csv")
    with pytest.raises(ConfigError, match="cannot be read"):
        (tmp_path / "folder.csv").mkdir()
        RecordedSource(str(tmp_path / "folder.csv"))


def test_a_recording_does_not_overwrite_another(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is there already"):
        record(Replay([]), path, num_readings=1)
    assert path.read_text() == "precious"
    with pytest.raises(ConfigError, match="cannot be written"):
        Recorder(tmp_path / "no folder" / "a.csv")
    with pytest.raises(ConfigError, match=r"name a recording \.csv or \.jsonl"):
        Recorder(tmp_path / "a.xlsx")


def test_a_disk_that_is_full_is_a_mistake_of_one_line():
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    recorder = Recorder.__new__(Recorder)  # it makes new files only, and this one is always there
    recorder._kind, recorder._path, recorder._file = (
        (".jsonl",),
        full,
        full.open("w", encoding="utf-8"),
    )
    with pytest.raises(ConfigError, match="cannot be written"):
        recorder.write(Reading(at_s=1.0))
    with pytest.raises(OSError, match="No space"):
        recorder._file.close()


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_an_interrupted_recording_can_be_replayed(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        assert len(load_recording(path)) == len(slept)  # whole lines at any time
        if len(slept) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(
            Replay([Reading(at_s=float(number)) for number in range(9)]),
            path,
            interval_s=0.25,
            sleep=sleep,
        )
    assert [reading.at_s for reading in load_recording(path)] == [0.0, 1.0, 2.0] and set(slept) == {
        0.25
    }


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_an_interval_that_cannot_be_is_refused_before_there_is_a_file(tmp_path, seconds):
    with pytest.raises(ConfigError, match="give seconds above 0"):
        record(Replay([]), tmp_path / "a.csv", interval_s=seconds)
    with pytest.raises(ConfigError, match="give seconds above 0"):
        readings_of(Replay([]), interval_s=seconds)
    assert list(tmp_path.iterdir()) == []


def test_json_lines_hold_every_field(tmp_path):
    path = tmp_path / "a.jsonl"
    record(Replay([Reading(at_s=1.0, throttled=True)]), path, num_readings=1)
    assert json.loads(path.read_text()) == {
        "at_s": 1.0,
        "temperature_c": None,
        "clock_factor": None,
        "throttled": True,
        "battery_fraction": None,
        "on_battery": None,
        "user_load": None,
        "notes": [],
    }
