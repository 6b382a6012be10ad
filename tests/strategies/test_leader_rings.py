"""Leaders of real processes that exchange models in a ring: against one process, and struck before, during and after.

Whatever happens, no update is lost or counted twice: the weights are those of the undisturbed training.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdam

from socflower.engines.local.grid import LocalGrid
from socflower.strategies.forwarding_grid import ForwardingGrid
from socflower.strategies.group_grid import GroupGrid
from socflower.wire.message_keys import ARRAYS
from tests.strategies import ring_app
from tests.strategies.faulty_run import FaultyRun

pytestmark = pytest.mark.timeout(600)

SHAPE: dict[str, Any] = {
    "boards": 3,
    "socs_per_board": 2,
    "num_groups": 3,
    "leaders": "ring",
    "num_epochs": 1,
    "interval_epochs": 0.5,
}
LEADER, OTHER_LEADER, MEMBER = 0, 2, 1


class Hub(ForwardingGrid):
    """Notes how many models pass the hub, by direction and round."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.down: list[int] = []
        self.up: list[int] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        if any("group" in message.content.config_records for message in messages):
            self.down += [
                message.metadata.dst_node_id
                for message in messages
                if ARRAYS in message.content.array_records
            ]
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        self.up += [
            reply.metadata.src_node_id
            for reply in replies
            if reply.has_content() and ARRAYS in reply.content.array_records
        ]
        return replies


def assert_equal(ours: ArrayRecord, reference: ArrayRecord, tolerance: float = 1e-5) -> None:
    for name in reference:
        np.testing.assert_allclose(
            ours[name].numpy(), reference[name].numpy(), atol=tolerance, rtol=1e-4
        )


@pytest.mark.slow
def test_the_hub_gets_one_model_a_synchronisation_and_sends_none_after_the_first(
    tmp_path: Path,
) -> None:
    hubs: list[Hub] = []

    def wrap(grid: Grid) -> Grid:
        hubs.append(Hub(grid))
        return GroupGrid(hubs[0])

    with FaultyRun(tmp_path, wrap=wrap, step_s=0.0, **{**SHAPE, "interval_epochs": 0.25}) as run:
        run.result()
        run.check_weights(1e-5)
        run.check_ledger({})
        assert run.events == []
    assert len(run.strategy.reports) == 4
    assert len(hubs[0].down) == 3  # of the first round, one for each group
    assert len(hubs[0].up) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "num_down"),
    [
        ({"boards": 1, "num_groups": 1}, 1),
        ({"num_groups": 2, "boards": 2}, 2),
        ({"outer": FedAdam(fraction_evaluate=0.0)}, 6),
    ],
    ids=["one group", "two groups", "outer step"],
)
def test_groups_that_have_the_model_do_not_get_it(
    shape: dict[str, Any], num_down: int, tmp_path: Path
) -> None:
    """One group needs nobody; after an outer step nobody has the next model."""
    hubs: list[Hub] = []

    def wrap(grid: Grid) -> Grid:
        hubs.append(Hub(grid))
        return GroupGrid(hubs[0])

    with FaultyRun(tmp_path, wrap=wrap, step_s=0.0, **{**SHAPE, **shape}) as run:
        run.result()
        run.check_weights(1e-5)
        assert run.events == []
    assert (len(hubs[0].down), len(hubs[0].up)) == (num_down, 2)


@pytest.mark.slow
def test_any_grid_will_do(tmp_path: Path) -> None:
    with FaultyRun(tmp_path, wrap=lambda grid: grid, step_s=0.0, **SHAPE) as run:
        run.result()
        run.check_weights(1e-5)
        assert run.events == []


