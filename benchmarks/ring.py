"""A training step in a ring of real processes against plain `DistributedDataParallel` over gloo, in the same processes.

Every entry trains the same model from the same weights on the same batches with one thread per process. Entries take
turns: some steps of one, the same steps of the next, round after round. A figure is the median of the rounds, a ratio
the median of the rounds' ratios, so that other work on the machine slows both sides. Weights must equal DDP's within
1e-6 after the first step (training amplifies different rounding later) and have the same bits on all members at the
end; compressed gradients only need the latter.

On loopback, bandwidth is nearly free and all members share this machine's cores, so the cost of the exchange itself is
visible. The gain of overlap and compression is visible between members behind links of 400 Mbit/s. There the measured
steps are also compared with the simulator's (F7), which gets the passes of one member alone. This needs user
namespaces; `peers` says if they are missing.
"""

import statistics
from collections.abc import Callable, Sequence
from os import getloadavg

import torch

from benchmarks.harness import Row, peer_notes
from benchmarks.ring_contest.launch import on_link, on_loopback
from benchmarks.ring_contest.plan import Contest, Entry, Times
from socflower.cluster import StepCost
from socflower.hierarchy import Exchange, GradientExchange, gradient_coding, step_graph
from socflower.peers.ring.bucket_exchange import BucketExchange
from socflower.sim import EventClock
from socflower.workloads.models.classifiers import build_model
from tests.testbed.prediction import plan_of
from tests.testbed.testbed import missing
from tests.testbed.topology import Rack

NUM_BUCKETS = 4
LINK_BIT_PER_S = 400_000_000
TOLERANCE = 1e-6
_PEER = "torch DistributedDataParallel, gloo"
_PREDICTED_STEPS = 20

DDP = Entry(name="DDP", transport="ddp")
ALONE = Entry(name="a member on its own", transport="none")
GLOO_WHOLE = Entry(name="gloo, 1 bucket", transport="gloo")
GLOO = Entry(name=f"gloo, {NUM_BUCKETS} buckets", transport="gloo", num_buckets=NUM_BUCKETS)
GRPC = Entry(name=f"grpc, {NUM_BUCKETS} buckets", transport="grpc", num_buckets=NUM_BUCKETS)
TLS = Entry(
    name=f"grpc with TLS, {NUM_BUCKETS} buckets",
    transport="grpc",
    num_buckets=NUM_BUCKETS,
    tls=True,
)
COMPRESSED = tuple(
    Entry(
        name=f"gloo, {NUM_BUCKETS} buckets, {name}",
        transport="gloo",
        num_buckets=NUM_BUCKETS,
        compression=name,
    )
    for name in ("fp16", "int8", "dgc")
)


def run(quick: bool = False) -> list[Row]:
    """Return rows of step times, processor times, bytes sent by a member, and simulated steps."""
    load_before = list(getloadavg())
    peer_notes["DistributedDataParallel"] = (
        f"torch {torch.__version__}, backend gloo, all settings as they come; SGD with "
        "momentum, channels_last and one thread a process on both sides"
    )
    peer_notes["link"] = (
        missing() or f"{LINK_BIT_PER_S / 1e6:.0f} Mbit/s in each direction, network namespaces"
    )
    uncompressed = (DDP, GLOO_WHOLE, GLOO, GRPC, TLS)
    rounds = 3 if quick else 11
    rows = []
    for model, samples, num_members, steps in (
        ("lenet5", 32, 2, 20),
        ("vgg11", 8, 2, 2),
        ("resnet18", 4, 2, 1),
        ("lenet5", 32, 4, 20),
        ("vgg11", 4, 4, 1),
    )[: 2 if quick else None]:
        contest = Contest(
            model=model,
            samples=samples,
            entries=uncompressed,
            rounds=rounds,
            steps=steps,
            interface="lo",
        )
        place = f"{model}, {num_members} members x {samples} samples, loopback"
        times = on_loopback(contest, num_members)
        rows += _step_rows(place, contest, times) + _cpu_rows(place, contest, times)
    if missing() is None:
        rows += _on_link("vgg11", 64, 2, rounds=3 if quick else 7, steps=1)
        if not quick:
            rows += _on_link("vgg11", 32, 4, rounds=5, steps=1)
            rows += _on_link("lenet5", 64, 2, rounds=rounds, steps=20)
    peer_notes["load_average"] = {"before": load_before, "after": list(getloadavg())}
    return rows


def _on_link(model: str, samples: int, num_members: int, *, rounds: int, steps: int) -> list[Row]:
    entries = (DDP, GLOO_WHOLE, GLOO, GRPC, TLS, *COMPRESSED, ALONE)
    contest = Contest(
        model=model, samples=samples, entries=entries, rounds=rounds, steps=steps, interface="eth0"
    )
    place = f"{model}, {num_members} members x {samples} samples, {LINK_BIT_PER_S / 1e6:.0f} Mbit/s"
    times = on_link(contest, num_members, LINK_BIT_PER_S)
    return [
        *_step_rows(place, contest, times),
        *_simulated_rows(place, contest, times, num_members),
        *_byte_rows(place, contest, times, num_members),
    ]


