"""All attempts at a deployed run as one run: what its user follows, and what stands in its result."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from socflower.engines.deployment.superlink import ENGINE
from socflower.engines.run_folder import RunFolder
from socflower.errors import TrainingFailed

Say: TypeAlias = Callable[[str], None]


class RunStory:
    """Each round once, with the real time since the start, and the restarts beside them."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._begun_s = time.monotonic()
        checkpointing = folder.read_checkpointing()
        self._done_before = -1 if checkpointing is None or checkpointing.resume_after is None \
            else checkpointing.resume_after
        self._wall_s: dict[int, float | None] = {}
        self.restarts: list[dict[str, Any]] = []
        self.superlink_shared_because: str | None = None  # "" if it is isolated; None where it is not ours

    def tell(self, entry: dict[str, Any]) -> None:
        """Add a round, unless an earlier attempt did."""
        number = int(entry["round"])
        if number not in self._wall_s:
            # Of rounds that an earlier command trained, nobody knows any more how long they took.
            self._wall_s[number] = None if number <= self._done_before else time.monotonic() - self._begun_s
            self._folder.append_progress({**entry, "wall_s": self._wall_s[number]})

    def restart(self, after_round: int | None, cause: str, most: int, say: Say) -> None:
        """Record that the run has to be submitted again; `TrainingFailed` if that was done often enough.

        Where checkpoints are far away, `after_round` is None until `resumed` is told.
        """
        if len(self.restarts) >= most:
            tried = "; ".join(f"after round {entry['after_round']}: {entry['cause']}" for entry in self.restarts)
            raise TrainingFailed(f"engine {ENGINE}: {cause}" + (
                f", after {most} restart{'s' if most > 1 else ''} ({tried})" if most else "; --restarts is 0"))
        self.restarts.append({"after_round": after_round, "cause": cause})
        how = "submitted again" if after_round is None else f"going on after round {after_round}"
        say(f"{cause}; {how} (restart {len(self.restarts)} of at most {most})")

    def resumed(self, after_round: int) -> None:
        """Add to the newest restart which round the run goes on after."""
        if self.restarts:
            self.restarts[-1]["after_round"] = after_round

    def _isolation(self) -> dict[str, Any]:
        shared_because = self.superlink_shared_because
        if shared_because is None:
            return {"superlink_isolated": None, "superlink_shared_because": "it was not started here"}
        return {"superlink_isolated": not shared_because, "superlink_shared_because": shared_because or None}

    def end(self, outcome: dict[str, Any], trace: Path | None) -> None:
        """Leave the outcome, with what only this side knows, where the runner looks for it."""
        if "rounds" in outcome:
            for entry in outcome["rounds"]:
                entry["wall_s"] = self._wall_s.get(int(entry["round"]))
            outcome = {**outcome, "wall_s": time.monotonic() - self._begun_s, "restarts": self.restarts,
                       **self._isolation()}
        if trace is not None and trace.exists():
            shutil.copyfile(trace, self._folder.trace)
        self._folder.write_outcome(outcome)
