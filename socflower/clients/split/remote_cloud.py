"""An edge's part of a round with a remote cloud: its half, the stream, and the report."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.app import Context

from socflower.clients.node_config import switch
from socflower.clients.split.in_process import (
    SpanOutcome,
    SplitSettings,
    load_half,
    num_samples,
    party_batches,
    resume,
    resumed_halves,
)
from socflower.clients.split.saved_halves import SplitState
from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile
from socflower.edgecloud.links.shaping import TokenBucket
from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.plan.party import Decider
from socflower.edgecloud.runtime.edge_connection import EdgeConnection
from socflower.edgecloud.runtime.front_loop import FrontPlan, MeasuredDecider
from socflower.edgecloud.runtime.half_state import LoopReport, mean_loss
from socflower.edgecloud.runtime.span_training import BatchSpan, train_back, train_front
from socflower.edgecloud.split_program import Arrays, PlacedHalf, SplitProgram, starting_at
from socflower.errors import ConfigError
from socflower.plain_numbers import plain_numbers
from socflower.quantities import counted
from socflower.training.hang_watch import end_process, watch_hangs
from socflower.wire.folders import temporary_folder
from socflower.wire.secure_channel import Tls
from socflower.wire.split_message_keys import OWN, SplitReport, SplitTask


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class CloudLink:
    """How a node connects to the cloud.

    `bandwidth_profile` limits the rate of the link, as scenarios do on one machine; `decider` may move the cut. The
    edge saves its half in `folder` at every checkpoint (in a temporary one by default), so that it can roll back after
    the cloud was killed.
    """

    tls: Tls | None = None
    insecure: bool = False
    bandwidth_profile: BandwidthProfile | None = None
    decider: Decider | None = None
    folder: Path | None = None
    heartbeat_s: float = 5.0
    give_up_s: float = 300.0


def cloud_link(context: Context) -> CloudLink:
    """Return the cloud settings of a node config: `cloud-ca`, `cloud-certificate`, `cloud-key` (PEM files),
    `cloud-insecure` (true: plain text on public addresses too), `cloud-folder` (for checkpoints; by default a
    temporary one).
    """
    config = context.node_config
    folder = config.get("cloud-folder")
    return CloudLink(
        tls=Tls.from_keys(config, "cloud"),
        insecure=switch(config, "cloud-insecure"),
        folder=Path(str(folder)) if folder else None,
    )


def train_with_cloud(
    program: SplitProgram,
    task: SplitTask,
    arrays: Arrays,
    data: Sequence[Any],
    state: SplitState,
    settings: SplitSettings,
    link: CloudLink,
) -> SpanOutcome:
    """Train the task's span with the edge's half here and the other half in the cloud."""
    if len(task.parties) != 1:
        raise ConfigError(
            f"split client: a message for parties {list(task.parties)}; with a cloud each edge gets its "
            "own"
        )
    party, offset = task.parties[0], task.session_first
    batches = party_batches(program, task, party, data[0], first=offset)
    own = starting_at(program, offset)
    half: PlacedHalf[Any]
    if task.reverse:
        half = own.back(task.cuts[0], batches)
        resumed = resumed_halves(task, [], [half])
    else:
        half = own.front(party, task.cuts[0], batches)
        resumed = resumed_halves(task, [half], [])
    trained: Any = half.half
    events = resume(resumed, state)
    load_half(program, task, half, arrays)
    # The cloud, and edges that take turns with this one, would wait for a half that hangs.
    watch_hangs(end_process)
    span = BatchSpan(first_batch=task.first_batch - offset, num_batches=task.num_batches)
    with _connected(task, link) as connection, _checkpoint_folder(task, link) as folder:
        if task.reverse:
            report = train_back(connection, trained, span, folder=folder)
        else:
            plan = front_plan(task, settings, link)
            report = train_front(connection, trained, span, plan, folder=folder)
    if resumed:
        state.save([one.half.save() for one in resumed], [half.half.cut])
    return SpanOutcome(
        arrays=half.arrays(),
        mean_loss=mean_loss(report),
        report=_report(report, half.half.cut, task, events),
        num_samples=num_samples(task, batches),
    )


@contextmanager
def _connected(task: SplitTask, link: CloudLink) -> Iterator[EdgeConnection]:
    """Connect to the task's session in the cloud, with the rates of the link."""
    profile = link.bandwidth_profile
    buckets: list[TokenBucket | None] = [None, None]
    if profile is not None:
        buckets = [TokenBucket(profile, "up"), TokenBucket(profile, "down")]
    connection = EdgeConnection(
        task.address,
        run_id=task.run,
        token=task.token,
        fingerprint=task.fingerprint,
        party=0 if task.mode == OWN else task.parties[0],
        tls=link.tls,
        insecure=link.insecure,
        up=buckets[0],
        down=buckets[1],
        heartbeat_s=link.heartbeat_s,
        give_up_s=link.give_up_s,
    )
    try:
        yield connection
    finally:
        connection.close()
        for bucket in buckets:
            if bucket is not None:
                bucket.close()


def _checkpoint_folder(task: SplitTask, link: CloudLink) -> AbstractContextManager[Path]:
    if link.folder is None:
        return temporary_folder("socflower-checkpoints-")
    return nullcontext(link.folder / task.run)


def front_plan(
    task: SplitTask, settings: SplitSettings, link: CloudLink | None = None
) -> FrontPlan:
    """Return the settings of a front half's loop, at the edge or, in a reverse split, in the cloud."""
    schedule, offset, decide = settings.window, task.session_first, None
    if link is not None and link.decider is not None:
        profile = link.bandwidth_profile
        rates = None if profile is None else profile.rates(0.0)
        decide = MeasuredDecider(link.decider, rates, offset)
    plan = FrontPlan(
        split_plan=SplitPlan(cut=task.cuts[0], bits=task.bits[0], window=task.windows[0]),
        coding=settings.coding(task.gradient_bits),
        checkpoint_batches=settings.checkpoint_batches,
        decide=decide,
    )
    if schedule is None:
        return plan
    return replace(
        plan,
        window_of=lambda batch: schedule.window(offset + batch, task.total_batches),
        in_flight_limit=lambda batch: schedule.limit(offset + batch, task.total_batches),
    )


def _report(report: LoopReport, cut: int, task: SplitTask, events: tuple[str, ...]) -> SplitReport:
    stale = Counter(report.staleness.values())
    lines = list(events)
    for move in report.moves:
        batch = task.session_first + move.batch
        lines.append(
            f"moved the cut from {move.old} to {move.new} before batch {batch}, {move.seconds:.2f} s"
        )
    if report.num_streams > 1:
        lines.append(f"the link was lost and restored {counted(report.num_streams - 1, 'time')}")
    if report.num_rollbacks:
        lines.append(f"rolled back to the last checkpoint {counted(report.num_rollbacks, 'time')}")
    bits = task.bits[0] if report.split_plan is None else report.split_plan.bits
    return SplitReport(
        cut=cut,
        bits=bits,
        duration_s=report.compute_s + report.wait_s,
        compute_s=report.compute_s,
        up_bytes=report.sent_bytes,
        down_bytes=report.received_bytes,
        staleness=tuple(stale[value] for value in range(max(stale, default=-1) + 1)),
        reconnects=max(0, report.num_streams - 1),
        events=tuple(lines),
    )
