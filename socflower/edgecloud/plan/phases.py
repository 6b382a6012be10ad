"""The four phases of a batch in a split training, T1 to T4: edge, up link, cloud, down link."""

import math
from dataclasses import dataclass

from socflower.cluster.cost_model import BACKWARD_TO_FORWARD
from socflower.edgecloud.links.bandwidth_profile import LinkRates
from socflower.edgecloud.plan.cuts import CutCost, SplitCosts, SplitPlan
from socflower.errors import ConfigError

FORWARD_SHARE = 1.0 / (1.0 + BACKWARD_TO_FORWARD)
"""The share of the forward pass in a training step; it estimates a replay in the cloud, where only totals are known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """The seconds that each of the four pipeline stages takes for one batch; infinite over a dead link."""

    # T1: forward, replay, backward, update, codec, and the processor's share of the transfers.
    edge_s: float
    # T2 to T4.
    up_s: float = 0.0
    cloud_s: float = 0.0
    down_s: float = 0.0
    # Of both directions together; latency delays a batch, but occupies no stage.
    latency_s: float = 0.0
    # The part of `edge_s` that overlaps with the transfer: the edge's transfer work.
    hidden_s: float = 0.0

    @property
    def longest_s(self) -> float:
        """T_M: the shortest possible time between two batches."""
        return max(self.edge_s, self.up_s, self.cloud_s, self.down_s)

    @property
    def total_s(self) -> float:
        """T_Σ: from the beginning of a batch to its update at the front half, without queueing."""
        return self.edge_s - self.hidden_s + self.up_s + self.cloud_s + self.down_s + self.latency_s


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """The seconds and bytes of one batch at every stage, under a deployment."""

    split_plan: SplitPlan
    # At the front half: forward pass and encoding.
    forward_s: float
    # At the back half.
    step_s: float
    # At the front half: replay, backward pass, update.
    apply_s: float
    feature_bytes: float
    gradient_bytes: float
    # Whether anything in front of the cut is trained.
    trains: bool
    # Of the front half's processor, while the link carries the features and the gradient; the processor spends both
    # right after the forward pass.
    sending_s: float = 0.0
    receiving_s: float = 0.0

    @property
    def alone(self) -> bool:
        """Whether the edge does the whole training step."""
        return self.split_plan.cut is None


def batch_times(costs: SplitCosts, split_plan: SplitPlan, *, reverse: bool = False) -> BatchTimes:
    """Return the times of a batch under a deployment (paper §4.4, Eq. 9).

    The front half does a forward pass, a second one for the replay if gradients may be late (window > 0, F22), and a
    backward pass. A frozen front half does only the forward pass, and an empty message comes back. The codec counts at
    the edge; its time in the cloud is neglected (paper §5.2). The cloud's processor serialises messages too, between
    the link and the step. Without a cut the edge does everything.

    In a `reverse` split the back half is at the edge: features are sent down and gradients up, `edge_*` of a cut are
    the edge's back half and `cloud_s` the front half, whose replay costs another forward pass: a third of `cloud_s`,
    or nothing if it is frozen, since it then has no backward pass.

    Raises `ConfigError` for a cut that the model does not have.
    """
    if split_plan.cut is None:
        return BatchTimes(split_plan, costs.edge_only_s, 0.0, 0.0, 0.0, 0.0, True)
    cut = cut_cost(costs, split_plan.cut)
    feature_bytes = costs.feature_bytes(split_plan.cut, split_plan.bits)
    gradient_bytes = costs.gradient_bytes(split_plan.cut)
    replays = split_plan.window > 0 and cut.front_trains
    codec_s = cut.feature_elements * costs.codec_s_per_element.get(split_plan.bits, 0.0)
    # One message goes up, one down.
    features_s, gradient_s = (
        costs.cloud_s_per_batch / 2.0 + num_bytes * costs.cloud_s_per_byte
        for num_bytes in (feature_bytes, gradient_bytes)
    )
    if reverse:
        share = FORWARD_SHARE if cut.front_trains else 1.0
        pass_s = cut.cloud_s * share
        forward_s = pass_s + features_s
        apply_s = cut.cloud_s * (1.0 - share) + (pass_s if replays else 0.0) + gradient_s
        passes_s = cut.edge_forward_s + cut.edge_backward_s + codec_s
        bytes_s = (feature_bytes + gradient_bytes) * costs.edge_s_per_byte
        step_s = passes_s + bytes_s + costs.edge_s_per_batch
        s_per_byte = 0.0
    else:
        message_s = costs.edge_s_per_batch / 2.0
        forward_s = cut.edge_forward_s + codec_s + message_s
        decode_s = costs.decode_s_per_element.get(costs.gradient_bits, 0.0)
        backward_s = cut.edge_backward_s + cut.feature_elements * decode_s
        replay_s = cut.replay_s if replays else 0.0
        apply_s = (backward_s if cut.front_trains else 0.0) + replay_s + message_s
        step_s = cut.cloud_s + features_s + gradient_s
        s_per_byte = costs.edge_s_per_byte
    return BatchTimes(
        split_plan,
        forward_s,
        step_s,
        apply_s,
        feature_bytes,
        gradient_bytes,
        cut.front_trains,
        feature_bytes * s_per_byte,
        gradient_bytes * s_per_byte,
    )


def phases(
    costs: SplitCosts, split_plan: SplitPlan, rates: LinkRates, *, reverse: bool = False
) -> Phases:
    """Return the seconds of a batch's phases under a deployment; see `batch_times`.

    The edge's processor works on one part of a transfer while the link carries another: this occupies the processor,
    but a batch waits only for the longer of the two, not for their sum.
    """
    times = batch_times(costs, split_plan, reverse=reverse)
    if times.alone:
        return Phases(edge_s=times.forward_s)
    up_bytes = times.feature_bytes
    down_bytes = times.gradient_bytes
    edge_s = times.forward_s + times.apply_s + times.sending_s + times.receiving_s
    cloud_s = times.step_s
    if reverse:
        up_bytes, down_bytes, edge_s, cloud_s = down_bytes, up_bytes, cloud_s, edge_s
    up_s = transfer_s(up_bytes, rates.up_bytes_per_s)
    down_s = transfer_s(down_bytes, rates.down_bytes_per_s)
    hidden_up_s = min(times.sending_s, up_s + rates.latency_s)
    hidden_down_s = min(times.receiving_s, down_s + rates.latency_s)
    return Phases(
        edge_s=edge_s,
        up_s=up_s,
        cloud_s=cloud_s,
        down_s=down_s,
        latency_s=2.0 * rates.latency_s,
        hidden_s=hidden_up_s + hidden_down_s,
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
    most = len(costs.cuts) - 1
    if not 0 <= cut <= most:
        raise ConfigError(f"model {costs.model} has no cut {cut}; its cuts are 0 to {most}")
    return costs.cuts[cut]
