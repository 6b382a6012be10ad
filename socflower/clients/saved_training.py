"""A group's training state between intervals: in the Flower context, and in files to resume from."""

import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
from flwr.app import ConfigRecord, Context, Message
from numpy.typing import NDArray

from socflower.errors import ConfigError
from socflower.wire.arrays import array_to_bytes
from socflower.wire.folders import LOCK_FILE, FolderLock
from socflower.wire.message_keys import (
    CONFIG,
    HANDED,
    LOST_STATE,
    RESUMED,
    TRAINING,
    WARM_UP,
    GroupTask,
)
from socflower.wire.saved_state import DamagedFile, StateKind, StateStore, UnreadableFile

_TRAINER = StateKind(name="trainer state", schema=4, remedy="start a new training (--fresh)")
# A server resumes from its last checkpoint, or the one before if that is damaged; the group may be
# a round ahead.
_NUM_KEPT = 3


_FEEDBACK = StateKind(
    name="feedback of leaders' compression", schema=1, remedy="start a new training (--fresh)"
)


class Position(NamedTuple):
    """The training, group and step that a state belongs to."""

    group_id: int
    num_groups: int
    total_steps: int
    next_step: int
    # Distinguishes trainings that are otherwise equal.
    seed: int = 1


@dataclass(frozen=True, slots=True)
class StateFiles:
    """The last three states of each group that this node leads in one training, or of its edges."""

    folder: Path
    # Also "edge" or "feedback". Each kind is numbered from 0, so their files need different names.
    owner: str = "group"

    def of(self, position: Position, kind: StateKind) -> StateStore:
        """Return the states of a group under one plan, numbered by the step at which each continues."""
        plan = f"{self.owner}-{position.group_id}-of-{position.num_groups}-steps-{position.total_steps}"
        return StateStore(
            self.folder,
            kind,
            prefix=f"{plan}-at-",
            suffix=".state",
            keep=_NUM_KEPT,
            owner=f"{plan}-seed-{position.seed}",
        )

    def delete(self, group_id: int, num_groups: int | None = None) -> None:
        """Delete a group's states, since its training starts again; of one plan if its number of groups is given."""
        plan = "" if num_groups is None else f"of-{num_groups}-"
        for path in self.folder.glob(f"{self.owner}-{group_id}-{plan}*.state"):
            path.unlink(missing_ok=True)


_TRAINING_FOLDER = re.compile(r"training-[0-9]{1,20}")
_LAST_STATE = re.compile(r".*-steps-([0-9]+)-at-0*\1\.state")
_DAY_S = 24 * 3600.0
# The server may still die before it has received the last round.
_ENDED_KEPT_S = _DAY_S
_INTERRUPTED_KEPT_S = 30 * _DAY_S
_LOCK_WAIT_S = 60.0


