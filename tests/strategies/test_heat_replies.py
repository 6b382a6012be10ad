"""What strategies tell of devices that heat, users or batteries have held back."""

from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from socflower.strategies.replies import heat_events
from socflower.wire.message_keys import HEAT, HeatReport
from tests.strategies.fake_messages import reply_with


def reply(record: dict[str, Any] | None) -> Message:
    content = RecordDict() if record is None else RecordDict({HEAT: ConfigRecord(record)})
    return reply_with(content)


def test_devices_that_say_nothing_or_were_not_held_back_are_no_events() -> None:
    assert heat_events(reply(None), 0, "SoC 0") == []
    assert (
        heat_events(reply(HeatReport(temperature_c=80.0, peak_c=81.0).encode()), 0, "SoC 0") == []
    )


def test_a_device_that_was_held_back_is_one_event_that_says_how() -> None:
    report = HeatReport(
        temperature_c=78.0,
        peak_c=82.5,
        clock_factor=0.62,
        throttled_s=41.0,
        share=0.5,
        user_load=0.2,
        paused_s=12.0,
        triggered=True,
    )
    (event,) = heat_events(reply(report.encode()), 3, "group 3")
    assert (event.kind, event.group_id) == ("hot", 3)
    assert event.text == (
        "group 3: at 78.0 C, at most 82.5 C, clocks at 62%, throttled for 41 s, limited to 50% "
        "of its power, others use 20%, waited 12 s"
    )
    (event,) = heat_events(reply(HeatReport(triggered=True).encode()), 3, "group 3")
    assert event.text == "group 3: slow clocks"


@given(
    st.dictionaries(
        st.sampled_from(["temperature-c", "share", "peak-c", "triggered", "unheard-of"]),
        st.one_of(st.floats(), st.text(max_size=3), st.booleans()),
    )
)
def test_whatever_a_record_holds_never_raises(record: dict[str, Any]) -> None:
    assert all(event.kind == "hot" for event in heat_events(reply(record), 0, "SoC 0"))
