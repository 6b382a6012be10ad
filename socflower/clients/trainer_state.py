"""Where a group's optimiser stays between intervals: in the node's memory, and in files for when that is gone."""

import math
from typing import cast

from flwr.app import ConfigRecord, Context, Message

from socflower.clients.state_files import Position, StateFiles
from socflower.cluster.protocol import CONFIG, LOST_STATE, RESUMED, GroupTask
from socflower.cluster.sealed_file import DamagedFile
from socflower.errors import ConfigError

TRAINER_STATE = "socflower-trainer"


class TrainerState:
    """The optimiser's state of one group's task, at this node; momentum stays local (F3)."""

    def __init__(
        self, task: GroupTask, message: Message, context: Context, files: StateFiles | None, *, leads: bool = True,
    ) -> None:
        self._task, self._context, self._files = task, context, files
        config = message.content.config_records.get(CONFIG, ConfigRecord())
        # Members of a ring get the optimiser from the one that leads it.
        self._resumed, self._required = RESUMED in config, leads and bool(config.get(RESUMED))
        self._begin = Position(task.group_id, task.num_groups, task.total_steps, task.first_step)
        if files is not None and task.first_step == 0:
            files.forget(task.group_id)

    def read(self) -> bytes | None:
        """Return the state to begin with, from memory, or from its file if the training was resumed; else None.

        A leader that is new to its group has no momentum to go on from, nor has one that last trained by another plan;
        that another node's file is in reach, as where all nodes are on one machine, must make no difference.
        Raises `ConfigError` if there must be a state, since the training was resumed, and nothing is known of it.
        """
        saved = self._context.state.config_records.get(TRAINER_STATE)
        if saved and saved["position"] == list(self._begin):
            return cast(bytes, saved["state"])
        if not self._resumed or not self._begin.next_step:
            return None
        cause = "no folder for states was given to make_client_app"
        if self._files is not None:
            cause = f"{self._files.folder} has none"
            try:
                kept = self._files.read(self._begin)
            except DamagedFile as error:
                kept, cause = None, str(error)
            if kept is not None:
                return kept.state
        if not self._required:
            return None
        raise ConfigError(f"group {self._begin.group_id} {LOST_STATE} for step {self._begin.next_step} of "
                          f"{self._begin.total_steps} to resume from: {cause}; without its momentum the weights would "
                          "be others, so start the training anew (--fresh)")

    def keep(self, state: bytes | None, mean_loss: float, *, in_file: bool = True) -> None:
        """Keep the state of the task's end; None where there is none to go on from."""
        position = self._begin._replace(next_step=self._task.first_step + self._task.num_steps)
        # Momentum of a group that diverged is NaN and would spoil the next interval's good weights as well.
        left = state if math.isfinite(mean_loss) else None
        if left is not None:
            self._context.state[TRAINER_STATE] = ConfigRecord({"state": left, "position": list(position)})
        else:
            self._context.state.pop(TRAINER_STATE, None)
        if self._files is not None and in_file:
            self._files.write(position, left)
