"""How a command follows its submissions: on a clock of its own, a SuperLink that is away, and ServerApps that die."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.engines.deployment import remote_superlink
from socflower.engines.deployment.options import DeploymentOptions
from socflower.engines.deployment.outcome_lines import ALIVE, ALIVE_INTERVAL_S, READY, to_lines
from socflower.errors import NodesLost, TrainingFailed
from tests.one_line import refused

CALL_S = 1.5  # that a command of Flower takes
LOAD_S = 6.0  # that a ServerApp loads, after its first sign of life
FOLLOWED_S = 300.0


class Over(Exception):
    """The command still follows the run when the test ends."""


class ServerApp:
    """What a process writes: signs of life, that it is ready, that it trains, and the outcome."""

    def __init__(self, run_id: int, begun_s: float) -> None:
        self.run_id, self.begun_s, self.died_s = run_id, begun_s, 1e9
        self.trains_since_s: float | None = None
        self.lines = [f"Successfully started run {run_id}"]
        self._told_s = begun_s

    def write(self, kind: str, document: Any) -> None:
        self.lines += to_lines(kind, document)

    def write_until(self, now_s: float) -> None:
        """Show life, and that it is ready, up to a time."""
        while self._told_s <= min(now_s, self.died_s):
            self.write(ALIVE, [self.run_id, self._told_s])
            if 0.0 <= self._told_s - self.begun_s - LOAD_S < ALIVE_INTERVAL_S:
                self.write(READY, self.run_id)
            self._told_s += ALIVE_INTERVAL_S

    @property
    def is_ready(self) -> bool:
        return self._told_s > self.begun_s + LOAD_S


class SuperLink:
    """One that is away from `away_s` on, for `for_s`, and ends its ServerApps then.

    The ServerApp with the lock dies at each of `kills_s`, also if it has not shown life yet; the training ends after
    `training_s` of work.
    """

    def __init__(
        self,
        away_s: float = 1e9,
        for_s: float = 0.0,
        kills_s: tuple[float, ...] = (),
        training_s: float = 1e9,
        *,
        is_fatal: bool = True,
    ) -> None:
        self.now_s, self.first_s, self.back_s = 0.0, away_s, away_s + for_s
        self.apps: list[ServerApp] = []
        self.idle_s = self.trained_s = self.left_s = 0.0
        self.followed_s = FOLLOWED_S
        self.training_s, self._kills_s, self._is_fatal = training_s, [*kills_s], is_fatal

    @property
    def is_away(self) -> bool:
        return self.first_s <= self.now_s < self.back_s

    @property
    def alive(self) -> list[ServerApp]:
        return [each for each in self.apps if each.died_s > self.now_s]

    def sleep(self, seconds: float) -> None:
        self._step(seconds)
        if self.now_s > (self.back_s if self.back_s < 1e8 else 0.0) + self.followed_s:
            raise Over

    def _step(self, seconds: float) -> None:
        self.now_s += seconds
        if self._kills_s and self.now_s >= self._kills_s[0]:
            self._kills_s.pop(0)
            if self.alive:
                (self._leader or self.alive[0]).died_s = self.now_s
        if self.is_away:
            if self._is_fatal:
                for app in self.alive:
                    app.died_s = self.now_s
            return
        for app in self.alive:
            app.write_until(self.now_s)
        if (leader := self._leader) is not None:
            self.trained_s += seconds
            if self.trained_s >= self.training_s:
                leader.write("outcome", {})
        elif ready := [each for each in self.alive if each.is_ready]:
            ready[0].trains_since_s = self.now_s
            ready[0].write("resumed", {"after_round": len(self.apps)})
        self.idle_s = 0.0 if self._leader else self.idle_s + seconds
        self.left_s = max(self.left_s, self.idle_s)

    @property
    def _leader(self) -> ServerApp | None:
        return next((each for each in self.alive if each.trains_since_s is not None), None)

    def submit(self, app: Path) -> "Log":
        if not self.is_away:
            self.apps.append(ServerApp(len(self.apps) + 1, self.now_s + CALL_S))
        return Log(self, None if self.is_away else self.apps[-1])

    def log_again(self, run_id: int) -> "Log":
        return Log(self, self.apps[run_id - 1])

    def status(self, run_id: int) -> str | None:
        self.sleep(CALL_S)
        return None if self.is_away else "running"

    def stop(self, run_id: int) -> None:
        """Kill it: a lock is released at once."""
        self.apps[run_id - 1].died_s = min(self.now_s, self.apps[run_id - 1].died_s)


class Log:
    """A run's log, which nobody may read after `close`, read from its beginning each time it is opened."""

    path = Path("/dev/null")

    def __init__(self, link: SuperLink, app: ServerApp | None) -> None:
        self.run_id = None if app is None else app.run_id
        self._link, self._app, self._begun_s = link, app, link.now_s
        self._broken, self._num_read, self._closed = app is None or link.is_away, 0, False

    def ended(self) -> bool:
        self._broken = self._broken or self._link.is_away
        return self._broken and self._link.now_s >= self._begun_s + CALL_S

    def new_lines(self) -> Iterator[str]:
        assert not self._closed
        if not self._broken and self._app is not None:
            lines = self._app.lines[self._num_read :]
            self._num_read += len(lines)
            yield from lines

    def close(self) -> None:
        self._closed = True


