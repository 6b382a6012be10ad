"""Real processes are killed, stopped and preempted: every run ends, and nothing is lost or counted twice."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.strategies.fault_matrix import Cell, cells, run_cell
from tests.strategies.faulty_run import FaultyRun

pytestmark = pytest.mark.timeout(900)

FAST = {("leader killed", "mid-batch", "grpc")}
# Twelve of the 32 cells, with every event, phase and transport; the module fault_matrix runs all of them.
SAMPLED = random.Random(6674).sample(list(cells()), 12)
ALL_ROUNDS = range(1, 20)


def always(*socs: int) -> dict[int, tuple[int, ...]]:
    """Return that these SoCs may have missed something in any round."""
    return dict.fromkeys(ALL_ROUNDS, socs)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(
            cell,
            id=cell.name,
            marks=() if (cell.event, cell.phase, cell.transport) in FAST else pytest.mark.slow,
        )
        for cell in SAMPLED
    ],
)
def test_a_run_survives(cell: Cell, tmp_path: Path) -> None:
    # Other tests run beside this one, so time decides nothing; the module makes the table of recovery times.
    run_cell(cell, tmp_path)


def struck_mid_batch(
    tmp_path: Path,
    strike: Callable[[FaultyRun], object],
    *,
    lost: tuple[int, ...],
    server_round: int = 1,
    num_steps: int = 3,
    **settings: Any,
) -> FaultyRun:
    """Run a training, strike in the middle of a round, and check all but the events."""
    with FaultyRun(tmp_path, **{"num_epochs": 1, "interval_epochs": 0.5, **settings}) as run:
        run.wait_steps(0, server_round, num_steps)
        strike(run)
        run.check_weights()
        run.check_ledger(always(*lost))
        return run


@pytest.mark.slow
def test_two_of_four_die_at_once(tmp_path: Path) -> None:
    run = struck_mid_batch(
        tmp_path, lambda run: (run.kill(1), run.kill(2)), lost=(1, 2), socs_per_board=4
    )
    assert run.kinds().count("ring-formed-again") >= 1


@pytest.mark.slow
def test_all_but_one_die(tmp_path: Path) -> None:
    run = struck_mid_batch(
        tmp_path,
        lambda run: (run.kill(0), run.kill(1), run.kill(3)),
        lost=(0, 1, 3),
        socs_per_board=4,
        num_epochs=2,
    )
    assert {"ring-formed-again", "replanned", "returned"} <= set(run.kinds())


@pytest.mark.slow
def test_one_after_the_other_dies_while_the_ring_forms_again(tmp_path: Path) -> None:
    def strike(run: FaultyRun) -> None:
        run.kill(2)
        time.sleep(0.03)
        run.kill(0)

    struck_mid_batch(tmp_path, strike, lost=(0, 2), socs_per_board=4)


@pytest.mark.slow
def test_the_work_of_a_whole_group_that_dies_is_lost_and_said_to_be(tmp_path: Path) -> None:
    with FaultyRun(tmp_path, boards=2, socs_per_board=2, num_groups=2, num_epochs=2) as run:
        run.wait_steps(2, 1, 2)
        run.kill(2)
        run.kill(3)
        arrays, reference = run.result(), run.reference()
        run.check_ledger({1: (2, 3)})
        first = run.strategy.reports[0]
        assert "no-reply" in [event.kind for event in first.events if event.group_id == 1]
        assert [event for event in run.strategy.reports[1].events if event.kind == "no-reply"] == []
        assert any(
            not np.allclose(arrays[name].numpy(), reference[name].numpy(), atol=1e-4)
            for name in reference
        )


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "grpc"])
@pytest.mark.parametrize("seed", range(6))
def test_a_kill_at_any_moment_loses_no_step(tmp_path: Path, transport: str, seed: int) -> None:
    kill_at_a_random_moment(tmp_path, transport, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [101, 102])
def test_a_kill_at_some_moments_loses_no_step(tmp_path: Path, seed: int) -> None:
    kill_at_a_random_moment(tmp_path, ("gloo", "grpc")[seed % 2], seed)


def kill_at_a_random_moment(tmp_path: Path, transport: str, seed: int) -> None:
    """Steps are short, so that as often as not some have applied the step under way and others have not."""
    choice = random.Random(seed)
    victim, wait_s = choice.randrange(3), choice.uniform(0.0, 0.15)

    def strike(run: FaultyRun) -> None:
        time.sleep(wait_s)
        run.kill(victim)

    struck_mid_batch(
        tmp_path,
        strike,
        lost=(victim,),
        transport=transport,
        step_s=0.01,
        num_steps=4,
        batch_size=4,
        overlap_buckets=2,
    )


def test_a_device_that_is_wanted_is_left_and_taken_in_again(tmp_path: Path) -> None:
    wanted = tmp_path / "wanted"
    with FaultyRun(
        tmp_path,
        num_epochs=2,
        interval_epochs=0.5,
        step_s=0.06,
        of_soc={1: {"preempt-file": str(wanted)}},
    ) as run:
        run.wait_steps(1, 1, 3)
        wanted.touch()
        asked_s = time.monotonic()
        run.wait_mark(1, 1, "trained")
        assert time.monotonic() - asked_s < 30.0  # 2 s are promised, a loaded machine takes longer
        run.wait_steps(0, 2, 2)
        wanted.unlink()
        run.check_weights()
        run.check_ledger(always(1))
        kinds = run.kinds()
        assert kinds.count("preempted") == 1
        assert "member-lost" not in kinds
        # Asked in one round whether it is back, it takes part in the next.
        assert [kind for kind in kinds if kind in ("replanned", "returned")] == [
            "replanned",
            "returned",
            "replanned",
        ]
        assert run.lines(1)[-1]["round"] == run.strategy.num_rounds


@pytest.mark.slow
def test_a_member_whose_training_stands_still_ends_its_process(tmp_path: Path) -> None:
    """Its port still answers, so that the others would wait for it."""
    with FaultyRun(
        tmp_path, num_epochs=1, interval_epochs=0.5, step_s=0.05, of_soc={1: {"hangs": True}}
    ) as run:
        run.check_weights()
        run.check_ledger(always(1))
        assert {"ring-formed-again", "member-lost"} <= set(run.kinds()), run.kinds()


@pytest.mark.slow
def test_a_node_that_vanishes_is_not_waited_for(tmp_path: Path) -> None:
    run = struck_mid_batch(tmp_path, lambda run: run.grid.remove(run.nodes[1]), lost=(1,))
    assert {"member-lost", "replanned"} <= set(run.kinds())
    assert "returned" not in run.kinds()


@pytest.mark.slow
def test_a_leader_whose_node_vanishes_before_its_ring_is_replaced(tmp_path: Path) -> None:
    with FaultyRun(
        tmp_path, num_epochs=1, interval_epochs=0.5, of_soc={0: {"begin-delay-s": 5.0}}
    ) as run:
        run.wait_mark(0, 1, "asked")
        run.grid.remove(run.nodes[0])
        run.check_weights()
        run.check_ledger(always(0))


@pytest.mark.slow
def test_a_leader_and_a_member_that_never_answer_do_not_hold_up_the_run(tmp_path: Path) -> None:
    """The leader and another one hang before their ring, so the two that are left have no model, nor an error."""
    with FaultyRun(
        tmp_path,
        socs_per_board=4,
        num_epochs=1,
        interval_epochs=0.5,
        of_soc={0: {"begin-delay-s": 5.0}, 1: {"begin-delay-s": 5.0}},
    ) as run:
        for soc in (0, 1):
            run.wait_mark(soc, 1, "asked")
            run.stop(soc)
        run.check_weights()
        run.check_ledger(always(0, 1))


@pytest.mark.slow
def test_a_leader_that_hangs_and_the_next_one_asked_that_hangs_too(tmp_path: Path) -> None:
    """Both have finished with the ring; the third member has the model as well."""
    with FaultyRun(
        tmp_path, num_epochs=1, interval_epochs=0.5, of_soc={0: {"end-delay-s": 4.0}}
    ) as run:
        run.wait_mark(0, 1, "trained")
        run.stop(0)
        run.wait_mark(1, 1, "trained")
        run.stop(1)
        run.check_weights()
        run.check_ledger(always(0, 1))
        assert "leader-lost" in run.kinds()


@pytest.mark.slow
def test_groups_that_take_turns_go_on_without_the_member_that_waited_for_its_group(
    tmp_path: Path,
) -> None:
    """Three SoCs a board and groups of two share uplinks; the one that waits for the split group's turn dies."""
    with FaultyRun(
        tmp_path, boards=2, socs_per_board=3, num_groups=3, num_epochs=1, step_s=0.1
    ) as run:
        split = next(group for group in run.strategy.plan.groups if group.split)
        run.wait_steps(split.members[0], 1, 2)
        run.kill(split.members[0])
        run.check_weights()
        run.check_ledger(always(split.members[0]))


@pytest.mark.slow
def test_processes_keep_their_size_over_many_rounds_and_rings(tmp_path: Path) -> None:
    """A member is killed in every other round; the others stay the same processes throughout."""
    with FaultyRun(tmp_path, num_epochs=4, interval_epochs=0.25, step_s=0.1, timeout_s=200) as run:
        for server_round in range(1, run.strategy.num_rounds - 1, 3):
            run.wait_steps(2, server_round, 2)
            run.kill(2)
        run.check_weights()
        sizes = [
            json.loads(run.mark(0, server_round, "trained").read_text().splitlines()[-1])
            for server_round in (3, run.strategy.num_rounds)
        ]
        assert sizes[1]["threads"] <= sizes[0]["threads"] + 10
        assert sizes[1]["files"] <= sizes[0]["files"] + 15
