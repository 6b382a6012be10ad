"""Maps Flower nodes to SoCs, and tracks which nodes are connected and available."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import WARNING

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from socflower.cluster import Cluster
from socflower.errors import ConfigError, InfeasiblePlan, NodesLost
from socflower.flower_adapter import log
from socflower.peers.transports.port import PROTOCOL_VERSION
from socflower.quantities import counted
from socflower.wire.message_keys import (
    ASK,
    ASK_MODEL,
    ASK_STATUS,
    ASKED_SOC,
    CONFIG,
    MESSAGE_VERSION,
    PRICED,
    QUERY_ACTION,
    SERVER_ROUND,
    STATUS,
    NodeStatus,
)

QUERY_TYPE = f"{MessageType.QUERY}.{QUERY_ACTION}"
_PULL_INTERVAL_S = 0.25
_NO_FUNCTION = (
    f"function registered with name '{QUERY_ACTION}'",
    f"Invalid message type: {QUERY_TYPE}",
)
"""What Flower says for ClientApps of functions, and of `NumPyClient`, that do not answer our queries."""
_QUERY_TIMEOUT_S = 180.0  # every node starts a process to answer a query
_REST_FACTOR = 3.0
_REST_LEAST_S = 30.0
"""Once half of the nodes have answered a query, the others have three times as long as the slowest answer took, and at
least 30 s. Slow nodes on a loaded machine answer within that; a node that hangs does not delay the run further."""
_MEMORY_ROUNDS = 20
_LONGEST_REST_ROUNDS = 32
"""A node that is lost again within so many rounds after it came back rests for 1, 2, 4, … rounds, at most for so many.
It is asked in each of them."""

_LOST = frozenset({3, 4, 5, 8})
"""Flower's error codes for a message or reply that expired, a node that is gone, and a client process that died. Other
codes are errors of the app."""


@dataclass(kw_only=True, slots=True)
class _Answers:
    """What each node answered to a status query."""

    # How long the slowest node may take.
    limit_s: float
    statuses: dict[int, NodeStatus] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)  # with the reason
    gone: dict[int, str] = field(default_factory=dict)  # with the reason
    failed: set[int] = field(default_factory=set)  # by an error of the app


def half_of(num_nodes: int) -> int:
    """Return the default of `min_nodes`: half of a plan's nodes, rounded up."""
    return (num_nodes + 1) // 2


