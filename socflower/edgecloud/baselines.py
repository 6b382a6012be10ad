"""What split training is measured against: edge-only, plain split, JointDNN, SplitFed, pipeline without compression."""

from dataclasses import dataclass

from socflower.edgecloud.deployment import Deployment, LinkRates, SplitCosts
from socflower.edgecloud.phases import cut_cost, transfer_s

FULL_BITS = 32


def edge_only() -> Deployment:
    """Return the deployment of an edge that trains alone."""
    return Deployment(cut=None)


def plain_split(costs: SplitCosts, cut: int) -> Deployment:
    """Return split learning as it was first proposed: sequential, float32; `ConfigError` if there is no such cut."""
    cut_cost(costs, cut)
    return Deployment(cut=cut, bits=FULL_BITS)


def splitfed(costs: SplitCosts, cut: int) -> Deployment:
    """Return each edge's deployment in SplitFed: plain split learning; each round averages the front halves."""
    return plain_split(costs, cut)


def pipelined(costs: SplitCosts, cut: int, window: int) -> Deployment:
    """Return feature replay without compression and with a fixed cut; `ConfigError` if there is no such cut."""
    cut_cost(costs, cut)
    return Deployment(cut=cut, bits=FULL_BITS, window=window)


def joint_dnn(costs: SplitCosts, rates: LinkRates, *, allow_edge_only: bool = False) -> Deployment:
    """Return JointDNN's deployment: the fixed cut that is best for the mean rates, sequential and uncompressed.

    It is the shortest path through layers × {edge, cloud} that crosses once. Over any path, crossings back included,
    nothing is shorter if the cloud does no segment of layers slower than the edge: after a first crossing each further
    one adds a transfer and the segments at the edge gain nothing. So `shortest_path` finds it too.
    """
    path = shortest_path(costs, rates, allow_return=False, allow_edge_only=allow_edge_only)
    return Deployment(cut=path.cuts[0] if path.cuts else None, bits=FULL_BITS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where each segment of layers runs: segment i lies before cut i, the last behind the last cut."""

    in_cloud: tuple[bool, ...]
    seconds: float  # of one batch, sequentially

    @property
    def cuts(self) -> tuple[int, ...]:
        """Where the place changes."""
        return tuple(i for i in range(len(self.in_cloud) - 1) if self.in_cloud[i] != self.in_cloud[i + 1])


def shortest_path(costs: SplitCosts, rates: LinkRates, *, allow_return: bool = True,
                  allow_edge_only: bool = True) -> Placement:
    """Return the fastest sequential placement of all segments, the first at the edge: data do not leave it.

    A segment costs the difference between the cuts around it. Crossing to the cloud at a cut costs its features and
    labels up and its gradient down; crossing back, features down and gradient up; both, a latency each way and the
    edge's time for the messages and their bytes. Of equal paths the one that crosses first. Without `allow_return` a
    path that has crossed remains in the cloud.
    """
    best: dict[bool, tuple[float, tuple[bool, ...]]] = {False: (_segment_s(costs, 0, False), (False,))}
    for cut in range(len(costs.cuts)):
        after: dict[bool, tuple[float, tuple[bool, ...]]] = {}
        for place in (True, False):
            for before, (seconds, path) in sorted(best.items(), reverse=True):
                if before and not place and not allow_return:
                    continue
                total_s = seconds + _segment_s(costs, cut + 1, place)
                if before != place:
                    total_s += _crossing_s(costs, cut, rates, up=place)
                if place not in after or total_s < after[place][0]:
                    after[place] = (total_s, (*path, place))
        best = after
    ends = [best[True], best[False]]
    if not allow_edge_only:
        ends = [end for end in ends if any(end[1])]
    seconds, path = min(ends, key=lambda end: end[0])
    return Placement(in_cloud=path, seconds=seconds)


def _segment_s(costs: SplitCosts, segment: int, in_cloud: bool) -> float:
    """Return a segment's seconds at a place: what a cut behind it has more than one before it."""
    if in_cloud:
        behind_s = costs.cuts[segment].cloud_s if segment < len(costs.cuts) else 0.0
        return costs.cuts[segment - 1].cloud_s - behind_s
    until_s = (costs.cuts[segment].edge_forward_s + costs.cuts[segment].edge_backward_s
               if segment < len(costs.cuts) else costs.edge_only_s)
    if segment == 0:
        return until_s
    return until_s - costs.cuts[segment - 1].edge_forward_s - costs.cuts[segment - 1].edge_backward_s


def _crossing_s(costs: SplitCosts, cut: int, rates: LinkRates, *, up: bool) -> float:
    labels_bytes = 0.0 if up else costs.label_bytes  # they stand at the edge
    features_bytes = costs.feature_bytes(cut, FULL_BITS) - labels_bytes
    gradients_bytes = costs.gradient_bytes(cut)
    up_bytes, down_bytes = (features_bytes, gradients_bytes) if up else (gradients_bytes, features_bytes)
    # What the edge does for the bytes passes while the link carries them, as in `phases`.
    return (max(transfer_s(up_bytes, rates.up_bytes_per_s) + rates.latency_s, up_bytes * costs.edge_s_per_byte)
            + max(transfer_s(down_bytes, rates.down_bytes_per_s) + rates.latency_s, down_bytes * costs.edge_s_per_byte)
            + costs.edge_s_per_batch)