def state_files(message: Message, folder: Path | None, owner: str = "group") -> StateFiles | None:
    """Return the states of the message's training in a node's folder; None without a folder.

    Each training has its own folder in it if the train config has `TRAINING`. The first message of a training removes
    folders of others: a day after their last message if their training ended, after thirty days if it was interrupted.
    Raises `ConfigError` if the folder cannot be written.
    """
    if folder is None:
        return None
    training = message.content.config_records.get(CONFIG, ConfigRecord()).get(TRAINING)
    if training is None:
        return StateFiles(folder, owner)
    own = folder / f"training-{training!s}"
    if not _TRAINING_FOLDER.fullmatch(own.name):
        raise ConfigError(
            f"train config: {TRAINING} = {training!r} must be the decimal digits of an id"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Without the lock, another training could remove the folder of a training that is just being resumed.
        with FolderLock(folder / LOCK_FILE, f"state folder {folder}", wait_s=_LOCK_WAIT_S):
            is_new = not own.exists()
            own.mkdir(exist_ok=True)
            os.utime(own)
            if is_new:
                _remove_old_trainings(folder)
    except OSError as error:
        raise ConfigError(
            f"state folder {folder}: cannot be written ({error.strerror}); name another one in the node "
            "config"
        ) from None
    return StateFiles(own, owner)


def _remove_old_trainings(folder: Path) -> None:
    now_s = time.time()
    for training in folder.iterdir():
        is_ours = _TRAINING_FOLDER.fullmatch(training.name) and training.is_dir()
        if not is_ours or training.is_symlink():
            continue
        has_ended = any(_LAST_STATE.fullmatch(file.name) for file in training.iterdir())
        kept_s = _ENDED_KEPT_S if has_ended else _INTERRUPTED_KEPT_S
        if now_s - training.stat().st_mtime > kept_s:
            shutil.rmtree(training, ignore_errors=True)


TRAINER_STATE = "socflower-trainer"


def _num_groups_tried(message: Message, task: GroupTask) -> int | None:
    """Return the number of groups of a warm-up, which trains in several; None in a training."""
    config = message.content.config_records.get(CONFIG, ConfigRecord())
    return task.num_groups if WARM_UP in config else None


class _Kept:
    """A record in a node's context: in a warm-up one for each number of groups, of which the chosen one continues."""

    def __init__(self, key: str, task: GroupTask, message: Message, context: Context) -> None:
        self._key, self._of_plan = key, f"{key}-of-{task.num_groups}"
        self._is_warm_up = _num_groups_tried(message, task) is not None
        self._records = context.state

    def read(self) -> Iterator[ConfigRecord]:
        """Yield what was kept, that of the training first."""
        for key in (self._key, self._of_plan):
            if saved := self._records.config_records.get(key):
                yield saved

    def write(self, record: ConfigRecord | None) -> None:
        """Keep a record instead; None: none. After a warm-up, those of its other numbers of groups are removed."""
        key = self._of_plan if self._is_warm_up else self._key
        if not self._is_warm_up:
            for old in [each for each in self._records if each.startswith(f"{self._key}-of-")]:
                del self._records[old]
        if record is not None:
            self._records[key] = record
        else:
            self._records.pop(key, None)


class TrainerState:
    """The optimiser state of one group at this node; momentum stays local (F3)."""

    _KEY: ClassVar[str] = TRAINER_STATE

    def __init__(
        self,
        task: GroupTask,
        message: Message,
        context: Context,
        files: StateFiles | None,
        settings: str = "",
        *,
        is_leader: bool = True,
    ) -> None:
        self._task, self._files = task, files
        self._kept = _Kept(self._KEY, task, message, context)
        # A digest of the trainer's settings in the train config.
        self._settings = settings
        config = message.content.config_records.get(CONFIG, ConfigRecord())
        # Members of a ring get the optimiser from their leader.
        self._resumed, self._required = RESUMED in config, is_leader and bool(config.get(RESUMED))
        self._handed = message.content.config_records.get(HANDED)
        self._begin = Position(
            task.group_id,
            task.num_groups,
            task.total_steps,
            task.first_step - task.missed_steps,
            task.seed,
        )
        # Why a required state could not be read.
        self.missing: ConfigError | None = None
        if files is not None and task.first_step == 0:
            files.delete(task.group_id, _num_groups_tried(message, task))

    def read(self, *, others_may_have_it: bool = False) -> bytes | None:
        """Return the initial state, from the context, or from a file if the training was resumed; else None.

        A member that last trained under another plan starts without momentum. So does a leader that is new to its group
        and trains it in one process, even if another node's file is accessible (all nodes may run on one machine); in
        a ring it gets the momentum of a member that has it. If the training was resumed with a
        required state, and the state is missing, raises `ConfigError`; with `others_may_have_it` that is `missing`
        instead, as another member of the ring may have the same state.
        """
        if self._task.local_epochs:
            return None
        if self._handed is not None:
            if handed := cast(bytes, self._handed["state"]):
                return handed
            # Its own, from the ring of all SoCs.
            self._begin = self._begin._replace(group_id=0, num_groups=1)
            self._resumed = self._required = True
        for saved in self._kept.read():
            if saved["position"] == list(self._begin):
                self._require_same_settings(saved["settings"])
                return cast(bytes, saved["state"])
        if not self._resumed or not self._begin.next_step:
            return None
        cause, remedy = "no folder for states was given to make_client_app", _TRAINER.remedy
        if self._files is not None:
            store = self._files.of(self._begin, _TRAINER)
            try:
                saved_state, payload = store.read(self._begin.next_step)
                # The group had diverged.
                if not saved_state["has_state"]:
                    return None
            except UnreadableFile as error:
                cause, _, remedy = str(error).partition("; ")
            except DamagedFile as error:
                cause = error.cause
                if not store.path(self._begin.next_step).exists():
                    remedy = (
                        "bring the node back that led the group, or its folder for states, and run the same "
                        f"command again; if it is lost, {_TRAINER.remedy}"
                    )
            except ConfigError as error:
                cause = str(error)
            else:
                self._require_same_settings(saved_state["settings"])
                return bytes(payload)
        if not self._required:
            return None
        self.missing = ConfigError(
            f"group {self._begin.group_id} {LOST_STATE} for step {self._begin.next_step} of "
            f"{self._begin.total_steps} to resume from: {cause}; without its momentum the weights would "
            f"differ, so {remedy}"
        )
        if others_may_have_it:
            return None
        raise self.missing

    def _require_same_settings(self, before: Any) -> None:
        """Raise `ConfigError` if settings have changed: the optimiser continues with those in its state."""
        if before != self._settings:
            raise ConfigError(
                "the train config's settings of the trainer have changed within a training of groups, "
                "whose optimiser continues from round to round; keep them, and give a schedule as "
                "FP32Trainer(scheduler=...)"
            )

    def save(self, state: bytes | None, mean_loss: float, *, in_file: bool = True) -> None:
        """Save the state of the task's end; None if there is none."""
        task = self._task
        if task.local_epochs:
            return
        end = task.first_step + task.num_steps
        position = Position(task.group_id, task.num_groups, task.total_steps, end, task.seed)
        # Momentum of a group that diverged is NaN and would spoil the next interval's good weights as well.
        left = state if math.isfinite(mean_loss) else None
        self._kept.write(
            None
            if left is None
            else ConfigRecord(
                {"state": left, "position": list(position), "settings": self._settings}
            )
        )
        if self._files is not None and (in_file or task.hands_over):
            self._files.of(position, _TRAINER).write(
                position.next_step,
                {"has_state": left is not None, "settings": self._settings},
                () if left is None else (left,),
            )


class ResidualState(TrainerState):
    """What compression has not sent yet of the gradients of one member of a group, at this node.

    They belong to a member and an interval: a member that left within the last one, or is new to the group, has none.
    """

    _KEY = "socflower-residuals"

    def __init__(
        self,
        task: GroupTask,
        participant: int,
        message: Message,
        context: Context,
        files: StateFiles | None,
    ) -> None:
        own = None if files is None else StateFiles(files.folder, f"residuals-of-{participant}")
        super().__init__(task, message, context, own, is_leader=False)
        self._handed = None


_KEPT_FEEDBACK = "socflower-feedback"


class FeedbackState:
    """A group's changes that compressed exchanges of leaders have not sent yet, at one of its members (F8).

    They are identified by a digest: any member that holds the right ones can supply them, whenever it saved them.
    """

    def __init__(
        self, task: GroupTask, message: Message, context: Context, files: StateFiles | None
    ) -> None:
        self._task, self._kept = task, _Kept(_KEPT_FEEDBACK, task, message, context)
        self._files = None if files is None else StateFiles(files.folder, owner="feedback")
        if self._files is not None and task.first_step == 0:
            self._files.delete(task.group_id, _num_groups_tried(message, task))

    def read(self, sha256: str) -> NDArray[np.float32] | None:
        """Return the feedback with this digest, from the context or a file; None if this node does not hold it."""
        if not sha256:
            return None
        for saved in self._kept.read():
            if saved["sha256"] == sha256:
                return _floats(cast(bytes, saved["values"]))
        if self._files is not None:
            store = self._files.of(self._position(self._task.first_step), _FEEDBACK)
            for number in store.numbers():
                # A file that cannot be used is skipped: another member may hold the feedback.
                with suppress(DamagedFile, UnreadableFile):
                    state, payload = store.read(number)
                    if state["sha256"] == sha256:
                        return _floats(payload)
        return None

    def save(self, sha256: str, feedback: NDArray[np.float32]) -> None:
        """Save the feedback of the task's end."""
        payload = bytes(array_to_bytes(feedback))
        self._kept.write(ConfigRecord({"sha256": sha256, "values": payload}))
        if self._files is not None:
            end = self._task.first_step + self._task.num_steps
            self._files.of(self._position(end), _FEEDBACK).write(
                end, {"sha256": sha256}, (payload,)
            )

    def _position(self, step: int) -> Position:
        task = self._task
        return Position(task.group_id, task.num_groups, task.total_steps, step, task.seed)


def _floats(payload: bytes | memoryview) -> NDArray[np.float32]:
    return np.frombuffer(payload, "<f4").astype(np.float32)
