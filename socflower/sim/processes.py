"""Processes in virtual time: programs that wait for the end of a transfer, a credit, a value or a timeout.

A process is a generator that yields the events it waits for and continues with their values:

    def edge():
        for batch in range(100):
            yield simulation.compute(processor, 0.2)
            yield simulation.transfer([uplink], 1e6)

Processors, links and their sharing are those of the kernel, so processes and task graphs cost the same for the same
work. The order of simultaneous events is defined, so runs are deterministic.
"""

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

from socflower.cluster import Activity, Cluster, Endpoint, Tier
from socflower.cluster.link_rate import RateSteps
from socflower.errors import ConfigError, SocflowerError, require_range
from socflower.sim.compiled_graph import SERVER, ComputeStep, Routes, TransferStep
from socflower.sim.energy import State, StateMeter
from socflower.sim.flows import RateTable
from socflower.sim.kernel import PASSING, WAITING, Kernel

Value = TypeVar("Value")
Process: TypeAlias = Generator["Event[Any]", Any, Value]

_TIMER, _CHANGE = PASSING + 1, PASSING + 2
_NO_STEP = TransferStep(0.0, 0, 0.0, 0, ())


class Event(Generic[Value]):
    """Something that happens once, with a value; a process waits for it with `yield`."""

    __slots__ = ("_listeners", "happened", "value", "what")

    def __init__(self, what: str = "") -> None:
        self.what = what
        self.happened = False
        self.value: Value | None = None
        self._listeners: list[Callable[[Any], None]] = []

    def fire(self, value: Value | None = None) -> None:
        """Make it happen; processes that wait for it continue at this instant."""
        assert not self.happened, f"{self.what or 'the event'} happened already"
        self.happened, self.value = True, value
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener(value)

    def then(self, listener: Callable[[Any], None]) -> None:
        """Call `listener` with the value when it happens; at once if it has happened."""
        if self.happened:
            listener(self.value)
        else:
            self._listeners.append(listener)


def first_of(*events: Event[Any]) -> Event[Event[Any]]:
    """Return an event that happens with the first of several, which is its value."""
    found: Event[Event[Any]] = Event(" or ".join(event.what for event in events))

    def fire(event: Event[Any], _: object) -> None:
        if not found.happened:
            found.fire(event)

    for event in events:
        event.then(partial(fire, event))
    return found


