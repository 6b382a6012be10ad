"""Communication groups: which split groups may exchange at the same time (F6, SoCFlow+ section 3.1)."""

from collections.abc import Sequence
from itertools import combinations
from typing import Protocol


class PlacedGroup(Protocol):
    """The properties of a group that colouring needs."""

    @property
    def group_id(self) -> int:
        """Its number."""
        ...

    @property
    def boards(self) -> tuple[int, ...]:
        """Boards with members."""
        ...

    @property
    def split(self) -> bool:
        """Whether it has more than one board."""
        ...


def conflicts(groups: Sequence[PlacedGroup]) -> dict[int, frozenset[int]]:
    """Return, by group id, the groups that share an uplink with it: both split, with a board in common (F6)."""
    present: dict[int, list[int]] = {}
    for group in groups:
        for board in group.boards if group.split else ():
            present.setdefault(board, []).append(group.group_id)
    found: dict[int, set[int]] = {group.group_id: set() for group in groups}
    for ids in present.values():
        for left, right in combinations(ids, 2):
            found[left].add(right)
            found[right].add(left)
    return {group_id: frozenset(others) for group_id, others in found.items()}


def communication_groups(groups: Sequence[PlacedGroup]) -> tuple[tuple[int, ...], ...]:
    """Return group ids in as few communication groups as a colouring of the conflict graph finds (F6).

    These are two where possible, which includes all groups placed in sequence: their conflicts form paths. Groups
    without a conflict are in the first one, as is the lowest id of each connected component with two colours.
    """
    # Clients import this package without planning, and networkx takes as long to import as all of it.
    import networkx as nx

    neighbours = conflicts(groups)
    graph = nx.Graph()
    graph.add_nodes_from(sorted(neighbours))
    graph.add_edges_from(
        (left, right) for left in sorted(neighbours) for right in sorted(neighbours[left])
    )
    colours: dict[int, int] = {}
    for nodes in nx.connected_components(graph):
        chain = graph.subgraph(sorted(nodes))
        # Greedy colouring may need three colours for a path, for which two suffice.
        if nx.is_bipartite(chain):
            found = nx.bipartite.color(chain)
            first = found[min(nodes)]
            colours |= {node: int(colour != first) for node, colour in found.items()}
        else:
            colours |= nx.greedy_color(chain, strategy="DSATUR")
    return tuple(
        tuple(sorted(node for node, own in colours.items() if own == colour))
        for colour in range(max(colours.values(), default=-1) + 1)
    )