class History:
    """Takes what `RunHistory` takes."""

    def __init__(self, num_restarts: int = 0) -> None:
        self.num_restarts = num_restarts
        self.restarts = [{}] * num_restarts

    def record_restart(self, *_: Any) -> None:
        self.num_restarts += 1

    def record_resume(self, after_round: int) -> None:
        """A first submission begins."""


def follow(link: SuperLink, *, may_resume: bool = False, history: Any = None) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            remote_superlink,
            "time",
            SimpleNamespace(monotonic=lambda: link.now_s, sleep=link.sleep),
        )
        options = DeploymentOptions(superlink="rack", checkpoint_folder="/kept" * may_resume)
        return remote_superlink._Series(
            Path(), link, history or History(), lambda notice: None, None, options
        ).follow()


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.floats(0.5, 60.0), min_size=1, max_size=4).map(itertools.accumulate).map(tuple),
)
def test_a_server_app_killed_at_any_age_is_replaced(kills_s: tuple[float, ...]) -> None:
    """Whatever dies, and however young, another one trains within the time to find that out and to load."""
    link, history = SuperLink(kills_s=kills_s, training_s=kills_s[-1] + 100.0), History()
    link.followed_s = 5_000.0
    assert follow(link, may_resume=True, history=history) is None
    assert history.num_restarts <= len(kills_s)
    longest_start_s = remote_superlink._START_S * 2.0 ** len(kills_s)
    assert link.left_s < longest_start_s + len(kills_s) * (CALL_S + LOAD_S + ALIVE_INTERVAL_S)
    # Flower ends dead ones in minutes, and here never: there are no more of them than that.
    assert len(link.apps) <= 2 + 2 * len(kills_s)


@given(starve_s=st.floats(5.0, 25.0))
@settings(max_examples=10, deadline=None)
def test_on_a_machine_that_is_too_busy_submissions_do_not_pile_up(starve_s: float) -> None:
    """ServerApps that show life only now and then: a false alarm doubles the patience."""
    link = SuperLink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.ALIVE_INTERVAL_S", starve_s)
        with pytest.raises(Over):
            follow(link, may_resume=True)
    assert len(link.apps) <= 6 and len(link.alive) <= 3


@pytest.mark.parametrize("age_s", [30.0, 200.0])
def test_one_that_stands_by_takes_over_at_once(age_s: float) -> None:
    link, history = SuperLink(kills_s=(age_s,), training_s=age_s + 50.0), History()
    assert follow(link, may_resume=True, history=history) is None
    # The first one loads for longer.
    assert history.num_restarts == 1 and link.left_s < LOAD_S + CALL_S + 2 * ALIVE_INTERVAL_S
    assert len(link.apps) == 3


def test_without_a_death_one_trains_and_one_stands_by() -> None:
    link, history = SuperLink(), History()
    with pytest.raises(Over):
        follow(link, may_resume=True, history=history)
    assert len(link.apps) == 2 and history.num_restarts == 0


