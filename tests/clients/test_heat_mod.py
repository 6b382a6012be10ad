"""The heat mod around real ClientApps: what is held, shrunk and refused, and that no sensor ever stops training."""

import importlib
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common.constant import ErrorCode
from flwr.serverapp.strategy import FedAvg
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from socflower.clients import heat_mod as mods
from socflower.clients.app import make_client_app
from socflower.clients.heat_mod import SourceFn, heat_mod
from socflower.flower_adapter import begin_run
from socflower.hierarchy import Group
from socflower.strategies.replies import sort_replies
from socflower.thermal.limits import HeatLimits, current_guard
from socflower.thermal.sensors.linux import LinuxSensors
from socflower.thermal.sensors.reading import HeatSource, Reading
from socflower.wire.message_keys import (
    ASK,
    ASK_STATUS,
    COMPLETED,
    DEPARTURES,
    HEAT,
    OUTCOME,
    PREEMPTED,
    STATUS,
    GroupTask,
    HeatReport,
    NodeStatus,
    RingOutcome,
    RingTask,
    decode,
    encode,
)
from tests.clients.test_app import (
    DATA,
    TRAINER,
    assert_weights,
    fresh,
    group_task,
    make_app,
    message,
    metrics_of,
    node,
    part,
    trained_alone,
    weights,
)
from tests.one_line import refused
from tests.peers.peers import TOKEN, free_addresses
from tests.thermal.test_limits import DEADLINE_S, Calls, forged


class Time:
    """A clock that only moves when somebody sleeps or works."""

    def __init__(self) -> None:
        self.now_s, self.slept_s = 100.0, 0.0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept_s += seconds

    def work(self, seconds: float) -> None:
        self.now_s += seconds


class Source:
    """A source that says what a function of the time says."""

    def __init__(self, say: Callable[[float], dict[str, Any]], when: Time) -> None:
        self._say, self._time = say, when

    def read(self) -> Reading:
        return Reading(at_s=self._time.now_s, **self._say(self._time.now_s))


def raising(error: BaseException) -> Callable[[], Any]:
    def read() -> Any:
        raise error

    return read


LIMITS = HeatLimits(
    resume_c=60.0, shrink_c=70.0, pause_c=80.0, min_share=0.2, max_pause_s=40.0, stuck_s=30.0
)
Say = Callable[[float], dict[str, Any]]


def at(now_c: float | None, **values: Any) -> Say:
    return lambda now_s: {"temperature_c": now_c, **values}


def mod_of(
    say: Say | None = None,
    *,
    source: HeatSource | SourceFn | None = None,
    when: Time | None = None,
    limits: HeatLimits = LIMITS,
    **changes: Any,
) -> Mod:
    """A mod on made-up time, whose sampler never gets its turn."""
    when = when or Time()
    settings: dict[str, Any] = {
        "sample_interval_s": DEADLINE_S,
        "read_timeout_s": DEADLINE_S,
        "sleep": when.sleep,
        "clock": when.clock,
    }
    return heat_mod(source or Source(say or at(40.0), when), limits, **(settings | changes))


class ForeignApp:
    """An app that knows nothing of socflower: `local-epochs` passes, a step each; what it saw is kept."""

    def __init__(self, mod: Mod, *, on_step: Callable[[], object] = lambda: None) -> None:
        self.epochs: list[int] = []
        self.threads: list[int] = []
        self.app = ClientApp(mods=[mod])

        @self.app.train()
        def train(sent: Message, context: Context) -> Message:
            self.epochs.append(int(sent.content["config"].get("local-epochs", 1)))
            self.threads.append(torch.get_num_threads())
            model = nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(self.epochs[-1]):
                optimizer.zero_grad()
                model(torch.ones(3, 4)).sum().backward()
                optimizer.step()
                on_step()
            return Message(
                RecordDict(
                    {
                        "arrays": ArrayRecord(model.state_dict()),
                        "metrics": MetricRecord({"num-examples": 3, "train-loss": 1.0}),
                    }
                ),
                reply_to=sent,
            )

    def __call__(self, context: Context | None = None, **config: Any) -> Message:
        return self.app(message(**config), context or node())


