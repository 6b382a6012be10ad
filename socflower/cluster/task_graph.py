"""Task graphs: plans are translated to them, and the event clock executes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from socflower.errors import ConfigError
from socflower.plain_numbers import plain

HUB = "hub"
"""The server on the core switch that runs the Flower ServerApp."""

Endpoint: TypeAlias = int | str
"""A SoC by its index in the cluster, or a server by its name."""


class Activity(StrEnum):
    """The uses of a SoC's time and energy, by which every report breaks them down."""

    COMPUTE = "compute"
    SYNCHRONISATION = "synchronisation"
    UPDATE = "update"
    IDLE = "idle"
    # The rack's fans: joules, but no SoC's seconds.
    COOLING = "cooling"


SOC_ACTIVITIES: tuple[Activity, ...] = tuple(
    activity for activity in Activity if activity != Activity.COOLING
)
"""The activities that take SoCs' time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """Work on one processor of one device; tasks of the same processor run one at a time.

    `after` holds indices of earlier tasks of the same graph; `after_previous` indices of tasks of the
    previous repetition when the graph is repeated (no constraint in the first).
    """

    name: str
    device: Endpoint
    # At speed factor 1.
    seconds: float
    processor: str = "cpu"
    activity: Activity = Activity.COMPUTE
    after: tuple[int, ...] = ()
    after_previous: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Bytes from one endpoint to another over every link of the path between them.

    First both ends handle `num_messages` messages at the cluster's cost per message, then the bytes flow.

    It takes place in `rounds` rounds, such as the sub-steps of a ring, with `num_messages` and `num_bytes` in each. The
    first round follows the tasks in `after`. Every other round follows the previous round of this transfer and of the
    transfers in `after_round`, which may be later tasks. Dependents wait for the last round.
    """

    name: str
    source: Endpoint
    target: Endpoint
    num_bytes: float
    num_messages: int = 1
    rounds: int = 1
    after: tuple[int, ...] = ()
    after_previous: tuple[int, ...] = ()
    after_round: tuple[int, ...] = ()


Task: TypeAlias = Compute | Transfer


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskGraph:
    """Tasks, each after the tasks on which it depends, and the SoCs whose idle watts count.

    When the graph is repeated, tasks from `num_repeated` on run only once: after the last repetition of the tasks that
    they follow.
    """

    tasks: tuple[Task, ...]
    participants: tuple[int, ...]
    # None: all tasks are repeated.
    num_repeated: int | None = None

    def __post_init__(self) -> None:
        for index, task in enumerate(self.tasks):
            fault = self._fault(index, task)
            if fault:
                raise ConfigError(f"task graph: task {index} ({task.name}) {fault}")

    def _fault(self, index: int, task: Task) -> str:
        """Return why a task cannot be in the graph; empty if it can."""
        if any(not 0 <= other < index for other in task.after):
            return f"must come after earlier tasks, not after {task.after}"
        if any(not 0 <= other < len(self.tasks) for other in task.after_previous):
            return f"follows previous tasks {task.after_previous} of {len(self.tasks)}"
        if isinstance(task, Compute) or (task.rounds == 1 and not task.after_round):
            return ""
        if task.rounds < 1:
            return f"has {task.rounds} rounds; it needs 1 or more"
        for other in task.after_round:
            before = self.tasks[other] if 0 <= other < len(self.tasks) else None
            if not isinstance(before, Transfer) or before.rounds != task.rounds:
                return f"follows rounds of {task.after_round}, not all transfers of {task.rounds} rounds"
        return ""

    def followed_by(self, closing: "TaskGraph", waits: Mapping[int, Sequence[int]]) -> "TaskGraph":
        """Return this graph, to be repeated, with the tasks of `closing` once at its end, without waiting for all.

        A SoC computes and sends for `closing` once the last repetition has ended on the SoCs of its entry in `waits`.
        """
        first, ends = len(self.tasks), self._ends()
        tasks = list(self.tasks)
        for task in closing.tasks:
            own: dict[int, None] = {}
            place = task.device if isinstance(task, Compute) else task.source
            if isinstance(place, int):
                for soc in waits.get(place, ()):
                    own |= dict.fromkeys(ends.get(soc, ()))
            # Indices of the closing graph count from the end of this one.
            shifted = replace(task, after=(*own, *(first + other for other in task.after)))
            if isinstance(shifted, Transfer):
                after_round = tuple(first + other for other in shifted.after_round)
                shifted = replace(shifted, after_round=after_round)
            tasks.append(shifted)
        participants = dict.fromkeys((*self.participants, *closing.participants))
        return TaskGraph(tasks=tuple(tasks), participants=tuple(participants), num_repeated=first)

    def _ends(self) -> dict[int, list[int]]:
        """Return each SoC's tasks that no other task of the repetition follows."""
        followed = {other for task in self.tasks for other in task.after}
        ends: dict[int, list[int]] = {}
        for index, task in enumerate(self.tasks):
            if index in followed:
                continue
            places = (task.device,) if isinstance(task, Compute) else (task.source, task.target)
            for place in places:
                if isinstance(place, int):
                    ends.setdefault(place, []).append(index)
        return ends


class TaskGraphBuilder:
    """Collects tasks; each call returns the index that later tasks name in `after`."""

    def __init__(self) -> None:
        self._tasks: list[Task] = []

    def compute(
        self,
        name: str,
        device: Endpoint,
        seconds: float,
        *,
        processor: str = "cpu",
        activity: Activity = Activity.COMPUTE,
        after: Sequence[int] = (),
        after_previous: Sequence[int] = (),
    ) -> int:
        """Add a `Compute` and return its index."""
        self._tasks.append(
            Compute(
                name=name,
                device=plain(device),
                seconds=plain(seconds),
                processor=processor,
                activity=activity,
                after=tuple(after),
                after_previous=tuple(after_previous),
            )
        )
        return len(self._tasks) - 1

    def transfer(
        self,
        name: str,
        source: Endpoint,
        target: Endpoint,
        num_bytes: float,
        *,
        num_messages: int = 1,
        rounds: int = 1,
        after: Sequence[int] = (),
        after_previous: Sequence[int] = (),
        after_round: Sequence[int] = (),
    ) -> int:
        """Add a `Transfer` and return its index; `after_round` may name tasks that are yet to be added."""
        self._tasks.append(
            Transfer(
                name=name,
                source=plain(source),
                target=plain(target),
                num_bytes=plain(num_bytes),
                num_messages=plain(num_messages),
                rounds=plain(rounds),
                after=tuple(after),
                after_previous=tuple(after_previous),
                after_round=tuple(after_round),
            )
        )
        return len(self._tasks) - 1

    @property
    def next_index(self) -> int:
        """The index of the task that is added next."""
        return len(self._tasks)

    def follow_previous(self, index: int, previous: Sequence[int]) -> None:
        """Make task `index` also wait for tasks of the previous repetition that were added after it."""
        task = self._tasks[index]
        self._tasks[index] = replace(task, after_previous=(*task.after_previous, *previous))

    def build(self, participants: Sequence[int]) -> TaskGraph:
        """Return the frozen graph."""
        return TaskGraph(tasks=tuple(self._tasks), participants=tuple(map(plain, participants)))
