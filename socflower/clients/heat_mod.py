"""A Flower mod by which any ClientApp minds the heat of its device: `ClientApp(mods=[heat_mod()])`.

Before a TRAIN message's work it reads the device. One that is hot, short of charge or in use holds the message for a
while, and answers with an error if that does not help; one that is warm does less of the work, on fewer threads and
with rests between its steps. Every reply with content tells the server how hot the device was (`HeatReport`).

An operator switches it on and sets its limits in `flower-supernode --node-config` (`node_heat_mod`).
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from logging import INFO
from threading import Event, Thread
from typing import Any, TypeAlias, cast

import torch
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.supercore import log
from torch.optim.optimizer import register_optimizer_step_post_hook

from socflower.clients.node_config import NodeConfig
from socflower.errors import ConfigError
from socflower.thermal.limits import HeatGuard, HeatLimits, Pause, current_guard, guarding, next_pause
from socflower.thermal.sensors.guarded import CarefulSource
from socflower.thermal.sensors.reading import HeatSource, Reading
from socflower.thermal.sensors.step_times import StepTiming
from socflower.wire.message_keys import (
    DEPARTURES,
    GROUP,
    HEAT,
    PARTITION_ID,
    RING,
    STATUS,
    GroupTask,
    RingTask,
    decode,
    encode,
)

SourceFn: TypeAlias = Callable[[Context], HeatSource]

_PAUSE = "socflower-heat-pause"
"""The record of a node's own state that keeps its pause between messages, whose processes do not live as long."""

_STEPS = "socflower-heat-steps"
"""And that of the seconds of a step at full clock, by its number of samples, where no sensor tells the clock."""

_FIRST_SPAN_S = 0.6
"""Load is a difference of counters: a machine's first look says nothing of it."""

_PRECONDITION_FAILED = 6  # Flower's code for the error of a mod that did not pass a message on
_DEFAULT_LIMITS = HeatLimits()