def heat_of(reply: Message) -> HeatReport:
    return HeatReport.decode(reply.content.config_records[HEAT])


# ------------------------------------------------------------------------------------------------- settings
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sample_interval_s": 0.0}, "sample_interval_s"),
        ({"poll_interval_s": math.nan}, "poll_interval_s"),
        ({"read_timeout_s": math.inf}, "read_timeout_s"),
        ({"shrink_keys": "epochs"}, "shrink_keys"),
    ],
)
def test_a_setting_that_cannot_be_is_one_line(changes: dict[str, Any], text: str) -> None:
    refused(lambda: heat_mod(**changes), text)


# ----------------------------------------------------------------------------------------- a device that is cool
def test_a_cool_device_trains_as_without_the_mod_and_says_how_it_is() -> None:
    config = {"batch-size": 5, "local-epochs": 3}
    reply = make_app(
        mods=[mod_of(at(45.0, clock_factor=1.0, battery_fraction=0.9, notes=("zone7 lies",)))]
    )(message(**config), node(2))
    assert_weights(reply, trained_alone(batch_size=5, num_epochs=3))
    assert heat_of(reply) == HeatReport(
        temperature_c=45.0,
        peak_c=45.0,
        clock_factor=1.0,
        battery_fraction=0.9,
        notes=("zone7 lies",),
    )


def test_evaluation_and_questions_are_never_held_and_are_reported() -> None:
    when = Time()
    app = make_app(mods=[mod_of(at(95.0), when=when)], evaluate_data_fn=part)
    reply = app(message("evaluate"), node(1))
    assert metrics_of(reply)["num-examples"] == 12 and heat_of(reply).peak_c == 95.0
    assert app(message("query.socflower", **{ASK: ASK_STATUS}), node(1)).has_content()
    assert when.slept_s == 0.0


def test_the_default_source_is_this_machine_and_training_goes_on_whatever_it_has() -> None:
    limits = HeatLimits(shrink_c=149.0, pause_c=150.0, max_user_load=1.0, min_battery_fraction=0.0)
    reply = make_app(mods=[heat_mod(limits=limits)])(message(**{"batch-size": 24}), node(2))
    assert metrics_of(reply)["num-examples"] == 12 and heat_of(reply).paused_s == 0.0


@pytest.mark.parametrize("given_by_hand", [False, True])
def test_the_first_reading_of_a_machine_has_the_load_of_others_and_all_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_by_hand: bool
) -> None:
    """A made-up machine on which others use three quarters of the processors, by counters that go on."""
    seconds = 0
    (tmp_path / "proc").mkdir()

    def clock() -> float:
        nonlocal seconds
        seconds += 1
        (tmp_path / "proc/stat").write_text(
            f"cpu {300 * seconds} 0 0 {100 * seconds} 0 0 0 0\ncpu0 0\n"
        )
        return float(seconds)

    class HereSensors(LinuxSensors):
        def __init__(self) -> None:
            super().__init__(tmp_path, clock=clock)

    monkeypatch.setattr(mods, "_LOAD_WINDOW_S", 0.0)
    monkeypatch.setattr("socflower.thermal.sensors.linux.LinuxSensors", HereSensors)
    limits = HeatLimits(max_user_load=0.9)
    report = heat_of(
        make_app(mods=[heat_mod(HereSensors() if given_by_hand else None, limits)])(
            message(), node(2)
        )
    )
    assert report.user_load == pytest.approx(0.75) and report.share == pytest.approx(0.25)
    assert any("no temperature sensor here" in note for note in report.notes)


def test_a_function_gives_each_node_a_source_of_its_own_once() -> None:
    asked: list[int] = []

    def source_of(context: Context) -> HeatSource:
        asked.append(context.node_id)
        return Calls(lambda: Reading(at_s=0.0, temperature_c=10.0 * context.node_id))

    app = ForeignApp(mod_of(source=source_of))
    contexts = [
        Context(run_id=1, node_id=node_id, node_config={}, state=RecordDict(), run_config={})
        for node_id in (3, 4)
    ]
    seen = [heat_of(app(context)).peak_c for context in (*contexts, *contexts)]
    assert seen == [30.0, 40.0, 30.0, 40.0] and asked == [3, 4]


