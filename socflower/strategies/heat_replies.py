"""What clients with the heat mod tell of their devices beside their work."""

from flwr.app import Message

from socflower.cluster.protocol import HEAT, HeatReport
from socflower.errors import ConfigError
from socflower.strategies.replies import ReplyEvent


def heat_events(reply: Message, ident: int, where: str) -> list[ReplyEvent]:
    """Return an event for a device that heat, users or its battery have held back; `where` names it.

    A record that cannot be read is an event as well: what a device says of its heat must not end a training.
    """
    record = reply.content.config_records.get(HEAT) if reply.has_content() else None
    if record is None:
        return []
    try:
        report = HeatReport.decode(record)
    except (ConfigError, TypeError, ValueError) as error:
        return [ReplyEvent(kind="hot", group_id=ident, text=f"{where}: its heat record cannot be read ({error})")]
    if not report.triggered:
        return []
    told = [
        f"at {report.temperature_c:.1f} C" if report.temperature_c is not None else "",
        f"at most {report.peak_c:.1f} C" if report.peak_c is not None else "",
        f"clocks at {report.clock_factor:.0%}" if report.clock_factor is not None else "",
        f"held down for {report.throttled_s:.0f} s" if report.throttled_s else "",
        f"gave {report.share:.0%} of its power" if report.share < 1.0 else "",
        f"others use {report.user_load:.0%}" if report.user_load else "",
        f"waited {report.paused_s:.0f} s" if report.paused_s else "",
    ]
    return [ReplyEvent(kind="hot", group_id=ident, text=f"{where}: {', '.join(filter(None, told)) or 'slow clocks'}")]