class NodeRegistry:
    """The nodes of a training run, by SoC.

    Nodes are matched with SoCs by the board and slot in their node config, or, if no node config has them, in ascending
    order of node ids.
    """

    def __init__(self, cluster: Cluster, socs: Sequence[int], min_nodes: int | None = None) -> None:
        self._cluster, self._socs = cluster, tuple(socs)
        if min_nodes is not None and min_nodes > len(self._socs):
            raise ConfigError(
                f"[ring] min_nodes = {min_nodes}: the training has {counted(len(self._socs), 'node')}, and would "
                f"wait for more; give at most {len(self._socs)}"
            )
        # With fewer nodes training does not start. A model of less than half of the data is of no use, and a rack that
        # starts up should not begin with its first node.
        self._min_nodes = half_of(len(self._socs)) if min_nodes is None else min_nodes
        # Nodes may be missing whatever they say of themselves.
        self._is_elastic = min_nodes is not None
        self._round = 0
        # By SoC, the losses that are not forgotten, and the round in which it came back after the latest one.
        self._num_losses: dict[int, int] = {}
        self._back_in: dict[int, int] = {}
        # By SoC, the first round in which it may be planned with again.
        self._rests_until: dict[int, int] = {}
        self._node_of: dict[int, int] = {}
        self._status: dict[int, NodeStatus] = {}  # by SoC
        self._away: set[int] = set()
        self._unanswered: dict[str, int] = {}  # nodes that have a status query, by its message id
        # Queries without an answer in time.
        self._late: set[str] = set()
        # SoCs of nodes that did not answer when they were matched, nor since.
        self.lost: set[int] = set()
        self.left_out = ""  # a line about these nodes
        # Unknown nodes that were asked for their board and slot.
        self._queried_new_nodes: set[int] = set()
        # Why a node that answers is left out; empty if it is not.
        self._faults: dict[int, str] = {}

    @property
    def server_round(self) -> int:
        """The round in which nodes were asked last."""
        return self._round

    @property
    def node_of(self) -> Mapping[int, int]:
        """Node ids by SoC, including nodes that have disconnected since."""
        return self._node_of

    @property
    def ring_address_of(self) -> Mapping[int, str]:
        """Ring addresses by SoC; empty on engines that run a group in one process."""
        return {soc: status.ring for soc, status in self._status.items() if status.ring}

    @property
    def resident(self) -> frozenset[int]:
        """SoCs whose clients stay between messages."""
        return frozenset(soc for soc, status in self._status.items() if status.resident)

    def transport(self, wanted: str) -> str:
        """Return a transport that all nodes allow: `wanted`, or any if that is "auto"."""
        offered = [status.transports for status in self._status.values()]
        for transport in offered[0]:
            if wanted in ("auto", transport.partition("+")[0]) and all(
                transport in each for each in offered
            ):
                return transport
        raise ConfigError(
            f"SoCFlow: nodes allow no common ring transport ({wanted} was asked for; they offer "
            f"{', '.join(sorted({'/'.join(each) for each in offered}))}); give all of them certificates, "
            "or none, and the same ring-transport"
        )

    def match_nodes(self, grid: Grid, *, query: bool) -> None:
        """Match nodes with SoCs, by their answers to a status query if `query`; `InfeasiblePlan` for too few nodes.

        Nodes that do not answer in time are left out, and their SoCs are away until they do.
        """
        nodes = sorted(grid.get_node_ids())
        self._require_nodes(nodes, self._min_nodes if query else len(self._socs))
        statuses, lost = self._first_answers(grid, nodes) if query else ({}, {})
        placed = {node: status for node, status in statuses.items() if _is_placed(status)}
        if not (placed or self._is_elastic or any(each.ring for each in statuses.values())):
            # As in a simulation, in which no node comes later.
            self._require_nodes(nodes, len(self._socs))
        if placed:
            self._match_by_slot(
                [node for node in nodes if node not in lost], placed, num_lost=len(lost)
            )
        else:
            self._node_of = dict(zip(self._socs, nodes, strict=False))
        self._status = {
            soc: statuses[node] for soc, node in self._node_of.items() if node in statuses
        }
        self._leave_out(lost)
        without = [
            node
            for soc, node in self._node_of.items()
            if soc not in {*self.ring_address_of, *self._away}
        ]
        if self.ring_address_of and without:
            raise ConfigError(
                f"SoCFlow: nodes {', '.join(map(str, without))} have no ring in their node config, and "
                "others have one; start all SuperNodes with --node-config 'ring=\"host:port\"', or none"
            )
        addresses = list(self.ring_address_of.values())
        twice = {address for address in addresses if addresses.count(address) > 1}
        if twice:
            raise ConfigError(
                f"SoCFlow: several nodes have the ring address {min(twice)}; give each its own"
            )
        self._away |= {soc for soc, status in self._status.items() if status.preempted}

    def _require_nodes(self, nodes: Sequence[int], needed: int) -> None:
        """Raise `InfeasiblePlan` for too few nodes."""
        needed = min(needed, len(self._socs))
        if len(nodes) < needed:
            raise InfeasiblePlan(
                f"SoCFlow: the plan needs {needed} nodes and Flower has {len(nodes)}; start more "
                f"SuperNodes, or plan with num_socs={len(nodes)}, or with fewer min_nodes"
            )

    def _first_answers(
        self, grid: Grid, nodes: Sequence[int]
    ) -> tuple[dict[int, NodeStatus], dict[int, str]]:
        """Return the nodes' statuses, and the nodes that are lost with the reason.

        Raises `ConfigError` if the app of a node fails and others say where they are, and `NodesLost` if no node
        answers.
        """
        first = self._query_nodes(grid, nodes, _QUERY_TIMEOUT_S)
        say_where = any(status.ring or _is_placed(status) for status in first.statuses.values())
        # A node whose process died during the query may have a new process by now.
        again = {*first.gone, *(first.failed if say_where else ())}
        second = self._query_nodes(grid, sorted(again), first.limit_s)
        statuses, lost = (
            first.statuses | second.statuses,
            first.silent | second.silent | second.gone,
        )
        if second.failed and say_where:
            raise ConfigError(
                f"SoCFlow: nodes {', '.join(map(str, sorted(second.failed)))} failed, twice, and others "
                "say where they are; see these nodes' logs, and run the same app on all"
            )
        others = {
            node: found for node, status in statuses.items() if (found := _other_version(status))
        }
        if others and len(others) == len(statuses):
            node, found = min(others.items())
            raise ConfigError(f"SoCFlow: node {node} {found}; install the same socflower on both")
        statuses, lost = (
            {node: status for node, status in statuses.items() if node not in others},
            {**lost, **others},
        )
        if len(lost) == len(nodes):
            raise NodesLost(
                f"SoCFlow: none of {len(nodes)} nodes answered within {_QUERY_TIMEOUT_S:g} s; see "
                "their logs"
            )
        return statuses, lost

    def _leave_out(self, lost: Mapping[int, str]) -> None:
        """Mark the SoCs of lost nodes as away, and those where no node says that it is."""
        socs = [soc for soc in self._socs if soc not in self._node_of or self._node_of[soc] in lost]
        self._away.update(socs)
        self.lost = set(socs)
        reasons = [f"node {node} {reason}" for node, reason in sorted(lost.items())]
        if (missing := len(self._socs) - len({*self._node_of.values(), *lost})) > 0:
            reasons.append(f"{counted(missing, 'node')} of {len(self._socs)} not connected")
        if reasons:
            self.left_out = f"{', '.join(reasons)}: left out" + (
                f" with SoC {', '.join(map(str, socs))}, until it answers"
                if socs
                else "; the plan does not need it"
            )
            log(WARNING, "SoCFlow: %s", self.left_out)

    def require_group_clients(self, grid: Grid) -> None:
        """Raise `ConfigError` if a ClientApp has no part for groups: it would train a round of its own for nothing.

        Nodes that were not asked for their status run the same app, so one of them is asked, through a grid that can.
        """
        probe = getattr(grid, "probe", None)
        if not self._status and probe is not None:
            config = ConfigRecord({ASK: ASK_MODEL, SERVER_ROUND: 0, PRICED: True})
            _refuse_without_groups(
                probe(
                    Message(RecordDict({CONFIG: config}), self._node_of[self._socs[0]], QUERY_TYPE)
                )
            )

    def present(self, grid: Grid) -> tuple[int, ...]:
        """Return the SoCs whose nodes are connected and available, ascending."""
        connected = set(grid.get_node_ids())
        return tuple(
            soc
            for soc in self._socs
            if self._node_of.get(soc) in connected and soc not in self._away
        )

    def ask(self, grid: Grid, server_round: int) -> None:
        """Push status queries to nodes that are away and to new nodes, unless an earlier query is unanswered."""
        self._round = server_round
        connected = set(grid.get_node_ids()) - set(self._unanswered.values())
        away = [node for soc in sorted(self._away) if (node := self._node_of.get(soc)) in connected]
        known = set(self._node_of.values())
        expects_new = any(map(_is_placed, self._status.values())) or bool(self._vacant)
        new = sorted(connected - known - self._queried_new_nodes) if expects_new else []
        self._queried_new_nodes |= set(new)
        if asked := [*away, *new]:
            soc_of = {node: soc for soc, node in self._node_of.items()}
            ids = grid.push_messages(
                [_status_query(node, server_round, soc_of.get(node)) for node in asked]
            )
            self._unanswered |= dict(zip(ids, asked, strict=True))

    def poll_answers(self, grid: Grid) -> list[int]:
        """Pull the answers to status queries; return the SoCs that are available again.

        Machines that hang do not answer, so they are not waited for. Nodes in one process are waited for,
        once for each query: they answer after later work, and when a SoC returns must not depend on time.
        """
        until_s = time.monotonic() + (0.0 if self.ring_address_of else _QUERY_TIMEOUT_S)
        back: list[int] = []
        while self._unanswered:
            for reply in grid.pull_messages(list(self._unanswered)):
                self._unanswered.pop(reply.metadata.reply_to_message_id, None)
                back += self._on_reply(reply, grid)
            if time.monotonic() >= until_s or self._unanswered.keys() <= self._late:
                break
            time.sleep(_PULL_INTERVAL_S)
        self._late |= self._unanswered.keys()
        return sorted(back)

    def _on_reply(self, reply: Message, grid: Grid) -> list[int]:
        if not reply.has_content() or STATUS not in reply.content.config_records:
            return []
        status = NodeStatus.decode(reply.content.config_records[STATUS])
        node = reply.metadata.src_node_id
        soc = next((soc for soc, known in self._node_of.items() if known == node), None)
        is_new = soc is None
        if soc is None:
            # A restarted SuperNode has a new id, but the same board and slot; without these it takes a free place.
            soc = self._soc_at(status) if _is_placed(status) else next(iter(self._vacant), None)
        if soc is None or soc not in self._socs:
            return []
        fault = self._fault_of(node, soc, status, grid, is_new=is_new)
        if fault and fault != self._faults.get(node):
            log(WARNING, "SoCFlow: node %d %s; left out, until that is corrected", node, fault)
        self._faults[node] = fault
        if fault:
            # It may be restarted with the same id.
            self._queried_new_nodes.discard(node)
            return []
        if is_new:
            self._node_of[soc] = node
            self._away.add(soc)
        if is_new or soc in self.lost:
            self._status[soc] = status
            self.lost.discard(soc)
        elif soc in self._status:
            # A node may be started again in another way.
            self._status[soc] = replace(self._status[soc], resident=status.resident)
        rests = self._round + 1 < self._rests_until.get(soc, 0)
        if status.preempted or rests or soc not in self._away:
            return []
        self._away.discard(soc)
        self._back_in[soc] = self._round
        return [soc]

    @property
    def _vacant(self) -> list[int]:
        """SoCs that no node has been matched with."""
        return [soc for soc in self._socs if soc not in self._node_of]

    def _fault_of(
        self, node: int, soc: int, status: NodeStatus, grid: Grid, *, is_new: bool
    ) -> str:
        """Return why a node that answers cannot be the one of `soc`; empty if it can."""
        if found := _other_version(status):
            return found
        known = self._node_of.get(soc)
        if (
            is_new
            and known is not None
            and soc not in self._away
            and known in set(grid.get_node_ids())
        ):
            return f"says that it is at board {status.board}, slot {status.slot}, where node {known} is"
        others = [each for other, each in self._status.items() if other != soc and each.ring]
        common = [
            transport
            for transport in status.transports
            if all(transport in each.transports for each in others)
        ]
        if others and not (status.ring and common):
            return "has no ring, or not the transport of the others"
        return ""

    def mark_away(self, socs: Collection[int]) -> None:
        """Exclude these SoCs from plans until their nodes answer that they are available."""
        self._away.update(socs)

    def mark_lost(self, socs: Collection[int]) -> list[int]:
        """Exclude SoCs that their rings have lost, those that are lost again and again for a growing time.

        Return the SoCs that rest for more than the next round.
        """
        self.mark_away(socs)
        resting = []
        for soc in sorted(socs):
            back_in = self._back_in.get(soc)
            was_steady = back_in is None or self._round - back_in > _MEMORY_ROUNDS
            losses = 0 if was_steady else self._num_losses.get(soc, 0)
            self._num_losses[soc] = losses + 1
            if losses:
                rest = min(2 ** (losses - 1), _LONGEST_REST_ROUNDS)
                self._rests_until[soc] = self._round + 2 + rest
                resting.append(soc)
        return resting

    def rest_rounds(self, soc: int) -> int:
        """Return for how many rounds, from the next one on, a SoC is not planned with though it may answer."""
        return max(0, self._rests_until.get(soc, 0) - self._round - 1)

    @property
    def away(self) -> tuple[int, ...]:
        """SoCs excluded from plans, ascending: preempted by their users, or dropped by their rings."""
        return tuple(sorted(self._away))

    def _query_nodes(self, grid: Grid, nodes: Sequence[int], limit_s: float) -> "_Answers":
        """Ask nodes for their statuses; wait `limit_s` until half have answered, then as `_REST_FACTOR` says."""
        answers = _Answers(limit_s=limit_s)
        waiting = (
            dict(
                zip(
                    grid.push_messages([_status_query(node, 0) for node in nodes]),
                    nodes,
                    strict=True,
                )
            )
            if nodes
            else {}
        )
        begin_s = time.monotonic()
        while waiting:
            replies = list(grid.pull_messages(list(waiting)))
            waited_s = time.monotonic() - begin_s
            for reply in replies:
                _refuse_without_groups(reply)
                # Not by its source: the error reply for a node that is gone is the SuperLink's.
                node = waiting.pop(reply.metadata.reply_to_message_id)
                if reply.has_content() and STATUS in reply.content.config_records:
                    answers.statuses[node] = NodeStatus.decode(reply.content.config_records[STATUS])
                    if 2 * len(answers.statuses) >= len(nodes):
                        answers.limit_s = min(
                            limit_s, max(_REST_FACTOR * waited_s, waited_s + _REST_LEAST_S)
                        )
                elif reply.has_error() and reply.error.code in _LOST:
                    answers.gone[node] = f"is gone ({reply.error.reason})"
                else:
                    answers.failed.add(node)
            if waited_s >= answers.limit_s:
                break
            if waiting:
                time.sleep(_PULL_INTERVAL_S)
        answers.silent = dict.fromkeys(
            waiting.values(), f"did not answer within {answers.limit_s:.0f} s"
        )
        self._unanswered |= waiting
        self._late |= waiting.keys()
        return answers

    def _match_by_slot(
        self, nodes: Sequence[int], placed: Mapping[int, NodeStatus], *, num_lost: int
    ) -> None:
        unplaced = [node for node in nodes if node not in placed]
        if unplaced:
            raise ConfigError(
                f"SoCFlow: nodes {', '.join(map(str, unplaced))} have no board and slot in their node "
                "config and others have; give them to all, or to none"
            )
        self._node_of = {}
        for node in nodes:
            soc = self._soc_at(placed[node])
            where = f"board {placed[node].board}, slot {placed[node].slot}"
            if soc is None:
                raise ConfigError(
                    f"SoCFlow: node {node} says that it is at {where}, which the cluster does not have; "
                    "correct its node config or the cluster file"
                )
            if soc in self._node_of:
                raise ConfigError(
                    f"SoCFlow: nodes {self._node_of[soc]} and {node} both say that they are at {where}; "
                    "correct their node configs"
                )
            self._node_of[soc] = node
        missing = [soc for soc in self._socs if soc not in self._node_of]
        # As many as there are nodes that are lost or not connected; more are a node that says a wrong place.
        num_there = self._min_nodes if self._is_elastic else len(nodes)
        may_be_missing = max(num_lost, len(self._socs) - num_there)
        if len(missing) > may_be_missing:
            raise InfeasiblePlan(
                f"SoCFlow: the plan needs SoCs {', '.join(map(str, missing))} and no node says that "
                "it is there; start their SuperNodes, or plan with fewer SoCs"
            )

    def _soc_at(self, status: NodeStatus) -> int | None:
        if not 0 <= status.board < len(self._cluster.boards):
            return None
        socs = list(self._cluster.socs_of(status.board))
        return socs[status.slot] if 0 <= status.slot < len(socs) else None