# ------------------------------------------------------------------------------------------ holding and refusing
def test_a_hot_device_holds_the_message_until_it_has_cooled_to_resume() -> None:
    """Below pause_c is not enough: from 90 °C a degree a second, it is resume_c (60 °C) after 30 s."""
    when = Time()
    app = ForeignApp(mod_of(lambda now_s: {"temperature_c": max(20.0, 190.0 - now_s)}, when=when))
    context = node()
    reply = app(context)
    assert heat_of(reply).paused_s == pytest.approx(30.0) and len(app.epochs) == 1
    assert heat_of(reply).temperature_c == 60.0
    assert not context.state


def test_a_device_that_stays_hot_answers_as_one_that_failed() -> None:
    when = Time()
    app = ForeignApp(mod_of(lambda now_s: {"temperature_c": 95.0 + 0.01 * (now_s % 7)}, when=when))
    reply = app()
    assert not app.epochs and when.slept_s == pytest.approx(40.0)
    assert reply.has_error() and reply.error.code == ErrorCode.MOD_FAILED_PRECONDITION
    assert "rests from 80 °C down to 60 °C; held for 40 s" in str(reply.error.reason)
    assert "\n" not in str(reply.error.reason)


def test_a_pause_outlives_the_message() -> None:
    """At 75 °C a device trains if it has not been hot, and does not if it rests: its next message has a new process."""
    fresh_device, resting = node(), node()
    no_hold = HeatLimits(resume_c=60.0, shrink_c=70.0, pause_c=80.0, max_pause_s=0.0)
    assert ForeignApp(mod_of(at(85.0), limits=no_hold))(resting).has_error()
    warm = ForeignApp(mod_of(at(75.0), limits=no_hold))
    assert warm(fresh_device).has_content() and warm(resting).has_error()
    assert ForeignApp(mod_of(at(60.0), limits=no_hold))(resting).has_content()
    assert warm(resting).has_content()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"on_battery": True, "battery_fraction": 0.12}, "on battery at 12 %, limit 30 %"),
        ({"user_load": 0.8}, "others use 80 % of its processors, limit 50 %"),
    ],
)
def test_a_battery_and_a_user_are_honoured(values: dict[str, Any], reason: str) -> None:
    assert reason in str(ForeignApp(mod_of(at(40.0, **values)))().error.reason)
    when = Time()
    goes = ForeignApp(mod_of(lambda now_s: values if now_s < 110.0 else {}, when=when))
    assert heat_of(goes()).paused_s == pytest.approx(10.0)


# --------------------------------------------------------------------------------------------------- shrinking
def test_a_warm_device_does_less_on_fewer_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        app = ForeignApp(mod_of(at(76.25)))  # share 0.5
        sent = message(**{"local-epochs": 7, "epochs": 7, "lr": 0.1})
        content = sent.content
        reply = app.app(sent, node())
        assert (app.epochs, app.threads) == ([4], [2]) and torch.get_num_threads() == 4
        assert sent.content is content and content["config"]["local-epochs"] == 7, (
            "the sender's config was changed"
        )
        assert heat_of(reply).share == pytest.approx(0.5) and heat_of(reply).triggered
        ForeignApp(mod_of(at(79.99)))(**{"local-epochs": 1})
        other = ForeignApp(mod_of(at(76.25), shrink_keys=("epochs",)))
        other(**{"local-epochs": 7, "epochs": 7})
        assert other.epochs == [7]
    finally:
        torch.set_num_threads(before)


@given(epochs=st.integers(1, 50), now_c=st.floats(20.0, 79.9))
@example(epochs=2, now_c=79.9)
@settings(max_examples=30)
def test_work_is_scaled_by_the_share_but_never_to_nothing(epochs: int, now_c: float) -> None:
    app = ForeignApp(mod_of(at(now_c)))
    app(**{"local-epochs": epochs})
    share = LIMITS.share(Reading(at_s=0.0, temperature_c=now_c))
    assert (
        1 <= app.epochs[0] <= epochs and abs(app.epochs[0] - max(1.0, share * epochs)) <= 0.5 + 1e-9
    )


