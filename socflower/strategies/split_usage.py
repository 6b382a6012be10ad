"""What a split training in virtual time took of the edges: seconds, joules and bytes, as every report counts them."""

from collections.abc import Sequence

from socflower.cluster import Activity, Device, Tier, Usage
from socflower.edgecloud.timeline import Timeline


def usage_of(timeline: Timeline, devices: Sequence[Device]) -> Usage:
    """Return the edges' usage; the cloud's seconds are in the timeline, and its joules are others' to count.

    An edge draws its active watts while it computes, its idle watts otherwise, and on top of either its network's
    while bytes are under way.
    """
    soc_seconds = dict.fromkeys((Activity.COMPUTE, Activity.IDLE), 0.0)
    energy_j = dict.fromkeys((Activity.COMPUTE, Activity.SYNCHRONISATION, Activity.IDLE), 0.0)
    num_bytes = 0.0
    for party, device in zip(timeline.parties, devices, strict=True):
        processor = device.processor(device.default_processor)
        soc_seconds[Activity.COMPUTE] += party.compute_s
        soc_seconds[Activity.IDLE] += party.idle_s
        energy_j[Activity.COMPUTE] += party.compute_s * processor.active_w
        network_s = min(party.sending_s + party.receiving_s, timeline.duration_s)
        energy_j[Activity.SYNCHRONISATION] += network_s * device.network_w
        energy_j[Activity.IDLE] += party.idle_s * device.idle_w
        num_bytes += party.up_bytes + party.down_bytes
    return Usage(duration_s=timeline.duration_s, soc_seconds=soc_seconds, energy_j=energy_j,
                 num_bytes={Tier.WAN: num_bytes})
