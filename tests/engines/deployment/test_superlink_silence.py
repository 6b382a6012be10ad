"""How long a SuperLink may be away: counted from its last answer, whatever the age of the run."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.engines.deployment import remote_superlink
from socflower.engines.deployment.outcome_lines import ALIVE, ALIVE_INTERVAL_S, to_lines
from socflower.errors import TrainingFailed
from tests.one_line import refused

CALL_S = 1.5  # that a command of Flower takes to find that nobody answers
FOLLOWED_S = 1_000.0


class Over(Exception):
    """The command still follows the run when the test ends."""


class SuperLink:
    """A SuperLink that is away from `away_s` on, for `for_s`, on a clock of its own; the training prints nothing."""

    def __init__(self, away_s: float, for_s: float) -> None:
        self.now_s, self.first_s, self.back_s = 0.0, away_s, away_s + for_s

    @property
    def is_away(self) -> bool:
        return self.first_s <= self.now_s < self.back_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.now_s > self.back_s + FOLLOWED_S:
            raise Over

    def submit(self, app: Path) -> "Log":
        return Log(self)

    def log_again(self, run_id: int) -> "Log":
        return Log(self)

    def status(self, run_id: int) -> str | None:
        self.sleep(CALL_S)
        return None if self.is_away else "running"

    def stop(self, run_id: int) -> None:
        """Nothing runs."""


class Log:
    path = Path("/dev/null")
    run_id = 7

    def __init__(self, link: SuperLink) -> None:
        self._link, self._begun_s, self._broken = link, link.now_s, link.is_away
        self._unread = [] if link.is_away else ["Successfully started run 7"]

    def ended(self) -> bool:
        self._broken = self._broken or self._link.is_away
        return self._broken and self._link.now_s >= self._begun_s + CALL_S

    def new_lines(self) -> Iterator[str]:
        while self._unread:
            yield self._unread.pop()

    def close(self) -> None:
        """Nothing is open."""


@cache
def signs(at_s: float) -> list[str]:
    return list(to_lines(ALIVE, at_s))


class LiveLink(SuperLink):
    """Its run's ServerApp shows until `dies_s` that it runs; that it died nobody tells."""

    def __init__(self, dies_s: float, away_s: float = 1e9, for_s: float = 0.0) -> None:
        super().__init__(away_s, for_s)
        self.dies_s = dies_s

    def said(self) -> list[str]:
        """The log so far; a ServerApp cannot write while the SuperLink is away."""
        last_s = min(self.now_s, self.dies_s)
        times = [float(second) for second in range(0, int(last_s), int(ALIVE_INTERVAL_S))]
        lines = [
            line for each in times if not self.first_s <= each < self.back_s for line in signs(each)
        ]
        return ["Successfully started run 7", *lines]

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.now_s > 400.0:
            raise Over

    def submit(self, app: Path) -> Log:
        return LiveLog(self)

    def log_again(self, run_id: int) -> Log:
        return LiveLog(self)


class LiveLog(Log):
    """A log that is read from its beginning each time it is opened."""

    _link: LiveLink

    def __init__(self, link: LiveLink) -> None:
        super().__init__(link)
        self._num_read = 0

    def new_lines(self) -> Iterator[str]:
        if not self._broken:
            lines = self._link.said()
            yield from lines[self._num_read :]
            self._num_read = len(lines)


@pytest.mark.parametrize(("away_s", "for_s"), [(1e9, 0.0), (100.0, 60.0)])
def test_a_serverapp_that_died_is_found_dead_within_seconds(away_s: float, for_s: float) -> None:
    """Also one that died with the SuperLink, once that is back."""
    link = LiveLink(103.0, away_s, for_s)
    assert "no sign of life" in follow(link, may_resume=True)
    gone_s = max(103.0, link.back_s) if for_s else 103.0
    assert link.now_s - gone_s < 30.0, link.now_s


@pytest.mark.parametrize(
    ("dies_s", "away_s", "for_s", "may_resume"),
    [(1e9, 1e9, 0.0, True), (1e9, 100.0, 150.0, True), (100.0, 1e9, 0.0, False)],
)
def test_one_that_lives_or_could_not_be_resumed_is_followed(
    dies_s: float, away_s: float, for_s: float, may_resume: bool
) -> None:
    with pytest.raises(Over):
        follow(LiveLink(dies_s, away_s, for_s), may_resume=may_resume)


def follow(link: SuperLink, *, may_resume: bool = False) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            remote_superlink,
            "time",
            SimpleNamespace(monotonic=lambda: link.now_s, sleep=link.sleep),
        )
        return remote_superlink._Attempt(
            Path(), link, None, lambda notice: None, None, may_resume=may_resume
        ).follow()


@settings(max_examples=40, deadline=None)
@given(age_s=st.floats(1.0, 5_000.0), for_s=st.floats(0.1, 165.0))
def test_a_run_of_any_age_outlives_a_silence_of_less_than_three_minutes(
    age_s: float, for_s: float
) -> None:
    with pytest.raises(Over):
        follow(SuperLink(age_s, for_s))


@settings(max_examples=20, deadline=None)
@given(age_s=st.floats(1.0, 5_000.0))
def test_a_longer_silence_ends_the_command_three_minutes_after_the_last_answer(
    age_s: float,
) -> None:
    link = SuperLink(age_s, 10_000.0)
    refused(lambda: follow(link), "180", error=TrainingFailed)
    assert 180.0 <= link.now_s - age_s < 200.0