@pytest.mark.parametrize("value", [True, 0, 1, 2.0, "4"])
def test_what_is_no_number_of_passes_stays(value: Any) -> None:
    app = ForeignApp(mod_of(at(79.0)))
    app(**{"local-epochs": value})
    assert app.epochs == [int(value)]


def test_any_torch_app_rests_between_its_steps() -> None:
    """Steps of a second at share 0.5 on one thread: as long a rest after each but the first, until it has cooled."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        when = Time()
        app = ForeignApp(
            mod_of(
                lambda now_s: {"temperature_c": 76.25 if now_s < 107.0 else 50.0},
                when=when,
                shrink_keys=(),
                poll_interval_s=0.5,
            ),
            on_step=lambda: when.work(1.0),
        )
        app(**{"local-epochs": 8})
        assert 2.5 <= when.slept_s <= 3.5
    finally:
        torch.set_num_threads(before)
    assert not _global_optimizer_post_hooks, "the hook outlived its call"


def test_our_own_client_rests_between_batches_and_its_weights_are_the_same() -> None:
    when = Time()

    class Slow:
        """A trainer whose steps take a second."""

        def start(self, *args: Any) -> Any:
            session = TRAINER.start(*args)
            step = session.step

            def slow_step(parts: Any) -> Any:
                when.work(1.0)
                return step(parts)

            session.step = slow_step
            return session

    reply = make_app(trainer=Slow(), mods=[mod_of(at(77.5), when=when)])(
        message(**{"batch-size": 4}), node(2)
    )
    assert_weights(reply, trained_alone(batch_size=4, num_epochs=1))
    assert when.slept_s == pytest.approx(3 * 1.5)  # share 0.4
    assert current_guard() is None


# ------------------------------------------------------------------------------------------------------ sampling
def heat_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("heat-sampler")]


def test_a_peak_within_the_call_is_seen_and_the_sampler_ends_with_it() -> None:
    hot, seen = threading.Event(), threading.Event()

    def read() -> Reading:
        if hot.is_set():
            seen.set()
            return Reading(at_s=0.0, temperature_c=66.0, throttled=True, clock_factor=0.5)
        return Reading(at_s=0.0, temperature_c=40.0, throttled=False, clock_factor=1.0)

    def on_step() -> None:
        assert len(heat_threads()) == 1
        hot.set()
        assert seen.wait(DEADLINE_S)
        time.sleep(0.05)
        hot.clear()

    mod = heat_mod(Calls(read), LIMITS, sample_interval_s=0.01, read_timeout_s=DEADLINE_S)
    report = heat_of(ForeignApp(mod, on_step=on_step)())
    assert report.peak_c == 66.0 and report.temperature_c == 40.0 and report.triggered
    assert report.throttled_s is not None and report.throttled_s > 0.0
    assert report.clock_factor is not None and 0.5 <= report.clock_factor < 1.0
    assert not heat_threads()


def test_the_sampler_ends_with_a_call_that_raises() -> None:
    threads = torch.get_num_threads()

    def fail() -> None:
        raise RuntimeError("as apps do")

    app = ForeignApp(
        heat_mod(
            Calls(lambda: Reading(at_s=0.0, temperature_c=75.0)), LIMITS, sample_interval_s=0.01
        ),
        on_step=fail,
    )
    with pytest.raises(RuntimeError, match="as apps do"):
        app()
    assert not heat_threads() and current_guard() is None and torch.get_num_threads() == threads


def test_how_fast_steps_can_be_is_remembered_from_message_to_message() -> None:
    """A node whose later process is slow from its first step on: only the earlier one knows how fast it can be."""
    when, context = Time(), node()
    pace_s = 1.0
    app = ForeignApp(mod_of(at(None), when=when), on_step=lambda: when.work(pace_s))
    assert heat_of(app(context, **{"local-epochs": 12})).clock_factor == pytest.approx(1.0)
    pace_s = 4.0
    later = ForeignApp(mod_of(at(None), when=when), on_step=lambda: when.work(pace_s))
    reply = later(context, **{"local-epochs": 12})
    assert heat_of(reply).clock_factor == pytest.approx(0.25) and heat_of(reply).triggered
    assert heat_of(later(node(), **{"local-epochs": 12})).clock_factor == pytest.approx(1.0)


# ------------------------------------------------------------------------------------- sensors that cannot be trusted
LIES = st.sampled_from(
    [
        raising(OSError("gone")),
        raising(SystemExit(2)),
        lambda: None,
        lambda: "warm",
        lambda: forged(temperature_c=math.nan),
        lambda: forged(temperature_c=-128.0),
        lambda: forged(temperature_c=1e9),
        lambda: forged(user_load=math.nan),
        lambda: forged(battery_fraction=-1.0, on_battery=True),
        lambda: forged(notes=object()),
        lambda: Reading(at_s=math.nan, throttled=True, clock_factor=0.0),
    ]
)


@given(lies=st.lists(LIES, min_size=1, max_size=4), epochs=st.integers(1, 3))
@settings(max_examples=40)
def test_a_lying_sensor_never_stops_training(lies: list[Callable[[], Any]], epochs: int) -> None:
    number = iter(range(10**6))
    when = Time()
    app = ForeignApp(mod_of(source=Calls(lambda: lies[next(number) % len(lies)]()), when=when))
    reply = app(**{"local-epochs": epochs})
    assert reply.has_content() and app.epochs == [epochs] and when.slept_s == 0.0
    assert heat_of(reply).temperature_c is None and heat_of(reply).share == 1.0


readings = st.builds(
    dict,
    temperature_c=st.none() | st.floats(-40.0, 150.0),
    clock_factor=st.none() | st.floats(0.0, 1.0),
    throttled=st.none() | st.booleans(),
    battery_fraction=st.none() | st.floats(0.0, 1.0),
    on_battery=st.none() | st.booleans(),
    user_load=st.none() | st.floats(0.0, 1.0),
)


_HOT = {
    "temperature_c": 80.0,
    "clock_factor": None,
    "throttled": None,
    "battery_fraction": None,
    "on_battery": None,
    "user_load": None,
}


@given(seen=st.lists(readings, min_size=1, max_size=10))
@example(seen=[_HOT, {**_HOT, "temperature_c": None}])  # a pause at whose end nothing is read
@settings(max_examples=60)
def test_whatever_the_source_says_a_reply_comes_within_the_longest_pause(
    seen: list[dict[str, Any]],
) -> None:
    number = iter(range(10**6))
    when = Time()
    app = ForeignApp(mod_of(lambda now_s: seen[next(number) % len(seen)], when=when))
    reply = app(**{"local-epochs": 2})
    if reply.has_error():
        assert not app.epochs and when.slept_s == pytest.approx(LIMITS.max_pause_s)
    else:
        assert heat_of(reply).paused_s <= LIMITS.max_pause_s + 1e-6 and len(app.epochs) == 1


def test_a_stuck_sensor_costs_a_rest_and_then_the_device_trains_gently() -> None:
    when, context = Time(), node()
    app = ForeignApp(mod_of(at(99.0), when=when))
    reply = app(context, **{"local-epochs": 10})
    assert heat_of(reply).paused_s == pytest.approx(30.0) and app.epochs == [2]
    assert heat_of(reply).notes == (
        "temperature stays at exactly 99 °C while the device rests: its sensor counts as stuck",
    )
    assert heat_of(app(context)).paused_s == 0.0
    moved = ForeignApp(
        mod_of(
            at(98.0),
            when=when,
            limits=HeatLimits(resume_c=60.0, shrink_c=70.0, pause_c=80.0, max_pause_s=0.0),
        )
    )
    assert moved(context).has_error(), "a sensor that moves again is believed again"


def test_a_source_that_hangs_delays_training_and_does_not_stop_it() -> None:
    never = threading.Event()

    def read() -> Reading:
        never.wait(DEADLINE_S)
        raise AssertionError

    try:
        reply = ForeignApp(
            heat_mod(Calls(read), LIMITS, read_timeout_s=0.05, sample_interval_s=0.01)
        )()
        assert heat_of(reply).temperature_c is None
        assert any("did not answer within 0.05 s" in note for note in heat_of(reply).notes)
    finally:
        never.set()


# ------------------------------------------------------------------------------------------------------- FedAvg
def test_fedavg_averages_those_that_trained_and_goes_on_without_those_that_rest() -> None:
    """Real strategy, three nodes: one cool, one warm, one resting; equal to the average of two plain clients."""

    def train(now_c: float | None, partition: int) -> Message:
        mods = (
            []
            if now_c is None
            else [mod_of(lambda now_s: {"temperature_c": now_c + 0.001 * (now_s % 3)})]
        )
        return make_app(mods=mods)(message(**{"batch-size": 4}), node(partition))

    replies = [train(40.0, 0), train(72.0, 1), train(95.0, 2)]
    assert [reply.has_content() for reply in replies] == [True, True, False]
    arrays, metrics = FedAvg().aggregate_train(1, replies)
    plain_arrays, plain_metrics = FedAvg().aggregate_train(1, [train(None, 0), train(None, 1)])
    assert arrays is not None and plain_arrays is not None and metrics == plain_metrics
    ours, plain = arrays.to_torch_state_dict(), plain_arrays.to_torch_state_dict()
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


def test_fedavg_averages_evaluations() -> None:
    replies = [
        make_app(mods=[mod_of(at(95.0))], evaluate_data_fn=part)(
            message("evaluate"), node(partition)
        )
        for partition in (0, 1)
    ]
    metrics = FedAvg().aggregate_evaluate(1, replies)
    assert metrics is not None and {"accuracy", "loss"} <= metrics.keys()


def test_a_round_in_which_all_rest_leaves_the_model_as_it_is() -> None:
    reply = ForeignApp(mod_of(at(40.0, user_load=1.0)))()
    assert FedAvg().aggregate_train(1, [reply, reply]) == (None, None)


# --------------------------------------------------------------------------------------------- groups and rings
def outcome_of(reply: Message) -> RingOutcome:
    return decode(RingOutcome, reply.content.config_records[OUTCOME], "outcome")


@pytest.mark.parametrize(
    ("now_c", "values", "preempted"),
    [
        (40.0, {}, False),
        (79.0, {}, False),
        (81.0, {}, True),
        (40.0, {"user_load": 0.9}, True),
        (None, {}, False),
    ],
)
def test_a_device_that_may_not_train_says_so_when_asked(
    now_c: float | None, values: dict[str, Any], preempted: bool
) -> None:
    reply = make_app(mods=[mod_of(at(now_c, **values))])(
        message("query.socflower", **{ASK: ASK_STATUS}), node()
    )
    assert NodeStatus.decode(reply.content.config_records[STATUS]).preempted is preempted


def test_in_a_group_in_one_process_its_own_soc_leaves_and_nothing_is_held() -> None:
    when = Time()
    sent = message(group=group_task())
    reply = make_app(mods=[mod_of(at(95.0), when=when)])(sent, node(2))
    assert outcome_of(reply).preempted == (2,) and outcome_of(reply).members == (3,)
    assert when.slept_s == 0.0 and DEPARTURES not in sent.content
    assert sort_replies(
        [reply],
        {5: Group(group_id=1, members=(2, 3), leader=2, boards=(0,))},
        tolerate_errors=False,
    ) == ([reply], ())


def test_a_group_of_one_leaves_as_a_whole() -> None:
    alone = group_task(members=(2,), partitions=(2,), capacities=(1.0,))
    reply = make_app(mods=[mod_of(at(95.0))])(message(group=alone), node(2))
    assert outcome_of(reply).outcome == PREEMPTED and "arrays" not in reply.content


def test_a_process_that_does_not_know_its_soc_stands_for_the_whole_group() -> None:
    stranger = Context(run_id=1, node_id=5, state=RecordDict(), run_config={}, node_config={})
    reply = make_app(mods=[mod_of(at(95.0))])(message(group=group_task()), stranger)
    assert set(outcome_of(reply).preempted) == {2, 3}


def test_who_has_left_already_still_leaves() -> None:
    def other(sent: Message, context: Context, call_next: ClientAppCallable) -> Message:
        sent.content[DEPARTURES] = ConfigRecord({"3": 0.5})
        return call_next(sent, context)

    reply = make_app(mods=[other, mod_of(at(95.0))])(message(group=group_task()), node(2))
    assert set(outcome_of(reply).preempted) == {2, 3}


@pytest.mark.parametrize("hot", [0, 1])
def test_a_ring_goes_on_without_a_member_that_is_hot(hot: int) -> None:
    """Leader or not: who is hot leaves as if its user had come, and the other does all steps."""
    begin_run(1)
    addresses = free_addresses(2)
    task = GroupTask(
        group_id=0,
        num_groups=1,
        members=(4, 5),
        leader=4,
        partitions=(0, 1),
        num_partitions=2,
        capacities=(1.0, 1.0),
        first_step=0,
        num_steps=3,
        steps_per_epoch=3,
        total_steps=3,
        batch_size=16,
        reshuffle=True,
        deal_epoch=0,
        seed=3,
        num_samples=len(DATA),
    )

    def member(participant: int) -> Message:
        ring = RingTask(
            participant=participant,
            leader=0,
            addresses=tuple(addresses),
            token=TOKEN.hex(),
            transport="grpc",
            heartbeat_s=10.0,
            rendezvous_s=60.0,
        )
        content = RecordDict(
            {
                "config": ConfigRecord({}),
                "group": ConfigRecord(task.encode()),
                "ring": ConfigRecord(encode(ring)),
            }
        )
        if participant == 0:
            content["arrays"] = weights(fresh())
        context = Context(
            run_id=1,
            node_id=participant,
            state=RecordDict(),
            run_config={},
            node_config={"ring": addresses[participant]},
        )
        app = make_client_app(
            lambda context: fresh(),
            part,
            TRAINER,
            mods=[mod_of(at(95.0 if participant == hot else 40.0))],
        )
        return app(Message(content, participant, "train"), context)

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(2) as threads:
            replies = list(threads.map(member, (0, 1), timeout=DEADLINE_S))
    finally:
        torch.set_num_threads(before)
    left, stayed = outcome_of(replies[hot]), outcome_of(replies[1 - hot])
    assert left.outcome == PREEMPTED and "arrays" not in replies[hot].content
    assert stayed.outcome == COMPLETED and stayed.answers and stayed.num_steps == 3
    assert stayed.preempted == (4 + hot,) and "arrays" in replies[1 - hot].content
    assert [heat_of(reply).peak_c for reply in replies] == [
        95.0 if rank == hot else 40.0 for rank in (0, 1)
    ]


# ------------------------------------------------------------------------------------------------------ example
def test_the_example_app_learns_and_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs/examples/heat_app"))
    client, task = (importlib.import_module(f"heat_app.{name}") for name in ("client_app", "task"))
    server = importlib.import_module("heat_app.server_app")
    begin_run(1)
    model, strategy = task.load_model(), FedAvg(train_metrics_aggr_fn=server.with_heat)
    for server_round in range(1, 9):
        content = RecordDict(
            {
                "arrays": ArrayRecord(model.state_dict()),
                "config": ConfigRecord({"local-epochs": 8, "learning-rate": 0.1}),
            }
        )
        replies = [
            client.app(Message(content, partition, "train"), node(partition))
            for partition in (0, 1)
        ]
        arrays, metrics = strategy.aggregate_train(server_round, replies)
        assert arrays is not None and metrics is not None
        model.load_state_dict(arrays.to_torch_state_dict())
    # A loaded machine shrinks the work to one pass a round.
    assert task.accuracy_of(model, *task.load_points(seed=1000)) >= 0.85
