"""Rings of one round: each has the transport that its own members can do."""

from flwr.app import ArrayRecord

from socflower.cluster import parse_cluster
from socflower.hierarchy import SyncInterval, plan_groups, unpredicted_exchanges
from socflower.rings.settings import RingSettings
from socflower.strategies.round import Round, ring_tasks

PLAN = plan_groups(parse_cluster({"boards": [2, 2]}), 2)


def test_only_rings_of_gpus_take_nccl() -> None:
    gpus = dict.fromkeys(PLAN.groups[0].members, "") | {soc: f"GPU-{soc}" for soc in PLAN.groups[1].members}
    for settings, chosen in ((RingSettings(), "nccl"), (RingSettings(transport="gloo"), "gloo")):
        this = Round(
            server_round=1, interval=SyncInterval(index=0, first_step=0, num_steps=1, epoch_end=1.0, deal_epoch=0),
            plan=PLAN, exchanges=unpredicted_exchanges(PLAN, False, "star"), costs=None,
            node_of={soc: 100 + soc for soc in PLAN.participants}, transport="gloo", sent=ArrayRecord(),
            settled_by_grid=False, rings=settings, gpu_of=gpus)
        tasks = ring_tasks(this, settings, {soc: f"10.0.0.{soc}:1" for soc in PLAN.participants},
                           {soc: soc for soc in PLAN.participants}, num_buckets=1, rebalance_steps=0,
                           tolerate_errors=False)
        for group, transport in zip(PLAN.groups, ("gloo", chosen), strict=True):
            assert {tasks[soc].transport for soc in group.members} == {transport}
