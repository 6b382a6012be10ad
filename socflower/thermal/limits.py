"""Limits on a device's training by heat, by its battery and by its user's own load.

A warm device trains less (`HeatLimits.share`). A device that is hot, low on charge or in use pauses (`next_pause`,
`HeatLimits.refusal`). While a message is handled, a `HeatGuard` polls the device; training code gets it from
`current_guard`. Values that a source does not provide are unknown. Unknown values never stop training, and they end a
pause only after `stuck_s`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

from pydantic import Field

from socflower.errors import require_order
from socflower.field_rules import NotNegative, Positive, checked
from socflower.thermal.sensors.reading import Fraction, HeatSource, Reading, Temperature
from socflower.thermal.sensors.step_times import StepTiming, TimedSource
from socflower.thermal.sensors.stuck import StuckRule
from socflower.wire.message_keys import HeatReport

_Batch = TypeVar("_Batch")

_SLOW_CLOCK = 0.95
"""A device with a mean clock below this fraction of the highest counts as slow, with or without a reported reason."""

_MIN_STUCK_READINGS = 3
"""Fewest equal temperatures for a sensor to count as stuck."""

_MOST_NOTES = 16


@checked
class HeatLimits:
    """When a device trains less, when it pauses, and how long a message may wait for it.

    The temperatures suit boards that throttle at 80 to 85 °C, as a Raspberry Pi does; set them for your device.
    """

    # A device that pauses because of heat trains again at or below this.
    resume_c: Temperature = 65.0
    # At or above this it trains less.
    shrink_c: Temperature = 70.0
    # At or above this it pauses.
    pause_c: Temperature = 85.0
    # No training on battery below this charge.
    min_battery_fraction: Fraction = 0.3
    # No training while others use more of its processors.
    max_user_load: Fraction = 0.5
    # Longest time for which a message waits before its work starts.
    max_pause_s: NotNegative = 120.0
    # Smallest share of a training device's power, even when hot.
    min_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    # A temperature still unchanged after so long a pause is from a stuck sensor.
    stuck_s: Positive = 60.0

    def check(self) -> None:
        """Refuse temperatures in the wrong order."""
        require_order(resume_c=self.resume_c, shrink_c=self.shrink_c)
        require_order(
            equal=True,
            resume_c=self.resume_c,
            shrink_c=self.shrink_c,
            pause_c=self.pause_c,
        )

    def share(self, reading: Reading) -> float:
        """Return the share of its power that the device may use, `min_share` to 1.

        1 below `shrink_c`, then linearly down to `min_share` at `pause_c`, times the processor share that others leave.
        """
        share = 1.0
        now_c = reading.temperature_c
        if now_c is not None and now_c >= self.pause_c:
            share = self.min_share
        elif now_c is not None and now_c > self.shrink_c:
            cool = (self.pause_c - now_c) / (self.pause_c - self.shrink_c)
            share = self.min_share + (1.0 - self.min_share) * cool
        if reading.user_load is not None:
            share *= 1.0 - reading.user_load
        return min(1.0, max(self.min_share, share))

    def refusal(self, reading: Reading, *, rests: bool) -> str | None:
        """Return why the device must not train now, or None; `rests` is whether it pauses because of heat."""
        charge = reading.battery_fraction
        load = reading.user_load
        now_c = reading.temperature_c
        if rests:
            shown = "unknown temperature" if now_c is None else f"{now_c:.1f} °C"
            return f"at {shown}, rests from {self.pause_c:g} °C down to {self.resume_c:g} °C"
        if reading.on_battery and charge is not None and charge < self.min_battery_fraction:
            limit = f"limit {100 * self.min_battery_fraction:g} %"
            return f"on battery at {100 * charge:.0f} %, {limit}"
        if load is not None and load > self.max_user_load:
            limit = f"limit {100 * self.max_user_load:g} %"
            return f"others use {100 * load:.0f} % of its processors, {limit}"
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """A device's pause because of heat. It outlives a message's process, so its fields are plain record values."""

    # On the machine's monotonic clock.
    since_s: float
    # At its first reading.
    temperature_c: float
    num_looks: int = 1
    # Whether any later reading had another temperature.
    moved: bool = False
    # Since when there has been no temperature; empty if there is one, since a record has no null.
    unknown_since_s: tuple[float, ...] = ()

    def stuck(self, limits: HeatLimits, now_s: float) -> bool:
        """Whether the sensor must be stuck: a cooling device does not keep exactly the same temperature."""
        rule = StuckRule(after_s=limits.stuck_s, min_reads=_MIN_STUCK_READINGS)
        return not self.moved and rule.is_long(now_s - self.since_s, self.num_looks)


def next_pause(
    limits: HeatLimits,
    pause: Pause | None,
    reading: Reading,
    now_s: float,
) -> Pause | None:
    """Return the pause after a reading: it starts at `pause_c` and ends at `resume_c`.

    It also ends after the temperature has been unknown for `stuck_s`: a sensor failure on a hot device does not mean
    that the device is cool, but must not stop its training permanently.
    """
    # The clock restarted, and so did the machine.
    if pause is not None and pause.since_s > now_s:
        pause = None
    now_c = reading.temperature_c
    if pause is None:
        if now_c is None or now_c < limits.pause_c:
            return None
        return Pause(since_s=now_s, temperature_c=now_c)
    if now_c is None:
        since_s = pause.unknown_since_s or (now_s,)
        if now_s - since_s[0] >= limits.stuck_s:
            return None
        return replace(pause, unknown_since_s=since_s)
    if now_c <= limits.resume_c:
        return None
    return replace(
        pause,
        num_looks=pause.num_looks + 1,
        moved=pause.moved or now_c != pause.temperature_c,
        unknown_since_s=(),
    )


class HeatGuard:
    """Polls a device while it handles one message, and decides how much it may train.

    Several threads may poll: a sampling thread and the training thread. `first` is a reading taken before.
    `timing` estimates the clock from training steps if the source does not provide it.
    """

    def __init__(
        self,
        source: HeatSource,
        limits: HeatLimits,
        first: Reading,
        *,
        timing: StepTiming,
        thread_share: float = 1.0,
        poll_interval_s: float = 2.0,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._limits = limits
        self._thread_share = thread_share
        self._poll_interval_s = poll_interval_s
        self._sleep = sleep
        self._clock = clock
        self._timing = timing
        # Seconds and samples of steps that are not yet added to `timing`.
        self._steps: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()
        self._taken_over = False
        # An idle device's clock is low to save power, not because of heat.
        self._idle = True
        self._worked_since_s: float | None = None
        self._polled_s = clock()
        self._last = first
        self._peak_c: float | None = None
        self._throttled_s: float | None = None
        self._clocks: list[float] = []
        self._shares: list[float] = []
        self._notes: dict[str, None] = {}
        self._tally(first, 0.0)
        self._idle = False

    def poll(self) -> Reading:
        """Read the source now, while the message is handled."""
        # Outside the lock: a source may take seconds.
        reading = self._source.read()
        with self._lock:
            # Training threads append steps without the lock, so that they never wait for it; a deque allows that.
            while self._steps:
                self._timing.add_step(*self._steps.popleft())
            reading = TimedSource(_FixedSource(reading), self._timing).read()
            now_s = self._clock()
            self._tally(reading, max(0.0, now_s - self._polled_s))
            self._polled_s = now_s
            self._last = reading
        return reading

    def final_poll(self) -> Reading:
        """Read the source after the work; its clock counts only if there was no poll during the work."""
        # After the work the device is idle, but a low clock is better than no clock.
        self._idle = bool(self._clocks)
        return self.poll()

    def share(self) -> float:
        """Return the share of its power that the device may use now; reads the source if the last reading is old."""
        with self._lock:
            age_s = self._clock() - self._polled_s
            share = self._shares[-1]
        return self._limits.share(self.poll()) if age_s >= self._poll_interval_s else share

    def take_over_pacing(self) -> None:
        """Declare that the caller itself rests between batches and chooses its number of threads."""
        self._taken_over = True

    def rest_after(self, step_s: float) -> float:
        """Rest after `step_s` seconds of work until the working part of the time is `share()`; return the rest.

        It polls while it rests: a device that has cooled continues earlier, one that got hotter later.
        """
        return self._rest(step_s, 1.0)

    def step_done(self) -> None:
        """Rest after a training step of code that does not use the guard; the time since its last step counts as work.

        A reduced number of threads already gives part of the share, so the rest covers only the remainder.
        """
        if self._taken_over:
            return
        # The time before the first step is loading.
        if self._worked_since_s is not None:
            step_s = self._clock() - self._worked_since_s
            # Fewer threads are slow without heat, too.
            if self._thread_share == 1.0:
                self._steps.append((step_s, 1))
            self._rest(step_s, self._thread_share)
        self._worked_since_s = self._clock()

    def paced(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield `batches`, and rest after the work on each."""
        self.take_over_pacing()
        for batch in batches:
            began_s = self._clock()
            yield batch
            step_s = self._clock() - began_s
            self._steps.append((step_s, len(batch) if isinstance(batch, Sized) else 1))
            self.rest_after(step_s)

    def report(self, *, paused_s: float = 0.0, notes: Iterable[str] = ()) -> HeatReport:
        """Return a summary of all readings so far."""
        with self._lock:
            last = self._last
            factor = _mean(self._clocks) if self._clocks else None
            share = _mean(self._shares)
            slow = factor is not None and factor < _SLOW_CLOCK
            has_throttled = bool(self._throttled_s) or last.throttled is True
            all_notes = dict.fromkeys([*notes, *self._notes])
            return HeatReport(
                temperature_c=last.temperature_c,
                peak_c=self._peak_c,
                clock_factor=factor,
                throttled_s=self._throttled_s,
                share=share,
                battery_fraction=last.battery_fraction,
                user_load=last.user_load,
                paused_s=paused_s,
                triggered=has_throttled or share < 1.0 or slow,
                notes=tuple(all_notes)[:_MOST_NOTES],
            )

    def _rest(self, step_s: float, at_full: float) -> float:
        rested_s = 0.0
        while True:
            duty = min(1.0, self.share() / at_full)
            left_s = step_s * (1.0 / duty - 1.0) - rested_s
            if left_s <= 0.0:
                self._idle = False
                return rested_s
            # In pieces: a device that cools meanwhile continues earlier.
            nap_s = min(left_s, self._poll_interval_s)
            self._idle = True
            self._sleep(nap_s)
            rested_s += nap_s

    def _tally(self, reading: Reading, since_s: float) -> None:
        """Record a reading, `since_s` after the previous one; each of the two counts for half of that time."""
        known_c = [value for value in (reading.temperature_c, self._peak_c) if value is not None]
        self._peak_c = max(known_c, default=None)
        if reading.throttled is not None:
            num_throttled = sum((reading.throttled, self._last.throttled is True))
            self._throttled_s = (self._throttled_s or 0.0) + since_s * num_throttled / 2
        if reading.clock_factor is not None and not self._idle:
            self._clocks.append(reading.clock_factor)
        self._shares.append(self._limits.share(reading))
        if len(self._notes) < _MOST_NOTES:
            self._notes.update(dict.fromkeys(reading.notes))


def _mean(parts: list[float]) -> float:
    # Rounding must not exceed 1.
    return min(1.0, sum(parts) / len(parts))


@dataclass(frozen=True, slots=True)
class _FixedSource:
    """A source that always returns a given reading."""

    reading: Reading

    def read(self) -> Reading:
        return self.reading


_GUARD: ContextVar[HeatGuard | None] = ContextVar("socflower_heat_guard", default=None)


def current_guard() -> HeatGuard | None:
    """Return the guard of the message that this thread handles; None without a heat mod, and in other threads."""
    return _GUARD.get()


@contextmanager
def guarding(guard: HeatGuard) -> Iterator[None]:
    """Context in which `guard` is the current guard."""
    token = _GUARD.set(guard)
    try:
        yield
    finally:
        _GUARD.reset(token)


def paced(batches: Iterable[_Batch]) -> Iterator[_Batch]:
    """Yield `batches`, with the rests between them that the current guard, if any, requires."""
    guard = current_guard()
    return iter(batches) if guard is None else guard.paced(batches)