def heat_mod(
    source: HeatSource | SourceFn | None = None, limits: HeatLimits = _DEFAULT_LIMITS, *,
    shrink_keys: Sequence[str] = ("local-epochs",), sample_interval_s: float = 1.0, look_interval_s: float = 2.0,
    read_timeout_s: float = 5.0, sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Mod:
    """Return a mod that holds, shrinks or refuses training on a device that should not train as it would.

    Parameters
    ----------
    source : HeatSource, or (context) -> HeatSource, optional
        What to read; a function is called once for each node. Default: the sensors of this Linux machine.
    limits : HeatLimits
    shrink_keys : sequence of str
        Keys of a TRAIN message's config records whose whole numbers say how much work there is. On a warm device they
        are scaled down, never below 1, in a copy.
    sample_interval_s, look_interval_s : float
        How often the source is read while a message is answered, and how old a reading may be for a decision.
    read_timeout_s : float
        How long a source may take to answer before its device counts as unknown.
    sleep, clock
        For tests.

    Notes
    -----
    TRAIN messages of groups and rings are never held: their SoC leaves before the first step, as if its user had asked
    for it, and the others go on. A device that may not train says so to a strategy that asks for its status.
    """
    for name, value in (("sample_interval_s", sample_interval_s), ("look_interval_s", look_interval_s),
                        ("read_timeout_s", read_timeout_s)):
        if not 0.0 < value < float("inf"):
            raise ConfigError(f"heat_mod: {name} = {value} must be a number of seconds above 0")
    if isinstance(shrink_keys, str):
        raise ConfigError(f"heat_mod: shrink_keys = {shrink_keys!r} is one text; give a list, [{shrink_keys!r}]")
    return _HeatMod(source, limits, shrink_keys=tuple(shrink_keys), sample_interval_s=sample_interval_s,
                    look_interval_s=look_interval_s, read_timeout_s=read_timeout_s, sleep=sleep, clock=clock)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Verdict:
    """A look at a device: why it must not be trained on, None if it may be."""

    reading: Reading
    refusal: str | None
    notes: tuple[str, ...]  # of a sensor that is stuck


class _HeatMod:
    def __init__(
        self, source: HeatSource | SourceFn | None, limits: HeatLimits, *, shrink_keys: tuple[str, ...],
        sample_interval_s: float, look_interval_s: float, read_timeout_s: float, sleep: Callable[[float], object],
        clock: Callable[[], float],
    ) -> None:
        self._source, self._limits, self._shrink_keys = source, limits, shrink_keys
        self._sample_interval_s, self._look_interval_s = sample_interval_s, look_interval_s
        self._read_timeout_s, self._sleep, self._clock = read_timeout_s, sleep, clock
        self._careful: dict[int | None, CarefulSource] = {}  # by node, or one for all

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        category = message.metadata.message_type.partition(".")[0]
        careful = self._careful_source(context)
        verdict = self._judge(careful, context)
        trains = category == MessageType.TRAIN
        alone = trains and GROUP not in message.content.config_records
        paused_s = 0.0
        if alone and verdict.refusal is not None:
            log(INFO, "heat mod: training is held, %s", verdict.refusal)
            verdict, paused_s = self._hold(verdict, careful, context)
            if verdict.refusal is not None:
                reason = f"heat mod: not trained, {verdict.refusal}; held for {paused_s:.0f} s"
                return Message(Error(_PRECONDITION_FAILED, reason), reply_to=message)
        if trains and not alone and verdict.refusal is not None:
            log(INFO, "heat mod: leaves its group, %s", verdict.refusal)
            message = _departing(message, context)
        share = self._limits.share(verdict.reading)
        if alone and share < 1.0:
            message = _shrunk(message, self._shrink_keys, share)
        with _limited_threads(share if alone else 1.0) as thread_share:
            timing = _timing(context)
            guard = HeatGuard(careful, self._limits, verdict.reading, timing=timing, thread_share=thread_share,
                              look_interval_s=self._look_interval_s, sleep=self._sleep, clock=self._clock)
            with guarding(guard), _sampled(guard, self._sample_interval_s), _rests_between_steps(alone):
                reply = call_next(message, context)
        guard.last_look()
        _keep_timing(context, timing)
        if reply.has_content():
            records = reply.content.config_records
            if category == MessageType.QUERY and verdict.refusal is not None and STATUS in records:
                records[STATUS]["preempted"] = True
            reply.content[HEAT] = ConfigRecord(guard.report(paused_s=paused_s, notes=verdict.notes).encode())
        return reply

    def _careful_source(self, context: Context) -> CarefulSource:
        source = self._source
        of_node = source is not None and not hasattr(source, "read")
        key = context.node_id if of_node else None
        if key not in self._careful:
            def make() -> HeatSource:
                return _ready(cast(SourceFn, source)(context) if of_node else cast(HeatSource | None, source))

            self._careful[key] = CarefulSource(make, timeout_s=self._read_timeout_s, clock=self._clock)
        return self._careful[key]

    def _hold(self, verdict: _Verdict, careful: CarefulSource, context: Context) -> tuple[_Verdict, float]:
        """Judge again and again until the device may train or `max_pause_s` are over; return seconds too."""
        began_s, slept_s = self._clock(), 0.0
        while True:
            held_s = max(slept_s, self._clock() - began_s)  # a clock that stands must not hold it for ever
            left_s = self._limits.max_pause_s - held_s
            if verdict.refusal is None or left_s <= 0.0:
                return verdict, held_s
            nap_s = min(left_s, self._look_interval_s)
            self._sleep(nap_s)
            slept_s += nap_s
            verdict = self._judge(careful, context)

    def _judge(self, careful: CarefulSource, context: Context) -> _Verdict:
        """Look at the device, and keep in its node's state whether it rests because of heat."""
        reading, now_s = careful.read(), self._clock()
        record = context.state.config_records.get(_PAUSE)
        before = None if record is None else decode(Pause, record, "heat pause")
        pause = next_pause(self._limits, before, reading, now_s)
        context.state.pop(_PAUSE, None)
        if pause is not None:
            context.state[_PAUSE] = ConfigRecord(encode(pause))
        stuck = pause is not None and pause.stuck(self._limits, now_s)
        notes = (f"temperature stays at exactly {reading.temperature_c:g} °C while the device rests: its sensor is "
                 "taken for stuck",) if stuck else ()
        return _Verdict(reading=reading, notes=notes,
                        refusal=self._limits.refusal(reading, rests=pause is not None and not stuck))


class ThisMachine:
    """The sensors of the machine that this process runs on; its first reading too has the load of others."""

    def __init__(self, sensors: HeatSource) -> None:
        self._sensors = sensors
        self._notes = sensors.read().notes  # each is said once
        time.sleep(_FIRST_SPAN_S)

    def read(self) -> Reading:
        """Return how the machine is now."""
        reading, notes = self._sensors.read(), self._notes
        self._notes = ()
        return replace(reading, notes=(*notes, *reading.notes))


def _ready(source: HeatSource | None) -> HeatSource:
    """Return a source, by default this machine, whose next reading has all that it can say."""
    from socflower.thermal.sensors.linux import LinuxSensors

    source = source or LinuxSensors()
    return ThisMachine(source) if isinstance(source, LinuxSensors) else source


def _timing(context: Context) -> StepTiming:
    kept = context.state.config_records.get(_STEPS, ConfigRecord())
    samples, seconds = cast(list[int], kept.get("samples", [])), cast(list[float], kept.get("seconds", []))
    return StepTiming(references_s=dict(zip(samples, seconds, strict=True)))


def _keep_timing(context: Context, timing: StepTiming) -> None:
    references_s = timing.references()
    if references_s:
        context.state[_STEPS] = ConfigRecord({"samples": list(references_s), "seconds": list(references_s.values())})


def _departing(message: Message, context: Context) -> Message:
    """Return a group's message in which this node's SoC leaves before the first step (of a group of one: everyone).

    In a ring the others go on without it. Where one process computes a whole group it stands for this node's member,
    whose part then is not computed; where it cannot be told which one that is, it stands for them all.
    """
    records = message.content.config_records
    task = GroupTask.decode(records[GROUP])
    own = decode(RingTask, records[RING], "ring").participant if RING in records else \
        context.node_config.get(PARTITION_ID)
    socs = [soc for soc, partition in zip(task.members, task.partitions, strict=True) if str(partition) == str(own)]
    leaving = {**records.get(DEPARTURES, {}), **{str(soc): 0.0 for soc in socs or task.members}}
    return _with_records(message, {DEPARTURES: ConfigRecord(leaving)})


def _shrunk(message: Message, keys: Sequence[str], share: float) -> Message:
    """Return a message whose config records ask for `share` of the work, of each kind at least 1."""
    changed: dict[str, ConfigRecord] = {}
    for name, record in message.content.config_records.items():
        for key in keys:
            value = record.get(key)
            if type(value) is int and value > 1:
                changed[name] = ConfigRecord({**changed.get(name, record), key: max(1, round(share * value))})
    return _with_records(message, changed)


def _with_records(message: Message, records: Mapping[str, ConfigRecord]) -> Message:
    # Strategies send one content to many nodes, and on some engines it is the same object for all of them.
    content: dict[str, Any] = {**message.content, **records}
    message = copy.copy(message)
    message.content = RecordDict(content)
    return message


@contextmanager
def _limited_threads(share: float) -> Iterator[float]:
    """Leave torch `share` of its threads, at least one; yield what part of them that is."""
    before = torch.get_num_threads()
    limited = max(1, round(share * before))
    if limited == before:
        yield 1.0
        return
    torch.set_num_threads(limited)
    try:
        yield limited / before
    finally:
        torch.set_num_threads(before)


@contextmanager
def _rests_between_steps(wanted: bool) -> Iterator[None]:
    """Let any torch optimiser's step in this thread be followed by the rest that the current guard asks for."""
    if not wanted:
        yield
        return

    def after_step(*_: object) -> None:
        guard = current_guard()  # of the thread that steps: none where an app trains in threads of its own
        if guard is not None:
            guard.step_done()

    hook = register_optimizer_step_post_hook(after_step)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _sampled(guard: HeatGuard, interval_s: float) -> Iterator[None]:
    """Let a thread look at the device meanwhile; it has ended when this ends."""
    ended = Event()

    def sample() -> None:
        while not ended.wait(interval_s):
            guard.look()

    thread = Thread(target=sample, name="heat-sampler", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # no more threads: fewer readings, but training
        log(INFO, "heat mod: no samples while the client works (%s)", error)
        yield
        return
    try:
        yield
    finally:
        ended.set()
        thread.join()


_SWITCH = "heat"
_LIMITS = {f"heat-{entry.name.replace('_', '-')}": entry.name for entry in fields(HeatLimits)}


def node_heat_limits(node_config: NodeConfig) -> HeatLimits | None:
    """Return a node's limits, None where it does not mind heat; `ConfigError` for a key that cannot be.

    Keys: `heat` (true: mind it), and the fields of `HeatLimits`, as in `heat-pause-c=80.0`.
    """
    switch = node_config.get(_SWITCH, False)
    given = {key: value for key, value in node_config.items() if key.startswith(f"{_SWITCH}-")}
    unknown = sorted(set(given) - set(_LIMITS))
    if unknown:
        raise ConfigError(f"node config: {unknown[0]} is unknown; use one of {', '.join(_LIMITS)}")
    if not isinstance(switch, bool):
        raise ConfigError(f"node config: {_SWITCH} = {switch!r} must be true or false")
    if not switch:
        if given:
            raise ConfigError(f"node config: {min(given)} without {_SWITCH}; add {_SWITCH}=true")
        return None
    numbers: dict[str, float] = {}
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"node config: {key} = {value!r} must be a number")
        numbers[_LIMITS[key]] = float(value)
    return HeatLimits(**numbers)


def node_heat_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Answer as `heat_mod` does with the limits of the node's config; nodes that do not mind heat pass through."""
    limits = node_heat_limits(context.node_config)
    return call_next(message, context) if limits is None else _mod(limits)(message, context, call_next)


@cache
def _mod(limits: HeatLimits) -> Mod:
    return heat_mod(limits=limits)
