"""How the leaders of groups exchange their models (F8): in a ring, in a tree over boards and servers, or in a star."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from socflower.cluster import HUB, Cluster, TaskGraphBuilder
from socflower.errors import ConfigError
from socflower.hierarchy.exchange.coding_bytes import EXACT, Coding, Int8
from socflower.hierarchy.exchange.collective_tasks import Exchange, broadcast, gather, scatter
from socflower.hierarchy.exchange.gradients import GradientExchange
from socflower.hierarchy.plan import GroupPlan

RING, TREE, STAR = "ring", "tree", "star"
KINDS = (RING, TREE, STAR)
AUTO = "auto"
"""The setting with which the prediction decides."""

NONE, FP16, INT8, INT4 = "none", "fp16", "int8", "int4"
COMPRESSIONS = (NONE, FP16, INT8, INT4)
"""Formats of the model changes that leaders exchange; see `peers/leaders/model_changes.py`."""

COMPRESSING = (RING, TREE)
"""The kinds of exchange that can be compressed; in a star every reply to the hub would have to be.

Four bits are gathered, which a tree would do at every level: they are for a ring.
"""

ASKED, PREDICTED, ALONE, NOT_PREDICTED = "asked", "predicted", "one-group", "not-predicted"


Arrivals: TypeAlias = dict[int, tuple[int, ...]]
"""The tasks after which a leader has the mean of all models, by leader."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelExchange:
    """How the models of groups meet at a synchronisation.

    `kind` "ring" is an all-reduce in the order of the plan. "tree" is uploads to the first leader of each board, of
    each server and of all, and downloads the same way back. "star" is at the hub; if groups are in several servers,
    the leader of each server's first group replaces the hub for its server. `coding` is that of what leaders exchange
    among themselves, not of models to or from the hub or in groups. If `hub_decides`, the hub makes the next model, as
    an outer strategy does, and sends it back to all leaders. With `in_int8` weights travel as int8, in a star.
    """

    kind: str = STAR
    coding: Coding = EXACT
    hub_decides: bool = False
    in_int8: bool = False

    def lower(
        self,
        builder: TaskGraphBuilder,
        by_server: Sequence[Sequence[int]],
        model: Exchange,
        cluster: Cluster,
        ready: Mapping[int, Sequence[int]],
        *,
        across_servers: bool,
    ) -> Arrivals:
        """Add the exchange among the leaders of each server's groups; a leader takes part after its tasks in `ready`.

        With `across_servers` servers exchange too, and the hub gets one model from a ring or tree.
        """
        if self.kind == STAR:
            return _star(builder, by_server, model, cluster, ready, across_servers=across_servers)
        whole = across_servers or len(by_server) == 1
        parts = [[leader for own in by_server for leader in own]] if whole else by_server
        arrived: Arrivals = {}
        for own in parts:
            arrived |= self._sum(builder, own, model, cluster, ready)
        if whole:
            arrived = _through_hub(builder, parts[0], model, arrived, hub_decides=self.hub_decides)
        return arrived

    def _sum(
        self,
        builder: TaskGraphBuilder,
        leaders: Sequence[int],
        model: Exchange,
        cluster: Cluster,
        ready: Mapping[int, Sequence[int]],
    ) -> Arrivals:
        arrived: Arrivals = {leader: tuple(ready.get(leader, ())) for leader in leaders}
        if self.kind == RING:
            ring = GradientExchange(coding=self.coding)
            return dict(ring.lower(builder, leaders, model, arrived, "sync").done)
        for operation in self.coding.operations(model, len(leaders)):
            part = replace(
                model,
                num_bytes=operation.num_bytes,
                fused=model.fused or not self.coding.is_exact,
            )
            arrived = _tree(builder, leaders, part, cluster, arrived)
        return arrived


STAR_EXCHANGE = ModelExchange()


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderExchange:
    """How leaders exchange models, and the reason."""

    kind: str = STAR
    decided_by: str = ASKED
    # Of a synchronisation of all groups, by kind.
    predicted_s: Mapping[str, float] = field(default_factory=dict)
    compression: str = NONE

    def to_document(self) -> dict[str, Any]:
        """Return the entry for plan and result documents."""
        return {
            "leaders": self.kind,
            "leaders_by": self.decided_by,
            "leaders_s": dict(self.predicted_s),
            "leader_compression": self.compression,
        }


def choose_leaders(
    plan: GroupPlan,
    asked: str,
    predict: Callable[[str], float] | None,
    compression: str = NONE,
    kinds: Sequence[str] = KINDS,
) -> LeaderExchange:
    """Return the kind that is asked for, or with "auto" the one of `kinds` for which `predict` returns the least (F8).

    On a tie, and without `predict`, it is the first of `kinds`. With compression, only kinds that can be compressed are
    candidates. Raises `ConfigError` for an unknown kind, and for more groups than eight bits can sum.
    """
    if asked not in (AUTO, *KINDS):
        known = ", ".join(map(repr, (AUTO, *KINDS)))
        raise ConfigError(f"leaders = {asked!r} is unknown; use {known}")
    if compression == INT8 and len(plan.groups) > Int8.most_members:
        raise ConfigError(
            f"leader_compression = {INT8!r} sums at most {Int8.most_members} groups, not {len(plan.groups)}"
        )
    if asked != AUTO:
        return LeaderExchange(kind=asked, decided_by=ASKED, compression=compression)
    kinds = kinds if compression == NONE else _compressing(compression)
    if len(plan.groups) == 1 or predict is None:
        reason = ALONE if len(plan.groups) == 1 else NOT_PREDICTED
        return LeaderExchange(kind=kinds[0], decided_by=reason, compression=compression)
    predicted_s = {kind: predict(kind) for kind in kinds}
    best = min(kinds, key=predicted_s.__getitem__)
    return LeaderExchange(
        kind=best, decided_by=PREDICTED, predicted_s=predicted_s, compression=compression
    )


