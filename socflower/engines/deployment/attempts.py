"""All attempts at a deployed run, merged into one progress log and one result."""

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from socflower.engines.deployment.superlink import ENGINE
from socflower.engines.run_folder import OUTCOME, STATUS, RunFolder
from socflower.errors import NodesLost, TrainingFailed
from socflower.quantities import counted

OnNotice: TypeAlias = Callable[[str], None]


def lost_nodes(outcome: Mapping[str, Any]) -> str | None:
    """Return the error of an outcome if the run may go on when its nodes are back; None for any other outcome."""
    return outcome["error"] if outcome.get("kind") == NodesLost.__name__ else None


class RunHistory:
    """Collects each round once, with the wall time since the start, and the restarts."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._started_s = time.monotonic()
        checkpointing = folder.read_checkpointing()
        self._done_before = (
            -1
            if checkpointing is None or checkpointing.resume_after is None
            else checkpointing.resume_after
        )
        self._wall_s: dict[int, float | None] = {}
        self.restarts: list[dict[str, Any]] = []
        # "" if it is isolated; None if it was not started here.
        self.superlink_shared_because: str | None = None

    def add_round(self, entry: dict[str, Any]) -> None:
        """Add a round, unless an earlier attempt did."""
        number = int(entry["round"])
        if number not in self._wall_s:
            # The wall time of rounds that an earlier command trained is unknown.
            self._wall_s[number] = (
                None if number <= self._done_before else time.monotonic() - self._started_s
            )
            self._folder.append_progress({**entry, "wall_s": self._wall_s[number]})

    def on_status(self, document: Mapping[str, Any]) -> None:
        """Pass on what the ServerApp is doing now."""
        self._folder.write(STATUS, document)

    def record_restart(
        self, after_round: int | None, cause: str, most: int, on_notice: OnNotice
    ) -> None:
        """Record that the run has to be submitted again; raise `TrainingFailed` after `most` restarts.

        If the checkpoints are on a remote machine, `after_round` is None until `record_resume` is called.
        """
        if len(self.restarts) >= most:
            tried = [
                f"after round {each['after_round']}: {each['cause']}" for each in self.restarts
            ]
            after = f", after {counted(most, 'restart')} ({'; '.join(tried)})"
            raise TrainingFailed(
                f"engine {ENGINE}: {cause}{after if most else '; --restarts is 0'}"
            )
        self.restarts.append({"after_round": after_round, "cause": cause})
        how = "submitted again" if after_round is None else f"continuing after round {after_round}"
        on_notice(f"{cause}; {how} (restart {len(self.restarts)} of at most {most})")

    def record_resume(self, after_round: int) -> None:
        """Set the round after which the run resumed in the newest restart."""
        if self.restarts:
            self.restarts[-1]["after_round"] = after_round

    def _isolation(self) -> dict[str, Any]:
        shared_because = self.superlink_shared_because
        if shared_because is None:
            return {
                "superlink_isolated": None,
                "superlink_shared_because": "it was not started here",
            }
        return {
            "superlink_isolated": not shared_because,
            "superlink_shared_because": shared_because or None,
        }

    def write_outcome(self, outcome: dict[str, Any], trace: Path | None) -> None:
        """Write the outcome, with wall times, restarts and isolation, to the run's folder."""
        if "rounds" in outcome:
            for entry in outcome["rounds"]:
                entry["wall_s"] = self._wall_s.get(int(entry["round"]))
            outcome = {
                **outcome,
                "wall_s": time.monotonic() - self._started_s,
                "restarts": self.restarts,
                **self._isolation(),
            }
        if trace is not None and trace.exists():
            shutil.copyfile(trace, self._folder.trace)
        self._folder.write(OUTCOME, outcome)
