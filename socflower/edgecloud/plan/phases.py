"""The four phases of a batch in a split training, T1 to T4: edge, up link, cloud, down link."""

import math
from dataclasses import dataclass

from socflower.cluster.cost_model import BACKWARD_TO_FORWARD
from socflower.edgecloud.links.bandwidth_profile import LinkRates
from socflower.edgecloud.plan.cuts import CutCost, SplitCosts, SplitPlan
from socflower.errors import ConfigError

FORWARD_SHARE = 1.0 / (1.0 + BACKWARD_TO_FORWARD)
"""The share of the forward pass in a training step; estimates a replay in the cloud, of which only the total is known.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """The seconds that each of the four pipeline stages takes for one batch; infinite where a link is dead."""

    edge_s: float  # T1: forward, replay, backward, update, codec, and the processor's share of the transfers
    up_s: float = 0.0  # T2
    cloud_s: float = 0.0  # T3
    down_s: float = 0.0  # T4
    latency_s: float = 0.0  # of both directions together; it delays a batch, but occupies no stage
    hidden_s: float = 0.0  # of edge_s: the part of the edge's transfer work that overlaps with the transfer

    def __post_init__(self) -> None:
        for key in ("edge_s", "up_s", "cloud_s", "down_s", "latency_s", "hidden_s"):
            if not getattr(self, key) >= 0:
                raise ConfigError(f"phases: {key} = {getattr(self, key)} must be 0 or more")
        if self.hidden_s > self.edge_s:
            raise ConfigError(f"phases: hidden_s = {self.hidden_s} is a part of edge_s = {self.edge_s} and cannot be "
                              "more")

    @property
    def longest_s(self) -> float:
        """T_M: the shortest possible time between two batches."""
        return max(self.edge_s, self.up_s, self.cloud_s, self.down_s)

    @property
    def total_s(self) -> float:
        """T_Σ: from the beginning of a batch to its update at the front half, without queueing."""
        return self.edge_s - self.hidden_s + self.up_s + self.cloud_s + self.down_s + self.latency_s


def phases(costs: SplitCosts, split_plan: SplitPlan, rates: LinkRates, *, reverse: bool = False) -> Phases:
    """Return the seconds of a batch's phases under a deployment (paper §4.4, Eq. 9).

    The front half does a forward pass, a second one for the replay if gradients may be late (window > 0), and a
    backward pass. A frozen front half does only the forward pass, and an empty message comes back. The codec runs at
    the edge, on what it encodes or decodes; its time in the cloud is neglected (paper §5.2). Without a cut the edge
    does everything. The edge's processor works on one part of a transfer while the link carries another: this occupies
    the processor, but a batch waits only for the longer of the two, not for their sum.

    In a `reverse` split the back half is at the edge: features are sent down and gradients up, `edge_*` of a cut are
    the edge's back half and `cloud_s` the front half, whose replay costs another forward pass: a third of `cloud_s`,
    or nothing where it is frozen, since it then has no backward pass.

    Raises ConfigError for a cut that the model does not have.
    """
    if split_plan.cut is None:
        return Phases(edge_s=costs.edge_only_s)
    cut = cut_cost(costs, split_plan.cut)
    features_bytes = costs.feature_bytes(split_plan.cut, split_plan.bits)
    gradients_bytes = costs.gradient_bytes(split_plan.cut)
    up_bytes, down_bytes = (gradients_bytes, features_bytes) if reverse else (features_bytes, gradients_bytes)
    replays = split_plan.window > 0 and cut.front_trains
    up_s, down_s = transfer_s(up_bytes, rates.up_bytes_per_s), transfer_s(down_bytes, rates.down_bytes_per_s)
    return Phases(
        edge_s=cut.edge_forward_s * (2.0 if replays and not reverse else 1.0)
        + (cut.edge_backward_s if cut.front_trains or reverse else 0.0)
        + cut.feature_elements * costs.codec_s_per_element.get(split_plan.bits, 0.0)
        + (up_bytes + down_bytes) * costs.edge_s_per_byte + costs.edge_s_per_batch,
        up_s=up_s,
        cloud_s=cut.cloud_s * (1.0 + FORWARD_SHARE if replays and reverse else 1.0),
        down_s=down_s,
        latency_s=2.0 * rates.latency_s,
        hidden_s=0.0 if reverse else (min(up_bytes * costs.edge_s_per_byte, up_s + rates.latency_s)
                                      + min(down_bytes * costs.edge_s_per_byte, down_s + rates.latency_s)),
    )


def window_limit(costs: SplitCosts, split_plan: SplitPlan) -> float:
    """Return how many batches may be in flight beyond the first: K; infinity for an edge that trains alone.

    With a frozen front half no gradient is stale (Type 2 transfer), but batches in flight take memory at both ends,
    and K bounds that too.
    """
    if split_plan.cut is None:
        return math.inf
    cut_cost(costs, split_plan.cut)
    return float(split_plan.window)


def transfer_s(num_bytes: float, bytes_per_s: float) -> float:
    """Return the seconds of a transfer; infinity over a lost link, 0 for no bytes."""
    if num_bytes == 0:
        return 0.0
    return num_bytes / bytes_per_s if bytes_per_s > 0 else math.inf


def cut_cost(costs: SplitCosts, cut: int) -> CutCost:
    """Return the costs of a cut; `ConfigError` names the range if the model has no such cut."""
    if not 0 <= cut < len(costs.cuts):
        raise ConfigError(f"model {costs.model}: has no cut {cut}; its cuts are 0 to {len(costs.cuts) - 1}")
    return costs.cuts[cut]
