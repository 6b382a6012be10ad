"""Recordings: what was written is read, at its time, and an invalid file is refused with its line."""

from functools import partial
from math import inf, nan
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.thermal.sensors.reading import Reading
from socflower.thermal.sensors.recording import (
    RecordedSource,
    Recorder,
    load_recording,
    readings_of,
    record,
)
from tests.one_line import refused
from tests.thermal.fake_machines import Clock

FRACTION = st.none() | st.floats(0.0, 1.0)
FLAG = st.none() | st.booleans()
NOTE = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
READINGS = st.lists(
    st.builds(
        Reading,
        at_s=st.floats(-1e6, 1e9),
        temperature_c=st.none() | st.floats(-40.0, 150.0),
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

    def __init__(self, *readings: Reading) -> None:
        self.read = iter(readings).__next__


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
@given(readings=READINGS)
def test_a_recording_is_replayed_exactly(tmp_path_factory, suffix, readings):
    path = tmp_path_factory.getbasetemp() / f"a.{suffix}"
    path.unlink(missing_ok=True)
    record(Replay(*readings), path, num_readings=len(readings), sleep=lambda _: None)
    assert load_recording(path) == tuple(readings)


@given(readings=READINGS, reads_s=st.lists(st.floats(0.0, 1e5), max_size=20).map(sorted))
def test_a_replay_gives_the_latest_reading_of_its_time_and_every_note_once(readings, reads_s):
    """Against a search of the whole recording at each read; the last reading is held."""
    clock, notes = Clock(50.0), []
    source = RecordedSource(readings, clock=clock)
    for elapsed_s in (0.0, *reads_s, 1e10):
        clock.now_s = 50.0 + elapsed_s
        seen = source.read()
        elapsed_s = clock.now_s - 50.0
        due = [one for one in readings if one.at_s - readings[0].at_s <= elapsed_s]
        latest = due[-1]
        assert (seen.at_s, seen.temperature_c) == (clock.now_s, latest.temperature_c)
        assert seen.user_load == latest.user_load
        notes.extend(seen.notes)
        assert notes == [note for one in due for note in one.notes]
    assert len(due) == len(readings)


def test_a_table_written_by_hand_is_read(tmp_path):
    path = tmp_path / "phone.csv"
    lines = ["\ufeffat_s, temperature_c, on_battery, notes", "0, 41.5, TRUE, the fan stopped"]
    path.write_text("\r\n".join([*lines, "", "60,,,", ""]), encoding="utf-8")
    assert load_recording(path) == (
        Reading(at_s=0.0, temperature_c=41.5, on_battery=True, notes=("the fan stopped",)),
        Reading(at_s=60.0),
    )


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("a.csv", "", "reading"),
        ("a.csv", "at_s,temperature_c\n", "reading"),
        ("a.jsonl", "\n\n", "reading"),
        ("a.csv", "at_s,heat\n1,2\n", "line 2: heat"),
        ("a.csv", "at_s,at_s\n1,2\n", "line 1: "),
        ("a.csv", "at_s,temperature_c\n1,40\n2\n", "line 3: 1 "),
        ("a.csv", "at_s,temperature_c\n1,hot\n", "line 2: temperature_c = 'hot'"),
        ("a.csv", "at_s,temperature_c\n1,nan\n", "line 2: temperature_c = nan"),
        ("a.csv", "at_s,temperature_c\n1,-128\n", "temperature_c = -128.0"),
        ("a.csv", "at_s,user_load\n1,1.5\n", "user_load = 1.5"),
        ("a.csv", "at_s,throttled\n1,2\n", "line 2: throttled = '2'"),
        ("a.csv", "at_s,temperature_c\n,40\n", "line 2: at_s"),
        ("a.csv", "at_s\n5\n4\n", "at_s = 4.0"),
        ("a.csv", 'at_s,notes\n1,"open\n', "line 2: "),
        ("a.csv", 'at_s,notes\n1,"[1]"\n', "line 2: notes = [1]"),
        ("a.csv", "at_s,notes\n1,[x\n", "line 2: notes = '[x'"),
        ("a.jsonl", "{}\n", "line 1: at_s"),
        ("a.jsonl", '{"at_s": 1}\n[]\n', "line 2: "),
        ("a.jsonl", '{"at_s": 1}\n{"at_s": 2, "temp', "line 2: "),
        ("a.jsonl", '{"at_s": "now"}', "line 1: at_s = 'now'"),
        ("a.jsonl", '{"at_s": true}', "line 1: at_s = True"),
        ("a.jsonl", '{"at_s": 1' + 400 * "0" + "}", "line 1: at_s = "),
        ("a.jsonl", '{"at_s": 1, "on_battery": 1}', "line 1: on_battery = 1"),
        ("a.jsonl", "[" * 100_000, "line 1: "),
        ("a.txt", "at_s\n1\n", ".csv"),
        ("a.csv", b"\xff\xfe", "UTF-8"),
    ],
)
def test_an_invalid_recording_is_refused(tmp_path, name, text, named):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(partial(RecordedSource, path), path, *named.split(": "))


def test_readings_that_cannot_be_replayed_are_refused(tmp_path):
    refused(partial(RecordedSource, []), "recording")
    unsorted = [Reading(at_s=2.0), Reading(at_s=1.0)]
    refused(partial(RecordedSource, unsorted), "at_s = 1.0", "2.0")
    (tmp_path / "folder.csv").mkdir()
    for path in (tmp_path / "missing.csv", str(tmp_path / "folder.csv")):
        refused(partial(RecordedSource, path), path)


def test_a_recording_does_not_overwrite_another_file(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("precious")
    for bad in (path, tmp_path / "no folder" / "a.csv", tmp_path / "a.xlsx"):
        refused(partial(record, Replay(), bad, num_readings=1), bad)
    assert path.read_text() == "precious"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_refused(tmp_path):
    recorder = Recorder(tmp_path / "a.jsonl")
    recorder._file.close()
    # Closing the file fails, too.
    with (
        pytest.raises(OSError, match="No space"),
        Path("/dev/full").open("w", encoding="utf-8") as recorder._file,
    ):
        refused(partial(recorder.write, Reading(at_s=1.0)), "a.jsonl")


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_an_interrupted_recording_can_be_replayed(tmp_path, suffix):
    path, slept = tmp_path / f"a.{suffix}", []
    readings = tuple(Reading(at_s=float(number)) for number in range(9))

    def sleep(seconds):
        slept.append(seconds)
        assert load_recording(path) == readings[: len(slept)]  # whole lines at any time
        if len(slept) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(Replay(*readings), path, interval_s=0.25, sleep=sleep)
    assert load_recording(path) == readings[:3] and slept == [0.25] * 3


def test_an_invalid_interval_is_refused_before_there_is_a_file(tmp_path):
    for seconds in (0.0, -1.0, nan, inf):
        refused(partial(record, Replay(), tmp_path / "a.csv", interval_s=seconds), seconds)
        refused(partial(readings_of, Replay(), interval_s=seconds), seconds)
    assert list(tmp_path.iterdir()) == []


def test_json_lines_have_every_field(tmp_path):
    path = tmp_path / "a.jsonl"
    record(Replay(Reading(at_s=1.0, throttled=True)), path, num_readings=1)
    fields = '"throttled": true, "battery_fraction": null, "on_battery": null, "user_load": null'
    start = '{"at_s": 1.0, "temperature_c": null, "clock_factor": null, '
    assert path.read_text() == f'{start}{fields}, "notes": []}}\n'
