"""Reads what mixed-precision clients report of an interval: their alphas, and accelerators that failed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, cast

from flwr.app import ConfigRecord, Message, MetricRecord

from socflower.cluster import Pricing
from socflower.hierarchy import Phase
from socflower.precision.processor_costs import MixedPricing
from socflower.strategies.replies import BACKEND_DROPPED
from socflower.strategies.reply_events import ReplyEvent
from socflower.wire.message_keys import (
    ALPHA,
    ALPHA_STEPS,
    COPY_SIMILARITY,
    CPU_SHARE,
    EVENTS,
    GROUP_ID,
    METRICS,
)


def mixed_phases(replies: Sequence[Message], num_steps: int, pricing: MixedPricing) -> list[Phase]:
    """Return the pricing of each group that replied, phase by phase, by the alpha of each phase (F9, F11).

    A group in which an accelerator failed is priced by the CPUs' share of the samples over the whole interval.
    """
    alphas: dict[int, list[tuple[int, float]]] = {}  # by group: (first step, alpha)
    fixed: dict[int, Pricing] = {}
    cuts = {0, num_steps}
    for reply in replies:
        metrics = cast(MetricRecord, reply.content[METRICS])
        group_id = group_id_of(reply)
        if EVENTS in reply.content.config_records:
            share = float(cast(float, metrics.get(CPU_SHARE, 1.0)))
            fixed[group_id] = replace(pricing, cpu_share=share)
        elif key := next((key for key in (ALPHA, COPY_SIMILARITY) if key in metrics), None):
            steps = [round(count) for count in cast(list[float], metrics[ALPHA_STEPS])]
            starts = [0, *accumulate(steps)][:-1]
            alphas[group_id] = list(zip(starts, cast(list[float], metrics[key]), strict=True))
            cuts.update(start for start in starts if start < num_steps)
    return [
        (
            end - begin,
            fixed
            | {
                group_id: pricing.with_alpha(_alpha_at(begin, held))
                for group_id, held in alphas.items()
            },
        )
        for begin, end in pairwise(sorted(cuts))
    ]


def group_id_of(reply: Message) -> int:
    """Return the group id in a reply's metrics."""
    return int(cast(int, cast(MetricRecord, reply.content[METRICS])[GROUP_ID]))


def mean_metric(replies: Sequence[Message], key: str) -> float | None:
    """Return the mean of a metric, or of its list, over the replies that have it."""
    values = [list(_numbers(reply, key)) for reply in replies]
    means = [sum(numbers) / len(numbers) for numbers in values if numbers]
    return sum(means) / len(means) if means else None


def mixed_figures(replies: Sequence[Message]) -> dict[str, Any]:
    """Return the means of mixed precision for a `RoundReport`."""
    keys = {"alpha": ALPHA, "copy_similarity": COPY_SIMILARITY, "cpu_share": CPU_SHARE}
    return {name: mean_metric(replies, key) for name, key in keys.items()}


def client_events(
    reply: Message, group_id: int, where: str, kind: str = BACKEND_DROPPED
) -> list[ReplyEvent]:
    """Return events for the failures that a client recovered from itself; `where` names the client."""
    record = reply.content.config_records.get(EVENTS, ConfigRecord({"texts": []}))
    return [
        ReplyEvent(kind=kind, group_id=group_id, text=f"{where}: {text}")
        for text in cast(list[str], record["texts"])
    ]


def _alpha_at(step: int, held: Sequence[tuple[int, float]]) -> float:
    return [alpha for start, alpha in held if start <= step][-1]


def _numbers(reply: Message, key: str) -> Iterator[float]:
    value = cast(Mapping[str, float | list[float]], reply.content[METRICS]).get(key)
    if isinstance(value, list):
        yield from value
    elif value is not None:
        yield value