STRIKES = [
    pytest.param(
        {soc: {key: phase} for soc in socs}, {"leader-lost", "member-lost"}, id=f"{name}-{phase}"
    )
    for key in ("dies-in", "stops-in")
    for phase in ("meeting", "met")
    for name, socs in (
        (f"leader-{key}", [LEADER]),
        (f"other-{key}", [OTHER_LEADER]),
        (f"two-{key}", [LEADER, OTHER_LEADER]),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(("of_soc", "wanted"), STRIKES)
def test_a_leader_that_is_lost_in_the_exchange_is_replaced(
    of_soc: dict[int, dict[str, Any]],
    wanted: set[str],
    tmp_path: Path,
) -> None:
    with FaultyRun(tmp_path, of_soc=of_soc, step_s=0.02, **SHAPE) as run:
        run.result()
        run.check_weights()
        run.check_ledger({server_round: set(of_soc) for server_round in (1, 2)})
        assert wanted & set(run.kinds()), run.events


TREE: dict[str, Any] = {
    **SHAPE,
    "boards": 2,
    "socs_per_board": 4,
    "num_groups": 4,
    "leaders": "tree",
    "transport": "grpc",
}
"""Groups 0 and 1 on the first board, 2 and 3 on the other: SoC 0 sums for all, SoC 4 for its board."""


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["none", "int8"])
def test_a_tree_of_processes_has_the_bits_of_one_process(compression: str, tmp_path: Path) -> None:
    shape = {**TREE, "leader_compression": compression}
    strategy = ring_app.strategy(
        ring_app.cluster(2, 4),
        4,
        **{
            name: shape[name]
            for name in ("leaders", "leader_compression", "num_epochs", "interval_epochs")
        },
    )
    config = {"norm": False, "member-passes": "ring"}
    with LocalGrid(ring_app.client_app(), 8, run_config=config, num_workers=0) as grid:
        reference = strategy.start(
            GroupGrid(grid), ring_app.initial(), num_rounds=strategy.num_rounds, timeout=120
        )
    with FaultyRun(tmp_path, step_s=0.0, **shape) as run:
        ours = run.result()
        assert run.events == []
    assert [
        name
        for name in ours
        if ours[name].numpy().tobytes() != reference.arrays[name].numpy().tobytes()
    ] == []


@pytest.mark.slow
@pytest.mark.parametrize("key", ["dies-in", "stops-in"])
@pytest.mark.parametrize("phase", ["meeting", "met"])
@pytest.mark.parametrize("socs", [(0,), (4,), (6,), (0, 4)], ids=str)
def test_a_leader_that_is_lost_in_a_tree_is_replaced(
    key: str,
    phase: str,
    socs: tuple[int, ...],
    tmp_path: Path,
) -> None:
    with FaultyRun(
        tmp_path, of_soc={soc: {key: phase} for soc in socs}, step_s=0.02, **TREE
    ) as run:
        run.result()
        run.check_weights()
        run.check_ledger({server_round: set(socs) for server_round in (1, 2)})
        assert {"leader-lost", "member-lost"} & set(run.kinds()), run.events


PAIRS = [
    ({0: "rendezvous"}, {2: "meeting"}),  # a group is asked again, and answers with its own model
    ({0: "rendezvous"}, {2: "rendezvous"}),
    ({0: "mid-batch"}, {2: "met"}),
    (
        {1: "mid-batch"},
        {0: "synchronisation"} | {2: "meeting"},
    ),  # a group without anybody left, at last
    ({2: "synchronisation"}, {4: "meeting"}),
    ({0: "synchronisation"}, {2: "synchronisation"}),  # after the exchange, before they reply
    ({3: "meeting"}, {0: "met"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other"),
    PAIRS,
    ids=lambda faults: "-".join(f"{soc}.{phase}" for soc, phase in faults.items()),
)
def test_two_faults_lose_no_update(
    one: dict[int, str], other: dict[int, str], tmp_path: Path
) -> None:
    """Every group keeps a member that has its model, or has told it to the other leaders."""
    struck = {**one, **other}
    with FaultyRun(
        tmp_path,
        of_soc={soc: {"dies-in": phase} for soc, phase in struck.items()},
        step_s=0.02,
        **{**SHAPE, "interval_epochs": 1.0},
    ) as run:
        run.result()
        run.check_weights()
        run.check_ledger({1: set(struck)})


@pytest.mark.slow
@pytest.mark.parametrize("cut_in", ["begin", "meeting"])
def test_leaders_that_are_cut_from_each_other_meet_apart_and_the_hub_averages_both(
    cut_in: str,
    tmp_path: Path,
) -> None:
    """SoCs 0 and 1 of six are group 0."""
    apart = {0, 1}
    of_soc = {
        soc: {
            "cut-in": cut_in,
            "cut-from": " ".join(
                str(other) for other in range(6) if (other in apart) != (soc in apart)
            ),
        }
        for soc in range(6)
    }
    with FaultyRun(tmp_path, of_soc=of_soc, step_s=0.02, **SHAPE) as run:
        run.result()
        run.check_weights()
        run.check_ledger({})
        assert run.kinds() == ["member-lost"] * len(run.kinds()) != []
