"""Groups of real processes with real rings, against the same groups in one process."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord

from socflower.engines.local.grid import LocalGrid
from socflower.errors import TrainingFailed
from socflower.strategies.group_grid import GroupGrid
from socflower.wire.certificates import HostCertificate, write_certificates
from tests.process_grid import ProcessGrid
from tests.strategies import ring_app

pytestmark = pytest.mark.timeout(900)


def train(grid: Any, *, norm: bool = False, **changes: Any) -> tuple[ArrayRecord, Any]:
    strategy = ring_app.strategy(ring_app.cluster(), **changes)
    result = strategy.start(
        GroupGrid(grid), ring_app.initial(norm=norm), num_rounds=strategy.num_rounds, timeout=120
    )
    return result.arrays, strategy


@functools.cache
def in_one_process(*, norm: bool = False, passes: str = "auto", **changes: Any) -> ArrayRecord:
    config = {"norm": norm, "member-passes": passes}
    with LocalGrid(ring_app.client_app(), 4, run_config=config, num_workers=0) as grid:
        return train(grid, norm=norm, **changes)[0]


def on_processes(*, norm: bool = False, **changes: Any) -> tuple[ArrayRecord, Any]:
    with ProcessGrid(
        ring_app.client_app, ring_app.node_configs(ring_app.cluster()), run_config={"norm": norm}
    ) as grid:
        return train(grid, norm=norm, **changes)


def assert_close(ours: ArrayRecord, reference: ArrayRecord, tolerance: float = 1e-5) -> None:
    for name in reference:
        np.testing.assert_allclose(
            ours[name].numpy(), reference[name].numpy(), atol=tolerance, rtol=1e-4
        )


# Other tests of this file have rings of gRPC.
@pytest.mark.parametrize("transport", ["gloo", pytest.param("grpc", marks=pytest.mark.slow)])
def test_a_ring_of_processes_trains_what_one_process_does(transport: str) -> None:
    ours, strategy = on_processes(rings={"transport": transport}, overlap_buckets=2)
    assert strategy.method.describe().transports()["inside groups"] == transport
    assert [event.text for report in strategy.reports for event in report.events] == []
    assert_close(ours, in_one_process())


@pytest.mark.parametrize(
    ("norm", "compression"),
    [
        pytest.param(False, "none", marks=pytest.mark.slow),
        pytest.param(True, "none", marks=pytest.mark.slow),
        (False, "dgc"),
        (True, "int8"),
    ],
)
def test_one_process_can_train_the_very_bits_of_a_ring(norm: bool, compression: str) -> None:
    """One group of four, so that the order of the sum matters; in two rounds, between which residuals are kept."""
    changes: dict[str, Any] = {"num_groups": 1, "overlap_buckets": 2, "norm": norm}
    changes["compression"] = compression
    ours, _ = on_processes(rings={"transport": "grpc"}, **changes)
    reference = in_one_process(passes="ring", **changes)
    for name in reference:
        # Statistics are averaged in float64 by a ring, member by member in one process.
        if "running" not in name:
            assert np.array_equal(ours[name].numpy(), reference[name].numpy()), name
        else:
            np.testing.assert_allclose(
                ours[name].numpy(), reference[name].numpy(), rtol=1e-5, atol=1e-7
            )


@pytest.mark.parametrize(
    ("compression", "lost"),
    [
        ("int8", ""),
        *(
            pytest.param("none", lost, marks=pytest.mark.slow)
            for lost in ("", "first", "last", "all")
        ),
    ],
)
def test_a_training_is_resumed_where_every_machine_has_but_its_own_files(
    compression: str, lost: str, tmp_path: Path
) -> None:
    """Also if one member of each group, its leader or another, has lost its disk; not if all have."""
    config = {"states": str(tmp_path), "norm": False}
    cluster = ring_app.cluster()
    kept: dict[int, ArrayRecord] = {}

    def keep(server_round: int, arrays: ArrayRecord) -> None:
        kept[server_round] = arrays

    with ProcessGrid(
        ring_app.client_app, ring_app.node_configs(cluster), run_config=config
    ) as grid:
        first = ring_app.strategy(cluster, compression=compression)
        unbroken = first.start(
            GroupGrid(grid),
            ring_app.initial(),
            num_rounds=first.num_rounds,
            timeout=120,
            evaluate_fn=keep,
        ).arrays
    # All processes and their memory are gone now; what is left is on the machines' disks.
    for later in tmp_path.glob(
        f"*/*-at-{first.method.sync.intervals[-1].first_step + first.method.sync.intervals[-1].num_steps:06d}.state"
    ):
        later.unlink()
    momentum: dict[str, list[Path]] = {}
    for path in sorted(tmp_path.glob("*/group-*.state")):
        momentum.setdefault(path.name, []).append(path)
    assert all(len(copies) == 2 for copies in momentum.values()) and len(momentum) == 2
    for copies in momentum.values():
        for path in {"": [], "first": copies[:1], "last": copies[-1:], "all": copies}[lost]:
            path.unlink()
    with ProcessGrid(
        ring_app.client_app, ring_app.node_configs(cluster), run_config=config
    ) as grid:
        second = ring_app.strategy(cluster, compression=compression)
        second.resume_from(1)
        if lost == "all":
            with pytest.raises(TrainingFailed, match="has no trainer state for step"):
                second.start(GroupGrid(grid), kept[1], num_rounds=second.num_rounds, timeout=120)
            return
        resumed = second.start(
            GroupGrid(grid), kept[1], num_rounds=second.num_rounds, timeout=120
        ).arrays
    assert_close(resumed, unbroken, tolerance=0.0)


def test_rings_with_certificates_take_in_nobody_of_another_authority(tmp_path: Path) -> None:
    """One of four has a certificate that the others do not trust, nor it theirs: its group is one of the two, alone.

    Which one is a race: the leader may go on by itself, or the other one be asked first, who has no model yet.
    """
    ours, theirs = (
        write_certificates(tmp_path / name, ["127.0.0.1"])["127.0.0.1"]
        for name in ("ours", "theirs")
    )

    def paths(own: HostCertificate) -> dict[str, str]:
        return {
            "ring-ca": str(own.ca),
            "ring-certificate": str(own.certificate),
            "ring-key": str(own.key),
        }

    cluster = ring_app.cluster()
    configs = ring_app.node_configs(
        cluster, {soc: paths(theirs if soc == 3 else ours) for soc in range(4)}
    )
    with ProcessGrid(ring_app.client_app, configs) as grid:
        for node in grid.get_node_ids():
            grid.pid_of(node)  # so that no process starts within the time of the rendezvous
        trained, strategy = train(grid, rings={"rendezvous_s": 3.0})
    assert strategy.method.describe().transports()["inside groups"] == "grpc+tls"
    texts = [event.text for report in strategy.reports for event in report.events]
    led_by_2 = "group 1: participant 3 did not come to the rendezvous; the ring continues with 1"
    led_by_3 = "group 1: the model was lost with SoCs 2; the others are asked again, led by SoC 3"
    assert (led_by_2 in texts) != (led_by_3 in texts), texts
    assert_close(trained, in_one_process())


def test_members_keep_their_own_batch_norm_statistics_within_an_interval() -> None:
    ours, _ = on_processes(norm=True)
    assert_close(ours, in_one_process(norm=True), tolerance=1e-4)


def test_data_that_stay_are_not_asked_of_others() -> None:
    ours, _ = on_processes(reshuffle=False)
    assert_close(ours, in_one_process(reshuffle=False))


def test_split_groups_that_take_turns_train_the_same() -> None:
    """Boards of two and groups of three: both groups are split, share uplinks, and take turns in their exchanges."""
    rack = ring_app.cluster(boards=3, socs_per_board=2)
    with ProcessGrid(ring_app.client_app, ring_app.node_configs(rack)) as grid:
        strategy = ring_app.strategy(rack, num_groups=2, overlap_buckets=2)
        assert len(strategy.plan.communication_groups) == 2
        ours = strategy.start(
            GroupGrid(grid), ring_app.initial(), num_rounds=strategy.num_rounds, timeout=120
        ).arrays
    assert strategy.method.describe().exchanges.turns.enabled and all(
        report.uplink_turns for report in strategy.reports
    )
    assert [event.text for report in strategy.reports for event in report.events] == []
    with LocalGrid(ring_app.client_app(), 6, num_workers=0) as grid:
        strategy = ring_app.strategy(rack, num_groups=2)
        reference = strategy.start(
            GroupGrid(grid), ring_app.initial(), num_rounds=strategy.num_rounds
        ).arrays
    assert_close(ours, reference)