def test_without_checkpoints_nothing_is_submitted_again() -> None:
    link = SuperLink(kills_s=(50.0,))
    with pytest.raises(Over):
        follow(link)
    assert len(link.apps) == 1


@settings(max_examples=8, deadline=None)
@given(away_s=st.floats(20.0, 200.0), for_s=st.floats(1.0, 150.0))
def test_a_training_goes_on_seconds_after_a_super_link_that_took_its_server_apps_along(
    away_s: float, for_s: float
) -> None:
    link = SuperLink(away_s, for_s, training_s=away_s + 60.0)
    assert follow(link, may_resume=True) is None
    assert link.left_s < 3 * CALL_S + LOAD_S + 3 * ALIVE_INTERVAL_S


@pytest.mark.parametrize("for_s", [5.0, 100.0])
def test_server_apps_that_outlive_their_super_link_are_kept(for_s: float) -> None:
    link, history = SuperLink(50.0, for_s, is_fatal=False, training_s=200.0), History()
    assert follow(link, may_resume=True, history=history) is None
    assert history.num_restarts == 0 and len(link.alive) <= 3


def test_one_that_hangs_with_the_lock_is_replaced() -> None:
    link = SuperLink()
    hangs_s = 60.0
    write_until = ServerApp.write_until
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ServerApp,
            "write_until",
            lambda app, now_s: write_until(
                app, min(now_s, hangs_s) if app.trains_since_s is not None else now_s
            ),
        )
        assert "no sign of life" in follow(link, may_resume=True)
    assert link.now_s - hangs_s < 50.0


@settings(max_examples=6, deadline=None)
@given(age_s=st.floats(10.0, 600.0), for_s=st.floats(0.1, 165.0))
def test_a_run_of_any_age_outlives_a_silence_of_less_than_three_minutes(
    age_s: float, for_s: float
) -> None:
    with pytest.raises(Over):
        follow(SuperLink(age_s, for_s))


@settings(max_examples=6, deadline=None)
@given(age_s=st.floats(10.0, 600.0))
def test_a_longer_silence_ends_the_command_three_minutes_after_the_last_answer(
    age_s: float,
) -> None:
    link = SuperLink(age_s, 10_000.0)
    refused(lambda: follow(link), "180", error=TrainingFailed)
    assert 180.0 <= link.now_s - age_s < 200.0


@pytest.mark.parametrize("may_resume", [False, True])
@pytest.mark.parametrize("kind", [NodesLost, TrainingFailed])
def test_only_a_run_that_lost_its_nodes_and_has_checkpoints_is_submitted_again(
    kind: type[TrainingFailed], may_resume: bool
) -> None:
    outcome = {"error": "no group sent a usable model", "kind": kind.__name__}
    write = ServerApp.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ServerApp,
            "write",
            lambda app, what, told: write(app, what, outcome if what == "outcome" else told),
        )
        failure = follow(SuperLink(training_s=30.0), may_resume=may_resume)
    assert failure == (outcome["error"] if may_resume and kind is NodesLost else None)


@settings(max_examples=10, deadline=None)
@given(for_s=st.floats(1.0, 165.0))
def test_a_run_is_submitted_again_until_the_super_link_takes_it(for_s: float) -> None:
    """The SuperLink is away when the command submits again, as after another death of it."""
    link = SuperLink(0.0, for_s, training_s=50.0)
    assert follow(link, may_resume=True, history=History(1)) is None
    assert link.left_s < 3 * CALL_S + LOAD_S + 3 * ALIVE_INTERVAL_S


def test_a_run_that_no_super_link_takes_ends_at_once_at_first_and_else_after_three_minutes() -> (
    None
):
    first, again = SuperLink(0.0, 1e4), SuperLink(0.0, 1e4)
    refused(lambda: follow(first), "did not start")
    assert first.now_s < 5.0
    refused(lambda: follow(again, history=History(1)), "180", error=TrainingFailed)
    assert 180.0 <= again.now_s < 200.0
