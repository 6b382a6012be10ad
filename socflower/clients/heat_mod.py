"""A Flower mod that adapts any ClientApp to the heat of its device: `ClientApp(mods=[heat_mod()])`.

It reads the device's sensors before a TRAIN message is processed. If the device is hot, low on battery or in use, the
message is held for a while, and answered with an error if the state persists. A warm device does less of the work, on
fewer threads and with pauses between steps. Every reply with content reports the device's heat (`HeatReport`).

Operators enable it and set its limits in `flower-supernode --node-config` (`node_heat_mod`).
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from logging import INFO
from threading import Event, Thread
from typing import Any, TypeAlias, cast

import torch
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch.optim.optimizer import register_optimizer_step_post_hook

from socflower.clients.node_config import NodeConfig, switch
from socflower.errors import ConfigError, require_range, require_type
from socflower.flower_adapter import log
from socflower.plain_numbers import plain_numbers
from socflower.thermal.limits import (
    HeatGuard,
    HeatLimits,
    Pause,
    current_guard,
    guarding,
    next_pause,
)
from socflower.thermal.sensors.guarded import GuardedSource
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
"""The record of a node's state that keeps its pause between messages, since each message has its own process."""

_STEPS = "socflower-heat-steps"
"""The record of the seconds of a step at full clock, by its number of samples, for devices without a clock sensor."""

_LOAD_WINDOW_S = 0.6
"""Load is a difference of counters, so the first reading of a machine has none."""

# Flower's error code for a mod that did not forward a message.
_PRECONDITION_FAILED = 6
_DEFAULT_LIMITS = HeatLimits()


