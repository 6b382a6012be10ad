"""Post-local SGD: synchronous training first, then each group alone, with the momentum that it had (Lin et al., 2020).

The first rounds are those of one group of all SoCs, whose batch is that of all groups together; so a step has as many
samples before and after the switch, and an epoch as many steps. At the switch each group continues with the optimiser
of the synchronous training, as in `torch.distributed`'s `post_localSGD_hook`, where every worker has it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from socflower.hierarchy import GroupPlan, SyncInterval, sync_schedule
from socflower.strategies.group_replies import SettledRound
from socflower.strategies.methods.group_work import DataParallelWork
from socflower.strategies.methods.groups import GroupsMethod
from socflower.strategies.round import Round
from socflower.strategies.settings import TrainingSchedule
from socflower.wire.message_keys import HANDED


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """The synchronous rounds: one group of all SoCs, for so many rounds."""

    plan: GroupPlan
    num_rounds: int


def opened_intervals(
    schedule: TrainingSchedule, steps_per_epoch: int, synchronous_epochs: int
) -> tuple[Sequence[SyncInterval], int]:
    """Return the intervals of all rounds, and how many are synchronous: these are an epoch each, or less if asked."""
    asked = schedule.interval_epochs
    opening = sync_schedule(
        synchronous_epochs, steps_per_epoch, 1.0 if isinstance(asked, str) else min(1.0, asked)
    )
    epochs = schedule.num_epochs - synchronous_epochs
    local = replace(schedule, num_epochs=epochs).intervals(steps_per_epoch)
    later = (
        replace(
            each,
            index=each.index + len(opening),
            first_step=each.first_step + synchronous_epochs * steps_per_epoch,
            epoch_end=each.epoch_end + synchronous_epochs,
            deal_epoch=each.deal_epoch + synchronous_epochs,
        )
        for each in local
    )
    return (*opening, *later), len(opening)


class PostLocalMethod(GroupsMethod):
    """Rounds of one group, then rounds of groups of a plan over the same SoCs."""

    def __init__(self, opening: Opening, *, work: DataParallelWork, **settings: Any) -> None:
        super().__init__(work=work, **settings)
        self._opening, self._phases = opening, work
        self._local_plan = self.planner.plan
        # The optimiser at the end of the last synchronous round, if one process computed that.
        self._handed = b""
        self._enter(1)

    def _enter(self, server_round: int) -> None:
        """Plan from a round on as its phase does; before the switch, a step has the samples of all groups."""
        is_opening = server_round <= self._opening.num_rounds
        plan = self._opening.plan if is_opening else self._local_plan
        if self.planner.full_plan is not plan:
            self.planner.change_plan(plan)
        schedule = self.sync.schedule
        if is_opening:
            whole = schedule.batch_size * len(self._local_plan.groups)
            schedule = replace(schedule, batch_size=whole)
        self.messages.sync = replace(self.sync, schedule=schedule)
        self.messages.hands_over = server_round == self._opening.num_rounds
        self._phases.use(self.messages.sync)

    def open(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> tuple[Round, list[Message]]:
        """Address the groups of the round's phase; the first local round has the optimiser, or asks for the own one."""
        had = set(self.plan.participants)
        self._enter(server_round)
        this, messages = super().open(server_round, arrays, config, grid)
        if server_round == self._opening.num_rounds + 1:
            soc_of = {node: soc for soc, node in this.node_of.items()}
            for message in messages:
                # A SoC that was away has no optimiser of that round, and begins with a new one.
                if soc_of[message.metadata.dst_node_id] in had:
                    message.content[HANDED] = ConfigRecord({"state": self._handed})
        return this, messages

    def settle(self, this: Round, replies: Sequence[Message]) -> SettledRound:
        """Read the replies, and the optimiser of the last synchronous round."""
        settled = super().settle(this, replies)
        for reply in settled.usable:
            record = reply.content.config_records.get(HANDED)
            if record is not None and this.server_round == self._opening.num_rounds:
                self._handed = cast(bytes, record["state"])
        return settled

    def save(self) -> dict[str, Any]:
        """Return the state of groups, and the optimiser until it is handed over."""
        is_due = self.latest is not None and self.latest.server_round == self._opening.num_rounds
        handed = np.frombuffer(self._handed if is_due else b"", np.uint8)
        return {**super().save(), "handed": {"state": handed}}

    def restore(self, server_round: int, state: Mapping[str, Any]) -> None:
        """Restore the state at the end of a round, in that round's phase."""
        own = dict(state)
        self._handed = bytes((own.pop("handed", None) or {}).get("state", b""))
        self._enter(server_round)
        super().restore(server_round, own)