def all_of(*events: Event[Any]) -> Event[None]:
    """Return an event that happens with the last of several."""
    waiting = [event for event in events if not event.happened]
    found: Event[None] = Event(" and ".join(event.what for event in waiting))
    if not waiting:
        found.fire()
    left = len(waiting)

    def count(_: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            found.fire()

    for event in waiting:
        event.then(count)
    return found


class Queue(Generic[Value]):
    """Values in the order in which they were put; the process that has waited longest gets the next one."""

    def __init__(self, what: str = "a value") -> None:
        self._what = what
        self._values: deque[Value] = deque()
        self._waiting: deque[Event[Value]] = deque()

    def __len__(self) -> int:
        return len(self._values)

    def put(self, value: Value) -> None:
        """Add a value."""
        if self._waiting:
            self._waiting.popleft().fire(value)
        else:
            self._values.append(value)

    def get(self) -> Event[Value]:
        """Return the event of the next value."""
        event: Event[Value] = Event(self._what)
        if self._values:
            event.fire(self._values.popleft())
        else:
            self._waiting.append(event)
        return event


class Credits:
    """A number of permissions, such as places in a window; processes get them in the order of asking."""

    def __init__(self, count: int, what: str = "a credit") -> None:
        self._queue: Queue[None] = Queue(what)
        for _ in range(count):
            self._queue.put(None)

    def take(self) -> Event[None]:
        """Return the event of getting one."""
        return self._queue.get()

    def give(self) -> None:
        """Give one back."""
        self._queue.put(None)


@dataclass(frozen=True, slots=True)
class SimulatedProcessor:
    """A processor of a SoC or of a server."""

    number: int
    device: Endpoint
    name: str


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a link of a simulation."""

    number: int
    name: str


@dataclass(slots=True)
class _ChangingRate:
    """A link whose rate changes with time; while the link is used, an activity ends at each change."""

    link: Link
    steps: RateSteps
    activity: int
    # Time of the next change, and whether it has come.
    until_s: float = -inf
    due: bool = False


class EndedActivity(NamedTuple):
    """One activity that ended, for the trace; `moved_s` is when a transfer's bytes began to flow."""

    name: str
    # None: a transfer.
    processor: SimulatedProcessor | None
    links: tuple[str, ...]
    socs: tuple[int, ...]
    num_bytes: float
    start_s: float = 0.0
    moved_s: float = 0.0
    end_s: float = 0.0


class _Way(NamedTuple):
    """How bytes go from one place of the cluster to another."""

    tier: Tier
    # Paths of the handling of messages and of their bytes.
    handling_path: int
    data_path: int
    links: tuple[str, ...]
    socs: tuple[int, ...]
    # Their numbers in the simulation.
    local_socs: tuple[int, ...]


class _Log:
    """The first `max_spans` activities that ended, and the number of the others."""

    def __init__(self, max_spans: int) -> None:
        self.spans: list[EndedActivity] = []
        self.num_unlogged = 0
        self._max_spans = max_spans
        self._open: dict[int, EndedActivity] = {}

    def begin(self, activity: int, span: EndedActivity) -> None:
        if self._max_spans:
            self._open[activity] = span

    def end(self, activity: int, start_s: float, moved_s: float, end_s: float) -> None:
        span = self._open.pop(activity, None)
        if span is None:
            return
        if len(self.spans) == self._max_spans:
            self.num_unlogged += 1
            return
        self.spans.append(span._replace(start_s=start_s, moved_s=moved_s, end_s=end_s))


class Simulation(Kernel):
    """Processes on the SoCs `socs` of a cluster and on servers, from `now_s` on.

    A computation takes its seconds at speed 1 and longer at lower speeds, which may change while it runs; at speed 0 it
    waits. The SoCs' seconds by state are collected until `take_seconds`. `log` has the activities that ended.
    """

    def __init__(
        self, cluster: Cluster, socs: Sequence[int], *, now_s: float = 0.0, max_spans: int = 0
    ) -> None:
        super().__init__(
            [],
            RateTable([], []),
            num_processors=0,
            meter=StateMeter(len(socs), now_s),
            now_s=now_s,
        )
        self._cluster = cluster
        self._local = {soc: index for index, soc in enumerate(socs)}
        self._routes = Routes(cluster)
        self._speeds = [1.0] * len(socs)
        # By processor: activity, work left, and the time since when it is left.
        self._running: dict[int, tuple[int, float, float]] = {}
        self._processors: dict[tuple[Endpoint, str], SimulatedProcessor] = {}
        self._cluster_links: dict[str, Link] = {}
        self._paths: dict[tuple[int, ...], int] = {}
        self._ways: dict[tuple[Endpoint, Endpoint], _Way] = {}
        self._changing: dict[int, _ChangingRate] = {}
        # Links with changing rates, by the activity of their changes.
        self._link_of: dict[int, int] = {}
        # Of each activity.
        self._ends: list[Event[float] | None] = []
        # Numbers of activities that ended, to be used again.
        self._unused: list[int] = []
        self._num_begun = 0
        self._ready: list[int] = []
        # Processes whose event has happened, with its value.
        self._resumed: deque[tuple[Callable[[Any], None], Any]] = deque()
        # Processes that must end, and what each waits for.
        self._left: dict[Process[Any], tuple[str, Event[Any]]] = {}
        self.log = _Log(max_spans)
        self.num_bytes = dict.fromkeys(Tier, 0.0)

    @property
    def now_s(self) -> float:
        """The present virtual time."""
        return self._now_s

    @property
    def done(self) -> bool:
        """Whether all processes but those in the background have ended."""
        return not self._left

    # ---------------------------------------------------------------------------------------------- processes

    def start(
        self, process: Process[Value], name: str, *, background: bool = False
    ) -> Event[Value]:
        """Start a process at this instant and return the event of its end, whose value is what it returns.

        The simulation does not wait for processes in the background.
        """
        ended: Event[Value] = Event(f"the end of {name}")

        def resume(value: Any) -> None:
            try:
                event = process.send(value)
            except StopIteration as end:
                self._left.pop(process, None)
                ended.fire(end.value)
                return
            if not background:
                self._left[process] = (name, event)
            event.then(wake)

        def wake(result: Any) -> None:
            self._resumed.append((resume, result))

        if not background:
            self._left[process] = (name, ended)
        wake(None)
        return ended

    def run(self, until_s: float = inf) -> None:
        """Advance to `until_s`, or until all processes have ended.

        Raises `SocflowerError` if a process waits for an event that can never happen.
        """
        if self._resumed:
            self._settle([])
        # One instant at a time: background processes must not prolong the run.
        while self._left and self._events and self._events[0][0] <= until_s:
            self._run_until(self._events[0][0])
        if self._left:
            if until_s == inf:
                raise SocflowerError(self._why_stuck())
            self._now_s = until_s
        self._meter.settle_all(self._now_s)

    def take_seconds(self) -> list[dict[State, float]]:
        """Return each SoC's seconds by state since the last call."""
        return self._meter.take()

    # --------------------------------------------------------------------------------------- processors, speeds

    def processor(self, device: Endpoint, name: str = "cpu") -> SimulatedProcessor:
        """Return a processor of a SoC or server; servers have any. `ConfigError` if the SoC does not have it."""
        known = self._processors.get((device, name))
        if known is None:
            if isinstance(device, int):
                if device not in self._local:
                    raise ConfigError(f"simulation: SoC {device} is not one of its SoCs")
                self._cluster.device_of(device).processor(name)
            known = self._processors[device, name] = SimulatedProcessor(
                len(self._queues), device, name
            )
            self._queues.append([])
            self._free.append(True)
        return known

    def speed(self, soc: int) -> float:
        """Return a SoC's present speed: 1 is that of its profile."""
        return self._speeds[self._local[soc]]

    def set_speeds(self, factors: Mapping[int, float]) -> None:
        """Change the speed of SoCs; 0 stops their computations."""
        changed = {
            self._local[soc]: factor
            for soc, factor in factors.items()
            if soc in self._local and factor != self._speeds[self._local[soc]]
        }
        if not changed:
            return
        for processor, (activity, left_s, since_s) in list(self._running.items()):
            soc = cast(ComputeStep, self._steps[activity]).soc
            if soc not in changed:
                continue
            left_s = max(0.0, left_s - self._speeds[soc] * (self._now_s - since_s))
            self._running[processor] = (activity, left_s, self._now_s)
            self._end_at(activity, self._now_s + left_s / changed[soc] if changed[soc] else inf)
        for soc, factor in changed.items():
            self._speeds[soc] = factor

    # ---------------------------------------------------------------------------------------------------- links

    def link(self, name: str, rate: float | RateSteps) -> Link:
        """Return a new link; its `rate`, in bytes per second, may change with time."""
        if not isinstance(rate, RateSteps):
            return self._new_link(name, rate)
        link = self._new_link(name, rate.rate(self._now_s))
        activity = self._new(_NO_STEP, None)
        self._stage[activity] = _CHANGE
        self._changing[link.number] = _ChangingRate(link, rate, activity)
        self._link_of[activity] = link.number
        return link

    def change_rates(self, rates: Mapping[str, RateSteps]) -> None:
        """Give directed links of the cluster, before they are used, bandwidths that change with time."""
        for name, steps in rates.items():
            if name not in self._routes.capacities:
                raise ConfigError(
                    f"cluster {self._cluster.name}: no link {name!r}; links are such as soc0/tx, board0/up"
                )
            assert name not in self._cluster_links, f"{name} is in use"
            self._cluster_links[name] = self.link(name, steps)

    # ----------------------------------------------------------------------------------------------- activities

    def compute(
        self,
        processor: SimulatedProcessor,
        seconds: float,
        name: str = "work",
        *,
        activity: Activity = Activity.COMPUTE,
    ) -> Event[float]:
        """Return the event of a computation's end; its value is the seconds that it ran. `seconds` holds at speed 1."""
        device = processor.device
        soc = self._local[device] if isinstance(device, int) else SERVER
        step = ComputeStep(
            _amount(seconds, "seconds"), processor.number, soc, (processor.name, activity)
        )
        return self._begin(step, EndedActivity(name, processor, (), (), 0.0))

    def transfer(
        self,
        path: Sequence[Link],
        num_bytes: float,
        name: str = "bytes",
        *,
        socs: Sequence[int] = (),
        tier: Tier = Tier.WAN,
    ) -> Event[float]:
        """Return the event of a transfer's end over `path`, with its seconds; `socs` are the ends that draw power."""
        self.num_bytes[tier] += num_bytes
        step = TransferStep(
            0.0,
            0,
            _amount(num_bytes, "num_bytes"),
            self._path(path),
            tuple([self._local[soc] for soc in socs]),
        )
        links = tuple([link.name for link in path])
        return self._begin(step, EndedActivity(name, None, links, tuple(socs), num_bytes))

    def send(
        self,
        source: Endpoint,
        target: Endpoint,
        num_bytes: float,
        name: str = "bytes",
        *,
        num_messages: int = 1,
    ) -> Event[float]:
        """Return the event of the end of a transfer between places of the cluster, with the seconds that it took."""
        way = self._ways.get((source, target))
        if way is None:
            way = self._ways[source, target] = self._way(source, target)
        self.num_bytes[way.tier] += num_bytes
        step = TransferStep(
            _amount(num_messages, "num_messages") * self._routes.message_s,
            way.handling_path,
            _amount(num_bytes, "num_bytes"),
            way.data_path,
            way.local_socs,
        )
        return self._begin(step, EndedActivity(name, None, way.links, way.socs, num_bytes))

    def timeout(self, seconds: float) -> Event[float]:
        """Return the event of a time from now, with `seconds`; infinity never comes."""
        what = f"a timeout of {seconds} s"
        if not seconds >= 0:
            raise ConfigError(f"simulation: {what} must be 0 or more")
        event: Event[float] = Event(what)
        if seconds < inf:
            activity = self._new(_NO_STEP, event)
            self._stage[activity] = _TIMER
            self._start_s[activity] = self._now_s
            self._end_at(activity, self._now_s + seconds)
        return event

    # ---------------------------------------------------------------------------------------------- bookkeeping

    def _begin(self, step: ComputeStep | TransferStep, span: EndedActivity) -> Event[float]:
        event: Event[float] = Event(span.name)
        activity = self._new(step, event)
        self.log.begin(activity, span)
        self._num_begun += 1
        self._turn[activity] = self._num_begun
        self._ready.append(activity)
        return event

    def _new(self, step: ComputeStep | TransferStep, event: Event[float] | None) -> int:
        """Return the number of a new activity; numbers of activities that ended are used again."""
        if not self._unused:
            first = len(self._ends)
            more = max(first, 16)
            self._steps.extend([_NO_STEP] * more)
            self._ends.extend([None] * more)
            for numbers in (self._versions, self._turn, self._stage):
                numbers.extend([0] * more)
            for times_s in (self._stamp_s, self._start_s, self._moved_s):
                times_s.extend([0.0] * more)
            self._flows.grow(first + more)
            self._unused = list(range(first + more - 1, first - 1, -1))
        activity = self._unused.pop()
        self._steps[activity], self._ends[activity] = step, event
        self._stage[activity] = WAITING
        return activity

    def _new_link(self, name: str, rate: float) -> Link:
        number = self._flows.table.add_resource(_amount(rate, f"the bandwidth of {name}"))
        self._flows.grow(len(self._ends))
        return Link(number, name)

    def _cluster_link(self, name: str) -> Link:
        known = self._cluster_links.get(name)
        if known is None:
            # Names that are not links are handlers of messages, which take seconds instead of bytes.
            known = self._new_link(name, self._routes.capacities.get(name, 1.0))
            self._cluster_links[name] = known
        return known

    def _way(self, source: Endpoint, target: Endpoint) -> _Way:
        route = self._routes.between(source, target)
        handlers = [self._cluster_link(each) for each in route.handlers]
        links = [self._cluster_link(each) for each in route.links]
        socs = tuple([end for end in (source, target) if isinstance(end, int)])
        return _Way(
            route.tier,
            self._path(handlers),
            self._path(links),
            route.links,
            socs,
            tuple([self._local[soc] for soc in socs]),
        )

    def _path(self, links: Sequence[Link]) -> int:
        numbers = tuple([link.number for link in links])
        known = self._paths.get(numbers)
        if known is None:
            known = self._paths[numbers] = self._flows.table.add_path(numbers)
        return known

    # ------------------------------------------------------------------------------------------------ the kernel

    def _settle(self, ended: Sequence[int]) -> None:
        """Process this instant: ends of activities, processes that waited for them, and activities that these begin."""
        while ended or self._resumed or self._ready:
            for activity in ended:
                self._end_stage(activity, self._ready)
            while self._resumed:
                resume, result = self._resumed.popleft()
                resume(result)
            ready, self._ready = self._ready, []
            ended = self._start(ready)
        # Rates are set before flows share them.
        for link in self._flows.changed:
            if link in self._changing:
                self._follow(self._changing[link])
        self._flows.share(self._now_s)

    def _follow(self, changing: _ChangingRate) -> None:
        """Set a link to its present rate and, while it is used, let its activity end at the next change."""
        number, now_s = changing.link.number, self._now_s
        if changing.due:
            # The two are the same but for rounding, which must not hide the step.
            now_s = max(now_s, changing.until_s)
        elif now_s < changing.until_s:
            return
        changing.due = False
        rate, until_s = changing.steps.step_at(now_s)
        if rate != self._flows.table.capacities[number]:
            self._flows.table.set_capacity(number, rate)
        if self._flows.is_used(number):
            changing.until_s = until_s
            self._end_at(changing.activity, until_s)
        else:
            changing.until_s = -inf

    def _end_stage(self, activity: int, ready: list[int]) -> None:
        stage = self._stage[activity]
        if stage == _CHANGE:
            changing = self._changing[self._link_of[activity]]
            changing.due = True
            self._flows.changed.add(changing.link.number)
        elif stage == _TIMER:
            self._complete(activity, ready)
        else:
            super()._end_stage(activity, ready)

    def _run_compute(self, activity: int, ended: list[int]) -> None:
        super()._run_compute(activity, ended)
        step = self._steps[activity]
        if isinstance(step, ComputeStep) and step.soc != SERVER and step.duration_s:
            self._running[step.processor] = (activity, step.duration_s, self._now_s)
            speed = self._speeds[step.soc]
            if speed != 1.0:
                self._end_at(activity, self._now_s + step.duration_s / speed if speed else inf)

    def _complete(self, activity: int, ready: list[int]) -> None:
        step, event = self._steps[activity], self._ends[activity]
        if isinstance(step, ComputeStep):
            self._running.pop(step.processor, None)
        start_s = self._start_s[activity]
        self.log.end(activity, start_s, self._moved_s[activity], self._now_s)
        self._ends[activity] = None
        self._unused.append(activity)
        assert event is not None
        event.fire(self._now_s - start_s)

    def _why_stuck(self) -> str:
        """Return which event can never happen: an arrival over a dead link, or that of the first process."""
        for activity in self._flows.stopped():
            step, event = cast(TransferStep, self._steps[activity]), self._ends[activity]
            for number in self._flows.table.paths[step.data_path]:
                changing = self._changing.get(number)
                if changing is not None and not changing.steps.rate(self._now_s):
                    what = event.what if event else "a transfer"
                    return (
                        f"{changing.link.name} carries nothing any more after {self._now_s:.3f} s, so {what} "
                        "never arrives"
                    )
        name, event = next(iter(self._left.values()))
        return f"{name} waits for {event.what or 'an event'}, which can never happen"


def _amount(value: float, key: str) -> float:
    # Nearly all are plain numbers in the range, and there are three in a transfer.
    if type(value) in (float, int) and 0 <= value < inf:
        return value
    named: dict[str, Any] = {key: value}
    require_range("simulation", least=0, **named)
    return value