def tree_levels(places: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Return which leaders exchange at each level of a tree, as tuples of positions; the first of a tuple sums for all.

    `places` has the place of each leader, such as (board, server), narrowest first. At the last level all leaders that
    are left exchange.
    """
    present, levels = list(range(len(places))), []
    for level in range(len(places[0]) + 1):
        meeting: dict[int, list[int]] = {}
        for position in present:
            meeting.setdefault((*places[position], 0)[level], []).append(position)
        levels.append([tuple(own) for own in meeting.values()])
        # Only the leaders that sum exchange at the next level.
        present = [own[0] for own in meeting.values()]
    return levels


def compression_fault(leaders: str, compression: str) -> str:
    """Return why leaders of this kind cannot compress; empty if they can."""
    able_kinds = (*_compressing(compression), AUTO)
    if compression == NONE or leaders in able_kinds:
        return ""
    able = " or ".join(map(repr, able_kinds))
    return f"leader_compression = {compression!r} needs leaders = {able}, not {leaders!r}"


def _compressing(compression: str) -> Sequence[str]:
    return (RING,) if compression == INT4 else COMPRESSING


def _star(
    builder: TaskGraphBuilder,
    by_server: Sequence[Sequence[int]],
    exchange: Exchange,
    cluster: Cluster,
    ready: Mapping[int, Sequence[int]],
    *,
    across_servers: bool,
) -> Arrivals:
    if len(by_server) == 1:
        uploaded = gather(builder, HUB, by_server[0], exchange, ready, "sync")
        return _ends(scatter(builder, HUB, by_server[0], exchange, uploaded, "sync"))
    centers = [leaders[0] for leaders in by_server]
    averaged = {
        leaders[0]: gather(
            builder, leaders[0], leaders, exchange, ready, "sync", _processor(cluster, leaders[0])
        )
        for leaders in by_server
    }
    if across_servers:
        uploaded = gather(
            builder,
            HUB,
            centers,
            exchange,
            {center: (averaged[center],) for center in centers},
            "sync of servers",
        )
        averaged = scatter(builder, HUB, centers, exchange, uploaded, "sync of servers")
    arrived: Arrivals = {}
    for leaders in by_server:
        arrived |= _ends(
            scatter(builder, leaders[0], leaders, exchange, averaged[leaders[0]], "sync")
        )
    return arrived


def _tree(
    builder: TaskGraphBuilder,
    leaders: Sequence[int],
    exchange: Exchange,
    cluster: Cluster,
    ready: Mapping[int, Sequence[int]],
) -> Arrivals:
    boards = [cluster.board_of(leader) for leader in leaders]
    climbed = [
        [[leaders[position] for position in own] for own in level]
        for level in tree_levels([(board, cluster.server_of(board)) for board in boards])
    ]
    sums = dict(ready)
    for level in climbed:
        sums |= {
            own[0]: (
                gather(builder, own[0], own, exchange, sums, "sync", _processor(cluster, own[0])),
            )
            for own in level
            if len(own) > 1
        }
    arrived: Arrivals = {leaders[0]: tuple(sums.get(leaders[0], ()))}
    for meeting in reversed(climbed):
        for own in meeting:
            if len(own) > 1:
                (after,) = arrived[own[0]]
                arrived |= _ends(scatter(builder, own[0], own, exchange, after, "sync"))
    return arrived


def _processor(cluster: Cluster, soc: int) -> str:
    return next(iter(cluster.device_of(soc).processors))


def _through_hub(
    builder: TaskGraphBuilder,
    leaders: Sequence[int],
    exchange: Exchange,
    arrived: Arrivals,
    *,
    hub_decides: bool,
) -> Arrivals:
    """Add the upload of the mean by the first leader and, if the hub decides, the download of the next model to all."""
    first = leaders[0]
    uploaded = builder.transfer(
        "model to the hub",
        first,
        HUB,
        exchange.num_bytes,
        num_messages=exchange.num_messages,
        after=arrived[first],
    )
    if not hub_decides:
        return arrived
    back = builder.transfer(
        "model of the hub",
        HUB,
        first,
        exchange.num_bytes,
        num_messages=exchange.num_messages,
        after=(uploaded,),
    )
    return broadcast(builder, leaders, exchange, (back,), "sync")


def _ends(tasks: Mapping[int, int]) -> Arrivals:
    return {leader: (task,) for leader, task in tasks.items()}
