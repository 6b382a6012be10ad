"""A user who takes a SoC of a ring of real processes ends its group's interval: the group is free, the others go on."""

from pathlib import Path

import pytest

from socflower.hierarchy.group_preemption import GROUPS
from socflower.strategies.reply_events import TERMINATED
from tests.strategies.faulty_run import FaultyRun

pytestmark = pytest.mark.timeout(600)


def events_of(run: FaultyRun, server_round: int) -> list[tuple[str, int]]:
    return [(event.kind, event.group_id) for event in run.strategy.reports[server_round - 1].events]


def steps_of(run: FaultyRun, soc: int, server_round: int) -> list[int]:
    return [line["step"] for line in run.lines(soc) if line["round"] == server_round]


@pytest.mark.parametrize(("transport", "leaders"), [("gloo", "star"), ("grpc", "ring")])
def test_a_group_gives_its_socs_back_inside_the_interval_and_the_others_go_on(
    tmp_path: Path, transport: str, leaders: str
) -> None:
    wanted = tmp_path / "wanted"
    with FaultyRun(
        tmp_path,
        boards=3,
        socs_per_board=2,
        num_groups=3,
        num_epochs=1,
        interval_epochs=0.5,
        batch_size=4,
        transport=transport,
        leaders=leaders,
        preemption=GROUPS,
        # Longer than the run may take: leaders that waited so long for the group would fail it.
        rings={"rendezvous_s": 300.0},
        # Its group is far from the end of its interval when the others have done theirs.
        of_soc={3: {"preempt-file": str(wanted), "slower": 10}},
    ) as run:
        run.wait_steps(2, 1, 2)
        wanted.touch()
        run.result()
        others = steps_of(run, 0, 1)
        assert others == steps_of(run, 4, 1) == list(range(len(others)))
        assert 2 <= len(steps_of(run, 2, 1)) < len(others)
        run.check_ledger({1: (2, 3)})
        first = events_of(run, 1)
        assert first.count((TERMINATED, 1)) == first.count(("preempted", 1)) == 1
        assert {"no-reply", "resting"}.isdisjoint(run.kinds())
        # The whole group rests as long as the user has its SoC.
        assert not steps_of(run, 2, 2) and not steps_of(run, 3, 2)
        assert ("replanned", 0) in events_of(run, 2)


def test_if_users_end_all_groups_one_of_them_does_its_interval_without_those_taken(
    tmp_path: Path,
) -> None:
    taken = {1: tmp_path / "first", 3: tmp_path / "second"}

    def strike(run: FaultyRun, server_round: int) -> None:
        if server_round == 1:
            for file in taken.values():
                file.touch()

    with FaultyRun(
        tmp_path,
        boards=2,
        socs_per_board=2,
        num_groups=2,
        num_epochs=1,
        interval_epochs=0.5,
        preemption=GROUPS,
        evaluate=strike,
        of_soc={soc: {"preempt-file": str(file)} for soc, file in taken.items()},
    ) as run:
        run.result()
        ended = [group for kind, group in events_of(run, 2) if kind == TERMINATED]
        assert len(ended) == 1
        alone, free = (0, 2) if ended == [1] else (2, 0)
        members = [line["members"] for line in run.lines(alone) if line["round"] == 2]
        assert len(members) == len(steps_of(run, alone, 1))
        assert all(len(each) == 1 for each in members)
        assert not any(steps_of(run, soc, 2) for soc in (free, *taken))