@plain_numbers
def heat_mod(
    source: HeatSource | SourceFn | None = None,
    limits: HeatLimits = _DEFAULT_LIMITS,
    *,
    shrink_keys: Sequence[str] = ("local-epochs",),
    sample_interval_s: float = 1.0,
    poll_interval_s: float = 2.0,
    read_timeout_s: float = 5.0,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Mod:
    """Return a mod that holds, reduces or refuses training on a device that is hot, in use or low on battery.

    Parameters
    ----------
    source : HeatSource, or (context) -> HeatSource, optional
        The sensors to read; a function is called once for each node. Default: the sensors of this Linux machine.
    limits : HeatLimits
    shrink_keys : sequence of str
        Keys of a TRAIN message's config records whose integer values set the amount of work. On a warm device they
        are scaled down, never below 1, in a copy.
    sample_interval_s, poll_interval_s : float
        How often the source is read while a message is processed, and the maximum age of a reading for a decision.
    read_timeout_s : float
        How long a source may take to answer before the device's state counts as unknown.
    sleep, clock
        For tests.

    Notes
    -----
    TRAIN messages of groups and rings are never held: the SoC leaves before the first step, as if preempted, and the
    others continue. A device that may not train reports itself as preempted in status replies.
    """
    require_range(
        "heat_mod",
        above=0,
        sample_interval_s=sample_interval_s,
        poll_interval_s=poll_interval_s,
        read_timeout_s=read_timeout_s,
    )
    if isinstance(shrink_keys, str):
        raise ConfigError(
            f"heat_mod: shrink_keys = {shrink_keys!r} is one text; give a list, [{shrink_keys!r}]"
        )
    return _HeatMod(
        source,
        limits,
        tuple(shrink_keys),
        sample_interval_s,
        poll_interval_s,
        read_timeout_s,
        sleep,
        clock,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _HeatCheck:
    """A reading of a device; `refusal` is why it must not train, None if it may."""

    reading: Reading
    refusal: str | None
    # Says that a sensor is stuck.
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _HeatMod:
    source: HeatSource | SourceFn | None
    limits: HeatLimits
    shrink_keys: tuple[str, ...]
    sample_interval_s: float
    poll_interval_s: float
    read_timeout_s: float
    sleep: Callable[[float], object]
    clock: Callable[[], float]
    # The guarded source of each node, or one for all nodes under None.
    sources: dict[int | None, GuardedSource] = field(default_factory=dict)

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        category = message.metadata.message_type.partition(".")[0]
        careful = self._careful_source(context)
        check = self._check_heat(careful, context)
        trains = category == MessageType.TRAIN
        alone = trains and GROUP not in message.content.config_records
        paused_s = 0.0
        if alone and check.refusal is not None:
            log(INFO, "heat mod: training is held, %s", check.refusal)
            check, paused_s = self._hold(check, careful, context)
            if check.refusal is not None:
                reason = f"heat mod: not trained, {check.refusal}; held for {paused_s:.0f} s"
                return Message(Error(_PRECONDITION_FAILED, reason), reply_to=message)
        if trains and not alone and check.refusal is not None:
            log(INFO, "heat mod: leaves its group, %s", check.refusal)
            message = _with_departure(message, context)
        share = self.limits.share(check.reading)
        if alone and share < 1.0:
            message = _with_reduced_work(message, self.shrink_keys, share)
        with _limited_threads(share if alone else 1.0) as thread_share:
            timing = _timing(context)
            guard = HeatGuard(
                careful,
                self.limits,
                check.reading,
                timing=timing,
                thread_share=thread_share,
                poll_interval_s=self.poll_interval_s,
                sleep=self.sleep,
                clock=self.clock,
            )
            with (
                guarding(guard),
                _sampled(guard, self.sample_interval_s),
                _pauses_between_steps(alone),
            ):
                reply = call_next(message, context)
        guard.final_poll()
        _keep_timing(context, timing)
        if reply.has_content():
            records = reply.content.config_records
            if category == MessageType.QUERY and check.refusal is not None and STATUS in records:
                records[STATUS]["preempted"] = True
            reply.content[HEAT] = ConfigRecord(
                guard.report(paused_s=paused_s, notes=check.notes).encode()
            )
        return reply

    def _careful_source(self, context: Context) -> GuardedSource:
        source = self.source
        of_node = source is not None and not hasattr(source, "read")
        key = context.node_id if of_node else None
        if key not in self.sources:

            def make() -> HeatSource:
                return _prepared(
                    cast(SourceFn, source)(context) if of_node else cast(HeatSource | None, source)
                )

            self.sources[key] = GuardedSource(make, timeout_s=self.read_timeout_s, clock=self.clock)
        return self.sources[key]

    def _hold(
        self, check: _HeatCheck, careful: GuardedSource, context: Context
    ) -> tuple[_HeatCheck, float]:
        """Repeat the check until the device may train or `max_pause_s` are over; return the seconds held too."""
        began_s, slept_s = self.clock(), 0.0
        while True:
            # The loop must also end if the clock does not advance.
            held_s = max(slept_s, self.clock() - began_s)
            left_s = self.limits.max_pause_s - held_s
            if check.refusal is None or left_s <= 0.0:
                return check, held_s
            wait_s = min(left_s, self.poll_interval_s)
            self.sleep(wait_s)
            slept_s += wait_s
            check = self._check_heat(careful, context)

    def _check_heat(self, careful: GuardedSource, context: Context) -> _HeatCheck:
        """Read the device, and record in its node's state whether it is paused because of heat."""
        reading, now_s = careful.read(), self.clock()
        record = context.state.config_records.get(_PAUSE)
        before = None if record is None else decode(Pause, record, "heat pause")
        pause = next_pause(self.limits, before, reading, now_s)
        context.state.pop(_PAUSE, None)
        if pause is not None:
            context.state[_PAUSE] = ConfigRecord(encode(pause))
        stuck = pause is not None and pause.stuck(self.limits, now_s)
        notes: tuple[str, ...] = ()
        if stuck:
            seen = "is unknown"
            if reading.temperature_c is not None:
                seen = f"stays at exactly {reading.temperature_c:g} °C"
            notes = (f"temperature {seen} while the device rests: its sensor counts as stuck",)
        return _HeatCheck(
            reading=reading,
            notes=notes,
            refusal=self.limits.refusal(reading, rests=pause is not None and not stuck),
        )


class LocalSensors:
    """The sensors of this machine; waits at construction, so that the first reading includes other processes' load."""

    def __init__(self, sensors: HeatSource) -> None:
        self._sensors = sensors
        # The source reports each note once.
        self._notes = sensors.read().notes
        time.sleep(_LOAD_WINDOW_S)

    def read(self) -> Reading:
        """Return the machine's current reading."""
        reading, notes = self._sensors.read(), self._notes
        self._notes = ()
        return replace(reading, notes=(*notes, *reading.notes))


def _prepared(source: HeatSource | None) -> HeatSource:
    """Return a source, by default this machine's sensors, whose next reading is complete."""
    from socflower.thermal.sensors.linux import LinuxSensors

    source = source or LinuxSensors()
    return LocalSensors(source) if isinstance(source, LinuxSensors) else source


def _timing(context: Context) -> StepTiming:
    kept = context.state.config_records.get(_STEPS, ConfigRecord())
    samples = cast(list[int], kept.get("samples", []))
    seconds = cast(list[float], kept.get("seconds", []))
    return StepTiming(references_s=dict(zip(samples, seconds, strict=True)))


def _keep_timing(context: Context, timing: StepTiming) -> None:
    references_s = timing.references()
    if references_s:
        context.state[_STEPS] = ConfigRecord(
            {"samples": list(references_s), "seconds": list(references_s.values())}
        )


def _with_departure(message: Message, context: Context) -> Message:
    """Return a group's message in which this node's SoC leaves before the first step.

    In a ring the others continue without it. If one process computes a whole group, this node's member is not computed;
    if the node's member is unknown, all members leave.
    """
    records = message.content.config_records
    task = GroupTask.decode(records[GROUP])
    own = (
        decode(RingTask, records[RING], "ring").participant
        if RING in records
        else context.node_config.get(PARTITION_ID)
    )
    socs = [
        soc
        for soc, partition in zip(task.members, task.partitions, strict=True)
        if str(partition) == str(own)
    ]
    leaving = {**records.get(DEPARTURES, {}), **{str(soc): 0.0 for soc in socs or task.members}}
    return _with_records(message, {DEPARTURES: ConfigRecord(leaving)})


def _with_reduced_work(message: Message, keys: Sequence[str], share: float) -> Message:
    """Return a message whose config values under `keys` are scaled by `share`, to at least 1."""
    changed: dict[str, ConfigRecord] = {}
    for name, record in message.content.config_records.items():
        for key in keys:
            value = record.get(key)
            if type(value) is int and value > 1:
                changed[name] = ConfigRecord(
                    {**changed.get(name, record), key: max(1, round(share * value))}
                )
    return _with_records(message, changed)


def _with_records(message: Message, records: Mapping[str, ConfigRecord]) -> Message:
    # Strategies may send one content to many nodes, and on some engines these share the object.
    content: dict[str, Any] = {**message.content, **records}
    message = copy.copy(message)
    message.content = RecordDict(content)
    return message


@contextmanager
def _limited_threads(share: float) -> Iterator[float]:
    """Limit torch to `share` of its threads, at least one; yield the actual share."""
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
def _pauses_between_steps(enabled: bool) -> Iterator[None]:
    """After each torch optimiser step in this thread, pause for as long as the current guard requires."""
    if not enabled:
        yield
        return

    def after_step(*_: object) -> None:
        # The guard belongs to a thread: an app that trains in another thread has none.
        guard = current_guard()
        if guard is not None:
            guard.step_done()

    hook = register_optimizer_step_post_hook(after_step)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _sampled(guard: HeatGuard, interval_s: float) -> Iterator[None]:
    """Sample the device from a thread during the block."""
    ended = Event()

    def sample() -> None:
        while not ended.wait(interval_s):
            guard.poll()

    thread = Thread(target=sample, name="heat-sampler", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        # Without a thread the training continues with fewer readings.
        log(INFO, "heat mod: no samples while the client works (%s)", error)
        yield
        return
    try:
        yield
    finally:
        ended.set()
        thread.join()


_SWITCH = "heat"
_LIMIT_KEYS = {f"heat-{entry.name.replace('_', '-')}": entry.name for entry in fields(HeatLimits)}


def node_heat_limits(node_config: NodeConfig) -> HeatLimits | None:
    """Return a node's limits, or None if heat control is off. Raises `ConfigError` for an invalid key or value.

    Keys: `heat` (true: on), and the fields of `HeatLimits`, as in `heat-pause-c=80.0`.
    """
    is_on = switch(node_config, _SWITCH)
    given = {key: value for key, value in node_config.items() if key.startswith(f"{_SWITCH}-")}
    unknown = sorted(set(given) - set(_LIMIT_KEYS))
    if unknown:
        raise ConfigError(
            f"node config: {unknown[0]} is unknown; use one of {', '.join(_LIMIT_KEYS)}"
        )
    if not is_on:
        if given:
            raise ConfigError(f"node config: {min(given)} without {_SWITCH}; add {_SWITCH}=true")
        return None
    require_type("node config", (int, float), "a number", **given)
    numbers = {_LIMIT_KEYS[key]: float(value) for key, value in given.items()}
    return HeatLimits(**numbers)


def node_heat_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Answer as `heat_mod` does with the limits of the node's config; without `heat`, messages pass unchanged."""
    limits = node_heat_limits(context.node_config)
    return (
        call_next(message, context) if limits is None else _mod(limits)(message, context, call_next)
    )


@cache
def _mod(limits: HeatLimits) -> Mod:
    return heat_mod(limits=limits)