def _refuse_without_groups(reply: Message) -> None:
    """Raise `ConfigError` for Flower's answer for a ClientApp that has no function for our queries."""
    reason = reply.error.reason if reply.has_error() else ""
    if reason and any(words in reason for words in _NO_FUNCTION):
        raise ConfigError(
            f"SoCFlow: the ClientApp of node {reply.metadata.src_node_id} trains on its own and not in "
            "groups; make it with socflower.make_client_app(model_fn, data_fn, app=yours), for models of "
            "torch, or give its ServerApp a strategy such as FedAvg"
        )


def _other_version(status: NodeStatus) -> str:
    """Return which version a node has, of messages or the peers' protocol, and which is needed; empty if the same."""
    if status.messages != MESSAGE_VERSION:
        return f"has version {status.messages} of our messages, and here is {MESSAGE_VERSION}"
    # Older nodes do not tell, and their peers refuse them.
    if status.protocol in (0, PROTOCOL_VERSION):
        return ""
    return f"has version {status.protocol} of the peers' protocol, and here is {PROTOCOL_VERSION}"


def _is_placed(status: NodeStatus) -> bool:
    return status.board >= 0 and status.slot >= 0


def _status_query(node: int, server_round: int, soc: int | None = None) -> Message:
    config = ConfigRecord({ASK: ASK_STATUS, SERVER_ROUND: server_round, PRICED: True})
    if soc is not None:
        config[ASKED_SOC] = soc
    return Message(RecordDict({CONFIG: config}), node, QUERY_TYPE, group_id=str(server_round))
