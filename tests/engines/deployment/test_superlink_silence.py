"""How long a SuperLink may be away: counted from its last answer, whatever the age of the run."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.engines.deployment import remote_superlink
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


def follow(link: SuperLink) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            remote_superlink,
            "time",
            SimpleNamespace(monotonic=lambda: link.now_s, sleep=link.sleep),
        )
        return remote_superlink._Attempt(Path(), link, None, lambda notice: None, None).follow()


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