def _step_rows(place: str, contest: Contest, times: Sequence[Times]) -> list[Row]:
    """Return rows of a step's time until the last member has finished."""
    rows = [
        _row(f"{place}: {entry.name}", own.step_s, times[0].step_s, "ms", _is_right(entry, own))
        for entry, own in zip(contest.entries, times, strict=True)
        if entry not in (DDP, ALONE)
    ]
    whole, parts = (times[contest.entries.index(entry)] for entry in (GLOO_WHOLE, GLOO))
    return [
        *rows,
        _row(
            f"{place}: gloo, overlap",
            parts.step_s,
            whole.step_s,
            "ms",
            _is_right(GLOO, parts) and _is_right(GLOO_WHOLE, whole),
            peer="gloo, 1 bucket",
        ),
    ]


def _cpu_rows(place: str, contest: Contest, times: Sequence[Times]) -> list[Row]:
    """Return rows of a member's processor time for a step, which other processes hardly change."""
    return [
        _row(
            f"{place}: {entry.name}, processor time",
            own.cpu_s,
            times[0].cpu_s,
            "ms",
            _is_right(entry, own),
        )
        for entry, own in zip(contest.entries, times, strict=True)
        if entry != DDP
    ]


def _byte_rows(place: str, contest: Contest, times: Sequence[Times], num_members: int) -> list[Row]:
    """Return rows of the bytes that a member sends in a step, with headers and acknowledgements."""
    model = build_model(contest.model, in_channels=3, image_size=32, num_classes=10, seed=1)
    rows = []
    for entry, own in zip(contest.entries, times, strict=True):
        if entry == GLOO or entry in COMPRESSED:
            exchange = BucketExchange(model, entry.num_buckets)
            described = GradientExchange(coding=gradient_coding(entry.compression))
            limit = sum(
                described.wire_bytes(Exchange(num_bytes=4.0 * size, num_tensors=1), num_members)
                for size in exchange.bucket_sizes
            )
            exchange.close()
            rows.append(
                _row(
                    f"{place}: {entry.name}, bytes sent",
                    own.sent_bytes,
                    times[0].sent_bytes,
                    "bytes",
                    _is_right(entry, own),
                    scale=1.0,
                    limit=limit,
                )
            )
    return rows


def _simulated_rows(
    place: str, contest: Contest, times: Sequence[Times], num_members: int
) -> list[Row]:
    """Return rows of measured steps against simulated ones (F7), with the passes of a member on its own."""
    model = build_model(contest.model, in_channels=3, image_size=32, num_classes=10, seed=1)
    parameters = list(model.parameters())
    alone = times[contest.entries.index(ALONE)]
    forward_s, backward_s = statistics.median(alone.forward_s), statistics.median(alone.backward_s)
    cost = StepCost(
        forward_s=forward_s,
        backward_s=backward_s,
        processor="cpu",
        update_s=max(statistics.median(alone.step_s) - forward_s - backward_s, 0.0),
    )
    cluster = Rack(
        slots_per_board=(num_members,),
        soc_bit_per_s=LINK_BIT_PER_S,
        uplink_bit_per_s=LINK_BIT_PER_S,
    ).cluster()
    plan = plan_of(cluster, [range(num_members)])
    exchange = Exchange(
        num_bytes=sum(parameter.nbytes for parameter in parameters), num_tensors=len(parameters)
    )
    rows = []
    for entry in (GLOO_WHOLE, GLOO):
        graph = step_graph(
            plan,
            dict.fromkeys(plan.participants, cost),
            exchange,
            overlap_buckets=entry.num_buckets,
        )
        simulated_s = (
            EventClock(cluster).run(graph, repeat=_PREDICTED_STEPS).duration_s / _PREDICTED_STEPS
        )
        own = times[contest.entries.index(entry)]
        rows.append(
            _row(
                f"{place}: {entry.name}, simulated",
                own.step_s,
                [simulated_s] * len(own.step_s),
                "ms",
                _is_right(entry, own),
                peer="simulator",
            )
        )
    return rows


def _row(
    case: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    unit: str,
    ok: bool,
    *,
    peer: str = _PEER,
    scale: float = 1e3,
    limit: float | None = None,
) -> Row:
    median: Callable[[Sequence[float]], float] = statistics.median
    return Row(
        case=case,
        ours=scale * median(ours),
        peer=peer,
        peer_value=scale * median(theirs),
        unit=unit,
        ratio=median([their / own for own, their in zip(ours, theirs, strict=True)]),
        limit=limit,
        ok=ok,
    )


def _is_right(entry: Entry, times: Times) -> bool:
    return times.same_on_all and (entry.compression != "none" or times.difference <= TOLERANCE)
